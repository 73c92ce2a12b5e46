"""The Triton kernels of certified attention; ``certified_device`` puts them together and says what each step needs.

Keys: plain float32 multiply-adds and no tensor cores: a certificate needs products whose rounding is known, with few rows (G = H / K) they
cost what unpacking costs, and a dot product of 16-bit operands would have to be repeated for every limb of what has more bits.
Values: float16 on tensor cores, whose rounding is part of the certificate (``triton_mix``).

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

from kvcompile.lowering.triton_bounds import consistent, deviation, rounding

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
def beside(columns, COUNT: tl.constexpr):
    """One, two or four vectors as the columns of a matrix, which is stored at once."""
    if COUNT == 1:
        return columns[0][:, None]
    elif COUNT == 2:
        return tl.join(columns[0], columns[1])
    else:
        pairs = tl.join(tl.join(columns[0], columns[2]), tl.join(columns[1], columns[3]))
        return tl.reshape(pairs, [pairs.shape[0], 4])


@triton.jit
def score_block(
    queries, lows, highs, CODES, STEPS, ZEROS, RECENT_K, LOGITS, CHANNELS, codes_n, steps_n, rk_t, blocks, newest, n, base, heads, r0,
    SCALE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PER_PAGE: tl.constexpr, OF_STEP: tl.constexpr,
    OF_ZERO: tl.constexpr,
    OF_ONE: tl.constexpr, WINDOW: tl.constexpr,
):
    """One block, TILE rows from r0 on. WINDOW: tokens from ``base`` on are not codes.

    The codes are loaded last: all that is calculated with them then has their layout, and not that of what is multiplied with them.
    """
    page, row = (n // PER_PAGE).to(tl.int64), n % PER_PAGE
    j = tl.arange(0, BLOCK)
    c = tl.arange(0, D)[None, :]
    t = n * BLOCK + j
    if WINDOW:
        in_window = (t >= base) & (t < base + newest)
        new = tl.load(RECENT_K + (t - base)[:, None] * rk_t + c, mask=in_window[:, None], other=0.0).to(tl.float32)
    step = tl.load(STEPS + page * steps_n + row * D + c)
    zero = tl.load(ZEROS + page * steps_n + row * D + c)
    codes = tl.load(CODES + page * codes_n + row * (BLOCK * D) + j[:, None] * D + c)
    # The product is exact, since steps have 16 bits: fused or not, this is what the scheme decodes.
    k = codes.to(tl.float32) * step + zero
    if WINDOW:
        k = tl.where((t >= base)[:, None], new, k)
    radius = step * OF_STEP + tl.abs(zero) * OF_ZERO + OF_ONE
    logits = ()
    reach = ()
    for i in tl.static_range(TILE):
        seen = (t >= lows[i]) & (t <= highs[i])
        logits = logits + (tl.where(seen, tl.sum(k * queries[i], 1) * SCALE, float("-inf")),)
        reach = reach + (tl.sum(tl.abs(queries[i]) * radius, 1),)
    rows = r0 + tl.arange(0, TILE)
    out = (heads + rows) * blocks + n
    tl.store(LOGITS + out[None, :] * BLOCK + j[:, None], beside(logits, TILE), mask=(rows < ROWS)[None, :])
    tl.store(CHANNELS + out[None, :], beside(reach, TILE), mask=(rows < ROWS)[None, :])


@triton.jit
def between(x, least, most):
    """A position as int32, within the planes."""
    return tl.minimum(tl.maximum(x, least), most).to(tl.int32)


@triton.jit
def score(
    Q, CODES, STEPS, ZEROS, RECENT_K, HI, LO, BASE, SINK, AT, SINKS, DAMAGED, LOGITS, CHANNELS,
    q_b, q_h, q_s, codes_n, codes_b, codes_h, steps_n, steps_b, steps_h, rk_b, rk_h, rk_t, hi_b, hi_s, lo_b, lo_s, base_b, sink_h,
    blocks, newest,
    SCALE: tl.constexpr, D: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, TILE: tl.constexpr,
    SPAN: tl.constexpr, PER_PAGE: tl.constexpr, OF_STEP: tl.constexpr, OF_ZERO: tl.constexpr, OF_ONE: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_SINK: tl.constexpr,
):
    """SPAN blocks of one kv head, TILE rows: logits, and sum_c |q_c| radius_c. The last program of a head has the window's blocks.

    The first kernel of a step also writes what the others take as given: AT, each row's sink in float32, and that nothing is damaged.
    """
    pair = tl.program_id(1)
    b = (pair // K).to(tl.int64)
    h = (pair % K).to(tl.int64)
    ROWS: tl.constexpr = G * S
    heads = pair.to(tl.int64) * ROWS
    r0 = tl.program_id(2) * TILE
    tokens = blocks * BLOCK
    s = tl.arange(0, S2)
    base = between(tl.load(BASE + b * base_b), -(2**30), tokens)
    seen_last = between(tl.load(HI + b * hi_b + s * hi_s, mask=s < S, other=-1), -1, tokens - 1)
    seen_first = s * 0
    if HAS_LO:
        seen_first = between(tl.load(LO + b * lo_b + s * lo_s, mask=s < S, other=2147483647), 0, tokens)
    last = tl.max(seen_last, 0)
    start = tl.min(seen_first, 0)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        if (h == 0) & (r0 == 0):
            tl.store(AT + b * (2 * S + 1) + s, seen_last, mask=s < S)
            tl.store(AT + b * (2 * S + 1) + S + s, seen_first, mask=s < S)
            tl.store(AT + b * (2 * S + 1) + 2 * S, base)
        if r0 == 0:
            tl.store(DAMAGED + pair, 0)
    whole = tl.minimum(base // BLOCK, last // BLOCK + 1)
    queries = ()
    lows = ()
    highs = ()
    for i in tl.static_range(TILE):
        r = tl.minimum(r0 + i, ROWS - 1)
        at = Q + b * q_b + (h * G + r // S) * q_h + (r % S) * q_s
        queries = queries + (tl.load(at + tl.arange(0, D)[None, :]).to(tl.float32),)
        highs = highs + (between(tl.load(HI + b * hi_b + (r % S) * hi_s), -1, tokens - 1),)
        if HAS_LO:
            lows = lows + (between(tl.load(LO + b * lo_b + (r % S) * lo_s), 0, tokens),)
        else:
            lows = lows + (r * 0,)
        if tl.program_id(0) == tl.num_programs(0) - 1:
            if HAS_SINK:
                tl.store(SINKS + heads + r, tl.load(SINK + (h * G + r // S) * sink_h).to(tl.float32))
            else:
                tl.store(SINKS + heads + r, float("-inf"))
    codes = CODES + b * codes_b + h * codes_h
    scales = b * steps_b + h * steps_h
    new = RECENT_K + b * rk_b + h * rk_h
    if tl.program_id(0) < tl.num_programs(0) - 1:
        n0 = tl.maximum(tl.program_id(0) * SPAN, start // BLOCK)
        n1 = tl.minimum(tl.program_id(0) * SPAN + SPAN, whole)
        for step in tl.range(0, tl.maximum(n1 - n0, 0)):
            score_block(
                queries, lows, highs, codes, STEPS + scales, ZEROS + scales, new, LOGITS, CHANNELS, codes_n, steps_n, rk_t, blocks, newest,
                n0 + step, base, heads, r0, SCALE, D, ROWS, TILE, PER_PAGE, OF_STEP, OF_ZERO, OF_ONE, False,
            )
    else:
        n0 = tl.maximum(base // BLOCK, start // BLOCK)
        for step in range(tl.maximum(last // BLOCK + 1 - n0, 0)):
            score_block(
                queries, lows, highs, codes, STEPS + scales, ZEROS + scales, new, LOGITS, CHANNELS, codes_n, steps_n, rk_t, blocks, newest,
                n0 + step, base, heads, r0, SCALE, D, ROWS, TILE, PER_PAGE, OF_STEP, OF_ZERO, OF_ONE, True,
            )


@triton.jit
def sums(
    Q, LOGITS, CHANNELS, KEY_NOTES, VALUE_NOTES, RECENT_K, RECENT_V, AT, PEAK, WEIGHT, DELTA, OWN, NOTES, QUERY_NORM,
    q_b, q_h, q_s, key_notes_n, key_notes_b, key_notes_h, value_notes_n, value_notes_b, value_notes_h, rk_b, rk_h, rk_t, rv_b, rv_h, rv_t,
    blocks, newest,
    SCALE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr,
    NB: tl.constexpr, PER_PAGE: tl.constexpr,
):
    """NB blocks of one kv head and one row: the largest logit of each, the sum of exp relative to it, how far logits may deviate.

    Every block of the planes is written, those that the row does not see as nothing. The first row's program also gathers the notes
    kappa, mu, eta, nu; mu and nu of blocks that the window covers whole are measured.
    """
    pair = tl.program_id(1)
    b = (pair // K).to(tl.int64)
    h = (pair % K).to(tl.int64)
    r = tl.program_id(2)
    start, last, base = sight(AT + b * (2 * S + 1), S, S2)
    high = tl.load(AT + b * (2 * S + 1) + r % S)
    low = tl.load(AT + b * (2 * S + 1) + S + r % S)
    n0 = tl.program_id(0) * NB
    n = n0 + tl.arange(0, NB)
    inside = n < blocks
    anybody = inside & (n * BLOCK <= last) & ((n + 1) * BLOCK > start)
    live = inside & (n * BLOCK <= high) & ((n + 1) * BLOCK > low)
    out = (pair.to(tl.int64) * (G * S) + r) * blocks
    logit = tl.load(LOGITS + (out + n)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], mask=live[:, None], other=float("-inf"))
    peak = tl.max(logit, 1)
    top = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(PEAK + out + n, peak, mask=inside)
    tl.store(WEIGHT + out + n, tl.sum(exp_of(logit - top[:, None]), 1), mask=inside)

    page, row = (n // PER_PAGE).to(tl.int64), n % PER_PAGE
    alone = n * BLOCK >= base
    stored = anybody & (alone == 0)
    key_note = KEY_NOTES + b * key_notes_b + h * key_notes_h + page * key_notes_n + row * 2
    value_note = VALUE_NOTES + b * value_notes_b + h * value_notes_h + page * value_notes_n + row * 2
    kappa = tl.load(key_note, mask=stored, other=0.0)
    mu = tl.load(key_note + 1, mask=stored, other=0.0)
    eta = tl.load(value_note, mask=stored, other=0.0)
    nu = tl.load(value_note + 1, mask=stored, other=0.0)
    if (n0 + NB) * BLOCK > base:
        first = tl.maximum(tl.maximum(base + BLOCK - 1, 0) // BLOCK, n0)
        for step in range(tl.maximum(tl.minimum(last // BLOCK + 1, n0 + NB) - first, 0)):
            t = (first + step) * BLOCK + tl.arange(0, BLOCK)
            seen = ((t >= start) & (t <= last) & (t < base + newest))[:, None]
            from_k = RECENT_K + b * rk_b + h * rk_h + (t - base)[:, None] * rk_t + tl.arange(0, D)[None, :]
            from_v = RECENT_V + b * rv_b + h * rv_h + (t - base)[:, None] * rv_t + tl.arange(0, DV)[None, :]
            k = tl.load(from_k, mask=seen, other=0.0).to(tl.float32)
            v = tl.load(from_v, mask=seen, other=0.0).to(tl.float32)
            mu = tl.where(n == first + step, norm_above(tl.max(tl.sum(k * k, 1), 0)), mu)
            nu = tl.where(n == first + step, norm_above(tl.max(tl.sum(v * v, 1), 0)), nu)
    if r == 0:
        slot = NOTES + (pair * blocks + n) * 4
        tl.store(slot, kappa, mask=inside)
        tl.store(slot + 1, mu, mask=inside)
        tl.store(slot + 2, eta, mask=inside)
        tl.store(slot + 3, nu, mask=inside)

    q = tl.load(Q + b * q_b + (h * G + r // S) * q_h + (r % S) * q_s + tl.arange(0, D)).to(tl.float64)
    query_norm = tl.sqrt(tl.sum(q * q, 0)) * (1.0 + 2.0**-40)
    if n0 == 0:
        tl.store(QUERY_NORM + pair * (G * S) + r, query_norm)
    channels = tl.load(CHANNELS + out + n, mask=live & (alone == 0), other=0.0).to(tl.float64)
    own = rounding(0.0, 0.0, mu.to(tl.float64), 0.0, query_norm, SCALE, D + 4.0)
    delta = deviation(0.0, channels, kappa.to(tl.float64), mu.to(tl.float64), 0.0, query_norm, SCALE, D + 4.0)
    tl.store(OWN + out + n, tl.where(live, own, 0.0), mask=inside)
    tl.store(DELTA + out + n, tl.where(live, tl.where(alone, own, delta), 0.0), mask=inside)


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
