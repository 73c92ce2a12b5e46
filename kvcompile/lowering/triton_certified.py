"""The Triton kernels of certified attention; ``certified_device`` puts them together and says what each step needs.

Plain float32 multiply-adds and no tensor cores: a certificate needs products whose rounding is known, with few rows (G = H / K) they
cost what unpacking costs, and a dot product of 16-bit operands would have to be repeated for every limb of what has more bits.

    score       int8 keys once: every row's logits, and of each block its largest, the sum of exp relative to it, sum_c |q_c| radius_c
    exact       original keys of the blocks that some row's flags ask for: their logits over the old ones, and the same sums; what the
                consistency check compares
    mix         int4 values once, with weights from the logits as they stand then; original values where flags ask for them
    choose      which blocks stand first in descending order of an amount until what is left fits a budget, without sorting

Logits stay in memory between ``score`` and ``mix``: 4 bytes a token and row, an eighth of tier 1 at four rows. In return nothing is
ever subtracted: a correction (exact minus coded) of promoted blocks would cancel, and its rounding would have to be certified as
well. A logit is overwritten where its block is promoted, and the weights of all tokens are made from one maximum, so splits add up.

Blocks are flagged, not listed: programs look at the flags of their blocks and end where none is set, so nobody has to compact anything.
Rows r = g * S + s of a kv head. All block arrays [B, K, rows, N] are contiguous; what is not visible in them is never written.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(16)
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
def sight(HI, LO, hi_s, lo_s, tokens, S: tl.constexpr, S2: tl.constexpr, HAS_LO: tl.constexpr):
    """The first and the last position that any query of a batch row sees."""
    s = tl.arange(0, S2)
    last = tl.minimum(tl.max(tl.load(HI + s * hi_s, mask=s < S, other=-1), 0), tokens - 1).to(tl.int32)
    if HAS_LO:
        first = tl.maximum(tl.min(tl.load(LO + s * lo_s, mask=s < S, other=2147483647), 0), 0).to(tl.int32)
    else:
        first = last * 0
    return first, last


@triton.jit
def of_row(HI, LO, s, hi_s, lo_s, tokens, HAS_LO: tl.constexpr):
    """The same of query s."""
    last = tl.minimum(tl.load(HI + s * hi_s), tokens - 1).to(tl.int32)
    if HAS_LO:
        first = tl.minimum(tl.maximum(tl.load(LO + s * lo_s), 0), tokens).to(tl.int32)
    else:
        first = last * 0
    return first, last


@triton.jit
def whole_until(BASE, b, base_b):
    """From which position on tokens come from the window; far below zero is as good as zero."""
    return tl.maximum(tl.load(BASE + b * base_b), 0).to(tl.int32)


@triton.jit
def norm_above(square):
    """The root of a float32 sum of squares, not below the exact one: of up to 1024 terms, some of which may have been flushed."""
    return tl.sqrt(square) * (1.0 + 2.0**-14) + 2.0**-57


@triton.jit
def score_tile(
    Q, CODES, STEPS, ZEROS, KEY_NOTES, VALUE_NOTES, RECENT_K, RECENT_V, HI, LO, LOGITS, PEAK, WEIGHT, CHANNELS, NOTES,
    q_s, codes_n, steps_n, key_notes_n, value_notes_n, rk_t, rv_t, hi_s, lo_s, blocks, newest, scale, n0, start, last, base, pair, r0,
    D: tl.constexpr, DV: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, NB: tl.constexpr,
    PER_PAGE: tl.constexpr, HAS_LO: tl.constexpr, OF_STEP: tl.constexpr, OF_ZERO: tl.constexpr, OF_ONE: tl.constexpr,
    WINDOW: tl.constexpr, q_h,
):
    """NB blocks from n0 on, TILE rows from r0 on; pointers stand at their batch row and head. WINDOW: some tokens are not codes.

    The codes are loaded last: all that is calculated with them then has their layout, and not that of what is multiplied with them.
    """
    n = n0 + tl.arange(0, NB)
    here = n * BLOCK <= last
    page, row = (n // PER_PAGE).to(tl.int64), n % PER_PAGE
    j = tl.arange(0, BLOCK)
    c = tl.arange(0, D)[None, None, :]
    t = n[:, None] * BLOCK + j[None, :]
    queries = ()
    for i in tl.static_range(TILE):
        r = tl.minimum(r0 + i, ROWS - 1)
        queries = queries + (tl.load(Q + (r // S) * q_h + (r % S) * q_s + c).to(tl.float32),)

    note = page * key_notes_n + row * 2
    kappa = tl.load(KEY_NOTES + note, mask=here, other=0.0)
    mu = tl.load(KEY_NOTES + note + 1, mask=here, other=0.0)
    note = page * value_notes_n + row * 2
    eta = tl.load(VALUE_NOTES + note, mask=here, other=0.0)
    nu = tl.load(VALUE_NOTES + note + 1, mask=here, other=0.0)
    if WINDOW:
        in_window = ((t >= base) & (t < base + newest))[:, :, None]
        from_window = (t - base)[:, :, None]
        new = tl.load(RECENT_K + from_window * rk_t + c, mask=in_window, other=0.0).to(tl.float32)
        v = tl.load(RECENT_V + from_window * rv_t + tl.arange(0, DV)[None, None, :], mask=in_window, other=0.0).to(tl.float32)
        alone = n * BLOCK >= base
        seen = (t >= start) & (t <= last)
        kappa = tl.where(alone, 0.0, kappa)
        eta = tl.where(alone, 0.0, eta)
        mu = tl.where(alone, norm_above(tl.max(tl.where(seen, tl.sum(new * new, 2), 0.0), 1)), mu)
        nu = tl.where(alone, norm_above(tl.max(tl.where(seen, tl.sum(v * v, 2), 0.0), 1)), nu)
    if r0 == 0:
        slot = NOTES + (pair * blocks + n) * 4
        tl.store(slot, kappa, mask=here)
        tl.store(slot + 1, mu, mask=here)
        tl.store(slot + 2, eta, mask=here)
        tl.store(slot + 3, nu, mask=here)

    per_block = (page * steps_n + row * D)[:, None, None] + c
    step = tl.load(STEPS + per_block, mask=here[:, None, None], other=0.0)
    zero = tl.load(ZEROS + per_block, mask=here[:, None, None], other=0.0)
    at = CODES + (page * codes_n + row * (BLOCK * D))[:, None, None] + (j[None, :, None] * D + c)
    codes = tl.load(at, mask=here[:, None, None], other=0)
    # The product is exact, since steps have 16 bits: fused or not, this is what the scheme decodes.
    k = codes.to(tl.float32) * step + zero
    if WINDOW:
        k = tl.where((t >= base)[:, :, None], new, k)
    radius = step * OF_STEP + tl.abs(zero) * OF_ZERO + OF_ONE
    for i in tl.static_range(TILE):
        r = r0 + i
        if r < ROWS:
            low, high = of_row(HI, LO, r % S, hi_s, lo_s, blocks * BLOCK, HAS_LO)
            logit = tl.sum(k * queries[i], 2) * scale
            logit = tl.where((t >= low) & (t <= high), logit, float("-inf"))
            peak = tl.max(logit, 1)
            top = tl.where(peak == float("-inf"), 0.0, peak)
            weight = tl.sum(exp_of(logit - top[:, None]), 1)
            channels = tl.max(tl.sum(tl.abs(queries[i]) * radius, 2), 1)
            out = (pair.to(tl.int64) * ROWS + r) * blocks
            tl.store(LOGITS + out * BLOCK + t, logit, mask=here[:, None])
            tl.store(PEAK + out + n, peak, mask=here)
            tl.store(WEIGHT + out + n, weight, mask=here)
            tl.store(CHANNELS + out + n, channels, mask=here)


@triton.jit
def score(
    Q, CODES, STEPS, ZEROS, KEY_NOTES, VALUE_NOTES, RECENT_K, RECENT_V, HI, LO, BASE, LOGITS, PEAK, WEIGHT, CHANNELS, NOTES,
    q_b, q_h, q_s, codes_n, codes_b, codes_h, steps_n, steps_b, steps_h, key_notes_n, key_notes_b, key_notes_h, value_notes_n,
    value_notes_b, value_notes_h, rk_b, rk_h, rk_t, rv_b, rv_h, rv_t, hi_b, hi_s, lo_b, lo_s, base_b, blocks, newest, scale,
    D: tl.constexpr, DV: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, TILE: tl.constexpr,
    NB: tl.constexpr, PER_PAGE: tl.constexpr, HAS_LO: tl.constexpr, OF_STEP: tl.constexpr, OF_ZERO: tl.constexpr, OF_ONE: tl.constexpr,
):
    """NB blocks of one kv head, TILE rows: logits, sums of blocks, norms."""
    pair = tl.program_id(1)
    b = (pair // K).to(tl.int64)
    h = (pair % K).to(tl.int64)
    start, last = sight(HI + b * hi_b, LO + b * lo_b, hi_s, lo_s, blocks * BLOCK, S, S2, HAS_LO)
    n0 = tl.program_id(0) * NB
    if (n0 * BLOCK <= last) & ((n0 + NB) * BLOCK > start):
        base = whole_until(BASE, b, base_b)
        q = Q + b * q_b + h * G * q_h
        codes = CODES + b * codes_b + h * codes_h
        scales = b * steps_b + h * steps_h
        key_notes = KEY_NOTES + b * key_notes_b + h * key_notes_h
        value_notes = VALUE_NOTES + b * value_notes_b + h * value_notes_h
        new_k = RECENT_K + b * rk_b + h * rk_h
        new_v = RECENT_V + b * rv_b + h * rv_h
        if (n0 + NB) * BLOCK > base:
            score_tile(
                q, codes, STEPS + scales, ZEROS + scales, key_notes, value_notes, new_k, new_v, HI + b * hi_b, LO + b * lo_b, LOGITS, PEAK,
                WEIGHT, CHANNELS, NOTES, q_s, codes_n, steps_n, key_notes_n, value_notes_n, rk_t, rv_t, hi_s, lo_s, blocks, newest, scale,
                n0, start, last, base, pair, tl.program_id(2) * TILE, D, DV, S, G * S, TILE, NB, PER_PAGE, HAS_LO, OF_STEP, OF_ZERO,
                OF_ONE, True, q_h,
            )
        else:
            score_tile(
                q, codes, STEPS + scales, ZEROS + scales, key_notes, value_notes, new_k, new_v, HI + b * hi_b, LO + b * lo_b, LOGITS, PEAK,
                WEIGHT, CHANNELS, NOTES, q_s, codes_n, steps_n, key_notes_n, value_notes_n, rk_t, rv_t, hi_s, lo_s, blocks, newest, scale,
                n0, start, last, base, pair, tl.program_id(2) * TILE, D, DV, S, G * S, TILE, NB, PER_PAGE, HAS_LO, OF_STEP, OF_ZERO,
                OF_ONE, False, q_h,
            )


@triton.jit
def largest_square(x):
    """max_t |x_t|^2 of tokens [16, D], float64; what is no number is infinite."""
    square = tl.sum(x * x, 1)
    return tl.max(tl.where(square == square, square, float("inf")), 0)


@triton.jit
def exact(
    Q, CODES, STEPS, ZEROS, ORIGINALS, READ, HI, LO, BASE, LOGITS, PEAK, WEIGHT, APART, RESIDUAL, SIZE,
    q_b, q_h, q_s, codes_n, codes_b, codes_h, steps_n, steps_b, steps_h, from_n, from_b, from_h, from_t, hi_b, hi_s, lo_b, lo_s,
    base_b, blocks, page_tokens, scale,
    D: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, NB: tl.constexpr, PER_PAGE: tl.constexpr,
    HAS_LO: tl.constexpr, ALL: tl.constexpr,
):
    """NB blocks of one kv head: those that some row's flag READ [B, K, rows, N] asks for (ALL: READ [B, K, rows], all of its blocks)."""
    b = (tl.program_id(1) // K).to(tl.int64)
    h = (tl.program_id(1) % K).to(tl.int64)
    tokens = blocks * BLOCK
    start, last = sight(HI + b * hi_b, LO + b * lo_b, hi_s, lo_s, tokens, S, S2, HAS_LO)
    base = whole_until(BASE, b, base_b)
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
    j = tl.arange(0, BLOCK)
    c = tl.arange(0, D)[None, :]
    for _turn in range(0, tl.sum(pending, 0)):
        first = tl.min(tl.where(pending != 0, nb, NB), 0)
        pending = tl.where(nb == first, 0, pending)
        n = n0 + first
        t = n * BLOCK + j
        coded = t < base
        own = coded & (t >= start) & (t <= last)
        here = ORIGINALS + (t // page_tokens).to(tl.int64)[:, None] * from_n + b * from_b + h * from_h
        k = tl.load(here + (t % page_tokens)[:, None] * from_t + c, mask=coded[:, None], other=0.0).to(tl.float32)
        k64 = tl.where(own[:, None], k, 0.0).to(tl.float64)
        place = tl.program_id(1) * blocks + n
        if not ALL:
            page, row = (n // PER_PAGE).to(tl.int64), n % PER_PAGE
            codes = tl.load(CODES + page * codes_n + b * codes_b + h * codes_h + row * (BLOCK * D) + j[:, None] * D + c)
            per_block = page * steps_n + b * steps_b + h * steps_h + row * D + c
            decoded = codes.to(tl.float32) * tl.load(STEPS + per_block) + tl.load(ZEROS + per_block)
            apart = k64 - tl.where(own[:, None], decoded, 0.0).to(tl.float64)
            tl.store(RESIDUAL + place, largest_square(apart))
        tl.store(SIZE + place, largest_square(k64))
        for r in tl.static_range(G * S):
            if ALL:
                flag = tl.load(READ + heads + r) != 0
            else:
                flag = tl.load(READ + (heads + r) * blocks + n) != 0
            if flag:
                q = tl.load(Q + b * q_b + (h * G + r // S) * q_h + (r % S) * q_s + c).to(tl.float32)
                low, high = of_row(HI + b * hi_b, LO + b * lo_b, r % S, hi_s, lo_s, tokens, HAS_LO)
                at = LOGITS + (heads + r) * tokens + t
                old = tl.load(at)
                seen = (t >= low) & (t <= high)
                found = tl.sum(k * q, 1) * scale
                new = tl.where(seen, tl.where(coded, found, old), float("-inf"))
                # Whoever reads a logit here has read it before any is written: the barrier of the sums below is not enough.
                tl.debug_barrier()
                tl.store(at, new)
                peak = tl.max(new, 0)
                top = tl.where(peak == float("-inf"), 0.0, peak)
                tl.store(PEAK + (heads + r) * blocks + n, peak)
                tl.store(WEIGHT + (heads + r) * blocks + n, tl.sum(exp_of(new - top), 0))
                if not ALL:
                    moved = tl.abs(found - old)
                    moved = tl.where(moved == moved, moved, float("inf"))
                    tl.store(APART + (heads + r) * blocks + n, tl.max(tl.where(seen & coded, moved, 0.0), 0))


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
    """Blocks of codes from n_first on, but for those that are flagged. Sixteen tokens a turn, of which a thread has two."""
    HALF: tl.constexpr = DV // 2
    RUNS: tl.constexpr = HALF // GROUP
    u = tl.arange(0, 2)[:, None, None, None]
    lane = tl.arange(0, 8)[None, :, None, None]
    run = tl.arange(0, RUNS)[None, None, :, None]
    c = tl.arange(0, GROUP)[None, None, None, :]
    low_sums = ()
    high_sums = ()
    for _i in tl.static_range(TILE):
        low_sums = low_sums + (tl.zeros([8, RUNS, GROUP], tl.float32),)
        high_sums = high_sums + (tl.zeros([8, RUNS, GROUP], tl.float32),)
    for step in tl.range(0, tl.maximum(n_stop - n_first, 0)):
        n = n_first + step
        t = n * BLOCK + u * 8 + lane
        seen = (t >= start) & (t < stop)
        page = (n * BLOCK // PAGE).to(tl.int64)
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
            new_low = new_low + (low_sums[i] + tl.sum(low_v * weights[i], 0),)
            new_high = new_high + (high_sums[i] + tl.sum(high_v * weights[i], 0),)
        low_sums = new_low
        high_sums = new_high
    to = tl.arange(0, RUNS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    for i in tl.static_range(TILE):
        if r0 + i < ROWS:
            tl.store(OUT + (r0 + i) * DV + to, tl.sum(low_sums[i], 0))
            tl.store(OUT + (r0 + i) * DV + HALF + to, tl.sum(high_sums[i], 0))


@triton.jit
def mix_exact(
    CODES, STEPS, ZEROS, ORIGINALS, RECENT_V, LOGITS, TOP, READ, OUT, RESIDUAL, SIZE, codes_n, steps_n, from_n, from_t, rv_t,
    blocks, page_tokens, newest, start, last, base, n_first, n_stop, heads, r0, window,
    DV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, NEWEST: tl.constexpr, PAGE: tl.constexpr,
    ALL: tl.constexpr,
):
    """Flagged blocks from n_first on by their original values (ALL: every block, for rows that are flagged); ``window``: the newest tokens."""
    HALF: tl.constexpr = DV // 2
    RUNS: tl.constexpr = HALF // GROUP
    j = tl.arange(0, BLOCK)[:, None, None]
    run = tl.arange(0, RUNS)[None, :, None]
    c = run * GROUP + tl.arange(0, GROUP)[None, None, :]
    sixteen = tl.arange(0, 16)
    low_sums = ()
    high_sums = ()
    for _i in tl.static_range(TILE):
        low_sums = low_sums + (tl.zeros([RUNS, GROUP], tl.float32),)
        high_sums = high_sums + (tl.zeros([RUNS, GROUP], tl.float32),)
    for first in range(n_first, n_stop, 16):
        pending = (first + sixteen < n_stop).to(tl.int32)
        if not ALL:
            asked = pending * 0
            for i in tl.static_range(TILE):
                r = heads + tl.minimum(r0 + i, ROWS - 1)
                flags = tl.load(READ + r * blocks + first + sixteen, mask=pending != 0, other=0)
                asked = tl.where(flags != 0, 1, asked)
            pending = asked
        for _turn in range(0, tl.sum(pending, 0)):
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
                weights = weights + (exp_of(logit - tl.load(TOP + r)),)
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
            tl.store(SIZE + n, largest_run_square(low_v, high_v))
            if not ALL:
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
                tl.store(RESIDUAL + n, largest_run_square(low_away, high_away))
    if window:
        row = tl.arange(0, NEWEST)[:, None, None]
        t = base + row
        seen = (t >= start) & (t <= last) & (row < newest)
        weights = ()
        for i in tl.static_range(TILE):
            r = heads + tl.minimum(r0 + i, ROWS - 1)
            logit = tl.load(LOGITS + r * blocks * BLOCK + t, mask=seen, other=float("-inf"))
            weights = weights + (exp_of(logit - tl.load(TOP + r)),)
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
        if r0 + i < ROWS:
            tl.store(OUT + (r0 + i) * DV + to, low_sums[i])
            tl.store(OUT + (r0 + i) * DV + HALF + to, high_sums[i])


@triton.jit
def mix(
    CODES, STEPS, ZEROS, ORIGINALS, RECENT_V, LOGITS, TOP, READ, HI, LO, BASE, OUT, RESIDUAL, SIZE,
    codes_n, codes_b, codes_h, steps_n, steps_b, steps_h, from_n, from_b, from_h, from_t, rv_b, rv_h, rv_t, hi_b, hi_s, lo_b, lo_s,
    base_b, blocks, page_tokens, newest, splits, share, own_share,
    DV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, TILE: tl.constexpr,
    OWN_TILE: tl.constexpr, NEWEST: tl.constexpr, PAGE: tl.constexpr, HAS_LO: tl.constexpr, ALL: tl.constexpr,
):
    """sum_t exp(logit - TOP) v_t, [splits + own splits, B, K, rows, DV], of one kv head and a tile of rows.

    The first ``splits`` programs of a head have ``share`` blocks of codes each, the others ``own_share`` blocks whose originals may be
    wanted, the last one the newest tokens too. READ as in ``exact``; where ALL there are only the others, and rows that are not
    flagged are left out. Channels of a word's two codes are half a head apart.
    """
    pair = tl.program_id(1)
    b = (pair // K).to(tl.int64)
    h = (pair % K).to(tl.int64)
    ROWS: tl.constexpr = G * S
    split = tl.program_id(0)
    heads = pair.to(tl.int64) * ROWS
    start, last = sight(HI + b * hi_b, LO + b * lo_b, hi_s, lo_s, blocks * BLOCK, S, S2, HAS_LO)
    base = whole_until(BASE, b, base_b)
    stop = tl.minimum(last + 1, base)
    n_end = (stop + BLOCK - 1) // BLOCK
    out = OUT + (split * tl.num_programs(1) + pair).to(tl.int64) * (ROWS * DV)
    codes = CODES + b * codes_b + h * codes_h
    scales = b * steps_b + h * steps_h
    if split < splits:
        r0 = tl.program_id(2) * TILE
        if r0 < ROWS:
            n_first = start // BLOCK + split * share
            mix_codes(
                codes, STEPS + scales, ZEROS + scales, LOGITS, TOP, READ, out, codes_n, steps_n, blocks, start, stop, n_first,
                tl.minimum(n_first + share, n_end), heads, r0, DV, GROUP, ROWS, TILE, PAGE,
            )
    else:
        r0 = tl.program_id(2) * OWN_TILE
        n_first = start // BLOCK + (split - splits) * own_share
        n_stop = tl.minimum(n_first + own_share, n_end)
        window = split == tl.num_programs(0) - 1
        if ALL:
            anybody = 0
            for i in tl.static_range(OWN_TILE):
                anybody += tl.load(READ + heads + tl.minimum(r0 + i, ROWS - 1)).to(tl.int32)
            n_stop = tl.where(anybody != 0, n_stop, n_first)
            window = window & (anybody != 0)
        mix_exact(
            codes, STEPS + scales, ZEROS + scales, ORIGINALS + b * from_b + h * from_h, RECENT_V + b * rv_b + h * rv_h, LOGITS, TOP, READ,
            out, RESIDUAL + pair * blocks, SIZE + pair * blocks, codes_n, steps_n, from_n, from_t, rv_t, blocks, page_tokens, newest,
            start, last, base, n_first, n_stop, heads, r0, window, DV, GROUP, ROWS, OWN_TILE, NEWEST, PAGE, ALL,
        )


@triton.jit
def choose(
    ORDER, FIRST, SECOND, CHOSEN, WIDENED, blocks, least, most, most_widened,
    FIRST_BUDGET: tl.constexpr, SECOND_BUDGET: tl.constexpr, CHUNK: tl.constexpr, COVER: tl.constexpr, WIDEN: tl.constexpr,
):
    """The leading blocks of one head in descending order of ORDER, float32 (below zero: no candidate), as flags.

    As many as must leave so that FIRST, float64, adds up to at most FIRST_BUDGET over the rest, from ``least`` to ``most``; or, where
    more (WIDEN), the same of SECOND, up to ``most_widened``. COVER is off where all must leave. Nonnegative floats are ordered
    as their bits are: the place in the order is found four bits at a time, from sums over what lies below sixteen thresholds.
    Budgets are constants, since an operand would be float32.
    """
    row = tl.program_id(0).to(tl.int64) * blocks
    digit = tl.arange(0, 16)
    i = tl.arange(0, CHUNK)
    candidates = 0
    for first in range(0, blocks, CHUNK):
        inside = first + i < blocks
        candidates += tl.sum((tl.load(ORDER + row + first + i, mask=inside, other=-1.0) >= 0).to(tl.int32), 0)

    narrow = candidates
    if COVER:
        narrow = standing(ORDER, FIRST, row, blocks, FIRST_BUDGET, digit, i, CHUNK)
    count = tl.minimum(tl.maximum(narrow, least), most)
    if WIDEN:
        wide = tl.minimum(standing(ORDER, SECOND, row, blocks, SECOND_BUDGET, digit, i, CHUNK), most_widened)
        tl.store(WIDENED + tl.program_id(0), (wide > count).to(tl.int8))
        count = tl.maximum(count, wide)
    count = tl.minimum(count, candidates)

    # The largest bits that at least ``count`` candidates reach.
    edge = 0
    for shift in range(28, -4, -4):
        reach = edge + (digit << shift)
        held = digit * 0
        for first in range(0, blocks, CHUNK):
            bits = tl.load(ORDER + row + first + i, mask=first + i < blocks, other=-1.0).to(tl.int32, bitcast=True)
            held += tl.sum(((bits[None, :] >= reach[:, None]) & (bits >= 0)[None, :]).to(tl.int32), 1)
        fits = (held >= count) & (reach >= 0)
        edge += (tl.max(tl.where(fits, digit, 0), 0)) << shift

    above = 0
    for first in range(0, blocks, CHUNK):
        bits = tl.load(ORDER + row + first + i, mask=first + i < blocks, other=-1.0).to(tl.int32, bitcast=True)
        above += tl.sum((bits > edge).to(tl.int32), 0)
    # Equal ones in the order of their blocks.
    left = count - above
    for first in range(0, blocks, CHUNK):
        bits = tl.load(ORDER + row + first + i, mask=first + i < blocks, other=-1.0).to(tl.int32, bitcast=True)
        equal = (bits == edge).to(tl.int32)
        rank = tl.cumsum(equal, 0) - equal
        tl.store(CHOSEN + row + first + i, ((bits > edge) | ((equal != 0) & (rank < left))).to(tl.int8), mask=first + i < blocks)
        left -= tl.sum(equal, 0)


@triton.jit
def standing(ORDER, AMOUNT, row, blocks, BUDGET: tl.constexpr, digit, i, CHUNK: tl.constexpr):
    """How many candidates stand above the longest tail whose amounts add up to at most BUDGET; equal ones leave together."""
    edge = 0
    for shift in range(28, -4, -4):
        reach = edge + (digit << shift)
        below = (digit * 0).to(tl.float64)
        for first in range(0, blocks, CHUNK):
            inside = first + i < blocks
            bits = tl.load(ORDER + row + first + i, mask=inside, other=-1.0).to(tl.int32, bitcast=True)
            amount = tl.load(AMOUNT + row + first + i, mask=inside, other=0.0)
            below += tl.sum(tl.where((bits[None, :] < reach[:, None]) & (bits >= 0)[None, :], amount[None, :], 0.0), 1)
        fits = (below <= BUDGET) & (reach >= 0)
        edge += (tl.max(tl.where(fits, digit, 0), 0)) << shift
    count = 0
    for first in range(0, blocks, CHUNK):
        bits = tl.load(ORDER + row + first + i, mask=first + i < blocks, other=-1.0).to(tl.int32, bitcast=True)
        count += tl.sum((bits >= tl.maximum(edge, 0)).to(tl.int32), 0)
    return count
