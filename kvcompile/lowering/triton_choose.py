"""Promotion without a sort, for certified attention: see ``triton_certified``."""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RUF005 - kernels: operands are pointers and constants in capitals, tuples grow in loops.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def standing(ORDER, AMOUNT, row, blocks, BUDGET: tl.constexpr, digit, i, CHUNK: tl.constexpr):
    """How many candidates stand above the longest tail whose amounts add up to at most BUDGET; equal ones leave together."""
    edge = 0
    for shift in range(28, -4, -4):
        reach = edge + (digit << shift)
        below = (digit * 0).to(tl.float64)
        for first in range(0, blocks, CHUNK):
            inside = first + i < blocks
            bits = tl.load(ORDER + row + first + i, mask=inside, other=-1.0).to(tl.int32, bitcast=True)
            amount = tl.load(AMOUNT + row + first + i, mask=inside, other=0.0)
            below += tl.sum(tl.where((bits[None, :] < reach[:, None]) & (bits >= 0)[None, :], amount[None, :], 0.0), 1)
        fits = (below <= BUDGET) & (reach >= 0)
        edge += (tl.max(tl.where(fits, digit, 0), 0)) << shift
    count = 0
    for first in range(0, blocks, CHUNK):
        bits = tl.load(ORDER + row + first + i, mask=first + i < blocks, other=-1.0).to(tl.int32, bitcast=True)
        count += tl.sum((bits >= tl.maximum(edge, 0)).to(tl.int32), 0)
    return count


@triton.jit
def choose(
    ORDER, FIRST, SECOND, CHOSEN, WIDENED, blocks, least, most, most_widened,
    FIRST_BUDGET: tl.constexpr, SECOND_BUDGET: tl.constexpr, CHUNK: tl.constexpr, COVER: tl.constexpr, WIDEN: tl.constexpr,
):
    """The leading blocks of one head in descending order of ORDER, float32 (below zero: no candidate), as flags.

    As many as must leave so that FIRST, float64, adds up to at most FIRST_BUDGET over the rest, from ``least`` to ``most``; or, where
    more (WIDEN), the same of SECOND, up to ``most_widened``. COVER is off where all must leave. Nonnegative floats are ordered
    as their bits are: the place in the order is found four bits at a time, from sums over what lies below sixteen thresholds.
    Budgets are constants, since an operand would be float32.
    """
    row = tl.program_id(0).to(tl.int64) * blocks
    digit = tl.arange(0, 16)
    i = tl.arange(0, CHUNK)
    candidates = 0
    for first in range(0, blocks, CHUNK):
        inside = first + i < blocks
        candidates += tl.sum((tl.load(ORDER + row + first + i, mask=inside, other=-1.0) >= 0).to(tl.int32), 0)

    narrow = candidates
    if COVER:
        narrow = standing(ORDER, FIRST, row, blocks, FIRST_BUDGET, digit, i, CHUNK)
    count = tl.minimum(tl.maximum(narrow, least), most)
    if WIDEN:
        wide = tl.minimum(standing(ORDER, SECOND, row, blocks, SECOND_BUDGET, digit, i, CHUNK), most_widened)
        tl.store(WIDENED + tl.program_id(0), (wide > count).to(tl.int8))
        count = tl.maximum(count, wide)
    count = tl.minimum(count, candidates)

    # The largest bits that at least ``count`` candidates reach.
    edge = 0
    for shift in range(28, -4, -4):
        reach = edge + (digit << shift)
        held = digit * 0
        for first in range(0, blocks, CHUNK):
            bits = tl.load(ORDER + row + first + i, mask=first + i < blocks, other=-1.0).to(tl.int32, bitcast=True)
            held += tl.sum(((bits[None, :] >= reach[:, None]) & (bits >= 0)[None, :]).to(tl.int32), 1)
        fits = (held >= count) & (reach >= 0)
        edge += (tl.max(tl.where(fits, digit, 0), 0)) << shift

    above = 0
    for first in range(0, blocks, CHUNK):
        bits = tl.load(ORDER + row + first + i, mask=first + i < blocks, other=-1.0).to(tl.int32, bitcast=True)
        above += tl.sum((bits > edge).to(tl.int32), 0)
    # Equal ones in the order of their blocks.
    left = count - above
    for first in range(0, blocks, CHUNK):
        bits = tl.load(ORDER + row + first + i, mask=first + i < blocks, other=-1.0).to(tl.int32, bitcast=True)
        equal = (bits == edge).to(tl.int32)
        rank = tl.cumsum(equal, 0) - equal
        tl.store(CHOSEN + row + first + i, ((bits > edge) | ((equal != 0) & (rank < left))).to(tl.int8), mask=first + i < blocks)
        left -= tl.sum(equal, 0)
