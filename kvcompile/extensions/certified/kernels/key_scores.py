"""The keys' pass of certified attention on tensor cores: see ``certified``.

A logit is sum_c q_c (step_c code_c + zero_c) = sum_c (q_c step_c) u_c + sum_c q_c low_c, with u = code + 128, from 0 to 255, and
low = zero - 128 step. The first sum is a matrix product. The bits of u are themselves a float16 number, u * 2^-24, since an integer of up
to ten bits is the subnormal of these bits. The other operand is two float16 limbs, q_c step_c = hi + lo, to 2^-22. Both are
first scaled by powers of two (the largest query of a row and the largest step of a block to about one), so that neither overflows and
the loss to subnormals is below 2^-22 of the largest product. Four rows are eight columns: one instruction of tensor cores takes
16 tokens, 16 channels and all of them. The second sum, and the sums for deviations, are multiply-adds once per block, added over
the threads of a warp in fixed point, for which a warp has an instruction: shuffles of floats would dominate the kernel's time.

A block's logits are summed while they are in registers; deviations follow for all blocks of a program at once.

``bounds.CODED`` covers the rounding here. Blocks that contain newest tokens are computed in float32, with their codes decoded.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RET505 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.extensions.certified.kernels.bounds import coded, rounding
from kvcompile.extensions.certified.kernels.certified import BLOCK, norm_above, up32, weighed

ROW_TILE = tl.constexpr(4)
"""Rows of a program: two limbs of each are the eight columns of an instruction."""

ROOM = tl.constexpr(4096.0)
"""Scaled queries and steps are below 2 each (4 next to the largest float32); their product times this is below 65504, float16's largest."""

LEAST_STEP = tl.constexpr(13)
"""Exponent of the least power of two that steps are scaled by: its reciprocal times ROOM is a float32 number."""

TOO_LARGE = tl.constexpr(0x7F000000)
"""Bits of 2^127: from there on scaled numbers are not below 2."""

BACK = tl.constexpr(2.0**24 / 4096.0)
"""The factor that undoes ROOM and the codes' 2^-24."""

PART = tl.constexpr(4)
"""Tokens that are processed at a time in a block with newest tokens."""

EVEN = tl.constexpr("lop3.b32 $0, $1, 0x00FF00FF, 0x00800080, 0x6a;")
ODD = tl.constexpr("{ .reg .b32 t; shr.b32 t, $1, 8; lop3.b32 $0, t, 0x00FF00FF, 0x00800080, 0x6a; }")
"""PTX for the low (EVEN) or high (ODD) bytes of two words at a time, plus 128."""


@triton.jit
def between(x, least, most):
    """Return positions x as int32, clamped to [least, most]: positions in a mask may be outside of the planes."""
    return tl.minimum(tl.maximum(x, least), most).to(tl.int32)


@triton.jit
def octave(x, LEAST: tl.constexpr):
    """Return the power of two below x >= 0 and its reciprocal, both normal: exponents are clamped to LEAST (at least 1) and 253."""
    exponent = tl.minimum(tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, LEAST), 253)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def largest(x):
    """Return the largest magnitude in each column of ``x`` [rows, channels] as float32 bits, int32; NaN gives bits above infinity's."""
    return tl.max(tl.abs(x).to(tl.int32, bitcast=True), 0)


@triton.jit
def nearest(x, PACKED: tl.constexpr):
    """Return float32 rounded to the nearest integer, int32; of two equally near ones the even one if PACKED, else the larger one."""
    if PACKED:
        return tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.floor(x + 0.5).to(tl.int32)


@triton.jit
def beside(a, b, c, d):
    """Return four vectors [n] as the columns of [n, 4]; a thread holds whole rows, which it stores 16 bytes at a time."""
    pairs = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(pairs, [pairs.shape[0], 4])


