"""The checks that send a head, or all heads of a batch row, to the originals. Comparisons fail on NaN, but for notes that are NaN."""

from __future__ import annotations

import torch

from kvcompile.extensions.certified.blocks import Deviations, Masses, blocks, norms
from kvcompile.extensions.certified.promotion import leading
from kvcompile.lowering.certificate.bound_printer import aten
from kvcompile.schemes.certificate import bounds
from kvcompile.schemes.certificate.policy import Cause

# Printed once, at import: Dynamo then sees plain functions.
_consistent = aten(bounds.CONSISTENT)
_largest_log_mass = aten(bounds.LARGEST_LOG_MASS)

NONE = float("-inf")


def ranked(disagree: torch.Tensor, entering: torch.Tensor) -> torch.Tensor:
    """Return the failures that ``rank_fails`` found, as bits of ``Cause``."""
    return torch.where(disagree, int(Cause.RANK), 0) | torch.where(entering, int(Cause.BOUNDARY), 0)


def rank_fails(
    coded: Masses, exact: Masses, delta: Deviations, known: torch.Tensor, tail: torch.Tensor, rank: int, agree: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Theorem 7, two flags [B, K, Q]: codes order the leading ``rank`` blocks otherwise (``agree``); one of the ``tail`` may be among them.

    ``known``: blocks whose keys are exact, in full precision or promoted, of which ``exact`` has the masses. Where no block of
    codes is left in the tail nothing rests on their order, and neither fails: blocks that tie are ordered by rounding alone.
    """
    by_codes, by_originals = torch.where(known, coded.log, NONE), torch.where(known, exact.log, NONE)
    if not known.shape[-1]:
        nothing = torch.zeros(known.shape[:-1], dtype=torch.bool, device=known.device)
        return nothing, nothing
    first, second = leading(by_codes, rank), leading(by_originals, rank)
    last = second[..., -1:]
    least = by_originals.gather(-1, last) - delta.originals.gather(-1, last)
    upper = torch.where(tail, _largest_log_mass(log_mass=coded.log, delta=delta.codes), NONE)
    highest = upper.amax(-1)
    left = ~torch.isneginf(highest)
    return (first != second).any(-1) & left & agree, ~(highest <= least.squeeze(-1)) & left


def logits_differ(coded: torch.Tensor, exact: torch.Tensor, delta: Deviations, visible: torch.Tensor, guard: float) -> torch.Tensor:
    """Theorem 8, for each block [B, K, Q, N]: a token's two logits are further apart than they can be."""
    apart = blocks(torch.where(visible, exact - coded, 0)).abs().amax(-1).to(torch.float64)
    return ~(apart <= _consistent(delta=delta.codes, own=delta.originals, guard=guard))


def notes_differ(
    decoded: torch.Tensor, originals: torch.Tensor, notes: tuple[torch.Tensor, torch.Tensor], of: torch.Tensor
) -> torch.Tensor:
    """For each block [B, K, N]: the norms that ``notes`` has (of residuals, of originals) are below those of the tokens ``of``.

    A note that is NaN says that its block held what no code stands for: nothing is known to compare with, and nothing rests on it.
    """
    residual, size = notes
    fine = (norms(originals.to(torch.float64) - decoded.to(torch.float64), of) <= residual) | torch.isnan(residual)
    return ~(fine & ((norms(originals, of) <= size) | torch.isnan(size)))
