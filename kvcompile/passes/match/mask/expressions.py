"""Masks as functions: an element of a mask as an expression of batch row, head, query and position.

A mask is built from iotas, comparisons, logic and gathers. ``read`` evaluates its graph symbolically at coordinates (linear forms of the
axes), so that "position <= first new position + query index" is recognised through any reshapes and broadcasts. A node that is not
understood becomes a ``load`` of its tensor, never a guess. So does a node that a dtype may change: a cast is looked through only where the
target holds every value (``graph.casts``), arithmetic only where nothing rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.casts import cast, holds
from kvcompile.passes.graph.constants import constant
from kvcompile.passes.graph.operators import COPIES, KINDS, Kind
from kvcompile.passes.graph.shapes import at_most, bind, is_tensor, negative, op_name, plain, same, sizes, value_of


@dataclass(frozen=True)
class LinearForm:
    """An integer linear form of axes: ``sum(coefficient * axis) + const``, where ``const`` is an int or a SymInt of the graph."""

    terms: tuple[tuple[str, int], ...] = ()
    const: Any = 0

    def plus(self, other: LinearForm, sign: int = 1) -> LinearForm:
        """Return self + sign * other."""
        found = dict(self.terms)
        for axis, coefficient in other.terms:
            found[axis] = found.get(axis, 0) + sign * coefficient
        terms = sorted((axis, coefficient) for axis, coefficient in found.items() if coefficient)
        return LinearForm(tuple(terms), plain(self.const + sign * other.const))

    def times(self, factor: int) -> LinearForm:
        """Return self * factor."""
        return LinearForm(tuple((axis, coefficient * factor) for axis, coefficient in self.terms if factor), plain(self.const * factor))

    def of(self, axis: str) -> int:
        """Return the coefficient of an axis, 0 if it does not occur."""
        return dict(self.terms).get(axis, 0)


@dataclass(frozen=True)
class Expr:
    """An expression: ``op`` over ``args``; a ``num`` has a number, an ``idx`` a linear form, a ``load`` an element of a tensor.

    ``origin``: a graph node, and coordinates in it, that hold this value already; None where none is known.
    """

    op: str
    args: tuple[Expr, ...] = ()
    number: float = 0.0
    linear: LinearForm = LinearForm()
    origin: tuple[fx.Node, tuple[LinearForm, ...]] | None = None

    def uses(self, axis: str) -> bool:
        """Return whether the value depends on an axis."""
        if self.op == "idx":
            return self.linear.of(axis) != 0
        if self.op == "load":
            assert self.origin is not None
            return any(form.of(axis) for form in self.origin[1])
        return any(arg.uses(axis) for arg in self.args)


def number(value: float) -> Expr:
    """Return the expression of a constant."""
    return Expr("num", number=float(value))


Coords = tuple[LinearForm, ...]
COMPARISONS = {"le": "le", "lt": "lt", "ge": "ge", "gt": "gt", "less_equal": "le", "less": "lt", "greater_equal": "ge", "greater": "gt"}
LOGIC = {
    "bitwise_and": "and", "logical_and": "and", "__and__": "and", "bitwise_or": "or", "logical_or": "or", "__or__": "or",
    "bitwise_not": "not", "logical_not": "not",
}
ARITHMETIC = {"add": "add", "sub": "sub", "mul": "mul"}
COMPUTED: dict[str, Callable[[float, float], float]] = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}
TRUTHS = frozenset({*COMPARISONS.values(), "and", "or", "not", "truth"})
"""Operators whose value is zero or one; ``truth`` is one where its operand is not zero."""
WIDE = frozenset({torch.int32, torch.int64, torch.float32, torch.float64})
"""Dtypes in which sums and differences of positions are exact."""


def _broadcast(node: fx.Node, coords: Coords) -> Coords:
    shape = sizes(node)
    aligned = coords[len(coords) - len(shape) :]
    return tuple(LinearForm() if size == 1 else form for size, form in zip(shape, aligned, strict=True))


def _operand(item: Any, coords: Coords) -> Expr:
    """Return the expression of an operand (tensor, number or symbolic int) at ``coords`` of its operator's result, broadcast to them.

    Raises _NotExpressible for other operands.
    """
    if is_tensor(item) and constant(item) is None:
        return read(item, _broadcast(item, coords))
    value = constant(item)
    if value is not None:
        return number(value)
    if isinstance(item, bool):
        return number(float(item))
    if isinstance(item, fx.Node) and not is_tensor(item):
        if not isinstance(item.meta.get("val"), torch.SymInt):
            raise _NotExpressible
        return Expr("idx", linear=integer(item))
    raise _NotExpressible


def integer(item: Any) -> LinearForm:
    """Return a plain or symbolic int, or the node of one, as a linear form; None counts as zero. Raises _NotExpressible for other nodes."""
    if isinstance(item, fx.Node):
        item = value_of(item)
        if not isinstance(item, (int, torch.SymInt)):
            raise _NotExpressible
    return LinearForm(const=plain(0 if item is None else item))


class _NotExpressible(Exception):
    """Raised where a value cannot be expressed; the enclosing node becomes a ``load``."""


def boolean(expr: Expr) -> bool:
    """Return whether the value of an expression is zero or one by construction."""
    if expr.op == "load":
        assert expr.origin is not None
        return value_of(expr.origin[0]).dtype is torch.bool
    if expr.op == "num":
        return expr.number in {0.0, 1.0}
    if expr.op == "where":
        return all(boolean(arg) for arg in expr.args[1:])
    return expr.op in TRUTHS


def _truth(expr: Expr) -> Expr:
    """Return the expression that is one where ``expr`` is not zero."""
    if boolean(expr):
        return expr
    if expr.op == "num":
        return number(float(expr.number != 0.0))
    if expr.op == "where":
        condition, yes, no = expr.args
        return _choice(condition, _truth(yes), _truth(no))
    return Expr("truth", (expr,))


def _choice(condition: Expr, yes: Expr, no: Expr) -> Expr:
    """Return ``where(condition, yes, no)``.

    If the branches are the numbers one and zero, it is simplified to the condition, or to its negation.
    """
    if yes.op == no.op == "num" and (yes.number, no.number) in {(1.0, 0.0), (0.0, 1.0)}:
        return condition if yes.number else Expr("not", (condition,))
    return Expr("where", (condition, yes, no))


def _converted(expr: Expr, source: torch.dtype, target: torch.dtype) -> Expr:
    """Return the expression of a value of dtype ``source`` cast to ``target``.

    Raises _NotExpressible where the cast may change the value.
    """
    if expr.op == "num":
        return number(cast(expr.number, target))
    if boolean(expr) or holds(source, target):
        return expr
    if target is torch.bool:
        return _truth(expr)
    if expr.op == "where":
        condition, yes, no = expr.args
        return _choice(condition, _converted(yes, source, target), _converted(no, source, target))
    raise _NotExpressible


def _branches(expr: Expr) -> tuple[Expr | None, float, float] | None:
    """Return (condition, number where it holds, number elsewhere) of a value that is one of two numbers; None for other values.

    The condition of a single number is None.
    """
    if expr.op == "num":
        return None, expr.number, expr.number
    if expr.op == "where" and expr.args[1].op == expr.args[2].op == "num":
        return expr.args[0], expr.args[1].number, expr.args[2].number
    return (expr, 1.0, 0.0) if boolean(expr) else None


def _computed(op: str, left: Expr, right: Expr, dtype: torch.dtype) -> Expr | None:
    """Return the expression of ``left`` op ``right`` in ``dtype`` if both are numbers, or one is a number and the other one of two numbers.

    ``op``: a key of COMPUTED. None for other operands. Raises _NotExpressible where a result is NaN, or negative in an unsigned dtype.
    """
    a, b = _branches(left), _branches(right)
    if a is None or b is None or (a[0] is not None and b[0] is not None):
        return None
    results = [COMPUTED[op](x, y) for x, y in zip(a[1:], b[1:], strict=True)]
    if any(math.isnan(result) for result in results) or (not dtype.is_signed and min(results) < 0):
        raise _NotExpressible
    yes, no = (number(cast(result, dtype)) for result in results)
    condition = a[0] if a[0] is not None else b[0]
    return yes if condition is None else _choice(condition, yes, no)


def _arithmetic(op: str, node: fx.Node, items: tuple[Any, Any], coords: Coords) -> Expr:
    """Return the expression of the sum, difference or product ``op`` of two operands at ``coords``, in the dtype of ``node``.

    Raises _NotExpressible where the result may round.
    """
    dtype = value_of(node).dtype
    left, right = (_exact(item, dtype, coords) for item in items)
    if dtype is torch.bool:
        if op == "sub":
            raise _NotExpressible
        return Expr("and" if op == "mul" else "or", (left, right))
    if op == "mul" and boolean(left) and boolean(right):
        return Expr("and", (left, right))
    found = _computed(op, left, right, dtype)
    if found is not None:
        return found
    if dtype not in WIDE:
        raise _NotExpressible
    return _combined(op, left, right)


def _exact(item: Any, dtype: torch.dtype, coords: Coords) -> Expr:
    """Return the expression of an operand at ``coords``, a tensor cast to ``dtype``, in which its operator computes.

    Raises _NotExpressible where the cast may change a value.
    """
    expr = _operand(item, coords)
    if is_tensor(item):
        return _converted(expr, value_of(item).dtype, dtype)
    return expr


def _compare(node: fx.Node, coords: Coords) -> Expr:
    """Return the expression of a comparison at ``coords``; raises _NotExpressible where the dtype it is made in changes an operand."""
    values = [value_of(item) if is_tensor(item) else item if isinstance(item, (int, float)) else 0 for item in node.args[:2]]
    dtype = torch.result_type(*values)
    return Expr(COMPARISONS[op_name(node)], tuple(_exact(item, dtype, coords) for item in node.args[:2]))


def _combined(op: str, left: Expr, right: Expr) -> Expr:
    """Return the expression of ``left`` op ``right``; a sum or difference of integers and linear forms becomes one linear form.

    ``op``: "add", "sub" or "mul".
    """
    whole = all(side.op == "idx" or (side.op == "num" and side.number.is_integer()) for side in (left, right))
    if whole and op in {"add", "sub"} and "idx" in {left.op, right.op}:
        a = left.linear if left.op == "idx" else LinearForm(const=int(left.number))
        b = right.linear if right.op == "idx" else LinearForm(const=int(right.number))
        return Expr("idx", linear=a.plus(b, 1 if op == "add" else -1))
    return Expr(op, (left, right))


def _view(node: fx.Node, coords: Coords) -> Coords:
    """Return the coordinates in the operand of a reshape, from ``coords`` in its result.

    Raises _NotExpressible unless only dims of size one come and go.
    """
    inner, outer = sizes(node.args[0]), sizes(node)  # type: ignore[arg-type]
    kept = [form for size, form in zip(outer, coords, strict=True) if size != 1]
    if [size for size in inner if size != 1] != [size for size in outer if size != 1]:
        raise _NotExpressible
    rest = iter(kept)
    return tuple(next(rest) if size != 1 else LinearForm() for size in inner)


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
    if arguments.get("step") not in {1, None}:
        raise _NotExpressible
    start, size = integer(arguments.get("start")).const, value_of(node.args[0]).shape[dim]  # type: ignore[arg-type]
    if negative(start):
        start = 0 if negative(start + size) else start + size
    moved = list(coords)
    moved[dim] = moved[dim].plus(LinearForm(const=plain(start)))
    return tuple(moved)


def _selected(node: fx.Node, coords: Coords) -> Coords:
    arguments = bind(node)
    dim = int(arguments["dim"]) % (len(coords) + 1)
    index, size = integer(arguments["index"]).const, value_of(node.args[0]).shape[dim]  # type: ignore[arg-type]
    return (*coords[:dim], LinearForm(const=plain(index + size if negative(index) else index)), *coords[dim:])


def _unsqueezed(node: fx.Node, coords: Coords) -> Coords:
    dim = int(bind(node)["dim"]) % len(coords)
    return (*coords[:dim], *coords[dim + 1 :])


def _expanded(node: fx.Node, coords: Coords) -> Coords:
    return _broadcast(node.args[0], coords)  # type: ignore[arg-type]


MOVES: dict[Kind, Callable[[fx.Node, Coords], Coords]] = {
    Kind.RESHAPE: _view, Kind.UNSQUEEZE: _unsqueezed, Kind.SWAP: _permuted, Kind.SWAP_LAST: _permuted, Kind.PERMUTE: _permuted,
    Kind.SLICE: _sliced, Kind.SELECT: _selected, Kind.BROADCAST: _expanded,
}
"""For each kind of view that masks are built with, the map from coordinates of its result to those of its operand."""


def _gathered(node: fx.Node, coords: Coords) -> Expr:
    """Return the expression of the element at ``coords`` of a tensor that integer tensors index in all dims.

    Raises _NotExpressible if a dim has no index, or an index is no linear form of the axes.
    """
    arguments = bind(node)
    source, indices = arguments["self"], list(arguments["indices"])
    if any(index is None for index in indices) or len(indices) != len(sizes(source)):
        raise _NotExpressible
    picked = []
    for index in indices:
        value = read(index, _broadcast(index, coords))
        if value.op == "num":
            picked.append(LinearForm(const=int(value.number)))
        elif value.op == "idx":
            picked.append(value.linear)
        else:
            raise _NotExpressible
    return read(source, tuple(picked))


def _triangle(node: fx.Node, coords: Coords) -> Expr:
    arguments = bind(node)
    row, column = coords[-2], coords[-1]
    op = "le" if op_name(node) == "tril" else "ge"
    inside = Expr(op, (Expr("idx", linear=column), Expr("idx", linear=row.plus(integer(arguments["diagonal"])))))
    return Expr("where", (inside, _operand(node.args[0], coords), number(0)))


def _inside(node: fx.Node, coords: Coords) -> Expr:
    """Return the expression of the element at ``coords`` of a padded tensor, as an element of the operand before padding.

    Raises _NotExpressible where the element may be padding, or the padding is not constant.
    """
    arguments = bind(node)
    pads = [integer(item).const for item in arguments["pad"]]
    if arguments.get("mode", "constant") != "constant":
        raise _NotExpressible
    moved = list(coords)
    for at, (left, right) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        form = moved[-1 - at]
        # Axes are never negative, so the form is at least its constant.
        if not same(right, 0) or not at_most(left, form.const) or any(coefficient < 0 for _, coefficient in form.terms):
            raise _NotExpressible
        moved[-1 - at] = form.plus(LinearForm(const=left), -1)
    return read(node.args[0], tuple(moved))  # type: ignore[arg-type]


def _counted(node: fx.Node, coords: Coords) -> Expr:
    arguments = bind(node)
    start, step = arguments.get("start") or 0, arguments.get("step") or 1
    if isinstance(step, fx.Node) or step != int(step) or not holds(torch.int64, value_of(node).dtype):
        raise _NotExpressible
    if not isinstance(start, fx.Node) and start != int(start):
        raise _NotExpressible
    return Expr("idx", linear=coords[0].times(int(step)).plus(integer(start)))


def _copied(node: fx.Node, coords: Coords) -> Expr:
    source: Any = node.args[0]
    if op_name(node) == "dropout" and node.args[1] and node.args[2]:
        raise _NotExpressible
    return _converted(read(source, coords), value_of(source).dtype, value_of(node).dtype)


def _chosen(node: fx.Node, condition: Any, yes: Any, no: Any, coords: Coords) -> Expr:
    """Return the expression of a ``where`` or ``masked_fill`` node, whose two values are converted to the node's dtype.

    ``condition``, ``yes`` and ``no``: the node's operands, tensors or numbers. ``coords``: the coordinates of the result to read.
    """
    dtype = value_of(node).dtype
    sides = (_converted(_operand(item, coords), value_of(item).dtype if is_tensor(item) else dtype, dtype) for item in (yes, no))
    return Expr("where", (_truth(_operand(condition, coords)), *sides))


def _compute(node: fx.Node, coords: Coords) -> Expr:
    """Return the expression of a node's value at ``coords``; raises _NotExpressible where the node's operator is not understood."""
    name = op_name(node)
    if name == "arange":
        return _counted(node, coords)
    if name in COPIES and name != "detach_":
        return _copied(node, coords)
    if (move := MOVES.get(KINDS.get(name))) is not None:  # type: ignore[arg-type]
        return read(node.args[0], move(node, coords))  # type: ignore[arg-type]
    if name in {"full", "ones", "zeros", "new_ones", "new_zeros", "ones_like", "zeros_like", "full_like", "new_full"}:
        value = 1.0 if "ones" in name else 0.0 if "zeros" in name else constant(bind(node)["fill_value"])
        if value is None:
            raise _NotExpressible
        return number(cast(value, value_of(node).dtype))
    if name in COMPARISONS:
        return _compare(node, coords)
    if name in {"eq", "ne"} and constant(node.args[1]) == 0.0:
        truth = _truth(_operand(node.args[0], coords))
        return truth if name == "ne" else Expr("not", (truth,))
    if name in LOGIC and (not name.startswith(("bitwise", "__")) or value_of(node).dtype == torch.bool):
        return Expr(LOGIC[name], tuple(_truth(_operand(item, coords)) for item in node.args))
    if name in ARITHMETIC and bind(node).get("alpha", 1) == 1:
        return _arithmetic(ARITHMETIC[name], node, (node.args[0], node.args[1]), coords)
    if name == "rsub" and bind(node).get("alpha", 1) == 1:
        return _arithmetic("sub", node, (node.args[1], node.args[0]), coords)
    if name == "where" and len(node.args) == 3:
        return _chosen(node, node.args[0], node.args[1], node.args[2], coords)
    if name == "masked_fill":
        return _chosen(node, node.args[1], node.args[2], node.args[0], coords)
    if name == "index":
        return _gathered(node, coords)
    if name in {"pad", "constant_pad_nd"}:
        return _inside(node, coords)
    if name in {"tril", "triu"}:
        return _triangle(node, coords)
    raise _NotExpressible


def read(node: fx.Node, coords: Coords) -> Expr:
    """Return the value of a tensor node at coordinates, as an expression of the axes; a ``load`` where it is not understood."""
    try:
        value = _compute(node, coords)
    except _NotExpressible:
        return Expr("load", origin=(node, coords))
    return value if value.origin is not None or value.op in {"num", "idx"} else replace(value, origin=(node, coords))
