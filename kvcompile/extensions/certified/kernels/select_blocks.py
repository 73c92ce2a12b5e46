"""Promotion of keys without a sort, and of values by the local rule, for certified attention: see ``certified``.

    select_blocks  one row: the blocks that it promotes, as flags and as a list
    unite_blocks   after it, if the query heads of a kv head share one selection: one row's flags and list of their union
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RUF005 - kernels: operands are pointers and constants in capitals, tuples grow in loops.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.extensions.certified import promotion
from kvcompile.extensions.certified.kernels.bounds import key_term
from kvcompile.extensions.certified.kernels.certified import LOWEST, exp_of
from kvcompile.extensions.certified.kernels.top_k import bits_of, leading, led

LARGEST_DELTA = tl.constexpr(promotion.LARGEST_DELTA)


@triton.jit
def gap_of(peak, top, live):
    """Return a block's largest logit minus the head's largest, ``top``, float64, at least -1e4, the exp of which is zero.

    It is -1e4 for blocks that are not ``live``.
    """
    apart = peak.to(tl.float64) - top.to(tl.float64)
    return tl.where(live, tl.where(apart < -1e4, -1e4, apart), -1e4)


@triton.jit
def in_fours(blocks):
    """Return ``blocks``, which is always a multiple of four, in a form that shows this to the compiler.

    The compiler then loads four float32 with one instruction.
    """
    return blocks // 4 * 4


@triton.jit
def drawn_before(clock, b, k, q):
    """Return the hash of a row: the low 32 bits of ``certified.promotion.chance`` before its block's index is mixed in.

    ``clock``: the step's number; b, k, q: batch row, kv head, and row of that head.
    """
    x = clock.to(tl.int64).to(tl.uint32) * 0x27D4EB2F
    x = mixed_with(x, b)
    x = mixed_with(x, k)
    return mixed_with(x, q)


@triton.jit
def mixed_with(x, place):
    """Return the 32-bit hash ``x`` with the index ``place`` mixed in."""
    x = (x ^ (place + 1).to(tl.uint32)) * 0x9E3779B1
    return x ^ (x >> 15)


@triton.jit
def draw(before, n):
    """Return the random number of block n at this step, int64 in [0, 2^32): 2^32 times ``promotion.chance`` of the block.

    ``before``: the row's hash from ``drawn_before``.
    """
    x = mixed_with(before, n)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x046CA68B
    return (x ^ (x >> 16)).to(tl.int64)


@triton.jit
def drawn_of(EXPLORED, place, kept, before, n, blocks, EXPLORE: tl.constexpr):
    """Return which of the ``kept`` blocks are drawn at random to be checked against originals; also write these flags to EXPLORED.

    ``place``: the indices of blocks ``n`` in EXPLORED; ``before``: the row's hash from ``drawn_before``; a block is drawn if its number of
    2^32 is below EXPLORE.
    """
    explored = kept & (draw(before, n) < EXPLORE)
    tl.store(EXPLORED + place, explored.to(tl.int8), mask=n < blocks)
    return explored


@triton.jit
def listed(LIST, before, first, chosen):
    """Write the indices of the ``chosen`` blocks, which begin at block ``first``, to LIST behind ``before`` entries; return its new length.

    Runs of RUN blocks are summed first, each within a warp: one sum over all would pass through all warps run by run.
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
def mass_of(peak, weight, top, live):
    """Return each block's softmax mass relative to the logit ``top``, weight * exp(peak - top), float32; zero for hidden blocks."""
    return tl.where(live, weight, 0.0) * exp_of(tl.where(live, peak - top, LOWEST))


@triton.jit
def one_over(total):
    """Return 1 / ``total`` of a float64 sum as float32; at most 1e30, so that a sum near zero gives no Inf."""
    return (1.0 / tl.where(total < 1e-30, 1e-30, total)).to(tl.float32)


@triton.jit
def raised_by(delta):
    """Return exp(``delta``) rounded up, float32; ``delta`` is limited to LARGEST_DELTA."""
    return tl.exp(tl.where(delta > LARGEST_DELTA, LARGEST_DELTA, delta)) * (1.0 + 2.0**-18)


