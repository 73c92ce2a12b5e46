"""Importance: the attention that each token received, as one number per token (sections 3, 4 and 9.1).

Axes: R batch rows, H query heads, T tokens, L layers. ``keep`` [R, T] marks present tokens: padding and unwritten slots have no importance
and do not count in any mean.

Differences from the paper, and their reasons:

* The paper's head weights (4.2) are the mean of a softmax row over the tokens, 1 / T for every head, and so weigh nothing. Here a head's
  measure differs between heads (``Measure``); the mean stays as an option, to show that.
* The paper adds 0.7 of a quantity of mean 1 to 0.3 of one of mean 1 / T. Here both are scaled to mean 1 first.
* "The last step that a token was seen at" is every step, since all tokens are attended to. Here a token's age counts from its first step.
* A moving average that begins at zero is small for a young token, however much attention it receives. ``unbiased`` divides by the sum of
  its steps' weights; the default, as in the paper, does not.
"""

from __future__ import annotations

import enum

import torch

EPSILON = 1e-12
"""Added to divisors that may be zero: no tokens yet, or no attention received."""

LEAST_IMPORTANCE = 1e-30
"""The least importance of a token that is visible to some query."""


class Measure(enum.Enum):
    """The formula that reduces one head's softmax weights to a number for how much it distinguishes tokens; see ``head_measure``."""

    PEAK = "peak"
    ENTROPY = "entropy"
    OFF_SINKS = "off-sinks"
    MEAN = "mean"


def head_measure(weights_RHT: torch.Tensor, measure: Measure, keep_RT: torch.Tensor | None = None, sinks: int = 4) -> torch.Tensor:
    """Return each head's measure, float32 [R, H], from softmax weights [R, H, T].

    ``PEAK``: the largest weight. ``ENTROPY``: 1 minus the entropy relative to that of equal weights. Both are larger for heads that
    distinguish tokens more. ``OFF_SINKS``: the total weight of all present tokens but the first ``sinks``. ``MEAN``: the paper's measure,
    equal for all heads. ``keep`` None: all tokens are present.
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
    """Return the moving average after one more step, decay * before + (1 - decay) * now, for any shape (sections 3.2 and 4.2)."""
    return decay * before + (1 - decay) * now


def unbiased(average: torch.Tensor, steps: torch.Tensor, decay: float) -> torch.Tensor:
    """Return ``average``, a moving average that began at zero, without its bias towards zero: divided by 1 - decay ** steps.

    ``steps``: the number of steps so far; 0 counts as 1, so that an average without steps stays 0.
    """
    return average / (1 - decay ** steps.clamp(min=1).to(torch.float32))


def token_mass(weights_RHT: torch.Tensor, of_heads_RH: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean over heads of each token's attention weight, [R, T] (section 3.1).

    ``of_heads``: float [R, H], weights of the heads (section 4.2), None for equal weights. NaN and Inf count as zero: a moving average
    would keep a NaN forever.
    """
    weights = weights_RHT.to(torch.float32).nan_to_num(0.0, 0.0, 0.0)
    return weights.mean(1) if of_heads_RH is None else (weights * of_heads_RH.unsqueeze(-1)).mean(1)


def head_weights(measures_RH: torch.Tensor) -> torch.Tensor:
    """Return each head's measure [R, H] divided by the mean over heads: weights of mean 1 (section 4.2).

    ``measures``: measures of heads, averaged over steps and layers.
    """
    return measures_RH / (measures_RH.mean(-1, keepdim=True) + EPSILON)


def of_mean_one(importance_RT: torch.Tensor, keep_RT: torch.Tensor | None = None) -> torch.Tensor:
    """Return importance [R, T] divided by its mean over the present tokens (section 3.3); zeros for a row without present tokens.

    ``keep`` None: all tokens are present.
    """
    if keep_RT is None:
        return importance_RT / (importance_RT.mean(-1, keepdim=True) + EPSILON)
    importance = torch.where(keep_RT, importance_RT, 0.0)
    mean = importance.sum(-1, keepdim=True) / keep_RT.sum(-1, keepdim=True).clamp(min=1)
    return importance / (mean + EPSILON)


def across_layers(importance_LRT: torch.Tensor, keep_RT: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean of importance [L, R, T] over layers, divided by its mean over present tokens, [R, T] (section 3.3)."""
    return of_mean_one(importance_LRT.to(torch.float32).mean(0), keep_RT)


def weighted_by_recency(importance_RT: torch.Tensor, age_RT: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return importance [R, T] times exp(-age / temperature); ``age``: steps since each token's first step (section 4.1)."""
    return importance_RT * torch.exp(-age_RT.to(torch.float32) / temperature)


def blended(plain_RT: torch.Tensor, weighted_RT: torch.Tensor, share: float = 0.3, keep_RT: torch.Tensor | None = None) -> torch.Tensor:
    """Return (1 - share) * plain + share * weighted, [R, T], after both importances are divided by their means (section 4.2)."""
    return (1 - share) * of_mean_one(plain_RT, keep_RT) + share * of_mean_one(weighted_RT, keep_RT)
