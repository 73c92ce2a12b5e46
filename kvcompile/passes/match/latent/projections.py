"""Projections of a latent: linear, or any product of two tensors, as a map of coordinates.

Coordinates of the result are followed to both operands, the data and the weight. The dim of each that is summed over gets random ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import fx

from kvcompile.passes.graph.pullback import Coords
from kvcompile.passes.graph.shapes import bind, op_name, sizes
from kvcompile.passes.match.attention.products import product
from kvcompile.passes.match.sites import Miss


@dataclass(frozen=True)
class ProjectionOperand:
    """One operand of a projection at coordinates of its result; ``summed``: its dim that is summed over."""

    node: fx.Node
    coords: Coords
    summed: int

    @property
    def inner(self) -> int:
        """The size of the summed dim."""
        return sizes(self.node)[self.summed]


def _biased(node: fx.Node) -> Miss:
    return Miss(
        "a bias is added between the cached latent and the keys or values made from it", node,
        advice="leave the bias of this projection out, or cache the keys and values themselves",
    )


def sides(node: fx.Node, coords: Coords) -> tuple[ProjectionOperand, ProjectionOperand] | None:
    """Return both operands of a projection at ``coords`` of its result, with random indices along the summed dim; None for other nodes.

    Raises Miss for a bias, or for a factor in the product itself.
    """
    if op_name(node) == "linear":
        arguments = bind(node)
        if arguments["bias"] is not None:
            raise _biased(node)
        weight = arguments["weight"]
        inner = _drawn(sizes(weight)[1], len(coords))
        made = np.concatenate([coords[:, :-1], inner[:, None]], axis=1)
        drawn = np.stack([coords[:, -1], inner], axis=1)
        return ProjectionOperand(arguments["input"], made, made.shape[1] - 1), ProjectionOperand(weight, drawn, 1)
    found = product(node)
    if found is None:
        return None
    left, right = found.operands()
    summed = [letter for letter in left[1] if letter and letter in right[1] and letter not in found.letters]
    alone = {letter for _, letters in (left, right) for letter in letters if letter} - {*found.letters, *summed}
    if len(summed) != 1 or alone:
        return None
    if found.bias is not None:
        raise _biased(node)
    if found.alpha != 1.0:
        raise Miss("a projection of the cached latent is multiplied by a number in the same call", node, advice="use matmul, then multiply")
    columns = {letter: coords[:, at] for at, letter in enumerate(found.letters)}
    columns |= {"": np.zeros(len(coords), dtype=np.int64), summed[0]: _drawn(sizes(left[0])[left[1].index(summed[0])], len(coords))}
    first, second = (
        ProjectionOperand(operand, np.stack([columns[letter] for letter in letters], axis=1), letters.index(summed[0]))
        for operand, letters in (left, right)
    )
    return first, second


def _drawn(size: int, count: int) -> np.ndarray:
    """Return ``count`` random indices below ``size``, which include the first and the last index."""
    return np.concatenate([[0, size - 1], np.random.default_rng(1).integers(0, size, count)])[:count]
