"""Masks as functions: what does a mask's element say about batch row, query and position?

A mask is built from iotas, comparisons, logic and gathers. ``read`` evaluates its graph symbolically at
coordinates (linear forms of the axes), so that "position <= first new position + query index" is seen
whatever reshapes and broadcasts spelled it. What is not understood stays a ``Load``, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.constants import constant
from kvcompile.passes.graph.operators import COPIES, KINDS, Kind
from kvcompile.passes.graph.shapes import bind, hint, is_tensor, op_name, sizes, value_of


@dataclass(frozen=True)
class Linear:
    """An integer linear form of axes and of the graph's symbolic ints: ``sum(coefficient * axis) + const``."""

    terms: tuple[tuple[str | fx.Node, int], ...] = ()
    const: int = 0

    def plus(self, other: Linear, sign: int = 1) -> Linear:
        """self + sign * other."""
        found = dict(self.terms)
        for axis, coefficient in other.terms:
            found[axis] = found.get(axis, 0) + sign * coefficient
        terms = sorted(((a, c) for a, c in found.items() if c), key=lambda term: str(term[0]))
        return Linear(tuple(terms), self.const + sign * other.const)

    def times(self, factor: int) -> Linear:
        """self * factor."""
        return Linear(tuple((axis, coefficient * factor) for axis, coefficient in self.terms if factor), self.const * factor)

    @property
    def symbols(self) -> tuple[tuple[fx.Node, int], ...]:
        """The terms that are symbolic ints rather than axes."""
        return tuple((axis, coefficient) for axis, coefficient in self.terms if isinstance(axis, fx.Node))

    def of(self, axis: str) -> int:
        """The coefficient of an axis."""
        return dict(self.terms).get(axis, 0)


@dataclass(frozen=True)
class Expr:
    """A node of the function: ``op`` over ``args``; ``num`` holds its number, ``idx`` its form, ``load`` its tensor.

    ``origin`` is the graph node (at coordinates) that already holds this very value.
    """

    op: str
    args: tuple[Expr, ...] = ()
    number: float = 0.0
    linear: Linear = Linear()
    origin: tuple[fx.Node, tuple[Linear, ...]] | None = None

    def uses(self, axis: str) -> bool:
        """Whether the value depends on an axis."""
        if self.op == "idx":
            return self.linear.of(axis) != 0
        if self.op == "load":
            assert self.origin is not None
            return any(form.of(axis) for form in self.origin[1])
        return any(arg.uses(axis) for arg in self.args)


def number(value: float) -> Expr:
    """A constant."""
    return Expr("num", number=float(value))


Coords = tuple[Linear, ...]
COMPARISONS = {"le": "le", "lt": "lt", "ge": "ge", "gt": "gt", "less_equal": "le", "less": "lt", "greater_equal": "ge", "greater": "gt"}
LOGIC = {
    "bitwise_and": "and", "logical_and": "and", "__and__": "and", "bitwise_or": "or", "logical_or": "or", "__or__": "or",
    "bitwise_not": "not", "logical_not": "not",
}
ARITHMETIC = {"add": "add", "sub": "sub", "mul": "mul"}


def _broadcast(node: fx.Node, coords: Coords) -> Coords:
    shape = sizes(node)
    aligned = coords[len(coords) - len(shape) :]
    return tuple(Linear() if size == 1 else form for size, form in zip(shape, aligned, strict=True))


def _operand(item: Any, coords: Coords) -> Expr:
    if is_tensor(item) and constant(item) is None:
        return read(item, _broadcast(item, coords))
    value = constant(item)
    if value is not None:
        return number(value)
    if isinstance(item, bool):
        return number(float(item))
    if isinstance(item, fx.Node) and not is_tensor(item):
        if not isinstance(item.meta.get("val"), torch.SymInt):
            raise _Unknown
        return Expr("idx", linear=integer(item))
    raise _Unknown


def integer(item: Any) -> Linear:
    """A plain or symbolic int as a linear form; None counts as zero."""
    return Linear(((item, 1),)) if isinstance(item, fx.Node) else Linear(const=int(item or 0))


class _Unknown(Exception):
    """Raised where a value cannot be expressed; the enclosing node becomes a Load."""


def _combined(op: str, left: Expr, right: Expr) -> Expr:
    if left.op in {"idx", "num"} and right.op in {"idx", "num"} and op in {"add", "sub"} and "idx" in {left.op, right.op}:
        a = left.linear if left.op == "idx" else Linear(const=int(left.number))
        b = right.linear if right.op == "idx" else Linear(const=int(right.number))
        return Expr("idx", linear=a.plus(b, 1 if op == "add" else -1))
    return Expr(op, (left, right))


def _view(node: fx.Node, coords: Coords) -> Coords:
    """Coordinates of a reshape's operand where only dims of size one come and go."""
    inner, outer = sizes(node.args[0]), sizes(node)  # type: ignore[arg-type]
    kept = [form for size, form in zip(outer, coords, strict=True) if size != 1]
    if [size for size in inner if size != 1] != [size for size in outer if size != 1]:
        raise _Unknown
    rest = iter(kept)
    return tuple(next(rest) if size != 1 else Linear() for size in inner)


def _permuted(node: fx.Node, coords: Coords) -> Coords:
    arguments, rank = bind(node), len(coords)
    if op_name(node) == "permute":
        dims = [int(dim) % rank for dim in arguments["dims"]]
    else:
        dims = list(range(rank))
        a, b = (int(arguments["dim0"]) % rank, int(arguments["dim1"]) % rank) if "dim0" in arguments else (-1 % rank, -2 % rank)
        dims[a], dims[b] = dims[b], dims[a]
    moved = list(coords)
    for position, dim in enumerate(dims):
        moved[dim] = coords[position]
    return tuple(moved)


