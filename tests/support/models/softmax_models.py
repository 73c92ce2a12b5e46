"""Cached attentions whose weights are more than one softmax: combined, scaled behind the product, made safe where nothing is seen."""

from __future__ import annotations

import torch
from e2e_layers import Attention, buffers, visible
from torch import nn


class Safe(Attention):
    """Padding on the left of row 1: its first queries see nothing, and their weights are made zeros."""

    PADDING = (0, 3)

    def __init__(self, zeros: str, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.kv, self.capacity, self.dim)
        self.zeros = zeros
        self.register_buffer("padding", torch.tensor(self.PADDING)[torch.arange(self.batch) % 2])

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = (item.transpose(1, 2) for item in self.project(x))
        keys, values = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
        seen = (visible(pos, self.capacity) & (torch.arange(self.capacity) >= self.padding[:, None])[:, None])[:, None]
        return self.close(self.weights(q @ keys.mT * self.dim**-0.5, seen) @ values)

    def weights(self, scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """The softmax of what is seen, zeros where nothing is."""
        if self.zeros == "by the mask":
            return scores.masked_fill(~seen, -1e9).softmax(-1).masked_fill(~seen, 0.0)
        if self.zeros == "by the row":
            return torch.where(seen.any(-1, keepdim=True), scores.masked_fill(~seen, float("-inf")).softmax(-1), 0.0)
        hidden = scores.masked_fill(~seen, -1e9)
        weights = (hidden - hidden.amax(-1, keepdim=True)).exp() * seen
        return weights / (weights.sum(-1, keepdim=True) + 1e-9)


class Scaled(Attention):
    """Sinks as a factor of the result: sigmoid(logsumexp(scores) - sink)."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.kv, self.capacity, self.dim)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, self.heads))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = (item.transpose(1, 2) for item in self.project(x))
        keys, values = (
            cache.index_copy_(2, pos, new).repeat_interleave(self.heads // self.kv, 1)
            for cache, new in ((self.k_cache, k), (self.v_cache, v))
        )
        scores = (q @ keys.mT * self.dim**-0.5).masked_fill(~visible(pos, self.capacity), float("-inf"))
        share = (torch.logsumexp(scores, -1) - self.sinks.view(1, -1, 1)).sigmoid()
        return self.close(scores.softmax(-1) @ values * share.unsqueeze(-1))


class Differential(Attention):
    """(softmax(q1 k1) - lambda softmax(q2 k2)) v, the two keys as halves of one cache's channels, or of its heads."""

    def __init__(self, halves: str, **sizes: int) -> None:
        super().__init__(**sizes)
        channels = halves == "channels"
        self.dims = (self.kv, 2 * self.dim) if channels else (2 * self.kv, self.dim)
        self.dim_split = -1 if channels else 1
        self.register_buffer("k_cache", torch.zeros(self.batch, self.dims[0], self.capacity, self.dims[1]))
        self.register_buffer("v_cache", torch.zeros(self.batch, self.kv, self.capacity, 2 * self.dim))
        self.twice = nn.Linear(self.width, 2 * (self.heads + 2 * self.kv) * self.dim)
        self.down = nn.Linear(2 * self.heads * self.dim, self.width)
        self.factor = nn.Parameter(torch.linspace(0.2, 0.8, self.heads).view(-1, 1, 1))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.twice(x).split([2 * count * self.dim for count in (self.heads, self.kv, self.kv)], -1)
        channels = self.dim_split == -1
        q = q.unflatten(-1, (self.heads, -1) if channels else (-1, self.dim)).transpose(1, 2)
        keys = self.k_cache.index_copy_(2, pos, k.unflatten(-1, self.dims).transpose(1, 2))
        values = self.v_cache.index_copy_(2, pos, v.unflatten(-1, (self.kv, -1)).transpose(1, 2))
        repeats = self.heads // self.kv
        one, other = (
            self.softmax(a, b.repeat_interleave(repeats, 1), pos)
            for a, b in zip(q.chunk(2, self.dim_split), keys.chunk(2, self.dim_split), strict=True)
        )
        y = (one - self.factor * other) @ values.repeat_interleave(repeats, 1)
        return self.down(y.transpose(1, 2).flatten(2))

    def softmax(self, q: torch.Tensor, k: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        """Causal weights [B, H, S, T]."""
        return (q @ k.mT * self.dim**-0.5).masked_fill(~visible(pos, self.capacity), float("-inf")).softmax(-1)


class DifferentialConcatenated(Attention):
    """The same over caches that grow; ``by_token``: the factor differs between cached tokens, and no product can be taken apart."""

    def __init__(self, by_token: bool = False, **sizes: int) -> None:
        super().__init__(**sizes)
        self.by_token = by_token
        self.twice = nn.Linear(self.width, 2 * self.heads * self.dim)

    def forward(
        self, x: torch.Tensor, past: tuple[torch.Tensor, ...] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        q, k, v = (item.transpose(1, 2) for item in self.project(x))
        more_q, more_k = (item.unflatten(-1, (self.heads, -1)).transpose(1, 2) for item in self.twice(x).chunk(2, -1))
        new = (k, more_k, v)
        kept = new if past is None else tuple(torch.cat([old, item], 2) for old, item in zip(past, new, strict=True))
        count, total = x.shape[1], kept[0].shape[2]
        hidden = torch.arange(total) > (torch.arange(count) + (total - count))[:, None]
        one, other = (
            (a @ b.mT * self.dim**-0.5).masked_fill(hidden, float("-inf")).softmax(-1) for a, b in ((q, kept[0]), (more_q, kept[1]))
        )
        factor = torch.arange(total) * 0.01 if self.by_token else torch.sigmoid(q.mean(-1, keepdim=True))
        return self.close((one - other * factor) @ kept[2]), kept
