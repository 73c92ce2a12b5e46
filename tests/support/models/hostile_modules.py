"""Attentions that are one step away from one that is recognised, and mean something else.

Each is a cached attention of ``Odd`` with one part spelled otherwise: the scores, the softmax, the mask, the weights, or the cache as it is
read. Some can be rewritten, some cannot; what the compiler may never do is to rewrite one into something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from e2e_models import Attention, buffers, visible

INF = float("-inf")
LOWEST = torch.finfo(torch.float32).min
Tensor = torch.Tensor


class Hostile(Attention):
    """An attention over two buffers whose parts are those of ``parts``."""

    def __init__(self, parts: Parts, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.kv, self.capacity, self.dim)
        self.parts = parts

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        parts = self.parts
        q, k, v = self.heads_first(x)
        k, v = parts.keys(self.k_cache.index_copy_(2, pos, k)), parts.values(self.v_cache.index_copy_(2, pos, v))
        if self.kv != self.heads:
            k, v = (item.repeat_interleave(self.heads // self.kv, 1) for item in (k, v))
        scores = parts.scores(q @ k.mT * self.dim**-0.5, pos)
        weights = parts.weights(parts.softmax(parts.masked(scores, parts.mask(pos, self.capacity))), pos)
        return self.close((weights @ v).to(self.o.weight.dtype))


@dataclass(frozen=True)
class Parts:
    """How each part of an attention is spelled; the defaults are the plain causal one."""

    scores: Callable[[Tensor, Tensor], Tensor] = lambda s, pos: s
    mask: Callable[[Tensor, int], Tensor] = visible
    masked: Callable[[Tensor, Tensor], Tensor] = lambda s, seen: s.masked_fill(~seen, INF)
    softmax: Callable[[Tensor], Tensor] = lambda s: s.softmax(-1)
    weights: Callable[[Tensor, Tensor], Tensor] = lambda w, pos: w
    keys: Callable[[Tensor], Tensor] = lambda k: k
    values: Callable[[Tensor], Tensor] = lambda v: v


def _divided(e: Tensor, least: float = 0.0) -> Tensor:
    return e / (e.sum(-1, keepdim=True) + least)


def _far(pos: Tensor, s: Tensor) -> Tensor:
    return (pos[:, None] - torch.arange(s.shape[-1])).abs()


def _seen_behind(count: int) -> Callable[[Tensor, int], Tensor]:
    return lambda pos, size: visible(pos, size) & (torch.arange(size) > count)


HOSTILE: dict[str, Parts] = {
    "less-maximum-over-heads": Parts(softmax=lambda s: (s - s.amax(1, keepdim=True)).softmax(-1)),
    "less-maximum-over-heads-by-hand": Parts(softmax=lambda s: _divided((s - s.amax(1, keepdim=True)).exp())),
    "less-maximum-over-queries": Parts(softmax=lambda s: _divided((s - s.amax(2, keepdim=True).clamp(min=-1e4)).exp())),
    "less-mean": Parts(scores=lambda s, pos: s - s.mean(-1, keepdim=True)),
    "bias-inside-the-cap": Parts(scores=lambda s, pos: (torch.tanh(s / 5) + _far(pos, s) * -0.01) * 5),
    "negative-cap": Parts(scores=lambda s, pos: -5 * torch.tanh(s / 5)),
    "cap-of-the-negative": Parts(scores=lambda s, pos: 5 * torch.tanh(-s / 5)),
    "cap-by-two-numbers": Parts(scores=lambda s, pos: 5 * torch.tanh(s / 4)),
    "mask-inside-the-cap": Parts(masked=lambda s, seen: torch.tanh(s.masked_fill(~seen, -1e4) / 5) * 5),
    "floor": Parts(scores=lambda s, pos: s.floor()),
    "rounded": Parts(scores=lambda s, pos: (s * 8).round() / 8),
    "scores-to-int": Parts(scores=lambda s, pos: s.int().float()),
    "scores-to-bool": Parts(scores=lambda s, pos: s.bool().float()),
    "scores-to-float8": Parts(scores=lambda s, pos: s.to(torch.float8_e4m3fn).float()),
    "scores-to-bfloat16": Parts(scores=lambda s, pos: s.bfloat16().float()),
    "softmax-in-float16": Parts(softmax=lambda s: s.half().softmax(-1).float()),
    "weights-to-float8": Parts(weights=lambda w, pos: w.to(torch.float8_e4m3fn).float()),
    "keys-to-float8": Parts(keys=lambda k: k.to(torch.float8_e4m3fn).float()),
    "keys-to-float16": Parts(keys=lambda k: k.half().float()),
    "values-to-bfloat16": Parts(values=lambda v: v.bfloat16().float()),
    "values-to-int": Parts(values=lambda v: v.int().float()),
    "half-a-position": Parts(mask=lambda pos, size: torch.arange(size) < pos[:, None] + 0.5),
    "window-of-7.5": Parts(mask=lambda pos, size: visible(pos, size) & (torch.arange(size) > pos[:, None] - 7.5)),
    "window-from-7.5": Parts(mask=lambda pos, size: visible(pos, size) & (torch.arange(size) >= pos[:, None] - 7.5)),
    "every-second": Parts(mask=lambda pos, size: torch.arange(0, 2 * size, 2) <= pos[:, None]),
    "from-a-half": Parts(mask=lambda pos, size: torch.arange(0.5, size) <= pos[:, None]),
    "not-of-an-int": Parts(mask=lambda pos, size: (~visible(pos, size).int() + 2).bool()),
    "both-sides": Parts(mask=lambda pos, size: (torch.arange(size) - pos[:, None]).abs() < 4),
    "blocks-of-two": Parts(mask=lambda pos, size: torch.arange(size) // 2 <= pos[:, None] // 2),
    "before-itself": Parts(mask=lambda pos, size: torch.arange(size) < pos[:, None]),
    "temperature-after-a-fill": Parts(masked=lambda s, seen: s.masked_fill(~seen, -1e4) * 0.001),
    "division-after-a-fill": Parts(masked=lambda s, seen: s.masked_fill(~seen, -1e4) / 3000),
    "small-fill": Parts(masked=lambda s, seen: s.masked_fill(~seen, -5.0)),
    "nothing-seen-lowest": Parts(mask=_seen_behind(2), masked=lambda s, seen: s.masked_fill(~seen, LOWEST)),
    "nothing-seen-infinite": Parts(mask=_seen_behind(2)),
    "nothing-seen-added": Parts(mask=_seen_behind(2), masked=lambda s, seen: s + torch.where(seen, 0.0, LOWEST)),
    "bias-without-a-mask": Parts(scores=lambda s, pos: s - _far(pos, s) * 0.3, masked=lambda s, seen: s),
    "zeros-count": Parts(masked=lambda s, seen: s),
    "masked-weights": Parts(masked=lambda s, seen: s, weights=lambda w, pos: w * visible(pos, w.shape[-1])),
    "divided-by-more": Parts(softmax=lambda s: _divided(s.exp(), 1.0)),
    "weights-over-heads": Parts(weights=lambda w, pos: torch.einsum("bhst,hg->bgst", w, torch.eye(4) + 0.25)),
    "powers-of-two": Parts(softmax=lambda s: _divided(torch.exp2(s))),
    "temperature-by-position": Parts(scores=lambda s, pos: s * torch.log(pos + 2.0)[:, None]),
    "values-rolled-over-heads": Parts(values=lambda v: v.roll(1, 1)),
    "keys-flipped": Parts(keys=lambda k: k.flip(-2)),
    "normalised-keys": Parts(keys=lambda k: F.normalize(k, dim=-1)),
    "negative-scale": Parts(scores=lambda s, pos: -s),
}
"""Names and parts: none may be rewritten into something else."""
