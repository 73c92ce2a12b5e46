"""Small models for the end-to-end tests: transformers configs, and cached attentions written by hand.

The hand-written ones are what a stranger might bring: every way to hold a cache and to spell attention that
we could think of, each with a ``drive`` that feeds it chunks of a sequence and collects its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CAPACITY = 96
CHUNKS = (7, 1, 1, 1, 4, 1, 1)

Call = Callable[..., Any]


class Attention(nn.Module):
    """Projections and sizes that all the hand-written attentions share."""

    def __init__(self, batch: int = 2, heads: int = 4, kv: int = 4, dim: int = 16, capacity: int = CAPACITY) -> None:
        super().__init__()
        self.batch, self.heads, self.kv, self.dim, self.capacity = batch, heads, kv, dim, capacity
        self.width = heads * dim
        self.q = nn.Linear(self.width, heads * dim, bias=False)
        self.k = nn.Linear(self.width, kv * dim, bias=False)
        self.v = nn.Linear(self.width, kv * dim, bias=False)
        self.o = nn.Linear(self.width, self.width, bias=False)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values as [B, S, heads, D]."""
        rows = x.shape[:2]
        return self.q(x).view(*rows, self.heads, -1), self.k(x).view(*rows, self.kv, -1), self.v(x).view(*rows, self.kv, -1)

    def heads_first(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values as [B, heads, S, D]."""
        q, k, v = self.project(x)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def close(self, y_BHSD: torch.Tensor) -> torch.Tensor:
        """Back to [B, S, width] through the output projection."""
        return self.o(y_BHSD.transpose(1, 2).flatten(2))


def buffers(module: nn.Module, *shape: int, names: Sequence[str] = ("k_cache", "v_cache")) -> None:
    """Register zero buffers."""
    for name in names:
        module.register_buffer(name, torch.zeros(shape))


class Buffered(Attention):
    """An attention over two registered buffers [B, K, C, D]."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.kv, self.capacity, self.dim)


def visible(pos: torch.Tensor, capacity: int) -> torch.Tensor:
    """bool [S, C]: what queries at ``pos`` see."""
    return torch.arange(capacity, device=pos.device) <= pos[:, None]


# --- transformers ---------------------------------------------------------------------------------------


def llama(kv: int = 2, attention: str = "sdpa", layers: int = 2, seed: int = 0, head_dim: int = 16) -> Any:
    """A tiny random Llama: 4 query heads, 64 words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=kv, vocab_size=64,
        head_dim=head_dim, attn_implementation=attention, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )).eval()


def cache_of(model: Any, kind: str, capacity: int = 64) -> Any:
    """An empty cache of ``kind``, static or dynamic."""
    from transformers import DynamicCache, StaticCache

    return StaticCache(model.config, max_cache_len=capacity) if kind == "static" else DynamicCache(config=model.config)


def prompt(rows: int = 3, count: int = 9, seed: int = 0) -> torch.Tensor:
    """Random words, none of them the padding."""
    return torch.randint(1, 64, (rows, count), generator=torch.Generator().manual_seed(int(seed)))


# --- how the cache is held and written ----------------------------------------------------------------


class TrilMask(Attention):
    """gpt-fast: a registered buffer, ``cache[:, :, pos] = k``, a tril buffer indexed by position."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"kv": 2, **sizes})
        buffers(self, self.batch, self.kv, self.capacity, self.dim)
        self.register_buffer("causal", torch.tril(torch.ones(self.capacity, self.capacity, dtype=torch.bool)))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        self.k_cache[:, :, pos] = k
        self.v_cache[:, :, pos] = v
        repeats = self.heads // self.kv
        k, v = self.k_cache.repeat_interleave(repeats, dim=1), self.v_cache.repeat_interleave(repeats, dim=1)
        return self.close(F.scaled_dot_product_attention(q, k, v, attn_mask=self.causal[None, None, pos]))


class IndexCopyAttribute(Buffered):
    """``self.k_cache.index_copy_`` whose result is dropped: the read is of the attribute."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        self.k_cache.index_copy_(2, pos, k)
        self.v_cache.index_copy_(2, pos, v)
        scores = q @ self.k_cache.transpose(-1, -2) / math.sqrt(self.dim)
        scores = scores.masked_fill(~visible(pos, self.capacity), float("-inf"))
        return self.close(scores.softmax(-1) @ self.v_cache)


class Transposed(Attention):
    """Keys are kept as (B, H, D, T), values as (B, H, T, D)."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.kv, self.dim, self.capacity, names=("k_cache",))
        buffers(self, self.batch, self.kv, self.capacity, self.dim, names=("v_cache",))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        keys = self.k_cache.index_copy_(3, pos, k.transpose(2, 3))
        values = self.v_cache.index_copy_(2, pos, v)
        scores = torch.where(visible(pos, self.capacity), (q * self.dim**-0.5) @ keys, -1e9)
        return self.close(scores.softmax(-1) @ values)


class Narrow(Attention):
    """(B, S, H, D), written by ``narrow().copy_()`` at an int offset, prefix read."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.capacity, self.kv, self.dim)

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        q, k, v = self.project(x)
        count = x.shape[1]
        self.k_cache.narrow(1, start, count).copy_(k)
        self.v_cache.narrow(1, start, count).copy_(v)
        keys, values = self.k_cache[:, : start + count], self.v_cache[:, : start + count]
        mask = None
        if count > 1:
            mask = torch.ones(count, start + count, dtype=torch.bool).tril(diagonal=start)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask)
        return self.close(y)


class SliceAssign(Buffered):
    """``cache[:, :, s:s + n] = k`` and a read of ``cache[:, :, :s + n]``, scores spelled out."""

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        count = x.shape[1]
        self.k_cache[:, :, start : start + count] = k
        self.v_cache[:, :, start : start + count] = v
        keys, values = self.k_cache[:, :, : start + count], self.v_cache[:, :, : start + count]
        scores = q @ keys.mT * self.dim**-0.5
        t, s = torch.arange(start + count, device=x.device), torch.arange(start, start + count, device=x.device)
        scores = scores + torch.where(t[None, :] > s[:, None], float("-inf"), 0.0)
        return self.close(scores.softmax(-1) @ values)


class CombinedOneWrite(Attention):
    """One (2, B, H, S, D) buffer, both halves written at once."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, 2, self.batch, self.kv, self.capacity, self.dim, names=("cache",))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        self.cache.index_copy_(3, pos, torch.stack([k, v]))
        keys, values = self.cache.unbind(0)
        mask = visible(pos, self.capacity)[None, None]
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))


