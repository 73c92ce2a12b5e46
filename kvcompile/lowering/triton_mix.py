"""The values' pass of certified attention: see ``triton_certified``.

``mix`` multiplies values decoded from codes on tensor cores. A value is decoded to float16 by one fused multiply-add; a weight
exp(logit - TOP), times 2^14, is two float16 numbers, the second one times 2^11. Products of those are exact, so all rounding is known:
of the value once (``bounds.HALF_STEP``), of the weight by 2^-22 of it, of sums as ``bounds.TENSOR_STEP`` says. That tensor cores take
subnormal float16 numbers for what they are, as ``bit_tricks`` also relies on, is what is measured, not promised:
``tests/test_gpu_certified.py`` holds a device's sums to these bounds. A turn's sums are accumulators of their own, which are added to the
split's in float32: no chain of truncations is longer than a turn.

``mix_own`` is float32: few blocks of originals, and the window.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RET505, RUF005 - kernels: operands are pointers and constants in capitals, tuples grow in loops.

from __future__ import annotations

import math

import triton
import triton.language as tl

from kvcompile.lowering.triton_certified import BLOCK, beyond, exp_of, largest_logit, sight

TURN_VALUES = 32 * 128
"""Values that ``mix`` takes at once: tokens of a turn times channels. More have no room in the registers of a warp."""

AHEAD = tl.constexpr(128)
"""Blocks whose flags ``mix_own`` looks at at once: a program without any ends after one load."""

RAISED = tl.constexpr(2.0**14)
"""What a weight is multiplied by: the largest is far from float16's largest, what is below its least normal one has weight 2^-28."""

APART = tl.constexpr(2.0**11)
"""What a weight's second number is multiplied by: it is as large as the first one then."""

SIXTEEN = tl.constexpr("lop3.b32 s, $1, 0x000f000f, 0x64006400, 0xea; mov.b32 t, 0xe400e400; add.rn.f16x2 s, s, t;")
"""The low nibbles of two bytes as float16 numbers, exactly: 1024 + code are the bits of a code beside those of 1024."""

OF_HIGH = tl.constexpr(
    "lop3.b32 s, $1, 0x00f000f0, 0x64006400, 0xea; mov.b32 t, 0x2c002c00; mov.b32 u, 0xd400d400; fma.rn.f16x2 s, s, t, u;"
)
"""The high nibbles: (1024 + 16 code) / 16 - 64."""


