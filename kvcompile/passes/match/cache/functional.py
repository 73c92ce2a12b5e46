"""Caches that are updated out of place: ``new = cache.index_copy(2, pos, k)``, scatter, index_put, slice_scatter, select_scatter.

The result is a new tensor, which the caller passes to the next call. Its write is that of the in-place operator of the same name.

::

    new = index_copy(cache, 2, pos, k)      returned, and read by attention
    after:
    append(k, planes, unsqueeze(pos, 0), "int8")      the store's planes are written in place, nothing is returned
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from kvcompile.passes.graph.operators import KINDS, UPDATES, Kind
from kvcompile.passes.graph.shapes import bind, op_name, sizes, value_of
from kvcompile.passes.match.cache.writes import RECOGNISERS
from kvcompile.passes.match.sites import Miss, Position, Write


def _slice_scatter(node: fx.Node, root: fx.Node) -> Write:
    """Return the write of ``torch.slice_scatter(cache, values, dim, start, end)``.

    Raises Miss for steps and for a start counted from the end.
    """
    arguments = bind(node)
    values, rank = arguments["src"], len(sizes(node))
    dim = int(arguments["dim"]) % rank
    start = arguments.get("start") or 0
    if (arguments.get("step") or 1) != 1 or (isinstance(start, int) and start < 0):
        raise Miss("a slice_scatter with steps, or counted from the end of the cache", node, advice="scatter into [start:start + n]")
    return Write(
        "slice_scatter", node, root, values, tuple(range(rank)), dim, Position(offset=start), value_of(values).shape[dim],
    )


def _select_scatter(node: fx.Node, root: fx.Node) -> Write:
    """Return the write of ``torch.select_scatter(cache, values, dim, index)``: one token, whose dim the values lack.

    Raises Miss for an index counted from the end.
    """
    arguments = bind(node)
    rank, index = len(sizes(node)), arguments["index"]
    dim = int(arguments["dim"]) % rank
    if isinstance(index, int) and index < 0:
        raise Miss("a select_scatter that counts from the end of the cache", node, advice="count positions from the first token")
    runs = tuple(item for item in range(rank) if item != dim)
    return Write("select_scatter", node, root, arguments["src"], runs, dim, Position(offset=index), 1)


OUT_OF_PLACE = {Kind.WRITE_RANGE: _slice_scatter, Kind.WRITE_ENTRY: _select_scatter}
"""The recogniser of each kind of write that exists out of place only."""


def copied_back(node: fx.Node, root: fx.Node) -> Write | None:
    """Return the write of ``cache.copy_(cache.index_copy(...))``; None if the copied tensor is not an update of this cache."""
    arguments = bind(node)
    made = arguments["src"]
    if arguments["self"] is not root or not isinstance(made, fx.Node) or len(made.users) != 1:
        return None
    found = update(made)
    if found is None or found[0] is not root:
        return None
    return replace(found[1], idiom=f"{found[1].idiom} and copy_", node=node, root=root, via=(made,))


def update(node: fx.Node) -> tuple[fx.Node, Write] | None:
    """Return (updated tensor, write) of an out-of-place update; None for other nodes. The write's root is the update's result."""
    if op_name(node) not in UPDATES:
        return None
    past, kind = bind(node)["self"], KINDS[op_name(node)]
    return past, replace((OUT_OF_PLACE.get(kind) or RECOGNISERS[kind])(node, past), root=node)