@triton.jit
def share_at_most(mass, raised, delta, of_least, coded):
    """Return an upper bound on each encoded block's share of the exact mass, float32; 1 if ``delta`` is too large for a bound.

    ``mass``: the block's mass by codes. ``delta``: the largest deviation of its logits. ``raised``: exp(delta), rounded up. ``of_least``: 1
    over the least exact mass of all blocks. Zero for blocks that are not ``coded``; NaN stays NaN.
    """
    share = mass * raised * of_least
    return tl.where(coded, tl.where((share > 1.0) | (delta > LARGEST_DELTA), 1.0, share), 0.0)


@triton.jit
def flag_explored(VALUES, place, n, blocks, explored):
    """Set flags in VALUES, at ``place``, for the blocks ``n`` where the mask ``explored`` is true; other flags stay.

    No barrier is needed: a thread reads only flags that it has written.
    """
    flagged = (tl.load(VALUES + place, mask=n < blocks, other=0) != 0) | explored
    tl.store(VALUES + place, flagged.to(tl.int8), mask=n < blocks)


@triton.jit
def shares_of_row(
    PEAK, WEIGHT, DELTA, NOTES, TOP, ORDER, SURE, TERM, VALUES, blocks, high, low, base, sink, V_TOL: tl.constexpr, WIDEN: tl.constexpr,
    CERTAIN: tl.constexpr, CHUNK: tl.constexpr,
):
    """Write ORDER, VALUES, TOP and, if needed, SURE and TERM of one row, from PEAK, WEIGHT, DELTA and NOTES of its blocks.

    Returns the number of candidates (encoded blocks that the row sees) and the bits of a float32, as int32, just above every ORDER.

    ORDER: each candidate's share of the mass by codes, infinite for NaN; -1 for other blocks. VALUES: flags of blocks that may add more
    than V_TOL to the value bound. TOP: the largest logit, the ``sink`` included; 0 if all are minus infinity. SURE (if CERTAIN): upper
    bounds on exact shares. TERM (if WIDEN): each block's term of the key bound. ``high``, ``low``, ``base``: the last visible position, the
    first one, and that of the window's first token. The pointers are to the row's own entries.
    """
    i = tl.arange(0, CHUNK)
    tops = tl.full([CHUNK], float("-inf"), tl.float32)
    sizes = tl.zeros([CHUNK], tl.float32)
    candidates = tl.zeros([CHUNK], tl.int32)
    for first in range(0, blocks, CHUNK):
        n = first + i
        live = (n < blocks) & (n * 16 <= high) & (n * 16 + 16 > low)
        tops = tl.maximum(tops, tl.load(PEAK + n, mask=live, other=float("-inf")))
        candidates += (live & (n * 16 < base)).to(tl.int32)
        if WIDEN:
            sizes = tl.maximum(sizes, tl.load(NOTES + n * 4 + 3, mask=live, other=0.0))
    top = tl.maximum(sink, tl.max(tops, 0))
    top = tl.where(top == float("-inf"), 0.0, top)
    tl.store(TOP, top)
    vmax = tl.max(sizes, 0).to(tl.float64)
    masses = tl.zeros([CHUNK], tl.float64)
    least = tl.zeros([CHUNK], tl.float64)
    for first in range(0, blocks, CHUNK):
        n = first + i
        live = (n < blocks) & (n * 16 <= high) & (n * 16 + 16 > low)
        peak = tl.load(PEAK + n, mask=live, other=float("-inf"))
        mass = mass_of(peak, tl.load(WEIGHT + n, mask=live, other=0.0), top, live)
        masses += mass.to(tl.float64)
        least += (mass / raised_by(tl.load(DELTA + n, mask=live, other=0.0))).to(tl.float64)
    sink_mass = exp_of(sink - top).to(tl.float64)
    of_all = one_over(tl.sum(masses, 0) + sink_mass)
    of_least = one_over(tl.sum(least, 0) + sink_mass * (1.0 - 2.0**-20))
    largest = tl.zeros([CHUNK], tl.int32)
    for first in range(0, blocks, CHUNK):
        n = first + i
        live = (n < blocks) & (n * 16 <= high) & (n * 16 + 16 > low)
        coded = live & (n * 16 < base)
        peak = tl.load(PEAK + n, mask=live, other=float("-inf"))
        weight = tl.load(WEIGHT + n, mask=live, other=0.0)
        delta = tl.load(DELTA + n, mask=live, other=0.0)
        mass = mass_of(peak, weight, top, live)
        share = mass * of_all
        # NaN becomes infinity and comes first.
        share = tl.where(coded, tl.where(share == share, share, float("inf")), -1.0)
        tl.store(ORDER + n, share, mask=n < blocks)
        largest = tl.maximum(largest, share.to(tl.int32, bitcast=True))
        most = share_at_most(mass, raised_by(delta), delta, of_least, coded)
        if CERTAIN:
            tl.store(SURE + n, most, mask=n < blocks)
        eta = tl.load(NOTES + n * 4 + 2, mask=coded, other=0.0)
        values = coded & ((most.to(tl.float64) * eta.to(tl.float64) <= V_TOL) == 0)
        tl.store(VALUES + n, values.to(tl.int8), mask=n < blocks)
        if WIDEN:
            nu = tl.load(NOTES + n * 4 + 3, mask=live, other=0.0).to(tl.float64)
            term = key_term(vmax, delta.to(tl.float64), gap_of(peak, top, live), nu, weight.to(tl.float64))
            tl.store(TERM + n, tl.where(coded, term * of_least.to(tl.float64), 0.0), mask=n < blocks)
    return tl.sum(candidates, 0), tl.minimum(tl.max(largest, 0), 2147483646) + 1


