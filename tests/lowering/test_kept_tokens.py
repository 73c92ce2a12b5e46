"""The counts of a mask as Inductor makes them in a graph, against their definition."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

from kvcompile.lowering.ops.kept_tokens import RUN, kept_tokens

pytestmark = pytest.mark.compile

LIBRARY = torch.library.Library("kvcompile_kept", "DEF")
LIBRARY.define("kept(Tensor keep) -> Tensor")
LIBRARY.impl("kept", kept_tokens, "CompositeExplicitAutograd")


@pytest.fixture(scope="module", autouse=True)
def lowered() -> Iterator[None]:
    """The lowering of an operator of this file's own, as those of kernels ask for the counts on CUDA alone; no cache knows of it."""
    from kvcompile.lowering.host.inductor_api import register_lowering
    from kvcompile.lowering.host.kept_tokens import kept_tokens as counted

    register_lowering(torch.ops.kvcompile_kept.kept.default, type_promotion_kind=None)(lambda keep: counted(keep, RUN))
    with inductor_config.patch(force_disable_caches=True):
        yield


def layers(mask: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two layers that ask for the counts of one mask, a view of what is computed in the graph."""
    keep = (mask > 0)[:, 3:count]
    return torch.ops.kvcompile_kept.kept(keep) + 1, torch.ops.kvcompile_kept.kept(keep) * 2


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("tokens", [1, RUN, 3 * RUN, 3 * RUN + 5])
def test_counts_are_the_definitions_and_made_once(tokens: int, dynamic: bool, fresh_dynamo: None) -> None:
    mask = torch.randint(0, 2, (3, tokens + 9), generator=torch.Generator().manual_seed(tokens))
    mask[1, : 2 * RUN + 1] = 0
    mask[2] = 1
    compiled = torch.compile(layers, fullgraph=True, dynamic=dynamic)
    found, codes = run_and_get_code(compiled, mask, tokens + 3)
    wanted = kept_tokens(mask[:, 3 : tokens + 3] > 0)
    assert wanted.shape == (3, -(-tokens // RUN))
    assert int(wanted[2].sum()) == tokens
    torch.testing.assert_close(found, (wanted + 1, wanted * 2), rtol=0, atol=0)
    assert "kvcompile_kept" not in codes[0]
    made = re.findall(r"= empty_strided_cpu\(.*torch\.int32\)", codes[0])
    assert len(made) == 3, "the counts and both results"


def changing(mask: torch.Tensor, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two layers, and between them a change of the mask where it lies."""
    first = torch.ops.kvcompile_kept.kept(mask) + 1
    mask[:, which] = False
    return first, torch.ops.kvcompile_kept.kept(mask) * 2


def test_a_mask_that_a_graph_changes_is_counted_again(fresh_dynamo: None) -> None:
    mask, which = torch.ones(2, 70, dtype=torch.bool), torch.arange(5)
    wanted = changing(mask.clone(), which)
    assert not torch.equal(wanted[0] - 1, wanted[1] // 2)
    torch.testing.assert_close(torch.compile(changing, fullgraph=True)(mask, which), wanted, rtol=0, atol=0)
    assert not mask[:, :5].any()
