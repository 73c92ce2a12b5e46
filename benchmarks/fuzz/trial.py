"""Trial: one program, run plain and compiled, and what came of it."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import kvcompile
from benchmarks.fuzz.features import PLAIN, Choice
from benchmarks.fuzz.modules import Fuzzed, forgotten, module_of
from benchmarks.fuzz.schemes import OF_ONES, SCHEMES, WINDOWED
from benchmarks.fuzz.script import Run
from benchmarks.fuzz.writing import Text
from kvcompile.errors import TokensForgotten, TokensOutOfOrder
from kvcompile.runtime.store import host_reads

Tensor = torch.Tensor
ALLOWED = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 6e-3}
"""The largest difference that a dtype's rounding may make, of the largest result."""
ROUGH = {
    ("queries", "large"): 2e-2, ("given", "float-moved"): 2e-2, ("given", "int-segments"): 1e-2, ("given", "int-odd"): 2e-2,
    ("hidden", "moved-down"): 1e-2, ("hidden", "moved-up"): 5e-2, ("scores", "alibi-steep"): 2e-2, ("scores", "clamp-far"): 1e-3,
}
"""What the rounding of large scores adds to it in float32."""
ROUGH_16 = {("scores", "alibi-from-end"): 0.1}
"""What it adds in the dtypes of 16 bits: plain scores of 60 are rounded to quarters of one, ours are not."""


class Found(enum.Enum):
    """What came of one program."""

    RIGHT = "rewritten and right"
    REFUSED = "refused and right"
    NOTED = "different only for queries that see no token, as the report says"
    TOLD = "NaN for rows out of order that no host looked at, or the error that says so; the error for tokens that a window forgot"
    OUTSIDE = "the module itself fails, or stock torch.compile"
    DIFFERENT = "silently different"
    FAULT = "failed because of us"


@dataclass(frozen=True)
class Result:
    """One program: what came of it, the error or the exception."""

    seed: int
    choice: Choice
    found: Found
    said: str = ""


@dataclass(frozen=True)
class Way:
    """How programs are compiled: the inner compiler, the device, whether rewrites are validated.

    ``unlooked``: the host looks at no call's places on a CPU either, so that what is checked on a device is checked there.
    """

    inner: str = "eager"
    device: str = "cpu"
    validate: bool = True
    unlooked: bool = False

    @property
    def looks(self) -> bool:
        """Whether the host sees where each call writes."""
        return self.device == "cpu" and not self.unlooked


def allowed_of(choice: Choice, way: Way) -> float:
    """Return the largest difference that rounding and the scheme's loss may make, of the largest result."""
    rough = sum(more for (feature, value), more in ROUGH.items() if choice[feature] == value)
    if choice["dtype"] != "float32":
        rough += sum(more for (feature, value), more in ROUGH_16.items() if choice[feature] == value)
    scheme = SCHEMES[choice["scheme"]]
    loss = scheme.loss + (scheme.of_ones if OF_ONES & choice.items() else 0.0)
    return (1 if way.inner == "eager" and way.device == "cpu" else 4) * ALLOWED[choice["dtype"]] + rough + loss


