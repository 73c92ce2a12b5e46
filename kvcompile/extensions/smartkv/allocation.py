"""Allocation: the levels of largest total utility that fit into a number of bytes (section 5.1).

A token begins at its least level (``ladder``). A step up is worth importance * (U(b') - U(b)) / (b' - b), which decreases along a token's
steps. Steps are taken in descending order of worth, each if it still fits, so an expensive step may be skipped and cheaper later ones
taken. Among equal steps the earlier one of the ladder comes first, then the one of the newer token. A token whose step was skipped stays
there.

The source's heap takes the steps in this order too. Here they are sorted once, and running sums find those that fit: after a step is
skipped no other of its cost can fit, so there are as many sums as distinct costs. Shapes are fixed and nothing waits for the device. On
CUDA a kernel finds the same levels by bisection (``MEANS``).

The source claims (1 - 1/e) of the best utility (7.4). Greedy choice by worth per byte alone has no such bound under a knapsack: that takes
partial enumeration, or the better of this and the best single step (Khuller et al. 1999, then 1/2 of (1 - 1/e)). The bound that holds here:
the loss against the optimum is at most the worth of the first skipped step, which is one token's; a test compares with the exact optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvcompile.extensions.smartkv.budget import Cost, KeyValueWidths
from kvcompile.extensions.smartkv.ladder import Ladder, LevelPreference
from kvcompile.schemes.adaptive import on_device


@dataclass(frozen=True)
class Terms:
    """The inputs of a decision that do not depend on tokens.

    They are the bytes of each level, the worth of each step to the next level per unit of importance, and the least importance that counts.
    """

    costs: tuple[int, ...]
    worths: tuple[float, ...]
    floor: float

    @staticmethod
    def of(cost: Cost, levels: Ladder, preference: LevelPreference) -> Terms:
        """Return the terms of a ladder: its levels' bytes and steps' worths, with the floor of ``preference``."""
        return Terms(levels.costs(cost), levels.worths, preference.floor)

    @property
    def steps(self) -> tuple[int, ...]:
        """The bytes that each step to the next level adds to a token."""
        return tuple(above - below for below, above in zip(self.costs, self.costs[1:], strict=False))


def allocate(
    importance_RT: torch.Tensor, spend_R: torch.Tensor, terms: Terms, low_RT: torch.Tensor, high_RT: torch.Tensor
) -> torch.Tensor:
    """Return the level of every token, int8 [R, T], between ``low`` and ``high`` int8, for at most ``spend`` bytes per row, int64 [R].

    Returns ``low`` for a row whose ``low`` levels exceed its bytes. Absent tokens have -1 in both bounds, and in the result.
    """
    means = MEANS.get(importance_RT.device.type, by_sorting)
    return means(worth_of(importance_RT, terms), spend_R, terms, low_RT, high_RT)


def worth_of(importance_RT: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Return each token's importance as the factor of its steps' worths, float32 [R, T]: finite, and at least the floor of ``terms``."""
    return importance_RT.to(torch.float32).nan_to_num(0.0, 0.0, 0.0).clamp(min=terms.floor)


