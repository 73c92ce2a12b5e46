"""Projection of thresholds back into order after a step: the nearest point of the feasible set (the paper's Appendix F.2)."""

from __future__ import annotations

import torch


def isotonic(y: torch.Tensor) -> torch.Tensor:
    """Return the nearest nondecreasing sequence along the last axis, in the shape and dtype of ``y``.

    Its elements are x_k = max over i <= k of min over j >= k of mean(y_i .. y_j), summed in float64.
    """
    count = y.shape[-1]
    sums = torch.cat([torch.zeros_like(y[..., :1]), y.to(torch.float64).cumsum(-1).to(torch.float64)], -1)
    i, j = torch.arange(count, device=y.device)[:, None], torch.arange(count, device=y.device)[None, :]
    means = (sums[..., 1:].unsqueeze(-2) - sums[..., :-1].unsqueeze(-1)) / (j - i + 1).clamp(min=1)
    far = torch.where(j >= i, means, float("inf"))
    # least[i, k] = min over j >= k of mean(i .. j), for i <= k only.
    least = far.flip(-1).cummin(-1).values.flip(-1)
    return torch.where(j >= i, least, float("-inf")).amax(-2).to(y.dtype)


def ordered(thresholds: torch.Tensor, top: float, margin: float) -> torch.Tensor:
    """Return the nearest thresholds in [0, top] at least ``margin`` apart, along the last axis; feasible ones stay bit for bit."""
    count = thresholds.shape[-1]
    steps = torch.arange(count, device=thresholds.device, dtype=thresholds.dtype) * margin
    inside = (thresholds[..., 0] >= 0) & (thresholds[..., -1] <= top) & (thresholds.diff(dim=-1) >= margin).all(-1)
    moved = isotonic(thresholds - steps).clamp(0.0, top - (count - 1) * margin) + steps
    return torch.where(inside.unsqueeze(-1), thresholds, moved)
