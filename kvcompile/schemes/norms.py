"""Norms of tokens: schemes that divide a token by its norm before they quantize it store that norm, one number for each token."""

from __future__ import annotations

import torch

from kvcompile.schemes.symmetric import TINY, rounded_up


def half_root_mean_square(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return half the root mean square of each token's channels [..., S, D] in ``dtype``, [..., S, 1], rounded up.

    0 for zeros, NaN for NaN or Inf. Half of it fits float16 for every head dim and every float16 input; a float64 sum of squares gives the
    same number in any order.
    """
    size = x.to(torch.float64).square().mean(-1, keepdim=True).sqrt().mul(0.5).to(torch.float32)
    return torch.where(size == 0, 0.0, rounded_up(size, dtype).clamp(min=TINY[dtype])).to(dtype)
