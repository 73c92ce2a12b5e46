"""Views that are written to: the part of the cache that a view covers, as dims of the cache, selected indices and ranges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import fx

from kvcompile.passes.graph.pullback import Coords, trace
from kvcompile.passes.graph.shapes import bind, op_name, operand, same, sizes, value_of
from kvcompile.passes.match.sites import FirstRows, Miss

PLAIN = "write through the cache tensor itself, or a select, narrow or transpose of it"


def along(dest: fx.Node, root: fx.Node) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Return a view's dims as the root's, the root dims fixed to one index, and the root dims' constant offsets."""
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
    # Dims of size one carry no samples to tell them apart: they follow in order.
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
    """The part of a tensor that a view of it covers: the view's dims -> the tensor's, and (first, count) of the tensor's dims."""

    dims: dict[int, int]
    bounds: dict[int, tuple[int, int]]

    def inside(self, coords: Coords) -> np.ndarray:
        """Return which elements of the tensor lie in the region."""
        found = np.ones(len(coords), dtype=bool)
        for dim, (first, count) in self.bounds.items():
            found &= (coords[:, dim] >= first) & (coords[:, dim] < first + count)
        return found

    def meets(self, coords: Coords) -> bool:
        """Whether the box around elements of the tensor has a part in the region, sampled or not."""
        low, high = coords.min(0), coords.max(0)
        return all(low[dim] < first + count and high[dim] >= first for dim, (first, count) in self.bounds.items())

    def source(self, coords: Coords, shape: tuple[int, ...]) -> Coords:
        """Return the elements of the written values, of ``shape`` broadcast to the view, for elements of the tensor."""
        dest = np.stack([coords[:, dim] - self.bounds[dim][0] for _, dim in sorted(self.dims.items())], axis=1)
        kept = dest[:, dest.shape[1] - len(shape) :].copy()
        kept[:, [dim for dim, size in enumerate(shape) if size == 1]] = 0
        return kept


def region(dest: fx.Node, root: fx.Node) -> ViewRegion:
    """Return the part of ``root`` that a view of it covers; raises Miss where that is no block."""
    dims, fixed, offsets = along(dest, root)
    bounds = {dim: (offsets[dim], sizes(dest)[d]) for d, dim in dims.items()}
    return ViewRegion(dims, {**bounds, **{dim: (index, 1) for dim, index in fixed.items()}})


def rows_of(
    dest: fx.Node, root: fx.Node, dims: dict[int, int], offsets: dict[int, int], token_dim: int, ranged: bool = False,
) -> FirstRows | None:
    """Return which entries of one dim of the cache ``dest`` begins with and ends at; None where it has all of every dim but the tokens'.

    ``ranged``: it is a part along the tokens. Raises Miss where it is part of several dims, or not the first entries of one.
    """
    found: FirstRows | None = None
    for d, dim in dims.items():
        # Equal in every call of this graph, not only in the one that it was traced for.
        written, held = value_of(dest).shape[d], value_of(root).shape[dim]
        first = offsets.get(dim, 0)
        if (first == 0 and (dim == token_dim or same(written, held))) or (ranged and dim == token_dim):
            continue
        if dim == token_dim or found is not None or first or not _from_first(dest, root, dim):
            raise partial(dest, dim, written, held, first)
        found = FirstRows(dim, written)
    return found


def partial(node: fx.Node, dim: int, written: object, held: object, first: object = 0) -> Miss:
    """Return the refusal of a write to ``written`` of ``held`` entries of a dim, from entry ``first`` on, that attention reads more of."""
    return Miss(
        f"the write covers only part of the cache (dim {dim}: {written} of {held}, from {first})",
        node, advice="write the new tokens of all rows, heads and channels at once, or of the first rows, which attention then reads alone "
        "(cache[:rows]), at positions counted from the first token",
    )


def _from_first(dest: fx.Node, root: fx.Node, dim: int) -> bool:
    """Whether every range between the cache and a view of it that cuts ``dim`` begins at its first entry, whatever the sizes are."""
    return all(begins(node) == 0 for node, cut in slices(dest, root) if cut == dim)


def begins(node: fx.Node) -> object:
    """Return where a range begins: an int, or the node that says so."""
    return bind(node).get("start") or 0


def _shifted(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((a - b == a[0] - b[0]).all())


def _selected(dest: fx.Node, root: fx.Node) -> set[int]:
    """Return the root dims that a ``select`` or ``unbind`` between root and dest removed: they are never a dim of dest."""
    return {dim for _, dim in selects(dest, root)}


def selects(dest: fx.Node, root: fx.Node) -> list[tuple[fx.Node, int]]:
    """Return the nodes between root and dest that take one entry of a dim (of ``unbind`` the item), with the root's dim each removes."""
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
    """Return the slice nodes between root and dest that take part of a dim, with the root's dim each cuts."""
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
