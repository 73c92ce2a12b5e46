"""The values' pass of certified attention: see ``triton_certified``."""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RUF005 - kernels: operands are pointers and constants in capitals, tuples grow in loops.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.triton_certified import BLOCK, beyond, exp_of, largest_logit, sight

TURNS = tl.constexpr(4)
"""Turns in which ``mix`` takes a block of codes: as many roundings of each sum. Fewer tokens a turn need fewer registers."""


@triton.jit
def largest_run_square(low, high):
    """``largest_square`` of tokens in two halves, [16, runs, channels of a run] each."""
    low = low.to(tl.float64)
    high = high.to(tl.float64)
    square = tl.sum(tl.sum(low * low + high * high, 2), 1)
    return tl.max(tl.where(square == square, square, float("inf")), 0)


@triton.jit
def mix_codes(
    CODES, STEPS, ZEROS, LOGITS, TOP, READ, OUT, codes_n, steps_n, blocks, start, stop, n_first, n_stop, heads, r0,
    DV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
):
    """Blocks of codes from n_first on, but for those that are flagged, in TURNS.

    Sums stay apart for a turn's tokens until the end, so that a turn is multiply-adds alone.
    """
    PART: tl.constexpr = BLOCK // TURNS
    HALF: tl.constexpr = DV // 2
    RUNS: tl.constexpr = HALF // GROUP
    lane = tl.arange(0, PART)[:, None, None]
    run = tl.arange(0, RUNS)[None, :, None]
    c = tl.arange(0, GROUP)[None, None, :]
    low_sums = ()
    high_sums = ()
    for _i in tl.static_range(TILE):
        low_sums = low_sums + (tl.zeros([PART, RUNS, GROUP], tl.float32),)
        high_sums = high_sums + (tl.zeros([PART, RUNS, GROUP], tl.float32),)
    for step in tl.range(0, tl.maximum(n_stop - n_first, 0), num_stages=2):
        n = n_first + step
        page = (n * BLOCK // PAGE).to(tl.int64)
        for turn in tl.static_range(TURNS):
            t = n * BLOCK + turn * PART + lane
            seen = (t >= start) & (t < stop)
            in_page = t % PAGE
            weights = ()
            for i in tl.static_range(TILE):
                r = heads + tl.minimum(r0 + i, ROWS - 1)
                taken = tl.load(READ + r * blocks + n)
                logit = tl.load(LOGITS + r * blocks * BLOCK + t, mask=seen & (taken == 0), other=float("-inf"))
                weights = weights + (exp_of(logit - tl.load(TOP + r)),)
            scale_at = page * steps_n + in_page * (2 * RUNS) + run
            low_step = tl.load(STEPS + scale_at, mask=seen, other=0.0).to(tl.float32)
            low_zero = tl.load(ZEROS + scale_at, mask=seen, other=0.0).to(tl.float32)
            high_step = tl.load(STEPS + scale_at + RUNS, mask=seen, other=0.0).to(tl.float32)
            high_zero = tl.load(ZEROS + scale_at + RUNS, mask=seen, other=0.0).to(tl.float32)
            # Loaded last, for the same reason as keys.
            words = tl.load(CODES + page * codes_n + in_page * HALF + (run * GROUP + c), mask=seen, other=0)
            low_v = (words & 15).to(tl.float32) * low_step + low_zero
            high_v = (words >> 4).to(tl.float32) * high_step + high_zero
            new_low = ()
            new_high = ()
            for i in tl.static_range(TILE):
                new_low = new_low + (low_sums[i] + low_v * weights[i],)
                new_high = new_high + (high_sums[i] + high_v * weights[i],)
            low_sums = new_low
            high_sums = new_high
    to = tl.arange(0, RUNS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    for i in tl.static_range(TILE):
        if r0 + i < ROWS:
            tl.store(OUT + (r0 + i) * DV + to, tl.sum(low_sums[i], 0))
            tl.store(OUT + (r0 + i) * DV + HALF + to, tl.sum(high_sums[i], 0))


@triton.jit
def mix_exact(
    CODES, STEPS, ZEROS, ORIGINALS, RECENT_V, LOGITS, TOP, READ, PEAK, EXACT, SINKS, OUT, NOTES, SIZE, DAMAGED, codes_n, steps_n, from_n,
    from_t, rv_t, blocks, page_tokens, newest, start, last, base, n_first, n_stop, heads, r0, window,
    DV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, NEWEST: tl.constexpr, PAGE: tl.constexpr,
    ALL: tl.constexpr,
):
    """Flagged blocks from n_first on by their original values (ALL: every block, of rows that are flagged); ``window``: the newest."""
    HALF: tl.constexpr = DV // 2
    RUNS: tl.constexpr = HALF // GROUP
    j = tl.arange(0, BLOCK)[:, None, None]
    run = tl.arange(0, RUNS)[None, :, None]
    c = run * GROUP + tl.arange(0, GROUP)[None, None, :]
    sixteen = tl.arange(0, 16)
    low_sums = ()
    high_sums = ()
    tops = ()
    for i in tl.static_range(TILE):
        low_sums = low_sums + (tl.zeros([RUNS, GROUP], tl.float32),)
        high_sums = high_sums + (tl.zeros([RUNS, GROUP], tl.float32),)
        r = heads + tl.minimum(r0 + i, ROWS - 1)
        if ALL:
            wanted = (n_stop > n_first) | window
            tops = tops + (largest_logit(PEAK + r * blocks, EXACT + r * blocks, SINKS + r, wanted, blocks, start, last, base),)
        else:
            tops = tops + (tl.load(TOP + r),)
    for first in range(n_first, n_stop, 16):
        pending = (first + sixteen < n_stop).to(tl.int32)
        if not ALL:
            asked = pending * 0
            for i in tl.static_range(TILE):
                r = heads + tl.minimum(r0 + i, ROWS - 1)
                flags = tl.load(READ + r * blocks + first + sixteen, mask=pending != 0, other=0)
                asked = tl.where(flags != 0, 1, asked)
            pending = asked
        for _turn in range(tl.sum(pending, 0)):
            which = tl.min(tl.where(pending != 0, sixteen, 16), 0)
            pending = tl.where(sixteen == which, 0, pending)
            n = first + which
            t = n * BLOCK + j
            seen = (t >= start) & (t <= last) & (t < base)
            weights = ()
            for i in tl.static_range(TILE):
                r = heads + tl.minimum(r0 + i, ROWS - 1)
                if ALL:
                    mine = tl.load(READ + r) != 0
                else:
                    mine = tl.load(READ + r * blocks + n) != 0
                logit = tl.load(LOGITS + r * blocks * BLOCK + t, mask=seen & mine, other=float("-inf"))
                weights = weights + (exp_of(logit - tops[i]),)
            here = ORIGINALS + (t // page_tokens).to(tl.int64) * from_n + (t % page_tokens) * from_t
            low_v = tl.load(here + c, mask=seen, other=0.0).to(tl.float32)
            high_v = tl.load(here + HALF + c, mask=seen, other=0.0).to(tl.float32)
            new_low = ()
            new_high = ()
            for i in tl.static_range(TILE):
                new_low = new_low + (low_sums[i] + tl.sum(low_v * weights[i], 0),)
                new_high = new_high + (high_sums[i] + tl.sum(high_v * weights[i], 0),)
            low_sums = new_low
            high_sums = new_high
            size = largest_run_square(low_v, high_v)
            if ALL:
                tl.store(SIZE + n, size)
            else:
                in_page = t % PAGE
                page = (n * BLOCK // PAGE).to(tl.int64)
                scale_at = page * steps_n + in_page * (2 * RUNS) + run
                low_step = tl.load(STEPS + scale_at, mask=seen, other=0.0).to(tl.float32)
                low_zero = tl.load(ZEROS + scale_at, mask=seen, other=0.0).to(tl.float32)
                high_step = tl.load(STEPS + scale_at + RUNS, mask=seen, other=0.0).to(tl.float32)
                high_zero = tl.load(ZEROS + scale_at + RUNS, mask=seen, other=0.0).to(tl.float32)
                words = tl.load(CODES + page * codes_n + in_page * HALF + c, mask=seen, other=0)
                low_away = low_v.to(tl.float64) - ((words & 15).to(tl.float32) * low_step + low_zero).to(tl.float64)
                high_away = high_v.to(tl.float64) - ((words >> 4).to(tl.float32) * high_step + high_zero).to(tl.float64)
                if beyond(largest_run_square(low_away, high_away), NOTES + n * 4 + 2) | beyond(size, NOTES + n * 4 + 3):
                    tl.store(DAMAGED, 1)
    if window:
        row = tl.arange(0, NEWEST)[:, None, None]
        t = base + row
        seen = (t >= start) & (t <= last) & (row < newest)
        weights = ()
        for i in tl.static_range(TILE):
            r = heads + tl.minimum(r0 + i, ROWS - 1)
            logit = tl.load(LOGITS + r * blocks * BLOCK + t, mask=seen, other=float("-inf"))
            weights = weights + (exp_of(logit - tops[i]),)
        low_v = tl.load(RECENT_V + row * rv_t + c, mask=seen, other=0.0).to(tl.float32)
        high_v = tl.load(RECENT_V + row * rv_t + HALF + c, mask=seen, other=0.0).to(tl.float32)
        new_low = ()
        new_high = ()
        for i in tl.static_range(TILE):
            new_low = new_low + (low_sums[i] + tl.sum(low_v * weights[i], 0),)
            new_high = new_high + (high_sums[i] + tl.sum(high_v * weights[i], 0),)
        low_sums = new_low
        high_sums = new_high
    to = tl.arange(0, RUNS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    for i in tl.static_range(TILE):
        wanted = r0 + i < ROWS
        if ALL:
            # Nobody looks at rows without a flag.
            wanted = wanted & (tl.load(READ + heads + tl.minimum(r0 + i, ROWS - 1)) != 0)
        if wanted:
            tl.store(OUT + (r0 + i) * DV + to, low_sums[i])
            tl.store(OUT + (r0 + i) * DV + HALF + to, high_sums[i])


@triton.jit
def mix(
    CODES, STEPS, ZEROS, LOGITS, TOP, READ, AT, OUT, codes_n, codes_b, codes_h, steps_n, steps_b, steps_h, blocks, share,
    DV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, TILE: tl.constexpr,
    PAGE: tl.constexpr,
):
    """sum_t exp(logit - TOP) v_t by codes, [splits, B, K, rows, DV], of one kv head and a tile of rows.

    A program of a head has ``share`` blocks, but for those that are flagged. Channels of a word's two codes are half a head apart.
    """
    pair = tl.program_id(1)
    b = (pair // K).to(tl.int64)
    h = (pair % K).to(tl.int64)
    ROWS: tl.constexpr = G * S
    start, last, base = sight(AT + b * (2 * S + 1), S, S2)
    stop = tl.minimum(last + 1, base)
    out = OUT + (tl.program_id(0) * tl.num_programs(1) + pair).to(tl.int64) * (ROWS * DV)
    scales = b * steps_b + h * steps_h
    n_first = start // BLOCK + tl.program_id(0) * share
    mix_codes(
        CODES + b * codes_b + h * codes_h, STEPS + scales, ZEROS + scales, LOGITS, TOP, READ, out, codes_n, steps_n, blocks, start, stop,
        n_first, tl.minimum(n_first + share, (stop + BLOCK - 1) // BLOCK), pair.to(tl.int64) * ROWS, tl.program_id(2) * TILE, DV, GROUP,
        ROWS, TILE, PAGE,
    )


@triton.jit
def mix_own(
    CODES, STEPS, ZEROS, ORIGINALS, RECENT_V, LOGITS, TOP, READ, PEAK, EXACT, SINKS, AT, NOTES, OUT, SIZE, DAMAGED,
    codes_n, codes_b, codes_h, steps_n, steps_b, steps_h, from_n, from_b, from_h, from_t, rv_b, rv_h, rv_t,
    blocks, page_tokens, newest, share, first_out,
    DV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, TILE: tl.constexpr,
    NEWEST: tl.constexpr, PAGE: tl.constexpr, ALL: tl.constexpr,
):
    """The same by originals, behind ``first_out`` results, of ``share`` blocks whose originals may be wanted.

    The last program of a head has the newest tokens too.

    READ as in ``exact``; where ALL, rows that are not flagged are left out, and TOP is the largest of PEAK and, of codes, EXACT.
    """
    pair = tl.program_id(1)
    b = (pair // K).to(tl.int64)
    h = (pair % K).to(tl.int64)
    ROWS: tl.constexpr = G * S
    heads = pair.to(tl.int64) * ROWS
    start, last, base = sight(AT + b * (2 * S + 1), S, S2)
    stop = tl.minimum(last + 1, base)
    out = OUT + ((tl.program_id(0) + first_out) * tl.num_programs(1) + pair).to(tl.int64) * (ROWS * DV)
    scales = b * steps_b + h * steps_h
    r0 = tl.program_id(2) * TILE
    n_first = start // BLOCK + tl.program_id(0) * share
    n_stop = tl.minimum(n_first + share, (stop + BLOCK - 1) // BLOCK)
    window = tl.program_id(0) == tl.num_programs(0) - 1
    if ALL:
        anybody = 0
        for i in tl.static_range(TILE):
            anybody += tl.load(READ + heads + tl.minimum(r0 + i, ROWS - 1)).to(tl.int32)
        n_stop = tl.where(anybody != 0, n_stop, n_first)
        window = window & (anybody != 0)
    mix_exact(
        CODES + b * codes_b + h * codes_h, STEPS + scales, ZEROS + scales, ORIGINALS + b * from_b + h * from_h,
        RECENT_V + b * rv_b + h * rv_h, LOGITS, TOP, READ, PEAK, EXACT, SINKS, out, NOTES + pair * blocks * 4, SIZE + pair * blocks,
        DAMAGED + pair, codes_n, steps_n, from_n, from_t, rv_t, blocks, page_tokens, newest, start, last, base, n_first, n_stop, heads, r0,
        window, DV, GROUP, ROWS, TILE, NEWEST, PAGE, ALL,
    )
