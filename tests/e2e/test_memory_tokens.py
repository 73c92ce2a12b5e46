"""Learned tokens that attention reads ahead of a cache: exact beside compressed ones, in prompt, decode and a second request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_models import Case, by_position, visible
from latent_models import VALUE, TwoBuffers
from memory_models import MEMORY, Grown, Static, Tiled
from torch import nn
from two_requests import ALLOWED, error

import kvcompile

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")


def grown(module: nn.Module, call: Callable[..., Any], chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """forward(x, past), which returns the next past."""
    results, past = [], None
    for x in chunks:
        y, past = call(x, past)
        results.append(y)
    return results


CASES = (
    Case("grown", Grown, grown), Case("grown-grouped", Grown, grown, sizes={"kv": 2}),
    Case("grown-flat", lambda **given: Grown(flat=True, **given), grown),
    Case("grown-padded", lambda **given: Grown(padded=True, **given), grown),
    Case("grown-capped", lambda **given: Grown(softcap=5.0, **given), grown),
    Case("static", Static, by_position), Case("static-grouped", Static, by_position, sizes={"kv": 2}), Case("tiled", Tiled, by_position),
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("scheme", ALLOWED)
def test_right_under_every_scheme(case: Case, scheme: str) -> None:
    backend = kvcompile.backend(scheme, inner="eager", strict=True)
    assert (scheme != "dense") * 1e-6 <= error(case, backend) <= ALLOWED[scheme]
    report = backend.report()
    assert report.sites and not report.refusals and not any(graph.unvalidated for graph in report.graphs)


@pytest.mark.compile
@pytest.mark.parametrize("scheme", ALLOWED)
@pytest.mark.parametrize("name", ["grown-grouped", "grown-padded", "static"])
def test_right_through_inductor(name: str, scheme: str) -> None:
    case = next(case for case in CASES if case.name == name)
    backend = kvcompile.backend(scheme, strict=True)
    assert error(case, backend) <= ALLOWED[scheme]
    assert "attend" in str(backend.report().graphs[-1].kernels)


@pytest.mark.parametrize("scheme", ["int8(rotate=kv)", "nf4(sinks=4)"])
def test_other_forms_of_store(scheme: str) -> None:
    """Keys and values in another basis, and first tokens that stay exact: the memory is in the model's basis, ahead of them."""
    case = next(case for case in CASES if case.name == "grown-grouped")
    backend = kvcompile.backend(scheme, inner="eager")
    assert 1e-6 <= error(case, backend) <= 0.1 or backend.report().refusals


def test_half_precision() -> None:
    case = next(case for case in CASES if case.name == "grown-grouped")
    assert error(case, kvcompile.backend("dense", inner="eager", strict=True), torch.bfloat16) <= 0.02


@pytest.mark.parametrize("scheme", ["smartkv", "certified"])
def test_attentions_without_log_sums_refuse_them(scheme: str) -> None:
    backend = kvcompile.backend(scheme, inner="eager")
    assert error(next(case for case in CASES if case.name == "static"), backend) <= 3e-6
    assert f"learned tokens are read together with the cache, and the attention of {scheme}" in str(backend.report().refusals[0])


class OverLatents(TwoBuffers):
    """Learned keys and values of every head, ahead of keys and values that are made from cached latents."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.mem_k = nn.Parameter(torch.randn(self.heads, MEMORY, self.dim))
        self.mem_v = nn.Parameter(torch.randn(self.heads, MEMORY, VALUE))

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        keys, values = (
            torch.cat([learned.expand(keys.shape[0], -1, -1, -1), made], 2) for learned, made in ((self.mem_k, keys), (self.mem_v, values))
        )
        mask = F.pad(visible(pos, self.capacity), (MEMORY, 0), value=True)
        return self.finish(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))


def test_learned_tokens_ahead_of_a_latent_are_refused() -> None:
    backend = kvcompile.backend("int8", inner="eager")
    assert error(Case("over latents", OverLatents, by_position), backend) == 0
    report = backend.report()
    assert report.sites == 0 and report.refusals
    assert all("joined to tokens that are the same in all rows" in item.reason for item in report.refusals)
