"""Promotion of keys without a sort, for certified attention: see ``certified``."""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RUF005 - kernels: operands are pointers and constants in capitals, tuples grow in loops.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.certified.kernels.bounds import key_term, least_term
from kvcompile.lowering.certified.kernels.top_k import leading


@triton.jit
def standing(ORDER, AMOUNT, row, blocks, BUDGET: tl.constexpr, WIDE: tl.constexpr):
    """How many candidates stand above the longest tail whose amounts add up to at most BUDGET; equal ones leave together.

    A row of up to WIDE blocks is read once and stays in registers: 31 sums over it, and nothing else, make the time.
    """
    i = tl.arange(0, WIDE)
    edge = 0
    if blocks <= WIDE:
        bits = tl.load(ORDER + row + i, mask=i < blocks, other=-1.0).to(tl.int32, bitcast=True)
        amount = tl.load(AMOUNT + row + i, mask=i < blocks, other=0.0)
        for shift in range(30, -1, -1):
            reach = edge + (1 << shift)
            below = tl.sum(tl.where((bits >= 0) & (bits < reach), amount, 0.0), 0)
            edge = tl.where(below <= BUDGET, reach, edge)
        count = tl.sum((bits >= edge).to(tl.int32), 0)
    else:
        for shift in range(30, -1, -1):
            reach = edge + (1 << shift)
            sums = tl.zeros([WIDE], tl.float64)
            for first in range(0, blocks, WIDE):
                inside = first + i < blocks
                bits = tl.load(ORDER + row + first + i, mask=inside, other=-1.0).to(tl.int32, bitcast=True)
                sums += tl.where((bits >= 0) & (bits < reach), tl.load(AMOUNT + row + first + i, mask=inside, other=0.0), 0.0)
            edge = tl.where(tl.sum(sums, 0) <= BUDGET, reach, edge)
        count = how_many(ORDER, row, blocks, edge, WIDE)
    return count


@triton.jit
def how_many(ORDER, row, blocks, edge, WIDE: tl.constexpr):
    """Candidates whose bits reach ``edge``, which is not negative."""
    i = tl.arange(0, WIDE)
    count = tl.zeros([WIDE], tl.int32)
    for first in range(0, blocks, WIDE):
        bits = tl.load(ORDER + row + first + i, mask=first + i < blocks, other=-1.0).to(tl.int32, bitcast=True)
        count += (bits >= edge).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def last_taken(ORDER, row, blocks, count, WIDE: tl.constexpr):
    """The largest bits that at least ``count`` candidates reach, and how many of those that have just these bits are wanted."""
    i = tl.arange(0, WIDE)
    edge = 0
    if blocks <= WIDE:
        bits = tl.load(ORDER + row + i, mask=i < blocks, other=-1.0).to(tl.int32, bitcast=True)
        for shift in range(30, -1, -1):
            reach = edge + (1 << shift)
            edge = tl.where(tl.sum((bits >= reach).to(tl.int32), 0) >= count, reach, edge)
        left = count - tl.sum((bits >= edge + 1).to(tl.int32), 0)
    else:
        for shift in range(30, -1, -1):
            reach = edge + (1 << shift)
            edge = tl.where(how_many(ORDER, row, blocks, reach, WIDE) >= count, reach, edge)
        left = count - how_many(ORDER, row, blocks, edge + 1, WIDE)
    return edge, left


@triton.jit
def mark(ORDER, CHOSEN, row, blocks, count, WIDE: tl.constexpr):
    """Flags of the ``count`` leading candidates; equal ones in the order of their blocks."""
    i = tl.arange(0, WIDE)
    edge, left = last_taken(ORDER, row, blocks, count, WIDE)
    for first in range(0, blocks, WIDE):
        bits = tl.load(ORDER + row + first + i, mask=first + i < blocks, other=-1.0).to(tl.int32, bitcast=True)
        equal = (bits == edge).to(tl.int32)
        rank = tl.cumsum(equal, 0) - equal
        tl.store(CHOSEN + row + first + i, ((bits > edge) | ((equal != 0) & (rank < left))).to(tl.int8), mask=first + i < blocks)
        left -= tl.sum(equal, 0)


@triton.jit
def gap_of(peak, top, live):
    """How far a block's largest logit is below the head's, float64, and that nothing is there as a number whose exp is zero."""
    apart = peak.to(tl.float64) - top.to(tl.float64)
    return tl.where(live, tl.where(apart < -1e4, -1e4, apart), -1e4)


