"""The pass of certified attention over original keys: see ``triton_certified``.

    exact       one block of one row's list: what the consistency check compares, exact logits over the old ones, the same sums of those
    exact_rows  all blocks of the rows that fall, which are few or none: every program looks for them and takes its share of their blocks

What takes time is latency: a program has one block, and loads all of it before it uses any. Two rows that promote the same block both
check it, the second out of the cache.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.triton_bounds import consistent
from kvcompile.lowering.triton_certified import BLOCK, exp_of, norm_above, sight
from kvcompile.lowering.triton_stage import SET, rows_of_slot

PART = tl.constexpr(4)
"""Tokens of a block that ``exact`` takes at once: a quarter of the registers are twice the warps."""

FLAGS = tl.constexpr(128)
"""Rows that ``exact_rows`` looks at at once."""


@triton.jit
def largest_square(x):
    """max_t |x_t|^2 of tokens [16, D], float64; what is no number is infinite."""
    square = tl.sum(x * x, 1)
    return tl.max(tl.where(square == square, square, float("inf")), 0)


@triton.jit
def above(square, note):
    """Whether a norm, by its float64 square, is above what a note says, whose square is exact; also where either is no number."""
    note = note.to(tl.float64)
    return (square * (1.0 + 2.0**-39) <= note * note) == 0


@triton.jit
def put(LOGITS, PEAK, WEIGHT, found, old, seen, coded):
    """A block's exact logits in place of the old ones, and their sums; the largest of them."""
    new = tl.where(seen, tl.where(coded, found, old), float("-inf"))
    peak = tl.max(new, 0)
    weight = tl.sum(exp_of(new - tl.where(peak == float("-inf"), 0.0, peak)), 0)
    # Whoever reads a logit here has read it before any is written: the barriers of the sums are not enough.
    tl.debug_barrier()
    tl.store(LOGITS + tl.arange(0, BLOCK), new)
    tl.store(PEAK, peak)
    tl.store(WEIGHT, weight)
    return peak


@triton.jit
def summed(logits, PEAK, WEIGHT):
    """The sums of a block's exact logits; the largest of them."""
    peak = tl.max(logits, 0)
    tl.store(PEAK, peak)
    tl.store(WEIGHT, tl.sum(exp_of(logits - tl.where(peak == float("-inf"), 0.0, peak)), 0))
    return peak


@triton.jit
def doubtful(square, note):
    """Which tokens' norms may be above what a note says, by their float32 squares: what is above, close to it or no number."""
    return (norm_above(square) <= note) == 0