class CombinedTwoWrites(Attention):
    """One (2, B, H, S, D) buffer, each half written by itself."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"kv": 2, **sizes})
        buffers(self, 2, self.batch, self.kv, self.capacity, self.dim, names=("cache",))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        self.cache[0].index_copy_(2, pos, k)
        self.cache[1].index_copy_(2, pos, v)
        mask = visible(pos, self.capacity)[None, None]
        return self.close(F.scaled_dot_product_attention(q, self.cache[0], self.cache[1], attn_mask=mask, enable_gqa=True))


class CombinedMiddle(Attention):
    """One (B, 2, C, H, D) buffer, ``cache[:, 0, pos] = k``."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, 2, self.capacity, self.kv, self.dim, names=("cache",))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        self.cache[:, 0, pos] = k
        self.cache[:, 1, pos] = v
        keys, values = self.cache[:, 0].transpose(1, 2), self.cache[:, 1].transpose(1, 2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=visible(pos, self.capacity))
        return self.close(y)


class PerRow(Buffered):
    """Every row of the batch at its own positions: ``cache[rows, :, pos] = k``."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        self.k_cache[rows, :, pos] = k
        self.v_cache[rows, :, pos] = v
        mask = torch.arange(self.capacity, device=x.device)[None, None, None] <= pos[:, None, :, None]
        return self.close(F.scaled_dot_product_attention(q.transpose(1, 2), self.k_cache, self.v_cache, attn_mask=mask))


class Flat(Attention):
    """(B * H, S, D) cache and bmm."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch * self.kv, self.capacity, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = (item.transpose(1, 2).flatten(0, 1) for item in self.project(x))
        keys, values = self.k_cache.index_copy_(1, pos, k), self.v_cache.index_copy_(1, pos, v)
        scores = torch.bmm(q, keys.transpose(1, 2)) * self.dim**-0.5
        scores = scores.masked_fill(visible(pos, self.capacity).logical_not(), torch.finfo(scores.dtype).min)
        y = torch.bmm(torch.softmax(scores, -1), values)
        return self.close(y.unflatten(0, (-1, self.heads)))


