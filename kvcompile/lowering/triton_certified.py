"""The Triton kernels of certified attention; ``certified_device`` puts them together and says what each step needs.

Plain float32 multiply-adds and no tensor cores: a certificate needs products whose rounding is known, with few rows (G = H / K) they
cost what unpacking costs, and a dot product of 16-bit operands would have to be repeated for every limb of what has more bits.

    score       int8 keys once: every row's logits, and of each block sum_c |q_c| radius_c
    sums        of each block the largest logit, the sum of exp relative to it and the deviation; the notes, also of the window's blocks
    exact       original keys of the blocks that some row's flags ask for: their logits over the old ones, and the same sums; what the
                consistency check compares
    mix         (``triton_mix``) int4 values once, with weights from the logits as they stand then; originals where flags ask for them
    choose      (``triton_choose``) which blocks stand first in descending order of an amount until the rest fits a budget
    tally       (``triton_tally``) what a certificate is made of, and which values are promoted
    judge       (``triton_judge``) a row's result and certificate, whether it falls; ``settle``: what it returns then, telemetry

Logits stay in memory between ``score`` and ``mix``: 4 bytes a token and row, an eighth of tier 1 at four rows. In return nothing is
ever subtracted: a correction (exact minus coded) of promoted blocks would cancel, and its rounding would have to be certified as
well. A logit is overwritten where its block is promoted, and the weights of all tokens are made from one maximum, so splits add up.

Blocks are flagged, not listed: programs look at the flags of their blocks and end where none is set, so nobody has to compact anything.
AT, int32 [B, 2 S + 1]: of each batch row the last position that each query sees, the first one, and the first that the window has, all
within the planes. Rows r = g * S + s of a kv head. All block arrays [B, K, rows, N] are contiguous; what nobody sees is never written.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RET505, RUF005 - kernels: operands are pointers and constants in capitals, tuples grow in loops.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.triton_bounds import consistent

BLOCK = tl.constexpr(16)
PART = tl.constexpr(4)
"""Tokens that ``exact`` takes at once: a block of originals in float64 would leave no registers for a second warp."""
LOG2E = tl.constexpr(1.4426950216293335)
LOG2E_REST = tl.constexpr(1.9259629911266175e-08)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-30000.0)


@triton.jit
def exp_of(x):
    """exp of x <= 0 within a few units in the last place, whatever x: the rounding of x * log2 e is given back. NaN stays."""
    x = tl.maximum(x, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    high = x * LOG2E
    rest = tl.fma(x, LOG2E, -high) + x * LOG2E_REST
    return tl.exp2(high) * (1.0 + rest * LN2)


@triton.jit
def sight(AT, S: tl.constexpr, S2: tl.constexpr):
    """The first and the last position that any query of a batch row sees, and the first one that the window has. AT: see the module."""
    s = tl.arange(0, S2)
    last = tl.max(tl.load(AT + s, mask=s < S, other=-1), 0)
    first = tl.min(tl.load(AT + S + s, mask=s < S, other=2147483647), 0)
    return first, last, tl.load(AT + 2 * S)


@triton.jit
def norm_above(square):
    """The root of a float32 sum of squares, not below the exact one: of up to 1024 terms, some of which may have been flushed."""
    return tl.sqrt(square) * (1.0 + 2.0**-14) + 2.0**-57


@triton.jit
def largest_logit(PEAK, EXACT, SINK, wanted, blocks, start, last, base):
    """Of a row whose blocks of codes are taken from EXACT; a sink's included. Nothing is read where there is nothing to do."""
    top = tl.load(SINK)
    if wanted:
        i = tl.arange(0, 512)
        for first in range(0, blocks, 512):
            n = first + i
            exact = (n * BLOCK <= last) & (n * BLOCK + BLOCK > start) & (n * BLOCK < base)
            peak = tl.load(PEAK + n, mask=(n < blocks) & (exact == 0), other=float("-inf"))
            top = tl.maximum(top, tl.max(tl.maximum(peak, tl.load(EXACT + n, mask=(n < blocks) & exact, other=float("-inf"))), 0))
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def largest_square(x):
    """max_t |x_t|^2 of tokens [16, D], float64; what is no number is infinite."""
    square = tl.sum(x * x, 1)
    return tl.max(tl.where(square == square, square, float("inf")), 0)


@triton.jit
def beyond(square, NOTE):
    """Whether a norm, by its float64 square, is above what a note says; also where either is no number."""
    return (tl.sqrt(square) * (1.0 + 2.0**-40) <= tl.load(NOTE).to(tl.float64)) == 0


