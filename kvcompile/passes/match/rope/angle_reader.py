"""Read angles: the graph's own cosine and sine as functions of the token's position.

They are evaluated at sampled coordinates (``pullback``), through elementwise arithmetic, an outer product with the frequencies, or a
look-up in a table. Every such step is elementwise along the tokens, whatever reshapes and broadcasts are in between. Other angles
(frequencies that follow the length, angles that come from outside) raise Miss with that reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import fx

from kvcompile.passes.graph.constants import constant
from kvcompile.passes.graph.dynamo import OpOverload
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.operators import COPIES, JOINS, Kind, named
from kvcompile.passes.graph.pullback import Coords, broadcast, join_parts, step
from kvcompile.passes.graph.shapes import bind, hint, is_tensor, op_name, operand, sizes, value_of
from kvcompile.passes.match.rope.angles import AngleStep, ComplexPart, Spread
from kvcompile.passes.match.sites import Miss

UNARY = {"cos", "sin", "neg", "exp", "log", "reciprocal", "sqrt", "rsqrt", "abs"}
BINARY = {"add", "sub", "mul", "div", "pow"}
PRODUCTS = (named(Kind.PRODUCT) - {"baddbmm", "einsum"}) | {"mm"}
OUTER = {"outer", "ger"}
LOOKUPS = {"index", "embedding", "index_select", "gather"}
SLICES = named(Kind.SLICE)
SLICE = "where a slice of a table begins"

Read = tuple[AngleStep, list[np.ndarray]]
"""A step whose leaves along the channels lack their ranges, and for each of them, in order, the entry that every sample reads."""


def changed(why: str, node: fx.Node) -> Miss:
    """Return the Miss of angles that are not functions of the position."""
    return Miss(f"the angles of the rotation are not a function of the token's position: {why}", node)


@dataclass
class Reader:
    """A reader of graph values at samples of one set of new tokens; it collects the constants and the position that they depend on."""

    effects: Effects
    tokens: int
    token: np.ndarray
    """The new token of each sample, an index, int64 [samples]."""
    constants: list[fx.Node] = field(default_factory=list)
    position: tuple[Any, ...] | None = None

    def read(self, node: fx.Node, coords: Coords, rows: np.ndarray, part: ComplexPart = ComplexPart.NONE) -> Read:
        """Return the value of ``node`` at ``coords``, those of the samples numbered ``rows``; ``part``: of a complex number.

        Raises Miss at an operation that it cannot follow.
        """
        self._unwritten(node)
        name = op_name(node)
        if name == "arange":
            return self._arange(node, coords, rows)
        if not value_of(node).dtype.is_floating_point and not value_of(node).dtype.is_complex:
            return self._integer(node, coords, rows)
        if node.op in {"placeholder", "get_attr"}:
            return self._leaf("constant", node, coords, part, ())
        if (number := constant(node)) is not None:
            return AngleStep("number", (number,)), []
        if (found := self._looked_up(node, coords, rows, part)) is not None:
            return found
        if name in COPIES:
            return _cast(self.read(operand(node), coords, rows, part), operand(node), node)
        if name in JOINS:
            return self._joined(node, coords, rows, part)
        if name in {"view_as_real", "view_as_complex", "complex", "polar"}:
            return self._complex(node, coords, rows, part)
        if name in {"ones_like", "ones", "zeros_like", "zeros"}:
            return AngleStep("number", (1.0 if name.startswith("ones") else 0.0,)), []
        if name in UNARY | BINARY and part is ComplexPart.NONE:
            return self._elementwise(node, coords, rows)
        if name in PRODUCTS | OUTER | {"einsum"} and part is ComplexPart.NONE:
            return self._outer(node, coords, rows)
        moved = step(node, coords)
        if moved is None:
            raise changed(f"they pass through {name or node.op}", node)
        return self.read(*moved, rows, part)

    def _unwritten(self, node: fx.Node) -> None:
        """Raise Miss where a tensor is written to in place."""
        if self.effects.writes_to(node):
            raise changed("they are updated in place, as frequencies that follow the length are", node)

    # --- integers --------------------------------------------------------------------------------

    def _arange(self, node: fx.Node, coords: Coords, rows: np.ndarray) -> Read:
        """Return the values of an ``arange`` at ``coords``: the position if it counts tokens by ones, else constants along the channels.

        Raises Miss if these numbers change from call to call.
        """
        arguments = bind(node)
        along = (coords[:, 0] == self.token[rows]).all() if self.tokens > 1 else sizes(node)[0] == 1
        if along and (arguments.get("step") or 1) == 1:
            return _cast(self._position(node, coords), None, node)
        start, end, by = arguments.get("start") or 0, arguments["end"], arguments.get("step") or 1
        if any(isinstance(item, fx.Node) for item in (start, end, by)):
            raise changed("they count from a number that changes", node)
        return AngleStep("arange", (start, end, by, value_of(node).dtype)), [coords[:, 0]]

    def _integer(self, node: fx.Node, coords: Coords, rows: np.ndarray) -> Read:
        """Return the value of an integer node at ``coords``, which must be the position or constant numbers of an ``arange``.

        Raises Miss if its value for a token depends on other tokens or on their number.
        """
        while (moved := step(node, coords)) is not None:
            node, coords = moved
            self._unwritten(node)
        if op_name(node) == "arange":
            return self._arange(node, coords, rows)
        if self.tokens > 1 and not any((coords[:, dim] == self.token[rows]).all() for dim in range(coords.shape[1])):
            raise changed("they depend on the position of another token, or on how many there are", node)
        return self._position(node, coords)

    def _position(self, node: fx.Node, coords: Coords) -> Read:
        """Return the step "position" and record ``node`` at ``coords`` as the tensor that holds positions.

        Raises Miss if another tensor, or other indices in dims other than tokens, were recorded before.
        """
        still = tuple((dim, int(column[0])) for dim, column in enumerate(coords.T) if (column == column[0]).all())
        self._only((node, still), node)
        return AngleStep("position"), []

    def _only(self, position: tuple[Any, ...], node: fx.Node) -> None:
        """Record the position; raises Miss where another one was recorded."""
        if self.position is not None and self.position != position:
            raise changed("they depend on more than one position", node)
        self.position = position

    # --- leaves ----------------------------------------------------------------------------------

    def _leaf(self, kind: str, node: fx.Node, coords: Coords, part: ComplexPart, moving: tuple[int, ...]) -> Read:
        """Return a step of kind ``kind`` that reads a constant of the model at ``coords``, and add the constant to ``constants``.

        ``moving``: the dims of the constant that the position indexes. Raises Miss for a node that is no constant, and if several other
        dims change with the channels.
        """
        if not is_tensor(node) or node.op not in {"placeholder", "get_attr"}:
            raise changed(f"they are looked up in the result of {op_name(node)}", node)
        fixed, along = [], None
        for dim, column in enumerate(coords.T):
            if dim in moving:
                continue
            if (column == column[0]).all():
                fixed.append((dim, int(column[0])))
            elif along is None:
                along = dim
            else:
                raise changed("they come from outside of this graph, not from a position in it", node)
        if node not in self.constants:
            self.constants.append(node)
        found = AngleStep(kind, (*moving, self.constants.index(node), tuple(fixed), along, part))
        return found, [] if along is None else [coords[:, along]]

    def _looked_up(self, node: fx.Node, coords: Coords, rows: np.ndarray, part: ComplexPart) -> Read | None:
        """Return the step that looks up a table's row at the position; None if ``node`` is not a look-up.

        The row is gathered, or a slice takes as many rows as there are tokens. Raises Miss for a row at anything but the position.
        """
        name = op_name(node)
        if name in SLICES and (dim := self._sliced_along_tokens(node, coords, rows)) is not None:
            self._only((SLICE, bind(node).get("start")), node)
            return self._table(operand(node), coords, dim, part)
        if name not in LOOKUPS:
            return None
        arguments = bind(node)
        if name == "gather":
            dim, index, where = int(arguments["dim"]) % coords.shape[1], arguments["index"], coords
            rest = coords
        else:
            dim, index, where, rest = _indexed(node, name, arguments, coords)
        found, _ = self.read(index, where, rows)
        if found != AngleStep("position"):
            raise changed("they are looked up at something else than the position", node)
        source = operand(node) if name != "embedding" else arguments["weight"]
        return self._table(source, rest, dim, part)

    def _sliced_along_tokens(self, node: fx.Node, coords: Coords, rows: np.ndarray) -> int | None:
        """Return the dim of a slice of a table that has one entry for each token of the call; None if the slice has none.

        ``coords``: the coordinates of the slice that the angles read; ``rows``: the indices of these coordinates among the sampled ones.
        """
        arguments = bind(node)
        dim = int(arguments["dim"]) % coords.shape[1]
        count, whole = sizes(node)[dim], sizes(operand(node))[dim]
        if count != self.tokens or whole == count or hint(arguments.get("step") or 1) != 1:
            return None
        along = (coords[:, dim] == self.token[rows]).all() and (self.tokens > 1 or isinstance(arguments.get("start"), (int, fx.Node)))
        # With one token, a slice of one row is the position if no other was found.
        return dim if along and (self.tokens > 1 or self.position is None or self.position[0] == SLICE) else None

    def _table(self, node: fx.Node, coords: Coords, dim: int, part: ComplexPart) -> Read:
        """Return the step that looks up, at the position, the constant from which the table ``node`` is made by views and casts.

        ``dim``: the table's dim that the position indexes; the constant's dim is the one whose coordinates change along it. Raises Miss if
        several dims of the constant change, or if its number of rows is not fixed.
        """
        casts: list[tuple[fx.Node, fx.Node]] = []
        here, there = coords.copy(), coords.copy()
        here[:, dim], there[:, dim] = 0, 1
        while node.op not in {"placeholder", "get_attr"}:
            self._unwritten(node)
            name = op_name(node)
            if name == "view_as_complex":
                half = np.full((len(here), 1), part is ComplexPart.IMAG)
                node, here, there, part = operand(node), np.hstack([here, half]), np.hstack([there, half]), ComplexPart.NONE
                continue
            moved, other = step(node, here), step(node, there)
            if moved is None or other is None:
                raise changed(f"they are looked up in the result of {name or node.op}", node)
            if name in COPIES:
                casts.append((moved[0], node))
            node, here, there = moved[0], moved[1], other[1]
        self._unwritten(node)
        moving = tuple(int(at) for at in np.flatnonzero((here != there).any(0)))
        if len(moving) != 1:
            raise changed("more than one dim of their table follows the position", node)
        if not isinstance(value_of(node).shape[moving[0]], int):
            raise changed("their table has no fixed number of rows", node)
        found = self._leaf("lookup", node, here, part, moving)
        for before, after in reversed(casts):
            found = _cast(found, before, after)
        return found

    # --- operators -------------------------------------------------------------------------------

    def _joined(self, node: fx.Node, coords: Coords, rows: np.ndarray, part: ComplexPart) -> Read:
        """Return the value at ``coords`` of a cat or stack; raises Miss unless all its operands are the same function of the position."""
        parts = [(at, self.read(source, moved, rows[at], part)) for source, at, moved in join_parts(node, coords)]
        found, columns = parts[0][1]
        if any(other != found for _, (other, _) in parts):
            raise changed("parts of the channels are computed in different ways", node)
        merged = [np.zeros(len(rows), dtype=np.int64) for _ in columns]
        for at, (_, own) in parts:
            for target, column in zip(merged, own, strict=True):
                target[at] = column
        return found, merged

    def _complex(self, node: fx.Node, coords: Coords, rows: np.ndarray, part: ComplexPart) -> Read:
        """Return the value at ``coords`` of a node that builds complex numbers (their ``part``), or of one that views them as real numbers.

        Raises Miss if real and imaginary parts are mixed.
        """
        name = op_name(node)
        if name == "view_as_complex":
            half = np.full((len(coords), 1), part is ComplexPart.IMAG, dtype=np.int64)
            return self.read(operand(node), np.hstack([coords, half]), rows)
        if name == "complex":
            source = operand(node, part is ComplexPart.IMAG)
            return self.read(source, broadcast(source, coords), rows)
        if name == "polar":
            length, angle = (self.read(item, broadcast(item, coords), rows) for item in (operand(node), operand(node, 1)))
            turned = AngleStep("sin.default" if part is ComplexPart.IMAG else "cos.default", (angle[0],))
            return AngleStep("mul.Tensor", (length[0], turned)), length[1] + angle[1]
        halves = set(coords[:, -1].tolist())
        if len(halves) != 1:
            raise changed("real and imaginary parts are mixed", node)
        return self.read(operand(node), coords[:, :-1], rows, ComplexPart.IMAG if halves.pop() else ComplexPart.REAL)

    def _elementwise(self, node: fx.Node, coords: Coords, rows: np.ndarray) -> Read:
        """Return the value at ``coords`` of an elementwise operator on functions of the position and numbers.

        Raises Miss for an operator with options or with other operands.
        """
        if node.kwargs:
            raise changed(f"they pass through {op_name(node)} with options", node)
        parts: list[Any] = []
        columns: list[np.ndarray] = []
        for item in node.args:
            if is_tensor(item):
                found, own = self.read(item, broadcast(item, coords), rows)
                parts.append(found)
                columns += own
            elif isinstance(item, (int, float)):
                parts.append(item)
            else:
                raise changed("a number that changes takes part", node)
        return AngleStep(_overload(node), tuple(parts)), columns

    def _outer(self, node: fx.Node, coords: Coords, rows: np.ndarray) -> Read:
        """Return the value at ``coords`` of an outer product, or of a matrix product over a dim of size one.

        Raises Miss for sums of products.
        """
        name = op_name(node)
        if name == "einsum":
            (left, right), places = _einsum(node, coords)
        else:
            left, right = operand(node), operand(node, 1)
            zero = np.zeros(len(coords), dtype=np.int64)
            if name in OUTER:
                places = coords[:, :1], coords[:, 1:]
            elif sizes(left)[-1] != 1 or len(sizes(left)) < 2 or len(sizes(right)) < 2:
                raise changed("they are sums", node)
            else:
                first = np.column_stack([coords[:, :-1], zero])
                second = np.column_stack([coords[:, :-2], zero, coords[:, -1]])
                places = broadcast(left, first), broadcast(right, second)
        a, b = self.read(left, places[0], rows), self.read(right, places[1], rows)
        return AngleStep("mul.Tensor", (a[0], b[0])), a[1] + b[1]


def _cast(found: Read, before: fx.Node | None, after: fx.Node) -> Read:
    """Return ``found``, the value of node ``before``, cast to the dtype of node ``after`` if that differs.

    ``before`` None: ``found`` is the position. Raises Miss for a cast to a complex dtype.
    """
    dtype = value_of(after).dtype
    if before is None and not dtype.is_floating_point:
        return found
    if before is not None and value_of(before).dtype == dtype:
        return found
    if dtype.is_complex:
        raise changed("they become complex by a cast", after)
    return AngleStep("cast", (found[0], dtype)), found[1]


def _overload(node: fx.Node) -> str:
    schema = cast(OpOverload, node.target)._schema
    return schema.name.rpartition("::")[2] + "." + (schema.overload_name or "default")


def _indexed(node: fx.Node, name: str, arguments: dict[str, Any], coords: Coords) -> tuple[int, fx.Node, Coords, Coords]:
    """Return, of a look-up by one integer index: (source dim, index, coordinates in the index, coordinates in the source).

    The coordinates in the source have 0 in the indexed dim. ``name``: the look-up's operator. Raises Miss for a mask and for several
    indices.
    """
    if name == "index":
        given = [(dim, item) for dim, item in enumerate(arguments["indices"]) if item is not None]
        if len(given) != 1:
            raise changed("they are looked up by more than one index", node)
        dim, index = given[0]
    elif name == "embedding":
        dim, index = 0, arguments["indices"]
    else:
        dim, index = int(arguments["dim"]) % len(sizes(operand(node))), arguments["index"]
    if value_of(index).dtype == torch.bool:
        raise changed("they are looked up by a mask", node)
    rank = len(sizes(index))
    where = coords[:, dim : dim + rank]
    zero = np.zeros((len(coords), 1), dtype=np.int64)
    return dim, index, where, np.hstack([coords[:, :dim], zero, coords[:, dim + rank :]])


def _einsum(node: fx.Node, coords: Coords) -> tuple[tuple[fx.Node, fx.Node], tuple[Coords, Coords]]:
    """Return both operands of an einsum without a sum, and the coordinates in each for ``coords`` of the result.

    Raises Miss for other einsums.
    """
    equation, operands = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    text = str(equation).replace(" ", "")
    inputs, _, output = text.partition("->")
    names = inputs.split(",")
    if len(operands) != 2 or not output or "." in text or set("".join(names)) - set(output):
        raise changed("they are sums", node)
    places = tuple(broadcast(item, coords[:, [output.index(axis) for axis in axes]]) for item, axes in zip(operands, names, strict=True))
    return (operands[0], operands[1]), (places[0], places[1])


# --- channels -------------------------------------------------------------------------------------------


def spread_of(columns: Sequence[np.ndarray], width: int, node: fx.Node) -> tuple[Spread, list[tuple[int, int, int]]]:
    """Return how ``width`` channels share the entries of the leaves, and (first, count, stride) of every leaf.

    ``columns``: for each leaf the entry that every channel reads, int64 [width]. Raises Miss for other orders of channels.
    """
    channel = np.arange(width)
    for spread, own, count in (
        (Spread.WHOLE, channel, width), (Spread.HALVES, channel % (width // 2), width // 2), (Spread.PAIRS, channel // 2, width // 2),
    ):
        ranges = [_range(column, own, count) for column in columns]
        if all(item is not None for item in ranges):
            return spread, [item for item in ranges if item is not None]
    raise changed("its channels read the frequencies in an unusual order", node)


def _range(column: np.ndarray, own: np.ndarray, count: int) -> tuple[int, int, int] | None:
    """Return (first, count, stride) of a leaf that runs along the channels ``own``; None where it does not."""
    first = int(column[0])
    stride = int(column[own == 1][0]) - first if count > 1 else 1
    return (first, count, stride) if stride > 0 and (column == first + stride * own).all() else None


def with_ranges(found: AngleStep, ranges: list[tuple[int, int, int]]) -> AngleStep:
    """Return the step with every leaf along the channels given its range, in order; used ranges are removed from the list."""
    if found.op == "arange" or (found.op in {"constant", "lookup"} and found.args[-2] is not None):
        return replace(found, args=(*found.args, *ranges.pop(0)))
    return replace(found, args=tuple(with_ranges(arg, ranges) if isinstance(arg, AngleStep) else arg for arg in found.args))
