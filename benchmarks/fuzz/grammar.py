"""The fuzzer's grammar: what a cached attention may choose on every axis, the plain choice first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Tensor = torch.Tensor
Choice = dict[str, str]
HEADS, DIM, CAPACITY, BATCH = 4, 16, 48, 2
RING, BLOCK = 8, 8
"""Places of a ring, and of a block of a pool."""
INF = float("-inf")


def _far(s: Tensor, pos: Tensor) -> Tensor:
    return (pos[..., :, None] - torch.arange(s.shape[-1])).abs()


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "causal": lambda p, t: t <= p,
    "window": lambda p, t: (t <= p) & (t > p - 4),
    "window-float": lambda p, t: (t <= p) & (t > p - 4.5),
    "lt-float": lambda p, t: t < p + 0.5,
    "every-second": lambda p, t: (t <= p) & (t % 2 == 0),
    "not-the-third": lambda p, t: (t <= p) & (t != 2),
    "prefix": lambda p, t: (t <= p) | (t < 2),
    "blocks": lambda p, t: (t // 4 == p // 4) & (t <= p),
    "blind": lambda p, t: (t <= p) & (t > 1),
    "strict": lambda p, t: t < p,
    "ahead": lambda p, t: t <= p + 1,
    "int-not": lambda p, t: (~(t <= p).int() + 2).bool(),
    "half-steps": lambda p, t: torch.arange(0.5, t.shape[-1]) <= p,
    "furthest": lambda p, t: (t <= p.max()) & (p >= 0),
}
HIDDEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fill": lambda s, seen: s.masked_fill(~seen, INF),
    "where": lambda s, seen: torch.where(seen, s, INF),
    "add": lambda s, seen: s + torch.where(seen, 0.0, INF),
    "lowest": lambda s, seen: s.masked_fill(~seen, torch.finfo(s.dtype).min),
    "add-lowest": lambda s, seen: s + torch.where(seen, 0.0, torch.finfo(s.dtype).min),
    "minus-large": lambda s, seen: s - (~seen).to(s.dtype) * 1e9,
    "ten-thousand": lambda s, seen: s.masked_fill(~seen, -1e4),
    "small": lambda s, seen: s.masked_fill(~seen, -6.0),
    "times": lambda s, seen: s * seen,
    "none": lambda s, seen: s,
    "then-cooled": lambda s, seen: s.masked_fill(~seen, -1e4) / 2000,
}
SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda s, pos: s,
    "cap": lambda s, pos: torch.tanh(s / 5) * 5,
    "cap-uneven": lambda s, pos: torch.tanh(s / 5) * 3,
    "cap-negative": lambda s, pos: torch.tanh(s / 5) * -5,
    "cap-biased": lambda s, pos: (torch.tanh(s / 5) - _far(s, pos) * 0.01) * 5,
    "alibi": lambda s, pos: s - _far(s, pos) * 0.1,
    "alibi-heads": lambda s, pos: s - _far(s, pos) * torch.arange(1, HEADS + 1)[:, None, None] * 0.05,
    "negative": lambda s, pos: -s,
    "twice": lambda s, pos: s * 2,
    "temperature": lambda s, pos: s * torch.log(pos + 2.0)[:, None].to(s.dtype),
    "floor": lambda s, pos: s.floor(),
    "clamp": lambda s, pos: s.clamp(-1, 1),
    "relu": lambda s, pos: s.relu(),
    "int": lambda s, pos: s.int().to(s.dtype),
    "float8": lambda s, pos: s.to(torch.float8_e4m3fn).to(s.dtype),
    "float64": lambda s, pos: s.double().to(s.dtype),
    "less-mean": lambda s, pos: s - s.mean(-1, keepdim=True),
    "less-head-maximum": lambda s, pos: s - s.amax(1, keepdim=True),
    "less-maximum": lambda s, pos: s - s.amax(-1, keepdim=True),
}


def _over_sum(e: Tensor, least: float = 0.0) -> Tensor:
    return e / (e.sum(-1, keepdim=True) + least)


SOFTMAX: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda s: s.softmax(-1),
    "float32": lambda s: s.float().softmax(-1).to(s.dtype),
    "by-hand": lambda s: _over_sum((s - s.amax(-1, keepdim=True)).exp()),
    "log": lambda s: s.log_softmax(-1).exp(),
    "plus-one": lambda s: _over_sum(s.exp(), 1.0),
    "two": lambda s: _over_sum(torch.exp2(s - s.amax(-1, keepdim=True))),
    "sigmoid": lambda s: s.sigmoid(),
    "no-nan": lambda s: s.softmax(-1).nan_to_num(0.0),
}
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda w: w,
    "float8": lambda w: w.to(torch.float8_e4m3fn).to(w.dtype),
    "halved": lambda w: w * 0.5,
    "clamped": lambda w: w.clamp(min=0.02),
    "mixed": lambda w: torch.einsum("bhst,hg->bgst", w, torch.eye(HEADS, dtype=w.dtype) + 0.2),
}
CACHE: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "contiguous": lambda x: x.contiguous(),
    "float8": lambda x: x.to(torch.float8_e4m3fn).to(x.dtype),
    "scaled": lambda x: x * 0.5,
    "shifted": lambda x: x + 0.25,
    "rolled-heads": lambda x: x.roll(1, 1),
    "clamped": lambda x: x.clamp(-0.5, 0.5),
}
LAYOUTS = (
    "heads-first", "tokens-first", "keys-transposed", "assigned", "sliced", "concatenated", "one-tensor", "halves", "layers", "rows",
    "ring", "paged", "keys-are-values",
)
AXES: dict[str, Sequence[str]] = {
    "layout": LAYOUTS, "groups": ("1", "2", "4", "tiled"), "mask": tuple(MASKS), "hidden": tuple(HIDDEN), "scores": tuple(SCORES),
    "softmax": tuple(SOFTMAX), "weights": tuple(WEIGHTS), "keys": tuple(CACHE), "values": tuple(CACHE),
    "dtype": ("float32", "float32", "float32", "bfloat16"), "fused": ("no", "sdpa"),
    "beside": ("nobody", "sum", "returned", "before", "alias", "cleared"),
    "chunks": ("5,1,1,3", "1,1,1", "7,2,1"), "positions": ("argument", "int", "counter", "float"),
    "given": ("nothing", "bool", "float", "padding"), "unwritten": ("zeros", "ones", "noise"), "prompt": ("compiled", "eager"),
    "scheme": ("dense", "dense", "int8"),
}
"""The grammar. Left out: every product of choices; a module is odd on a few axes."""
