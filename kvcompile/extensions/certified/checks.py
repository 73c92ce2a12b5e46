"""The checks that make a head, or all heads of a batch row, fall back to full precision. NaN fails a check, except in a note (below)."""

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
    """Return ``Cause`` bits, int64: RANK where ``disagree`` is True, plus BOUNDARY where ``entering`` is (the flags of ``rank_fails``)."""
    return torch.where(disagree, int(Cause.RANK), 0) | torch.where(entering, int(Cause.BOUNDARY), 0)


def rank_fails(
    coded: Masses, exact: Masses, delta: Deviations, known: torch.Tensor, tail: torch.Tensor, rank: int, agree: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two flags [B, K, Q] about the leading blocks (theorem 7): their order disagrees, and a tail block may belong to them.

    The first flag: the ``rank`` leading blocks by codes are not those by full-precision keys (never set without ``agree``). The second: a
    block of the ``tail`` may have more mass than the least of those leading blocks. ``known``: blocks whose keys are exact, in the window
    or promoted; ``exact`` has their masses. If the tail has no block of codes, the result does not depend on the order (equal masses are
    ordered by rounding alone), and neither flag is set.
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
    """Return a flag per block, [B, K, Q, N]: a visible token's logits by codes and exact differ by more than theorem 8 allows."""
    apart = blocks(torch.where(visible, exact - coded, 0)).abs().amax(-1).to(torch.float64)
    return ~(apart <= _consistent(delta=delta.codes, own=delta.originals, guard=guard))


def notes_differ(
    decoded: torch.Tensor, originals: torch.Tensor, notes: tuple[torch.Tensor, torch.Tensor], of: torch.Tensor
) -> torch.Tensor:
    """Return a flag per block, [B, K, N]: the norm of one of its tokens in the mask ``of`` exceeds the stored norm (its note).

    ``notes``: stored norms of residuals and of full-precision tokens. A NaN note marks a block with NaN or Inf, which no code represents:
    there is nothing to compare, and the check passes.
    """
    residual, size = notes
    fine = (norms(originals.to(torch.float64) - decoded.to(torch.float64), of) <= residual) | torch.isnan(residual)
    return ~(fine & ((norms(originals, of) <= size) | torch.isnan(size)))
