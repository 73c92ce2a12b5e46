"""Paged caches: attention gathers tokens by block tables, by token tables, or by the rows that are assigned to requests.

Such a cache is a pool: its dims other than heads and channels number its slots, in order. A gather by integer tensors picks the slots of
each row's tokens, and a write by integer tensors those of the new tokens. Both are read off sampled coordinates: every indexed dim has a
weight in the slot number, whatever views are between the gather and the pool.

The order of slots is not the order of tokens, so the host does not know which slots are filled: the store has all slots from the start.
Attention reads codes that are gathered from the store, or finds them there by the table (``rewrite.blocks``).

::

    index_put_(pool, [slot_mapping], k)
    keys = reshape(index(pool, [block_table]), [B, T, K, D])
    out  = scaled_dot_product_attention(q, transpose(keys, 1, 2), ...)
    after:
    append(k, planes, unsqueeze(slot_mapping, 0), "int8")
    read = gather(planes, block_table * 16 + arange(16), "int8")      codes, not decoded
    out  = attend(q, read, ...)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import fx

from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.pullback import Coords, Trail, factor, step
from kvcompile.passes.graph.shapes import hint, plain, same, sizes, value_of
from kvcompile.passes.match.cache.gathers import Gathered, Index, gathered
from kvcompile.passes.match.cache.one_write import one_write
from kvcompile.passes.match.cache.paged_views import Linearity, follow, linear
from kvcompile.passes.match.cache.paged_writes import pool_write
from kvcompile.passes.match.cache.readings import Columns, Read, Reading, candidates, columns_of
from kvcompile.passes.match.paged_places import BlockTable, Picked, Places, Running
from kvcompile.passes.match.sites import Axes, Miss, Slot, Write
from kvcompile.passes.match.slot_kinds import SlotKind

ONE_TABLE = "gather each row's tokens by one block table [B, blocks], token table [B, T] or list of rows [B]"
OTHER_ORDER = "the attention gathers from a copy of the cache whose slots are in another order"


def find(trail: Trail, read: Read, attention: fx.Node, effects: Effects) -> Slot | None:
    """Return the slot of the paged cache whose gather ends a trail, None without a gather; raises Miss for an unknown gather."""
    taken = gathered(trail.base, trail.there)
    if taken is None:
        return None
    root = effects.root.get(taken.source, taken.source)
    if root.op != "placeholder" or (not effects.writes.get(root) and len(sizes(root)) < 3):
        # A matrix that is never written is an embedding table.
        return None
    found = follow(taken.source, _anywhere(taken), root)
    if found is None:
        return None
    there, path = found
    missed: dict[tuple[int, int], Miss] = {}
    for reading in candidates(columns_of(trail, read.roles, read.shape), _batches(taken, root)):
        axes = _layout(there, sizes(root), reading.columns)
        if axes is None:
            continue
        try:
            return _slot(Trail(root, there, trail.here, (*trail.path, trail.base, *path)), taken, read, reading, axes, attention, effects)
        except Miss as miss:
            missed.setdefault((reading.columns["K"][1], reading.columns["B"][1]), miss)
    if missed:
        # The reading with the most heads, then rows, is the likeliest, so its reason is the one to report.
        raise missed[max(missed)]
    return None


def _slot(way: Trail, taken: Gathered, read: Read, reading: Reading, axes: Axes, attention: fx.Node, effects: Effects) -> Slot:
    """Return the slot of a paged cache under one reading of the operand's dims.

    ``way``: the trail from the operand to the cache; ``taken``: the gather on it. Raises Miss where the cache has no fixed size or no known
    write before the attention, or where the gather's indices are not understood.
    """
    root, gather, columns = way.base, taken.node, reading.columns
    if not effects.writes.get(root):
        raise Miss(
            "the attention gathers from a tensor that is not written in this graph (an uncompiled call has, or a graph break separates the "
            "write from the attention)", gather, advice="keep the write and the attention in one compiled graph",
        )
    if not all(isinstance(size, int) for size in value_of(root).shape):
        raise Miss("the cache that attention gathers from has no fixed size", root, advice="give every call a pool of the same size")
    heads, channels = columns["K"][1], columns["D"][1]
    write = one_write(root, way, attention, effects, functools.partial(pool_write, axes=axes, heads=heads))
    if write.late:
        raise Miss(
            "the pool is written after the attention that gathers from it", write.node, advice="write the new tokens first, then attend",
        )
    tokens, batch = value_of(read.operand).shape[read.roles.index("T")], _rows(read, columns)
    search = _Search(taken, columns, effects, gather, isinstance(tokens, int))
    table = BlockTable(gather, search.places(linear(taken.source, root, axes, OTHER_ORDER)), tokens)
    return Slot(
        SlotKind.BUFFER, root, root, (), axes, _of_a_row(write, batch), way.path, heads, channels, batch, tokens, factor(way.path),
        reading.tiled, block_table=table, tiles=reading.tiles,
    )


def _rows(read: Read, columns: Columns) -> Any:
    """Return the number of batch rows, an int or a SymInt, from the size of the operand's dim of rows, which may also hold heads.

    ``columns``: coordinates and sizes of the roles, under one reading of the operand.
    """
    rows = columns["B"][1]
    for role, size in zip(read.roles, value_of(read.operand).shape, strict=True):
        if "B" in role and "T" not in role:
            # The heads in this dim are as many in every world, or the site is refused.
            return plain(size // (hint(size) // rows))
    return rows


def _of_a_row(write: Write, batch: Any) -> Write:
    """Return the write with ``count`` divided by the number of batch rows, which gives the tokens of one row.

    Unchanged if it does not divide evenly in every call, as when rows with different numbers of tokens are written one after another.
    """
    return replace(write, count=plain(write.count // batch)) if same(write.count % batch, 0) else write


def _anywhere(taken: Gathered) -> Coords:
    """Return sampled coordinates in a gather's source: random along indexed dims; along other dims, the coordinates that ``taken`` has."""
    rng = np.random.default_rng(0)
    shape = sizes(taken.source)
    count = len(taken.indices[0].coords)
    columns = dict(taken.through)
    for index in taken.indices:
        columns[index.dim] = rng.integers(0, max(shape[index.dim], 1), count)
    return np.stack([columns[dim] for dim in range(len(shape))], axis=1)


