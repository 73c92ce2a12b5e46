"""Rotation of channels: a store may hold tokens times an orthogonal matrix, so that a channel's outliers spread over many channels.

With an orthogonal R, q . k = (q R) . (k R): keys are stored as k R and queries multiplied by R, so scores stay equal. Values are stored as
v R, and attention's result is multiplied by the transpose of R. Codes, scales, exact tokens and bounds all refer to rotated tokens.

R is a block Hadamard matrix H, with the same block of ``order`` channels repeated along the head (Sylvester's: entry i, j is negative if i
& j has an odd number of bits, all divided by the root of the order). A plane of the store may add to it: R = H + plane, so a plane of zeros
gives H.

Products are in float32 and rounded to the dtype of the tokens, once when stored and once when rotated back. NaN and Inf spread over their
block and never become finite, since no entry of a block is zero.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch

from kvcompile.errors import HeadDimNotDivisible

ORDERS = (16, 32, 64, 128)
"""Channels that a block may have."""


class Rotate(enum.Enum):
    """The slots that are stored rotated: none, keys, or keys and values."""

    NONE = "none"
    K = "k"
    KV = "kv"


@dataclass(frozen=True)
class Rotation:
    """A rotation in blocks of ``order`` channels; ``plane``: name of the plane [1, 1 or B, K, D, D] that is added to it, or None."""

    order: int
    plane: str | None = None


def order_of(head_dim: int, order: int, scheme: str) -> int:
    """Return ``order``, or if 0 the largest of ``ORDERS`` that divides the head dim. Raises HeadDimNotDivisible if none does."""
    fitting = [size for size in ([order] if order else ORDERS) if head_dim % size == 0]
    if not fitting:
        raise HeadDimNotDivisible(scheme=scheme, what="the order of a rotation", head_dim=head_dim, by=order or ORDERS[0])
    return max(fitting)


def signs(order: int, device: torch.device | None = None) -> torch.Tensor:
    """Return Sylvester's Hadamard matrix [order, order], float32, not normalised: entries 1 and -1. ``order``: a power of two up to 256.

    Computed rather than stored, so that a compiled graph has no constant.
    """
    place = torch.arange(order, device=device)
    both = place[:, None] & place
    for shift in (4, 2, 1):
        both = both ^ (both >> shift)
    return 1.0 - 2.0 * (both & 1).to(torch.float32)


def rotation_matrix(head_dim: int, order: int, plane: torch.Tensor) -> torch.Tensor:
    """Return the matrix R of a rotation, [..., D, D]: normalised Hadamard blocks of ``order`` channels, plus a store's ``plane``."""
    place = torch.arange(head_dim, device=plane.device) // order
    inside = place[:, None] == place
    blocks = head_dim // order
    return torch.where(inside, signs(order, plane.device).repeat(blocks, blocks) * order**-0.5, 0.0) + plane


def rotate(x: torch.Tensor, order: int, plane: torch.Tensor | None) -> torch.Tensor:
    """Return x R for x [B, heads, S, D], in x's dtype; R is the rotation of the channels (see the module).

    ``order``: channels of a Hadamard block. ``plane``: [1 or B, K, D, D], added to the Hadamard matrix of each kv head, where K divides the
    heads; None: the Hadamard matrix alone.

    For one token the product is computed as a sum of elementwise products, which a compiler fuses with its neighbours; for more tokens as a
    matrix product.
    """
    return _rotated(x, order, plane, inverse=False)


def unrotate(x: torch.Tensor, order: int, plane: torch.Tensor | None) -> torch.Tensor:
    """Return x [B, heads, S, D] with the rotation undone that ``rotate`` applies for the same arguments."""
    return _rotated(x, order, plane, inverse=True)


def _rotated(x: torch.Tensor, order: int, plane: torch.Tensor | None, inverse: bool) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if plane is None:
        blocks = torch.unflatten(wide, -1, (x.shape[-1] // order, order))
        factor: float = order**-0.5
        return (_product(blocks, signs(order, x.device).to(wide.dtype), x) * factor).flatten(-2).to(x.dtype)
    matrix = rotation_matrix(x.shape[-1], order, plane).to(wide.dtype)
    if inverse:
        matrix = matrix.transpose(-1, -2)
    grouped = torch.unflatten(wide, 1, (plane.shape[1], x.shape[1] // plane.shape[1]))
    return _product(grouped, matrix.unsqueeze(2), x).flatten(1, 2).to(x.dtype)


def _product(x: torch.Tensor, matrix: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    if isinstance(tokens.shape[2], int) and tokens.shape[2] == 1:
        return (x.unsqueeze(-1) * matrix).sum(-2) if matrix.dim() == 2 else (x.unsqueeze(-1) * matrix.unsqueeze(-3)).sum(-2)
    return x @ matrix


def rounding(order: int, head_dim: int) -> float:
    """Return a bound on the float32 error of one channel of a rotated vector, as a multiple of the vector's norm.

    ``order`` products are added, and a rotation's plane is orthogonal up to as many units in the last place.
    """
    return max(order, head_dim) * 2.0**-23 * (1 + math.sqrt(head_dim))
