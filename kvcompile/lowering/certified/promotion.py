"""Which blocks use their originals: data on the device, chosen without a branch and without the host.

The common piece is a budget over an order: blocks in descending order of mass (or of what they may add), and every one is
promoted as long as it and what comes behind it are together more than the budget. What stays is then the longest
tail of that order that keeps it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcompile.lowering.certificate.bound_printer import aten
from kvcompile.lowering.certificate.head_bounds import LEAST_NORMAL
from kvcompile.lowering.certificate.logits import gaps, total
from kvcompile.lowering.certified.blocks import Deviations, Masses
from kvcompile.schemes.certificate import bounds
from kvcompile.schemes.certificate.policy import Certify

# Printed once, at import: Dynamo then sees plain functions.
_key_term = aten(bounds.KEY_TERM)
_least_term = aten(bounds.LEAST_TERM)

ALL = 2.0**-40
"""By how much sums of shares may be off."""

FEW, BEHIND = 4, -1e300
"""Up to so many leading blocks are found one by one; where those without mass stand, before the ones that are found already."""


class Order(NamedTuple):
    """Blocks in descending order of something: who stands at each place, and at which place each stands."""

    block: torch.Tensor
    place: torch.Tensor

    def behind(self, amounts: torch.Tensor) -> torch.Tensor:
        """At each place, the sum of the amounts from there on."""
        return amounts.gather(-1, self.block).flip(-1).cumsum(-1).flip(-1)


def descending(amounts: torch.Tensor) -> Order:
    """Equal ones in the order of their blocks."""
    block = torch.sort(amounts, dim=-1, descending=True, stable=True).indices
    return Order(block, torch.argsort(block, dim=-1, stable=True))


def above(order: Order, amounts: torch.Tensor, budget: torch.Tensor | float) -> torch.Tensor:
    """How many blocks must leave the tail so that the rest adds up to at most ``budget``, [..., 1]."""
    # ~(x <= y), so that what is NaN is promoted.
    return (~(order.behind(amounts) <= budget)).sum(-1, keepdim=True)


class Promoted(NamedTuple):
    """Blocks of codes whose keys come from the originals, bool [B, K, Q, N]; how many the coverage alone asked for; the tail's mass."""

    keys: torch.Tensor
    explored: torch.Tensor
    widened: torch.Tensor
    tail: torch.Tensor

    @property
    def read(self) -> torch.Tensor:
        """All blocks whose original keys are used."""
        return self.keys | self.explored


def promote_keys(
    coded: Masses, delta: Deviations, live: torch.Tensor, codes: torch.Tensor, nu: torch.Tensor, sinks: torch.Tensor | None,
    clock: torch.Tensor, policy: Certify,
) -> Promoted:
    """From int8 scores alone. ``codes``: visible blocks of codes; ``sinks``: a logit [B, K, Q] that takes mass.

    Blocks are promoted until the tail holds at most 1 - tau_cov of the estimated mass, at least k_min and at most k_max;
    then, up to k_max * 2^widen, until the key bound fits its budget whatever the promoted blocks' exact masses are: theorem 2
    with the least total over every block's deviation. So one widening does what doubling until it fits does, with no more blocks.
    """
    share, terms = wanted(coded, delta, live, codes, nu, sinks)
    held = torch.where(codes, share, 0)
    # Blocks that are no candidates stand behind all that are.
    order = descending(torch.where(codes, share, -1))
    # The shares of all blocks may add up to a little more than one.
    covered = above(order, held, 1 - policy.tau_cov + ALL) if policy.tau_cov < 1 else codes.sum(-1, keepdim=True)
    narrow = covered.clamp(policy.k_min, policy.k_max)
    wide = above(order, terms, policy.key_budget).clamp(max=policy.k_max << policy.widen)
    count = torch.maximum(narrow, wide)
    keys = (order.place < count) & codes
    explored = codes & ~keys & (chance(clock, codes) < policy.explore)
    return Promoted(keys, explored, (wide > narrow).squeeze(-1), total(torch.where(codes & ~keys & ~explored, share, 0)))


def wanted(
    coded: Masses, delta: Deviations, live: torch.Tensor, codes: torch.Tensor, nu: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two amounts that blocks are promoted for, float64 [B, K, Q, N]: estimated share of the mass, addition to the key bound."""
    peak = coded.peak.amax(-1)
    peak = peak if sinks is None else torch.maximum(peak, sinks)
    top = torch.where(torch.isneginf(peak), 0, peak)
    gap, weight = gaps(coded.peak, top, live), coded.weight.to(torch.float64)
    mass = weight * torch.exp(gap)
    everything = total(mass) + (0.0 if sinks is None else torch.exp(sinks.to(torch.float64) - top.to(torch.float64)))
    share = mass / everything.clamp(min=LEAST_NORMAL).unsqueeze(-1)
    block = dict(weight=weight, gap=gap, delta=torch.where(codes, delta.codes, delta.originals))
    least = total(_least_term(**block)).clamp(min=LEAST_NORMAL).unsqueeze(-1)
    terms = torch.where(codes, _key_term(nu=nu, center=nu.amax(-1, keepdim=True), **block), 0)
    return share, terms / least


def leading(amounts: torch.Tensor, count: int) -> torch.Tensor:
    """The blocks of the ``count`` largest amounts, [..., count]; equal ones in the order of their blocks, what is no number first.

    A few passes over the blocks where few are asked for, in place of a sort.
    """
    count = min(count, amounts.shape[-1])
    if count > FEW:
        return descending(amounts).block[..., :count]
    amounts = amounts.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=BEHIND)
    block = torch.arange(amounts.shape[-1], device=amounts.device)
    found = []
    for _ in range(count):
        first = torch.where(amounts == amounts.amax(-1, keepdim=True), block, amounts.shape[-1]).amin(-1, keepdim=True)
        found.append(first)
        amounts = torch.where(block == first, float("-inf"), amounts)
    return torch.cat(found, -1)


def promote_values(terms: torch.Tensor, policy: Certify) -> torch.Tensor:
    """Blocks whose values come from the originals, by each block's share of the value bound [B, K, Q, N].

    The local rule, then the largest of what is left until the rest fits the budget. The shares are those after keys were
    promoted, so the budget holds for the bound that is reported, where the source promotes by an estimate.
    """
    local = ~(terms <= policy.v_tol)
    rest = torch.where(local, 0, terms)
    order = descending(rest)
    return local | ((order.place < above(order, rest, policy.value_budget)) & (rest > 0))


def chance(clock: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1) for each block of each head at this step, float64: a hash of where it stands and of ``clock`` int64 [1]."""
    bits = 0xFFFFFFFF
    x = clock.reshape([1] * like.dim()) * 0x27D4EB2F
    for axis, size in enumerate(like.shape):
        index = torch.arange(size, device=like.device).view([-1 if at == axis else 1 for at in range(like.dim())])
        x = ((x ^ (index + 1)) * 0x9E3779B1) & bits
        x = x ^ (x >> 15)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x046CA68B)):
        x = ((x ^ (x >> shift)) * factor) & bits
    return (x ^ (x >> 16)).to(torch.float64) / 2.0**32
