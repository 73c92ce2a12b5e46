"""Cached attentions that keep only their newest tokens, written by hand: as strangers spell a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from e2e_models import Attention, Call, Case, buffers, by_position, one_by_one
from torch import nn

WINDOW = 12
CHUNKS = (7, 1, 1, 1, 4, 1, 1, 3, 1, 1, 1, 1)
"""Crosses the moment the window fills with one token and with several, and goes on behind it."""


class Windowed(Attention):
    """Sizes of a window of ``WINDOW`` tokens."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"capacity": WINDOW, **sizes})

    def mask(self, start: int, count: int, length: int) -> torch.Tensor:
        """bool [S, length]: the window of ``count`` queries of which the first stands at ``start`` of ``length`` lined-up tokens."""
        t, s = torch.arange(length), torch.arange(start, start + count)
        return (t <= s[:, None]) & (t > s[:, None] - self.capacity)


class RollAndPut(Windowed):
    """A rolled copy with the new tokens at its end is copied back into the buffer, whose zeros are masked by the position."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.kv, self.capacity, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        for cache, new in ((self.k_cache, k), (self.v_cache, v)):
            rolled = cache.roll(-1, 2)
            rolled[:, :, -1:] = new
            cache.copy_(rolled)
        seen = torch.arange(self.capacity) >= self.capacity - 1 - pos
        return self.close(F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=seen[None, None, None]))


class ConcatenatedBack(Windowed):
    """(B, T, H, D): the window without its oldest tokens, and the new ones, copied back after attention has read them."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"kv": 2, **sizes})
        buffers(self, self.batch, self.capacity, self.kv, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        count = x.shape[1]
        keys, values = torch.cat([self.k_cache[:, count:], k], 1), torch.cat([self.v_cache[:, count:], v], 1)
        t, s = torch.arange(self.capacity), torch.arange(self.capacity - count, self.capacity)
        written = t >= self.capacity - 1 - pos[-1:]
        mask = (t <= s[:, None]) & written
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask[None, None], enable_gqa=True
        )
        self.k_cache.copy_(keys)
        self.v_cache.copy_(values)
        return self.close(y)


class CombinedRoll(Windowed):
    """One (2, B, H, T, D) buffer, rolled and written as a whole."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, 2, self.batch, self.kv, self.capacity, self.dim, names=("cache",))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        rolled = torch.roll(self.cache, -1, 3)
        rolled[:, :, :, -1:] = torch.stack([k, v])
        self.cache.copy_(rolled)
        return self.close(F.scaled_dot_product_attention(q, self.cache[0], self.cache[1]))


class Sliced(Windowed):
    """``past = torch.cat([past, k])[:, :, -W:]``, and attention over what is kept."""

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor]) -> Any:
        q, k, v = self.heads_first(x)
        keys = torch.cat([past[0], k], 2)[:, :, -self.capacity :]
        values = torch.cat([past[1], v], 2)[:, :, -self.capacity :]
        length, count = keys.shape[2], x.shape[1]
        mask = self.mask(length - count, count, length)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask[None, None])), (keys, values)


class SlicedLater(Windowed):
    """Attention over the past and the new tokens, of which the last W - 1 go on; scores spelled out, values before keys."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"kv": 2, **sizes})

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor]) -> Any:
        q, k, v = self.heads_first(x)
        values, keys = torch.cat([past[1], v], 2), torch.cat([past[0], k], 2)
        length, count = keys.shape[2], x.shape[1]
        scores = q.unflatten(1, (self.kv, -1)) @ keys[:, :, None].mT * self.dim**-0.5
        scores = scores.masked_fill(~self.mask(length - count, count, length), float("-inf"))
        y = (scores.softmax(-1) @ values[:, :, None]).flatten(1, 2)
        return self.close(y), (keys[:, :, 1 - self.capacity :], values[:, :, 1 - self.capacity :])


class RolledResult(Windowed):
    """A window of a fixed size goes in and comes out rolled."""

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor]) -> Any:
        q, k, v = self.heads_first(x)
        last = torch.tensor([self.capacity - 1])
        keys, values = (item.roll(-1, 2).index_copy_(2, last, new) for item, new in zip(past, (k, v), strict=True))
        return self.close(F.scaled_dot_product_attention(q, keys, values)), (keys, values)


class Modulo(Windowed):
    """A sliding cache by hand: ``cache[:, :, pos % W] = k``."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.kv, self.capacity, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        slots = pos % self.capacity
        keys, values = self.k_cache.index_copy_(2, slots, k), self.v_cache.index_copy_(2, slots, v)
        mask = torch.arange(self.capacity) <= pos[:, None]
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))


def empty(length: int) -> Any:
    """forward(x, past) -> (y, past) from a past of ``length`` zeros, in chunks."""

    def drive(module: nn.Module, call: Call, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        shape = (module.batch, module.kv, length, module.dim)
        past: Any = (torch.zeros(shape), torch.zeros(shape))
        results = []
        for x in chunks if length == 0 else torch.cat(list(chunks), 1).split(1, 1):
            y, past = call(x, past)
            results.append(y)
        return results

    return drive


def alone(module: nn.Module, call: Call, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """forward(x), a token at a time."""
    return [call(x) for x in torch.cat(list(chunks), 1).split(1, 1)]


SLIDING_CASES = (
    Case("roll-and-put", RollAndPut, one_by_one(True)),
    Case("concatenated-back", ConcatenatedBack, by_position),
    Case("combined-roll", CombinedRoll, alone),
    Case("sliced", Sliced, empty(0)),
    Case("sliced-later", SlicedLater, empty(0)),
    Case("rolled-result", RolledResult, empty(WINDOW)),
    Case("modulo", Modulo, by_position),
)