class MultiQueryEinsum(Attention):
    """One kv head and no head dim in the cache: (B, S, D)."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"kv": 1, **sizes})
        buffers(self, self.batch, self.capacity, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        keys, values = self.k_cache.index_copy_(1, pos, k.squeeze(2)), self.v_cache.index_copy_(1, pos, v.squeeze(2))
        scores = torch.einsum("bshd,btd->bhst", q, keys) * self.dim**-0.5
        scores = scores.masked_fill(~visible(pos, self.capacity), float("-inf"))
        return self.close(torch.einsum("bhst,btd->bhsd", scores.softmax(-1), values))


class GroupedEinsum(Attention):
    """(B, S, Hkv, D), the grouping in the equation, scores in float32."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"kv": 2, **sizes})
        buffers(self, self.batch, self.capacity, self.kv, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        q = q.unflatten(2, (self.kv, -1))
        keys, values = self.k_cache.index_copy_(1, pos, k), self.v_cache.index_copy_(1, pos, v)
        scores = torch.einsum("btkgd,bskd->bkgts", q, keys).float() / math.sqrt(self.dim)
        scores = scores + torch.where(visible(pos, self.capacity), 0.0, float("-inf"))
        probs = scores.softmax(-1).to(x.dtype)
        return self.o(torch.einsum("bkgts,bskd->btkgd", probs, values).flatten(2))


class GroupedMatmul(Attention):
    """Queries as (B, Hkv, G, S, D) against keys that broadcast over G."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"kv": 2, **sizes})
        buffers(self, self.batch, self.kv, self.capacity, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        keys, values = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
        scores = q.unflatten(1, (self.kv, -1)) @ keys[:, :, None].transpose(-1, -2)
        scores = torch.where(visible(pos, self.capacity), scores * self.dim**-0.5, torch.finfo(x.dtype).min)
        return self.close((scores.softmax(-1) @ values[:, :, None]).flatten(1, 2))


class Concatenated(Attention):
    """nanoGPT with a cache: (k, v) come in, or None, and go out one chunk longer."""

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None = None) -> Any:
        q, k, v = self.heads_first(x)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        total, count = k.shape[2], x.shape[1]
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        if count > 1:
            mask = torch.ones(total, total, dtype=torch.bool, device=x.device).tril()[total - count :]
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return self.close(F.softmax(scores, dim=-1) @ v), (k, v)


class ConcatenatedTimeFirst(Attention):
    """The concatenated cache is (B, T, H, D) and lives in a dict."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"kv": 1, **sizes})

    def forward(self, x: torch.Tensor, past: dict[str, torch.Tensor]) -> Any:
        q, k, v = self.project(x)
        if past:
            k, v = torch.cat((past["k"], k), 1), torch.cat((past["v"], v), 1)
        total, count = k.shape[1], x.shape[1]
        t, s = torch.arange(total, device=x.device), torch.arange(total - count, total, device=x.device)
        mask = t <= s[:, None]
        keys, values = k.transpose(1, 2).expand(-1, self.heads, -1, -1), v.transpose(1, 2).expand(-1, self.heads, -1, -1)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask)
        return self.close(y), {"k": k, "v": v}


