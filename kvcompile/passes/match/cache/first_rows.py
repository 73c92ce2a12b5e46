"""First rows: a cache made for a largest batch, and calls that write and read its first rows alone.

::

    cache[:b, start:start + n] = k
    attention over cache[:b, :start + n]
    after:
    append(k, planes, positions [1, n], "int8")      planes of b rows: the runtime keeps the others aside (``runtime.store.parked_rows``)

The rows begin at the first one, and attention reads exactly the rows that are written. Both hold for all sizes that the graph's guards
admit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import fx

from kvcompile.passes.graph.pullback import Trail, trace
from kvcompile.passes.graph.shapes import bind, hint, op_name, operand, same, sizes, value_of
from kvcompile.passes.match.cache.readings import Read
from kvcompile.passes.match.cache.views import begins, partial
from kvcompile.passes.match.sites import FirstRows, Miss, Slot, Write


def within(shape: Sequence[int], rows: FirstRows) -> tuple[int, ...]:
    """Return ``shape``, the sizes of a cache tensor, with its number of rows replaced by the number that the graph reads (``rows``)."""
    return tuple(hint(rows.count) if dim == rows.dim else size for dim, size in enumerate(shape))


def rows_held(slot: Slot) -> int:
    """Return how many batch rows the cache tensor of a slot has, including rows that the graph does not read."""
    rows = slot.write.first_rows
    return hint(slot.batch) if rows is None else sizes(slot.root)[rows.dim]


def same_rows(one: Slot, other: Slot) -> bool:
    """Return whether two slots read equally many rows of their caches, or both read all rows."""
    a, b = one.write.first_rows, other.write.first_rows
    if a is None or b is None:
        return a is b
    return same(a.count, b.count)


def check_read(trail: Trail, read: Read, write: Write) -> None:
    """Raise Miss if an attention may read other rows of the cache than the first rows, which the write fills."""
    rows, root = write.first_rows, trail.base
    if rows is None:
        return
    dim = next((dim for dim, role in enumerate(read.roles) if "B" in role), None)
    count = value_of(read.operand).shape[dim] if dim is not None else 1
    # Rows and heads may be one dim.
    folded, rest = divmod(hint(count), hint(rows.count))
    if rest or not folded or not same(count, rows.count * folded) or (folded > 1 and read.roles[dim or 0] == "B"):
        raise partial(write.node, rows.dim, rows.count, value_of(root).shape[rows.dim])
    for node in trail.path:
        if op_name(node) in {"slice", "narrow"} and begins(node) != 0 and _cuts(node, root, rows.dim):
            raise Miss(
                f"the attention reads rows of the cache from {_told(node)} on, and the write is to its first {rows.count}", node,
                advice="keep the rows of a call first: write and read cache[:rows]",
            )


def _cuts(node: fx.Node, root: fx.Node, dim: int) -> bool:
    """Return whether a slice cuts ``dim`` of the cache that it is a view of."""
    above = trace(operand(node), lambda item: item is root, scales=True)
    along = int(bind(node)["dim"]) % len(sizes(node))
    there, here = above.there[:, dim], above.here[:, along]
    return bool(np.ptp(here)) and bool(np.ptp(there)) and bool(np.ptp(there - here) == 0)


def _told(node: fx.Node) -> object:
    """Return the start of a slice for an error message: a number, or the fake value of the node that computes it."""
    start = begins(node)
    return value_of(start) if isinstance(start, fx.Node) else start
