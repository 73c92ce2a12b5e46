"""Pull coordinates back through views: which element of the cache does an operand's element come from?

Spellings of a view are endless (transpose, expand + reshape, repeat_interleave, narrow, unbind...), and
all mean a map from the operand's coordinates to the base tensor's. So nothing here
matches spellings: sampled coordinates are mapped through each operator, and the operand's layout is
read off the mapped coordinates (``axes_of``). A new spelling is a name in a row of ``operators``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from kvcompile.passes.graph.casts import holds
from kvcompile.passes.graph.constants import constant
from kvcompile.passes.graph.operators import COPIES, IN_PLACE, JOINS, KINDS, SPLITS, Kind
from kvcompile.passes.graph.shapes import bind, hint, is_tensor, op_name, operand, sizes, value_of

Coords = np.ndarray
"""int64 [samples, dims]: each row is the index of one element of a tensor."""

Step = tuple[fx.Node, Coords]


def sample(shape: tuple[int, ...], count: int = 384) -> Coords:
    """Return sample coordinates inside ``shape``: up to 512 corners of small index pools, then ``count`` random ones (fixed seed)."""
    rng = np.random.default_rng(0)
    pools = [sorted({0, min(1, size - 1), size // 2, size - 1}) for size in shape]
    corners = list(itertools.islice(itertools.product(*pools), 512))
    random = np.stack([rng.integers(0, max(size, 1), count) for size in shape], axis=1)
    return np.concatenate([np.array(corners, dtype=np.int64).reshape(-1, len(shape)), random])


def _ravel(coords: Coords, shape: tuple[int, ...]) -> np.ndarray:
    flat = np.zeros(len(coords), dtype=np.int64)
    for dim, size in enumerate(shape):
        flat = flat * size + coords[:, dim]
    return flat


def _unravel(flat: np.ndarray, shape: tuple[int, ...]) -> Coords:
    columns = []
    for size in reversed(shape):
        columns.append(flat % size)
        flat = flat // size
    return np.stack(columns[::-1], axis=1) if columns else np.zeros((len(flat), 0), dtype=np.int64)


def _dim(arguments: dict[str, Any], rank: int, key: str = "dim") -> int:
    return int(arguments[key]) % rank


def _reshape(node: fx.Node, coords: Coords) -> Step:
    source = operand(node)
    return source, _unravel(_ravel(coords, sizes(node)), sizes(source))


def _transpose(node: fx.Node, coords: Coords) -> Step:
    arguments, rank = bind(node), coords.shape[1]
    a, b = int(arguments["dim0"]) % rank, int(arguments["dim1"]) % rank
    moved = coords.copy()
    moved[:, [a, b]] = coords[:, [b, a]]
    return operand(node), moved


def _swap_last_two(node: fx.Node, coords: Coords) -> Step:
    moved = coords.copy()
    if coords.shape[1] > 1:
        moved[:, [-2, -1]] = coords[:, [-1, -2]]
    return operand(node), moved


def _reverse(node: fx.Node, coords: Coords) -> Step:
    return operand(node), coords[:, ::-1].copy()


def _permute(node: fx.Node, coords: Coords) -> Step:
    dims = [int(dim) % coords.shape[1] for dim in bind(node)["dims"]]
    moved = np.empty_like(coords)
    moved[:, dims] = coords
    return operand(node), moved


def broadcast(source: fx.Node, coords: Coords) -> Coords:
    """Return the coordinates in ``source`` of elements ``coords`` of a tensor that ``source`` is broadcast to."""
    shape = sizes(source)
    kept = coords[:, coords.shape[1] - len(shape) :].copy()
    kept[:, [dim for dim, size in enumerate(shape) if size == 1]] = 0
    return kept


def _expand(node: fx.Node, coords: Coords) -> Step:
    source = operand(node)
    return source, broadcast(source, coords)


def _unsqueeze(node: fx.Node, coords: Coords) -> Step:
    return operand(node), np.delete(coords, _dim(bind(node), coords.shape[1]), axis=1)


def _slice(node: fx.Node, coords: Coords) -> Step:
    arguments = bind(node)
    dim = _dim(arguments, coords.shape[1])
    size = sizes(operand(node))[dim]
    start = hint(arguments.get("start") or 0)
    start = max(start + size, 0) if start < 0 else min(start, size)
    moved = coords.copy()
    moved[:, dim] = start + coords[:, dim] * int(arguments.get("step") or 1)
    return operand(node), moved


def _select(node: fx.Node, coords: Coords) -> Step:
    arguments, source = bind(node), operand(node)
    rank = coords.shape[1] + 1
    dim, index = _dim(arguments, rank), hint(arguments["index"])
    return source, np.insert(coords, dim, index % sizes(source)[dim], axis=1)


def _repeat_interleave(node: fx.Node, coords: Coords) -> Step | None:
    arguments = bind(node)
    if arguments.get("dim") is None or isinstance(arguments.get("repeats"), fx.Node):
        return None
    moved = coords.copy()
    dim = _dim(arguments, coords.shape[1])
    moved[:, dim] //= hint(arguments["repeats"])
    return operand(node), moved


def _repeat(node: fx.Node, coords: Coords) -> Step:
    shape = sizes(operand(node))
    return operand(node), coords[:, coords.shape[1] - len(shape) :] % np.array(shape, dtype=np.int64)


def _getitem(node: fx.Node, coords: Coords) -> Step | None:
    parent, index = operand(node), hint(node.args[1])
    name = op_name(parent)
    if name not in SPLITS:
        return None
    source = operand(parent)
    arguments = bind(parent)
    rank = len(sizes(source))
    dim = _dim(arguments, rank)
    if name == "unbind":
        return source, np.insert(coords, dim, index % sizes(source)[dim], axis=1)
    parts = [hint(part.shape[dim]) for part in parent.meta["val"]]
    moved = coords.copy()
    moved[:, dim] += sum(parts[:index])
    return source, moved


def _written(node: fx.Node, coords: Coords) -> Step:
    """Return (the tensor that an in-place write wrote to, ``coords``): the write's result is that tensor."""
    return operand(node), coords


