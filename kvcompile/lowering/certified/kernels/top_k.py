"""The leading ones of a row that lies in registers, without a sort, for ``select_blocks``.

Bits of nonnegative floats, int32, are ordered as the floats are; below zero stands what is no candidate. An edge is looked for between two
that are known to be too low and too high: what a pass costs is one sum over the row, so passes are what is saved. They begin in the range
of a factor of 256 below the largest, where the edge mostly is, and end as soon as nobody but what is wanted stands between the two.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803 - kernels: operands are blocks, constants are in capitals.

from __future__ import annotations

import triton
import triton.language as tl

NEAR = tl.constexpr(1 << 26)
"""How far two floats' bits are apart where one is 256 times the other."""


@triton.jit
def reaching(bits, edge):
    """How many reach an edge."""
    return tl.sum((bits >= edge).to(tl.int32), 0)


@triton.jit
def amount_below(bits, amount, edge):
    """Sum the amounts of the candidates below an edge."""
    return tl.sum(tl.where((bits >= 0) & (bits < edge), amount, 0.0), 0)


@triton.jit
def ceiling(bits):
    """An edge that nobody reaches."""
    return tl.minimum(tl.maximum(tl.max(bits, 0), 0), 2147483646) + 1


@triton.jit
def middle(low, high):
    """The next edge to look at."""
    return tl.maximum(low + (high - low) // 2, high - NEAR)


@triton.jit
def edge_of_count(bits, count, low, reach_low, high, reach_high):
    """Edges next to the ``count``-th largest, and how many reach each: the first just ``count``, or it is that of several equal ones.

    ``low`` is reached by at least ``count``, ``high`` by fewer (or, where ``count`` is zero, by nobody).
    """
    while (reach_low > count) & (high - low > 1) & (count > 0):
        edge = middle(low, high)
        reach = reaching(bits, edge)
        up = reach >= count
        low = tl.where(up, edge, low)
        reach_low = tl.where(up, reach, reach_low)
        high = tl.where(up, high, edge)
        reach_high = tl.where(up, reach_high, reach)
    return low, reach_low, high, reach_high


@triton.jit
def edge_of_tail(bits, amount, low, reach_low, high, reach_high, BUDGET: tl.constexpr):
    """The highest edge below which candidates amount to at most BUDGET, or one that as many reach; and how many do. ``low`` is one."""
    fits = amount_below(bits, amount, high) <= BUDGET
    low = tl.where(fits, high, low)
    reach_low = tl.where(fits, reach_high, reach_low)
    # Of a single one between the two it is known that it must leave.
    while (reach_low - reach_high > 1) & (high - low > 1):
        edge = middle(low, high)
        reach = reaching(bits, edge)
        fits = amount_below(bits, amount, edge) <= BUDGET
        low = tl.where(fits, edge, low)
        reach_low = tl.where(fits, reach, reach_low)
        high = tl.where(fits, high, edge)
        reach_high = tl.where(fits, reach_high, reach)
    return low, reach_low


@triton.jit
def leaders(bits, count, low, reach_low, high, reach_high):
    """Which are the ``count`` largest, given what ``edge_of_count`` found; equal ones in their order."""
    if reach_low == count:
        chosen = bits >= low
    else:
        equal = (bits == low).to(tl.int32)
        chosen = (bits >= high) | ((equal != 0) & (tl.cumsum(equal, 0) - equal < count - reach_high))
    return chosen


@triton.jit
def leading(bits, share, term, COVER: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, BUDGET: tl.constexpr,
            MOST_WIDENED: tl.constexpr, WIDEN: tl.constexpr):
    """The candidates that ``select_blocks`` promotes, and whether widening adds any."""
    available = reaching(bits, 0)
    top = ceiling(bits)
    nothing = available * 0
    low, reach_low, high, reach_high = nothing, available, top, nothing
    if COVER >= 0:
        # Mostly MOST is what counts, so its edge is looked for first. Is what stays beyond it too much already?
        count = tl.minimum(available, MOST)
        low, reach_low, high, reach_high = edge_of_count(bits, count, low, reach_low, high, reach_high)
        edge = tl.where(reach_low == count, low, high)
        reach = tl.where(reach_low == count, reach_low, reach_high)
        if amount_below(bits, share, edge) <= COVER:
            edge, reach = edge_of_tail(bits, share, edge, reach, top, nothing, COVER)
            count = tl.maximum(reach, LEAST)
            enough = reach >= count
            low = tl.where(enough, edge, nothing)
            reach_low = tl.where(enough, reach, available)
            high = tl.where(enough, top, edge)
            reach_high = tl.where(enough, nothing, reach)
    else:
        count = tl.minimum(tl.maximum(available, LEAST), MOST)
    widened = nothing != 0
    if WIDEN:
        _edge, wide = edge_of_tail(bits, term, nothing, available, top, nothing, BUDGET)
        wide = tl.minimum(wide, MOST_WIDENED)
        widened = wide > count
        if widened:
            count = wide
            low = nothing
            reach_low = available
    count = tl.minimum(count, available)
    low, reach_low, high, reach_high = edge_of_count(bits, count, low, reach_low, high, reach_high)
    return leaders(bits, count, low, reach_low, high, reach_high), widened
