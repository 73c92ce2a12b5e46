"""Cached attentions whose log-sums are read beside their results: merged over parts of the tokens, or an output of their own."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from e2e_layers import Attention, Buffered, visible
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

Parts = tuple[torch.Tensor, torch.Tensor]
"""A result [B, H, S, D] and its log-sums [B, H, S]."""


def spelled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> Parts:
    """Products and a softmax, the log-sum first."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v, torch.logsumexp(scores, -1)


def eagerly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> Parts:
    """What is made of the log-sum stands ahead of the product with the values."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if seen is not None:
        scores = scores + torch.where(seen, 0.0, float("-inf"))
    total = torch.logsumexp(scores, -1, keepdim=True)
    halved = (total * 0.5).squeeze(-1)
    return torch.exp(scores - total) @ v, halved * 2


def cast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> Parts:
    """The softmax and the log-sum each cast the scores for themselves."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if seen is None else scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    return F.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v, torch.logsumexp(scores.to(torch.float64), -1).float()


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> Parts:
    """The operator behind SDPA."""
    mask = None if seen is None else torch.where(seen, 0.0, float("-inf")).expand(q.shape[0], q.shape[1], -1, -1)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)


def flexed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> Parts:
    """flex_attention, asked for its log-sum."""
    def score(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return s if seen is None else torch.where(seen[i, j], s, -float("inf"))

    out, more = flex_attention(q, k, v, score_mod=score, return_aux=AuxRequest(lse=True))
    return out, more.lse


def silenced(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> Parts:
    """Weights of some queries are set to zero, and their log-sums are not."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if seen is None else scores.masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) * (torch.arange(q.shape[2]) != 1)[:, None]) @ v, torch.logsumexp(scores, -1)


def overwritten(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> Parts:
    """What is made of the log-sum reads a tensor that is written to before the attention is complete."""
    scores, gain = q @ k.mT * q.shape[-1] ** -0.5, torch.ones(1)
    scores = scores if seen is None else scores.masked_fill(~seen, float("-inf"))
    scaled = torch.logsumexp(scores, -1) * gain
    gain.mul_(3)
    return scores.softmax(-1) @ v * gain / 3, scaled


def merged(first: Parts, second: Parts) -> torch.Tensor:
    """One attention over the tokens of both."""
    (a, la), (b, lb) = first, second
    share = torch.sigmoid(la - lb).unsqueeze(-1)
    return a * share + b * (1 - share)


class Cascade(Buffered):
    """A prefix that all rows share, dense, and each row's own cache, merged by their log-sums."""

    def __init__(self, attend: Callable[..., Parts], prefix: int = 5, **sizes: int) -> None:
        super().__init__(**sizes)
        self.attend = attend
        self.prefix = nn.Parameter(torch.randn(2, 1, self.heads, prefix, self.dim))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        keys, values = (
            cache.index_copy_(2, pos, new).repeat_interleave(self.heads // self.kv, 1)
            for cache, new in ((self.k_cache, k), (self.v_cache, v))
        )
        shared = self.attend(q, *self.prefix.detach().expand(-1, x.shape[0], -1, -1, -1), None)
        return self.close(merged(shared, self.attend(q, keys, values, visible(pos, self.capacity))))


class TwoCaches(Attention):
    """Ring attention by hand: two caches of alternating chunks, each grown by its own, merged by the running log-sum."""

    def forward(self, x: torch.Tensor, first: tuple[torch.Tensor, ...] | None = None, second: tuple[torch.Tensor, ...] | None = None):
        q, k, v = self.heads_first(x)
        if first is None or second is None:
            first, second = (k, v), (k + 0.5, v - 0.5)
        else:
            first = tuple(torch.cat((past, new), 2) for past, new in zip(first, (k, v), strict=True))
            second = tuple(torch.cat((past, new + shift), 2) for past, new, shift in zip(second, (k, v), (0.5, -0.5), strict=True))
        total, out = q.new_full(q.shape[:3], float("-inf")), torch.zeros_like(q)
        for keys, values in (first, second):
            seen = torch.ones(x.shape[1], keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - x.shape[1])
            part, log = spelled(q, keys, values, seen)
            both = torch.logaddexp(total, log)
            out = out * (total - both).exp().unsqueeze(-1) + part * (log - both).exp().unsqueeze(-1)
            total = both
        return self.close(out), first, second


class Returned(Buffered):
    """The log-sum is a result of the model, with sinks in it."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        keys, values = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
        scores = (q @ keys.mT / math.sqrt(self.dim)).masked_fill(~visible(pos, self.capacity), float("-inf"))
        scores = torch.cat([scores, torch.linspace(-1, 1, self.heads).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        y = self.close(F.softmax(scores, -1)[..., :-1] @ values)
        return torch.cat((y, scores.logsumexp(-1).transpose(1, 2)), -1)
