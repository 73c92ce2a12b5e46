"""Policies by layer: what is left out, what is misspelled, what matches nothing, and what the report says where nothing was compiled."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_layers import Buffered, visible
from e2e_models import Probed, cache_of, inputs, llama
from torch import nn

import kvcompile
from kvcompile import errors


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


def decode(model: Any, call: Any, counts: tuple[int, ...] = (6, 1, 1)) -> list[torch.Tensor]:
    """Logits of a prompt and steps of a model with a static cache."""
    cache, random = cache_of(model, "static"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        return [call(torch.randint(0, 60, (1, n), generator=random), past_key_values=cache).logits.clone() for n in counts]


def test_a_layer_can_be_left_out() -> None:
    model = llama(layers=2)
    backend = kvcompile.backend({"*": "int8", "model.layers.1.*": None}, inner="eager", strict=True)
    expected = decode(model, copy.deepcopy(model))
    found = decode(model, torch.compile(model, backend=backend))
    assert all((a - b).norm() <= 5e-2 * a.norm() for a, b in zip(expected, found, strict=True))
    assert all([site.path for site in graph.sites] == ["model.layers.0.self_attn"] for graph in backend.graphs)
    assert backend.graphs[0].left_out == ("model.layers.1.self_attn",) and not backend.report().refusals
    assert "1 left out by the policy" in str(backend.report())


def test_what_is_refused_can_be_left_out_too() -> None:
    module = Probed()
    with torch.no_grad():
        torch.compile(module, backend=kvcompile.backend({"*": None}, inner="eager", strict=True))(inputs(module)[0], torch.arange(7))


def test_all_left_out_is_the_model_itself() -> None:
    model = llama(layers=1)
    backend = kvcompile.backend({"*": None}, inner="eager")
    expected = decode(model, copy.deepcopy(model))
    found = decode(model, torch.compile(model, backend=backend))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(expected, found, strict=True))
    assert not backend.report().sites and not backend.report().allocated


@pytest.mark.parametrize(("policy", "error", "says"), [
    ({0: "int8"}, errors.LayerByNumber, r"model\.layers\.0\.\*"),
    ({"*": "int4", 3: None}, errors.LayerByNumber, "found 3"),
    ({"keys": "int8", "values": "int4"}, errors.UnknownHalf, "did you mean 'k'"),
    ({"key": "int8", "v": "int4"}, errors.UnknownHalf, "did you mean 'k'"),
    ({"K": "int8", "V": "int4"}, errors.UnknownHalf, "'k' and 'v'"),
    ({"k": "int8"}, errors.UnknownHalf, "'k' and 'v'"),
    ({"model.layers.0.*": {"k": "int8", "vals": "int4"}}, errors.UnknownHalf, "did you mean 'v'"),
    ({"*": {"key": "int8", "value": "int4"}}, errors.UnknownHalf, "did you mean 'k'"),
])
def test_what_cannot_be_meant_is_refused_at_once(policy: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        kvcompile.backend(policy)


def test_an_entry_that_matches_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = llama(layers=1)
    backend = kvcompile.backend({"*": "int8", "model.layer.0.*": "dense", "model.layers.0.*": "int4"}, inner="eager")
    with caplog.at_level(logging.WARNING, "kvcompile"):
        decode(model, torch.compile(model, backend=backend))
    said = [item.getMessage() for item in caplog.records if "matches none" in item.getMessage()]
    assert len(said) == 1 and "'model.layer.0.*'" in said[0] and "model.layers.0.self_attn" in said[0]
    assert backend.report().unmatched == ("model.layer.0.*",)
    assert "'model.layer.0.*' matches none" in " ".join(str(backend.report()).split())


class Layer(Buffered):
    """Causal attention over buffers."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        self.k_cache.index_copy_(2, pos, k)
        self.v_cache.index_copy_(2, pos, v)
        return self.close(F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=visible(pos, self.capacity)))


class Broken(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(batch=1), Layer(batch=1)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        x = self.first(x, pos)
        torch._dynamo.graph_break()
        return self.second(x, pos)


def test_an_entry_for_a_later_graph_is_not_told_too_early(caplog: pytest.LogCaptureFixture) -> None:
    """The second layer's entry matches nothing in the first graph."""
    module, backend = Broken(), kvcompile.backend({"*": "int8", "second": "dense"}, inner="eager")
    compiled = torch.compile(module, backend=backend)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "kvcompile"):
        compiled(torch.randn(1, 5, 64), torch.arange(5))
        compiled(torch.randn(1, 1, 64), torch.arange(5, 6))
    assert [site.scheme for graph in backend.graphs[:2] for site in graph.sites] == ["int8", "dense"]
    assert not [item for item in caplog.records if "matches none" in item.getMessage()]


def test_equal_refusals_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    module, backend = Probed(), kvcompile.backend("int8", inner="eager")
    compiled = torch.compile(module, backend=backend)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "kvcompile"):
        compiled(inputs(module)[0], torch.arange(7))
        compiled(inputs(module)[0][:, :1], torch.arange(7, 8))
    assert len(backend.graphs) > 1 and len(backend.report().refusals) > 1
    said = [item.getMessage() for item in caplog.records if "leaves an attention" in item.getMessage()]
    assert said and len(said) == len(set(said))


def test_a_backend_that_compiled_nothing_says_what_to_write() -> None:
    model, backend = llama(layers=1), kvcompile.backend("int8", inner="eager")
    torch.compile(model, backend=backend).generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, do_sample=False)
    assert "model.forward = torch.compile(model.forward, backend=b)" in " ".join(str(backend.report()).split())
