"""The leading entries of a row in memory, of any length and without a sort, for ``select_blocks`` and ``spend_value_budget``.

ORDER holds the keys of the order, float32, -1 for a block that is not a candidate. The int32 bits of nonnegative floats are ordered as the
floats are, and non-candidates are below zero. A threshold (edge) is bisected between one known to be too low and one too high. A pass sums
over the row, which the multiprocessor's first cache holds by then: the number of passes determines the time. The bisection begins in the
range of a factor of 256 below the largest, which mostly contains the threshold, and ends as soon as no other candidate is between the two.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

NEAR = tl.constexpr(1 << 26)
"""The difference of two floats' bits if one is 256 times the other."""


@triton.jit
def bits_of(ORDER, n, blocks):
    """Load the order keys of blocks n as int32 bits; -1.0 in place of blocks beyond the row's last."""
    return tl.load(ORDER + n, mask=n < blocks, other=-1.0).to(tl.int32, bitcast=True)


@triton.jit
def reaching(ORDER, blocks, edge, CHUNK: tl.constexpr):
    """Return the number of a row's blocks whose order key in ORDER is at or above ``edge``."""
    i = tl.arange(0, CHUNK)
    count = tl.zeros([CHUNK], tl.int32)
    for first in range(0, blocks, CHUNK):
        count += (bits_of(ORDER, first + i, blocks) >= edge).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def below(ORDER, AMOUNT, blocks, edge, CHUNK: tl.constexpr):
    """Return, over a row's candidates: (sum of AMOUNT below ``edge``, number of candidates at or above it, largest AMOUNT below it).

    A candidate is below ``edge`` if its order key in ORDER is. The sum is float64. ``blocks``: number of blocks of the row; blocks with a
    negative key are no candidates. Sum and largest are 0 if none is below.
    """
    i = tl.arange(0, CHUNK)
    count = tl.zeros([CHUNK], tl.int32)
    amounts = tl.zeros([CHUNK], tl.float64)
    largest = tl.zeros([CHUNK], AMOUNT.dtype.element_ty)
    for first in range(0, blocks, CHUNK):
        n = first + i
        bits = bits_of(ORDER, n, blocks)
        amount = tl.load(AMOUNT + n, mask=n < blocks, other=0.0)
        amount = tl.where((bits >= 0) & (bits < edge), amount, 0.0)
        amounts += amount.to(tl.float64)
        largest = tl.maximum(largest, amount)
        count += (bits >= edge).to(tl.int32)
    return tl.sum(amounts, 0), tl.sum(count, 0), tl.max(largest, 0)


