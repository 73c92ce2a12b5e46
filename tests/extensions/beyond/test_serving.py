"""Training is compared with serving before it begins: models that agree, that cannot be compared, and one that caches something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from e2e_layers import llama
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvcompile
from kvcompile.errors import ServedOtherwise
from kvcompile.extensions.beyond.learning import serving
from kvcompile.extensions.beyond.learning.quantizer import QuantizerConfig
from kvcompile.extensions.beyond.learning.settings import LearnSettings
from kvcompile.schemes import Beyond
from kvcompile.settings import Inner

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

RULE = QuantizerConfig(2, torch.float16, 0.027)


def ids() -> torch.Tensor:
    """Words of two rows."""
    return torch.randint(1, 64, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_whose_cache_holds_what_it_attends_to_agrees(attention: str) -> None:
    share = serving.compare(llama(2, attention, head_dim=32), ids(), Beyond(2), RULE)
    assert share is not None and share < 1e-3


def test_a_model_that_caches_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys are bent behind the cache: without a cache the bent ones look like those that it would hold."""

    def bent(module: Any, q: torch.Tensor, k: torch.Tensor, *rest: Any, **given: Any) -> Any:
        return sdpa_attention_forward(module, q, k.tanh(), *rest, **given)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", bent)
    with pytest.raises(ServedOtherwise, match=r"caches other values than it attends to") as raised:
        kvcompile.learn(llama(head_dim=32), [ids()], Beyond(2), settings=LearnSettings(steps=1, inner=Inner.EAGER), quiet=True)
    assert float(str(raised.value).split("found ")[1].split()[0]) > 0.5


def test_a_module_without_such_a_cache_is_not_compared() -> None:
    assert serving.compare(torch.nn.Linear(4, 4), ids(), Beyond(2), RULE) is None
