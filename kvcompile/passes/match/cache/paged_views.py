"""Views of a paged cache: slot numbers as a linear function of an index into a view of the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import fx

from kvcompile.passes.graph.pullback import Coords, sample, step
from kvcompile.passes.graph.shapes import is_tensor, sizes
from kvcompile.passes.match.sites import Axes, Miss

IN_ORDER = "gather from the pool itself, or from a view that flattens its blocks in order (pool.view(-1, K, D))"


@dataclass(frozen=True)
class Linearity:
    """The slot number of an element of a view: ``first`` plus ``weights`` times its coordinates."""

    weights: tuple[int, ...]
    first: int


def follow(node: fx.Node, coords: Coords, root: fx.Node) -> tuple[Coords, tuple[fx.Node, ...]] | None:
    """Return (coordinates in ``root``, nodes on the way) of elements of a view of it; None where values are computed on the way."""
    path = []
    while node is not root:
        moved = step(node, coords)
        if moved is None or not is_tensor(moved[0]):
            return None
        path.append(node)
        node, coords = moved
    return coords, tuple(path)


def place_of(coords: Coords, shape: tuple[int, ...], axes: Axes) -> np.ndarray:
    """Return the slot numbers of elements of a paged cache."""
    place = np.zeros(len(coords), dtype=np.int64)
    for dim in axes.token_dims:
        place = place * shape[dim] + coords[:, dim]
    return place


def linear(view: fx.Node, root: fx.Node, axes: Axes, otherwise: str) -> Linearity:
    """Return the slot numbers of a paged cache's view as a linear function; raises Miss (reason ``otherwise``) if they are not linear."""
    shape = sizes(view)
    units = np.concatenate([np.zeros((1, len(shape)), dtype=np.int64), np.diag([int(size > 1) for size in shape])])
    samples = sample(shape)
    answers = follow(view, np.concatenate([units, samples]), root)
    assert answers is not None
    places = place_of(answers[0], sizes(root), axes)
    first = int(places[0])
    weights = places[1 : len(units)] - first
    if not (places[len(units) :] == first + samples @ weights).all():
        raise Miss(otherwise, view, advice=IN_ORDER)
    return Linearity(tuple(int(weight) for weight in weights), first)