def _batches(taken: Gathered, root: fx.Node) -> tuple[int, ...]:
    """Return candidates for the number of batch rows in a flattened dim: sizes of the gather's index tensors and of the cache."""
    return (*(size for index in taken.indices for size in sizes(index.node)), *sizes(root))


def _layout(there: Coords, base: tuple[int, ...], columns: Columns) -> Axes | None:
    """Return the axes of a pool of sizes ``base`` under one reading of the operand (``columns``); None where the reading does not fit.

    ``there``: the coordinates in the pool that samples of the operand read. All dims that vary and are neither heads nor channels are dims
    of tokens.
    """
    left = {role: columns[role] for role in ("K", "D")}
    labels: list[tuple[str, ...] | None] = [None] * len(base)
    select = []
    for dim, size in enumerate(base):
        column = there[:, dim]
        if size == 1:
            continue
        single = next((role for role, (values, n) in left.items() if n == size and (values == column).all()), None)
        both = len(left) == 2 and left["K"][1] * left["D"][1] == size and (left["K"][0] * left["D"][1] + left["D"][0] == column).all()
        if single is not None:
            labels[dim] = (single,)
            left.pop(single)
        elif both:
            labels[dim], left = ("K", "D"), {}
        elif (column == column[0]).all():
            labels[dim] = ()
            select.append((dim, int(column[0])))
        else:
            labels[dim] = ("T",)
    waiting = [role for role, (_, n) in left.items() if n == 1]
    if len(waiting) != len(left) or ("T",) not in labels:
        return None
    for dim in range(len(base)):
        if labels[dim] is None:
            labels[dim] = (waiting.pop(0),) if waiting else ()
            if not labels[dim]:
                select.append((dim, 0))
    return Axes(tuple(label or () for label in labels), tuple(select), paged=True)


# --- slots of a gather -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Roles:
    """A tensor of indices with the role of each of its dims; each entry holds the index of ``every`` consecutive tokens."""

    node: fx.Node
    roles: tuple[str, ...]
    every: int