@triton.jit
def drawn_before(clock, b, k, q):
    """``certified.promotion.chance`` of a row's place, before that of a block: its lowest 32 bits, which are all it depends on."""
    x = clock.to(tl.int64).to(tl.uint32) * 0x27D4EB2F
    x = mixed_with(x, b)
    x = mixed_with(x, k)
    return mixed_with(x, q)


@triton.jit
def mixed_with(x, place):
    """A hash with a coordinate of a place."""
    x = (x ^ (place + 1).to(tl.uint32)) * 0x9E3779B1
    return x ^ (x >> 15)


@triton.jit
def draw(before, n):
    """The rest of it: ``chance`` times 2^32."""
    x = mixed_with(before, n)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x046CA68B
    return (x ^ (x >> 16)).to(tl.int64)


@triton.jit
def drawn_of(EXPLORED, place, kept, before, n, blocks, EXPLORE: tl.constexpr):
    """Which of the ``kept`` blocks n of a row are explored, and flagged as that."""
    explored = kept & (draw(before, n) < EXPLORE)
    tl.store(EXPLORED + place, explored.to(tl.int8), mask=n < blocks)
    return explored


@triton.jit
def listed(LIST, before, first, chosen):
    """Put those of the blocks from ``first`` on that are chosen, in their order, into a row's list behind ``before``; how many there are.

    Runs of RUN are added up first, each within a warp: one sum over everything would go through all warps run by run.
    """
    RUN: tl.constexpr = min(128, chosen.shape[0])
    RUNS: tl.constexpr = chosen.shape[0] // RUN
    one = tl.reshape(chosen.to(tl.int32), [RUNS, RUN])
    within = tl.cumsum(one, 1)
    whole = tl.sum(one, 1)
    place = before + (tl.cumsum(whole, 0) - whole)[:, None] + within - 1
    n = first + tl.arange(0, RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    tl.store(LIST + place, n, mask=one != 0)
    return before + tl.sum(whole, 0)


@triton.jit
def select_in_registers(
    PEAK, WEIGHT, DELTA, NOTES, SINKS, AT, CLOCK, CHOSEN, EXPLORED, LIST, LISTED, TOP, STATS, blocks,
    LEAST: tl.constexpr, MOST: tl.constexpr, MOST_WIDENED: tl.constexpr, COVER: tl.constexpr, BUDGET: tl.constexpr, WIDEN: tl.constexpr,
    EXPLORE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, WIDE: tl.constexpr,
):
    """``select_blocks`` of up to WIDE blocks, which are read once and stay in registers."""
    r = tl.program_id(0)
    rows: tl.constexpr = G * S
    n = tl.arange(0, WIDE)
    place = r.to(tl.int64) * blocks + n
    at = AT + r // (rows * K) * (2 * S + 1)
    live = (n < blocks) & (n * 16 <= tl.load(at + r % S)) & (n * 16 + 16 > tl.load(at + S + r % S))
    coded = live & (n * 16 < tl.load(at + 2 * S))
    peak = tl.load(PEAK + place, mask=live, other=float("-inf"))
    weight = tl.load(WEIGHT + place, mask=live, other=0.0).to(tl.float64)
    sink = tl.load(SINKS + r)
    top = tl.maximum(sink, tl.max(peak, 0))
    top = tl.where(top == float("-inf"), 0.0, top)
    tl.store(TOP + r, top)
    gap = gap_of(peak, top, live)
    mass = weight * tl.exp(gap)
    everything = tl.sum(mass, 0) + tl.exp(sink.to(tl.float64) - top.to(tl.float64))
    # One quotient for all of them: a share is an estimate that blocks are ordered by.
    share = mass * (1.0 / tl.where(everything < 1e-300, 1e-300, everything))
    bits = tl.where(coded, share, -1.0).to(tl.float32).to(tl.int32, bitcast=True)
    term = share
    if WIDEN:
        delta = tl.load(DELTA + place, mask=live, other=0.0)
        nu = tl.load(NOTES + ((r // rows) * blocks + n) * 4 + 3, mask=live, other=0.0)
        least = tl.sum(least_term(delta, gap, weight), 0)
        vmax = tl.maximum(tl.max(nu, 0), 0.0).to(tl.float64)
        term = key_term(vmax, delta, gap, nu.to(tl.float64), weight) * (1.0 / tl.where(least < 1e-300, 1e-300, least))
    chosen, widened = leading(bits, share, term, COVER, LEAST, MOST, BUDGET, MOST_WIDENED, WIDEN)
    tl.store(STATS + r * 3, widened.to(tl.float64))
    kept = coded & (chosen == 0)
    drawn = r * 0
    if EXPLORE > 0:
        before = drawn_before(tl.load(CLOCK), r // (rows * K), r // rows % K, r % rows)
        explored = drawn_of(EXPLORED, place, kept, before, n, blocks, EXPLORE)
        drawn = tl.sum(explored.to(tl.int32), 0)
        kept = kept & (explored == 0)
        chosen = chosen | explored
    tl.store(CHOSEN + place, chosen.to(tl.int8), mask=n < blocks)
    tl.store(LISTED + r, listed(LIST + r.to(tl.int64) * blocks, 0, 0, chosen))
    tl.store(STATS + r * 3 + 1, tl.sum(tl.where(kept, share, 0.0), 0))
    tl.store(STATS + r * 3 + 2, drawn)


@triton.jit
def select_in_memory(
    PEAK, WEIGHT, DELTA, NOTES, SINKS, AT, CLOCK, ORDER, SHARE, TERM, CHOSEN, EXPLORED, LIST, LISTED, TOP, STATS, blocks,
    LEAST: tl.constexpr, MOST: tl.constexpr, MOST_WIDENED: tl.constexpr, COVER: tl.constexpr, BUDGET: tl.constexpr, WIDEN: tl.constexpr,
    EXPLORE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
):
    """``select_blocks`` of any number of blocks, from memory."""
    r = tl.program_id(0)
    row = r.to(tl.int64) * blocks
    rows: tl.constexpr = G * S
    at = AT + r // (rows * K) * (2 * S + 1)
    base = tl.load(at + 2 * S)
    high = tl.load(at + r % S)
    low = tl.load(at + S + r % S)
    nu_at = NOTES + (r // rows) * blocks * 4 + 3
    i = tl.arange(0, CHUNK)
    sink = tl.load(SINKS + r)
    top = sink
    vmax = sink * 0.0
    vmax = tl.where(vmax == vmax, vmax, 0.0)
    candidates = 0
    for first in range(0, blocks, CHUNK):
        n = first + i
        live = (n < blocks) & (n * 16 <= high) & (n * 16 + 16 > low)
        top = tl.maximum(top, tl.max(tl.load(PEAK + row + n, mask=live, other=float("-inf")), 0))
        vmax = tl.maximum(vmax, tl.max(tl.load(nu_at + n * 4, mask=live, other=0.0), 0))
        candidates += tl.sum((live & (n * 16 < base)).to(tl.int32), 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    tl.store(TOP + r, top)
    everything = tl.exp(sink.to(tl.float64) - top.to(tl.float64))
    least = everything * 0.0
    for first in range(0, blocks, CHUNK):
        n = first + i
        live = (n < blocks) & (n * 16 <= high) & (n * 16 + 16 > low)
        gap = gap_of(tl.load(PEAK + row + n, mask=live, other=0.0), top, live)
        weight = tl.load(WEIGHT + row + n, mask=live, other=0.0).to(tl.float64)
        mass = weight * tl.exp(gap)
        tl.store(SHARE + row + n, mass, mask=n < blocks)
        everything += tl.sum(mass, 0)
        if WIDEN:
            delta = tl.load(DELTA + row + n, mask=live, other=0.0)
            least += tl.sum(least_term(delta, gap, weight), 0)
            nu = tl.load(nu_at + n * 4, mask=live, other=0.0).to(tl.float64)
            tl.store(TERM + row + n, tl.where(n * 16 < base, key_term(vmax.to(tl.float64), delta, gap, nu, weight), 0.0), mask=n < blocks)
    everything = tl.where(everything < 1e-300, 1e-300, everything)
    least = tl.where(least < 1e-300, 1e-300, least)
    for first in range(0, blocks, CHUNK):
        n = first + i
        coded = (n < blocks) & (n * 16 <= high) & (n * 16 + 16 > low) & (n * 16 < base)
        share = tl.load(SHARE + row + n, mask=n < blocks, other=0.0) * (1.0 / everything)
        tl.store(SHARE + row + n, share, mask=n < blocks)
        tl.store(ORDER + row + n, tl.where(coded, share, -1.0).to(tl.float32), mask=n < blocks)
        if WIDEN:
            tl.store(TERM + row + n, tl.load(TERM + row + n, mask=n < blocks, other=0.0) * (1.0 / least), mask=n < blocks)
    # Written by some threads of this program, read by others.
    tl.debug_barrier()
    narrow = candidates
    if COVER >= 0:
        narrow = standing(ORDER, SHARE, row, blocks, COVER, WIDE)
    count = tl.minimum(tl.maximum(narrow, LEAST), MOST)
    if WIDEN:
        wide = tl.minimum(standing(ORDER, TERM, row, blocks, BUDGET, WIDE), MOST_WIDENED)
        tl.store(STATS + r * 3, (wide > count).to(tl.float64))
        count = tl.maximum(count, wide)
    else:
        tl.store(STATS + r * 3, 0.0)
    mark(ORDER, CHOSEN, row, blocks, tl.minimum(count, candidates), WIDE)
    tl.debug_barrier()
    tail = everything * 0.0
    drawn = 0
    count = 0
    if EXPLORE > 0:
        before = drawn_before(tl.load(CLOCK), r // (rows * K), r // rows % K, r % rows)
    for first in range(0, blocks, CHUNK):
        n = first + i
        coded = (n < blocks) & (n * 16 <= high) & (n * 16 + 16 > low) & (n * 16 < base)
        chosen = tl.load(CHOSEN + row + n, mask=n < blocks, other=0) != 0
        kept = coded & (chosen == 0)
        if EXPLORE > 0:
            explored = drawn_of(EXPLORED, row + n, kept, before, n, blocks, EXPLORE)
            drawn += tl.sum(explored.to(tl.int32), 0)
            kept = kept & (explored == 0)
            chosen = chosen | explored
            tl.store(CHOSEN + row + n, chosen.to(tl.int8), mask=n < blocks)
        count = listed(LIST + row, count, first, chosen)
        tail += tl.sum(tl.load(SHARE + row + n, mask=kept, other=0.0), 0)
    tl.store(LISTED + r, count)
    tl.store(STATS + r * 3 + 1, tail)
    tl.store(STATS + r * 3 + 2, drawn)


@triton.jit
def select_blocks(
    PEAK, WEIGHT, DELTA, NOTES, SINKS, AT, CLOCK, ORDER, SHARE, TERM, CHOSEN, EXPLORED, LIST, LISTED, TOP, STATS, blocks,
    LEAST: tl.constexpr, MOST: tl.constexpr, MOST_WIDENED: tl.constexpr, COVER: tl.constexpr, BUDGET: tl.constexpr, WIDEN: tl.constexpr,
    EXPLORE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
):
    """Which blocks of one row's codes are promoted to original keys, as flags; and which others are read to be compared with them.

    As many of the largest as must leave so that the shares of the rest add up to at most COVER, from LEAST to MOST; or, where more
    (WIDEN), so that the rest adds at most BUDGET to the key bound, up to MOST_WIDENED. COVER below zero: all. Nonnegative floats are
    ordered as their bits are: a place in the order is found by bisection, from the sum over what lies below. Budgets are constants,
    since an operand would be float32. EXPLORE: the other blocks whose draw, of 2^32, is below it are read too: EXPLORED, and in CHOSEN
    beside the promoted ones. LIST [rows, N] has all those of CHOSEN in their order, LISTED of them. ORDER (float32), SHARE and TERM
    (float64) are scratch. STATS [rows, 3]: whether widened, the tail's mass, how many are explored. TOP: the largest logit by codes,
    which ``exact_scores`` may raise; what all weights are relative to from here on.
    """
    if blocks <= WIDE:
        select_in_registers(
            PEAK, WEIGHT, DELTA, NOTES, SINKS, AT, CLOCK, CHOSEN, EXPLORED, LIST, LISTED, TOP, STATS, blocks, LEAST, MOST, MOST_WIDENED,
            COVER, BUDGET, WIDEN, EXPLORE, K, G, S, WIDE,
        )
    else:
        select_in_memory(
            PEAK, WEIGHT, DELTA, NOTES, SINKS, AT, CLOCK, ORDER, SHARE, TERM, CHOSEN, EXPLORED, LIST, LISTED, TOP, STATS, blocks, LEAST,
            MOST, MOST_WIDENED, COVER, BUDGET, WIDEN, EXPLORE, K, G, S, CHUNK, WIDE,
        )
