"""The keys' pass of certified attention on tensor cores: see ``triton_certified``.

A logit is sum_c q_c (step_c code_c + zero_c) = sum_c (q_c step_c) u_c + sum_c q_c low_c, with u = code + 128, from 0 to 255, and
low = zero - 128 step. The first sum is a product of matrices: u is a float16 number as it stands, u * 2^-24, since an integer of up to ten
bits is the subnormal of just these bits; and what it is multiplied with is two float16 limbs, q_c step_c = hi + lo, to 2^-22. Both are
scaled by powers of two before (the largest query of a row and the largest step of a block to about one), so that neither overflows and
what is lost to subnormals is below 2^-22 of the largest product. Four rows are eight columns: one instruction of tensor cores takes
16 tokens, 16 channels and all of them. The second sum is float32 multiply-adds, once for a block and not for each of its tokens.

What this rounds is ``bounds.CODED``. Blocks that have newest tokens in them take the float32 way, with whatever is codes decoded.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.triton_certified import BLOCK

ROW_TILE = tl.constexpr(4)
"""Rows of a program: two limbs of each are the eight columns of an instruction."""

STAGES = tl.constexpr(3)
"""Blocks whose loads are under way."""

ROOM = tl.constexpr(4096.0)
"""Queries and steps are below 2 each once they are scaled (4, where they are as large as float32 goes); their product is below 65504."""

BACK = tl.constexpr(2.0**24 / 4096.0)
"""What that and the subnormals leave to be multiplied with."""

EVEN = tl.constexpr("lop3.b32 $0, $1, 0x00FF00FF, 0x00800080, 0x6a;")
ODD = tl.constexpr("{ .reg .b32 t; shr.b32 t, $1, 8; lop3.b32 $0, t, 0x00FF00FF, 0x00800080, 0x6a; }")
"""The low and the high bytes of two words at a time, plus 128."""


@triton.jit
def between(x, least, most):
    """A position as int32, within the planes."""
    return tl.minimum(tl.maximum(x, least), most).to(tl.int32)


@triton.jit
def octave(x):
    """The power of two below x >= 0 and its reciprocal; both normal, whatever x is."""
    exponent = tl.minimum(tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 1), 253)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def even_and_odd(x):
    """Channels [D, ...] or [D] as those of the low and those of the high bytes of words."""
    if len(x.shape) == 1:
        return tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
    else:
        return tl.split(tl.permute(tl.reshape(x, [x.shape[0] // 2, 2, x.shape[1]]), [0, 2, 1]))


@triton.jit
def unpacked(words, PACKED: tl.constexpr):
    """The codes of words plus 128, times 2^-24: of the low bytes and of the high ones."""
    if PACKED:
        low = tl.inline_asm_elementwise(EVEN, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
        high = tl.inline_asm_elementwise(ODD, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        low = ((words & 255) ^ 128).to(tl.uint16).to(tl.float16, bitcast=True)
        high = ((words >> 8) ^ 128).to(tl.uint16).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def limbs(w):
    """float32 [channels, rows] as two float16 numbers each, side by side."""
    high = w.to(tl.float16)
    low = (w - high.to(tl.float32)).to(tl.float16)
    return tl.reshape(tl.join(high, low), [w.shape[0], 2 * w.shape[1]])


@triton.jit
def score_codes(
    q_even, q_odd, size, lows, highs, CODES, STEPS, ZEROS, LOGITS, CHANNELS, row, n, out, of_row,
    SCALE: tl.constexpr, D: tl.constexpr, OF_STEP: tl.constexpr, OF_ZERO: tl.constexpr, OF_ONE: tl.constexpr, PACKED: tl.constexpr,
):
    """One block of codes, four rows: logits, and sum_c |q_c| radius_c. The queries are scaled; ``size`` undoes that."""
    j = tl.arange(0, BLOCK)[:, None]
    words = tl.load(CODES + row * (BLOCK * D // 2) + j * (D // 2) + tl.arange(0, D // 2)[None, :])
    step = tl.load(STEPS + row * D + tl.arange(0, D))
    zero = tl.load(ZEROS + row * D + tl.arange(0, D))
    most, reciprocal = octave(tl.max(step, 0))
    step_even, step_odd = even_and_odd(step * reciprocal * ROOM)
    low_even, low_odd = even_and_odd(zero - 128 * step)
    radius_even, radius_odd = even_and_odd(step * OF_STEP + tl.abs(zero) * OF_ZERO + OF_ONE)
    codes_even, codes_odd = unpacked(words, PACKED)
    products = tl.dot(codes_even, limbs(q_even * step_even[:, None]), input_precision="ieee")
    products = tl.dot(codes_odd, limbs(q_odd * step_odd[:, None]), products, input_precision="ieee")
    both = tl.sum(tl.reshape(products, [BLOCK, ROW_TILE, 2]), 2)
    lowest = tl.sum(q_even * low_even[:, None] + q_odd * low_odd[:, None], 0)
    reach = tl.sum(tl.abs(q_even) * radius_even[:, None] + tl.abs(q_odd) * radius_odd[:, None], 0)
    logits = (both * (most * BACK) + lowest[None, :]) * (size * SCALE)[None, :]
    t = n * BLOCK + j
    logits = tl.where((t >= lows[None, :]) & (t <= highs[None, :]), logits, float("-inf"))
    tl.store(LOGITS + (out + n)[None, :] * BLOCK + j, logits, mask=of_row[None, :])
    tl.store(CHANNELS + out + n, reach * size, mask=of_row)


@triton.jit
def score_newest(
    AT_Q, low, high, CODES, STEPS, ZEROS, RECENT_K, LOGITS, CHANNELS, row, rk_t, newest, n, base,
    SCALE: tl.constexpr, D: tl.constexpr, OF_STEP: tl.constexpr, OF_ZERO: tl.constexpr, OF_ONE: tl.constexpr,
):
    """One block, one row, in float32; tokens from ``base`` on are not codes."""
    j = tl.arange(0, BLOCK)
    c = tl.arange(0, D)[None, :]
    t = n * BLOCK + j
    in_window = (t >= base) & (t < base + newest)
    new = tl.load(RECENT_K + (t - base)[:, None] * rk_t + c, mask=in_window[:, None], other=0.0).to(tl.float32)
    step = tl.load(STEPS + row * D + c)
    zero = tl.load(ZEROS + row * D + c)
    codes = tl.load(CODES + row * (BLOCK * D) + j[:, None] * D + c)
    # The product is exact, since steps have 16 bits: fused or not, this is what the scheme decodes.
    k = tl.where((t >= base)[:, None], new, codes.to(tl.float32) * step + zero)
    q = tl.load(AT_Q + c).to(tl.float32)
    logits = tl.where((t >= low) & (t <= high), tl.sum(k * q, 1) * SCALE, float("-inf"))
    tl.store(LOGITS + n * BLOCK + j, logits)
    tl.store(CHANNELS + n, tl.sum(tl.sum(tl.abs(q) * (step * OF_STEP + tl.abs(zero) * OF_ZERO + OF_ONE), 1), 0))


@triton.jit
def score(
    Q, CODES, STEPS, ZEROS, RECENT_K, HI, LO, BASE, SINK, AT, SINKS, DAMAGED, LOGITS, CHANNELS,
    q_b, q_h, q_s, codes_n, codes_b, codes_h, steps_n, steps_b, steps_h, rk_b, rk_h, rk_t, hi_b, hi_s, lo_b, lo_s, base_b, sink_h,
    blocks, newest,
    SCALE: tl.constexpr, D: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr,
    SPAN: tl.constexpr, PER_PAGE: tl.constexpr, OF_STEP: tl.constexpr, OF_ZERO: tl.constexpr, OF_ONE: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_SINK: tl.constexpr, PACKED: tl.constexpr,
):
    """SPAN blocks of one kv head, ROW_TILE rows: logits, and of each block and row sum_c |q_c| radius_c.

    The last program of a head has the blocks with newest tokens. It also writes what the other kernels of a step take as given: AT,
    each row's sink in float32, and that nothing is damaged.
    """
    pair = tl.program_id(1)
    b = (pair // K).to(tl.int64)
    h = (pair % K).to(tl.int64)
    ROWS: tl.constexpr = G * S
    r0 = tl.program_id(2) * ROW_TILE
    rows = r0 + tl.arange(0, ROW_TILE)
    of_row = rows < ROWS
    r = tl.minimum(rows, ROWS - 1)
    tokens = blocks * BLOCK
    s = tl.arange(0, S2)
    base = between(tl.load(BASE + b * base_b), -(2**30), tokens)
    seen_last = between(tl.load(HI + b * hi_b + s * hi_s, mask=s < S, other=-1), -1, tokens - 1)
    seen_first = s * 0
    highs = between(tl.load(HI + b * hi_b + (r % S) * hi_s), -1, tokens - 1)
    lows = r * 0
    if HAS_LO:
        seen_first = between(tl.load(LO + b * lo_b + s * lo_s, mask=s < S, other=2147483647), 0, tokens)
        lows = between(tl.load(LO + b * lo_b + (r % S) * lo_s), 0, tokens)
    last = tl.max(seen_last, 0)
    start = tl.min(seen_first, 0)
    first_row = pair.to(tl.int64) * ROWS
    out = (first_row + r) * blocks
    of_heads = CODES + b * codes_b + h * codes_h
    scales = b * steps_b + h * steps_h
    queries = Q + b * q_b + h * (G * q_h)
    if tl.program_id(0) < tl.num_programs(0) - 1:
        c = tl.arange(0, D)[:, None]
        q = tl.load(queries + (r // S * q_h + r % S * q_s)[None, :] + c).to(tl.float32)
        size, reciprocal = octave(tl.max(tl.abs(q), 0))
        q_even, q_odd = even_and_odd(q * reciprocal[None, :])
        words = of_heads.to(tl.pointer_type(tl.uint16), bitcast=True)
        n0 = tl.maximum(tl.program_id(0) * SPAN, start // BLOCK)
        n1 = tl.minimum(tl.program_id(0) * SPAN + SPAN, tl.minimum(base // BLOCK, last // BLOCK + 1))
        for turn in tl.range(0, tl.maximum(n1 - n0, 0), num_stages=STAGES):
            n = n0 + turn
            page, row = (n // PER_PAGE).to(tl.int64), n % PER_PAGE
            at = scales + page * steps_n
            score_codes(
                q_even, q_odd, size, lows, highs, words + page * (codes_n // 2), STEPS + at, ZEROS + at, LOGITS, CHANNELS, row, n, out,
                of_row, SCALE, D, OF_STEP, OF_ZERO, OF_ONE, PACKED,
            )
    else:
        if r0 == 0:
            tl.store(DAMAGED + pair, 0)
            if h == 0:
                tl.store(AT + b * (2 * S + 1) + s, seen_last, mask=s < S)
                tl.store(AT + b * (2 * S + 1) + S + s, seen_first, mask=s < S)
                tl.store(AT + b * (2 * S + 1) + 2 * S, base)
        if HAS_SINK:
            tl.store(SINKS + first_row + r, tl.load(SINK + (h * G + r // S) * sink_h).to(tl.float32), mask=of_row)
        else:
            tl.store(SINKS + first_row + r, tl.full([ROW_TILE], float("-inf"), tl.float32), mask=of_row)
        n0 = tl.maximum(base // BLOCK, start // BLOCK)
        for turn in range(tl.maximum(last // BLOCK + 1 - n0, 0)):
            n = n0 + turn
            page, row = (n // PER_PAGE).to(tl.int64), n % PER_PAGE
            at = scales + page * steps_n
            for i in range(tl.minimum(ROW_TILE, ROWS - r0)):
                one = r0 + i
                high = between(tl.load(HI + b * hi_b + (one % S) * hi_s), -1, tokens - 1)
                low = one * 0
                if HAS_LO:
                    low = between(tl.load(LO + b * lo_b + (one % S) * lo_s), 0, tokens)
                mine = (first_row + one) * blocks
                score_newest(
                    queries + one // S * q_h + one % S * q_s, low, high, of_heads + page * codes_n, STEPS + at, ZEROS + at,
                    RECENT_K + b * rk_b + h * rk_h, LOGITS + mine * BLOCK, CHANNELS + mine, row, rk_t, newest, n, base,
                    SCALE, D, OF_STEP, OF_ZERO, OF_ONE,
                )
