"""Schemes whose sites have constants of their own, learned tables or measured scales: what is compiled, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e_layers import cache_of, llama
from learned_tables import llama_paths, random_tables
from static_scales import random_scales

import kvcompile
from kvcompile.errors import SchemeChanged, SiteRefused

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

each_kind = pytest.mark.parametrize(
    ("make", "what"), [(random_tables, "tables"), (random_scales, "scales")], ids=["tables", "scales"],
)


@each_kind
def test_equal_layers_share_code_whatever_their_constants(make: Callable[..., Any], what: str) -> None:
    """Constants are no part of what is compiled: two models' schemes spell alike, and so do all of their layers."""
    one, other = make(llama_paths(2)), make(llama_paths(2), seed=9)
    assert one.spec() == other.spec() and one.for_module(llama_paths(2)[0]) != one.for_module(llama_paths(2)[1]), what
    assert len({scheme.for_module(path).spec() for scheme, path in itertools.product((one, other), llama_paths(2))}) == 1


@each_kind
def test_a_cache_of_other_constants_is_refused(make: Callable[..., Any], what: str) -> None:
    model = llama(head_dim=32)
    cache, words = cache_of(model, "static"), torch.ones(1, 3, dtype=torch.long)
    owners = [kvcompile.backend(make(llama_paths(2), seed=seed), inner="eager", strict=True) for seed in (0, 5)]
    first, second = (torch.compile(model, backend=owner) for owner in owners)
    with torch.no_grad():
        first(words, past_key_values=cache)
        torch._dynamo.reset()
        with pytest.raises(SchemeChanged, match=f"with {what}"):
            second(words[:, :1], past_key_values=cache)


@each_kind
@pytest.mark.parametrize(("layers", "options"), [(1, {}), (2, {"heads": 4})], ids=["a layer short", "heads"])
def test_constants_of_another_model_are_refused_before_anything_is_compiled(
    make: Callable[..., Any], what: str, layers: int, options: dict[str, int],
) -> None:
    scheme, model = make(llama_paths(layers), **options), llama(head_dim=32)
    compiled = torch.compile(model, backend=kvcompile.backend(scheme, inner="eager", strict=True))
    found = "(learned )?tables" if what == "tables" else "(static|one) scale"
    with pytest.raises(Exception, match=f"expected {found}") as caught, torch.no_grad():
        compiled(torch.ones(1, 3, dtype=torch.long), past_key_values=cache_of(model, "static"))
    assert SiteRefused.__name__ in str(caught.value)
