"""Writes by scatter: ``cache.scatter_(2, index, values)`` with the same position for all heads and channels.

The index has an entry for every element; its coordinates are pulled back to find the positions that it broadcasts.

::

    index = expand(view(pos, [1, 1, -1, 1]), [B, K, S, D])
    cache = scatter_(cache, 2, index, k)
    after:
    append(k, planes, unsqueeze(pos, 0), "int8")
"""

from __future__ import annotations

from torch import fx

from kvcompile.passes.graph.pullback import trace
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, sizes, value_of
from kvcompile.passes.match.cache.views import along, rows_of
from kvcompile.passes.match.sites import Miss, Position, Write

ADVICE = "expand one position a token (or a row and token) to the values' shape, or use index_copy_"


def scatter(node: fx.Node, root: fx.Node) -> Write:
    """Return the write of a scatter node; raises Miss if its index is not a broadcast of positions."""
    arguments = bind(node)
    dest, index, values = arguments["self"], arguments["index"], arguments.get("src")
    if arguments.get("reduce") or not is_tensor(values):
        raise Miss("a scatter that reduces, or writes one number", node, advice=ADVICE)
    rank = len(sizes(dest))
    dim = int(arguments["dim"]) % rank
    dims, fixed, offsets = along(dest, root)
    rows = rows_of(dest, root, dims, offsets, dims[dim])
    shape = sizes(index)
    if shape != sizes(values) or any(shape[d] != sizes(dest)[d] for d in range(rank) if d != dim):
        raise Miss("a scatter that writes only part of the cache's rows, heads or channels", index, advice=ADVICE)
    base, roles, row = _positions(index, dim)
    return Write(
        op_name(node), node, root, values, tuple(dims[d] for d in range(rank)), dims[dim],
        Position(index=base, rows="B" in roles, roles=roles), value_of(index).shape[dim], tuple(fixed.items()),
        dims[row] if row is not None else None, first_rows=rows,
    )


def _positions(index: fx.Node, dim: int) -> tuple[fx.Node, tuple[str, ...], int | None]:
    """Return (the positions that an index broadcasts, their dims' roles, the index's dim of batch rows or None).

    Raises Miss where the index broadcasts none, or holds floats.
    """
    trail = trace(index, lambda node: False)
    roles = []
    row = None
    for place, size in enumerate(sizes(trail.base)):
        if size == 1:
            roles.append("")
            continue
        column = trail.there[:, place]
        from_dim = [d for d, count in enumerate(sizes(index)) if count == size and (column == trail.here[:, d]).all()]
        if not from_dim or (from_dim[0] != dim and row is not None):
            raise Miss("a scatter whose index is no broadcast of positions", index, advice=ADVICE)
        roles.append("S" if from_dim[0] == dim else "B")
        row = row if from_dim[0] == dim else from_dim[0]
    if value_of(trail.base).dtype.is_floating_point:
        raise Miss("a scatter whose positions are no integers", index, advice=ADVICE)
    return trail.base, tuple(roles), row
