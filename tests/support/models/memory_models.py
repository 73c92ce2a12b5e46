"""Cached attentions with learned memory tokens ahead of the cache (``num_mem_kv``): grown, static, grouped, masked, capped."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from e2e_layers import Attention, buffers, visible
from torch import nn

MEMORY = 3


def memory(module: Attention, heads: int) -> None:
    """Give a module learned keys and values."""
    module.mem_k = nn.Parameter(torch.randn(heads, MEMORY, module.dim))
    module.mem_v = nn.Parameter(torch.randn(heads, MEMORY, module.dim))


def bottom_right(queries: int, tokens: int) -> torch.Tensor:
    """x-transformers' causal mask, bool [S, m + T]: true where a token is hidden."""
    return torch.ones(queries, tokens, dtype=torch.bool).triu(tokens - queries + 1)


class Grown(Attention):
    """x-transformers: a dynamic cache without the memory, which stands ahead of it in each call; scores spelled out."""

    def __init__(self, flat: bool = False, padded: bool = False, softcap: float = 0.0, **sizes: int) -> None:
        super().__init__(**sizes)
        self.flat, self.padded, self.softcap = flat, padded, softcap
        memory(self, self.kv)
        self.register_buffer("seen", torch.arange(self.capacity) >= 2 * (torch.arange(self.batch) % 2)[:, None])

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None = None):
        q, k, v = self.heads_first(x)
        new, rows = (k, v), x.shape[0]
        mem = [item.unsqueeze(0).expand(rows, -1, -1, -1) for item in (self.mem_k, self.mem_v)]
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        present = (k, v)
        if self.flat and past is not None:
            k, v = (torch.cat((m, old, fresh), dim=-2) for m, old, fresh in zip(mem, past, new, strict=True))
        else:
            k, v = (torch.cat((m, item), dim=-2) for m, item in zip(mem, present, strict=True))
        repeats = self.heads // self.kv
        k, v = (item.repeat_interleave(repeats, 1) for item in (k, v))
        scores = q @ k.transpose(-1, -2) * self.dim**-0.5
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        hidden = bottom_right(x.shape[1], k.shape[2])
        if self.padded:
            # Row 1 hides its first two tokens; the memory is padded with what is seen.
            seen = F.pad(self.seen[:rows, : present[0].shape[2]], (MEMORY, 0), value=True)
            hidden = hidden | ~seen[:, None, None, :]
        return self.close(scores.masked_fill(hidden, -torch.finfo(scores.dtype).max).softmax(-1) @ v), present


class Static(Attention):
    """A static cache that is read behind the memory, by SDPA with a padded mask."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.kv, self.capacity, self.dim)
        memory(self, self.kv)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        self.k_cache[:, :, pos], self.v_cache[:, :, pos] = k, v
        keys, values = (
            torch.cat((mem.expand(x.shape[0], -1, -1, -1), cache), 2).repeat_interleave(self.heads // self.kv, 1)
            for mem, cache in ((self.mem_k, self.k_cache), (self.mem_v, self.v_cache))
        )
        mask = F.pad(visible(pos, self.capacity), (MEMORY, 0), value=True)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))


class Tiled(Attention):
    """Query head h reads kv head h % K, and a bias a head reaches over the memory."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"kv": 2, **sizes})
        buffers(self, self.batch, self.kv, self.capacity, self.dim)
        memory(self, self.kv)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        keys, values = (
            torch.cat((mem.expand(x.shape[0], -1, -1, -1), cache.index_copy_(2, pos, new)), 2).repeat(1, self.heads // self.kv, 1, 1)
            for mem, cache, new in ((self.mem_k, self.k_cache, k), (self.mem_v, self.v_cache, v))
        )
        bias = torch.linspace(-0.1, 0.2, self.heads)[:, None, None] * torch.arange(MEMORY + self.capacity)
        hidden = F.pad(~visible(pos, self.capacity), (MEMORY, 0), value=False)
        scores = q @ keys.mT * self.dim**-0.5 + bias.masked_fill(hidden, float("-inf"))
        return self.close(scores.softmax(-1) @ values)
