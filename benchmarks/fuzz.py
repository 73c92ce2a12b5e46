"""Fuzz: random cached attentions, each run compiled and uncompiled; none may be silently different, none may fail because of us.

``python -m benchmarks.fuzz --count 1000 --jobs 16`` makes modules from seeds 0, 1, 2, ... A module is a choice on each axis of ``AXES``
(layout, grouping, mask, what hides, scores, softmax, weights, casts of the cache, dtype, chunks), of which most are odd on few axes: plain
choices are twice as likely. What differs is printed with its seed, made smaller (one axis after the other is made plain while it still
differs), and belongs into ``CORPUS``, which the suite runs.
"""

from __future__ import annotations

import argparse
import collections
import copy
import enum
import json
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import kvcompile

Tensor = torch.Tensor
Choice = dict[str, str]
HEADS, DIM, CAPACITY, BATCH = 4, 16, 48, 2
INF = float("-inf")


def _t(seen: int) -> Tensor:
    return torch.arange(seen)


def _far(s: Tensor, pos: Tensor) -> Tensor:
    return (pos[:, None] - _t(s.shape[-1])).abs()


MASKS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "causal": lambda pos, size: _t(size) <= pos[:, None],
    "window": lambda pos, size: (_t(size) <= pos[:, None]) & (_t(size) > pos[:, None] - 4),
    "window-float": lambda pos, size: (_t(size) <= pos[:, None]) & (_t(size) > pos[:, None] - 4.5),
    "lt-float": lambda pos, size: _t(size) < pos[:, None] + 0.5,
    "every-second": lambda pos, size: (_t(size) <= pos[:, None]) & (_t(size) % 2 == 0),
    "not-the-third": lambda pos, size: (_t(size) <= pos[:, None]) & (_t(size) != 2),
    "prefix": lambda pos, size: (_t(size) <= pos[:, None]) | (_t(size) < 2),
    "blocks": lambda pos, size: (_t(size) // 4 == pos[:, None] // 4) & (_t(size) <= pos[:, None]),
    "blind": lambda pos, size: (_t(size) <= pos[:, None]) & (_t(size) > 1),
    "strict": lambda pos, size: _t(size) < pos[:, None],
    "ahead": lambda pos, size: _t(size) <= pos[:, None] + 1,
    "int-not": lambda pos, size: (~(_t(size) <= pos[:, None]).int() + 2).bool(),
    "half-steps": lambda pos, size: torch.arange(0.5, size) <= pos[:, None],
    "furthest": lambda pos, size: (_t(size) <= pos.max()).expand(pos.shape[0], -1),
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
LAYOUTS = ("heads-first", "tokens-first", "keys-transposed", "assigned", "sliced", "concatenated", "one-tensor")
AXES: dict[str, Sequence[str]] = {
    "layout": LAYOUTS, "groups": ("1", "2", "4", "tiled"), "mask": tuple(MASKS), "hidden": tuple(HIDDEN), "scores": tuple(SCORES),
    "softmax": tuple(SOFTMAX), "weights": tuple(WEIGHTS), "keys": tuple(CACHE), "values": tuple(CACHE),
    "dtype": ("float32", "float32", "float32", "bfloat16"), "fused": ("no", "sdpa"), "beside": ("nobody", "sum", "returned"),
    "chunks": ("5,1,1,3", "1,1,1", "7,2,1"),
}
"""The grammar: on every axis the first choice is the plain one."""
CORPUS: tuple[tuple[int, Choice], ...] = ()
"""Modules that were once different or failed: (seed, choice). It only grows."""


class Module(nn.Module):
    """A cached attention, one choice on every axis."""

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.choice = choice
        self.kv = HEADS // (2 if choice["groups"] == "tiled" else int(choice["groups"]))
        width = HEADS * DIM
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, self.kv * DIM, bias=False) for _ in range(2))
        shape = (BATCH, CAPACITY, self.kv, DIM) if choice["layout"] == "tokens-first" else (BATCH, self.kv, CAPACITY, DIM)
        if choice["layout"] == "one-tensor":
            self.register_buffer("cache", torch.zeros(2, *shape))
        elif choice["layout"] != "concatenated":
            turned = (BATCH, self.kv, DIM, CAPACITY) if choice["layout"] == "keys-transposed" else shape
            self.register_buffer("k_cache", torch.zeros(turned))
            self.register_buffer("v_cache", torch.zeros(shape))

    def cached(self, k: Tensor, v: Tensor, pos: Tensor, start: int, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Write new tokens [B, K, S, D] and return all as [B, K, T, D]."""
        layout, count = self.choice["layout"], k.shape[2]
        if layout == "concatenated":
            return (k, v) if past is None else (torch.cat([past[0], k], 2), torch.cat([past[1], v], 2))
        if layout == "one-tensor":
            self.cache[0].index_copy_(2, pos, k)
            self.cache[1].index_copy_(2, pos, v)
            return self.cache[0], self.cache[1]
        if layout == "tokens-first":
            self.k_cache.index_copy_(1, pos, k.transpose(1, 2))
            self.v_cache.index_copy_(1, pos, v.transpose(1, 2))
            return self.k_cache.transpose(1, 2), self.v_cache.transpose(1, 2)
        if layout == "keys-transposed":
            self.k_cache.index_copy_(3, pos, k.transpose(2, 3))
            self.v_cache.index_copy_(2, pos, v)
            return self.k_cache.transpose(2, 3), self.v_cache
        if layout == "assigned":
            self.k_cache[:, :, pos] = k
            self.v_cache[:, :, pos] = v
        elif layout == "sliced":
            self.k_cache[:, :, start : start + count] = k
            self.v_cache[:, :, start : start + count] = v
        else:
            self.k_cache.index_copy_(2, pos, k)
            self.v_cache.index_copy_(2, pos, v)
        return self.k_cache, self.v_cache

    def forward(self, x: Tensor, pos: Tensor, start: int, past: tuple[Tensor, Tensor] | None = None) -> Any:
        """Attend x [B, S, H * D] at positions ``pos`` [S] to the cache."""
        choice = self.choice
        q, k, v = (part(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for part in (self.q, self.k, self.v))
        kept = self.cached(k, v, pos, start, past)
        k, v = CACHE[choice["keys"]](kept[0]), CACHE[choice["values"]](kept[1])
        if self.kv != HEADS:
            count = HEADS // self.kv
            k, v = (item.repeat(1, count, 1, 1) if choice["groups"] == "tiled" else item.repeat_interleave(count, 1) for item in (k, v))
        seen = MASKS[choice["mask"]](pos, k.shape[2])
        if choice["fused"] == "sdpa":
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        else:
            s = SCORES[choice["scores"]](q @ k.transpose(-1, -2) * DIM**-0.5, pos).to(q.dtype)
            w = SOFTMAX[choice["softmax"]](HIDDEN[choice["hidden"]](s, seen))
            out = WEIGHTS[choice["weights"]](w).to(v.dtype) @ v
        y = self.o(out.transpose(1, 2).flatten(2))
        if choice["beside"] == "sum":
            y = y + kept[0].sum() * 0.001
        more = kept if choice["layout"] == "concatenated" else ()
        return (y, *more, kept[0] * 2) if choice["beside"] == "returned" else (y, *more)


class Found(enum.Enum):
    """What came of one module."""

    RIGHT = "rewritten and right"
    REFUSED = "refused and right"
    OUTSIDE = "the module itself fails, or stock torch.compile"
    DIFFERENT = "silently different"
    FAULT = "failed because of us"


@dataclass(frozen=True)
class Result:
    """One module: what came of it, the error or the exception."""

    seed: int
    choice: Choice
    found: Found
    said: str = ""


def drawn(seed: int) -> Choice:
    """The choice of a seed: plain on most axes, odd on a few."""
    source = random.Random(seed)
    odd = set(source.sample(list(AXES), source.randint(1, 5)))
    return {axis: source.choice(list(options)) if axis in odd else options[0] for axis, options in AXES.items()}


def _fed(choice: Choice, call: Callable[..., Any], chunks: Sequence[Tensor]) -> list[Tensor]:
    start, past, found = 0, None, []
    for x in chunks:
        out = call(x, torch.arange(start, start + x.shape[1]), start, past)
        if choice["layout"] == "concatenated":
            past = (out[1], out[2])
        found.append(out[0])
        start += x.shape[1]
    return found


def _worst(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    pairs = [(x.double(), y.double()) for x, y in zip(a, b, strict=True)]
    if any(not torch.equal(x.isnan(), y.isnan()) for x, y in pairs):
        return float("inf")
    return max(float((x - y).nan_to_num(0.0).abs().max() / x.nan_to_num(0.0).abs().max().clamp(min=1e-3)) for x, y in pairs)


def tried(seed: int, choice: Choice, validate: bool = True) -> Result:
    """Run one module compiled, with ``validate`` as the backend takes it, and uncompiled."""
    torch.set_num_threads(1)
    dtype = getattr(torch, choice["dtype"])
    torch.manual_seed(seed)
    try:
        plain = Module(choice).to(dtype).eval()
        chunks = [torch.randn(BATCH, int(count), HEADS * DIM).to(dtype) for count in choice["chunks"].split(",")]
        ours, stock = copy.deepcopy(plain), copy.deepcopy(plain)
        with torch.no_grad():
            expected = _fed(choice, plain, chunks)
            torch._dynamo.reset()
            allowed = _worst(expected, _fed(choice, torch.compile(stock, backend="eager"), chunks))
    except Exception as error:
        return Result(seed, choice, Found.OUTSIDE, repr(error)[:200])
    torch._dynamo.reset()
    owner = kvcompile.backend("dense", inner="eager", validate=validate)
    try:
        with torch.no_grad():
            found = _fed(choice, torch.compile(ours, backend=owner), chunks)
    except Exception as error:
        return Result(seed, choice, Found.FAULT, repr(error)[:400])
    error = _worst(expected, found)
    if not error <= allowed + (2e-5 if dtype is torch.float32 else 3e-2):
        return Result(seed, choice, Found.DIFFERENT, f"{error:.1e}")
    return Result(seed, choice, Found.REFUSED if owner.report().refusals else Found.RIGHT, f"{error:.1e}")


def shrunk(result: Result) -> Result:
    """The same failure with as many plain axes as it still fails with."""
    for axis, options in AXES.items():
        if result.choice[axis] != options[0]:
            made = tried(result.seed, {**result.choice, axis: options[0]})
            if made.found is result.found:
                result = replace(made, seed=result.seed)
    return result


def _seeded(seed: int) -> Result:
    return tried(seed, drawn(seed))


def main(given: Sequence[str] | None = None) -> int:
    """Fuzz as the arguments say; 1 where a module is silently different or fails because of us."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", help="write failures here")
    options, console = parser.parse_args(given), Console()
    counts: collections.Counter[str] = collections.Counter()
    bad: list[Result] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for result in pool.map(_seeded, range(options.first, options.first + options.count), chunksize=4):
            counts[result.found.value] += 1
            if result.found in {Found.DIFFERENT, Found.FAULT}:
                bad.append(shrunk(result))
                odd = {axis: choice for axis, choice in bad[-1].choice.items() if choice != AXES[axis][0]}
                console.print(f"seed {result.seed}: {result.found.value}: {odd} {bad[-1].said}", highlight=False, markup=False)
    console.print(dict(counts))
    if options.json:
        rows = [{"seed": item.seed, "choice": item.choice, "found": item.found.value, "said": item.said} for item in bad]
        Path(options.json).write_text(json.dumps(rows))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