def join_parts(node: fx.Node, coords: Coords) -> Iterator[tuple[fx.Node, np.ndarray, Coords]]:
    """Yield (operand, indices of the samples that come from it, their coordinates in it) for cat and stack."""
    operands = list(node.args[0])  # type: ignore[arg-type]
    dim = _dim(bind(node), coords.shape[1])
    if op_name(node) == "stack":
        for index, part in enumerate(operands):
            here = np.flatnonzero(coords[:, dim] == index)
            if len(here):
                yield part, here, np.delete(coords[here], dim, axis=1)
        return
    start = 0
    for part in operands:
        size = sizes(part)[dim] if len(sizes(part)) == coords.shape[1] else 0
        here = np.flatnonzero((coords[:, dim] >= start) & (coords[:, dim] < start + size))
        if len(here):
            moved = coords[here].copy()
            moved[:, dim] -= start
            yield part, here, moved
        start += size


def _joined(node: fx.Node, coords: Coords) -> Step | None:
    """Return (operand of a cat or stack, coordinates there) if every sample comes from that operand; else None."""
    parts = list(join_parts(node, coords))
    return (parts[0][0], parts[0][2]) if len(parts) == 1 else None


def _movedim(node: fx.Node, coords: Coords) -> Step | None:
    arguments, rank = bind(node), coords.shape[1]
    source, destination = arguments["source"], arguments["destination"]
    origin = [int(dim) % rank for dim in (source if isinstance(source, (list, tuple)) else [source])]
    target = [int(dim) % rank for dim in (destination if isinstance(destination, (list, tuple)) else [destination])]
    rest = iter(dim for dim in range(rank) if dim not in origin)
    order = [origin[target.index(dim)] if dim in target else next(rest) for dim in range(rank)]
    moved = np.empty_like(coords)
    moved[:, order] = coords
    return operand(node), moved


MAPS: dict[Kind, Callable[[fx.Node, Coords], Step | None]] = {
    Kind.RESHAPE: _reshape, Kind.UNSQUEEZE: _unsqueeze, Kind.SWAP: _transpose, Kind.SWAP_LAST: _swap_last_two, Kind.REVERSE: _reverse,
    Kind.PERMUTE: _permute, Kind.MOVE: _movedim, Kind.BROADCAST: _expand, Kind.SLICE: _slice, Kind.SELECT: _select,
    Kind.REPEAT: _repeat, Kind.INTERLEAVE: _repeat_interleave,
}
"""The coordinate map of each kind of view."""

PULLBACKS: dict[str, Callable[[fx.Node, Coords], Step | None]] = {
    **{name: MAPS[kind] for name, kind in KINDS.items() if kind in MAPS}, **dict.fromkeys(IN_PLACE, _written), "getitem": _getitem,
}


def _scaled(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return (tensor, factor) of a product or quotient of a tensor and a plain number; None for other nodes."""
    name = op_name(node)
    if name not in {"mul", "div"} or bind(node).get("rounding_mode") is not None:
        return None
    left, right = node.args[:2]
    if is_tensor(left) and (number := constant(right)) is not None and number:
        return left, number if name == "mul" else 1 / number
    if name == "mul" and is_tensor(right) and (number := constant(left)) is not None:
        return right, number
    return None


def factor(path: Iterable[fx.Node]) -> float:
    """Return the product of all numbers by which the nodes of a trail (``path``) multiply."""
    total = 1.0
    for node in path:
        scaled = _scaled(node)
        total *= scaled[1] if scaled is not None else 1.0
    return total


def _kept(node: fx.Node) -> bool:
    """Return whether a copy keeps its operand's values; between floating-point dtypes up to rounding, which validation compares."""
    source, target = value_of(operand(node)).dtype, value_of(node).dtype
    return holds(source, target) or (source.is_floating_point and target.is_floating_point)


def step(node: fx.Node, coords: Coords, through_joins: bool = False, scales: bool = False) -> Step | None:
    """Return (operand, coordinates there) for coordinates ``coords`` of the result of ``node``; None if the node computes new values.

    ``through_joins``: also through cat and stack. ``scales``: also through products with a plain number.
    """
    name = op_name(node)
    if name in COPIES:
        keeps = name != "dropout" or not (node.args[1] and node.args[2])
        return (operand(node), coords) if keeps and is_tensor(node.args[0]) and _kept(node) else None
    if scales and (scaled := _scaled(node)) is not None and sizes(scaled[0]) == sizes(node):
        return scaled[0], coords
    if name in JOINS:
        return _joined(node, coords) if through_joins else None
    handler = PULLBACKS.get(name)
    return handler(node, coords) if handler is not None else None


@dataclass(frozen=True)
class Trail:
    """An operand traced to its base: the sampled coordinates in the base (``there``) and the operand (``here``), and the nodes passed."""

    base: fx.Node
    there: Coords
    here: Coords
    path: tuple[fx.Node, ...]


def trace(node: fx.Node, stop: Callable[[fx.Node], bool], scales: bool = False) -> Trail:
    """Return the trail from ``node`` upstream through views, to the first node where ``stop`` holds or new values are computed.

    ``scales``: also through products with a plain number.
    """
    here = sample(sizes(node))
    coords, path = here, []
    while not stop(node):
        moved = step(node, coords, scales=scales)
        if moved is None:
            break
        path.append(node)
        node, coords = moved
    return Trail(node, coords, here, tuple(path))