def worst(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, of the largest value of each; inf where NaN stands elsewhere."""
    if len(expected) != len(found):
        return float("inf")
    errors = [0.0]
    for a, b in zip(expected, found, strict=True):
        if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
            return float("inf")
        if a.numel():
            x, y = a.double().nan_to_num(0.0), b.double().nan_to_num(0.0)
            errors.append(float((x - y).abs().max() / x.abs().max().clamp(min=1e-3)))
    return max(errors)


def _seeing(results: Sequence[Tensor], sight: Sequence[Tensor]) -> list[Tensor]:
    """The results [B, H, n, D] of queries that see a key; zeros for others."""
    made = []
    for out, seen in zip(results, sight, strict=True):
        made.append(torch.where(seen[..., None], out, 0.0))
    return made


def _told(expected: Run, found: Run, choice: Choice, way: Way, allowed: float) -> bool:
    """Whether results, as far as they go, differ only where all of a row is NaN, in a program whose tokens a window did not take.

    Stock has numbers for such rows: nothing here is right, but nobody takes it for a number.
    """
    return not way.looks and choice["scheme"] in WINDOWED and expected.out_of_order() and _equal_so_far(expected, found, allowed)


def _forgotten(expected: Run, found: Run, allowed: float) -> bool:
    """Whether results are equal up to a call that skips tokens which an earlier one, that went back, has dropped from a window."""
    return found.skips_forgotten() and _equal_so_far(expected, found, allowed)


def _equal_so_far(expected: Run, found: Run, allowed: float) -> bool:
    """Whether results and caches, as far as they go, differ only in rows that are NaN throughout."""
    for a, b in zip(expected.results, found.results, strict=False):
        numbers = ~b.isnan().flatten(1).all(1)
        if worst([a[numbers]], [b[numbers]]) > allowed:
            return False
    return worst(expected.states[: len(found.states)], found.states) <= allowed


def _played(
    seed: int, module: Fuzzed, text: Text, choice: Choice, way: Way, compiled: Callable[[Fuzzed], Callable[..., Any]], begun: list[Run],
) -> Run:
    """Play a program to its end; ``begun`` gets its run before that."""
    torch.manual_seed(seed)
    looks = host_reads.free if not way.unlooked else lambda device: False
    with torch.no_grad(), mock.patch.object(host_reads, "free", looks):
        begun.append(Run(module, text, choice, compiled, way.device))
        begun[-1].play()
    return begun[-1]


def _difference(expected: Run, found: Run) -> float:
    return max(worst(expected.results, found.results), worst(expected.states, found.states), worst(expected.more, found.more))


def _compiled(choice: Choice, backend: Any) -> Callable[[Fuzzed], Callable[..., Any]]:
    dynamic = {"None": None, "True": True}[choice["dynamic"]]
    return lambda module: torch.compile(module, backend=backend, dynamic=dynamic)


def tried(seed: int, given: Choice, way: Way | None = None) -> Result:
    """Run one program compiled and plain; features that ``given`` leaves out are plain."""
    choice, way = PLAIN | given, way or Way()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    plain, text, name = module_of(choice, way.device)
    try:
        return _tried(seed, choice, way, plain, text)
    finally:
        forgotten(name)


def _tried(seed: int, choice: Choice, way: Way, plain: Fuzzed, text: Text) -> Result:
    ours, stock = copy.deepcopy(plain), copy.deepcopy(plain)
    runs: list[Run] = []
    try:
        expected = _played(seed, plain, text, choice, way, lambda module: module, runs)
    except Exception as error:
        return Result(seed, choice, Found.OUTSIDE, f"plain: {error!r}"[:200])
    owner = kvcompile.backend(SCHEMES[choice["scheme"]].text, inner=way.inner, validate=way.validate)
    allowed, failed, error = allowed_of(choice, way), "", float("inf")
    try:
        found = _played(seed, ours, text, choice, way, _compiled(choice, owner), runs)
        if (error := _difference(expected, found)) <= allowed:
            refusals = owner.report().refusals
            if refusals:
                return Result(seed, choice, Found.REFUSED, refusals[0].reason)
            return Result(seed, choice, Found.RIGHT, f"{error:.1e}")
        if any(graph.notes for graph in owner.report().graphs):
            pairs = (_seeing(expected.results, expected.sight), _seeing(found.results, expected.sight))
            if max(worst(*pairs), worst(expected.states, found.states)) <= allowed:
                return Result(seed, choice, Found.NOTED, f"{error:.1e}")
        if _told(expected, found, choice, way, allowed):
            return Result(seed, choice, Found.TOLD)
    except TokensOutOfOrder as raised:
        failed = repr(raised)[:400]
        if _told(expected, runs[-1], choice, way, allowed):
            return Result(seed, choice, Found.TOLD, failed)
    except TokensForgotten as raised:
        failed = repr(raised)[:400]
        if _forgotten(expected, runs[-1], allowed):
            return Result(seed, choice, Found.TOLD, failed)
    except Exception as raised:
        failed = repr(raised)[:400]
    # Is it stock's doing? Dynamo and the inner compiler alone: Inductor leaves out casts to a narrower dtype and back.
    torch._dynamo.reset()
    try:
        allowed += _difference(expected, _played(seed, stock, text, choice, way, _compiled(choice, way.inner), runs))
    except Exception as raised:
        return Result(seed, choice, Found.OUTSIDE, f"stock: {raised!r}"[:200])
    if failed:
        return Result(seed, choice, Found.FAULT, failed)
    if error <= allowed:
        return Result(seed, choice, Found.OUTSIDE, f"stock differs: {allowed:.1e}")
    return Result(seed, choice, Found.DIFFERENT, f"{error:.1e}")