class Lists(nn.Module):
    """Two layers whose caches come in a list of dicts and are written in place."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(**sizes), Attention(**sizes)])

    def fresh(self) -> list[dict[str, torch.Tensor]]:
        """Empty caches, (B, H, C, D)."""
        one = self.layers[0]
        shape = (one.batch, one.kv, one.capacity, one.dim)
        dtype = one.q.weight.dtype
        return [{"k": torch.zeros(shape, dtype=dtype), "v": torch.zeros(shape, dtype=dtype)} for _ in self.layers]

    def forward(self, x: torch.Tensor, caches: list[dict[str, torch.Tensor]], pos: torch.Tensor) -> torch.Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            q, k, v = (item.transpose(1, 2) for item in layer.project(x))
            cache["k"][:, :, pos] = k
            cache["v"][:, :, pos] = v
            mask = visible(pos, layer.capacity)
            x = x + layer.close(F.scaled_dot_product_attention(q, cache["k"], cache["v"], attn_mask=mask[None, None]))
        return x


class AllLayers(nn.Module):
    """One (layers, 2, B, C, H, D) buffer for the whole model."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(**sizes), Attention(**sizes)])
        one = self.layers[0]
        buffers(self, 2, 2, one.batch, one.capacity, one.kv, one.dim, names=("cache",))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            q, k, v = layer.project(x)
            self.cache[index, 0].index_copy_(1, pos, k)
            self.cache[index, 1].index_copy_(1, pos, v)
            keys, values = self.cache[index, 0].transpose(1, 2), self.cache[index, 1].transpose(1, 2)
            mask = visible(pos, layer.capacity)
            x = x + layer.close(F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask))
        return x


class RowSlice(Attention):
    """The reference Llama: ``cache[:rows, start:start + n] = k`` with all rows in use."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"kv": 2, **sizes})
        buffers(self, self.batch, self.capacity, self.kv, self.dim)

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        q, k, v = self.project(x)
        rows, count = x.shape[:2]
        self.k_cache[:rows, start : start + count] = k
        self.v_cache[:rows, start : start + count] = v
        keys, values = self.k_cache[:rows, : start + count], self.v_cache[:rows, : start + count]
        repeats = self.heads // self.kv
        keys = keys[:, :, :, None, :].expand(-1, -1, -1, repeats, -1).reshape(rows, start + count, self.heads, self.dim)
        values = torch.repeat_interleave(values, dim=2, repeats=repeats)
        scores = torch.matmul(q.transpose(1, 2), keys.permute(0, 2, 3, 1)) / math.sqrt(self.dim)
        if count > 1:
            mask = torch.full((count, count), float("-inf")).triu(1)
            scores = scores + torch.hstack([torch.zeros(count, start), mask])
        return self.close(F.softmax(scores.float(), dim=-1).type_as(q) @ values.transpose(1, 2))


SPARE = 2
"""Rows that a cache for a largest batch has beyond those that a test brings."""


class FirstRows(RowSlice):
    """The reference Llama with a cache for a largest batch, of which a call brings the first rows."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch + SPARE, self.capacity, self.kv, self.dim)


class FirstRowsIndexCopy(Attention):
    """``cache[:rows].index_copy_(2, pos, k)`` and a read of its result."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"kv": 2, **sizes})
        buffers(self, self.batch + SPARE, self.kv, self.capacity, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        keys = self.k_cache[: x.shape[0]].index_copy_(2, pos, k)
        values = self.v_cache[: x.shape[0]].index_copy_(2, pos, v)
        mask = visible(pos, self.capacity)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=self.heads != self.kv))


class FirstRowsCombined(Attention):
    """Keys and values of a largest batch in one tensor [2, B, C, K, D], narrowed to the rows of a call before it is written and read."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, 2, self.batch + SPARE, self.capacity, self.kv, self.dim, names=("cache",))

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        q, k, v = self.project(x)
        rows, count = x.shape[:2]
        mine = self.cache.narrow(1, 0, rows)
        mine[0, :, start : start + count], mine[1, :, start : start + count] = k, v
        keys, values = (item[:, : start + count].transpose(1, 2) for item in mine.unbind(0))
        mask = torch.ones(count, start + count, dtype=torch.bool).tril(start)
        return self.close(F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask))


class FirstRowsPerRow(Attention):
    """``cache[arange(rows)[:, None], pos] = k``: fewer rows than the cache has, each at positions of its own."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch + SPARE, self.capacity, self.kv, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        self.k_cache[rows, pos], self.v_cache[rows, pos] = k, v
        keys, values = (cache[: x.shape[0]].transpose(1, 2) for cache in (self.k_cache, self.v_cache))
        mask = torch.arange(self.capacity, device=x.device) <= pos[:, None, :, None]
        return self.close(F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask))


class MiddleRows(FirstRows):
    """Rows from the second one on: they are not counted from the cache's first."""

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        q, k, v = self.project(x)
        rows, count = x.shape[:2]
        self.k_cache[1 : rows + 1, start : start + count] = k
        self.v_cache[1 : rows + 1, start : start + count] = v
        keys, values = (cache[1 : rows + 1, : start + count].transpose(1, 2) for cache in (self.k_cache, self.v_cache))
        mask = torch.ones(count, start + count, dtype=torch.bool).tril(start)
        return self.close(F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True))


