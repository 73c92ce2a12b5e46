"""Importance: what attention gives to each token, as one number a token (sections 3, 4 and 9.1).

Axes: R batch rows, H query heads, T tokens, L layers. ``keep`` [R, T] says which tokens are there: padding and slots that nobody wrote have
no importance and count in no mean.

What differs from the source, and why:

* Its head weights (4.2) are the mean of a softmax row over the tokens, 1 / T for every head: they weigh nothing. Here a head's measure
  is one that differs between heads (``Measure``); the mean stays as a choice, to show that.
* It adds 0.7 of a quantity of mean 1 to 0.3 of one of mean 1 / T. Both are brought to mean 1 first.
* "The last step that a token was seen at" is every step, as all are attended to. A token's age counts from the step of its birth.
* An average that begins at zero is small for a young token however much it is attended to. ``unbiased`` divides by what the weights of its
  steps add up to; the source does not, which is the default.
"""

from __future__ import annotations

import enum

import torch

EPSILON = 1e-12
"""Added to means that are divided by: nothing is there yet, or nothing was attended to."""

LEAST_IMPORTANCE = 1e-30
"""The least importance of a token that some query may see."""


class Measure(enum.Enum):
    """Measure of a head that tells looking at something from looking at everything."""

    PEAK = "peak"
    ENTROPY = "entropy"
    OFF_SINKS = "off-sinks"
    MEAN = "mean"


def head_measure(weights_RHT: torch.Tensor, measure: Measure, keep_RT: torch.Tensor | None = None, sinks: int = 4) -> torch.Tensor:
    """Return a number for each head, float32 [R, H], from rows of a softmax: larger where it tells tokens apart more.

    ``PEAK``: the largest weight. ``ENTROPY``: 1 less the entropy over that of equal weights. ``OFF_SINKS``: the weight of all but the first
    ``sinks`` tokens that are there. ``MEAN``: the source's, the same for all heads.
    """
    weights = weights_RHT.to(torch.float32)
    keep = torch.ones_like(weights[:, 0], dtype=torch.bool) if keep_RT is None else keep_RT
    weights = torch.where(keep.unsqueeze(1), weights, 0.0)
    count = keep.sum(-1, keepdim=True).clamp(min=1)
    if measure is Measure.PEAK:
        return weights.amax(-1)
    if measure is Measure.MEAN:
        return weights.sum(-1) / count
    if measure is Measure.OFF_SINKS:
        behind = keep.cumsum(-1) > sinks
        return torch.where(behind.unsqueeze(1), weights, 0.0).sum(-1)
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    return 1 - entropy / torch.log(count.clamp(min=2).to(torch.float32))


def averaged(before: torch.Tensor, now: torch.Tensor, decay: float) -> torch.Tensor:
    """One step of the moving average of any shape (3.2, 4.2): decay * before + (1 - decay) * now."""
    return decay * before + (1 - decay) * now


def unbiased(average: torch.Tensor, steps: torch.Tensor, decay: float) -> torch.Tensor:
    """A moving average that began at zero, divided by the sum of the weights of its ``steps`` steps."""
    return average / (1 - decay ** steps.clamp(min=1).to(torch.float32))


def token_mass(weights_RHT: torch.Tensor, of_heads_RH: torch.Tensor | None = None) -> torch.Tensor:
    """The mean over heads of what each token gets, [R, T] (3.1), with ``of_heads`` each head times its weight (4.2).

    A head whose softmax is not finite gives nothing: an average would keep a NaN for ever.
    """
    weights = weights_RHT.to(torch.float32).nan_to_num(0.0, 0.0, 0.0)
    return weights.mean(1) if of_heads_RH is None else (weights * of_heads_RH.unsqueeze(-1)).mean(1)


def head_weights(measures_RH: torch.Tensor) -> torch.Tensor:
    """Measures of heads, averaged over steps and layers, as weights of mean 1 (4.2)."""
    return measures_RH / (measures_RH.mean(-1, keepdim=True) + EPSILON)


def of_mean_one(importance_RT: torch.Tensor, keep_RT: torch.Tensor | None = None) -> torch.Tensor:
    """Importance divided by its mean over the tokens that are there (3.3); zero where none is."""
    if keep_RT is None:
        return importance_RT / (importance_RT.mean(-1, keepdim=True) + EPSILON)
    importance = torch.where(keep_RT, importance_RT, 0.0)
    mean = importance.sum(-1, keepdim=True) / keep_RT.sum(-1, keepdim=True).clamp(min=1)
    return importance / (mean + EPSILON)


def across_layers(importance_LRT: torch.Tensor, keep_RT: torch.Tensor | None = None) -> torch.Tensor:
    """The mean over layers, of mean 1, [R, T] (3.3)."""
    return of_mean_one(importance_LRT.to(torch.float32).mean(0), keep_RT)


def weighted_by_recency(importance_RT: torch.Tensor, age_RT: torch.Tensor, temperature: float) -> torch.Tensor:
    """Importance times exp(-age / temperature); ages in steps since a token's birth (4.1)."""
    return importance_RT * torch.exp(-age_RT.to(torch.float32) / temperature)


def blended(plain_RT: torch.Tensor, weighted_RT: torch.Tensor, share: float = 0.3, keep_RT: torch.Tensor | None = None) -> torch.Tensor:
    """(1 - share) of the plain and ``share`` of the head-weighted importance, both of mean 1 (4.2)."""
    return (1 - share) * of_mean_one(plain_RT, keep_RT) + share * of_mean_one(weighted_RT, keep_RT)