@triton.jit
def middle(low, high):
    """Return the next edge to try: the middle between ``low`` and ``high``, or ``high`` - NEAR if that is larger."""
    return tl.maximum(low + (high - low) // 2, high - NEAR)


@triton.jit
def edge_of_count(ORDER, blocks, count, low, reach_low, high, reach_high, CHUNK: tl.constexpr):
    """Return (low, number that reach low, high, number that reach high): edges bisected until ``count`` of a row's blocks reach low.

    ``low`` and ``high``: bits of float32 keys. A block reaches an edge if its key in ORDER is at or above it. On entry at least ``count``
    blocks reach ``low``, and fewer reach ``high``; afterwards exactly ``count`` reach ``low``, unless blocks with equal keys straddle the
    count. With ``count`` 0 the edges are returned as they came.
    """
    while (reach_low > count) & (high - low > 1) & (count > 0):
        edge = middle(low, high)
        reach = reaching(ORDER, blocks, edge, CHUNK)
        up = reach >= count
        low = tl.where(up, edge, low)
        reach_low = tl.where(up, reach, reach_low)
        high = tl.where(up, high, edge)
        reach_high = tl.where(up, reach_high, reach)
    return low, reach_low, high, reach_high


@triton.jit
def edge_of_tail(ORDER, AMOUNT, blocks, low, reach_low, high, reach_high, BUDGET: tl.constexpr, CHUNK: tl.constexpr):
    """Return (the highest edge such that AMOUNT below it sums to at most BUDGET, the number of candidates that reach it), by bisection.

    ``low``: an edge whose tail fits. ``high``: an edge above it, whose tail may fit too. The result may be lower than the highest if no
    further candidate reaches that one. ``reach_low``, ``reach_high``: how many of a row's blocks reach these edges by ORDER.
    """
    amount, _reach, _largest = below(ORDER, AMOUNT, blocks, high, CHUNK)
    fits = amount <= BUDGET
    low = tl.where(fits, high, low)
    reach_low = tl.where(fits, reach_high, reach_low)
    # One candidate left between the thresholds: it exceeds the budget, so stop.
    while (reach_low - reach_high > 1) & (high - low > 1):
        edge = middle(low, high)
        amount, reach, _largest = below(ORDER, AMOUNT, blocks, edge, CHUNK)
        fits = amount <= BUDGET
        low = tl.where(fits, edge, low)
        reach_low = tl.where(fits, reach, reach_low)
        high = tl.where(fits, high, edge)
        reach_high = tl.where(fits, reach_high, reach)
    return low, reach_low


@triton.jit
def edge_at(low, reach_low, high, reach_high, count):
    """Return (edge, entries that reach it): of ``low`` and ``high``, the lower one that at most ``count`` entries reach.

    ``reach_low``, ``reach_high``: how many entries reach them; all four are results of ``edge_of_count``.
    """
    return tl.where(reach_low == count, low, high), tl.where(reach_low == count, reach_low, reach_high)


@triton.jit
def certain_count(
    ORDER, SURE, blocks, count, edge, available, top, COVER: tl.constexpr, MOST_WIDENED: tl.constexpr, CHUNK: tl.constexpr,
):
    """Return how many leading blocks leave SURE of the rest at most COVER; 0: keep the ``count`` blocks that reach ``edge``.

    ORDER, SURE [blocks]: order keys of a row, and upper bounds on its blocks' shares of the exact mass. 0 is returned if SURE of the blocks
    below ``edge`` already sums to at most COVER, or if more than MOST_WIDENED blocks would be needed. ``available``: number of candidates;
    ``top``: an edge that none reaches. One pass decides if no more are needed, or if more blocks of the largest remaining share could not
    close the gap.
    """
    sure = available * 0
    left, _reach, largest = below(ORDER, SURE, blocks, edge, CHUNK)
    further = tl.minimum(available, MOST_WIDENED) - count
    if ((left <= COVER) == 0) & (further > 0) & ((left - further.to(tl.float64) * largest.to(tl.float64) > COVER) == 0):
        wide = tl.minimum(available, MOST_WIDENED)
        low, reach_low, high, reach_high = edge_of_count(ORDER, blocks, wide, sure, available, top, sure, CHUNK)
        last, reach = edge_at(low, reach_low, high, reach_high, wide)
        amount, _reach, _largest = below(ORDER, SURE, blocks, last, CHUNK)
        if amount <= COVER:
            _edge, sure = edge_of_tail(ORDER, SURE, blocks, last, reach, top, available * 0, COVER, CHUNK)
    return sure


@triton.jit
def leading(
    ORDER, SURE, TERM, blocks, available, top, COVER: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, BUDGET: tl.constexpr,
    MOST_WIDENED: tl.constexpr, CERTAIN: tl.constexpr, WIDEN: tl.constexpr, CHUNK: tl.constexpr,
):
    """Return (edge, ties, tied, widened): a row's leading entries are all of at least ``edge``, and the first ``ties`` equal to ``tied``.

    ``available``: number of candidates; ``top``: an edge that none reaches. With COVER >= 1 the rest may hold everything; with COVER < 0
    all candidates lead. LEAST and MOST limit the number of leading entries; MOST_WIDENED limits it if more lead because SURE (with CERTAIN)
    or TERM (with WIDEN, by BUDGET) requires it, as in ``select_blocks``; ``widened`` says whether they do.
    """
    nothing = available * 0
    low, reach_low, high, reach_high = nothing, available, top, nothing
    if COVER >= 1:
        count = tl.minimum(nothing + LEAST, MOST)
    elif COVER >= 0:
        # The count is mostly MOST, so its edge is bisected first. If the rest beyond it fits, fewer may be enough.
        count = tl.minimum(available, MOST)
        low, reach_low, high, reach_high = edge_of_count(ORDER, blocks, count, low, reach_low, high, reach_high, CHUNK)
        edge, reach = edge_at(low, reach_low, high, reach_high, count)
        left, _reach, _largest = below(ORDER, ORDER, blocks, edge, CHUNK)
        if left <= COVER:
            edge, reach = edge_of_tail(ORDER, ORDER, blocks, edge, reach, top, nothing, COVER, CHUNK)
            count = tl.maximum(reach, LEAST)
            enough = reach >= count
            low = tl.where(enough, edge, nothing)
            reach_low = tl.where(enough, reach, available)
            high = tl.where(enough, top, edge)
            reach_high = tl.where(enough, nothing, reach)
    else:
        count = tl.minimum(tl.maximum(available, LEAST), MOST)
    narrow = count
    if CERTAIN:
        known = tl.minimum(count, available)
        low, reach_low, high, reach_high = edge_of_count(ORDER, blocks, known, low, reach_low, high, reach_high, CHUNK)
        edge, reach = edge_at(low, reach_low, high, reach_high, known)
        count = tl.maximum(count, certain_count(ORDER, SURE, blocks, reach, edge, available, top, COVER, MOST_WIDENED, CHUNK))
    if WIDEN:
        _edge, wide = edge_of_tail(ORDER, TERM, blocks, nothing, available, top, nothing, BUDGET, CHUNK)
        count = tl.maximum(count, tl.minimum(wide, MOST_WIDENED))
    if count > narrow:
        low = nothing
        reach_low = available
    widened = count > narrow
    count = tl.minimum(count, available)
    low, reach_low, high, reach_high = edge_of_count(ORDER, blocks, count, low, reach_low, high, reach_high, CHUNK)
    edge, reach = edge_at(low, reach_low, high, reach_high, count)
    return edge, count - reach, low, widened


@triton.jit
def led(bits, edge, ties, tied):
    """Return (whether each block of a chunk is among the leading ones, how many of the ``ties`` are left for later chunks).

    ``bits``: the blocks' order keys (``bits_of``); ``edge``, ``ties``, ``tied``: results of ``leading``.
    """
    chosen = bits >= edge
    if ties > 0:
        equal = ((bits == tied) & (bits < edge)).to(tl.int32)
        chosen = chosen | ((equal != 0) & (tl.cumsum(equal, 0) - equal < ties))
        ties -= tl.sum(equal, 0)
    return chosen, ties