class ScalarPosition(Buffered):
    """One token at a time at a 0-dim position tensor."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        self.k_cache.index_copy_(2, pos.reshape(1), k.transpose(1, 2))
        self.v_cache.index_copy_(2, pos.reshape(1), v.transpose(1, 2))
        mask = torch.arange(self.capacity, device=pos.device) <= pos
        y = F.scaled_dot_product_attention(q.transpose(1, 2), self.k_cache, self.v_cache, attn_mask=mask[None, None, None])
        return self.close(y)


class RowDecode(Buffered):
    """One token a row, every row at its own position: ``cache[rows, :, pos] = k``, all indices of rank 1."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        rows = torch.arange(x.shape[0])
        self.k_cache[rows, :, pos] = k[:, 0]
        self.v_cache[rows, :, pos] = v[:, 0]
        mask = torch.arange(self.capacity, device=pos.device)[None] <= pos[:, None]
        y = F.scaled_dot_product_attention(q.transpose(1, 2), self.k_cache, self.v_cache, attn_mask=mask[:, None, None])
        return self.close(y)


class Window(Buffered):
    """A sliding window as a mask over a full buffer."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        keys, values = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
        t = torch.arange(self.capacity)
        mask = (t <= pos[:, None]) & (t > pos[:, None] - 5)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))


class Attribute(Attention):
    """``self.keys = torch.cat([self.keys, k])``, no mask: one token at a time."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.keys = self.values = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        self.keys = k if self.keys is None else torch.cat([self.keys, k], dim=2)
        self.values = v if self.values is None else torch.cat([self.values, v], dim=2)
        return self.close(F.scaled_dot_product_attention(q, self.keys, self.values))


class Scattered(Buffered):
    """``cache.scatter_`` with an expanded index."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        index = pos[None, None, :, None].expand_as(k)
        self.k_cache.scatter_(2, index, k)
        self.v_cache.scatter_(2, index, v)
        y = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=visible(pos, self.capacity))
        return self.close(y)


class Functional(Attention):
    """The cache is updated out of place and returned."""

    def forward(self, x: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], pos: torch.Tensor) -> Any:
        q, k, v = self.heads_first(x)
        keys, values = caches[0].index_copy(2, pos, k), caches[1].index_copy(2, pos, v)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, self.capacity))
        return self.close(y), (keys, values)


class Tiled(Attention):
    """Query head h reads kv head h % K: the kv heads are repeated as a whole."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"kv": 2, **sizes})
        buffers(self, self.batch, self.kv, self.capacity, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        keys, values = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
        keys, values = (cache.repeat(1, self.heads // self.kv, 1, 1) for cache in (keys, values))
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, self.capacity)))


class FunctionalScatter(Attention):
    """Out of place by scatter, one position a row and token expanded to all elements: what exporters like."""

    def forward(self, x: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], pos: torch.Tensor) -> Any:
        q, k, v = self.heads_first(x)
        index = pos.view(1, 1, -1, 1).repeat(x.shape[0], self.kv, 1, self.dim)
        keys, values = torch.scatter(caches[0], 2, index, k), torch.scatter(caches[1], 2, index, v)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, self.capacity))), (keys, values)


class SliceScattered(Attention):
    """Out of place by slice_scatter at an int offset."""

    def forward(self, x: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], start: int) -> Any:
        q, k, v = self.heads_first(x)
        end = start + x.shape[1]
        keys, values = torch.slice_scatter(caches[0], k, 2, start, end), torch.slice_scatter(caches[1], v, 2, start, end)
        mask = visible(torch.arange(start, end), self.capacity)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)), (keys, values)


class SelectScattered(Attention):
    """Out of place by select_scatter, one token at an int position."""

    def forward(self, x: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], start: int) -> Any:
        q, k, v = self.heads_first(x)
        keys, values = torch.select_scatter(caches[0], k[:, :, 0], 2, start), torch.select_scatter(caches[1], v[:, :, 0], 2, start)
        mask = visible(torch.arange(start, start + 1), self.capacity)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)), (keys, values)


