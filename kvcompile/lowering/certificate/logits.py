"""Logits of one step as a certificate needs them: masks and biases by kv head, and how far a logit is below the largest.

Axes beside the usual: Q = G * S queries of one kv head, N blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import _padded, visible

LOWEST = -1e4
"""Stands for the gap of blocks that hold no mass: exp of it is zero in float64."""

NEAR = 200.0
"""Logits further than this below the largest have no mass that a float32 number could show."""


@dataclasses.dataclass(frozen=True)
class LogitInputs:
    """How logits are made of queries [B, K, Q, D] and keys, mask and bias included."""

    query: torch.Tensor
    visible: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    softcap: float

    def products(self, keys_BKTD: torch.Tensor) -> torch.Tensor:
        """[B, K, Q, T], before a bias and whoever sees them."""
        scores = (self.query @ keys_BKTD.transpose(-1, -2)) * self.scale
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap > 0 else scores

    def logits(self, products: torch.Tensor) -> torch.Tensor:
        """With the bias; minus infinity where a token is not visible."""
        scores = products if self.bias is None else products + self.bias
        return scores.masked_fill(~self.visible, float("-inf"))


def total(terms: torch.Tensor) -> torch.Tensor:
    """The sum over blocks."""
    return terms.sum(-1, dtype=torch.float64)


def gaps(peak: torch.Tensor, top: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """How far each block's largest logit is below the head's, float64; never so far that exp of it is anything but zero."""
    apart = peak.to(torch.float64) - top.to(torch.float64).unsqueeze(-1)
    # clamp would keep a NaN, and so must this.
    return torch.where(live, torch.where(apart < LOWEST, LOWEST, apart), LOWEST)


def by_queries(x: torch.Tensor, heads: Sequence[int], queries: int) -> torch.Tensor:
    """[B, 1 or H, 1 or S, T] as [B, 1 or K, Q, T] for (K, G)."""
    K, G = heads
    x = x.expand(-1, -1, queries, -1)
    if x.shape[1] == 1:
        return x.unsqueeze(1).expand(-1, 1, G, -1, -1).flatten(2, 3)
    return x.unflatten(1, (K, G)).flatten(2, 3)


def visible_to_queries(
    operands: AttendOperands[torch.Tensor], heads: tuple[int, int], tokens: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return which tokens each query sees, bool [B, 1 or K, Q, T], and the bias that its logits get, float32 [B or 1, 1 or K, Q, T]."""
    q, bias, S = operands.q, operands.bias, operands.q.shape[2]
    mask = by_queries(visible(operands.hi, operands.lo, operands.keep, tokens), heads, S)
    extra = None
    if bias is not None and bias.dtype == torch.bool:
        mask = mask & by_queries(_padded(bias, tokens, False), heads, S)
    elif bias is not None:
        extra = by_queries(_padded(bias.to(torch.float32), tokens, float("-inf")), heads, S)
        mask = mask & ~torch.isneginf(extra)
    return mask.expand(q.shape[0], -1, -1, -1), extra
