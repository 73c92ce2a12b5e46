"""Hysteresis: a token's width may change only after its rank has moved and stayed away for some allocations (SmartKV, section 5.1).

A token's rank is the share of tokens that are less important. A token is free to change after ``checks`` consecutive allocations at which
its rank was at least ``moved`` away from the rank of its last decision. In the paper a token is free only under that rule, so the first
allocation never happens: even a token that is the most important one throughout stays at the least width. Here a token without a decision
is free as well, and all tokens are free if keeping the widths of those that are not exceeds the budget or costs more than a set share of
the reachable utility. Otherwise new tokens would take all bytes that a growing cache may spend, whatever their importance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvcompile.extensions.smartkv.allocation import Terms, allocate, spent, utility
from kvcompile.extensions.smartkv.clock import percentiles
from kvcompile.extensions.smartkv.ladder import Ladder, LevelPreference

MOST_AWAY = 6
"""The largest count of consecutive checks away that is stored; a larger one frees no further token."""


@dataclass(frozen=True)
class Decided:
    """Each token's rank when its width was last decided, float32 [R, T], NaN if never (``rank``).

    ``away``: int8 [R, T], the number of latest consecutive checks at which the token's rank was ``Hysteresis.moved`` or more away from that
    rank, at most MOST_AWAY.
    """

    rank: torch.Tensor
    away: torch.Tensor

    @staticmethod
    def nothing(rows: int, tokens: int, device: torch.device | None = None) -> Decided:
        """Return the state of tokens without any decision."""
        rank = torch.full((rows, tokens), float("nan"), device=device)
        return Decided(rank, torch.zeros(rows, tokens, dtype=torch.int8, device=device))

    def grown(self, tokens: int) -> Decided:
        """Return the state of ``tokens`` tokens: this one with undecided tokens appended."""
        more = Decided.nothing(self.rank.shape[0], tokens - self.rank.shape[1], self.rank.device)
        return Decided(torch.cat([self.rank, more.rank], dim=1), torch.cat([self.away, more.away], dim=1))

    def checked(self, ranks_RT: torch.Tensor, moved: float) -> Decided:
        """Return the state after one more check.

        ``away`` is raised by one if the rank differs from the decided one by ``moved`` or more, and set to 0 otherwise.
        """
        away = (ranks_RT - self.rank).abs() >= moved
        return replace(self, away=torch.where(away, self.away.clamp(max=MOST_AWAY - 1) + 1, 0).to(torch.int8))

    def free(self, checks: int) -> torch.Tensor:
        """Return whether each token may change its width, bool [R, T]: ``away`` has reached ``checks``, or no width was decided yet."""
        return self.rank.isnan() | (self.away >= checks)


@dataclass(frozen=True)
class Hysteresis:
    """Limits of the hysteresis.

    They are the least change of rank, the number of consecutive checks that it must last, and the share of utility that it may cost.
    """

    moved: float = 0.05
    checks: int = 2
    costs: float = 0.02


@dataclass(frozen=True)
class LevelBounds:
    """The lowest and highest level that each token may have, int8 [R, T]; both are -1 for absent tokens."""

    low: torch.Tensor
    high: torch.Tensor


def decide(
    importance_RT: torch.Tensor, spend_R: torch.Tensor, terms: Terms, levels: Ladder, preference: LevelPreference, before_RT: torch.Tensor,
    decided: Decided, bounds: LevelBounds, hysteresis: Hysteresis,
) -> tuple[torch.Tensor, Decided]:
    """Return the new levels, int8 [R, T], and the updated state of decisions.

    ``before`` and ``decided``: levels and state that the last call returned, grown by the tokens that came since. A row is allocated
    without hysteresis if keeping the levels of tokens that are not free exceeds its bytes ``spend``, or loses more than
    ``hysteresis.costs`` of the utility.
    """
    there = bounds.high >= 0
    ranks = percentiles(importance_RT, there)
    decided = decided.checked(ranks, hysteresis.moved)
    free = decided.free(hysteresis.checks)
    stays = (~free & there & (bounds.low < bounds.high)).to(torch.bool)
    kept = torch.minimum(torch.maximum(before_RT, bounds.low), bounds.high)
    low, high = torch.where(stays, kept, bounds.low), torch.where(stays, kept, bounds.high)
    # Held and free allocations in one batch: a single launch on CUDA.
    both = allocate(
        torch.cat([importance_RT, importance_RT]), torch.cat([spend_R, spend_R]), terms, torch.cat([low, bounds.low]),
        torch.cat([high, bounds.high]),
    )
    held, whole = both.chunk(2)
    bytes_held, bytes_whole = spent(both, terms).chunk(2)
    # A budget that no allocation meets is no reason to free the tokens: then the free allocation is not smaller.
    unmet = (bytes_held > spend_R) & (bytes_whole < bytes_held)
    of_whole, of_held = (utility(importance_RT, each, levels, preference) for each in (whole, held))
    anew = (unmet | (of_whole - of_held > hysteresis.costs * of_whole)).unsqueeze(-1)
    refreshed = free | anew
    rank = torch.where(there, torch.where(refreshed, ranks, decided.rank), float("nan"))
    return torch.where(anew, whole, held), Decided(rank, torch.where(refreshed, 0, decided.away).to(torch.int8))