@triton.jit
def every_other(AT_Q, q_h, q_s, r0, odd, D: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr):
    """Load the even (``odd`` 0) or odd (1) channels of four query rows from ``r0`` on, float32 [D / 2, 4]; missing rows repeat the last.

    AT_Q: a pointer to the kv head's first row; ``q_h``, ``q_s``: strides of query heads and queries; ROWS: rows of the kv head.
    """
    c = 2 * tl.arange(0, D // 2) + odd
    one = tl.minimum(r0 + 1, ROWS - 1)
    two = tl.minimum(r0 + 2, ROWS - 1)
    three = tl.minimum(r0 + 3, ROWS - 1)
    return beside(
        tl.load(AT_Q + r0 // S * q_h + r0 % S * q_s + c).to(tl.float32), tl.load(AT_Q + one // S * q_h + one % S * q_s + c).to(tl.float32),
        tl.load(AT_Q + two // S * q_h + two % S * q_s + c).to(tl.float32),
        tl.load(AT_Q + three // S * q_h + three % S * q_s + c).to(tl.float32),
    )


@triton.jit
def unpacked(words, PACKED: tl.constexpr):
    """Return the int8 codes in the low bytes, and in the high bytes, of 16-bit words, as float16 (code + 128) * 2^-24.

    PACKED: by PTX, two words at a time.
    """
    if PACKED:
        low = tl.inline_asm_elementwise(EVEN, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
        high = tl.inline_asm_elementwise(ODD, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        low = ((words & 255) ^ 128).to(tl.uint16).to(tl.float16, bitcast=True)
        high = ((words >> 8) ^ 128).to(tl.uint16).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def limbs(w):
    """Return float32 [channels, rows] as float16 [channels, 2 rows]: each number's high part and remainder, in adjacent columns."""
    high = w.to(tl.float16)
    low = (w - high.to(tl.float32)).to(tl.float16)
    return tl.reshape(tl.join(high, low), [w.shape[0], 2 * w.shape[1]])


@triton.jit
def code_scores(
    q_even, q_odd, size, lows, highs, CODES, STEPS, ZEROS, MU, LOGITS, CHANNELS, PEAK, WEIGHT, row, n, out, of_row,
    SCALE: tl.constexpr, D: tl.constexpr, OF_STEP: tl.constexpr, OF_ZERO: tl.constexpr, OF_ONE: tl.constexpr, PACKED: tl.constexpr,
):
    """Write one encoded block's LOGITS, PEAK, WEIGHT and CHANNELS for ROW_TILE rows of a kv head.

    PEAK: the largest logit; WEIGHT: the sum of exp(logit - PEAK); CHANNELS: sum_c |q_c| radius_c. Queries come divided by ``size``, so
    results are multiplied by it. ``lows``, ``highs``: the first and the last position that each row sees. ``n``: the block's index in the
    store; ``row``: its index in its page; ``out``: index of each row's block 0; ``of_row``: the rows that exist. CODES, STEPS, ZEROS:
    pointers to the page's planes; MU: the block's largest norm of a key. OF_STEP, OF_ZERO, OF_ONE: a channel's radius is OF_STEP * step +
    OF_ZERO * |zero| + OF_ONE. NaN if a result may overflow.
    """
    j = tl.arange(0, BLOCK)[:, None]
    c = tl.arange(0, D // 2)
    words = tl.load(CODES + row * (BLOCK * D // 2) + j * (D // 2) + c[None, :])
    step_even = tl.load(STEPS + row * D + 2 * c)
    step_odd = tl.load(STEPS + row * D + 2 * c + 1)
    zero_even = tl.load(ZEROS + row * D + 2 * c)
    zero_odd = tl.load(ZEROS + row * D + 2 * c + 1)
    step_bits = tl.maximum(largest(step_even), largest(step_odd))
    POINT: tl.constexpr = 2.0**28 / D
    most, reciprocal = octave(step_bits.to(tl.float32, bitcast=True), LEAST_STEP)
    scaled_even = step_even * (reciprocal * ROOM)
    scaled_odd = step_odd * (reciprocal * ROOM)
    codes_even, codes_odd = unpacked(words, PACKED)
    products = tl.dot(codes_even, limbs(q_even * scaled_even[:, None]), input_precision="ieee")
    products = tl.dot(codes_odd, limbs(q_odd * scaled_odd[:, None]), products, input_precision="ieee")
    both = tl.sum(tl.reshape(products, [BLOCK, ROW_TILE, 2]), 2)
    # Sums over the threads of a warp take one instruction for integers and ten for floats, so both are added in fixed point.
    low_even = zero_even - 128 * step_even
    low_odd = zero_odd - 128 * step_odd
    low_bits = tl.maximum(largest(low_even), largest(low_odd))
    low_size, low_scale = octave(low_bits.to(tl.float32, bitcast=True), 1)
    # One factor after the other: their product may overflow float32.
    low_even = low_even * low_scale * POINT
    low_odd = low_odd * low_scale * POINT
    of_low = tl.sum(nearest(q_even * low_even[:, None] + q_odd * low_odd[:, None], PACKED), 0).to(tl.float32) * (low_size / POINT)
    radius_even = step_even * OF_STEP + tl.abs(zero_even) * OF_ZERO + OF_ONE
    radius_odd = step_odd * OF_STEP + tl.abs(zero_odd) * OF_ZERO + OF_ONE
    radius_bits = tl.maximum(largest(radius_even), largest(radius_odd))
    radius_size, radius_scale = octave(radius_bits.to(tl.float32, bitcast=True), 1)
    radius_even = radius_even * radius_scale * POINT
    radius_odd = radius_odd * radius_scale * POINT
    reach = tl.abs(q_even) * radius_even[:, None] + tl.abs(q_odd) * radius_odd[:, None]
    reach = (tl.sum(nearest(reach, PACKED), 0) + D).to(tl.float32) * (radius_size / POINT)
    # An integer is never Inf or NaN, so overflow is checked here. The loss to subnormals and to fixed point is relative to the largest step
    # and ``low``, which are within the keys' own largest norm unless planes are not what was encoded.
    reach_of_keys = tl.load(MU) * (1.0 + 2.0**-10) + 2.0**-120
    fine = tl.maximum(low_bits.to(tl.float32, bitcast=True), 127 * step_bits.to(tl.float32, bitcast=True)) <= reach_of_keys
    spoiled = tl.where(fine & (tl.maximum(low_bits, radius_bits) < TOO_LARGE), 0.0, float("nan"))
    logits = (both * (most * BACK) + (of_low + spoiled)[None, :]) * (size * SCALE)[None, :]
    reach += spoiled
    t = n * BLOCK + j
    logits = tl.where((t >= lows[None, :]) & (t <= highs[None, :]), logits, float("-inf"))
    tl.store(LOGITS + (out + n)[None, :] * BLOCK + j, logits, mask=of_row[None, :])
    tl.store(CHANNELS + out + n, reach * size, mask=of_row)
    peak, weight = weighed(logits)
    tl.store(PEAK + out + n, peak, mask=of_row)
    tl.store(WEIGHT + out + n, weight, mask=of_row)


@triton.jit
def newest_scores(
    AT_Q, low, high, CODES, STEPS, ZEROS, RECENT_K, LOGITS, CHANNELS, PEAK, WEIGHT, row, rk_t, newest, n, base,
    SCALE: tl.constexpr, D: tl.constexpr, OF_STEP: tl.constexpr, OF_ZERO: tl.constexpr, OF_ONE: tl.constexpr,
):
    """Write one row's LOGITS, PEAK, WEIGHT and CHANNELS of block n, which contains newest tokens; in float32.

    Tokens at positions from ``base`` on are read from RECENT_K, earlier ones from codes. The outputs and constants are as in
    ``code_scores``. AT_Q: the row's query. ``row``: the block's index in its page; ``rk_t``: stride of tokens in RECENT_K, which has
    ``newest``; the row sees positions ``low`` to ``high``.
    """
    c = tl.arange(0, D)[None, :]
    q = tl.load(AT_Q + c).to(tl.float32)
    step = tl.load(STEPS + row * D + c)
    zero = tl.load(ZEROS + row * D + c)
    tl.store(CHANNELS + n, tl.sum(tl.sum(tl.abs(q) * (step * OF_STEP + tl.abs(zero) * OF_ZERO + OF_ONE), 1), 0))
    for part in range(BLOCK // PART):
        j = part * PART + tl.arange(0, PART)
        t = n * BLOCK + j
        in_window = (t >= base) & (t < base + newest)
        new = tl.load(RECENT_K + (t - base)[:, None] * rk_t + c, mask=in_window[:, None], other=0.0).to(tl.float32)
        codes = tl.load(CODES + row * (BLOCK * D) + j[:, None] * D + c)
        # The product is exact, since steps have 16 bits: fused or not, this equals the scheme's decoding.
        k = tl.where((t >= base)[:, None], new, codes.to(tl.float32) * step + zero)
        tl.store(LOGITS + t, tl.where((t >= low) & (t <= high), tl.sum(k * q, 1) * SCALE, float("-inf")))
    # Written by some threads of this program, read by others.
    tl.debug_barrier()
    peak, weight = weighed(tl.load(LOGITS + n * BLOCK + tl.arange(0, BLOCK)))
    tl.store(PEAK + n, peak)
    tl.store(WEIGHT + n, weight)


@triton.jit
def largest_norm(RECENT, recent_t, t, seen, D: tl.constexpr):
    """Return an upper bound on max_t |x_t|_2 over the newest tokens that are ``seen``.

    ``t``: the tokens' indices in RECENT, which has stride ``recent_t``.
    """
    x = tl.load(RECENT + t[:, None] * recent_t + tl.arange(0, D)[None, :], mask=seen[:, None], other=0.0).to(tl.float32)
    return norm_above(tl.max(tl.sum(x * x, 1), 0))


@triton.jit
def deviations(
    CHANNELS, PEAK, WEIGHT, DELTA, OWN, at, of_row, live, unseen, alone, kappa, mu, query_norm, SCALE: tl.constexpr, D: tl.constexpr,
):
    """Write DELTA and OWN, upper bounds on the error of a logit of blocks [blocks, rows], by codes and by originals.

    For ``unseen`` blocks PEAK becomes -inf and WEIGHT 0, so they have no mass. ``at``: indices of the entries; ``of_row``: those to write;
    ``live``: blocks that the row sees, others get 0; ``alone``: blocks without codes. ``kappa``, ``mu``: the blocks' notes (``note``).
    ``query_norm``: an upper bound on the norm of each row's query. SCALE: the magnitude of the factor of scores.
    """
    channels = tl.load(CHANNELS + at, mask=live & (alone == 0), other=0.0).to(tl.float64)
    own = rounding(0.0, 0.0, mu, 0.0, query_norm, SCALE, D + 4.0)
    delta = coded(0.0, channels, kappa, mu, 0.0, query_norm, SCALE, D + 8.0)
    tl.store(OWN + at, tl.where(live, up32(own), 0.0), mask=of_row)
    tl.store(DELTA + at, tl.where(live, up32(tl.where(alone, own, delta)), 0.0), mask=of_row)
    tl.store(PEAK + at, tl.full([1, 1], float("-inf"), tl.float32), mask=of_row & unseen)
    tl.store(WEIGHT + at, tl.zeros([1, 1], tl.float32), mask=of_row & unseen)


@triton.jit
def note(NOTES, place, kappa, mu, eta, nu, mask):
    """Store four norms of each block in NOTES [blocks, 4], which all later kernels read: the largest norms over its tokens.

    ``kappa``: of key minus decoded key; ``mu``: of keys; ``eta``: of value minus decoded value; ``nu``: of values. ``place``: the blocks'
    indices; ``mask``: the blocks to write.
    """
    tl.store(NOTES + place * 4, kappa, mask=mask)
    tl.store(NOTES + place * 4 + 1, mu, mask=mask)
    tl.store(NOTES + place * 4 + 2, eta, mask=mask)
    tl.store(NOTES + place * 4 + 3, nu, mask=mask)


@triton.jit
def key_scores(
    Q, CODES, STEPS, ZEROS, KEY_NOTES, VALUE_NOTES, RECENT_K, RECENT_V, HI, LO, BASE, SINK, AT, SINKS, DAMAGED, LOGITS, CHANNELS, PEAK,
    WEIGHT, DELTA, OWN, NOTES, QUERY_NORM,
    q_b, q_h, q_s, codes_n, codes_b, codes_h, steps_n, steps_b, steps_h, key_notes_n, key_notes_b, key_notes_h, value_notes_n,
    value_notes_b, value_notes_h, rk_b, rk_h, rk_t, rv_b, rv_h, rv_t, hi_b, hi_s, lo_b, lo_s, base_b, sink_h, blocks, newest, span,
    SCALE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr,
    SPAN: tl.constexpr, PER_PAGE: tl.constexpr, KEY_NOTE: tl.constexpr, OF_STEP: tl.constexpr, OF_ZERO: tl.constexpr,
    OF_ONE: tl.constexpr, HAS_LO: tl.constexpr, HAS_SINK: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
):
    """Score ``span`` (at most SPAN) blocks of one kv head for ROW_TILE rows by codes: write LOGITS, PEAK, WEIGHT, CHANNELS, DELTA and OWN.

    All are float32: LOGITS by token, the others [B, K, rows, N] (``code_scores``, ``deviations``). The first tile of rows also writes NOTES
    [B, K, N, 4]. The last program of a head has the blocks with newest tokens; it measures mu and nu of those wholly in the window, and
    writes other kernels' inputs: AT, SINKS (each row's sink), QUERY_NORM, and DAMAGED = 0. Every block of the planes is written; those that
    a row does not see get no mass.

    HI and LO: the positions that a query sees, as in ``attend``; BASE: the position of the window's first token; ``newest``: tokens in
    RECENT_K and RECENT_V. KEY_NOTE: norms of a block in KEY_NOTES. OF_STEP, OF_ZERO, OF_ONE: see ``code_scores``.
    """
    pair = tl.program_id(1)
    b = (pair // K).to(tl.int64)
    h = (pair % K).to(tl.int64)
    ROWS: tl.constexpr = G * S
    MAGNITUDE: tl.constexpr = SCALE if SCALE >= 0 else -SCALE
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
    key_notes = KEY_NOTES + b * key_notes_b + h * key_notes_h
    value_notes = VALUE_NOTES + b * value_notes_b + h * value_notes_h
    in_window = tl.maximum(base // BLOCK, start // BLOCK)
    q_even = every_other(queries, q_h, q_s, r0, 0, D, S, ROWS)
    q_odd = every_other(queries, q_h, q_s, r0, 1, D, S, ROWS)
    size, reciprocal = octave(tl.max(tl.maximum(tl.abs(q_even), tl.abs(q_odd)), 0), 1)
    # Queries too large for float32 sums of products become NaN, since fixed point would hide the overflow.
    reciprocal = tl.where(size >= 2.0**126, float("nan"), reciprocal)
    q_even = q_even * reciprocal[None, :]
    q_odd = q_odd * reciprocal[None, :]
    # Of numbers below two: nothing overflows, and flushed terms are negligible against the largest.
    query_norm = norm_above(tl.sum(q_even * q_even + q_odd * q_odd, 0)).to(tl.float64) * size.to(tl.float64)
    if tl.program_id(0) < tl.num_programs(0) - 1:
        words = of_heads.to(tl.pointer_type(tl.uint16), bitcast=True)
        first = tl.program_id(0) * span
        n0 = tl.maximum(first, start // BLOCK)
        n1 = tl.minimum(first + span, tl.minimum(base // BLOCK, last // BLOCK + 1))
        for turn in tl.range(0, tl.maximum(n1 - n0, 0), num_stages=STAGES):
            n = n0 + turn
            page, row = (n // PER_PAGE).to(tl.int64), n % PER_PAGE
            at = scales + page * steps_n
            code_scores(
                q_even, q_odd, size, lows, highs, words + page * (codes_n // 2), STEPS + at, ZEROS + at,
                key_notes + page * key_notes_n + row * KEY_NOTE + 1, LOGITS, CHANNELS, PEAK, WEIGHT, row, n, out, of_row, SCALE, D, OF_STEP,
                OF_ZERO, OF_ONE, PACKED,
            )
        # Written by some threads of this program, read by others.
        tl.debug_barrier()
        m = first + tl.arange(0, SPAN)
        mine = (m < tl.minimum(blocks, first + span)) & ((m < in_window) | (m > last // BLOCK))
        seen = (m >= n0) & (m < n1)
        page, row = (m // PER_PAGE).to(tl.int64), m % PER_PAGE
        kappa = tl.load(key_notes + page * key_notes_n + row * KEY_NOTE, mask=seen, other=0.0)
        mu = tl.load(key_notes + page * key_notes_n + row * KEY_NOTE + 1, mask=seen, other=0.0)
        live = seen[:, None] & (m[:, None] * BLOCK <= highs[None, :]) & (m[:, None] * BLOCK + BLOCK > lows[None, :])
        deviations(
            CHANNELS, PEAK, WEIGHT, DELTA, OWN, out[None, :] + m[:, None], of_row[None, :] & mine[:, None], live, seen[:, None] == 0,
            live & (live == 0), kappa.to(tl.float64)[:, None], mu.to(tl.float64)[:, None], query_norm[None, :], MAGNITUDE, D,
        )
        if r0 == 0:
            eta = tl.load(value_notes + page * value_notes_n + row * 2, mask=seen, other=0.0)
            nu = tl.load(value_notes + page * value_notes_n + row * 2 + 1, mask=seen, other=0.0)
            note(NOTES, pair * blocks + m, kappa, mu, eta, nu, mine)
    else:
        tl.store(QUERY_NORM + first_row + r, query_norm, mask=of_row)
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
        for turn in range(tl.maximum(last // BLOCK + 1 - in_window, 0)):
            n = in_window + turn
            page, row = (n // PER_PAGE).to(tl.int64), n % PER_PAGE
            at = scales + page * steps_n
            new_k = RECENT_K + b * rk_b + h * rk_h
            for i in range(tl.minimum(ROW_TILE, ROWS - r0)):
                one = r0 + i
                high = between(tl.load(HI + b * hi_b + (one % S) * hi_s), -1, tokens - 1)
                low = one * 0
                if HAS_LO:
                    low = between(tl.load(LO + b * lo_b + (one % S) * lo_s), 0, tokens)
                mine = (first_row + one) * blocks
                newest_scores(
                    queries + one // S * q_h + one % S * q_s, low, high, of_heads + page * codes_n, STEPS + at, ZEROS + at, new_k,
                    LOGITS + mine * BLOCK, CHANNELS + mine, PEAK + mine, WEIGHT + mine, row, rk_t, newest, n, base, SCALE, D, OF_STEP,
                    OF_ZERO, OF_ONE,
                )
            tl.debug_barrier()
            alone = n * BLOCK >= base
            t = n * BLOCK + tl.arange(0, BLOCK)
            seen = alone & (t >= start) & (t <= last) & (t < base + newest)
            kappa = tl.load(key_notes + page * key_notes_n + row * KEY_NOTE)
            mu = tl.load(key_notes + page * key_notes_n + row * KEY_NOTE + 1)
            kappa = tl.where(alone, 0.0, kappa)
            mu = tl.where(alone, largest_norm(new_k, rk_t, t - base, seen, D), mu)
            live = ((n * BLOCK <= highs) & (n * BLOCK + BLOCK > lows))[None, :]
            deviations(
                CHANNELS, PEAK, WEIGHT, DELTA, OWN, (out + n)[None, :], of_row[None, :], live, live & (live == 0), alone,
                kappa.to(tl.float64), mu.to(tl.float64), query_norm[None, :], MAGNITUDE, D,
            )
            if r0 == 0:
                eta = tl.load(value_notes + page * value_notes_n + row * 2)
                nu = tl.load(value_notes + page * value_notes_n + row * 2 + 1)
                nu = tl.where(alone, largest_norm(RECENT_V + b * rv_b + h * rv_h, rv_t, t - base, seen, DV), nu)
                note(NOTES, pair * blocks + n, kappa, mu, tl.where(alone, 0.0, eta), nu, r0 == 0)
