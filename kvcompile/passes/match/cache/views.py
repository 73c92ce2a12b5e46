"""Written views of a cache: the part that a view covers, as dims, selected indices and ranges of the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import fx

from kvcompile.passes.graph.pullback import Coords, trace
from kvcompile.passes.graph.shapes import bind, op_name, operand, same, sizes, value_of
from kvcompile.passes.match.sites import FirstRows, Miss

PLAIN = "write through the cache tensor itself, or a select, narrow or transpose of it"


def along(dest: fx.Node, root: fx.Node) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Return {view dim: root dim}, {root dim: selected index} and {root dim: offset} of a view; raises Miss where it mixes or adds dims."""
    trail = trace(dest, lambda node: node is root)
    if trail.base is not root:
        raise Miss("the write goes through a view that cannot be followed to the cache tensor", dest, advice=PLAIN)
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
            raise Miss("the write goes through a view that mixes the cache's dims", dest, advice=PLAIN)
    # Samples cannot tell dims of size one apart: assign them in order.
    spare = [dim for dim in sorted(fixed) if sizes(root)[dim] == 1 or dim not in _selected(dest, root)]
    for d in range(len(shape)):
        if d not in dims and spare:
            dims[d] = spare.pop(0)
            offsets[dims[d]] = fixed.pop(dims[d])
    if len(dims) != len(shape):
        raise Miss("the write goes through a view that adds dims to the cache", dest, advice=PLAIN)
    return dims, fixed, offsets


@dataclass(frozen=True)
class ViewRegion:
    """The block of a tensor that a view covers: {view dim: tensor dim}, and {tensor dim: (first index, count)}."""

    dims: dict[int, int]
    bounds: dict[int, tuple[int, int]]

    def inside(self, coords: Coords) -> np.ndarray:
        """Return which elements of the tensor are in the region, bool [elements]."""
        found = np.ones(len(coords), dtype=bool)
        for dim, (first, count) in self.bounds.items():
            found &= (coords[:, dim] >= first) & (coords[:, dim] < first + count)
        return found

    def meets(self, coords: Coords) -> bool:
        """Return whether the box around elements of the tensor overlaps the region."""
        low, high = coords.min(0), coords.max(0)
        return all(low[dim] < first + count and high[dim] >= first for dim, (first, count) in self.bounds.items())

    def source(self, coords: Coords, shape: tuple[int, ...]) -> Coords:
        """Return, for elements of the tensor, their coordinates in the written values; these have ``shape`` and broadcast to the view."""
        dest = np.stack([coords[:, dim] - self.bounds[dim][0] for _, dim in sorted(self.dims.items())], axis=1)
        kept = dest[:, dest.shape[1] - len(shape) :].copy()
        kept[:, [dim for dim, size in enumerate(shape) if size == 1]] = 0
        return kept


def region(dest: fx.Node, root: fx.Node) -> ViewRegion:
    """Return the region of ``root`` that a view covers; raises Miss if the covered elements are not a block."""
    dims, fixed, offsets = along(dest, root)
    bounds = {dim: (offsets[dim], sizes(dest)[d]) for d, dim in dims.items()}
    return ViewRegion(dims, {**bounds, **{dim: (index, 1) for dim, index in fixed.items()}})


def rows_of(
    dest: fx.Node, root: fx.Node, dims: dict[int, int], offsets: dict[int, int], token_dim: int, ranged: bool = False,
) -> FirstRows | None:
    """Return the first entries of one dim to which a view of the cache is limited; None if it is limited in no dim but the tokens'.

    ``ranged``: the view is a range of tokens. Raises Miss if it is limited in several dims, or to entries other than the first.
    """
    found: FirstRows | None = None
    for d, dim in dims.items():
        # ``same``: equal in every call of this graph, not only in the traced one.
        written, held = value_of(dest).shape[d], value_of(root).shape[dim]
        first = offsets.get(dim, 0)
        if (first == 0 and (dim == token_dim or same(written, held))) or (ranged and dim == token_dim):
            continue
        if dim == token_dim or found is not None or first or not _from_first(dest, root, dim):
            raise partial(dest, dim, written, held, first)
        found = FirstRows(dim, written)
    return found


def partial(node: fx.Node, dim: int, written: object, held: object, first: object = 0) -> Miss:
    """Return the Miss of a write that covers only ``written`` of the ``held`` entries along dim ``dim``, beginning at entry ``first``."""
    return Miss(
        f"the write covers only part of the cache (dim {dim}: {written} of {held}, from {first})",
        node, advice="write the new tokens of all rows, heads and channels at once, or of the first rows, which attention then reads alone "
        "(cache[:rows]), at positions counted from the first token",
    )


def _from_first(dest: fx.Node, root: fx.Node, dim: int) -> bool:
    """Return whether every slice of ``dim`` between the cache and its view begins at 0, whatever the sizes are."""
    return all(begins(node) == 0 for node, cut in slices(dest, root) if cut == dim)


def begins(node: fx.Node) -> object:
    """Return the start of a slice: an int, or the node that computes it."""
    return bind(node).get("start") or 0


def _shifted(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((a - b == a[0] - b[0]).all())


def _selected(dest: fx.Node, root: fx.Node) -> set[int]:
    """Return the root's dims that a ``select`` or an ``unbind`` removes on the way to ``dest``."""
    return {dim for _, dim in selects(dest, root)}


def selects(dest: fx.Node, root: fx.Node) -> list[tuple[fx.Node, int]]:
    """Return (node, root dim) of every ``select``, and of every item of an ``unbind``, between root and dest."""
    chain = []
    node = dest
    while node is not root:
        chain.append(node)
        parent = operand(node)
        node = operand(parent) if op_name(node) == "getitem" else parent
    alive = list(range(len(sizes(root))))
    removed = []
    for node in reversed(chain):
        name = op_name(node)
        if name == "select":
            removed.append((node, alive.pop(int(bind(node)["dim"]) % len(alive))))
        elif name == "getitem" and op_name(node.args[0]) == "unbind":
            removed.append((node, alive.pop(int(bind(node.args[0])["dim"]) % len(alive))))  # type: ignore[arg-type]
        elif name in {"transpose", "swapaxes"}:
            arguments = bind(node)
            a, b = int(arguments["dim0"]) % len(alive), int(arguments["dim1"]) % len(alive)
            alive[a], alive[b] = alive[b], alive[a]
        elif name == "permute":
            alive = [alive[int(dim)] for dim in bind(node)["dims"]]
    return removed


def slices(dest: fx.Node, root: fx.Node) -> list[tuple[fx.Node, int]]:
    """Return (node, root dim) of every slice between root and dest that takes part of a dim."""
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
                dims, _, _ = along(parent, root) if parent is not root else ({d: d for d in range(len(sizes(root)))}, {}, {})
                found.append((node, dims[dim]))
        node = operand(parent) if op_name(node) == "getitem" else parent
    return found