def turn_of(page: int, width: int) -> int:
    """Tokens of a turn where pages have that many rows and values that many channels, a power of two: no turn lies in two pages."""
    return math.gcd(page, max(BLOCK.value, min(64, TURN_VALUES // width)))


@triton.jit
def largest_run_square(low, high):
    """``largest_square`` of tokens in two halves, [16, runs, channels of a run] each."""
    low = low.to(tl.float64)
    high = high.to(tl.float64)
    square = tl.sum(tl.sum(low * low + high * high, 2), 1)
    return tl.max(tl.where(square == square, square, float("inf")), 0)


@triton.jit
def decoded(words, step, zero, HIGH: tl.constexpr, SECOND: tl.constexpr, PACKED: tl.constexpr):
    """The code of a word of two bytes (in the SECOND byte; its HIGH nibble) times step plus zero, float16.

    PACKED: two words at a time, by one rounding. Else as plain Triton, for the interpreter, whose float32 sum is rounded first.
    """
    if PACKED:
        if SECOND:
            words = tl.inline_asm_elementwise("shr.b32 $0, $1, 8;", "=r,r", [words], dtype=tl.uint16, is_pure=True, pack=2)
        code: tl.constexpr = OF_HIGH if HIGH else SIXTEEN
        return tl.inline_asm_elementwise(
            "{ .reg .b32 s, t, u; " + code + " fma.rn.f16x2 $0, s, $2, $3; }", "=r,r,r,r", [words, step, zero], dtype=tl.float16,
            is_pure=True, pack=2,
        )
    else:
        code = ((words >> (8 * SECOND + 4 * HIGH)) & 15).to(tl.float32)
        return (code * step.to(tl.float32) + zero.to(tl.float32)).to(tl.float16)


@triton.jit
def left_of(READ, rows, first, stop, blocks, T: tl.constexpr):
    """Zero where a row's blocks are codes to it, one where they are flagged. In float32: flags would decide how tensor cores are fed."""
    # Eight tokens are what one thread has.
    t = first + 8 * tl.arange(0, T // 8)
    taken = tl.load(READ + rows[:, None] * blocks + (t // BLOCK)[None, :], mask=(t < stop)[None, :], other=1)
    return tl.reshape(tl.broadcast_to((taken != 0).to(tl.float32)[:, :, None], [4, T // 8, 8]), [4, T])


@triton.jit
def weights_of(LOGITS, rows, top, taken, t, start, stop, blocks):
    """Weights of four rows as two numbers each, float16 [tokens, 8]: sums of the first APART times those of the second are RAISED."""
    seen = (t >= start) & (t < stop)
    logit = tl.load(LOGITS + rows[:, None] * blocks * BLOCK + t[None, :], mask=seen[None, :], other=float("-inf"))
    weight = exp_of(tl.where(taken == 0, logit, float("-inf")) - top[:, None]) * RAISED
    first = weight.to(tl.float16)
    second = ((weight - first.to(tl.float32)) * APART).to(tl.float16)
    return tl.reshape(tl.permute(tl.join(first, second), (1, 0, 2)), [t.shape[0], 8])


@triton.jit
def spread(scales, WORDS: tl.constexpr):
    """Scales [tokens, groups] for the words that they belong to."""
    each: tl.constexpr = WORDS // scales.shape[1]
    return tl.reshape(tl.broadcast_to(scales[:, :, None], [scales.shape[0], scales.shape[1], each]), [scales.shape[0], WORDS])


@triton.jit
def added(total, values, weights, one):
    """A turn's sums and the split's. Times a one that is no constant: a plain sum could become their accumulator, a longer chain."""
    return tl.fma(tl.dot(tl.permute(values, (1, 0)), weights), tl.zeros(total.shape, tl.float32) + one, total)


@triton.jit
def mix_codes(
    CODES, STEPS, ZEROS, LOGITS, TOP, READ, OUT, codes_n, steps_n, blocks, start, stop, first, end, heads, r0,
    DV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, T: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Tokens from ``first`` (a multiple of T) up to ``end``, but for blocks that are flagged. Weights are made one turn ahead."""
    WORDS: tl.constexpr = DV // 4
    RUNS: tl.constexpr = DV // GROUP
    lane = tl.arange(0, T)
    run = tl.arange(0, RUNS // 2)
    word = tl.arange(0, WORDS)
    # Rows beyond the tile's are computed and left out.
    rows = heads + tl.minimum(r0 + tl.arange(0, 4), ROWS - 1)
    top = tl.load(TOP + rows)
    words_of = CODES.to(tl.pointer_type(tl.uint16), bitcast=True)
    # No position is below zero, which a compiler does not know.
    one = (start >= 0).to(tl.float32)
    low_even = tl.zeros([WORDS, 8], tl.float32)
    low_odd = tl.zeros([WORDS, 8], tl.float32)
    high_even = tl.zeros([WORDS, 8], tl.float32)
    high_odd = tl.zeros([WORDS, 8], tl.float32)
    stop = tl.minimum(stop, end)
    weights = weights_of(LOGITS, rows, top, left_of(READ, rows, first, stop, blocks, T), first + lane, start, stop, blocks)
    taken = left_of(READ, rows, first + T, stop, blocks, T)
    for turn in tl.range(0, tl.cdiv(tl.maximum(stop - first, 0), T), num_stages=2):
        t0 = first + turn * T
        page = (t0 // PAGE).to(tl.int64)
        row = lane
        if T < PAGE:
            row = t0 % PAGE + lane
        t = t0 + lane
        seen = ((t >= start) & (t < stop))[:, None]
        scale_at = page * steps_n + (row[:, None] * RUNS + run[None, :])
        low_step = spread(tl.load(STEPS + scale_at, mask=seen, other=0.0), WORDS)
        low_zero = spread(tl.load(ZEROS + scale_at, mask=seen, other=0.0), WORDS)
        high_step = spread(tl.load(STEPS + scale_at + RUNS // 2, mask=seen, other=0.0), WORDS)
        high_zero = spread(tl.load(ZEROS + scale_at + RUNS // 2, mask=seen, other=0.0), WORDS)
        # Any word is a number; whoever does not see it has a step of zero. Loaded last, for the same reason as keys.
        words = tl.load(words_of + page * (codes_n // 2) + (row[:, None] * WORDS + word[None, :]))
        low_even = added(low_even, decoded(words, low_step, low_zero, 0, 0, PACKED), weights, one)
        high_even = added(high_even, decoded(words, high_step, high_zero, 1, 0, PACKED), weights, one)
        low_odd = added(low_odd, decoded(words, low_step, low_zero, 0, 1, PACKED), weights, one)
        high_odd = added(high_odd, decoded(words, high_step, high_zero, 1, 1, PACKED), weights, one)
        weights = weights_of(LOGITS, rows, top, taken, t + T, start, stop, blocks)
        taken = left_of(READ, rows, t0 + 2 * T, stop, blocks, T)
    i = tl.arange(0, 4)
    to = (r0 + i)[None, :] * DV + 2 * word[:, None]
    mine = ((i < TILE) & (r0 + i < ROWS))[None, :]
    tl.store(OUT + to, whole(low_even), mask=mine)
    tl.store(OUT + to + 1, whole(low_odd), mask=mine)
    tl.store(OUT + to + DV // 2, whole(high_even), mask=mine)
    tl.store(OUT + to + DV // 2 + 1, whole(high_odd), mask=mine)


@triton.jit
def whole(sums):
    """[channels, rows] of sums of both numbers of the weights."""
    first, second = tl.split(tl.reshape(sums, [sums.shape[0], 4, 2]))
    return tl.fma(second, tl.full(second.shape, 1.0 / APART, tl.float32), first) * (1.0 / RAISED)


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
    ahead = tl.arange(0, AHEAD)
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
    for first in range(n_first, n_stop, AHEAD):
        pending = (first + ahead < n_stop).to(tl.int32)
        if not ALL:
            asked = pending * 0
            for i in tl.static_range(TILE):
                r = heads + tl.minimum(r0 + i, ROWS - 1)
                flags = tl.load(READ + r * blocks + first + ahead, mask=pending != 0, other=0)
                asked = tl.where(flags != 0, 1, asked)
            pending = asked
        for _turn in range(tl.sum(pending, 0)):
            which = tl.min(tl.where(pending != 0, ahead, AHEAD), 0)
            pending = tl.where(ahead == which, 0, pending)
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
    PAGE: tl.constexpr, T: tl.constexpr, PACKED: tl.constexpr,
):
    """sum_t exp(logit - TOP) v_t by codes, [splits, B, K, rows, DV], of one kv head and a tile of rows.

    A program of a head has ``share`` blocks, whole turns, but for those that are flagged. Channels of a byte's codes are half a head apart.
    """
    pair = tl.program_id(1)
    b = (pair // K).to(tl.int64)
    h = (pair % K).to(tl.int64)
    ROWS: tl.constexpr = G * S
    start, last, base = sight(AT + b * (2 * S + 1), S, S2)
    stop = tl.minimum(last + 1, base)
    out = OUT + (tl.program_id(0) * tl.num_programs(1) + pair).to(tl.int64) * (ROWS * DV)
    scales = b * steps_b + h * steps_h
    first = start // T * T + tl.program_id(0) * share * BLOCK
    mix_codes(
        CODES + b * codes_b + h * codes_h, STEPS + scales, ZEROS + scales, LOGITS, TOP, READ, out, codes_n, steps_n, blocks, start, stop,
        first, first + share * BLOCK, pair.to(tl.int64) * ROWS, tl.program_id(2) * TILE, DV, GROUP, ROWS, TILE, PAGE, T, PACKED,
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
