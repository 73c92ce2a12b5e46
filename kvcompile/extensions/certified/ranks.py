"""``kvcompile::certified_ranks``: masses of blocks go in, the causes of heads whose leading blocks are in doubt are set in place.

It runs in torch, between kernels: no kernel checks the order of several leading blocks.
"""

from __future__ import annotations

import torch

from kvcompile.extensions.certified.blocks import Deviations, Masses
from kvcompile.extensions.certified.checks import rank_fails, ranked
from kvcompile.extensions.certified.scheme import BLOCK
from kvcompile.lowering.ops.operations import LIBRARY

LIBRARY.define(
    "certified_ranks(Tensor(a!) causes, Tensor at, Tensor coded_peak, Tensor coded_weight, Tensor exact_peak, Tensor exact_weight,"
    " Tensor read, Tensor delta, Tensor own, int group, int rank, bool agree) -> ()"
)


def certified_ranks_body(
    causes: torch.Tensor, at: torch.Tensor, coded_peak: torch.Tensor, coded_weight: torch.Tensor, exact_peak: torch.Tensor,
    exact_weight: torch.Tensor, read: torch.Tensor, delta: torch.Tensor, own: torch.Tensor, group: int, rank: int, agree: bool,
) -> None:
    """Write the causes found by ``rank_fails`` into ``causes`` [B, K, Q].

    Inputs are the masses of all blocks from codes, and from full-precision keys for the blocks flagged in ``read``.
    """
    coded, exact, S = Masses(coded_peak, coded_weight), Masses(exact_peak, exact_weight), at.shape[1] // 2
    first = torch.arange(read.shape[3], device=read.device) * BLOCK
    last, least, window = (x[:, None, None, None] for x in at.split([S, S, 1], 1))
    seen = (first <= last.mT) & (first + BLOCK > least.mT) & (first < window)
    codes, was_read = seen.expand(-1, read.shape[1], group, -1, -1).flatten(2, 3), read != 0
    mixed = Masses(*(torch.where(was_read, new, old) for new, old in zip(exact, coded, strict=True)))
    known = ~codes & torch.isfinite(coded.peak) | was_read
    found = rank_fails(coded, mixed, Deviations(delta.to(torch.float64), own.to(torch.float64)), known, codes & ~was_read, rank, agree)
    causes.copy_(ranked(*found))


LIBRARY.impl("certified_ranks", certified_ranks_body, "CompositeExplicitAutograd")

certified_ranks = torch.ops.kvcompile.certified_ranks.default