class CopiedBack(Buffered):
    """Updated out of place, and copied into the buffer."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        self.k_cache.copy_(self.k_cache.index_copy(2, pos, k))
        self.v_cache.copy_(self.v_cache.index_copy(2, pos, v))
        return self.close(F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=visible(pos, self.capacity)))


class Reassigned(Buffered):
    """``self.k_cache = self.k_cache.index_copy(...)``."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        self.k_cache, self.v_cache = self.k_cache.index_copy(2, pos, k), self.v_cache.index_copy(2, pos, v)
        return self.close(F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=visible(pos, self.capacity)))


class NotGivenBack(Buffered):
    """Updated out of place, and forgotten: the next call does not see the new tokens."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        keys, values = self.k_cache.index_copy(2, pos, k), self.v_cache.index_copy(2, pos, v)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, self.capacity)))


class RowsAndOnePosition(Buffered):
    """``cache[rows[:, None], :, pos]`` with the same positions for all rows."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        self.k_cache[rows, :, pos] = k
        self.v_cache[rows, :, pos] = v
        y = F.scaled_dot_product_attention(q.transpose(1, 2), self.k_cache, self.v_cache, attn_mask=visible(pos, self.capacity))
        return self.close(y)


class RowScattered(Attention):
    """(B, S, H, D), ``cache.scatter_`` with a position a row and token."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.capacity, self.kv, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        index = pos[:, :, None, None].expand_as(k)
        self.k_cache.scatter_(1, index, k)
        self.v_cache.scatter_(1, index, v)
        keys, values = self.k_cache.transpose(1, 2), self.v_cache.transpose(1, 2)
        mask = torch.arange(self.capacity, device=x.device)[None, None, None] <= pos[:, None, :, None]
        return self.close(F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask))


class BlockTable(Attention):
    """vLLM: a pool of blocks, tokens written to slots, keys and values gathered by each row's table."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        blocks = self.capacity // 8
        buffers(self, blocks * self.batch, 8, self.kv, self.dim)
        order = torch.randperm(blocks * self.batch, generator=torch.Generator().manual_seed(0))
        self.register_buffer("table", order.view(self.batch, blocks))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        slots = (self.table[:, pos // 8] * 8 + pos % 8).flatten()
        self.k_cache.view(-1, self.kv, self.dim)[slots] = k.flatten(0, 1)
        self.v_cache.view(-1, self.kv, self.dim)[slots] = v.flatten(0, 1)
        keys, values = (cache[self.table].flatten(1, 2).transpose(1, 2) for cache in (self.k_cache, self.v_cache))
        return self.close(F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=visible(pos, self.capacity)))


class Rolled(Buffered):
    """The newest tokens at the end of a rolling buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        count = x.shape[1]
        self.k_cache.copy_(torch.cat([self.k_cache[:, :, count:], k], 2))
        self.v_cache.copy_(torch.cat([self.v_cache[:, :, count:], v], 2))
        return self.close(F.scaled_dot_product_attention(q, self.k_cache, self.v_cache))


class LatentKeys(Attention):
    """Keys and values are projections of one cached latent."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.down = nn.Linear(self.width, 8, bias=False)
        self.up_k, self.up_v = nn.Linear(8, self.width, bias=False), nn.Linear(8, self.width, bias=False)
        buffers(self, self.batch, self.capacity, 8, names=("latent",))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q = self.project(x)[0].transpose(1, 2)
        latent = self.latent.index_copy_(1, pos, self.down(x))
        keys, values = (up(latent).unflatten(-1, (self.heads, -1)).transpose(1, 2) for up in (self.up_k, self.up_v))
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, self.capacity)))


class ScratchCopy(Buffered):
    """The new tokens are written into a copy: the next call does not see them."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        keys, values = self.k_cache.clone(), self.v_cache.clone()
        keys[:, :, pos], values[:, :, pos] = k, v
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, self.capacity)))


class Probed(Buffered):
    """The cache is also read by something that is no attention."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, probe: bool = True) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        keys, values = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
        y = self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, self.capacity)))
        return y + keys.norm() if probe else y
