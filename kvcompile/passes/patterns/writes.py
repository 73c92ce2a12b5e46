"""How a cache is written: index_copy_, index_put_, copy_ into a view, concatenation. One recogniser each.

A recogniser answers a ``Write`` or raises ``Miss``; where the destination is itself a view of the cache
(``cache[0].index_copy_``, ``narrow().copy_()``) the pull-back of its coordinates says which dims of the
root it runs along.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import fx

from kvcompile.passes.pullback import trace
from kvcompile.passes.shapes import bind, is_tensor, op_name, operand, sizes, value_of
from kvcompile.passes.sites import Miss, Position, Write


def _along(dest: fx.Node, root: fx.Node) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """dest's dims -> root's dims, root dims fixed to one index, and root dims' constant offsets."""
    trail = trace(dest, lambda node: node is root)
    if trail.base is not root:
        raise Miss("the write goes through a view that cannot be followed to the cache tensor", dest)
    dims: dict[int, int] = {}
    fixed: dict[int, int] = {}
    offsets: dict[int, int] = {}
    shape = sizes(dest)
    for dim in range(trail.there.shape[1]):
        column = trail.there[:, dim]
        candidates = [d for d in range(len(shape)) if d not in dims and shape[d] > 1 and _shifted(column, trail.here[:, d])]
        if candidates:
            dims[candidates[0]] = dim
            offsets[dim] = int(column[0] - trail.here[0, candidates[0]])
        elif (column == column[0]).all():
            fixed[dim] = int(column[0])
        else:
            raise Miss("the write goes through a view that mixes the cache's dims", dest)
    # Dims of size one carry no samples to tell them apart: they follow in order.
    spare = [dim for dim in sorted(fixed) if sizes(root)[dim] == 1 or dim not in _selected(dest, root)]
    for d in range(len(shape)):
        if d not in dims and spare:
            dims[d] = spare.pop(0)
            offsets[dims[d]] = fixed.pop(dims[d])
    if len(dims) != len(shape):
        raise Miss("the write goes through a view that adds dims to the cache", dest)
    return dims, fixed, offsets


def _whole(dest: fx.Node, root: fx.Node, dims: dict[int, int], offsets: dict[int, int], token_dim: int, ranged: bool = False) -> None:
    """Raise Miss where ``dest`` is only part of the cache along a dim other than the tokens (``ranged``: it is, along the tokens)."""
    for d, dim in dims.items():
        whole = offsets.get(dim, 0) == 0 and (dim == token_dim or sizes(dest)[d] == sizes(root)[dim])
        if not whole and not (ranged and dim == token_dim):
            raise Miss(
                f"the write covers only part of the cache (dim {dim}: {sizes(dest)[d]} of {sizes(root)[dim]}, from {offsets.get(dim, 0)})",
                dest, advice="write the new tokens of all rows, heads and channels at once, at positions counted from the first token",
            )