@triton.jit
def drawn_and_listed(
    chosen, coded, ORDER, READ, EXPLORED, VALUES, LIST, n, blocks, first, count, before, tail, drawn, EXPLORE: tl.constexpr,
):
    """Draw the explored blocks of one chunk of a row besides the ``chosen`` ones; write READ, EXPLORED and VALUES, and append to LIST.

    READ flags the chosen and the explored blocks, which VALUES gains too; without EXPLORE only READ and LIST are written. Returns the
    list's length, the tail's mass and the number of explored blocks, each with this chunk added.

    ``chosen``, ``coded``: the chunk's promoted and encoded blocks ``n``, which begin at block ``first``. ``count``, ``tail``, ``drawn``:
    the results of earlier chunks. ``before``: the row's hash (``drawn_before``). ORDER: shares of mass, which add up to the tail.
    """
    kept = coded & (chosen == 0)
    if EXPLORE > 0:
        explored = drawn_of(EXPLORED, n, kept, before, n, blocks, EXPLORE)
        drawn += tl.sum(explored.to(tl.int32), 0)
        kept = kept & (explored == 0)
        chosen = chosen | explored
        flag_explored(VALUES, n, n, blocks, explored)
    tl.store(READ + n, chosen.to(tl.int8), mask=n < blocks)
    count = listed(LIST, count, first, chosen)
    tail += tl.load(ORDER + n, mask=kept, other=0.0).to(tl.float64)
    return count, tail, drawn


