"""Caches that are updated out of place: the old tensor stays what it was as long as nobody writes over what it holds."""

from __future__ import annotations

import copy

import pytest
import torch
from e2e_models import CASES, inputs
from torch import nn

import kvcompile
from kvcompile.errors import CacheStale

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

Caches = tuple[torch.Tensor, torch.Tensor]


def made() -> tuple[nn.Module, nn.Module, object, Caches]:
    """The functional module, a copy, the compiled one, and empty caches."""
    module = next(case for case in CASES if case.name == "functional").make()
    compiled = torch.compile(module, backend=kvcompile.backend("dense", inner="eager", strict=True), fullgraph=True)
    empty = tuple(torch.zeros(module.batch, module.kv, module.capacity, module.dim) for _ in range(2))
    return module, copy.deepcopy(module), compiled, empty  # type: ignore[return-value]


def positions(start: int, x: torch.Tensor) -> torch.Tensor:
    return torch.arange(start, start + x.shape[1])


@torch.no_grad()
def test_a_discarded_step_is_taken_again() -> None:
    module, plain, compiled, caches = made()
    first, again, other = inputs(module, (5, 1, 1))
    _, held = compiled(first, caches, positions(0, first))  # type: ignore[operator]
    _, plain_held = plain(first, tuple(torch.zeros_like(cache) for cache in held), positions(0, first))
    for x in (again, other, again):
        y, _ = compiled(x, held, positions(5, x))  # type: ignore[operator]
        assert torch.allclose(y, plain(x, plain_held, positions(5, x))[0], atol=2e-6)
    assert isinstance(held[0], kvcompile.CompressedCache)
    assert torch.allclose(kvcompile.decoded(held[0]), plain_held[0], atol=1e-6), "the old cache holds its five tokens, and zeros"


@torch.no_grad()
def test_two_sequences_from_one_empty_cache() -> None:
    module, plain, compiled, caches = made()
    empty = tuple(cache.clone() for cache in caches)
    chunks = inputs(module, (5, 3, 1, 1))
    one, two = (compiled(x, caches, positions(0, x))[1] for x in chunks[:2])  # type: ignore[operator]
    plain_one, plain_two = (plain(x, empty, positions(0, x))[1] for x in chunks[:2])
    for x, start, mine, theirs in ((chunks[2], 5, one, plain_one), (chunks[3], 3, two, plain_two)):
        assert torch.allclose(compiled(x, mine, positions(start, x))[0], plain(x, theirs, positions(start, x))[0], atol=2e-6)  # type: ignore[operator]


@torch.no_grad()
def test_what_was_written_over_raises() -> None:
    module, _, compiled, caches = made()
    first, x, y = inputs(module, (5, 1, 1))
    _, held = compiled(first, caches, positions(0, first))  # type: ignore[operator]
    _, longer = compiled(x, held, positions(5, x))  # type: ignore[operator]
    compiled(y, held, positions(5, y))  # type: ignore[operator]
    with pytest.raises(CacheStale):
        compiled(x, longer, positions(6, x))  # type: ignore[operator]


@torch.no_grad()
def test_a_gap_that_a_newer_cache_filled_raises() -> None:
    """The old cache has zeros there, which are gone."""
    module, _, compiled, caches = made()
    first, x, y = inputs(module, (5, 1, 1))
    _, held = compiled(first, caches, positions(0, first))  # type: ignore[operator]
    compiled(x, held, positions(5, x))  # type: ignore[operator]
    with pytest.raises(CacheStale):
        compiled(y, held, positions(9, y))  # type: ignore[operator]
