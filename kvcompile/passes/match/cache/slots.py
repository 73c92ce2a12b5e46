"""Cache slots: trace an attention operand back to the cache tensor that it reads, its layout and its write.

The operand's sampled coordinates arrive at the root; which root dim carries which role is read off them.
Nothing is assumed about the order of the dims, about a combined K/V tensor or about how heads repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from torch import fx

from kvcompile.passes.graph.effects import Effects, same_memory, written_arguments
from kvcompile.passes.graph.operators import CONCATENATIONS, MAKERS, UPDATES
from kvcompile.passes.graph.pullback import Trail, factor, step, trace
from kvcompile.passes.graph.shapes import hint, op_name, sizes, value_of
from kvcompile.passes.match.cache import paged, sliding
from kvcompile.passes.match.cache.advice import learned, no_plain_view
from kvcompile.passes.match.cache.first_rows import check_read, within
from kvcompile.passes.match.cache.functional import copied_back, update
from kvcompile.passes.match.cache.one_write import one_write
from kvcompile.passes.match.cache.readings import Columns, Read, Reading, candidates, columns_of
from kvcompile.passes.match.cache.views import partial
from kvcompile.passes.match.cache.writes import concatenation, in_place
from kvcompile.passes.match.sites import Axes, FirstRows, Miss, Position, Slot, Write
from kvcompile.passes.match.slot_kinds import SlotKind

PAIRS = (("K", "D"), ("B", "K"))


class NoCache(Exception):
    """Raised where an operand reads no cache (attention over fresh values); ``base`` is the tensor that it is a view of."""

    def __init__(self, base: fx.Node) -> None:
        super().__init__(base.name)
        self.base = base


def _through_writes(node: fx.Node, join: fx.Node | None = None) -> Trail:
    """Return the trail from an operand to the tensor that it is a view of; the trail passes in-place writes to the tensors that they wrote.

    ``join``: a concatenation of memory and cached tokens, if ``node`` is the cached part of one; None without memory.
    """
    trail = trace(node, lambda found: bool(written_arguments(found)), scales=True)
    path = list(trail.path)
    if join is not None and trail.base is join and (moved := step(join, trail.there, through_joins=True)) is not None:
        further = _resume(moved[0], replace(trail, there=moved[1]))
        path += [join, *further.path]
        trail = replace(further, path=())
    while written_arguments(trail.base):
        target = written_arguments(trail.base)[0]
        path.append(trail.base)
        further = _resume(target, trail)
        path += further.path
        trail = Trail(further.base, further.there, trail.here, tuple(path))
    return Trail(trail.base, trail.there, trail.here, tuple(path))


def _resume(node: fx.Node, trail: Trail) -> Trail:
    """Return the trail that continues from ``node`` with the coordinates at which ``trail`` ended."""
    coords, path = trail.there, []
    while not written_arguments(node):
        moved = step(node, coords, scales=True)
        if moved is None:
            break
        path.append(node)
        node, coords = moved
    return Trail(node, coords, trail.here, tuple(path))


def _label(trail: Trail, base: tuple[int, ...], roles: Columns, token_dim: int, only_row: int | None = None) -> Axes | None:
    """Return the axes of the root under one reading (``roles``) of the operand's dims; None if the sampled coordinates do not fit it.

    ``base``: sizes of the root; ``token_dim``: its dim of tokens; ``only_row``: its dim of batch rows if attention reads only one of them,
    else None.
    """
    labels: list[tuple[str, ...] | None] = [None] * len(base)
    left = dict(roles)
    token = left.pop("T")[0]
    if not (trail.there[:, token_dim] == token).all():
        return None
    labels[token_dim] = ("T",)
    if only_row is not None:
        # Samples of a single row cannot tell its dim from other dims of one entry.
        if left.pop("B", (None, 1))[1] != 1:
            return None
        labels[only_row] = ("B",)
    select, counts = [], []
    for dim, size in enumerate(base):
        if labels[dim] is not None or size == 1:
            continue
        column = trail.there[:, dim]
        singles = [role for role, (values, n) in left.items() if n == size and (values == column).all()]
        if singles:
            labels[dim] = (singles[0],)
            left.pop(singles[0])
            continue
        pairs = [
            (a, b) for a, b in PAIRS if a in left and b in left and left[a][1] * left[b][1] == size
            and (left[a][0] * left[b][1] + left[b][0] == column).all()
        ]
        if pairs:
            labels[dim] = pairs[0]
            left.pop(pairs[0][0]), left.pop(pairs[0][1])
            continue
        beside = _beside(column, size, left)
        if beside is not None:
            labels[dim], first, count = beside
            select.append((dim, first))
            counts.append((dim, count))
            left = {role: value for role, value in left.items() if role not in beside[0]}
            continue
        if (column == column[0]).all():
            labels[dim] = ()
            select.append((dim, int(column[0])))
            continue
        return None
    missing = [role for role in ("B", "K", "D") if role in left]
    if any(left[role][1] != 1 for role in missing):
        return None
    waiting = iter(missing)
    for dim in range(len(base)):
        if labels[dim] is None:
            role = next(waiting, None)
            labels[dim] = (role,) if role is not None else ()
            if role is None:
                select.append((dim, 0))
    # A role of size one may have no dim at all.
    return Axes(tuple(label or () for label in labels), tuple(select), tuple(counts))


def _beside(column: np.ndarray, size: int, left: Columns) -> tuple[tuple[str, ...], int, int] | None:
    """Return (roles, first index, count) if a dim of the root holds heads, channels or both in one range of its indices; else None.

    ``column``: sampled coordinates in that dim, of ``size`` entries; ``left``: the roles that no dim has yet. For example, keys and values
    may be two ranges of one dim.
    """
    candidates: list[tuple[tuple[str, ...], np.ndarray, int]] = [((role,), *left[role]) for role in ("K", "D") if role in left]
    if {"K", "D"} <= left.keys():
        (heads, outer), (channels, inner) = left["K"], left["D"]
        candidates.append((("K", "D"), heads * inner + channels, outer * inner))
    for roles, values, count in candidates:
        shift = column - values
        if 1 < count < size and (shift == shift[0]).all():
            return roles, int(shift[0]), count
    return None


def axes_of(trail: Trail, read: Read, token_dim: int, first_rows: FirstRows | None = None) -> tuple[Axes, int, Reading]:
    """Return (the root's axes, its number of kv heads, the operand's reading) of an operand that is a plain view of the root.

    ``token_dim``: the root's dim of tokens; ``first_rows``: the rows that are read, where the cache has more; None: all rows. Raises Miss
    for an operand that is no plain view of the cache.
    """
    base = sizes(trail.base) if first_rows is None else within(sizes(trail.base), first_rows)
    only_row = first_rows.dim if first_rows is not None and base[first_rows.dim] == 1 else None
    columns = columns_of(trail, read.roles, read.shape)
    for reading in candidates(columns, base):
        axes = _label(trail, base, reading.columns, token_dim, only_row)
        if axes is not None:
            return axes, reading.columns["K"][1], reading
    raise no_plain_view(trail, columns, read.operand, token_dim)


def _writer(trail: Trail, read: Read) -> Callable[[fx.Node, fx.Node], Write]:
    """Return the function (node, cache) -> Write for the writes into the cache at the end of ``trail``.

    It knows the dims of the cache that tokens may run along, and raises Miss for a node that is no known write.
    """
    shift = trail.there - trail.here[:, [read.roles.index("T")]]
    tokens = frozenset(int(dim) for dim in np.flatnonzero((shift == shift[0]).all(0)))
    return lambda node, root: (copied_back(node, root) if op_name(node) == "copy_" else None) or in_place(node, root, tokens)


def find(operand: fx.Node, roles: tuple[str, ...], attention: fx.Node, effects: Effects, join: fx.Node | None = None) -> Slot:
    """Return the slot that an attention operand reads; raises Miss, or NoCache where it reads no cache.

    ``join``: a concatenation of memory and cached tokens, if the operand is the cached part of one; None without memory.
    """
    return at(_through_writes(operand, join), Read(operand, roles, sizes(operand)), attention, effects)


def at(trail: Trail, read: Read, attention: fx.Node, effects: Effects) -> Slot:
    """Return the slot of the sliding, paged or linear cache at the end of a trail.

    Raises NoCache if there is no cache, and Miss for a cache that is not supported.
    """
    if "T" not in read.roles:
        raise Miss(
            "what the attention's weights are multiplied with has no dim of cached tokens (the weights are mixed over heads, say)",
            read.operand, advice="multiply the weights with the cached values, and mix what comes of it",
        )
    window = sliding.find(trail, read.roles, read.operand, attention, effects)
    if window is not None:
        axes, heads, reading = axes_of(window.trail, read, window.write.token_dim)
        slot = slot_of(window.kind, window.root, window.placeholder, window.outputs, axes, heads, window.write, window.trail, reading)
        return replace(slot, sliding=window.sliding)
    gathered = paged.find(trail, read, attention, effects)
    if gathered is not None:
        return replace(gathered, outputs=_returned(gathered.root, effects, itself=True))
    return behind(trail, read, attention, effects)


def behind(trail: Trail, read: Read, attention: fx.Node, effects: Effects) -> Slot:
    """Return the slot of a linear cache at the end of a trail; raises Miss, or NoCache where the trail ends at no cache."""
    root = trail.base
    if op_name(root) in CONCATENATIONS:
        return _concatenated(root, trail, read, effects)
    if op_name(root) in UPDATES:
        return _updated(root, trail, read, effects)
    if root.op == "placeholder" and not effects.writes.get(root):
        return _grown_later(root, trail, read, effects) or _only_read(root, trail, read)
    if root.op == "placeholder":
        write = one_write(root, trail, attention, effects, _writer(trail, read))
        check_read(trail, read, write)
        axes, heads, reading = axes_of(trail, read, write.token_dim, write.first_rows)
        return slot_of(SlotKind.BUFFER, root, root, _returned(root, effects, itself=True), axes, heads, write, trail, reading)
    if op_name(root) in MAKERS:
        write = one_write(root, trail, attention, effects, _writer(trail, read))
        outputs = _returned(root, effects)
        if not outputs:
            raise NoCache(root)
        axes, heads, reading = axes_of(trail, read, write.token_dim)
        return slot_of(SlotKind.CREATED_BUFFER, root, None, outputs, axes, heads, write, trail, reading)
    raise NoCache(root)


def _grown_later(past: fx.Node, trail: Trail, read: Read, effects: Effects) -> Slot | None:
    """Return the slot of a cache ``past`` that attention reads before new tokens are concatenated to it; None if they never are.

    The concatenation is returned, so the next call is the first to read the new tokens. Raises Miss if the operand is no plain view of the
    past.
    """
    for node in past.users:
        if op_name(node) not in CONCATENATIONS:
            continue
        found, write = concatenation(node)
        outputs = _returned(node, effects)
        if found is past and outputs:
            axes, heads, reading = axes_of(trail, read, write.token_dim)
            return slot_of(SlotKind.CONCAT, node, past, outputs, axes, heads, replace(write, late=True), trail, reading)
    return None


def _only_read(root: fx.Node, trail: Trail, read: Read) -> Slot:
    """Return the slot of a cache that this graph reads and does not write, as in cross-attention.

    Raises Miss if only part of it is read.
    """
    tokens, count = trail.here[:, read.roles.index("T")], read.shape[read.roles.index("T")]
    dims = [dim for dim, size in enumerate(sizes(root)) if (trail.there[:, dim] == tokens).all() and size == count]
    if not dims:
        raise Miss(
            "the cache is only read in this graph, and not from its first token to its last", root,
            advice="write the tokens in the compiled call that attends to them, or read the whole cache",
        )
    write = Write("not written here", root, root, root, (), dims[0], Position(), 0)
    axes, heads, reading = axes_of(trail, read, write.token_dim)
    return slot_of(SlotKind.READ, root, root, (), axes, heads, write, trail, reading)


def _returned(root: fx.Node, effects: Effects, itself: bool = False) -> tuple[int, ...]:
    """Return the indices of the graph's results that equal the root element by element: itself and copies, no transposed or partial views.

    ``itself``: only results in the root's own memory (such as ``index_copy_``'s), no copies of it.
    """
    found = []
    for node in effects.family(root):
        if effects.output in node.users and sizes(node) == sizes(root) and (not itself or same_memory(node, root)):
            trail = trace(node, lambda item: item is root)
            if trail.base is root and (trail.here == trail.there).all():
                found.append(node)
    return effects.outputs_of(found)


def _updated(root: fx.Node, trail: Trail, read: Read, effects: Effects) -> Slot:
    """Return the slot of a cache that is updated out of place and returned to the caller.

    Raises NoCache if no argument is updated, Miss if a view of one is, or the result is not returned as it is.
    """
    found = update(root)
    assert found is not None
    past, write = found
    if effects.root[past].op != "placeholder":
        raise NoCache(root)
    if past is not effects.root[past]:
        raise Miss(
            "the cache passes through other operations before it is updated out of place", past,
            advice="update the cache as it came in (cache.index_copy(...)), and take views of the result",
        )
    outputs = _returned(root, effects)
    if not outputs:
        raise Miss(
            "the cache is updated out of place, and the result is not returned as it is", root,
            advice="return the updated cache and pass it to the next call, or write in place with index_copy_",
        )
    axes, heads, reading = axes_of(trail, read, write.token_dim)
    return slot_of(SlotKind.UPDATED, root, past, outputs, axes, heads, write, trail, reading)


def _unwritten(root: fx.Node, effects: Effects) -> None:
    """Raise Miss where a concatenated cache is written to afterwards: its new tokens are then not the concatenated ones."""
    if writes := effects.writes.get(root):
        raise Miss(
            "the concatenated cache is written to after it is made (it grew by empty slots, for example)", writes[0],
            advice="concatenate the new tokens themselves, or make the larger cache outside of the compiled call",
        )


def _concatenated(root: fx.Node, trail: Trail, read: Read, effects: Effects) -> Slot:
    """Return the slot of a cache ``root``, the concatenation of a past, if any, with the new tokens, which the graph returns.

    Raises NoCache if the past is no argument, or without a past if nothing is returned; Miss if the past is not concatenated as it came in,
    or the result is written to afterwards or not returned as it is.
    """
    past, write = concatenation(root)
    outputs = _returned(root, effects)
    if past is None:
        if not outputs:
            raise NoCache(root)
        _unwritten(root, effects)
        axes, heads, reading = axes_of(trail, read, write.token_dim)
        return slot_of(SlotKind.CREATED_CONCAT, root, None, outputs, axes, heads, write, trail, reading)
    origin = effects.root[past]
    if origin.op != "placeholder":
        raise NoCache(root)
    if past is not origin:
        raise learned(root) or Miss(
            "the past passes through other operations before it is concatenated", past,
            advice="concatenate the past as it came in with the new tokens, and take views of the result",
        )
    _unwritten(root, effects)
    if not outputs:
        raise Miss(
            "the concatenated cache is not returned as it is (a window of it, or nothing, is kept)", root,
            advice="return the concatenated keys and values, or use a static cache",
        )
    axes, heads, reading = axes_of(trail, read, write.token_dim)
    return slot_of(SlotKind.CONCAT, root, origin, outputs, axes, heads, write, trail, reading)


def slot_of(
    kind: SlotKind, root: fx.Node, placeholder: fx.Node | None, outputs: tuple[int, ...], axes: Axes, heads: int,
    write: Write, trail: Trail, reading: Reading,
) -> Slot:
    """Return the slot of these parts, its sizes taken from ``axes``.

    Raises Miss where entries of a dim other than batch rows have positions of their own, or the write covers part of another dim.
    """
    if write.row_dim is not None and axes.labels[write.row_dim] != ("B",):
        raise Miss(
            "the write has positions of their own for something other than batch rows", write.node, advice="give every row its positions",
        )
    rows, held = write.first_rows, dict(axes.counts)
    if rows is not None and (kind is not SlotKind.BUFFER or axes.labels[rows.dim] != ("B",)):
        raise partial(write.node, rows.dim, rows.count, value_of(root).shape[rows.dim])
    if rows is not None:
        held[rows.dim] = rows.count
    shape = [held.get(dim, size) for dim, size in enumerate(value_of(root).shape)]
    size: dict[str, Any] = {"B": 1, "K": heads}
    for dim, label in enumerate(axes.labels):
        if len(label) == 1:
            size[label[0]] = shape[dim]
        elif len(label) == 2:
            first, second = label
            known = size.get(first) if first == "K" else None
            size[second if known else first] = shape[dim] // (known or heads)
    return Slot(
        kind, root, placeholder, outputs, axes, write, trail.path, heads, hint(size.get("D", 1)), size["B"], size["T"], factor(trail.path),
        reading.tiled, tiles=reading.tiles,
    )