@triton.jit
def unite_blocks(
    ORDER, CHOSEN, READ, EXPLORED, VALUES, LIST, LISTED, STATS, AT, CLOCK, blocks,
    EXPLORE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr,
):
    """Write READ, the flags of the blocks that one row reads: those CHOSEN by any query head of its kv head, and the explored ones.

    A row is one query of one query head; CHOSEN of the same query is united. Explored blocks are drawn at random from the rest, by CLOCK,
    the step's number. Also written: LIST and LISTED, the indices of the flagged blocks and their number; STATS[1] and [2], the sum of ORDER
    over the encoded blocks not read and the number of explored ones; unless EXPLORE is 0, EXPLORED, and VALUES, which gains the explored
    ones.
    """
    r = tl.program_id(0)
    rows: tl.constexpr = G * S
    at = AT + r // (rows * K) * (2 * S + 1)
    high = tl.load(at + r % S)
    low = tl.load(at + S + r % S)
    base = tl.load(at + 2 * S)
    before = drawn_before(tl.load(CLOCK), r // (rows * K), r // rows % K, r % rows)
    blocks = in_fours(blocks)
    row = r.to(tl.int64) * blocks
    same = (r // rows * rows + r % S).to(tl.int64) * blocks
    i = tl.arange(0, CHUNK)
    tail = tl.zeros([CHUNK], tl.float64)
    count = 0
    drawn = 0
    for first in range(0, blocks, CHUNK):
        n = first + i
        coded = (n < blocks) & (n * 16 <= high) & (n * 16 + 16 > low) & (n * 16 < base)
        chosen = n < 0
        for g in tl.static_range(G):
            chosen = chosen | (tl.load(CHOSEN + same + g * S * blocks + n, mask=n < blocks, other=0) != 0)
        count, tail, drawn = drawn_and_listed(
            chosen & coded, coded, ORDER + row, READ + row, EXPLORED + row, VALUES + row, LIST + row, n, blocks, first, count, before, tail,
            drawn, EXPLORE,
        )
    tl.store(LISTED + r, count)
    tl.store(STATS + r * 3 + 1, tl.sum(tail, 0))
    tl.store(STATS + r * 3 + 2, drawn)


@triton.jit
def select_blocks(
    PEAK, WEIGHT, DELTA, NOTES, SINKS, AT, CLOCK, ORDER, SURE, TERM, CHOSEN, EXPLORED, VALUES, LIST, LISTED, TOP, STATS, blocks,
    LEAST: tl.constexpr, MOST: tl.constexpr, MOST_WIDENED: tl.constexpr, COVER: tl.constexpr, BUDGET: tl.constexpr, V_TOL: tl.constexpr,
    CERTAIN: tl.constexpr, WIDEN: tl.constexpr, EXPLORE: tl.constexpr, KEEP: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    S: tl.constexpr, CHUNK: tl.constexpr,
):
    """Choose the blocks of one row that are promoted to original keys, the others that are read to be checked, and the promoted values.

    Written, one row each: CHOSEN, VALUES and EXPLORED [rows, N], flags; LIST [rows, N], the LISTED blocks of CHOSEN in their order; STATS
    [rows, 3]: whether widened, the tail's mass, the number of explored blocks; TOP: the largest logit by codes, which ``exact_scores`` may
    raise and to which all later weights are relative. With KEEP, the list and the draw are left to ``unite_blocks``, which also uses the
    shares in ORDER. ORDER and SURE (float32) and TERM (float64) are scratch.

    Keys: the least number of largest shares, from LEAST to MOST, such that the shares of the rest sum to at most COVER. More, up to
    MOST_WIDENED, if that makes the rest at most COVER of the exact mass too (CERTAIN), and so that the rest adds at most BUDGET to the key
    bound (WIDEN). COVER below zero: all. EXPLORE: other blocks whose draw, of 2^32, is below it are read too; they are flagged in EXPLORED,
    and in CHOSEN like promoted ones. VALUES: blocks that may add more than V_TOL to the value bound, and explored ones.

    A row of any length is read in chunks of CHUNK blocks: the cost of a step must not jump when a cache has room for one more page. Budgets
    are constants, since an operand would be float32. Shares only order the blocks, so they are float32: one multiprocessor's first cache
    then holds a long row.
    """
    r = tl.program_id(0)
    rows: tl.constexpr = G * S
    at = AT + r // (rows * K) * (2 * S + 1)
    high = tl.load(at + r % S)
    low = tl.load(at + S + r % S)
    base = tl.load(at + 2 * S)
    blocks = in_fours(blocks)
    row = r.to(tl.int64) * blocks
    candidates, top = shares_of_row(
        PEAK + row, WEIGHT + row, DELTA + row, NOTES + (r // rows) * blocks * 4, TOP + r, ORDER + row, SURE + row, TERM + row, VALUES + row,
        blocks, high, low, base, tl.load(SINKS + r), V_TOL, WIDEN, CERTAIN, CHUNK,
    )
    # Written by some threads of this program, read by others.
    tl.debug_barrier()
    edge, ties, tied, widened = leading(
        ORDER + row, SURE + row, TERM + row, blocks, candidates, top, COVER, LEAST, MOST, BUDGET, MOST_WIDENED, CERTAIN, WIDEN, CHUNK
    )
    tl.store(STATS + r * 3, widened.to(tl.float64))
    before = tl.zeros([], tl.uint32)
    if EXPLORE > 0:
        before = drawn_before(tl.load(CLOCK), r // (rows * K), r // rows % K, r % rows)
    i = tl.arange(0, CHUNK)
    tail = tl.zeros([CHUNK], tl.float64)
    count = 0
    drawn = 0
    for first in range(0, blocks, CHUNK):
        n = first + i
        bits = bits_of(ORDER + row, n, blocks)
        chosen, ties = led(bits, edge, ties, tied)
        if KEEP:
            tl.store(CHOSEN + row + n, chosen.to(tl.int8), mask=n < blocks)
        else:
            count, tail, drawn = drawn_and_listed(
                chosen, bits >= 0, ORDER + row, CHOSEN + row, EXPLORED + row, VALUES + row, LIST + row, n, blocks, first, count, before,
                tail, drawn, EXPLORE,
            )
    if KEEP == 0:
        tl.store(LISTED + r, count)
        tl.store(STATS + r * 3 + 1, tl.sum(tail, 0))
        tl.store(STATS + r * 3 + 2, drawn)
