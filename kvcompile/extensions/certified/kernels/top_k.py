"""The leading ones of a row in memory, of any length and without a sort, for ``select_blocks`` and ``spend_value_budget``.

ORDER holds what a row is ordered by, float32, -1 of what is no candidate. Bits of nonnegative floats, int32, are ordered as the floats are,
and below zero stands what is no candidate. An edge is looked for between two that are known to be too low and too high. A pass sums over
the row, which one multiprocessor has in its first cache by then: passes are what costs. They begin in the range
of a factor of 256 below the largest, where the edge mostly is, and end as soon as nobody but what is wanted stands between the two.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

NEAR = tl.constexpr(1 << 26)
"""How far two floats' bits are apart where one is 256 times the other."""


@triton.jit
def bits_of(ORDER, n, blocks):
    """The bits of blocks n."""
    return tl.load(ORDER + n, mask=n < blocks, other=-1.0).to(tl.int32, bitcast=True)


@triton.jit
def reaching(ORDER, blocks, edge, CHUNK: tl.constexpr):
    """How many reach an edge."""
    i = tl.arange(0, CHUNK)
    count = tl.zeros([CHUNK], tl.int32)
    for first in range(0, blocks, CHUNK):
        count += (bits_of(ORDER, first + i, blocks) >= edge).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def below(ORDER, AMOUNT, blocks, edge, CHUNK: tl.constexpr):
    """Sum the amounts of the candidates below an edge, in float64, and return how many reach it; the largest of those amounts."""
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
    """The next edge to look at."""
    return tl.maximum(low + (high - low) // 2, high - NEAR)


@triton.jit
def edge_of_count(ORDER, blocks, count, low, reach_low, high, reach_high, CHUNK: tl.constexpr):
    """Edges next to the ``count``-th largest, and how many reach each: the first just ``count``, or it is that of several equal ones.

    ``low`` is reached by at least ``count``, ``high`` by fewer (or, where ``count`` is zero, by nobody).
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
    """The highest edge below which candidates amount to at most BUDGET, or one that as many reach; and how many do. ``low`` is one."""
    amount, _reach, _largest = below(ORDER, AMOUNT, blocks, high, CHUNK)
    fits = amount <= BUDGET
    low = tl.where(fits, high, low)
    reach_low = tl.where(fits, reach_high, reach_low)
    # Of a single one between the two it is known that it must leave.
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
    """The lowest edge that at most ``count`` reach, of what ``edge_of_count`` found, and how many do."""
    return tl.where(reach_low == count, low, high), tl.where(reach_low == count, reach_low, reach_high)


@triton.jit
def certain_count(
    ORDER, SURE, blocks, count, edge, available, top, COVER: tl.constexpr, MOST_WIDENED: tl.constexpr, CHUNK: tl.constexpr,
):
    """How many must leave so that the rest is at most COVER of the exact mass too, zero where more than MOST_WIDENED must.

    ``count`` of them reach ``edge``; SURE: the largest exact shares. Where that is enough, or the largest behind it as often as there are
    further ones are not, it takes one pass to know.
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
    """Edge, ties and widened: ``select_blocks`` promotes who reaches the edge, and ``ties`` of those just below it, in their order.

    ``available``: candidates; ``top``: an edge that nobody reaches. COVER of one and more is all there is.
    """
    nothing = available * 0
    low, reach_low, high, reach_high = nothing, available, top, nothing
    if COVER >= 1:
        count = tl.minimum(nothing + LEAST, MOST)
    elif COVER >= 0:
        # Mostly MOST is what counts, so its edge is looked for first. Is what stays beyond it too much already?
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
    """Which of some blocks stand first, and how many of the ``ties`` are left for the blocks behind them."""
    chosen = bits >= edge
    if ties > 0:
        equal = ((bits == tied) & (bits < edge)).to(tl.int32)
        chosen = chosen | ((equal != 0) & (tl.cumsum(equal, 0) - equal < ties))
        ties -= tl.sum(equal, 0)
    return chosen, ties