def _sliced(node: fx.Node, coords: Coords) -> Coords:
    arguments = bind(node)
    dim = int(arguments["dim"]) % len(coords)
    start, step = arguments.get("start") or 0, arguments.get("step") or 1
    if step != 1 or (isinstance(start, fx.Node) and hint(start) < 0):
        raise _Unknown
    size = sizes(node.args[0])[dim]  # type: ignore[arg-type]
    if isinstance(start, int):
        start = max(start + size, 0) if start < 0 else start
    moved = list(coords)
    moved[dim] = moved[dim].plus(integer(start))
    return tuple(moved)


def _selected(node: fx.Node, coords: Coords) -> Coords:
    arguments = bind(node)
    dim = int(arguments["dim"]) % (len(coords) + 1)
    return (*coords[:dim], integer(arguments["index"]), *coords[dim:])


def _unsqueezed(node: fx.Node, coords: Coords) -> Coords:
    dim = int(bind(node)["dim"]) % len(coords)
    return (*coords[:dim], *coords[dim + 1 :])


def _expanded(node: fx.Node, coords: Coords) -> Coords:
    return _broadcast(node.args[0], coords)  # type: ignore[arg-type]


MOVES: dict[Kind, Callable[[fx.Node, Coords], Coords]] = {
    Kind.RESHAPE: _view, Kind.UNSQUEEZE: _unsqueezed, Kind.SWAP: _permuted, Kind.SWAP_LAST: _permuted, Kind.PERMUTE: _permuted,
    Kind.SLICE: _sliced, Kind.SELECT: _selected, Kind.BROADCAST: _expanded,
}
"""The map of symbolic coordinates of each kind of view that masks are built with."""


def _gathered(node: fx.Node, coords: Coords) -> Expr:
    arguments = bind(node)
    source, indices = arguments["self"], list(arguments["indices"])
    if any(index is None for index in indices) or len(indices) != len(sizes(source)):
        raise _Unknown
    picked = []
    for index in indices:
        value = read(index, _broadcast(index, coords))
        if value.op == "num":
            picked.append(Linear(const=int(value.number)))
        elif value.op == "idx":
            picked.append(value.linear)
        else:
            raise _Unknown
    return read(source, tuple(picked))


def _triangle(node: fx.Node, coords: Coords) -> Expr:
    arguments = bind(node)
    row, column = coords[-2], coords[-1]
    op = "le" if op_name(node) == "tril" else "ge"
    inside = Expr(op, (Expr("idx", linear=column), Expr("idx", linear=row.plus(integer(arguments["diagonal"])))))
    return Expr("where", (inside, _operand(node.args[0], coords), number(0)))


def _compute(node: fx.Node, coords: Coords) -> Expr:
    name = op_name(node)
    if name == "arange":
        arguments = bind(node)
        step = arguments.get("step") or 1
        if isinstance(step, fx.Node):
            raise _Unknown
        return Expr("idx", linear=coords[0].times(int(step)).plus(integer(arguments.get("start"))))
    if name in COPIES and name not in {"detach_"}:
        return read(node.args[0], coords)  # type: ignore[arg-type]
    if (move := MOVES.get(KINDS.get(name))) is not None:  # type: ignore[arg-type]
        return read(node.args[0], move(node, coords))  # type: ignore[arg-type]
    if name in {"full", "ones", "zeros", "new_ones", "new_zeros", "ones_like", "zeros_like", "full_like", "new_full"}:
        value = 1.0 if "ones" in name else 0.0 if "zeros" in name else constant(bind(node)["fill_value"])
        if value is None:
            raise _Unknown
        return number(value)
    if name in COMPARISONS:
        return Expr(COMPARISONS[name], (_operand(node.args[0], coords), _operand(node.args[1], coords)))
    if name in {"eq", "ne"} and constant(node.args[1]) == 0.0:
        truth = _operand(node.args[0], coords)
        return truth if name == "ne" else Expr("not", (truth,))
    if name in LOGIC and (not name.startswith(("bitwise", "__")) or value_of(node).dtype == torch.bool):
        return Expr(LOGIC[name], tuple(_operand(item, coords) for item in node.args))
    if name in ARITHMETIC and bind(node).get("alpha", 1) == 1:
        return _combined(ARITHMETIC[name], _operand(node.args[0], coords), _operand(node.args[1], coords))
    if name == "rsub" and bind(node).get("alpha", 1) == 1:
        return _combined("sub", _operand(node.args[1], coords), _operand(node.args[0], coords))
    if name == "where" and len(node.args) == 3:
        return Expr("where", tuple(_operand(item, coords) for item in node.args))
    if name == "masked_fill":
        condition, filled = _operand(node.args[1], coords), _operand(node.args[2], coords)
        return Expr("where", (condition, filled, _operand(node.args[0], coords)))
    if name == "index":
        return _gathered(node, coords)
    if name in {"tril", "triu"}:
        return _triangle(node, coords)
    raise _Unknown


def read(node: fx.Node, coords: Coords) -> Expr:
    """The value of a tensor node at coordinates, as an expression of the axes."""
    try:
        value = _compute(node, coords)
    except _Unknown:
        return Expr("load", origin=(node, coords))
    return value if value.origin is not None or value.op in {"num", "idx"} else replace(value, origin=(node, coords))
