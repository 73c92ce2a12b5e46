"""Fuzz: random cached attentions, each run compiled and uncompiled; none may be silently different, none may fail because of us.

``python -m benchmarks.fuzz --count 1000 --jobs 16`` makes modules from seeds 0, 1, 2, ... A module is a choice on each axis of
``grammar.AXES``, odd on one to five of them. What differs is printed with its seed, made smaller (one axis after the other is made plain
while it still differs), and belongs into ``CORPUS``, which the suite runs.
"""

from __future__ import annotations

import copy
import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

import kvcompile
from benchmarks.fuzz.grammar import AXES, BATCH, DIM, HEADS, Choice
from benchmarks.fuzz.modules import Module, fed, sighted

Tensor = torch.Tensor
PLAIN: Choice = {axis: options[0] for axis, options in AXES.items()}
CORPUS: tuple[tuple[int, Choice], ...] = (
    (1665, PLAIN | {"mask": "ahead", "given": "padding"}),
    (61053, PLAIN | {"mask": "int-not", "scores": "alibi-heads", "given": "float"}),
    (3, PLAIN | {"mask": "ahead", "given": "padding", "layout": "sliced"}),
    (3, PLAIN | {"mask": "int-not", "given": "nothing", "layout": "concatenated"}),
    (3, PLAIN | {"mask": "int-not", "given": "float", "layout": "ring"}),
)
"""Modules that were once different or failed: (seed, choice). It only grows."""
ALLOWED = {"float32": 2e-5, "bfloat16": 3e-2}
"""The largest difference that a dtype's rounding may make, of the largest result."""
INT8 = 0.2
"""The largest difference that int8 may make beside that."""


class Found(enum.Enum):
    """What came of one module."""

    RIGHT = "rewritten and right"
    REFUSED = "refused and right"
    NOTED = "different only for queries that see no token, as the report says"
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


def _worst(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    pairs = [(x.double(), y.double()) for x, y in zip(a, b, strict=True)]
    if any(not torch.equal(x.isnan(), y.isnan()) for x, y in pairs):
        return float("inf")
    some = [(x.nan_to_num(0.0), (x - y).nan_to_num(0.0)) for x, y in pairs if x.numel()]
    return max((float(error.abs().max() / x.abs().max().clamp(min=1e-3)) for x, error in some), default=0.0)


def _of(results: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
    return [result[:, which] for result, which in zip(results, rows, strict=True)]


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
            expected = fed(plain, plain, chunks)
    except Exception as error:
        return Result(seed, choice, Found.OUTSIDE, repr(error)[:200])
    torch._dynamo.reset()
    owner = kvcompile.backend(choice["scheme"], inner="eager", validate=validate)
    allowed, failed = ALLOWED[choice["dtype"]] + (INT8 if choice["scheme"] == "int8" else 0.0), ""
    try:
        with torch.no_grad():
            found = fed(ours, torch.compile(ours, backend=owner), chunks)
        if (error := _worst(expected, found)) <= allowed:
            return Result(seed, choice, Found.REFUSED if owner.report().refusals else Found.RIGHT, f"{error:.1e}")
        seeing = sighted(plain, chunks)
        if any(graph.notes for graph in owner.report().graphs) and _worst(_of(expected, seeing), _of(found, seeing)) <= allowed:
            return Result(seed, choice, Found.NOTED, f"{error:.1e}")
    except Exception as raised:
        failed = repr(raised)[:400]
    # Is it Dynamo's doing?
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            allowed += _worst(expected, fed(stock, torch.compile(stock, backend="eager"), chunks))
    except Exception as raised:
        return Result(seed, choice, Found.OUTSIDE, repr(raised)[:200])
    if failed:
        return Result(seed, choice, Found.FAULT, failed)
    if error <= allowed:
        return Result(seed, choice, Found.OUTSIDE, f"stock differs: {allowed:.1e}")
    return Result(seed, choice, Found.DIFFERENT, f"{error:.1e}")


def seeded(seeds: range) -> list[Result]:
    """The results of the modules of some seeds."""
    return [tried(seed, drawn(seed)) for seed in seeds]


def shrunk(result: Result) -> Result:
    """The same failure with as many plain axes as it still fails with."""
    for axis, options in AXES.items():
        if result.choice[axis] != options[0]:
            made = tried(result.seed, {**result.choice, axis: options[0]})
            if made.found is result.found:
                result = replace(made, seed=result.seed)
    return result