@triton.jit
def exact(
    Q, CODES, STEPS, ZEROS, ORIGINALS, READ, AT, NOTES, DELTA, OWN, LOGITS, PEAK, WEIGHT, TOP, SIZE, DAMAGED,
    q_b, q_h, q_s, codes_n, codes_b, codes_h, steps_n, steps_b, steps_h, from_n, from_b, from_h, from_t, blocks, page_tokens,
    SCALE: tl.constexpr, GUARD: tl.constexpr, D: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr,
    NB: tl.constexpr,
    PER_PAGE: tl.constexpr, ALL: tl.constexpr,
):
    """NB blocks of one kv head: those that some row's flag READ [B, K, rows, N] asks for (ALL: READ [B, K, rows], all of its blocks)."""
    b = (tl.program_id(1) // K).to(tl.int64)
    h = (tl.program_id(1) % K).to(tl.int64)
    tokens = blocks * BLOCK
    start, last, base = sight(AT + b * (2 * S + 1), S, S2)
    n0 = tl.program_id(0) * NB
    heads = tl.program_id(1).to(tl.int64) * (G * S)
    nb = tl.arange(0, NB)
    pending = (nb * 0).to(tl.int32)
    inside = ((n0 + nb) * BLOCK <= last) & ((n0 + nb) * BLOCK + BLOCK > start) & ((n0 + nb) * BLOCK < base)
    if (n0 * BLOCK <= last) & ((n0 + NB) * BLOCK > start):
        for r in tl.static_range(G * S):
            if ALL:
                asked = tl.load(READ + heads + r).to(tl.int32) + nb * 0
            else:
                asked = tl.load(READ + (heads + r) * blocks + n0 + nb, mask=inside, other=0).to(tl.int32)
            pending = tl.where(inside & (asked != 0), 1, pending)
    j = tl.arange(0, PART)
    c = tl.arange(0, D)[None, :]
    for _turn in range(tl.sum(pending, 0)):
        first = tl.min(tl.where(pending != 0, nb, NB), 0)
        pending = tl.where(nb == first, 0, pending)
        n = n0 + first
        place = tl.program_id(1) * blocks + n
        page, row = (n // PER_PAGE).to(tl.int64), n % PER_PAGE
        size = tl.zeros([], tl.float64)
        away = tl.zeros([], tl.float64)
        parts = ()
        for part in tl.static_range(BLOCK // PART):
            t = n * BLOCK + part * PART + j
            coded = t < base
            own = (coded & (t >= start) & (t <= last))[:, None]
            here = ORIGINALS + (t // page_tokens).to(tl.int64)[:, None] * from_n + b * from_b + h * from_h
            k = tl.load(here + (t % page_tokens)[:, None] * from_t + c, mask=coded[:, None], other=0.0).to(tl.float32)
            k64 = tl.where(own, k, 0.0).to(tl.float64)
            size = tl.maximum(size, largest_square(k64))
            if not ALL:
                at = page * codes_n + b * codes_b + h * codes_h + row * (BLOCK * D) + (j + part * PART)[:, None] * D + c
                per_block = page * steps_n + b * steps_b + h * steps_h + row * D + c
                decoded = tl.load(CODES + at).to(tl.float32) * tl.load(STEPS + per_block) + tl.load(ZEROS + per_block)
                away = tl.maximum(away, largest_square(k64 - tl.where(own, decoded, 0.0).to(tl.float64)))
            parts = parts + (k,)
        if ALL:
            tl.store(SIZE + place, size)
        else:
            if beyond(away, NOTES + place * 4) | beyond(size, NOTES + place * 4 + 1):
                tl.store(DAMAGED + tl.program_id(1), 1)
        for r in tl.static_range(G * S):
            if ALL:
                flag = tl.load(READ + heads + r) != 0
            else:
                flag = tl.load(READ + (heads + r) * blocks + n) != 0
            if flag:
                q = tl.load(Q + b * q_b + (h * G + r // S) * q_h + (r % S) * q_s + c).to(tl.float32)
                high = tl.load(AT + b * (2 * S + 1) + r % S)
                low = tl.load(AT + b * (2 * S + 1) + S + r % S)
                logits = ()
                peak = tl.full([], float("-inf"), tl.float32)
                moved = tl.zeros([], tl.float32)
                for part in tl.static_range(BLOCK // PART):
                    t = n * BLOCK + part * PART + j
                    coded = t < base
                    old = tl.load(LOGITS + (heads + r) * tokens + t)
                    seen = (t >= low) & (t <= high)
                    found = tl.sum(parts[part] * q, 1) * SCALE
                    new = tl.where(seen, tl.where(coded, found, old), float("-inf"))
                    apart = tl.abs(found - old)
                    apart = tl.where(seen & coded, tl.where(apart == apart, apart, float("inf")), 0.0)
                    moved = tl.maximum(moved, tl.max(apart, 0))
                    peak = tl.maximum(peak, tl.max(new, 0))
                    logits = logits + (new,)
                # Whoever reads a logit here has read it before any is written: the barriers of the sums are not enough.
                tl.debug_barrier()
                top = tl.where(peak == float("-inf"), 0.0, peak)
                weight = tl.zeros([], tl.float32)
                for part in tl.static_range(BLOCK // PART):
                    tl.store(LOGITS + (heads + r) * tokens + n * BLOCK + part * PART + j, logits[part])
                    weight += tl.sum(exp_of(logits[part] - top), 0)
                at_block = (heads + r) * blocks + n
                tl.store(PEAK + at_block, peak)
                tl.store(WEIGHT + at_block, weight)
                if not ALL:
                    most = consistent(tl.load(DELTA + at_block), GUARD, tl.load(OWN + at_block))
                    if (moved.to(tl.float64) <= most) == 0:
                        tl.store(DAMAGED + tl.program_id(1), 1)
                    # Exact logits may be above all those by codes; whoever comes first, the largest stays.
                    if peak > tl.load(TOP + heads + r):
                        tl.atomic_max(TOP + heads + r, peak)