@triton.jit
def exact(
    Q, CODES, STEPS, ZEROS, ORIGINALS, LIST, LISTED, AT, NOTES, DELTA, OWN, LOGITS, PEAK, WEIGHT, TOP, DAMAGED,
    SCRATCH, FOUND_AT, q_b, q_h, q_s, codes_n, codes_b, codes_h, steps_n, steps_b, steps_h, from_n, from_b, from_h, from_t, scratch_n,
    scratch_b, scratch_h, blocks,
    SCALE: tl.constexpr, GUARD: tl.constexpr, D: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr,
    PER_PAGE: tl.constexpr, SLOTS: tl.constexpr,
):
    """One block at a time of a row's LIST [rows, N], of which the first LISTED [rows] are meant.

    SLOTS: those that ``stage`` has found in the SCRATCH, or put there, are read from there.
    Norms are compared in float64, but only of tokens for which float32 does not settle it: mostly the two that made the notes.
    """
    r = tl.program_id(1)
    pair = r // (G * S)
    b = (pair // K).to(tl.int64)
    h = (pair % K).to(tl.int64)
    blocks_at = r.to(tl.int64) * blocks
    listed = tl.load(LISTED + r)
    # Read before it is known to be meant, which it need not be.
    n = tl.load(LIST + blocks_at + tl.program_id(0))
    at = AT + b * (2 * S + 1)
    start, last, base = sight(at, S, S2)
    high = tl.load(at + r % S)
    low = tl.load(at + S + r % S)
    top = tl.load(TOP + r)
    c = tl.arange(0, D)
    q = tl.load(Q + b * q_b + (h * G + r % (G * S) // S) * q_h + (r % S) * q_s + c[None, :]).to(tl.float32)
    for entry in range(tl.program_id(0), listed, tl.num_programs(0)):
        page, row = (n // PER_PAGE).to(tl.int64), n % PER_PAGE
        first = n * BLOCK
        originals = ORIGINALS + page * from_n + b * from_b + h * from_h + row * BLOCK * from_t
        apart_t = from_t
        if SLOTS > 0:
            slot = tl.load(FOUND_AT + pair.to(tl.int64) * blocks + n)
            held = SCRATCH + b * scratch_b + h * scratch_h
            held = rows_of_slot(held, n // SET, tl.maximum(slot, 0), scratch_n, D, SLOTS, PER_PAGE)
            originals = tl.where(slot >= 0, held, originals)
            apart_t = tl.where(slot >= 0, D, from_t)
        codes = CODES + page * codes_n + b * codes_b + h * codes_h + row * (BLOCK * D)
        scales = page * steps_n + b * steps_b + h * steps_h + row * D
        step = tl.load(STEPS + scales + c[None, :])
        zero = tl.load(ZEROS + scales + c[None, :])
        place = blocks_at + n
        note = NOTES + (pair.to(tl.int64) * blocks + n) * 4
        kappa = tl.load(note)
        mu = tl.load(note + 1)
        delta = tl.load(DELTA + place)
        rounded = tl.load(OWN + place)
        following = entry + tl.num_programs(0)
        n = tl.load(LIST + blocks_at + following, mask=following < listed, other=0)
        moved = tl.zeros([], tl.float32)
        damaged = listed < 0
        for part in range(BLOCK // PART):
            i = part * PART + tl.arange(0, PART)
            t = first + i
            coded = t < base
            k = tl.load(originals + i[:, None] * apart_t + c[None, :], mask=coded[:, None], other=0.0).to(tl.float32)
            old = tl.load(LOGITS + place * BLOCK + i)
            # Loaded last: all that is calculated then has their layout, in which fewer threads share a token.
            decoded = tl.load(codes + i[:, None] * D + c[None, :]).to(tl.float32) * step + zero
            found = tl.sum(k * q, 1) * SCALE
            away = k - decoded
            # What no query sees need not be what was encoded.
            doubts = coded & (t >= start) & (t <= last) & (doubtful(tl.sum(k * k, 1), mu) | doubtful(tl.sum(away * away, 1), kappa))
            seen = (t >= low) & (t <= high)
            apart = tl.abs(found - old)
            moved = tl.maximum(moved, tl.max(tl.where(seen & coded, tl.where(apart == apart, apart, float("inf")), 0.0), 0))
            # Whoever reads a logit here has read it before any is written: the barriers of the sums are not enough.
            tl.debug_barrier()
            tl.store(LOGITS + place * BLOCK + i, tl.where(seen, tl.where(coded, found, old), float("-inf")))
            pending = doubts.to(tl.int32)
            for _turn in range(tl.sum(pending, 0)):
                which = tl.min(tl.where(pending != 0, i, BLOCK), 0)
                pending = tl.where(i == which, 0, pending)
                k64 = tl.load(originals + which * apart_t + c).to(tl.float64)
                one = tl.load(codes + which * D + c).to(tl.float32) * tl.load(STEPS + scales + c) + tl.load(ZEROS + scales + c)
                away64 = k64 - one.to(tl.float64)
                damaged = damaged | above(tl.sum(k64 * k64, 0), mu) | above(tl.sum(away64 * away64, 0), kappa)
        # Written by some threads of this program, read by others.
        tl.debug_barrier()
        peak = summed(tl.load(LOGITS + place * BLOCK + tl.arange(0, BLOCK)), PEAK + place, WEIGHT + place)
        # Exact logits may be above all those by codes; whoever comes first, the largest stays.
        if peak > top:
            tl.atomic_max(TOP + r, peak, sem="relaxed")
        if damaged | ((moved.to(tl.float64) <= consistent(delta, GUARD, rounded)) == 0):
            tl.store(DAMAGED + pair, 1)


@triton.jit
def exact_rows(
    Q, ORIGINALS, FALLS, AT, LOGITS, PEAK, WEIGHT, SIZE, q_b, q_h, q_s, from_n, from_b, from_h, from_t, rows, blocks,
    SCALE: tl.constexpr, D: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr,
    PER_PAGE: tl.constexpr,
):
    """Every num_programs-th block of each row that FALLS, and the largest norm in it: several rows of a kv head write the same."""
    flag = tl.arange(0, FLAGS)
    j = tl.arange(0, BLOCK)
    c = tl.arange(0, D)[None, :]
    for first in range(0, rows, FLAGS):
        pending = (tl.load(FALLS + first + flag, mask=first + flag < rows, other=0) != 0).to(tl.int32)
        for _turn in range(tl.sum(pending, 0)):
            which = tl.min(tl.where(pending != 0, flag, FLAGS), 0)
            pending = tl.where(flag == which, 0, pending)
            r = first + which
            pair = r // (G * S)
            b = (pair // K).to(tl.int64)
            h = (pair % K).to(tl.int64)
            at = AT + b * (2 * S + 1)
            start, last, base = sight(at, S, S2)
            high = tl.load(at + r % S)
            low = tl.load(at + S + r % S)
            q = tl.load(Q + b * q_b + (h * G + r % (G * S) // S) * q_h + (r % S) * q_s + c).to(tl.float32)
            # All that any query of the batch row sees: who adds up a row's blocks need not ask which of them are its own.
            n_stop = (tl.minimum(last + 1, base) + BLOCK - 1) // BLOCK
            n_first = start // BLOCK + tl.program_id(0)
            for ahead in range(0, tl.maximum(n_stop - n_first, 0), tl.num_programs(0)):
                n = n_first + ahead
                t = n * BLOCK + j
                coded = t < base
                here = ORIGINALS + (n // PER_PAGE).to(tl.int64) * from_n + b * from_b + h * from_h + (n % PER_PAGE * BLOCK + j) * from_t
                k = tl.load(here[:, None] + c, mask=coded[:, None], other=0.0).to(tl.float32)
                place = r.to(tl.int64) * blocks + n
                old = tl.load(LOGITS + place * BLOCK + j)
                own = (coded & (t >= start) & (t <= last))[:, None]
                tl.store(SIZE + pair.to(tl.int64) * blocks + n, largest_square(tl.where(own, k, 0.0).to(tl.float64)))
                found = tl.sum(k * q, 1) * SCALE
                put(LOGITS + place * BLOCK, PEAK + place, WEIGHT + place, found, old, (t >= low) & (t <= high), coded)
