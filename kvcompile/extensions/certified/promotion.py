"""Which blocks use their originals: data on the device, chosen without a branch and without the host.

The common piece is a budget over an order: blocks in descending order of mass (or of what they may add), and every one is
promoted as long as it and what comes behind it are together more than the budget. What stays is then the longest
tail of that order that keeps it.

Codes alone say what share of the mass a block has at most: exp(Delta_b) of its estimate, of a total that every other block has
lowered by as much. Rung 1 makes ``tau_cov`` hold of these shares (the source inflates its estimates by exp(3 Delta) and doubles ``k_max``
for it), but only where ``k_max`` times two to the ``widen`` is enough: a head that spreads its mass over more gains nothing from some
further blocks. The local rule for values takes them too, so that a value not promoted adds at most ``v_tol`` whatever exact masses are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcompile.extensions.certified.blocks import Deviations, Masses
from kvcompile.lowering.certificate.bound_printer import aten
from kvcompile.lowering.certificate.head_bounds import LEAST_NORMAL
from kvcompile.lowering.certificate.logits import gaps, total
from kvcompile.schemes.certificate import bounds
from kvcompile.schemes.certificate.policy import Certify, Select

# Printed once, at import: Dynamo then sees plain functions.
_key_term = aten(bounds.KEY_TERM)
_least_term = aten(bounds.LEAST_TERM)
_most_term = aten(bounds.MOST_TERM)

ALL = 2.0**-40
"""By how much sums of shares may be off."""

LARGEST_DELTA = 80.0
"""A deviation of a logit above which it bounds no share: exp of it is close to float32's largest number."""

LEADING_BLOCKS, BEHIND = 4, -1e300
"""Up to so many leading blocks are found one by one; where those without mass stand, before the ones that are found already."""


class BlockRanking(NamedTuple):
    """Blocks in descending order of something: who stands at each place, and at which place each stands."""

    block: torch.Tensor
    place: torch.Tensor

    def behind(self, amounts: torch.Tensor) -> torch.Tensor:
        """At each place, the sum of the amounts from there on."""
        return amounts.gather(-1, self.block).flip(-1).cumsum(-1).flip(-1)


def descending(amounts: torch.Tensor) -> BlockRanking:
    """Equal ones in the order of their blocks."""
    block = torch.sort(amounts, dim=-1, descending=True, stable=True).indices
    return BlockRanking(block, torch.argsort(block, dim=-1, stable=True))


def above(order: BlockRanking, amounts: torch.Tensor, budget: torch.Tensor | float) -> torch.Tensor:
    """How many blocks must leave the tail so that the rest adds up to at most ``budget``, [..., 1]."""
    # ~(x <= y), so that what is NaN is promoted.
    return (~(order.behind(amounts) <= budget)).sum(-1, keepdim=True)


class Promoted(NamedTuple):
    """Flags of blocks of codes, bool [B, K, Q, N]: whose keys come from the originals, which are explored, whose values the local rule
    promotes; whether rung 1 added any [B, K, Q]; the tail's mass.
    """

    keys: torch.Tensor
    explored: torch.Tensor
    values: torch.Tensor
    widened: torch.Tensor
    tail: torch.Tensor

    @property
    def read(self) -> torch.Tensor:
        """All blocks whose original keys are used."""
        return self.keys | self.explored


class Estimates(NamedTuple):
    """Amounts that blocks are promoted for, float64 [B, K, Q, N], from int8 scores alone.

    ``share``: of the mass, as estimated; ``most``: the largest that the exact share can be; ``terms``: what is added to the key bound.
    """

    share: torch.Tensor
    most: torch.Tensor
    terms: torch.Tensor


