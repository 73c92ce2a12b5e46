"""Writes to a cache: index_copy_, index_put_, copy_ into a view, concatenation, with one recogniser each.

A recogniser returns a ``Write`` or raises ``Miss``. Where the destination is a view of the cache (``cache[0].index_copy_``,
``narrow().copy_()``), its coordinates are pulled back to find the dims of the root that it runs along.

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
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, same, sizes, value_of
from kvcompile.passes.match.cache.advice import learned
from kvcompile.passes.match.cache.scatter import scatter
from kvcompile.passes.match.cache.views import along, begins, partial, rows_of, selects, slices
from kvcompile.passes.match.sites import FirstRows, Miss, Position, Write

FORMS = "write new tokens with index_copy_, cache[:, :, pos] = x, narrow().copy_(), scatter_ or torch.cat"


def _plain(idiom: str, node: fx.Node, root: fx.Node, dest: fx.Node, dim: int, values: fx.Node, index: fx.Node) -> Write:
    """Return the write of ``values`` to positions ``index`` along ``dim`` of ``dest``, a view of the cache."""
    dims, fixed, offsets = along(dest, root)
    rows = rows_of(dest, root, dims, offsets, dims[dim])
    # A scalar index takes its dim away.
    single = not sizes(index)
    runs = tuple(dims[d] for d in range(len(sizes(dest))) if d != dim or not single)
    count = 1 if single else value_of(index).shape[0]
    return Write(idiom, node, root, values, runs, dims[dim], Position(index=index), count, tuple(fixed.items()), first_rows=rows)


def index_copy(node: fx.Node, root: fx.Node) -> Write:
    """Return the write of ``cache.index_copy_(dim, index, values)``. Raises Miss where the index has no dims."""
    arguments = bind(node)
    dest, dim = arguments["self"], int(arguments["dim"])
    if not sizes(arguments["index"]):
        raise Miss("the write's index has no dims", node, advice="give it one: pos.reshape(1)")
    return _plain(
        "index_copy_", node, root, dest, dim % len(sizes(dest)), arguments["source"], arguments["index"]
    )


def index_put(node: fx.Node, root: fx.Node) -> Write:
    """Return the write of ``cache[:, :, pos] = values``, or of ``cache[rows, :, pos] = values`` with positions per row.

    Raises Miss for masks, for accumulation and for other rows than arange(B).
    """
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
    if by_rank == [2, 1] and is_row_index(indices[used[0]]):
        return _all_rows(node, root, dest, values, used, indices[used[0]], indices[used[1]])
    if by_rank in ([1, 1], [2, 2]):
        row_dim, token_dim = used
        dims, fixed, offsets = along(dest, root)
        if not is_row_index(indices[row_dim]):
            raise Miss(
                "the write's row index is not arange(batch) (rows of the cache are assigned to requests), and attention reads the rows in "
                "order",
                indices[row_dim], advice="read the rows of the requests, cache[rows], or keep request b in row b of the cache",
            )
        rows = _numbered(dest, root, dims, row_dim, indices[row_dim], rows_of(dest, root, dims, offsets, dims[token_dim]))
        adjacent = used[1] == used[0] + 1
        many = by_rank == [2, 2]
        if not same(value_of(indices[token_dim]).shape[0], value_of(indices[row_dim]).shape[0]):
            raise Miss(
                "the write has not one position for every row", indices[token_dim], advice="give every batch row its positions, [B, S]",
            )
        front = [row_dim, token_dim] if many else [row_dim]
        rest = [dim for dim in range(rank) if dim not in used]
        result = [*rest[: used[0]], *front, *rest[used[0] :]] if adjacent else [*front, *rest]
        return Write(
            "index_put_ by row", node, root, values, tuple(dims[dim] for dim in result), dims[token_dim],
            Position(index=indices[token_dim], rows=True), value_of(indices[token_dim]).shape[1] if many else 1, tuple(fixed.items()),
            dims[row_dim], first_rows=rows,
        )
    raise Miss("the write indexes the cache in a form that is not known", node, advice=FORMS)


def _all_rows(
    node: fx.Node, root: fx.Node, dest: fx.Node, values: fx.Node, used: list[int], numbers: fx.Node, index: fx.Node,
) -> Write:
    """Return the write of ``cache[numbers[:, None], :, index]``: positions ``index`` [S] in all of the rows ``numbers``.

    ``dest``: the view of the cache ``root`` that is indexed; ``used``: its dims of rows and of tokens. ``numbers`` must be 0, 1, 2, ...
    Raises Miss if the write is limited to entries of several dims, or to entries other than the first.
    """
    dims, fixed, offsets = along(dest, root)
    rows = _numbered(dest, root, dims, used[0], numbers, rows_of(dest, root, dims, offsets, dims[used[1]]))
    rest = [dim for dim in range(len(sizes(dest))) if dim not in used]
    result = [*rest[: used[0]], *used, *rest[used[0] :]] if used[1] == used[0] + 1 else [*used, *rest]
    return Write(
        "index_put_", node, root, values, tuple(dims[dim] for dim in result), dims[used[1]], Position(index=index),
        value_of(index).shape[0], tuple(fixed.items()), first_rows=rows,
    )


def _numbered(
    dest: fx.Node, root: fx.Node, dims: dict[int, int], row_dim: int, numbers: fx.Node, cut: FirstRows | None,
) -> FirstRows | None:
    """Return the rows that a write indexes by ``numbers``, which are 0, 1, 2, ...; None for all rows of the cache.

    ``cut``: the rows of the cache that the written view covers, None for all. Raises Miss if ``cut`` and ``numbers`` limit different dims.
    """
    count, held = value_of(numbers).shape[0], value_of(dest).shape[row_dim]
    if same(count, held):
        return cut
    if cut is not None and cut.dim != dims[row_dim]:
        raise partial(numbers, dims[row_dim], count, held)
    return None if same(count, value_of(root).shape[dims[row_dim]]) else FirstRows(dims[row_dim], count)


def is_row_index(node: fx.Node) -> bool:
    """Return whether a node is ``arange(rows)``, with or without trailing dims of size one."""
    trail = trace(node, lambda base: op_name(base) == "arange")
    if op_name(trail.base) != "arange" or len(trail.base.args) > 1 or not same(value_of(trail.base).shape[0], value_of(node).shape[0]):
        return False
    return bool((trail.there[:, 0] == trail.here[:, 0]).all())


def view_copy(node: fx.Node, root: fx.Node, tokens: frozenset[int] = frozenset()) -> Write:
    """Return the write of ``cache[:, :, s:s + n] = values``, ``cache.narrow(1, s, n).copy_(values)`` or ``cache[:, :, s] = values``.

    ``tokens``: the root's dims that the attention's tokens may run along; empty where unknown. Raises Miss.
    """
    arguments = bind(node)
    dest, values = arguments["self"], arguments["src"]
    dims, fixed, offsets = along(dest, root)
    root_dim, ranged = _token_range(node, dest, root, tokens)
    if root_dim in fixed:
        # A single token has no dim in the view, or one of size one.
        fixed.pop(root_dim)
    rows = rows_of(dest, root, dims, offsets, root_dim, ranged=True)
    if op_name(ranged) == "select":
        start, count = bind(ranged)["index"], 1
    else:
        start, count = begins(ranged), value_of(ranged).shape[int(bind(ranged)["dim"]) % len(sizes(ranged))]
    if isinstance(start, int) and start < 0:
        raise Miss("the write's range is counted from the end of the cache", node, advice="count positions from the first token")
    return Write(
        "copy_ into a slice", node, root, values, tuple(dims[d] for d in range(len(sizes(dest)))), root_dim,
        Position(offset=start), count, tuple(fixed.items()), first_rows=rows,
    )


def _token_range(node: fx.Node, dest: fx.Node, root: fx.Node, tokens: frozenset[int]) -> tuple[int, fx.Node]:
    """Return (the root's dim of tokens, the slice or select of it) of a written view; raises Miss where none is found."""
    cut = slices(dest, root)
    by_dim = {dim: ranged for ranged, dim in cut}
    if len(by_dim) < len(cut):
        raise Miss("the write goes to a range of a range of the cache", node, advice="write one range, cache[:, :, start:start + n]")
    found = [dim for dim in by_dim if dim in tokens] if tokens else list(by_dim)
    # A range of rows begins at the first row, so of two ranges the one that begins elsewhere is of tokens.
    found = found if len(found) < 2 else [dim for dim in found if begins(by_dim[dim]) != 0] or found
    entries = [(dim, item) for item, dim in selects(dest, root) if dim in tokens and op_name(item) == "select"]
    if not found and len(entries) == 1:
        return entries[0]
    found = found or (list(by_dim) if len(by_dim) == 1 else [])
    if len(found) == 1:
        return found[0], by_dim[found[0]]
    if not by_dim:
        raise Miss("the write goes to a view with no token ranges", node, advice=FORMS)
    ranges = " and ".join(f"{_range(ranged)} of dim {dim}" for dim, ranged in sorted(by_dim.items()))
    raise Miss(
        f"the write goes to {ranges} of the cache, and it is not clear which of them are tokens", node,
        advice=f"{FORMS}, for all rows or for the first ones: cache[:rows, :, start:start + n] = x",
    )


def _range(ranged: fx.Node) -> str:
    """Return a slice as text: ``[start:start + count]``."""
    start = begins(ranged)
    first = value_of(start) if isinstance(start, fx.Node) else start
    return f"[{first}:{first} + {value_of(ranged).shape[int(bind(ranged)['dim']) % len(sizes(ranged))]}]"


RECOGNISERS: dict[Kind, Callable[[fx.Node, fx.Node], Write]] = {
    Kind.WRITE_ROWS: index_copy, Kind.WRITE_PLACES: index_put, Kind.WRITE_WHOLE: view_copy, Kind.WRITE_SCATTER: scatter,
}
"""The recogniser of each kind of write, in place or out of place."""


def in_place(node: fx.Node, root: fx.Node, tokens: frozenset[int] = frozenset()) -> Write:
    """Return the write of an in-place node to ``root``; raises Miss for an unknown write.

    ``tokens``: the root's dims that the attention's tokens may run along, which a range alone does not show; empty where unknown.
    """
    name = op_name(node)
    if name not in IN_PLACE:
        raise Miss(
            f"the cache is written by {name}, which is no known cache write", node,
            advice=FORMS,
        )
    return view_copy(node, root, tokens) if KINDS[name] is Kind.WRITE_WHOLE else RECOGNISERS[KINDS[name]](node, root)


def concatenation(node: fx.Node) -> tuple[fx.Node | None, Write]:
    """Return (past, write) of ``torch.cat([past, new], dim)``: past is None where it is empty, the write's root is the concatenation.

    Raises Miss for more than two tensors, and for none with tokens.
    """
    arguments = bind(node)
    operands = list(arguments["tensors"])
    filled = [operand for operand in operands if 0 not in sizes(operand)]
    if len(operands) > 2 or not filled:
        raise learned(node) or Miss(
            f"torch.cat of {len(operands)} tensors is no cache append", node, advice="append with torch.cat([past, new], dim)",
        )
    rank = len(sizes(node))
    dim = int(arguments["dim"]) % rank
    past = filled[0] if len(filled) == 2 else None
    values = filled[-1]
    write = Write("cat", node, node, values, tuple(range(rank)), dim, Position(past=past), value_of(values).shape[dim])
    return past, write
