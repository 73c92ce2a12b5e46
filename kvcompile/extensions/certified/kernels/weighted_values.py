"""The values' pass of certified attention: see ``certified``.

``weighted_values`` multiplies values decoded from codes on tensor cores. A value is decoded to float16 by one fused multiply-add; a weight
exp(logit - TOP), times 2^14, is two float16 numbers, the second one times 2^11. Products of those are exact, so all rounding is known:
of the value once (``bounds.HALF_STEP``), of the weight by 2^-22 of it, of sums by ``bounds.TENSOR_STEP``. That tensor cores do not flush
subnormal float16 numbers, on which ``bit_tricks`` also relies, is measured, not documented:
``tests/gpu/test_gpu_certified.py`` holds a device's sums to these bounds. Each tile has accumulators of its own, which are added
to the split's in float32: no chain of truncations is longer than a tile.

Values that are not encoded (``values=full``) are bfloat16 or float16, which tensor cores multiply exactly as tf32;
a weight is then two tf32 numbers, with as little loss.

``weighted_originals`` is float32: few blocks of originals, and the window. Latency determines its time, as in ``exact_scores``.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RET505, RUF005 - kernels: operands are pointers and constants in capitals, tuples grow in loops.

from __future__ import annotations

import math

import triton
import triton.language as tl

from kvcompile.extensions.certified.kernels.certified import BLOCK, above, doubtful, exp_of, pop_pending, sight
from kvcompile.extensions.certified.kernels.stage_blocks import rows_of_slot

TURN_VALUES = 32 * 128
"""Values that ``weighted_values`` processes at a time, tokens of a tile times channels: more do not fit the registers of a warp."""

AHEAD = tl.constexpr(256)
"""Blocks whose flags ``weighted_originals`` loads at a time: a program without any ends after one load."""

NEAR = tl.constexpr(4)
"""Neighbouring blocks in the share of one of its programs: promoted ones are close to each other, and a program reads them in turn."""

RAISED = tl.constexpr(2.0**14)
"""Factor of the weights: the largest is far from float16's largest, and float16's least normal number stands for a weight of 2^-28."""

APART = tl.constexpr(2.0**11)
"""Factor of a weight's second number, which makes it as large as the first."""

SIXTEEN = tl.constexpr("lop3.b32 s, $1, 0x000f000f, 0x64006400, 0xea; mov.b32 t, 0xe400e400; add.rn.f16x2 s, s, t;")
"""PTX for the low nibbles of two bytes as float16, exactly: the bits of 1024 or'ed with a code are 1024 + code."""

OF_HIGH = tl.constexpr(
    "lop3.b32 s, $1, 0x00f000f0, 0x64006400, 0xea; mov.b32 t, 0x2c002c00; mov.b32 u, 0xd400d400; fma.rn.f16x2 s, s, t, u;"
)
"""PTX for the high nibbles: (1024 + 16 code) / 16 - 64."""