def promote_keys(
    coded: Masses, delta: Deviations, live: torch.Tensor, codes: torch.Tensor, notes: tuple[torch.Tensor, torch.Tensor],
    sinks: torch.Tensor | None, clock: torch.Tensor, policy: Certify, groups: int,
) -> Promoted:
    """From int8 scores alone. ``codes``: visible blocks of codes; ``sinks``: a logit [B, K, Q] that takes mass.

    Blocks are promoted until the tail holds at most 1 - tau_cov of the estimated mass, at least k_min and at most k_max. Up to
    k_max * 2^widen are then until it holds no more of the exact mass either, where that many are enough; and until
    the key bound fits its budget whatever the promoted blocks' exact masses are: theorem 2 with the least total over every block's
    deviation. So one widening does what doubling until it fits does, with no more blocks. ``notes``: nu and eta
    [B, K, 1 or Q, N]; ``groups``: query heads of a kv head, which share one selection with ``select="group"``.
    """
    nu, eta = notes
    share, most_share, terms = estimates(coded, delta, live, codes, nu, sinks)
    held = torch.where(codes, share, 0)
    # Blocks that are no candidates stand behind all that are.
    order, tail = descending(torch.where(codes, share, -1)), 1 - policy.tau_cov + ALL
    # The shares of all blocks may add up to a little more than one.
    covered = above(order, held, tail) if policy.tau_cov < 1 else codes.sum(-1, keepdim=True)
    narrow, most = covered.clamp(policy.k_min, policy.k_max), policy.k_max << policy.widen
    count = torch.maximum(narrow, above(order, terms, policy.key_budget).clamp(max=most))
    if policy.widens_coverage:
        sure = above(order, most_share, tail)
        count = torch.maximum(count, torch.where(sure <= most, sure, 0))
    keys = (order.place < count) & codes
    if policy.select is Select.GROUP:
        keys = keys.unflatten(2, (groups, -1)).any(2, keepdim=True).expand(-1, -1, groups, -1, -1).flatten(2, 3) & codes
    explored = codes & ~keys & (chance(clock, codes) < policy.explore)
    values = codes & ~explored & ~(most_share * eta <= policy.v_tol)
    left = total(torch.where(codes & ~keys & ~explored, share, 0))
    return Promoted(keys, explored, values, (count > narrow).squeeze(-1), left)


def estimates(
    coded: Masses, delta: Deviations, live: torch.Tensor, codes: torch.Tensor, nu: torch.Tensor, sinks: torch.Tensor | None
) -> Estimates:
    """From each block's mass by codes and how far its logits may be off; zero where there are no codes, but for shares."""
    peak = coded.peak.amax(-1)
    peak = peak if sinks is None else torch.maximum(peak, sinks)
    top = torch.where(torch.isneginf(peak), 0, peak)
    gap, weight = gaps(coded.peak, top, live), coded.weight.to(torch.float64)
    mass = weight * torch.exp(gap)
    sink = 0.0 if sinks is None else torch.exp(sinks.to(torch.float64) - top.to(torch.float64))
    share = mass / (total(mass) + sink).clamp(min=LEAST_NORMAL).unsqueeze(-1)
    block = dict(weight=weight, gap=gap, delta=torch.where(codes, delta.codes, delta.originals))
    least = (total(_least_term(**block)) + sink * (1 - 2.0**-20)).clamp(min=LEAST_NORMAL).unsqueeze(-1)
    most = torch.where(block["delta"] > LARGEST_DELTA, 1, (_most_term(**block) / least).clamp(max=1))
    terms = _key_term(nu=nu, center=nu.amax(-1, keepdim=True), **block) / least
    return Estimates(share, torch.where(codes, most, 0), torch.where(codes, terms, 0))


def leading(amounts: torch.Tensor, count: int) -> torch.Tensor:
    """The blocks of the ``count`` largest amounts, [..., count]; equal ones in the order of their blocks, what is no number first.

    A few passes over the blocks where few are asked for, in place of a sort.
    """
    count = min(count, amounts.shape[-1])
    if count > LEADING_BLOCKS:
        return descending(amounts).block[..., :count]
    amounts = amounts.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=BEHIND)
    block = torch.arange(amounts.shape[-1], device=amounts.device)
    found = []
    for _ in range(count):
        first = torch.where(amounts == amounts.amax(-1, keepdim=True), block, amounts.shape[-1]).amin(-1, keepdim=True)
        found.append(first)
        amounts = torch.where(block == first, float("-inf"), amounts)
    return torch.cat(found, -1)


def promote_further_values(terms: torch.Tensor, promoted: torch.Tensor, policy: Certify) -> torch.Tensor:
    """Blocks whose values come from the originals: those that the local rule ``promoted``, and others for the value budget.

    ``terms``: each block's share of the value bound [B, K, Q, N], by the masses after keys were promoted. The largest of what is left
    are promoted until the rest fits, so the budget holds for the bound that is reported, where the source promotes by an estimate.
    """
    rest = torch.where(promoted, 0, terms)
    order = descending(rest)
    return promoted | ((order.place < above(order, rest, policy.value_budget)) & (rest > 0))


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
