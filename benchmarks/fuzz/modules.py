"""The fuzzer's module: a cached attention made by a choice on every axis of the grammar, and calls of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.fuzz.grammar import BATCH, BLOCK, CACHE, CAPACITY, DIM, HEADS, HIDDEN, INF, MASKS, RING, SCORES, SOFTMAX, WEIGHTS, Choice

Tensor = torch.Tensor


@dataclass(frozen=True)
class Call:
    """What is known of one call: its positions [S], their first one as an int, what the last call returned, a mask, a table."""

    pos: Tensor
    start: int
    past: tuple[Tensor, Tensor] | None
    mask: Tensor | None
    table: Tensor


class Module(nn.Module):
    """A cached attention, one choice on every axis."""

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.choice = choice
        self.kv = HEADS // (2 if choice["groups"] == "tiled" else int(choice["groups"]))
        self.room = RING if choice["layout"] == "ring" else CAPACITY
        width = HEADS * DIM
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, self.kv * DIM, bias=False) for _ in range(2))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        for name, shape in self.buffers_of(choice["layout"]).items():
            made = {"zeros": torch.zeros, "ones": torch.ones, "noise": torch.randn}[choice["unwritten"]]
            self.register_buffer(name, made(shape))
        if choice["beside"] == "alias" and hasattr(self, "k_cache"):
            self.register_buffer("alias", self.k_cache.view(-1))

    def buffers_of(self, layout: str) -> dict[str, tuple[int, ...]]:
        """The caches that a layout keeps, by name."""
        shape = (BATCH, self.kv, self.room, DIM)
        named = {
            "concatenated": {}, "one-tensor": {"cache": (2, *shape)}, "layers": {"cache": (3, 2, *shape)},
            "halves": {"cache": (*shape[:3], 2 * DIM)},
            "keys-are-values": {"k_cache": shape}, "tokens-first": dict.fromkeys(("k_cache", "v_cache"), (BATCH, self.room, self.kv, DIM)),
            "keys-transposed": {"k_cache": (BATCH, self.kv, DIM, self.room), "v_cache": shape},
            "paged": dict.fromkeys(("k_cache", "v_cache"), (BATCH * CAPACITY // BLOCK + 1, BLOCK, self.kv, DIM)),
        }
        return named.get(layout, dict.fromkeys(("k_cache", "v_cache"), shape))

    def cached(self, k: Tensor, v: Tensor, pos: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Write new tokens [B, K, S, D] at ``pos`` and return all as [B, K, T, D]."""
        layout, count = self.choice["layout"], k.shape[2]
        if layout == "concatenated":
            return (k, v) if call.past is None else (torch.cat([call.past[0], k], 2), torch.cat([call.past[1], v], 2))
        if layout in {"one-tensor", "layers"}:
            cache = self.cache if layout == "one-tensor" else self.cache[1]
            cache[0].index_copy_(2, pos, k)
            cache[1].index_copy_(2, pos, v)
            return cache[0], cache[1]
        if layout == "halves":
            self.cache.index_copy_(2, pos, torch.cat([k, v], -1))
            return self.cache[..., :DIM], self.cache[..., DIM:]
        if layout == "keys-are-values":
            self.k_cache.index_copy_(2, pos, k)
            return self.k_cache, self.k_cache
        if layout == "tokens-first":
            self.k_cache.index_copy_(1, pos, k.transpose(1, 2))
            self.v_cache.index_copy_(1, pos, v.transpose(1, 2))
            return self.k_cache.transpose(1, 2), self.v_cache.transpose(1, 2)
        if layout == "keys-transposed":
            self.k_cache.index_copy_(3, pos, k.transpose(2, 3))
            self.v_cache.index_copy_(2, pos, v)
            return self.k_cache.transpose(2, 3), self.v_cache
        if layout == "ring":
            for cache, new in ((self.k_cache, k), (self.v_cache, v)):
                cache.copy_(torch.cat([cache, new], 2)[:, :, -RING:])
            return self.k_cache, self.v_cache
        if layout == "paged":
            block, offset = call.table[:, pos // BLOCK], (pos % BLOCK).expand(BATCH, -1)
            self.k_cache[block, offset] = k.transpose(1, 2)
            self.v_cache[block, offset] = v.transpose(1, 2)
            return self.k_cache[call.table].flatten(1, 2).transpose(1, 2), self.v_cache[call.table].flatten(1, 2).transpose(1, 2)
        if layout == "rows":
            rows, heads = torch.arange(BATCH)[:, None, None], torch.arange(self.kv)[None, :, None]
            self.k_cache[rows, heads, pos] = k
            self.v_cache[rows, heads, pos] = v
        elif layout == "assigned":
            self.k_cache[:, :, pos] = k
            self.v_cache[:, :, pos] = v
        elif layout == "sliced":
            self.k_cache[:, :, call.start : call.start + count] = k
            self.v_cache[:, :, call.start : call.start + count] = v
        else:
            self.k_cache.index_copy_(2, pos, k)
            self.v_cache.index_copy_(2, pos, v)
        return self.k_cache, self.v_cache

    def positions(self, call: Call, count: int) -> Tensor:
        """The positions [S] of the new tokens, as the module learns of them."""
        kind = self.choice["positions"]
        if kind == "int":
            return torch.arange(call.start, call.start + count)
        if kind == "counter":
            pos = self.counter + torch.arange(count)
            self.counter.add_(count)
            return pos
        return call.pos.to(torch.float32).long() if kind == "float" else call.pos

    def places(self, pos: Tensor, size: int) -> Tensor:
        """The position [T] of every key."""
        return torch.arange(size) + (pos[-1] + 1 - RING if self.choice["layout"] == "ring" else 0)

    def seen(self, pos: Tensor, size: int) -> Tensor:
        """Which keys each query sees, bool [S, T]."""
        t = self.places(pos, size)
        return MASKS[self.choice["mask"]](pos[:, None], t) & (t >= 0)

    def forward(self, x: Tensor, call: Call) -> Any:
        """Attend x [B, S, H * D] to the cache."""
        choice = self.choice
        q, k, v = (part(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for part in (self.q, self.k, self.v))
        pos = self.positions(call, x.shape[1])
        first = next((getattr(self, name) for name in ("k_cache", "cache") if hasattr(self, name)), None)
        before = first.sum() if choice["beside"] == "before" and first is not None else None
        if choice["beside"] == "cleared" and call.start == 0 and first is not None:
            first.zero_()
        kept = self.cached(k, v, pos, call)
        k, v = CACHE[choice["keys"]](kept[0]), CACHE[choice["values"]](kept[1])
        if self.kv != HEADS:
            count = HEADS // self.kv
            k, v = (item.repeat(1, count, 1, 1) if choice["groups"] == "tiled" else item.repeat_interleave(count, 1) for item in (k, v))
        given = call.mask
        if given is None or choice["given"] == "padding":
            seen = self.seen(pos, k.shape[2])
            seen = seen if given is None else (seen & given[:, None, None, : k.shape[2]]) | (self.places(pos, k.shape[2]) == pos[:, None])
        else:
            seen = given
        if choice["fused"] == "sdpa":
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        else:
            s = SCORES[choice["scores"]](q @ k.transpose(-1, -2) * DIM**-0.5, pos).to(q.dtype)
            hidden = HIDDEN[choice["hidden"]](s, seen) if seen.dtype is torch.bool else s + seen
            out = WEIGHTS[choice["weights"]](SOFTMAX[choice["softmax"]](hidden)).to(v.dtype) @ v
        y = self.o(out.transpose(1, 2).flatten(2))
        if choice["beside"] == "sum":
            y = y + kept[0].sum() * 0.001
        if before is not None:
            y = y + before * 0.001
        if hasattr(self, "alias"):
            y = y + self.alias[: 2 * DIM].sum() * 0.01
        more = kept if choice["layout"] == "concatenated" else ()
        return (y, *more, kept[0] * 2) if choice["beside"] == "returned" else (y, *more)


def fed(module: Module, call: Callable[..., Any], chunks: Sequence[Tensor]) -> list[Tensor]:
    """Give a module its chunks [B, S, H * D] by ``call``, the first by itself where the choice says so; return its results."""
    choice, found, past, start = module.choice, [], None, 0
    table = torch.arange(BATCH * CAPACITY // BLOCK).flip(0).view(BATCH, -1)
    for x in chunks:
        pos = torch.arange(start, start + x.shape[1])
        run = module if choice["prompt"] == "eager" and not found else call
        out = run(x, Call(pos, start, past, _mask(module, pos, x.dtype), table))
        if choice["layout"] == "concatenated":
            past = (out[1], out[2])
        found.append(out[0])
        start += x.shape[1]
    return found


def _mask(module: Module, pos: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The mask argument of a call."""
    given = module.choice["given"]
    if given == "nothing":
        return None
    if given == "padding":
        return torch.arange(CAPACITY) >= torch.arange(BATCH)[:, None]
    size = int(pos[-1]) + 1 if module.choice["layout"] == "concatenated" else module.room
    seen = module.seen(pos, size)[None, None].expand(BATCH, -1, -1, -1)
    return seen.clone() if given == "bool" else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, INF)


def sighted(module: Module, chunks: Sequence[Tensor]) -> list[Tensor]:
    """Which queries [S] of each chunk see any token by the mask."""
    found, start = [], 0
    for x in chunks:
        pos = torch.arange(start, start + x.shape[1])
        found.append(module.seen(pos, start + x.shape[1] if module.choice["layout"] == "concatenated" else module.room).any(-1))
        start += x.shape[1]
    return found
