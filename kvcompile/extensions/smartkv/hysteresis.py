"""Hysteresis: a token's width is decided anew only where its rank has moved, and stayed moved (section 5.1).

A token's rank is the share of tokens that are less important. It is free where its rank stands ``moved`` away from where its width was last
decided, at ``checks`` allocations in a row. As printed in the source a token is free only so, and the first allocation never happens: a
token that is always first stays at the least width. Here one without a decision is free, and all are where holding the others breaks the
budget, or costs more than a little of the utility that there could be: else new tokens would take all bytes that a growing cache may
spend, whatever they are worth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvcompile.extensions.smartkv.allocation import Terms, allocate, spent, utility
from kvcompile.extensions.smartkv.clock import percentiles
from kvcompile.extensions.smartkv.ladder import Ladder, LevelPreference

MOST_AWAY = 6
"""Checks in a row that are counted; one more does not change what is free."""


@dataclass(frozen=True)
class Decided:
    """Ranks of tokens when their widths were decided, float32 [R, T], NaN where they never were; checks in a row away from it, int8."""

    rank: torch.Tensor
    away: torch.Tensor

    @staticmethod
    def nothing(rows: int, tokens: int, device: torch.device | None = None) -> Decided:
        """No token's width was decided."""
        rank = torch.full((rows, tokens), float("nan"), device=device)
        return Decided(rank, torch.zeros(rows, tokens, dtype=torch.int8, device=device))

    def grown(self, tokens: int) -> Decided:
        """Return it with tokens added, whose width was not decided."""
        more = Decided.nothing(self.rank.shape[0], tokens - self.rank.shape[1], self.rank.device)
        return Decided(torch.cat([self.rank, more.rank], dim=1), torch.cat([self.away, more.away], dim=1))

    def checked(self, ranks_RT: torch.Tensor, moved: float) -> Decided:
        """One more check."""
        away = (ranks_RT - self.rank).abs() >= moved
        return replace(self, away=torch.where(away, self.away.clamp(max=MOST_AWAY - 1) + 1, 0).to(torch.int8))

    def free(self, checks: int) -> torch.Tensor:
        """Which tokens may have another width, bool [R, T]."""
        return self.rank.isnan() | (self.away >= checks)


@dataclass(frozen=True)
class Hysteresis:
    """How far a rank must move and for how many checks; the share of the utility that holding tokens may cost before all are free."""

    moved: float = 0.05
    checks: int = 2
    costs: float = 0.02


@dataclass(frozen=True)
class LevelBounds:
    """The levels that each token may have, int8 [R, T]; -1 both where no token is."""

    low: torch.Tensor
    high: torch.Tensor


def decide(
    importance_RT: torch.Tensor, spend_R: torch.Tensor, terms: Terms, levels: Ladder, preference: LevelPreference, before_RT: torch.Tensor,
    decided: Decided, bounds: LevelBounds, hysteresis: Hysteresis,
) -> tuple[torch.Tensor, Decided]:
    """Return the new levels, int8 [R, T], and what was decided.

    ``before`` and ``decided`` as the last call returned them, grown by what came since. A row is allocated whole where the tokens that are
    held take too many bytes, or cost more than ``sticking.costs`` of its utility.
    """
    there = bounds.high >= 0
    ranks = percentiles(importance_RT, there)
    decided = decided.checked(ranks, hysteresis.moved)
    free = decided.free(hysteresis.checks)
    stays = (~free & there & (bounds.low < bounds.high)).to(torch.bool)
    kept = torch.minimum(torch.maximum(before_RT, bounds.low), bounds.high)
    low, high = torch.where(stays, kept, bounds.low), torch.where(stays, kept, bounds.high)
    # Both ways side by side: one launch where a kernel decides.
    both = allocate(
        torch.cat([importance_RT, importance_RT]), torch.cat([spend_R, spend_R]), terms, torch.cat([low, bounds.low]),
        torch.cat([high, bounds.high]),
    )
    held, whole = both.chunk(2)
    bytes_held, bytes_whole = spent(both, terms).chunk(2)
    # What cannot be met at all is no reason to move: then the whole is no better.
    unmet = (bytes_held > spend_R) & (bytes_whole < bytes_held)
    of_whole, of_held = (utility(importance_RT, each, levels, preference) for each in (whole, held))
    anew = (unmet | (of_whole - of_held > hysteresis.costs * of_whole)).unsqueeze(-1)
    refreshed = free | anew
    rank = torch.where(there, torch.where(refreshed, ranks, decided.rank), float("nan"))
    return torch.where(anew, whole, held), Decided(rank, torch.where(refreshed, 0, decided.away).to(torch.int8))
