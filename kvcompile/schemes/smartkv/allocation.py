"""Allocation: the widths that are worth most of all that fit into a number of bytes (section 5.1).

A token begins at its least widths. A step widens its keys or its values to the next width; it is worth importance * (U(b') - U(b)) /
(b' - b) with U(b) = b^alpha, which falls along a token's steps. Steps are taken in the order of what they are worth, each where it still
fits, so a dearer one may be passed over and cheaper ones behind it taken. Equal ones: the shorter chain first, then the newer token.

The source's heap takes the same steps in the same order. Here they are sorted once, and what fits is found by running sums: after a step is
passed over none that costs as much can fit, so there are as many sums as there are costs. Shapes are fixed and nothing asks the device.

The source claims (1 - 1/e) of the best utility (7.4). Greedy by worth per byte alone has no such bound under a knapsack: that takes partial
enumeration, or the better of this and the best single step (Khuller et al. 1999, then 1/2 of (1 - 1/e)). What holds: what is lost against
the best is at most what the first step that was passed over is worth, which is one token's; a test compares with the exact optimum.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from kvcompile.schemes.adaptive import on_device
from kvcompile.schemes.smartkv.budget import Cost, Halves


@dataclass(frozen=True)
class Taste:
    """Weights of a step's worth: the exponent of U, the least importance, and how much keys and values matter (10.6)."""

    alpha: float = 0.5
    floor: float = 1e-6
    keys: float = 1.0
    values: float = 1.0


@dataclass(frozen=True)
class Widths:
    """Bits of keys and values, int8 [R, T] each, 0 where no token is, and the bytes of each row, int64 [R]."""

    keys: torch.Tensor
    values: torch.Tensor
    spent: torch.Tensor


@dataclass(frozen=True)
class _Step:
    """One widening: which half, from the how many-th width to the next one, its worth per unit of importance and its bytes."""

    half: int
    number: int
    worth: float
    cost: int


def _steps(cost: Cost, halves: Halves, taste: Taste) -> list[_Step]:
    """All widenings of a token, the earlier ones of each half first, equal ones of keys before values."""
    found = []
    for half, (widths, weight) in enumerate(zip(halves, (taste.keys, taste.values), strict=True)):
        worth = float("inf")
        for number, (b, wider) in enumerate(itertools.pairwise(widths)):
            # Never above the step before, whatever the rounding: a token's steps keep their order.
            worth = min(worth, weight * (wider**taste.alpha - b**taste.alpha) / (wider - b))
            found.append(_Step(half, number, worth, cost.half(wider) - cost.half(b)))
    return sorted(found, key=lambda step: (step.number, step.half))


def allocate(
    importance_RT: torch.Tensor, spend_R: torch.Tensor, cost: Cost, halves: Halves, taste: Taste | None = None, *,
    keep_RT: torch.Tensor | None = None, protected_RT: torch.Tensor | None = None, held: tuple[torch.Tensor, Widths] | None = None,
    most: Widths | None = None, order: torch.Tensor | None = None,
) -> Widths:
    """Return the widths of every token for at most ``spend`` bytes a row, int64 [R]; where the least widths take more, those.

    ``keep``: which tokens are there. ``protected``: which have the largest widths whatever that costs. ``held``: a mask [R, T] of tokens
    that stay as they are, and how they are. ``most``: the largest width that each token may have, protected or not. ``order``: what
    ``by_worth`` returned for the same importance, where several allocations share it.
    """
    taste = taste or Taste()
    shape, device = importance_RT.shape, importance_RT.device
    keep = torch.ones(shape, dtype=torch.bool, device=device) if keep_RT is None else keep_RT
    fixed = [torch.full(shape, widths[0], device=device) for widths in halves]
    free = keep.clone()
    if protected_RT is not None:
        fixed = [torch.where(protected_RT, widths[-1], item) for widths, item in zip(halves, fixed, strict=True)]
        free &= ~protected_RT
    limits = None if most is None else (most.keys, most.values)
    if limits is not None:
        fixed = [torch.minimum(item, limit.to(item.dtype)) for item, limit in zip(fixed, limits, strict=True)]
    if held is not None:
        stays = held[0] & free
        fixed = [torch.where(stays, item.to(first.dtype), first) for item, first in zip((held[1].keys, held[1].values), fixed, strict=True)]
        free &= ~stays
    fixed = [torch.where(keep, item, 0) for item in fixed]
    keys, values = fixed
    left = spend_R - spent(keys, values, cost)
    steps = _steps(cost, halves, taste)
    if steps and shape[-1]:
        allowed = free.unsqueeze(1).expand(-1, len(steps), -1)
        if limits is not None:
            within = [limits[step.half] >= tuple(halves)[step.half][step.number + 1] for step in steps]
            allowed = allowed & torch.stack(within, dim=1)
        if order is None:
            order = by_worth(importance_RT, cost, halves, taste, keep_RT)
        taken = _taken(order, allowed, left, steps)
        for half, widths in enumerate(halves):
            number = sum((taken[:, at] for at, step in enumerate(steps) if step.half == half), torch.zeros_like(taken[:, 0]))
            wider = on_device(widths, device)[number.clamp(max=len(widths) - 1)]
            fixed[half] = torch.where(free, wider, fixed[half])
    keys, values = fixed
    return Widths(keys.to(torch.int8), values.to(torch.int8), spent(keys, values, cost))


