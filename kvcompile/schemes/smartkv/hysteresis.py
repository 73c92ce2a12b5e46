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

from kvcompile.schemes.smartkv.allocation import Taste, Widths, allocate, by_worth, utility
from kvcompile.schemes.smartkv.budget import Cost, Halves
from kvcompile.schemes.smartkv.clock import percentiles


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
        return replace(self, away=torch.where(away, self.away.clamp(max=100) + 1, 0).to(torch.int8))

    def free(self, checks: int) -> torch.Tensor:
        """Which tokens may have another width, bool [R, T]."""
        return self.rank.isnan() | (self.away >= checks)


@dataclass(frozen=True)
class Sticking:
    """How far a rank must move and for how many checks; the share of the utility that holding tokens may cost before all are free."""

    moved: float = 0.05
    checks: int = 2
    costs: float = 0.02


def decide(
    importance_RT: torch.Tensor, spend_R: torch.Tensor, cost: Cost, halves: Halves, before: Widths, decided: Decided, *,
    taste: Taste | None = None, sticking: Sticking | None = None, keep_RT: torch.Tensor | None = None,
    protected_RT: torch.Tensor | None = None, most: Widths | None = None, order: torch.Tensor | None = None,
) -> tuple[Widths, Decided]:
    """Return the new widths and what was decided; ``before`` and ``decided`` as the last call returned them, grown by what came since.

    ``most``: the largest width that each token may have, as where codes cannot become wider. ``order``: see ``allocation.by_worth``.
    A row is allocated whole where the tokens that are held take too many bytes, or cost more than ``sticking.costs`` of its utility.
    """
    sticking, taste = sticking or Sticking(), taste or Taste()
    ranks = percentiles(importance_RT, keep_RT)
    if order is None:
        order = by_worth(importance_RT, cost, halves, taste, keep_RT)
    decided = decided.checked(ranks, sticking.moved)
    free = decided.free(sticking.checks)
    given = {"taste": taste, "keep_RT": keep_RT, "protected_RT": protected_RT, "most": most, "order": order}
    held = allocate(importance_RT, spend_R, cost, halves, held=(~free, before), **given)  # type: ignore[arg-type]
    whole = allocate(importance_RT, spend_R, cost, halves, **given)  # type: ignore[arg-type]
    # What cannot be met at all is no reason to move: then the whole is no better.
    unmet = (held.spent > spend_R) & (whole.spent < held.spent)
    best = utility(importance_RT, whole, taste)
    worse = best - utility(importance_RT, held, taste) > sticking.costs * best
    anew = (unmet | worse).unsqueeze(-1)
    keys, values = torch.where(anew, whole.keys, held.keys), torch.where(anew, whole.values, held.values)
    settled = free | anew
    rank = torch.where(settled, ranks, decided.rank)
    if keep_RT is not None:
        rank = torch.where(keep_RT, rank, float("nan"))
    away = torch.where(settled, 0, decided.away).to(torch.int8)
    return Widths(keys, values, torch.where(anew.squeeze(-1), whole.spent, held.spent)), Decided(rank, away)
