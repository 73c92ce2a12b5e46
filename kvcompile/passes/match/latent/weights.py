"""Weights of projections: the matrix of each head, from the weight's coordinates as linear forms of head and channel."""

from __future__ import annotations

import numpy as np

from kvcompile.passes.graph.shapes import sizes
from kvcompile.passes.match.latent.projections import ProjectionOperand
from kvcompile.passes.match.sites import Miss, Projection, WeightDim


def projection(weight: ProjectionOperand, heads: int, head: np.ndarray, channel: np.ndarray, inner: int, count: int) -> Projection:
    """Return the projection that a weight holds, from sampled elements of it with their ``head`` and ``channel``.

    ``heads``, ``count``: the numbers of heads and of channels; heads that share a matrix count as one. Raises Miss where the weight has no
    separate matrix for each head.
    """
    for kept in (n for n in range(1, heads + 1) if heads % n == 0):
        forms = [
            WeightDim(summed=True) if dim == weight.summed else _form(weight.coords[:, dim], head // (heads // kept), channel)
            for dim in range(weight.coords.shape[1])
        ]
        known = tuple(form for form in forms if form is not None)
        if len(known) == len(forms) and _one_block(known, sizes(weight.node), kept, count):
            return Projection(weight.node, known, kept, count, inner)
    raise Miss(
        "keys or values are made from the cache by a weight that is no matrix of its own for each head", weight.node,
        advice="make the channels of a head from neighboring rows of a weight that is the same for all tokens and rows",
    )


def _one_block(forms: tuple[WeightDim, ...], shape: tuple[int, ...], heads: int, channels: int) -> bool:
    """Return whether heads and channels run along one dim of the weight each, or along one dim together, without gaps."""
    by_head = [form for form in forms if form.head]
    by_channel = [form for form in forms if form.channel]
    if len(by_head) != (heads > 1) or len(by_channel) != (channels > 1):
        return False
    for form, size in zip(forms, shape, strict=True):
        low, high = sorted((form.head, form.channel))
        if low < 0 or (high and not low and high != 1) or (low and (low != 1 or size % high)):
            return False
        if low and form.start % high + (channels if form.head > form.channel else heads) > high:
            return False
    return True


def _form(column: np.ndarray, head: np.ndarray, channel: np.ndarray) -> WeightDim | None:
    """Return coordinates ``column`` as a * head + b * channel + c; None if they are not linear."""
    rows = np.stack([head, channel, np.ones_like(head)], axis=1).astype(float)
    found, *_ = np.linalg.lstsq(rows, column.astype(float), rcond=None)
    a, b, c = (round(float(value)) for value in found)
    return WeightDim(a, b, c) if (a * head + b * channel + c == column).all() else None
