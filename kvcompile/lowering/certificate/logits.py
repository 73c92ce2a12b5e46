"""Logits of one step for a certificate: masks and biases by kv head, and each logit's distance from the largest.

Additional axes: Q = G * S queries of one kv head, N blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import _padded, visible

LOWEST = -1e4
"""Gap of blocks without mass: exp of it is zero in float64."""

NEAR = 200.0
"""Logits further than this below the largest have zero mass in float32."""


@dataclasses.dataclass(frozen=True)
class LogitInputs:
    """Inputs of logits besides the keys: queries [B, K, Q, D], mask, bias, scale and softcap."""

    query: torch.Tensor
    visible: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    softcap: float

    def products(self, keys_BKTD: torch.Tensor) -> torch.Tensor:
        """Return scaled, soft-capped scores [B, K, Q, T] for keys [B, K, T, D], before bias and mask."""
        scores = (self.query @ keys_BKTD.transpose(-1, -2)) * self.scale
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap > 0 else scores

    def logits(self, products: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, K, Q, T] from scores of ``products``: the bias is added, and invisible tokens become minus infinity."""
        scores = products if self.bias is None else products + self.bias
        return scores.masked_fill(~self.visible, float("-inf"))


def total(terms: torch.Tensor) -> torch.Tensor:
    """Return the sum over blocks, [..., N] -> float64 [...]."""
    return terms.sum(-1, dtype=torch.float64)


def gaps(peak: torch.Tensor, top: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Return each block's largest logit ``peak`` [..., N] less the head's ``top`` [...], float64 [..., N], at least LOWEST.

    LOWEST if the block is not ``live``; NaN of other blocks stays.
    """
    apart = peak.to(torch.float64) - top.to(torch.float64).unsqueeze(-1)
    # NaN stays NaN, as with clamp.
    return torch.where(live, torch.where(apart < LOWEST, LOWEST, apart), LOWEST)


def by_queries(x: torch.Tensor, heads: Sequence[int], queries: int) -> torch.Tensor:
    """Return x [B, 1 or H, 1 or S, T] grouped by kv head, [B, 1 or K, Q, T] with Q = G * S; ``heads``: (K, G), ``queries``: S."""
    K, G = heads
    x = x.expand(-1, -1, queries, -1)
    if x.shape[1] == 1:
        return x.unsqueeze(1).expand(-1, 1, G, -1, -1).flatten(2, 3)
    return x.unflatten(1, (K, G)).flatten(2, 3)


def visible_to_queries(
    operands: AttendOperands[torch.Tensor], heads: tuple[int, int], tokens: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (visible tokens of each query, bool [B, 1 or K, Q, T]; bias of its logits, float32 [B or 1, 1 or K, Q, T], or None).

    ``heads``: (K, G), kv heads and query heads per kv head; ``tokens``: T.
    """
    q, bias, S = operands.q, operands.bias, operands.q.shape[2]
    mask = by_queries(visible(operands.hi, operands.lo, operands.keep, tokens), heads, S)
    extra = None
    if bias is not None and bias.dtype == torch.bool:
        mask = mask & by_queries(_padded(bias, tokens, False), heads, S)
    elif bias is not None:
        extra = by_queries(_padded(bias.to(torch.float32), tokens, float("-inf")), heads, S)
        mask = mask & ~torch.isneginf(extra)
    return mask.expand(q.shape[0], -1, -1, -1), extra