def _shifted(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((a - b == a[0] - b[0]).all())


def _selected(dest: fx.Node, root: fx.Node) -> set[int]:
    """Root dims that a ``select`` or ``unbind`` between root and dest removed: they are never a dim of dest."""
    chain = []
    node = dest
    while node is not root:
        chain.append(node)
        parent = operand(node)
        node = operand(parent) if op_name(node) == "getitem" else parent
    alive = list(range(len(sizes(root))))
    removed = set()
    for node in reversed(chain):
        name = op_name(node)
        if name == "select":
            removed.add(alive.pop(int(bind(node)["dim"]) % len(alive)))
        elif name == "getitem" and op_name(node.args[0]) == "unbind":
            removed.add(alive.pop(int(bind(node.args[0])["dim"]) % len(alive)))  # type: ignore[arg-type]
        elif name in {"transpose", "swapaxes"}:
            arguments = bind(node)
            a, b = int(arguments["dim0"]) % len(alive), int(arguments["dim1"]) % len(alive)
            alive[a], alive[b] = alive[b], alive[a]
        elif name == "permute":
            alive = [alive[int(dim)] for dim in bind(node)["dims"]]
    return removed


def _plain(idiom: str, node: fx.Node, root: fx.Node, dest: fx.Node, dim: int, values: fx.Node, index: fx.Node) -> Write:
    dims, fixed, offsets = _along(dest, root)
    _whole(dest, root, dims, offsets, dims[dim])
    # A scalar index takes its dim away.
    single = not sizes(index)
    runs = tuple(dims[d] for d in range(len(sizes(dest))) if d != dim or not single)
    count = 1 if single else value_of(index).shape[0]
    return Write(idiom, node, root, values, runs, dims[dim], Position(index=index), count, tuple(fixed.items()))


def index_copy(node: fx.Node, root: fx.Node) -> Write:
    """``cache.index_copy_(dim, index, values)``."""
    arguments = bind(node)
    dest, dim = arguments["self"], int(arguments["dim"])
    if not sizes(arguments["index"]):
        raise Miss("the write's index has no dims", node)
    return _plain(
        "index_copy_", node, root, dest, dim % len(sizes(dest)), arguments["source"], arguments["index"]
    )


def index_put(node: fx.Node, root: fx.Node) -> Write:
    """``cache[:, :, pos] = values`` and ``cache[rows, :, pos] = values`` with per-row positions."""
    arguments = bind(node)
    if arguments.get("accumulate"):
        raise Miss("the write accumulates into the cache", node)
    dest, values = arguments["self"], arguments["values"]
    rank = len(sizes(dest))
    indices = [*arguments["indices"], *([None] * (rank - len(arguments["indices"])))]
    used = [dim for dim, index in enumerate(indices) if index is not None]
    if any(not is_tensor(indices[dim]) or value_of(indices[dim]).dtype.is_floating_point for dim in used):
        raise Miss("the write's indices are no integer tensors", node)
    if len(used) == 1 and len(sizes(indices[used[0]])) <= 1:
        return _plain("index_put_", node, root, dest, used[0], values, indices[used[0]])
    ranks = {len(sizes(indices[dim])) for dim in used}
    if len(used) == 2 and ranks in ({1}, {2}):
        row_dim, token_dim = used
        dims, fixed, offsets = _along(dest, root)
        _whole(dest, root, dims, offsets, dims[token_dim])
        adjacent = used[1] == used[0] + 1
        many = ranks == {2}
        if sizes(indices[token_dim])[0] != sizes(dest)[row_dim]:
            raise Miss("the write has not one position for every row", indices[token_dim])
        front = [row_dim, token_dim] if many else [row_dim]
        rest = [dim for dim in range(rank) if dim not in used]
        result = [*rest[: used[0]], *front, *rest[used[0] :]] if adjacent else [*front, *rest]
        if not is_row_index(indices[row_dim], sizes(dest)[row_dim]):
            raise Miss("the write's row index is not arange(batch)", indices[row_dim])
        return Write(
            "index_put_ by row", node, root, values, tuple(dims[dim] for dim in result), dims[token_dim],
            Position(index=indices[token_dim], rows=True), value_of(indices[token_dim]).shape[1] if many else 1, tuple(fixed.items()),
        )
    raise Miss("the write indexes the cache in a form that is not known", node)


def is_row_index(node: fx.Node, rows: int) -> bool:
    """Whether a node is ``arange(rows)`` with trailing dims of size one."""
    trail = trace(node, lambda base: op_name(base) == "arange")
    if op_name(trail.base) != "arange" or sizes(trail.base) != (rows,) or len(trail.base.args) > 1:
        return False
    return bool((trail.there[:, 0] == trail.here[:, 0]).all())


def view_copy(node: fx.Node, root: fx.Node) -> Write:
    """``cache[:, :, s:s + n] = values`` and ``cache.narrow(1, s, n).copy_(values)``."""
    arguments = bind(node)
    dest, values = arguments["self"], arguments["src"]
    dims, fixed, offsets = _along(dest, root)
    cut = _slices(dest, root)
    if len(cut) != 1:
        raise Miss("the write goes to a view with " + ("no" if not cut else "several") + " token ranges", node)
    ranged, root_dim = cut[0]
    count = value_of(ranged).shape[int(bind(ranged)["dim"]) % len(sizes(ranged))]
    start = bind(ranged).get("start") or 0
    if isinstance(start, int) and start < 0:
        raise Miss("the write's range is counted from the end of the cache", node)
    if root_dim in fixed:
        # One token written through ``select``.
        dims = dict(dims)
        fixed.pop(root_dim)
    _whole(dest, root, dims, offsets, root_dim, ranged=True)
    return Write(
        "copy_ into a slice", node, root, values, tuple(dims[d] for d in range(len(sizes(dest)))), root_dim,
        Position(offset=start), count, tuple(fixed.items()),
    )


def _slices(dest: fx.Node, root: fx.Node) -> list[tuple[fx.Node, int]]:
    """The slice nodes between root and dest that take part of a dim, with the root's dim each cuts."""
    found = []
    node = dest
    while node is not root:
        parent = operand(node)
        if op_name(node) in {"slice", "narrow"}:
            arguments = bind(node)
            dim = int(arguments["dim"]) % len(sizes(node))
            start = arguments.get("start") or 0
            whole = isinstance(start, int) and start == 0 and sizes(node)[dim] == sizes(parent)[dim]
            if not whole:
                dims, _, _ = _along(parent, root) if parent is not root else ({d: d for d in range(len(sizes(root)))}, {}, {})
                found.append((node, dims[dim]))
        node = operand(parent) if op_name(node) == "getitem" else parent
    return found


IN_PLACE: dict[str, Callable[[fx.Node, fx.Node], Write]] = {
    "index_copy_": index_copy,
    "index_put_": index_put,
    "_index_put_impl_": index_put,
    "copy_": view_copy,
}


def in_place(node: fx.Node, root: fx.Node) -> Write:
    """The write that an in-place node does on ``root``; raises Miss where it is none that is known."""
    name = op_name(node)
    if name not in IN_PLACE:
        raise Miss(
            f"the cache is written by {name}, which is no known cache write", node,
            advice="write new tokens with index_copy_, cache[:, :, pos] = x, narrow().copy_() or torch.cat",
        )
    return IN_PLACE[name](node, root)


def concatenation(node: fx.Node) -> tuple[fx.Node | None, Write]:
    """``torch.cat([past, new], dim)``: the past (None where it is empty) and the write; root is the cat itself."""
    arguments = bind(node)
    operands = list(arguments["tensors"])
    filled = [operand for operand in operands if 0 not in sizes(operand)]
    if len(operands) > 2 or not filled:
        raise Miss(f"torch.cat of {len(operands)} tensors is no cache append", node)
    rank = len(sizes(node))
    dim = int(arguments["dim"]) % rank
    past = filled[0] if len(filled) == 2 else None
    values = filled[-1]
    write = Write("cat", node, node, values, tuple(range(rank)), dim, Position(past=past), value_of(values).shape[dim])
    return past, write