def by_worth(
    importance_RT: torch.Tensor, cost: Cost, halves: Halves, taste: Taste, keep_RT: torch.Tensor | None = None
) -> torch.Tensor:
    """The numbers of all widenings in falling order of their worth, int64 [R, steps * T]; of equals the newer token first."""
    steps = _steps(cost, halves, taste)
    kept = importance_RT if keep_RT is None else torch.where(keep_RT, importance_RT, 0.0)
    worth = on_device([step.worth for step in steps], kept.device, torch.float64)
    # Newest first, so that a stable sort leaves the newer of two equal tokens in front.
    value = kept.to(torch.float64).nan_to_num(0.0).clamp(min=taste.floor).flip(-1)
    scores = (value.unsqueeze(1) * worth.view(1, -1, 1)).flatten(1)
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices


def _taken(order: torch.Tensor, allowed_RnT: torch.Tensor, left_R: torch.Tensor, steps: list[_Step]) -> torch.Tensor:
    """Which of the ``allowed`` steps [R, steps, T] are taken, int64; ``order``: of all steps, newest tokens first."""
    rows, _, tokens = allowed_RnT.shape
    device = order.device
    bytes_ = on_device([step.cost for step in steps], device)
    costs = bytes_.view(1, -1, 1).expand(rows, -1, tokens).flatten(1).gather(1, order)
    alive = allowed_RnT.flip(-1).flatten(1).gather(1, order)
    places = torch.arange(costs.shape[1], device=device)
    left = left_R.unsqueeze(-1)
    chosen = torch.zeros_like(alive)
    for _ in range(len({step.cost for step in steps}) + 1):
        price = torch.where(alive, costs, 0)
        over = alive & (price.cumsum(-1) > left)
        # Where nothing is passed over, the place behind the last.
        first = torch.where(over.any(-1, keepdim=True), over.to(torch.int8).argmax(-1, keepdim=True), len(places))
        now = alive & (places < first)
        chosen |= now
        left = left - torch.where(now, costs, 0).sum(-1, keepdim=True)
        limit = costs.gather(1, first.clamp(max=len(places) - 1))
        alive = alive & (places > first) & (costs < limit)
    taken = torch.zeros_like(chosen).scatter(1, order, chosen)
    return taken.view(rows, len(steps), tokens).flip(-1).to(torch.int64)


def utility(importance_RT: torch.Tensor, widths: Widths, taste: Taste) -> torch.Tensor:
    """The sum of importance * U(b) over the keys and values of each row, float64 [R]: what an allocation makes as large as it can."""
    value = importance_RT.to(torch.float64).nan_to_num(0.0).clamp(min=taste.floor)
    keys, values = (item.to(torch.float64) ** taste.alpha for item in (widths.keys, widths.values))
    return (value * (taste.keys * keys + taste.values * values)).sum(-1)


def spent(keys_RT: torch.Tensor, values_RT: torch.Tensor, cost: Cost) -> torch.Tensor:
    """Bytes of each row at some widths, int64 [R]; a token of width 0 is none."""
    # A half's bytes are linear in its bits.
    slope = (cost.half(8) - cost.half(4)) // 4
    rest = cost.half(8) - 8 * slope
    there = (keys_RT > 0).to(torch.int64)
    bits = keys_RT.to(torch.int64) + values_RT.to(torch.int64)
    return (bits * slope + there * (2 * rest + cost.beside)).sum(-1)


def spendable(budget: float, tokens: int, steps: int, cost: Cost, halves: Halves) -> int:
    """Bytes that ``tokens`` tokens may take now, so that ``steps`` more, which enter at the largest widths, stay in the budget too."""
    entering = cost.token(halves.keys[-1], halves.values[-1])
    allowed = budget * cost.dense
    return int(min(allowed * tokens, allowed * (tokens + steps) - entering * steps) + 1e-6)


def binding_from(budget: float, protected: int, steps: int, cost: Cost, halves: Halves) -> int | None:
    """The number of tokens from which on a budget can be met; None where it never can.

    Fewer are exempt: ``protected`` tokens have the largest widths, and so have up to ``steps`` that came since the last allocation.
    """
    entering, least = cost.token(halves.keys[-1], halves.values[-1]), cost.token(halves.keys[0], halves.values[0])
    allowed = budget * cost.dense
    if allowed >= entering:
        return 0
    if allowed <= least:
        return None
    # protected * entering + (n - protected - steps) * least + steps * entering <= allowed * n, at the step before an allocation.
    wide = (protected + steps) * (entering - least)
    return math.ceil(wide / (allowed - least))
