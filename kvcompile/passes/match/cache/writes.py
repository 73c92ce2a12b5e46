"""Writes to a cache: index_copy_, index_put_, copy_ into a view, concatenation, with one recogniser each.

A recogniser answers a ``Write`` or raises ``Miss``; where the destination is itself a view of the cache
(``cache[0].index_copy_``, ``narrow().copy_()``) the pull-back of its coordinates says which dims of the
root it runs along.

::

    index_copy_(cache, 2, pos, k)                       Position(index=pos)
    index_put_(cache, [rows, None, pos], k)             Position(index=pos, rows=True)
    copy_(slice(cache, 2, start, start + S), k)         Position(offset=start)
    cat([past, k], 2), returned                         Position(past=past)
    after, each: append(k, planes, positions [1 or B, S], "int8")
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from kvcompile.passes.graph.operators import IN_PLACE, KINDS, Kind
from kvcompile.passes.graph.pullback import trace
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, sizes, value_of
from kvcompile.passes.match.cache.scatter import scatter
from kvcompile.passes.match.cache.views import along, slices, whole
from kvcompile.passes.match.sites import Miss, Position, Write

FORMS = "write new tokens with index_copy_, cache[:, :, pos] = x, narrow().copy_(), scatter_ or torch.cat"


def _plain(idiom: str, node: fx.Node, root: fx.Node, dest: fx.Node, dim: int, values: fx.Node, index: fx.Node) -> Write:
    dims, fixed, offsets = along(dest, root)
    whole(dest, root, dims, offsets, dims[dim])
    # A scalar index takes its dim away.
    single = not sizes(index)
    runs = tuple(dims[d] for d in range(len(sizes(dest))) if d != dim or not single)
    count = 1 if single else value_of(index).shape[0]
    return Write(idiom, node, root, values, runs, dims[dim], Position(index=index), count, tuple(fixed.items()))


def index_copy(node: fx.Node, root: fx.Node) -> Write:
    """Read the write of ``cache.index_copy_(dim, index, values)``."""
    arguments = bind(node)
    dest, dim = arguments["self"], int(arguments["dim"])
    if not sizes(arguments["index"]):
        raise Miss("the write's index has no dims", node, advice="give it one: pos.reshape(1)")
    return _plain(
        "index_copy_", node, root, dest, dim % len(sizes(dest)), arguments["source"], arguments["index"]
    )


def index_put(node: fx.Node, root: fx.Node) -> Write:
    """Read the write of ``cache[:, :, pos] = values``, or ``cache[rows, :, pos] = values`` with per-row positions."""
    arguments = bind(node)
    if arguments.get("accumulate"):
        raise Miss("the write accumulates into the cache", node, advice="write the new tokens, without accumulate=True")
    dest, values = arguments["self"], arguments["values"]
    rank = len(sizes(dest))
    indices = [*arguments["indices"], *([None] * (rank - len(arguments["indices"])))]
    used = [dim for dim, index in enumerate(indices) if index is not None]
    if any(not is_tensor(indices[dim]) or value_of(indices[dim]).dtype.is_floating_point for dim in used):
        raise Miss("the write's indices are no integer tensors", node, advice="index with integer positions, not with a mask")
    if len(used) == 1 and len(sizes(indices[used[0]])) <= 1:
        return _plain("index_put_", node, root, dest, used[0], values, indices[used[0]])
    by_rank = [len(sizes(indices[dim])) for dim in used]
    if by_rank == [2, 1] and is_row_index(indices[used[0]], sizes(dest)[used[0]]):
        return _all_rows(node, root, dest, values, used, indices[used[1]])
    if by_rank in ([1, 1], [2, 2]):
        row_dim, token_dim = used
        dims, fixed, offsets = along(dest, root)
        whole(dest, root, dims, offsets, dims[token_dim])
        adjacent = used[1] == used[0] + 1
        many = by_rank == [2, 2]
        if sizes(indices[token_dim])[0] != sizes(dest)[row_dim]:
            raise Miss(
                "the write has not one position for every row", indices[token_dim], advice="give every batch row its positions, [B, S]",
            )
        front = [row_dim, token_dim] if many else [row_dim]
        rest = [dim for dim in range(rank) if dim not in used]
        result = [*rest[: used[0]], *front, *rest[used[0] :]] if adjacent else [*front, *rest]
        if not is_row_index(indices[row_dim], sizes(dest)[row_dim]):
            raise Miss(
                "the write's row index is not arange(batch) (rows of the cache are assigned to requests), and the cache is read as it lies",
                indices[row_dim], advice="read the rows of the requests, cache[rows], or keep request b in row b of the cache",
            )
        return Write(
            "index_put_ by row", node, root, values, tuple(dims[dim] for dim in result), dims[token_dim],
            Position(index=indices[token_dim], rows=True), value_of(indices[token_dim]).shape[1] if many else 1, tuple(fixed.items()),
            dims[row_dim],
        )
    raise Miss("the write indexes the cache in a form that is not known", node, advice=FORMS)


def _all_rows(node: fx.Node, root: fx.Node, dest: fx.Node, values: fx.Node, used: list[int], index: fx.Node) -> Write:
    """Read the write of ``cache[rows[:, None], :, pos]`` with one ``pos`` [S] for all rows."""
    dims, fixed, offsets = along(dest, root)
    whole(dest, root, dims, offsets, dims[used[1]])
    rest = [dim for dim in range(len(sizes(dest))) if dim not in used]
    result = [*rest[: used[0]], *used, *rest[used[0] :]] if used[1] == used[0] + 1 else [*used, *rest]
    return Write(
        "index_put_", node, root, values, tuple(dims[dim] for dim in result), dims[used[1]], Position(index=index),
        value_of(index).shape[0], tuple(fixed.items()),
    )


def is_row_index(node: fx.Node, rows: int) -> bool:
    """Whether a node is ``arange(rows)`` with trailing dims of size one."""
    trail = trace(node, lambda base: op_name(base) == "arange")
    if op_name(trail.base) != "arange" or sizes(trail.base) != (rows,) or len(trail.base.args) > 1:
        return False
    return bool((trail.there[:, 0] == trail.here[:, 0]).all())


def view_copy(node: fx.Node, root: fx.Node) -> Write:
    """Read the write of ``cache[:, :, s:s + n] = values`` or ``cache.narrow(1, s, n).copy_(values)``."""
    arguments = bind(node)
    dest, values = arguments["self"], arguments["src"]
    dims, fixed, offsets = along(dest, root)
    cut = slices(dest, root)
    if len(cut) != 1:
        raise Miss(f"the write goes to a view with {'several' if cut else 'no'} token ranges", node, advice=FORMS)
    ranged, root_dim = cut[0]
    count = value_of(ranged).shape[int(bind(ranged)["dim"]) % len(sizes(ranged))]
    start = bind(ranged).get("start") or 0
    if isinstance(start, int) and start < 0:
        raise Miss("the write's range is counted from the end of the cache", node, advice="count positions from the first token")
    if root_dim in fixed:
        # One token written through ``select``.
        dims = dict(dims)
        fixed.pop(root_dim)
    whole(dest, root, dims, offsets, root_dim, ranged=True)
    return Write(
        "copy_ into a slice", node, root, values, tuple(dims[d] for d in range(len(sizes(dest)))), root_dim,
        Position(offset=start), count, tuple(fixed.items()),
    )


RECOGNISERS: dict[Kind, Callable[[fx.Node, fx.Node], Write]] = {
    Kind.WRITE_ROWS: index_copy, Kind.WRITE_PLACES: index_put, Kind.WRITE_WHOLE: view_copy, Kind.WRITE_SCATTER: scatter,
}
"""What reads each kind of write, in place or out of place."""


def in_place(node: fx.Node, root: fx.Node) -> Write:
    """Return the write that an in-place node does on ``root``; raises Miss where it is none that is known."""
    name = op_name(node)
    if name not in IN_PLACE:
        raise Miss(
            f"the cache is written by {name}, which is no known cache write", node,
            advice=FORMS,
        )
    return RECOGNISERS[KINDS[name]](node, root)


def concatenation(node: fx.Node) -> tuple[fx.Node | None, Write]:
    """Read ``torch.cat([past, new], dim)``: return the past (None where it is empty) and the write, whose root is the cat itself."""
    arguments = bind(node)
    operands = list(arguments["tensors"])
    filled = [operand for operand in operands if 0 not in sizes(operand)]
    if len(operands) > 2 or not filled:
        raise Miss(f"torch.cat of {len(operands)} tensors is no cache append", node, advice="append with torch.cat([past, new], dim)")
    rank = len(sizes(node))
    dim = int(arguments["dim"]) % rank
    past = filled[0] if len(filled) == 2 else None
    values = filled[-1]
    write = Write("cat", node, node, values, tuple(range(rank)), dim, Position(past=past), value_of(values).shape[dim])
    return past, write
