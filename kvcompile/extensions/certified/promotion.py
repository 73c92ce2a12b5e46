"""Promotion: the choice of blocks that are read in full precision, made on the device without a branch and without the host.

All choices share one method, a budget over an order: blocks in descending order of mass (or of their term in a bound), each promoted as
long as it and all after it sum to more than the budget. The unpromoted blocks are the longest tail of that order within the budget.

Codes alone bound a block's share of the mass: exp(Delta_b) times its estimate, of a total in which every other block is lowered by its own
Delta. Rung 1 makes ``tau_cov`` hold of these shares (the paper inflates its estimates by exp(3 Delta) and doubles ``k_max`` instead), but
only if ``k_max`` times two to the ``widen`` blocks are enough: a head whose mass is spread over more gains nothing from some further
blocks. The local rule for values uses these shares too, so that an unpromoted value adds at most ``v_tol`` for any exact masses.
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
"""Tolerance of sums of shares."""

LARGEST_DELTA = 80.0
"""The deviation of a logit above which it bounds no share: its exp is close to float32's largest number."""

LEADING_BLOCKS, BEHIND = 4, -1e300
"""Up to this many leading blocks are found one by one; the amount of blocks without mass in that search, above that of blocks already
found."""


class BlockRanking(NamedTuple):
    """A stable descending order of blocks, [..., N]: the ``block`` at each rank, and each block's rank (``place``)."""

    block: torch.Tensor
    place: torch.Tensor

    def behind(self, amounts: torch.Tensor) -> torch.Tensor:
        """Return, for each rank, the sum of ``amounts`` over the blocks of that rank and later ones, [..., N]."""
        return amounts.gather(-1, self.block).flip(-1).cumsum(-1).flip(-1)


def descending(amounts: torch.Tensor) -> BlockRanking:
    """Return the ranking of blocks by descending amount; equal blocks keep their order."""
    block = torch.sort(amounts, dim=-1, descending=True, stable=True).indices
    return BlockRanking(block, torch.argsort(block, dim=-1, stable=True))


def above(order: BlockRanking, amounts: torch.Tensor, budget: torch.Tensor | float) -> torch.Tensor:
    """Return how many leading blocks of ``order`` to promote so that the ``amounts`` of all others sum to at most ``budget``, [..., 1]."""
    # ~(x <= y), so that NaN is promoted.
    return (~(order.behind(amounts) <= budget)).sum(-1, keepdim=True)


class Promoted(NamedTuple):
    """Flags of encoded blocks, bool [B, K, Q, N]: keys promoted, explored, values promoted by the local rule; and two results per row.

    ``widened`` [B, K, Q]: whether rung 1 added blocks; ``tail``: the estimated mass of the blocks that are not read.
    """

    keys: torch.Tensor
    explored: torch.Tensor
    values: torch.Tensor
    widened: torch.Tensor
    tail: torch.Tensor

    @property
    def read(self) -> torch.Tensor:
        """Flags of the blocks whose full-precision keys a step reads, promoted or explored; bool [B, K, Q, N]."""
        return self.keys | self.explored


class Estimates(NamedTuple):
    """Amounts by which blocks are promoted, float64 [B, K, Q, N], from int8 scores alone.

    ``share``: the estimated share of the mass; ``most``: an upper bound on the exact share; ``terms``: the block's term in the key bound.
    """

    share: torch.Tensor
    most: torch.Tensor
    terms: torch.Tensor


def promote_keys(
    coded: Masses, delta: Deviations, live: torch.Tensor, codes: torch.Tensor, notes: tuple[torch.Tensor, torch.Tensor],
    sinks: torch.Tensor | None, clock: torch.Tensor, policy: Certify, groups: int,
) -> Promoted:
    """Return the blocks to promote, chosen from int8 scores alone.

    ``codes``: visible encoded blocks; ``sinks``: a logit [B, K, Q] that takes mass.

    Blocks are promoted until the tail holds at most 1 - tau_cov of the estimated mass, at least k_min and at most k_max. Rung 1 promotes
    further ones, up to k_max * 2^widen, until the tail holds no more of the exact mass either, if that many are enough; and until the key
    bound fits its budget for any exact masses of the promoted blocks: theorem 2 with the least total over every block's deviation. So one
    widening has the effect of doubling until it fits, with no more blocks. ``notes``: nu and eta [B, K, 1 or Q, N]; ``groups``: query heads
    of a kv head, which share one selection with ``select="group"``.
    """
    nu, eta = notes
    share, most_share, terms = estimates(coded, delta, live, codes, nu, sinks)
    held = torch.where(codes, share, 0)
    # Blocks that are no candidates come after all that are.
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
    """Return for each block its share of the mass by int8 scores, an upper bound on its exact share, and its term of the key bound.

    The last two are zero for blocks that are not stored as codes. ``delta``: bounds on the deviation of logits; ``nu``: largest norms of
    values; ``sinks``: a logit that takes mass too.
    """
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
    """Return the indices of the ``count`` largest amounts, [..., count]; equal amounts in the order of their blocks, NaN first.

    Small counts take a few passes over the blocks instead of a sort.
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
    """Return flags of blocks with promoted values: those ``promoted`` by the local rule, and further ones to meet the value budget.

    ``terms``: each block's term of the value bound [B, K, Q, N], by the masses after keys were promoted. The largest remaining ones are
    promoted until the rest fits, so the budget holds for the reported bound; the paper promotes by an estimate.
    """
    rest = torch.where(promoted, 0, terms)
    order = descending(rest)
    return promoted | ((order.place < above(order, rest, policy.value_budget)) & (rest > 0))


def chance(clock: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a number in [0, 1) for each block of each head at this step, float64: a hash of its index and of ``clock`` int64 [1]."""
    bits = 0xFFFFFFFF
    x = clock.reshape([1] * like.dim()) * 0x27D4EB2F
    for axis, size in enumerate(like.shape):
        index = torch.arange(size, device=like.device).view([-1 if at == axis else 1 for at in range(like.dim())])
        x = ((x ^ (index + 1)) * 0x9E3779B1) & bits
        x = x ^ (x >> 15)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x046CA68B)):
        x = ((x ^ (x >> shift)) * factor) & bits
    return (x ^ (x >> 16)).to(torch.float64) / 2.0**32
