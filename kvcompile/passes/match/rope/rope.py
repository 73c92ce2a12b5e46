"""Rotary embeddings: the rotation of keys between their projection and their write into the cache.

Every written element is expanded, at sampled coordinates, into a sum of products. A rotated channel is ``own * cos + sign * partner *
sin``: own and partner are elements of one value before the rotation, the partner of a channel's partner is the channel itself, and one sign
of a pair is minus. The samples show which channels are partners and which factors are angles, in every spelling (cat and neg, slices,
stack, complex numbers, part of the channels).

::

    k     = add(mul(x, cos), mul(cat([neg(slice(x, 3, D / 2)), slice(x, 3, 0, D / 2)], -1), sin))
    cache = index_copy_(cache, 2, pos, k)
    after, for a scheme with pre_rope:
    append(unrotate(k, cos_of_positions, sin_of_positions), planes, ...)
    attend(..., rotation=[cos_of_all_positions, sin_of_all_positions])
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import fx

from kvcompile.passes.graph.constants import constant
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.operators import JOINS
from kvcompile.passes.graph.pullback import Coords, broadcast, join_parts, step
from kvcompile.passes.graph.shapes import bind, hint, is_tensor, op_name, operand, sizes
from kvcompile.passes.match.rope.angle_reader import Reader, changed, spread_of, with_ranges
from kvcompile.passes.match.rope.angles import Angles, AngleStep, ComplexPart
from kvcompile.passes.match.sites import Miss, Slot


@dataclass(frozen=True)
class KeyRope:
    """The rotation of a slot's keys: its angles and the graph's constants that they use.

    ``interleaved``: neighbouring channels are partners; otherwise channel c and channel c + width / 2 are.
    """

    angles: Angles
    constants: tuple[fx.Node, ...]
    interleaved: bool


@dataclass(frozen=True)
class _Piece:
    """Sampled elements of one value, numbered ``rows`` among all samples, with the sign of their contribution."""

    node: fx.Node
    coords: Coords
    rows: np.ndarray
    part: ComplexPart
    sign: int


@dataclass(frozen=True)
class _Product:
    """A term of the sum at some samples: a sign and the factors, a single one where nothing is multiplied."""

    rows: np.ndarray
    sign: int
    factors: tuple[_Piece, ...]


class _Expansion:
    """Expands a few elements of a node's value, chosen as samples, into sums of products of two factors."""

    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        self.bases: list[tuple[fx.Node, ComplexPart]] = []

    def forward(self, piece: _Piece) -> list[_Piece] | None:
        """Return the pieces one step upstream of a node that only moves, negates or casts elements; None where values are computed.

        Raises Miss for a write in place.
        """
        node, coords, rows, part, sign = piece.node, piece.coords, piece.rows, piece.part, piece.sign
        if self.effects.writes_to(node):
            raise Miss("keys are written in place on their way to the cache", node)
        name = op_name(node)
        if name in JOINS:
            return [_Piece(source, moved, rows[at], part, sign) for source, at, moved in join_parts(node, coords)]
        if name == "neg":
            return [_Piece(operand(node), coords, rows, part, -sign)]
        if name in {"real", "imag"}:
            return [_Piece(operand(node), coords, rows, ComplexPart.REAL if name == "real" else ComplexPart.IMAG, sign)]
        if name == "view_as_complex":
            half = np.full((len(rows), 1), part is ComplexPart.IMAG, dtype=np.int64)
            return [_Piece(operand(node), np.hstack([coords, half]), rows, ComplexPart.NONE, sign)]
        if name == "complex":
            source = operand(node, part is ComplexPart.IMAG)
            return [_Piece(source, broadcast(source, coords), rows, ComplexPart.NONE, sign)]
        if name == "view_as_real":
            halves = [(np.flatnonzero(coords[:, -1] == at), half) for at, half in ((0, ComplexPart.REAL), (1, ComplexPart.IMAG))]
            return [_Piece(operand(node), coords[at, :-1], rows[at], half, sign) for at, half in halves if len(at)]
        if name == "_conj":
            return None
        moved = step(node, coords) if node.op == "call_function" else None
        return None if moved is None else [_Piece(*moved, rows, part, sign)]

    def products(self, piece: _Piece) -> Iterator[_Product]:
        """Yield the terms whose sum a piece is, each a ``_Product`` with its samples."""
        further = self.forward(piece)
        if further is not None:
            for item in further:
                yield from self.products(item)
            return
        name, arguments = op_name(piece.node), piece.node.args
        if name in {"add", "sub"} and all(is_tensor(item) for item in arguments) and bind(piece.node).get("alpha", 1) == 1:
            yield from self.products(self._operand(piece, 0, piece.sign))
            yield from self.products(self._operand(piece, 1, -piece.sign if name == "sub" else piece.sign))
        elif name == "addcmul" and bind(piece.node).get("value", 1) == 1:
            yield from self.products(self._operand(piece, 0, piece.sign))
            yield _Product(piece.rows, piece.sign, (self._operand(piece, 1), self._operand(piece, 2)))
        elif name == "mul" and all(is_tensor(item) and constant(item) is None for item in arguments):
            yield from self._product(piece)
        else:
            yield _Product(piece.rows, piece.sign, (piece,))

    def _product(self, piece: _Piece) -> Iterator[_Product]:
        """Yield the terms of a multiplication: one, or two for a part of a complex product."""
        if piece.part is ComplexPart.NONE:
            yield _Product(piece.rows, piece.sign, (self._operand(piece, 0), self._operand(piece, 1)))
            return
        left, right = self._operand(piece, 0), self._operand(piece, 1)
        # (a + bi)(c + di) = ac - bd + (ad + bc)i
        pairs = [(ComplexPart.REAL, ComplexPart.REAL, 1), (ComplexPart.IMAG, ComplexPart.IMAG, -1)]
        if piece.part is ComplexPart.IMAG:
            pairs = [(ComplexPart.REAL, ComplexPart.IMAG, 1), (ComplexPart.IMAG, ComplexPart.REAL, 1)]
        for a, b, sign in pairs:
            factors = tuple(_Piece(item.node, item.coords, item.rows, part, 1) for item, part in ((left, a), (right, b)))
            yield _Product(piece.rows, piece.sign * sign, factors)

    @staticmethod
    def _operand(piece: _Piece, index: int, sign: int = 1) -> _Piece:
        source = operand(piece.node, index)
        return _Piece(source, broadcast(source, piece.coords), piece.rows, piece.part, sign)

    def origin(self, piece: _Piece, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for each of ``count`` samples, the element that a piece's sample was moved from: (base, element, sign), [count] each.

        ``base`` is an index into ``bases``, the values at which pieces end upstream; it is -1 for samples that the piece does not have.
        """
        base = np.full(count, -1)
        element, sign = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        waiting = [piece]
        while waiting:
            item = waiting.pop()
            further = self.forward(item)
            if further is not None:
                waiting += further
                continue
            key = (item.node, item.part)
            if key not in self.bases:
                self.bases.append(key)
            base[item.rows] = self.bases.index(key)
            element[item.rows] = np.ravel_multi_index(tuple(item.coords.T), sizes(item.node))
            sign[item.rows] = item.sign
        return base, element, sign


@dataclass
class _Factors:
    """Both terms of every rotated sample: element and sign of the key, int64 [2, samples, width], and the piece of the angle."""

    element: np.ndarray
    sign: np.ndarray
    angle: list[list[_Piece | None]]


def _samples(slot: Slot) -> tuple[Coords, np.ndarray, int]:
    """Return sampled coordinates in the written values, the token of each sample, and the number of samples of each channel.

    Channels run fastest, and all of them are sampled.
    """
    tokens = hint(slot.write.count)
    pools = {"B": hint(slot.batch), "K": slot.heads, "S": tokens}
    ends = [sorted({0, min(1, size - 1), size - 1}) for size in pools.values()]
    grid = np.stack(np.meshgrid(*ends, np.arange(slot.head_dim), indexing="ij"), -1).reshape(-1, 4)
    column = dict(zip("BKSD", grid.T, strict=True))
    size = {**pools, "D": slot.head_dim}
    shape = sizes(slot.write.values)
    fixed = {**dict(slot.write.select), **dict(slot.axes.select)}
    coords = np.zeros((len(grid), len(shape)), dtype=np.int64)
    for place, dim in enumerate(slot.write.dims[len(slot.write.dims) - len(shape) :]):
        label = ["S" if role == "T" else role for role in slot.axes.labels[dim]]
        if shape[place] == 1:
            continue
        if not label:
            coords[:, place] = fixed.get(dim, 0)
        for role in label:
            coords[:, place] = coords[:, place] * size[role] + column[role]
        if label and dim in dict(slot.axes.counts):
            coords[:, place] += fixed[dim]
    return coords, column["S"], len(grid) // slot.head_dim


def recognise(slot: Slot, effects: Effects) -> KeyRope:
    """Return the rotation of the keys that are written into a slot; raises Miss where there is none that is understood."""
    if not slot.kind.facts.written:
        raise Miss("its keys come from another graph, and so does their rotation, if they have one", slot.root)
    coords, token, outer = _samples(slot)
    rows = np.arange(len(coords))
    expansion = _Expansion(effects)
    whole = _Piece(slot.write.values, coords, rows, ComplexPart.NONE, 1)
    terms = list(expansion.products(whole))
    pairs: list[list[tuple[_Product, int]]] = [[] for _ in rows]
    for term in terms:
        if len(term.factors) == 2:
            for at, row in enumerate(term.rows):
                pairs[row].append((term, at))
    width = _width(pairs, outer, slot)
    plain = expansion.origin(whole, len(rows))[0].reshape(outer, -1)[:, width:]
    tried: list[Miss] = []
    for base in _common_bases(expansion, pairs, outer, width):
        if (plain != base).any():
            tried.append(Miss("the channels that are not rotated come from another value", slot.write.node))
            continue
        factors = _factors(expansion, base, pairs, outer, width)
        try:
            return _rotation(factors, token, outer, width, slot, effects)
        except Miss as miss:
            tried.append(miss)
    raise tried[-1] if tried else _nothing(slot)


def _nothing(slot: Slot) -> Miss:
    return Miss("no rotation of the keys was found between their projection and the cache", slot.write.node)


def _width(pairs: list[list[tuple[_Product, int]]], outer: int, slot: Slot) -> int:
    """Return how many channels of every head and token are rotated.

    ``pairs``: the products in each sample of the keys; ``outer``: the number of samples of each channel. Raises Miss if no channel is
    rotated, or unless the rotated ones are the first, even in number, and sums of two products each.
    """
    count = np.array([len(found) for found in pairs]).reshape(outer, -1)
    width = int((count[0] > 0).sum())
    if not width:
        raise _nothing(slot)
    if (count[:, :width] != 2).any() or (count[:, width:] != 0).any() or width % 2:
        raise Miss("the rotated channels are not the first ones, or not rotated in pairs", slot.write.node)
    return width


def _traced(expansion: _Expansion, pairs: list[list[tuple[_Product, int]]]) -> dict[int, list[tuple[np.ndarray, ...]]]:
    """Return {``id`` of each product: ``_Expansion.origin`` of its two factors, in order}."""
    terms = {id(term): term for found in pairs for term, _ in found}
    return {key: [expansion.origin(piece, len(pairs)) for piece in term.factors] for key, term in terms.items()}


def _common_bases(expansion: _Expansion, pairs: list[list[tuple[_Product, int]]], outer: int, width: int) -> list[int]:
    """Return the indices of the values of the graph that are a factor in both products of every rotated sample, in rising order.

    They are the keys before the rotation, or the angles if one value holds both cosines and sines.
    """
    traced = _traced(expansion, pairs)
    common: set[int] | None = None
    for row, found in enumerate(pairs):
        for term, _ in found:
            here = {int(base[row]) for base, _, _ in traced[id(term)]}
            common = here if common is None else common & here
    return sorted(common or ())


def _factors(expansion: _Expansion, base: int, pairs: list[list[tuple[_Product, int]]], outer: int, width: int) -> _Factors:
    """Return, for both products of every rotated sample: the element of the key ``base`` in it, its sign, and the factor that is an angle.

    ``base``: one of ``_common_bases``. ``outer``, ``width``: samples of each channel, and rotated channels, by which results are arranged.
    """
    traced = _traced(expansion, pairs)
    element = np.zeros((2, outer * width), dtype=np.int64)
    sign = np.zeros_like(element)
    angle: list[list[_Piece | None]] = [[], []]
    for row, found in enumerate(item for item in pairs if item):
        for place, (term, at) in enumerate(found):
            sample = term.rows[at]
            origins = traced[id(term)]
            which = next(index for index, (bases, _, _) in enumerate(origins) if bases[sample] == base)
            element[place, row] = origins[which][1][sample]
            sign[place, row] = term.sign * origins[which][2][sample]
            other = term.factors[1 - which]
            angle[place].append(_Piece(other.node, other.coords[at : at + 1], np.array([sample]), other.part, other.sign))
    return _Factors(element.reshape(2, outer, width), sign.reshape(2, outer, width), angle)


def _rotation(factors: _Factors, token: np.ndarray, outer: int, width: int, slot: Slot, effects: Effects) -> KeyRope:
    """Return the rotation with the key elements, signs and angles ``factors``.

    ``token``: the new token of each sample. Raises Miss if the channels are paired as in no known rotation, or if cosine and sine are no
    functions of the position.
    """
    for interleaved in (False, True):
        for direction in (1, -1):
            first = _cosines(factors, width, interleaved, direction)
            if first is None:
                continue
            reader = Reader(effects, hint(slot.write.count), token)
            cos = _angle(reader, factors, first, outer, width)
            sin = _angle(reader, factors, 1 - first, outer, width)
            if not (cos[0].moves and sin[0].moves):
                raise changed("they come from outside of this graph, or from a length", slot.write.values)
            spread, ranges = spread_of([*cos[1], *sin[1]], width, slot.write.values)
            cosine = with_ranges(cos[0], ranges)
            sine = with_ranges(sin[0], ranges)
            if direction < 0:
                sine = AngleStep("neg.default", (sine,))
            return KeyRope(Angles(cosine, sine, spread, width), tuple(reader.constants), interleaved)
    raise Miss("the channels are paired in a way that is no known rotation", slot.write.node)


def _cosines(factors: _Factors, width: int, interleaved: bool, direction: int) -> np.ndarray | None:
    """Return which of the two products of each sample holds the cosine, int64 [outer, width] of 0 and 1.

    ``interleaved``: neighbours are paired, rather than both halves. ``direction``: -1 if the rotation is by minus the angle. None if the
    factors do not pair the channels in this way.
    """
    channel, half = np.arange(width), width // 2
    partner = channel ^ 1 if interleaved else (channel + half) % width
    lower = channel % 2 == 0 if interleaved else channel < half
    # In one channel of a pair a minus marks the sine's term; in the other the elements tell the terms apart.
    telling = lower if direction > 0 else ~lower
    element, sign = factors.element, factors.sign
    if (sign[:, :, telling].sum(0) != 0).any() or (sign[:, :, ~telling] != 1).any():
        return None
    first = np.zeros(element.shape[1:], dtype=np.int64)
    first[:, telling] = (sign[1] > 0)[:, telling]
    own = np.take_along_axis(element, first[None], 0)[0]
    other = np.take_along_axis(element, 1 - first[None], 0)[0]
    first[:, ~telling] = (element[1] == other[:, partner])[:, ~telling]
    mine = np.take_along_axis(element, first[None], 0)[0]
    theirs = np.take_along_axis(element, 1 - first[None], 0)[0]
    paired = (theirs == mine[:, partner]).all() and (mine[:, telling] == own[:, telling]).all()
    distinct = all(len(set(row)) == width for row in mine.tolist())
    return first if paired and distinct else None


def _angle(reader: Reader, factors: _Factors, which: np.ndarray, outer: int, width: int) -> tuple[AngleStep, list[np.ndarray]]:
    """Return (the cosine or sine in one product of every sample, as a function of the position; each channel's entry in each constant).

    The entries are int64 [width], one array for each constant that the function reads. ``which``: the index of the product, [outer, width].
    Raises Miss if heads, rows or tokens, or parts of the channels, have different functions.
    """
    chosen = [factors.angle[place][row] for row, place in enumerate(which.reshape(-1))]
    groups: dict[tuple[fx.Node, ComplexPart], list[int]] = {}
    for row, piece in enumerate(chosen):
        groups.setdefault((piece.node, piece.part), []).append(row)
    found: AngleStep | None = None
    columns: list[np.ndarray] = []
    for (node, part), members in groups.items():
        coords = np.concatenate([chosen[row].coords for row in members])
        samples = np.concatenate([chosen[row].rows for row in members])
        step_found, own = reader.read(node, coords, samples, part)
        if found is not None and step_found != found:
            raise changed("parts of the channels are computed in different ways", node)
        if found is None:
            columns = [np.zeros(outer * width, dtype=np.int64) for _ in own]
        found = step_found
        for target, column in zip(columns, own, strict=True):
            target[members] = column
    assert found is not None
    by_channel = [column.reshape(outer, width) for column in columns]
    if any((column != column[:1]).any() for column in by_channel):
        raise changed("they differ between heads, rows or tokens of one position", next(iter(groups))[0])
    return found, [column[0] for column in by_channel]
