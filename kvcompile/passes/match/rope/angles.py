"""Angles: cosine and sine of a rotary embedding as functions of the position, and how to compute them.

``angle_reader`` reads from the graph how the cosine and sine of the new tokens are computed, as expressions of an integer position and the
channel. ``tables`` computes these for any positions, as graph nodes or at once.

An expression holds numbers and indices of constants, no graph nodes: it outlives its graph, and equal expressions compute the same.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

aten = torch.ops.aten


class ComplexPart(enum.Enum):
    """The real or the imaginary part of a complex number; NONE for a real number."""

    NONE = "none"
    REAL = "real"
    IMAG = "imaginary"


class Spread(enum.Enum):
    """The mapping of the ``width`` rotated channels to the channels of the tables."""

    WHOLE = "each its own"
    HALVES = "both halves the same"
    PAIRS = "neighbours the same"


@dataclass(frozen=True)
class AngleStep:
    """One step of an expression: an ATen overload's name over steps and numbers, or one of the leaves below.

    ``position``  the token's position, an integer
    ``arange``    (start, end, step, dtype): numbers along the channels
    ``constant``  (constant, index of each other dim, the channels' dim or None, part)
    ``lookup``    like ``constant``, with the dim that the position indexes in front
    ``cast``      (step, dtype)
    Leaves along the channels end with (first, count, stride): the entries that they read.
    """

    op: str
    args: tuple[Any, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether the value depends on the position."""
        return self.op in {"position", "lookup"} or any(isinstance(arg, AngleStep) and arg.moves for arg in self.args)


@dataclass(frozen=True)
class Angles:
    """The angles of a rotation: cosine and sine of ``width`` channels as functions of the position."""

    cos: AngleStep
    sin: AngleStep
    spread: Spread
    width: int


Call = Callable[..., Any]


def tables(angles: Angles, call: Call, position: Any, constants: Sequence[Any], rows: Sequence[Sequence[int]], device: Any) -> list[Any]:
    """Return [cosine, sine], each [1 or B, T, width], at ``position``, int64 [1 or B, T].

    ``call(op, *args)`` either runs an ATen operator or adds it to a graph; ``rows``: the shapes of ``constants``.
    """
    maker = _Maker(call, call(aten.unsqueeze.default, position, -1), constants, rows, device)
    return [maker.spread(maker.make(item), angles.spread) for item in (angles.cos, angles.sin)]


@dataclass
class _Maker:
    """A maker computes expressions, every distinct step once."""

    call: Call
    position: Any
    constants: Sequence[Any]
    shapes: Sequence[Sequence[int]]
    device: Any
    made: dict[AngleStep, Any] = field(default_factory=dict)

    def spread(self, value: Any, spread: Spread) -> Any:
        """Return a table with its channels spread over all rotated channels."""
        if spread is Spread.HALVES:
            return self.call(aten.cat.default, [value, value], -1)
        return self.call(aten.repeat_interleave.self_int, value, 2, -1) if spread is Spread.PAIRS else value

    def make(self, found: Any) -> Any:
        """Return the value of a step, [1 or B, T, channels] up to broadcasting; a number is its own value."""
        if not isinstance(found, AngleStep):
            return found
        if found not in self.made:
            self.made[found] = self._make(found)
        return self.made[found]

    def _make(self, found: AngleStep) -> Any:
        if found.op == "position":
            return self.position
        if found.op == "number":
            return found.args[0]
        if found.op == "arange":
            start, end, by, dtype, *span = found.args
            return self._narrow(self.call(aten.arange.start_step, start, end, by, dtype=dtype, device=self.device), 0, *span)
        if found.op == "cast":
            return self.call(aten.to.dtype, self.make(found.args[0]), found.args[1])
        if found.op in {"constant", "lookup"}:
            return self._constant(found)
        name, _, overload = found.op.partition(".")
        values = [self.make(arg) for arg in found.args]
        if overload in {"Tensor", "Tensor_Tensor"} and isinstance(values[0], (int, float)):
            # A tensor of one number was read as that number, which operators take as second operand only.
            if name not in {"mul", "add"}:
                values[0] = self.call(aten.full.default, [1], values[0], dtype=torch.float32, device=self.device)
            else:
                values = [values[1], values[0], *values[2:]]
        return self.call(getattr(getattr(aten, name), overload), *values)

    def _constant(self, found: AngleStep) -> Any:
        """Return a constant's channels or, for a look-up, the channels of its rows at the position."""
        args = list(found.args)
        moving = args.pop(0) if found.op == "lookup" else None
        index, fixed, along, part, *span = args
        value, rank = self.constants[index], len(self.shapes[index])
        if part is not ComplexPart.NONE:
            value = self.call(aten.view_as_real.default, value)
            value = self.call(aten.select.int, value, rank, int(part is ComplexPart.IMAG))
        for dim, at in sorted(fixed, reverse=True):
            value = self.call(aten.select.int, value, dim, at)
        if moving is None:
            return self._narrow(value, 0, *span) if along is not None else value
        if along is not None:
            if moving > along:
                value = self.call(aten.permute.default, value, [1, 0])
            value = self._narrow(value, 1, *span)
        else:
            value = self.call(aten.unsqueeze.default, value, -1)
        # Slots beyond the table's end are computed but never attended to: clamp their positions.
        where = self.call(aten.squeeze.dim, self.call(aten.clamp.default, self.position, 0, self.shapes[index][moving] - 1), -1)
        return self.call(aten.embedding.default, value, where)

    def _narrow(self, value: Any, dim: int, first: int, count: int, stride: int) -> Any:
        return self.call(aten.slice.Tensor, value, dim, first, first + (count - 1) * stride + 1, stride)
