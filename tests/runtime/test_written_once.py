"""Codes are written once: whatever turns a cache into a dense one for a while, a token is off by one rounding, of its own scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from registry import SCHEMES
from torch.nn import functional as F

import kvcompile
from kvcompile.errors import SchemeError
from kvcompile.schemes import Adaptive, Scheme
from kvcompile.testing.bounds import bound_of
from kvcompile.testing.samples import holds, slot
from kvcompile.types import Role

HEADS, DIM, CAPACITY = 2, 64, 320
Tensor = torch.Tensor


class Cached(torch.nn.Module):
    """Attention over two buffers of two rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(2, HEADS, CAPACITY, DIM, dtype=dtype))

    def forward(self, qkv: Tensor, pos: Tensor) -> Tensor:
        q, k, v = qkv
        self.keys.index_copy_(2, pos, k)
        self.values.index_copy_(2, pos, v)
        return F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=torch.arange(CAPACITY) <= pos[:, None])


class Life:
    """A compiled module, and the tokens that were written into it."""

    def __init__(self, scheme: Scheme, dtype: torch.dtype = torch.float32) -> None:
        torch._dynamo.reset()
        self.module, self.generator = Cached(dtype), torch.Generator().manual_seed(0)
        self.compiled = torch.compile(self.module, backend=kvcompile.backend(scheme, inner="eager"))
        self.tokens = torch.zeros(2, 2, HEADS, 0, DIM, dtype=dtype)

    @property
    def buffers(self) -> list[Tensor]:
        """Keys and values."""
        return [self.module.keys, self.module.values]

    def write(self, count: int, first: int | None = None) -> None:
        """Write tokens by a compiled call, from place ``first`` on, behind all others if None."""
        first = self.tokens.shape[3] if first is None else first
        qkv = torch.randn(3, 2, HEADS, count, DIM, generator=self.generator).to(self.tokens.dtype)
        with torch.no_grad():
            self.compiled(qkv, torch.arange(first, first + count))
        self.tokens = torch.cat([self.tokens[:, :, :, :first], qkv[1:]], 3)

    def thaw(self, how: str) -> None:
        """Use the caches as only dense tensors can be used."""
        for cache in self.buffers:
            if how == "address":
                cache.data_ptr()
            else:
                cache.mul_(1.0)
            assert not isinstance(cache, kvcompile.CompressedCache)

    def held(self) -> list[Tensor]:
        """What the caches decode to."""
        return [kvcompile.decoded(cache)[:, :, : self.tokens.shape[3]].clone() for cache in self.buffers]


def held_by(scheme: type[Scheme]) -> bool:
    """Whether a scheme can hold the caches as it is, without tables or scales of a model, and its store has a place for each token."""
    made = scheme()
    try:
        made.for_module("")
    except SchemeError:
        return False
    return all(holds(made.for_role(role), slot(HEADS, DIM, role=role)) for role in Role) and not isinstance(made, Adaptive)


PLAIN = [scheme for scheme in SCHEMES if held_by(scheme)]
each = pytest.mark.parametrize("scheme", PLAIN, ids=lambda scheme: scheme.name)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_cache_that_was_dense_for_a_while_has_the_codes_that_it_had(scheme: type[Scheme], dtype: torch.dtype) -> None:
    life = Life(scheme(), dtype)
    life.write(100)
    life.write(1)
    before = [item[:, :, :64] for item in life.held()]
    for how in ("address", "mul_", "mul_"):
        life.thaw(how)
        life.write(1)
        assert all(isinstance(cache, kvcompile.CompressedCache) for cache in life.buffers)
        for was, now in zip(before, life.held(), strict=True):
            assert torch.equal(was, now[:, :, :64])


def _eager_step(life: Life) -> None:
    """A token written by code that is not compiled."""
    x = torch.randn(2, 2, HEADS, 1, DIM, generator=life.generator)
    place = life.tokens.shape[3]
    for cache, token in zip(life.buffers, x, strict=True):
        cache[:, :, place : place + 1] = token
    life.tokens = torch.cat([life.tokens, x], 3)


def _rows(life: Life) -> None:
    """The rows of the batch change places, in new tensors."""
    order = torch.tensor([1, 0])
    life.module.keys, life.module.values = life.module.keys.index_select(0, order), life.module.values.index_select(0, order)
    life.tokens = life.tokens[:, order]


def _dense_and_back(life: Life) -> None:
    life.thaw("mul_")


def _crop(life: Life) -> None:
    life.write(1, first=life.tokens.shape[3] - 3)


PATHS: dict[str, Any] = {
    "step": lambda life: life.write(1), "chunk": lambda life: life.write(5), "eager": _eager_step, "rows": _rows, "crop": _crop,
    "dense and back": _dense_and_back,
}
BY_TOKEN = [
    scheme for scheme in PLAIN if scheme().position_independent and scheme().by_token and scheme().bound(slot(HEADS, DIM)) is not None
]


@pytest.mark.parametrize("adopted", [False, True], ids=["compiled prompt", "adopted prompt"])
@pytest.mark.parametrize("scheme", BY_TOKEN, ids=lambda scheme: scheme.name)
def test_every_path_rounds_once(scheme: type[Scheme], adopted: bool) -> None:
    """|x - decoded| is within the scheme's bound for x itself, whatever way a token came in and whatever was done since."""
    life = Life(scheme())
    if adopted:
        qkv = torch.randn(3, 2, HEADS, 80, DIM, generator=life.generator)
        life.module(qkv, torch.arange(80))
        life.tokens = qkv[1:].clone()
    else:
        life.write(80)
    earlier = []
    for round_ in range(3):
        for name, change in PATHS.items():
            earlier.append([cache.clone() for cache in life.buffers])
            change(life)
            for x, found, role in zip(life.tokens, life.held(), Role, strict=True):
                bound = bound_of(scheme().for_role(role), x, slot(HEADS, DIM, role=role))
                off = (x.double() - found.double()).abs()
                assert bool((off <= bound * (1 + 1e-6) + 1e-12).all()), (round_, name, float((off / bound).max()))
        life.write(1)
        assert all(isinstance(cache, kvcompile.CompressedCache) for cache in life.buffers)
