"""Rotation of the channels that a store holds: by one orthogonal matrix, so that outliers of a channel spread over many.

With an orthogonal R, q . k = (q R) . (k R): keys enter a store as k R, queries meet them as q R, and scores are what they were. Values
enter as v R, and what attention makes of them is taken back by the transpose of R. Everything in between (codes, scales, exact tokens,
bounds) is rotated and need not know of it.

R is a block Hadamard matrix H, the same block of ``order`` channels along the head (Sylvester's: entry i, j is -1 where i & j has an odd
number of bits, over the root of the order). A plane of the store may add to it: R = H + plane, so that a plane of zeros is H itself.
Products are in float32 and rounded to the dtype of the tokens, once on the way in and once on the way back. NaN and Inf spread over their
block and stay what no number is: no entry is zero.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch

from kvcompile.errors import HeadDimNotDivisible

ORDERS = (16, 32, 64, 128)
"""Sizes that a block may have."""


class Rotate(enum.Enum):
    """The halves of a cache that are stored rotated: none, keys, or keys and values."""

    NONE = "none"
    K = "k"
    KV = "kv"


@dataclass(frozen=True)
class Rotation:
    """A rotation of channels: blocks of ``order`` of them, and the name of the plane [1, 1 or B, K, D, D] that adds to it, if any."""

    order: int
    plane: str | None = None


def order_of(head_dim: int, order: int, scheme: str) -> int:
    """The block's size for a head: ``order``, or where it is 0 the largest that divides it; raises HeadDimNotDivisible."""
    fitting = [size for size in ([order] if order else ORDERS) if head_dim % size == 0]
    if not fitting:
        raise HeadDimNotDivisible(scheme=scheme, what="the order of a rotation", head_dim=head_dim, by=order or ORDERS[0])
    return max(fitting)


def signs(order: int, device: torch.device | None = None) -> torch.Tensor:
    """Sylvester's Hadamard matrix of a power of two up to 256, float32 of 1 and -1; computed: a compiled graph holds no constant."""
    place = torch.arange(order, device=device)
    both = place[:, None] & place
    for shift in (4, 2, 1):
        both = both ^ (both >> shift)
    return 1.0 - 2.0 * (both & 1).to(torch.float32)


def rotation_matrix(head_dim: int, order: int, plane: torch.Tensor) -> torch.Tensor:
    """R of a store whose plane [..., D, D] adds to the Hadamard matrix."""
    place = torch.arange(head_dim, device=plane.device) // order
    inside = place[:, None] == place
    blocks = head_dim // order
    return torch.where(inside, signs(order, plane.device).repeat(blocks, blocks) * order**-0.5, 0.0) + plane


def rotate(x: torch.Tensor, order: int, plane: torch.Tensor | None) -> torch.Tensor:
    """Rotate the channels of x [B, heads, S, D] as a store's are, in x's dtype; ``plane`` [1 or B, K, D, D], K divides the heads.

    One token is a sum of products, which a compiler fuses with its neighbours; more are a matrix product.
    """
    return _rotated(x, order, plane, inverse=False)


def unrotate(x: torch.Tensor, order: int, plane: torch.Tensor | None) -> torch.Tensor:
    """Undo ``rotate``."""
    return _rotated(x, order, plane, inverse=True)


def _rotated(x: torch.Tensor, order: int, plane: torch.Tensor | None, inverse: bool) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if plane is None:
        blocks = wide.unflatten(-1, (x.shape[-1] // order, order))
        return (_product(blocks, signs(order, x.device).to(wide.dtype), x) * order**-0.5).flatten(-2).to(x.dtype)
    matrix = rotation_matrix(x.shape[-1], order, plane).to(wide.dtype)
    if inverse:
        matrix = matrix.transpose(-1, -2)
    grouped = wide.unflatten(1, (plane.shape[1], x.shape[1] // plane.shape[1]))
    return _product(grouped, matrix.unsqueeze(2), x).flatten(1, 2).to(x.dtype)


def _product(x: torch.Tensor, matrix: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    if isinstance(tokens.shape[2], int) and tokens.shape[2] == 1:
        return (x.unsqueeze(-1) * matrix).sum(-2) if matrix.dim() == 2 else (x.unsqueeze(-1) * matrix.unsqueeze(-3)).sum(-2)
    return x @ matrix


def rounding(order: int, head_dim: int) -> float:
    """How far the rotation of a vector may be from the exact one in a channel, by float32 alone, in norms of the vector.

    ``order`` products are added, and a plane of a rotation is orthogonal to as many units in the last place.
    """
    return max(order, head_dim) * 2.0**-23 * (1 + math.sqrt(head_dim))
