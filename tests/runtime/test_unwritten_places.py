"""Caches that begin as something else than zeros: places that nobody wrote read back as they were, or the cache stays dense."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e_models import Attention, buffers, by_position, inputs, visible
from torch.nn import functional as F

import kvcompile
from kvcompile.errors import Unsupported

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

BEGINNINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ones": torch.ones_like,
    "nan": lambda like: torch.full_like(like, float("nan")),
    "garbage": lambda like: torch.randn(like.shape, generator=torch.Generator().manual_seed(3)) * 100,
    "array": lambda like: torch.from_numpy(torch.zeros(like.shape).numpy().copy()),
}


class Cached(Attention):
    """An ``index_copy_`` cache in buffers that begin as given."""

    def __init__(self, begin: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(kv=2, dim=32)
        buffers(self, self.batch, self.kv, 64, self.dim)
        self.k_cache, self.v_cache = begin(self.k_cache), begin(self.v_cache)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = (item.transpose(1, 2) for item in self.project(x))
        keys, values = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, 64), enable_gqa=True))


def run(begin: Callable[[torch.Tensor], torch.Tensor], scheme: str) -> tuple[Cached, Cached, float]:
    """A module and its compiled twin after a prompt and steps, and the largest difference of their results."""
    torch.manual_seed(0)
    module = Cached(begin).eval()
    plain = copy.deepcopy(module)
    given = inputs(module, (7, 1, 1, 3, 1))
    with torch.no_grad():
        expected = by_position(plain, plain, given)
        found = by_position(module, torch.compile(module, backend=kvcompile.backend(scheme, inner="eager")), given)
    return module, plain, max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("begin", BEGINNINGS)
@pytest.mark.parametrize("scheme", ["dense", "int8", "kivi(group=16,window=64)"])
def test_what_was_never_written_reads_back(begin: str, scheme: str, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="kvcompile"):
        module, plain, error = run(BEGINNINGS[begin], scheme)
    # SDPA itself multiplies what is hidden by zero, and NaN is not zero then.
    assert begin == "nan" or error <= (2e-5 if scheme != "int8" else 0.05)
    for ours, theirs in zip(module.buffers(), plain.buffers(), strict=True):
        held = kvcompile.decoded(ours)
        assert torch.allclose(held, theirs, rtol=0.02 if scheme == "int8" else 1e-6, atol=1.5 if scheme == "int8" else 1e-6, equal_nan=True)
        stays = begin == "array" or "kivi" in scheme
        assert isinstance(ours, kvcompile.CompressedCache) != stays
    assert "were not written" in caplog.text or "stays dense" in caplog.text or "leaves an attention" in caplog.text


@pytest.mark.parametrize("less", [1, 5])
def test_a_strict_window_refuses_what_lies_behind_its_tokens(less: int) -> None:
    """A prompt that was not compiled, then a compiled step further back: in its tokens' places, and what it reads, nothing may change."""
    torch.manual_seed(0)
    module = Cached(torch.zeros_like).eval()
    compiled = torch.compile(module, backend=kvcompile.backend("kivi(group=16,window=64)", inner="eager", strict=True))
    prompt, step = inputs(module, (7, 1))
    with torch.no_grad():
        module(prompt, torch.arange(7))
        before = [cache.clone() for cache in module.buffers()]
        with pytest.raises(Unsupported, match="create it with zeros"):
            compiled(step, torch.tensor([7 - less]))
        assert all(torch.equal(a, b) for a, b in zip(before, module.buffers(), strict=True))
        for cache in module.buffers():
            cache.zero_()
        compiled(prompt, torch.arange(7))
        assert all(isinstance(cache, kvcompile.CompressedCache) for cache in module.buffers())


def test_an_array_sees_what_is_written_to_it() -> None:
    arrays = []

    def begin(like: torch.Tensor) -> torch.Tensor:
        arrays.append(torch.zeros(like.shape).numpy().copy())
        return torch.from_numpy(arrays[-1])

    module, _, _ = run(begin, "int8")
    assert torch.equal(torch.from_numpy(arrays[0]), module.k_cache) and arrays[0][:, :, :13].any()


def test_zeros_are_compressed_for_a_graph_that_left_others_dense() -> None:
    """One graph: a cache that stays dense, then one that does not, then the first again; emptied, it is compressed too."""
    torch.manual_seed(0)
    modules = [Cached(begin).eval() for begin in (torch.ones_like, torch.zeros_like)]
    modules[1].load_state_dict({name: item for name, item in modules[0].state_dict().items() if "cache" not in name}, strict=False)
    plain = copy.deepcopy(modules)
    backend = kvcompile.backend("kivi(group=16,window=64)", inner="eager")

    def attend(module: Any, x: torch.Tensor, pos: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, {"k_cache": keys, "v_cache": values}, (x, pos))

    first = modules[0]
    compiled = torch.compile(lambda x, pos, keys, values: attend(first, x, pos, keys, values), backend=backend)
    given = inputs(first, (7, 1, 1))
    with torch.no_grad():
        for index in (0, 1, 0, 1):
            own = [modules[index].k_cache, modules[index].v_cache]
            for start, x in zip((0, 7, 8), given, strict=True):
                pos = torch.arange(start, start + x.shape[1])
                assert torch.allclose(compiled(x, pos, *own), plain[index](x, pos), atol=2e-5)
            assert isinstance(own[0], kvcompile.CompressedCache) == bool(index)