def by_sorting(
    value_RT: torch.Tensor, spend_R: torch.Tensor, terms: Terms, low_RT: torch.Tensor, high_RT: torch.Tensor
) -> torch.Tensor:
    """Return the levels of ``allocate``, int8 [R, T], computed by torch operators on any device; this is the definition of ``allocate``.

    ``value_RT``: importance as ``worth_of`` returns it.
    """
    (rows, tokens), steps = value_RT.shape, len(terms.worths)
    device = value_RT.device
    left = (spend_R - spent(low_RT, terms)).unsqueeze(-1)
    if not steps or not tokens:
        return low_RT.clone()
    worths, prices = on_device(terms.worths, device, torch.float32), on_device(terms.steps, device)
    # Newest first, so that a stable sort leaves the newer of two equal tokens in front.
    value, low, high = (item.flip(-1) for item in (value_RT, low_RT, high_RT))
    order = torch.sort((value.unsqueeze(1) * worths.view(1, -1, 1)).flatten(1), dim=-1, descending=True, stable=True).indices
    number = torch.arange(steps, device=device).view(1, -1, 1)
    costs = prices.view(1, -1, 1).expand(rows, -1, tokens).flatten(1).gather(1, order)
    allowed = (number >= low.unsqueeze(1)) & (number < high.unsqueeze(1))
    places = torch.arange(order.shape[1], device=device)
    taken = torch.zeros_like(allowed).flatten(1)
    alive = allowed.flatten(1).gather(1, order)
    for _ in range(len(set(terms.steps))):
        over = alive & (torch.where(alive, costs, 0).cumsum(-1) > left)
        # If nothing is skipped, one index past the end.
        first = torch.where(over.any(-1, keepdim=True), over.to(torch.int8).argmax(-1, keepdim=True), len(places))
        now = alive & (places < first)
        taken |= torch.zeros_like(taken).scatter(1, order, now)
        left = left - torch.where(now, costs, 0).sum(-1, keepdim=True)
        limit = costs.gather(1, first.clamp(max=len(places) - 1))
        # A token stays below a step that is as dear as the one that did not fit.
        open_ = allowed & ~taken.view_as(allowed) & (prices.view(1, -1, 1) < limit.unsqueeze(1))
        climbs = (open_ | (number < low.unsqueeze(1)) | taken.view_as(allowed)).to(torch.int8).cummin(1).values.bool()
        alive = (open_ & climbs).flatten(1).gather(1, order) & (places > first)
    return (low + taken.view_as(allowed).sum(1).to(torch.int8)).flip(-1)


Means = Callable[[torch.Tensor, torch.Tensor, Terms, torch.Tensor, torch.Tensor], torch.Tensor]
MEANS: dict[str, Means] = {}
"""Implementations that return the result of ``by_sorting``, by device type; a package of kernels adds its own."""


def utility(importance_RT: torch.Tensor, level_RT: torch.Tensor, levels: Ladder, preference: LevelPreference) -> torch.Tensor:
    """Return the utility of each row's levels, float64 [R], which an allocation maximises: the sum of importance * U(level) over tokens.

    U of a level is the ``preference``-weighted sum of its key's and its value's bits, each to the power ``alpha``; 0 for absent tokens.
    """
    value = importance_RT.to(torch.float64).nan_to_num(0.0).clamp(min=preference.floor)
    worth = [
        preference.keys * k**preference.alpha + preference.values * v**preference.alpha for k,
        v in zip(levels.keys, levels.values, strict=True)
    ]
    return (value * looked_up([0.0, *worth], level_RT, torch.float64)).sum(-1)


def spent(level_RT: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Return the bytes of each row at the given levels, int64 [R]; a token of level -1 takes none."""
    return looked_up([0, *terms.costs], level_RT, torch.int64).sum(-1)


def looked_up(table: Sequence[float], level_RT: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return table[level + 1] for each token, [R, T]: the first entry is for level -1, an absent token."""
    return on_device(table, level_RT.device, dtype)[level_RT.to(torch.int64) + 1]


def spendable(budget: float, tokens: int, steps: int, cost: Cost, widths: KeyValueWidths) -> int:
    """Return the bytes that ``tokens`` tokens may take: the budget holds now and after ``steps`` more tokens of the largest widths."""
    entering = cost.token(widths.keys[-1], widths.values[-1])
    allowed = budget * cost.dense
    return int(min(allowed * tokens, allowed * (tokens + steps) - entering * steps) + 1e-6)


def binding_from(budget: float, protected: int, steps: int, cost: Cost, widths: KeyValueWidths) -> int | None:
    """Return the least number of tokens from which on ``budget`` can be met at every step; 0 if it always can, None if it never can.

    That is when the row fits just before an allocation, with the least widths for all tokens but the ``protected`` ones and those of the
    ``steps`` since the last allocation, which have the largest.
    """
    entering, least = cost.token(widths.keys[-1], widths.values[-1]), cost.token(widths.keys[0], widths.values[0])
    allowed = budget * cost.dense
    if allowed >= entering:
        return 0
    if allowed <= least:
        return None
    # protected * entering + (n - protected - steps) * least + steps * entering <= allowed * n, at the step before an allocation.
    wide = (protected + steps) * (entering - least)
    return math.ceil(wide / (allowed - least))
