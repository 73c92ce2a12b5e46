"""Gathers: operators that pick elements of a tensor by integer tensors, with one handler each in ``GATHERS``.

The values of index tensors are not known here. A handler returns the source's indexed dims, each with its index tensor and the elements of
it that sampled results use, and the coordinates along the other dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import fx

from kvcompile.passes.graph.effects import same_memory
from kvcompile.passes.graph.pullback import Coords, broadcast, step
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, sizes, value_of

INTEGERS = {torch.int64, torch.int32}


@dataclass(frozen=True)
class Index:
    """An indexed dim of a gather's source: the index tensor, and the elements of that tensor that sampled results use (``coords``)."""

    dim: int
    node: fx.Node
    coords: Coords
    wraps: bool
    """Whether a negative index counts from the end; elsewhere it is an error."""


@dataclass(frozen=True)
class Gathered:
    """A gather with the elements of its source that sampled results read: the source, its indices, and ``through``.

    ``through``: the coordinates along the source's dims that are not indexed.
    """

    node: fx.Node
    source: fx.Node
    indices: tuple[Index, ...]
    through: dict[int, np.ndarray]


@dataclass(frozen=True)
class Indexed:
    """Layout of the result of ``source[indices]``: its dims are dims of the source or of the broadcast index tensors.

    ``used``: the source's indexed dims. ``shape``: the shape of the broadcast index tensors, whose dims begin at dim ``first`` of the
    result. ``rest``: the source's dims that are not indexed.
    """

    used: tuple[int, ...]
    first: int
    shape: tuple[int, ...]
    rest: tuple[int, ...]
    """The source's other dims, in order."""

    @property
    def dims(self) -> tuple[int | None, ...]:
        """For every dim of the result, the source's dim that it is; None for a dim of the indices."""
        return (*self.rest[: self.first], *[None] * len(self.shape), *self.rest[self.first :])


def indexed(rank: int, indices: dict[int, fx.Node]) -> Indexed:
    """Return the layout that PyTorch gives ``source[..., index, ...]`` with index tensors at some of ``rank`` dims."""
    used = tuple(sorted(indices))
    adjacent = used == tuple(range(used[0], used[-1] + 1))
    shape = np.broadcast_shapes(*[sizes(indices[dim]) for dim in used])
    return Indexed(used, used[0] if adjacent else 0, tuple(shape), tuple(dim for dim in range(rank) if dim not in used))


def integer_indices(given: object, rank: int) -> dict[int, fx.Node] | None:
    """Return {dim: index tensor} of an advanced index; None where it has no index tensor, or one that is not of integers."""
    listed = list(given)  # type: ignore[call-overload]
    found = {dim: item for dim, item in enumerate(listed) if item is not None}
    fine = all(is_tensor(item) and value_of(item).dtype in INTEGERS for item in found.values())
    return found if found and fine and len(listed) <= rank else None


def counted(index: fx.Node, coords: Coords) -> np.ndarray | None:
    """Return the values at ``coords`` of an index that is 0, 1, 2, ... along one of its dims; None for any other tensor."""
    node = index
    while op_name(node) != "arange":
        moved = step(node, coords)
        if moved is None or not same_memory(moved[0], index):
            return None
        node, coords = moved
    return coords[:, 0] if len(node.args) == 1 else None


def _index(node: fx.Node, coords: Coords) -> Gathered | None:
    arguments = bind(node)
    source = arguments["self"]
    indices = integer_indices(arguments["indices"], len(sizes(source)))
    if indices is None:
        return None
    form = indexed(len(sizes(source)), indices)
    own = coords[:, form.first : form.first + len(form.shape)]
    through = {dim: coords[:, at] for at, dim in enumerate(form.dims) if dim is not None}
    found = []
    for dim, item in indices.items():
        index = Index(dim, item, broadcast(item, own), True)
        if (values := counted(item, index.coords)) is None:
            found.append(index)
        else:
            through[dim] = values
    return Gathered(node, source, tuple(found), through) if found else None


def _index_select(node: fx.Node, coords: Coords) -> Gathered | None:
    arguments = bind(node)
    source, dim, index = arguments["self"], int(arguments["dim"]), arguments["index"]
    dim %= len(sizes(source))
    taken = coords[:, [dim]] if sizes(index) else coords[:, :0]
    return Gathered(node, source, (Index(dim, index, taken, False),), {at: coords[:, at] for at in range(coords.shape[1]) if at != dim})


def _embedding(node: fx.Node, coords: Coords) -> Gathered | None:
    arguments = bind(node)
    source, index = arguments["weight"], arguments["indices"]
    return Gathered(node, source, (Index(0, index, coords[:, :-1], False),), {1: coords[:, -1]})


def _gather(node: fx.Node, coords: Coords) -> Gathered | None:
    arguments = bind(node)
    source, dim, index = arguments["self"], int(arguments["dim"]), arguments["index"]
    dim %= coords.shape[1]
    return Gathered(node, source, (Index(dim, index, coords, False),), {at: coords[:, at] for at in range(coords.shape[1]) if at != dim})


def _take_along_dim(node: fx.Node, coords: Coords) -> Gathered | None:
    arguments = bind(node)
    source, index, dim = arguments["self"], arguments["indices"], arguments["dim"]
    if dim is None or len(sizes(source)) != coords.shape[1]:
        return None
    dim = int(dim) % coords.shape[1]
    own = broadcast(source, coords)
    through = {at: own[:, at] for at in range(coords.shape[1]) if at != dim}
    return Gathered(node, source, (Index(dim, index, broadcast(index, coords), False),), through)


GATHERS: dict[str, Callable[[fx.Node, Coords], Gathered | None]] = {
    "index": _index, "_unsafe_index": _index, "index_select": _index_select, "embedding": _embedding, "gather": _gather,
    "take_along_dim": _take_along_dim,
}


def gathered(node: fx.Node, coords: Coords) -> Gathered | None:
    """Return the source elements that sampled results of a gather read; None if ``node`` is not a known gather."""
    handler = GATHERS.get(op_name(node))
    return handler(node, coords) if handler is not None else None