def turn_of(page: int, width: int) -> int:
    """Return the tokens of a tile, a power of two, for pages of ``page`` rows and values of ``width`` channels: no tile spans two pages."""
    return math.gcd(page, max(BLOCK.value, min(64, TURN_VALUES // width)))


@triton.jit
def decoded(words, step, zero, HIGH: tl.constexpr, SECOND: tl.constexpr, PACKED: tl.constexpr):
    """Return the code of a two-byte word (in the SECOND byte; its HIGH nibble) times step plus zero, float16.

    PACKED: two words at a time, with one rounding. Else plain Triton, for the interpreter, whose float32 sum is rounded before.
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
    """Return, for four rows and T tokens, 1.0 for a token to leave out, else 0.0; float32 [4, T].

    ``rows``: indices in READ [rows, blocks]; ``first``: the first token's position. Left out are tokens of blocks that another kernel reads
    from originals, and tokens past ``stop``. Not an int8 mask, which would change the layout of the dot's operands.
    """
    # One thread has eight tokens.
    t = first + 8 * tl.arange(0, T // 8)
    taken = tl.load(READ + rows[:, None] * blocks + (t // BLOCK)[None, :], mask=(t < stop)[None, :], other=1)
    return tl.reshape(tl.broadcast_to((taken != 0).to(tl.float32)[:, :, None], [4, T // 8, 8]), [4, T])


@triton.jit
def weights_of(LOGITS, rows, top, taken, t, start, stop, blocks):
    """Return the softmax weights of four rows, each as two float16 numbers, [tokens, 8]: RAISED * weight = first + second / APART.

    ``rows``: indices in LOGITS [rows, 16 blocks]; ``top``: each row's TOP; ``t``: the tokens' positions. Zero for positions outside of
    ``start`` to ``stop`` - 1, and for tokens of blocks that are ``taken``: another kernel reads their values from originals.
    """
    seen = (t >= start) & (t < stop)
    logit = tl.load(LOGITS + rows[:, None] * blocks * BLOCK + t[None, :], mask=seen[None, :], other=float("-inf"))
    weight = exp_of(tl.where(taken == 0, logit, float("-inf")) - top[:, None]) * RAISED
    first = weight.to(tl.float16)
    second = ((weight - first.to(tl.float32)) * APART).to(tl.float16)
    return tl.reshape(tl.permute(tl.join(first, second), (1, 0, 2)), [t.shape[0], 8])


@triton.jit
def spread(scales, WORDS: tl.constexpr):
    """Return ``scales`` [tokens, groups] repeated for the words of each group: [tokens, WORDS]."""
    each: tl.constexpr = WORDS // scales.shape[1]
    return tl.reshape(tl.broadcast_to(scales[:, :, None], [scales.shape[0], scales.shape[1], each]), [scales.shape[0], WORDS])


@triton.jit
def added(total, values, weights, one):
    """Return values^T times weights, a tile's sums [channels, columns], plus ``total``, the split's sums so far.

    The factor ``one`` is not a constant: the compiler could make a plain sum the product's accumulator, a longer chain of roundings.
    """
    return tl.fma(tl.dot(tl.permute(values, (1, 0)), weights), tl.zeros(total.shape, tl.float32) + one, total)


@triton.jit
def weighted_codes(
    CODES, STEPS, ZEROS, LOGITS, TOP, READ, OUT, codes_n, steps_n, blocks, start, stop, first, end, heads, r0,
    DV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, T: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Write OUT [ROWS, DV] of one kv head, rows ``r0`` to ``r0`` + TILE - 1: sums over tokens of exp(logit - TOP) times value.

    Tokens are those from ``first``, a multiple of T, to ``end`` - 1 that are also from ``start`` to ``stop`` - 1, without those in blocks
    flagged in READ. CODES, STEPS, ZEROS and OUT point to the head; ``heads``: index of its first row in LOGITS, TOP and READ. ``codes_n``,
    ``steps_n``: strides of pages; ``blocks``: number of blocks of a row in LOGITS and READ. Weights are made a tile ahead.
    """
    WORDS: tl.constexpr = DV // 4
    RUNS: tl.constexpr = DV // GROUP
    lane = tl.arange(0, T)
    run = tl.arange(0, RUNS // 2)
    word = tl.arange(0, WORDS)
    # Rows beyond the tile's are computed and not stored.
    rows = heads + tl.minimum(r0 + tl.arange(0, 4), ROWS - 1)
    top = tl.load(TOP + rows)
    words_of = CODES.to(tl.pointer_type(tl.uint16), bitcast=True)
    # No position is below zero, which the compiler does not know.
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
        # Any word decodes to a number; hidden tokens have a step of zero. Loaded last, for the same reason as keys (``exact_scores``).
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
def tf32_of(x):
    """Return float32 rounded to the nearest number with ten mantissa bits, which tensor cores use unchanged."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def weighted_whole(
    VALUES, LOGITS, TOP, READ, OUT, values_n, values_t, blocks, start, stop, first, end, heads, r0,
    DV: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, T: tl.constexpr,
):
    """Write OUT [ROWS, DV] as ``weighted_codes`` does, from VALUES in full precision instead of codes.

    ``values_n``, ``values_t``: strides of pages and tokens. The other operands are as in ``weighted_codes``.
    """
    lane = tl.arange(0, T)
    c = tl.arange(0, DV)
    rows = heads + tl.minimum(r0 + tl.arange(0, 4), ROWS - 1)
    top = tl.load(TOP + rows)
    one = (start >= 0).to(tl.float32)
    sums = tl.zeros([DV, 8], tl.float32)
    stop = tl.minimum(stop, end)
    for turn in tl.range(0, tl.cdiv(tl.maximum(stop - first, 0), T), num_stages=2):
        t0 = first + turn * T
        t = t0 + lane
        row = lane
        if T < PAGE:
            row = t0 % PAGE + lane
        seen = (t >= start) & (t < stop)
        here = VALUES + (t0 // PAGE).to(tl.int64) * values_n + row[:, None] * values_t + c[None, :]
        values = tl.load(here, mask=seen[:, None], other=0.0).to(tl.float32)
        logit = tl.load(LOGITS + rows[:, None] * blocks * BLOCK + t[None, :], mask=seen[None, :], other=float("-inf"))
        taken = left_of(READ, rows, t0, stop, blocks, T)
        weight = exp_of(tl.where(taken == 0, logit, float("-inf")) - top[:, None])
        high = tf32_of(weight)
        both = tl.reshape(tl.permute(tl.join(high, tf32_of(weight - high)), (1, 0, 2)), [T, 8])
        turned = tl.dot(tl.permute(values, (1, 0)), both, input_precision="tf32")
        sums = tl.fma(turned, tl.zeros(sums.shape, tl.float32) + one, sums)
    i = tl.arange(0, 4)
    mine = ((i < TILE) & (r0 + i < ROWS))[None, :]
    high, low = tl.split(tl.reshape(sums, [DV, 4, 2]))
    tl.store(OUT + (r0 + i)[None, :] * DV + c[:, None], high + low, mask=mine)


@triton.jit
def whole(sums):
    """Return sums [channels, rows] from the sums [channels, 2 rows] that ``weights_of``'s two numbers per weight give."""
    first, second = tl.split(tl.reshape(sums, [sums.shape[0], 4, 2]))
    return tl.fma(second, tl.full(second.shape, 1.0 / APART, tl.float32), first) * (1.0 / RAISED)


@triton.jit
def weighted_values(
    CODES, STEPS, ZEROS, LOGITS, TOP, READ, AT, OUT, codes_n, codes_b, codes_h, codes_t, steps_n, steps_b, steps_h, blocks, share,
    DV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, TILE: tl.constexpr,
    PAGE: tl.constexpr, T: tl.constexpr, FULL: tl.constexpr, PACKED: tl.constexpr,
):
    """Write OUT [splits, B, K, rows, DV] of one kv head and a tile of rows: sums over a split's tokens of exp(logit - TOP) v, v from codes.

    A split is ``share`` blocks, whole tiles; blocks flagged in READ are left out. The channels of a byte's codes are half a head apart.
    FULL: CODES are values in full precision.
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
    codes = CODES + b * codes_b + h * codes_h
    if FULL:
        weighted_whole(
            codes, LOGITS, TOP, READ, out, codes_n, codes_t, blocks, start, stop, first, first + share * BLOCK, pair.to(tl.int64) * ROWS,
            tl.program_id(2) * TILE, DV, ROWS, TILE, PAGE, T,
        )
    else:
        weighted_codes(
            codes, STEPS + scales, ZEROS + scales, LOGITS, TOP, READ, out, codes_n, steps_n, blocks, start, stop, first,
            first + share * BLOCK, pair.to(tl.int64) * ROWS, tl.program_id(2) * TILE, DV, GROUP, ROWS, TILE, PAGE, T, PACKED,
        )


@triton.jit
def share_of(first, program, programs):
    """Return the indices of the next AHEAD blocks of program number ``program``, from the ``first`` one of its share on.

    The ``programs`` programs take runs of NEAR blocks in turn.
    """
    i = first + tl.arange(0, AHEAD)
    return (i // NEAR * programs + program) * NEAR + i % NEAR


@triton.jit
def flagged(READ, n, blocks):
    """Return int32 1 for each block n that is flagged in READ, else 0."""
    return (tl.load(READ + n, mask=n < blocks, other=0) != 0).to(tl.int32)


@triton.jit
def scales_of(PLANE, run, RUNS: tl.constexpr, seen):
    """Load a token's scales of runs ``run``: for the channels in bytes' low nibbles, and for those in the high nibbles; float32.

    PLANE: a pointer to the token's scales, RUNS for either half; 0 unless ``seen``.
    """
    low = tl.load(PLANE + run, mask=seen, other=0.0).to(tl.float32)
    return low, tl.load(PLANE + run + RUNS, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def all_of(x):
    """Return the sum of ``x`` [..., runs, channels of a run] over its last two axes."""
    return tl.sum(tl.sum(x, len(x.shape) - 1), len(x.shape) - 2)


@triton.jit
def weighted_originals(
    CODES, STEPS, ZEROS, ORIGINALS, RECENT_V, LOGITS, TOP, READ, AT, NOTES, SCRATCH, FOUND_AT, OUT, DAMAGED,
    codes_n, codes_b, codes_h, steps_n, steps_b, steps_h, from_n, from_b, from_h, from_t, scratch_b, scratch_h, rv_b, rv_h, rv_t,
    blocks, sets, newest, share, first_out,
    DV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, PAGE: tl.constexpr,
    FULL: tl.constexpr, STAGED: tl.constexpr,
):
    """Write one row's entry of OUT [results, rows, DV], behind ``first_out`` results: sums of exp(logit - TOP) v over v from originals.

    A program has ``share`` blocks, of which those flagged in READ count, and the first programs 16 of the newest tokens each; with neither
    it writes zeros. DAMAGED of the kv head becomes 1 if a norm exceeds its note, checked as in ``exact_scores``. FULL: there are no codes
    to compare with. STAGED, ``sets``: as in ``exact_scores``. ``newest``: tokens of RECENT_V.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    pair = tl.program_id(1)
    b = (pair // K).to(tl.int64)
    h = (pair % K).to(tl.int64)
    r = pair.to(tl.int64) * (G * S) + tl.program_id(2)
    HALF: tl.constexpr = DV // 2
    RUNS: tl.constexpr = HALF // GROUP
    ahead = tl.arange(0, AHEAD)
    j = tl.arange(0, BLOCK)[:, None, None]
    run = tl.arange(0, RUNS)[None, :, None]
    c = run * GROUP + tl.arange(0, GROUP)[None, None, :]
    flags = READ + r * blocks
    # No load up to the first flag depends on another load's result.
    pending = flagged(flags, share_of(0, program, programs), blocks)
    start, last, base = sight(AT + b * (2 * S + 1), S, S2)
    top = tl.load(TOP + r)
    logits = LOGITS + r * blocks * BLOCK
    low_sum = tl.zeros([BLOCK, RUNS, GROUP], tl.float32)
    high_sum = tl.zeros([BLOCK, RUNS, GROUP], tl.float32)
    turns = tl.where(program * BLOCK < newest, 1, 0)
    for before in range(program * BLOCK, newest, programs * BLOCK):
        row = before + j
        t = base + row
        seen = (t >= start) & (t <= last) & (row < newest)
        here = RECENT_V + b * rv_b + h * rv_h + row * rv_t
        low_v = tl.load(here + c, mask=row < newest, other=0.0).to(tl.float32)
        high_v = tl.load(here + HALF + c, mask=row < newest, other=0.0).to(tl.float32)
        weight = exp_of(tl.load(logits + t, mask=seen, other=float("-inf")) - top)
        low_sum += tl.where(seen, low_v, 0.0) * weight
        high_sum += tl.where(seen, high_v, 0.0) * weight
    for first in range(0, share, AHEAD):
        count = tl.sum(pending, 0)
        turns += count
        for _turn in range(count):
            which, pending = pop_pending(pending, ahead, AHEAD)
            n = ((first + which) // NEAR * programs + program) * NEAR + (first + which) % NEAR
            t = n * BLOCK + j
            seen = (t >= start) & (t <= last) & (t < base)
            logit = tl.load(logits + t, mask=seen, other=float("-inf"))
            page = (n * BLOCK // PAGE).to(tl.int64)
            in_page = n * BLOCK % PAGE
            originals = ORIGINALS + page * from_n + b * from_b + h * from_h + in_page * from_t
            apart_t = from_t
            if STAGED:
                slot = tl.load(FOUND_AT + pair.to(tl.int64) * blocks + n)
                held = rows_of_slot(SCRATCH + b * scratch_b + h * scratch_h, n, sets, tl.maximum(slot, 0), DV)
                originals = tl.where(slot >= 0, held, originals)
                apart_t = tl.where(slot >= 0, DV, from_t)
            codes = CODES + page * codes_n + b * codes_b + h * codes_h + in_page * HALF
            scales = page * steps_n + b * steps_b + h * steps_h + in_page * (2 * RUNS)
            low_v = tl.load(originals + j * apart_t + c, mask=seen, other=0.0).to(tl.float32)
            high_v = tl.load(originals + j * apart_t + HALF + c, mask=seen, other=0.0).to(tl.float32)
            if FULL == 0:
                low_step, high_step = scales_of(STEPS + scales + j * (2 * RUNS), run, RUNS, seen)
                low_zero, high_zero = scales_of(ZEROS + scales + j * (2 * RUNS), run, RUNS, seen)
                words = tl.load(codes + j * HALF + c, mask=seen, other=0)
            note = NOTES + (pair * blocks + n) * 4
            eta = tl.load(note + 2)
            nu = tl.load(note + 3)
            weight = all_of(exp_of(logit - top))
            low_sum += low_v * weight[:, None, None]
            high_sum += high_v * weight[:, None, None]
            size = all_of(low_v * low_v + high_v * high_v)
            away = size * 0.0
            if FULL == 0:
                # A code times a float16 step is exact: fused or not, this equals the scheme's decoding.
                low_away = low_v - ((words & 15).to(tl.float32) * low_step + low_zero)
                high_away = high_v - ((words >> 4).to(tl.float32) * high_step + high_zero)
                away = all_of(low_away * low_away + high_away * high_away)
            # No weight is below zero, but the use of it here makes ptxas load its logit with the other operands instead of after this.
            doubts = (doubtful(size, nu) | doubtful(away, eta) | (weight < 0)).to(tl.int32)
            token = tl.arange(0, BLOCK)
            # Mostly there are two, which determined the notes: each turn takes the first and the last one.
            for _doubt in range((tl.sum(doubts, 0) + 1) // 2):
                last_one = tl.max(tl.where(doubts != 0, token, 0), 0)
                first_one, doubts = pop_pending(doubts, token, BLOCK)
                doubts = tl.where(token == last_one, 0, doubts)
                one = tl.where(tl.arange(0, 2) == 0, first_one, last_one)[:, None, None]
                low64 = tl.load(originals + one * apart_t + c).to(tl.float64)
                high64 = tl.load(originals + one * apart_t + HALF + c).to(tl.float64)
                damaged = above(all_of(low64 * low64 + high64 * high64), nu)
                if FULL == 0:
                    step_low, step_high = scales_of(STEPS + scales + one * (2 * RUNS), run, RUNS, one >= 0)
                    zero_low, zero_high = scales_of(ZEROS + scales + one * (2 * RUNS), run, RUNS, one >= 0)
                    code = tl.load(codes + one * HALF + c)
                    away_low = low64 - ((code & 15).to(tl.float32) * step_low + zero_low).to(tl.float64)
                    away_high = high64 - ((code >> 4).to(tl.float32) * step_high + zero_high).to(tl.float64)
                    damaged = damaged | above(all_of(away_low * away_low + away_high * away_high), eta)
                if tl.max(damaged.to(tl.int32), 0) != 0:
                    tl.store(DAMAGED + pair, 1)
        pending = flagged(flags, share_of(first + AHEAD, program, programs), blocks)
    out = OUT + ((program + first_out).to(tl.int64) * tl.num_programs(1) * (G * S) + r) * DV
    to = tl.arange(0, RUNS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    low_all = tl.zeros([RUNS, GROUP], tl.float32)
    high_all = tl.zeros([RUNS, GROUP], tl.float32)
    if turns > 0:
        low_all = tl.sum(low_sum, 0)
        high_all = tl.sum(high_sum, 0)
    tl.store(out + to, low_all)
    tl.store(out + HALF + to, high_all)