@dataclass(frozen=True)
class _Search:
    """A search for the slots that one gather reads, under one reading of the operand's dims."""

    taken: Gathered
    columns: Columns
    effects: Effects
    gather: fx.Node
    fixed: bool
    """Whether the number of gathered tokens is a plain int."""

    def places(self, form: Linearity) -> Places:
        """Return the slots of the tokens that the gather reads, as a sum over its index tensors and its dims without an index.

        ``form``: the slot number of each element of the gather's source. Raises Miss where a dim does not number slots, or follows neither
        tokens nor batch rows.
        """
        shape = sizes(self.taken.source)
        picked = []
        for index in self.taken.indices:
            weight, size = form.weights[index.dim], shape[index.dim]
            if weight:
                found = self._index(index)
                picked.append(Picked(found.node, found.roles, weight, size, index.wraps, found.every))
            elif size > 1:
                raise Miss("the gather indexes something other than slots of the cache", index.node, advice=ONE_TABLE)
        running = [
            self._running(dim, column, form.weights[dim], shape[dim]) for dim, column in self.taken.through.items() if form.weights[dim]
        ]
        return Places(tuple(picked), tuple(running), form.first)

    def _running(self, dim: int, column: np.ndarray, weight: int, size: int) -> Running:
        """Return whether dim ``dim`` of the gather's source, which has no index tensor, runs along tokens or batch rows.

        ``column``: sampled coordinates in that dim; ``weight``: slots from entry to entry; ``size``: entries. Raises Miss for any other
        order.
        """
        if (column == self.columns["T"][0] % size).all():
            return Running("T", weight, size)
        if (column == self.columns["B"][0]).all():
            return Running("B", weight, size)
        why = f"the attention reads dim {dim} of what it gathers from in another order than the cache's"
        raise Miss(why, self.gather, advice=ONE_TABLE)

    def _index(self, index: Index) -> _Roles:
        """Return the tensor of an index, or the one of equal values that it is a view of, with the roles of its dims.

        Raises Miss if a dim runs along something other than batch rows, tokens and blocks of tokens.
        """
        node, coords = index.node, index.coords
        while True:
            if (found := self._roles(node, coords)) is not None:
                return found
            moved = step(node, coords)
            if moved is None or self.effects.writes_between(moved[0], moved[0], self.gather):
                raise Miss(
                    "the attention gathers by a tensor that runs along something else than batch rows, tokens and blocks of tokens",
                    index.node, advice=ONE_TABLE,
                )
            node, coords = moved

    def _roles(self, node: fx.Node, coords: Coords) -> _Roles | None:
        """Return an index tensor with the role of every dim, read off the sampled coordinates ``coords``; None where a dim has no role."""
        every = 1
        roles = []
        for dim, size in enumerate(sizes(node)):
            found = self._role(coords[:, dim], size)
            if found is None or (found[1] > 1 and every not in {1, found[1]}):
                return None
            roles.append(found[0])
            every = max(every, found[1])
        named = [letter for role in roles for letter in role]
        if len(set(named)) != len(named) or ("T" in named and {"N", "O"} & set(named)):
            return None
        return _Roles(node, tuple(roles), every)

    def _role(self, column: np.ndarray, size: int) -> tuple[str, int] | None:
        """Return (role, tokens per entry) of one dim of an index tensor, with ``size`` entries; None where it runs along something else.

        ``column``: sampled coordinates in that dim. Roles: "B", "T", "N" for blocks of tokens, "O" for tokens in a block, or "BT", "BN".
        """
        (token, tokens), (row, rows) = self.columns["T"], self.columns["B"]
        if size == 1:
            return "", 1
        if size >= tokens and (column == token).all():
            return "T", 1
        if size == rows and (column == row).all():
            return "B", 1
        blocks = sorted(self._blocks(size, rows, tokens))
        for every in blocks:
            if (column == token // every).all():
                return "N", every
            if size == every and (column == token % every).all():
                return "O", every
        if rows > 1 and size % rows == 0:
            for every in (1, *blocks):
                if (column == row * (size // rows) + token // every).all():
                    return ("BT" if every == 1 else "BN"), every
        return None

    def _blocks(self, size: int, rows: int, tokens: int) -> set[int]:
        """Return candidates for the number of tokens per block: the sizes of the gather's source, all above 1.

        If the number of tokens is constant, also its share in each of ``size`` entries, or of the entries of one row. All are constants,
        which do not change when a table grows.
        """
        known = set(sizes(self.taken.source))
        if self.fixed:
            known |= {-(-tokens // size), -(-tokens // max(size // rows, 1))}
        return {block for block in known if block > 1}
