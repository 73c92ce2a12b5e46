"""The kernel of smartkv's attention: settled tokens bucket by bucket, then entering ones, in one softmax per program.

A program has one kv head of one batch row, and its split's share of the indices and of the pages. The loop over a bucket is compiled once
for each level, with its widths as constants; tokens are on the long side of the products, rows (queries of query heads) on the short one.

* Codes are multiplied as stored bit fields (``bit_fields``), which differ from codes by a power of two that width and run determine:
  queries are divided by it in advance; sums are multiplied by it before the loop over a bucket and divided after. Keys' scales
  multiply scores, values' scales multiply weights.
* Weights relative to the running maximum are up to 2^14 after their value's scale, so that float16 holds weights down to 2^-38 of the
  largest.
* Narrow keys are in a frame of their own (``hadamard8``): queries are rotated once, and the keys' mean adds one number to each row.
* SCORES feed importance (``finish``): a token's score minus the row's reference, its maximum over the first tile of this program in which
  it sees a token; -inf if hidden.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RET505, RUF005, SIM102, SIM300 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.extensions.smartkv.kernels.bit_fields import advanced, field, load_words, pointers
from kvcompile.extensions.smartkv.kernels.channel_runs import apart, channels_of, operands_of, queries_of, rescaled, together, turned
from kvcompile.extensions.smartkv.kernels.tokens import PAGE, end_of, pool_of

LOG2E = tl.constexpr(1.4426950408889634)
LIFT = tl.constexpr(14.0)
"""The largest weight is 2^LIFT."""
STAGES = tl.constexpr(3)
WIDE = tl.constexpr(32)
STEP = tl.constexpr(128)
"""A split's share is a multiple of this many tokens, so that all tokens that ``finish`` reads at a time have one reference."""


@triton.jit
def share_of(tokens, SPLITS: tl.constexpr):
    """Return the number of tokens per split, a multiple of STEP, for ``tokens`` tokens in all."""
    return tl.cdiv(tl.cdiv(tokens, SPLITS), STEP) * STEP


@triton.jit
def _masked(x, position, ok, rows, b, masks, HAS_LO: tl.constexpr, HAS_KEEP: tl.constexpr, BIAS_KIND: tl.constexpr):
    """Return scores [tokens, rows] plus the bias, -inf for tokens that a row does not see; BIAS_KIND: 0 none, 1 bool, 2 added.

    ``position``: the tokens' positions; ``ok``: those that exist. ``rows``: each row's query, head, existence, last token. ``b``: the batch
    row. ``masks``: LO, KEEP and BIAS with their strides, ``kept`` and ``biased``, the numbers of tokens in KEEP and BIAS; tokens beyond are
    hidden.
    """
    s, h, there, limits = rows
    LO, KEEP, BIAS, lo_b, lo_s, keep_b, keep_t, kept, bias_b, bias_h, bias_s, bias_t, biased = masks
    seen = ok[:, None] & (position[:, None] <= limits[None, :])
    if HAS_LO:
        seen &= position[:, None] >= tl.load(LO + b * lo_b + s * lo_s, mask=there, other=0)[None, :]
    if HAS_KEEP:
        seen &= tl.load(KEEP + b * keep_b + position * keep_t, mask=ok & (position < kept), other=0).to(tl.int1)[:, None]
    if BIAS_KIND > 0:
        at = BIAS + b.to(tl.int64) * bias_b + (h * bias_h + s * bias_s)[None, :].to(tl.int64) + (position * bias_t)[:, None]
        inside = seen & (position < biased)[:, None] & there[None, :]
        if BIAS_KIND == 1:
            seen = inside & tl.load(at, mask=inside, other=0).to(tl.int1)
        else:
            x += tl.load(at, mask=inside, other=float("-inf")).to(tl.float32) * LOG2E
    return tl.where(seen, x, float("-inf"))


@triton.jit
def _pairs(x):
    """Return float32 [tokens, rows] rounded to float16, each two neighbouring rows in one uint32: uint32 [tokens, rows / 2]."""
    low, high = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $2;", "=r,r,r", [high, low], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def _attended(
    state, query, keys, values, places, rows, b, masks, SCORES, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, ROWS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, IN_FRAME: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_LO: tl.constexpr, HAS_KEEP: tl.constexpr, BIAS_KIND: tl.constexpr, TELLS: tl.constexpr,
    SETTLED: tl.constexpr,
):
    """Return the softmax ``state`` updated by tokens ``first`` to ``stop`` - 1 of a bucket (SETTLED) or of the entering tokens.

    TELLS: each score minus the reference is also written to SCORES [slots, ROWS], which ``finish`` reads. ``state``: sums of values;
    running maximum of scores plus the octaves of their tile's value scales; total of weights; largest score; reference, the largest score
    of the first tile that has one. ``keys``, ``values``: pointers to codes and to scales. ``query``: queries in eight runs, each row's
    excess (``operands_of``), the factor of its products and the number to add to its scores. ``b``, ``masks``: see ``_masked``. KEY_BITS,
    VALUE_BITS: the tokens' widths. ``rows``: each row's query, head, existence, last token. ``places``: first, stop, then four entries.
    For a bucket: the number to add to a token's index in its batch row, which gives its index in the head's codes; the bytes of the low
    part of 3-bit codes, divided by C; a pointer to positions; whether positions are needed. For entering tokens: the head's first token in
    a page; tokens of a page over all rows and heads; the position of entering token 0; the last is unused. The loop carries pointers,
    which cuts compile time to a fraction.
    """
    TILE: tl.constexpr = WIDE if KEY_BITS == 8 or VALUE_BITS == 8 else 32 if DOT == tl.float32 else 64
    first, stop, begin, whole, where, asks = places
    if first < stop:
        q, excess, unit, added = query
        there, limits = rows[2], rows[3]
        column, r = tl.arange(0, COLUMNS), tl.arange(0, R)
        sums, top, total, peak, reference = state
        sums = rescaled(sums, VALUE_BITS, False, PACKED)
        last = tl.max(limits, 0)
        i = first + tl.arange(0, TILE)
        if SETTLED:
            number = begin + i
        else:
            number = begin + (i // PAGE) * whole + i % PAGE
        key_row: tl.constexpr = C * (2 if KEY_BITS == 3 else KEY_BITS) // 2
        value_row: tl.constexpr = C * (2 if VALUE_BITS == 3 else VALUE_BITS) // 2
        key_words = keys[0].to(tl.pointer_type(tl.uint16)) + number[:, None] * key_row + column[None, :]
        value_words = values[0].to(tl.pointer_type(tl.uint16)) + number[None, :] * value_row + column[:, None]
        # The rest of 3-bit codes holds two columns in one word.
        second = column >= C // 2
        rest = tl.where(second, column - C // 2, column)
        key_rest = (keys[0] + whole * C).to(tl.pointer_type(tl.uint16)) + number[:, None] * (C // 2) + rest[None, :]
        value_rest = (values[0] + whole * C).to(tl.pointer_type(tl.uint16)) + number[None, :] * (C // 2) + rest[:, None]
        key_at, value_at = pointers(key_words, key_rest, KEY_BITS, C), pointers(value_words, value_rest, VALUE_BITS, C)
        in_upper_k, in_upper_v = tl.broadcast_to(second[None, :], [TILE, COLUMNS]), tl.broadcast_to(second[:, None], [COLUMNS, TILE])
        key_scale_at, value_scale_at = keys[1] + number, values[1] + number
        score_at = SCORES + first * ROWS
        if PACKED and ROWS % 2 == 0:
            # The scores of two rows are in one thread after the products. If Triton saw contiguous addresses it would move them between
            # threads before the store; the xor with 0 hides the contiguity.
            pair = tl.arange(0, R // 2) ^ (stop >> 31)
            score_at = score_at.to(tl.pointer_type(tl.uint32))
            score_to = tl.arange(0, TILE)[:, None] * (ROWS // 2) + pair[None, :]
            score_in = pair < ROWS // 2
        else:
            score_to = tl.arange(0, TILE)[:, None] * ROWS + r[None, :]
            score_in = there
        score_step: tl.constexpr = TILE * ROWS // 2 if PACKED and ROWS % 2 == 0 else TILE * ROWS
        position_at = where + i
        # Two bytes per thread are too few for asynchronous copies: scales are loaded a tile ahead.
        next_key_scale = tl.load(key_scale_at, mask=i < stop, other=0.0)
        next_value_scale = tl.load(value_scale_at, mask=i < stop, other=0.0)
        for t in tl.range(first, stop, TILE, num_stages=STAGES):
            i = t + tl.arange(0, TILE)
            ok = i < stop
            in_keys, in_values = ok[:, None], ok[None, :]
            if C != COLUMNS:
                in_keys, in_values = in_keys & (column < C)[None, :], in_values & (column < C)[:, None]
            step = begin * 0 + TILE
            if not SETTLED:
                # From the first half of a page to its second half, then on to the next page.
                step = tl.where(t // TILE % 2 == 0, step, whole - TILE)
            key_scale, value_scale = next_key_scale.to(tl.float32), next_value_scale.to(tl.float32)
            key_scale_at, value_scale_at = key_scale_at + step, value_scale_at + step
            next_key_scale = tl.load(key_scale_at, mask=i + TILE < stop, other=0.0)
            next_value_scale = tl.load(value_scale_at, mask=i + TILE < stop, other=0.0)
            if SETTLED:
                position = tl.load(position_at, mask=ok & asks, other=0)
            else:
                position = position_at

            words = load_words(key_at, in_keys, in_upper_k, KEY_BITS, PACKED)
            products = tl.broadcast_to(-excess[None, :], [TILE, R])
            for run in tl.static_range(8):
                products = tl.dot(field(words[run], KEY_BITS, run, False, PACKED, DOT), q[run], products, input_precision="ieee")
            x = products * key_scale[:, None] * unit[None, :]
            if IN_FRAME:
                x += added[None, :]
            if SOFTCAP > 0:
                # tanh by exp of nonpositive numbers, so that nothing overflows.
                e = tl.exp2(tl.abs(x / SOFTCAP) * (-2 * LOG2E))
                tanh = (1 - e) / (1 + e)
                x = SOFTCAP * LOG2E * tl.where(x < 0, -tanh, tl.where(x == x, tanh, x))
            x = _masked(x, position, ok, rows, b, masks, HAS_LO, HAS_KEEP, BIAS_KIND)
            high = tl.max(x, 0)
            reference = tl.where(reference == float("-inf"), high, reference)
            less = tl.where(reference == float("-inf"), 0.0, reference)
            if TELLS:
                told = x - less[None, :]
                if PACKED and ROWS % 2 == 0:
                    told = _pairs(told)
                else:
                    told = told.to(SCORES.dtype.element_ty)
                tl.store(score_at + score_to, told, mask=ok[:, None] & score_in[None, :])

            # Tokens that no row sees may hold anything, and 0 * NaN is NaN: their scale becomes 0.
            if HAS_LO or HAS_KEEP or BIAS_KIND > 0:
                value_scale = tl.where(tl.max(tl.where(there[None, :], x, float("-inf")), 1) == float("-inf"), 0.0, value_scale)
            else:
                value_scale = tl.where(position <= last, value_scale, 0.0)
            # The power of two of the tile's largest scale: weights times scales are at most about 2^LIFT for any scales.
            place = tl.minimum((tl.max(tl.abs(value_scale), 0).to(tl.int32, bitcast=True) >> 23) & 255, 250)
            higher = tl.maximum(top, high + (place - 127).to(tl.float32))
            base = tl.where(higher == float("-inf"), 0.0, higher) - LIFT
            share = tl.exp2(x - base[None, :])
            fewer = tl.exp2(top - LIFT - base)
            weight = (share * value_scale[:, None]).to(DOT)
            words = load_words(value_at, in_values, in_upper_v, VALUE_BITS, PACKED)
            found = ()
            for run in tl.static_range(8):
                codes = field(words[run], VALUE_BITS, run, True, PACKED, DOT)
                found = found + (tl.dot(codes, weight, sums[run] * fewer[None, :], input_precision="ieee"),)
            sums, top, total, peak = found, higher, total * fewer + tl.sum(share, 0), tl.maximum(peak, high)
            key_at, value_at = advanced(key_at, step, KEY_BITS, C), advanced(value_at, step, VALUE_BITS, C)
            score_at += score_step
            position_at += TILE
        state = rescaled(sums, VALUE_BITS, True, PACKED), top, total, peak, reference
    return state


@triton.jit
def _of_width(
    state, query, planes, share, rows, b, k, masks, SCORES, KEY_BITS: tl.constexpr, FROM: tl.constexpr, UNTIL: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, LEVELS: tl.constexpr,
    VALUE_BITS: tl.constexpr, IN_FRAME: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_KEEP: tl.constexpr, BIAS_KIND: tl.constexpr, TELLS: tl.constexpr,
):
    """Return the softmax state updated by a split's settled tokens of levels FROM to UNTIL - 1, the levels with keys of KEY_BITS.

    With TELLS, SCORES of these tokens are written (``_attended``). ``state``, ``rows``, ``masks``: see ``_attended``. ``query``: Q, each
    row's offset in it, a power of two that it is multiplied by, the factor of its products, the number to add to its scores. ``planes``:
    those of settled tokens; ``b``, ``k``: batch row and kv head. ``share``: the split's first index and its end, the row's number of
    settled tokens, and whether positions are needed.
    """
    KEY_ENDS, KEY_SCALES, KEY_POOL, VALUE_ENDS, VALUE_SCALES, VALUE_POOL, WHERE = planes
    lower, upper, first, asks = share
    if FROM < UNTIL:
        if (lower < end_of(KEY_ENDS, b, first, UNTIL - 1, LEVELS)) & (upper > end_of(KEY_ENDS, b, first, FROM - 1, LEVELS)):
            Q, at, shrink, unit, added = query
            runs = apart(queries_of(Q, at, rows[2], C, COLUMNS) * shrink[None, :, None])
            if IN_FRAME:
                runs = turned(runs, C, COLUMNS, DOT)
            q, excess = operands_of(runs, KEY_BITS, PACKED, DOT)
            for level in tl.static_range(FROM, UNTIL):
                start, end = end_of(KEY_ENDS, b, first, level - 1, LEVELS), end_of(KEY_ENDS, b, first, level, LEVELS)
                held, scale = end - start, (b * first + start).to(tl.int64) * K
                keys = pool_of(KEY_ENDS, KEY_POOL, b, level, LEVELS), KEY_SCALES + scale
                values = pool_of(VALUE_ENDS, VALUE_POOL, b, level, LEVELS), VALUE_SCALES + scale
                begin = k.to(tl.int64) * held - start
                places = tl.maximum(lower, start), tl.minimum(upper, end), begin, held.to(tl.int64) * (2 * K), WHERE + b * first, asks
                state = _attended(
                    state, (q, excess, unit, added), keys, values, places, rows, b, masks, SCORES, KEY_BITS,
                    (VALUE_BITS >> (4 * level)) & 15, ROWS, R, C, COLUMNS, IN_FRAME, PACKED, DOT, SOFTCAP, HAS_LO, HAS_KEEP, BIAS_KIND,
                    TELLS, True,
                )
    return state


@triton.jit
def attend_tokens(
    Q, KEY_CODES, KEY_SCALES, KEY_ENDS, KEY_SETTLED_SCALES, KEY_POOL, MEAN, VALUE_CODES, VALUE_SCALES, VALUE_ENDS, VALUE_SETTLED_SCALES,
    VALUE_POOL, FIRST, WHERE, HI, LO, KEEP, BIAS, HEADS, SCORES, PARTS, STATS, WEIGHTS, pages, rows, slots, q_b, q_h, q_s, hi_b, hi_s,
    lo_b, lo_s, keep_b, keep_t, kept, bias_b, bias_h, bias_s, bias_t, biased, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, LEVELS: tl.constexpr, FROM_3: tl.constexpr, FROM_4: tl.constexpr,
    FROM_8: tl.constexpr, VALUE_BITS: tl.constexpr, TURNED: tl.constexpr, SPLITS: tl.constexpr, PACKED: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_LO: tl.constexpr, HAS_KEEP: tl.constexpr, BIAS_KIND: tl.constexpr,
    TELLS: tl.constexpr,
):
    """Write a split's SCORES [B, K, slots, S G], PARTS [B, K, SPLITS, 8 C, S G] and STATS [B, K, 4, R, SPLITS]; copy HEADS to WEIGHTS.

    SCORES (only with TELLS): of each token, relative to the row's reference, in units of log2. Slots number settled tokens by index, then
    entering ones. PARTS: sums of values. STATS of a row: its largest score, the base of its sums, its total, and the reference that is
    subtracted from its scores. HEADS, WEIGHTS [B, K]: averages, which ``finish`` updates and reads. Queries [B, H, S, D]; limits and masks
    as in ``attend``. Grid: splits, batch rows times kv heads. FROM_3, FROM_4, FROM_8: the first level whose keys have at least that many
    bits. ``pages``, ``rows``: pages of entering tokens, and batch rows. ``kept``, ``biased``: tokens in KEEP and in BIAS.
    """
    DOT: tl.constexpr = tl.float32 if Q.dtype.element_ty == tl.float32 else tl.float16
    split, b, k = tl.program_id(0), tl.program_id(1) // K, tl.program_id(1) % K
    r = tl.arange(0, R)
    s, h, there = r // G, k * G + r % G, r < G * S
    at = b.to(tl.int64) * q_b + h * q_h + s * q_s
    if split == 0:
        tl.store(WEIGHTS + tl.program_id(1), tl.load(HEADS + tl.program_id(1)))
    limits = tl.load(HI + b * hi_b + s * hi_s, mask=there, other=-1).to(tl.int32)
    first, last = tl.load(FIRST).to(tl.int32), tl.max(limits, 0)
    # Positions of settled tokens are needed only for masks, or if some row does not see all of them.
    asks = (HAS_LO or HAS_KEEP or BIAS_KIND > 0) | (tl.min(tl.where(there, limits, 2147483647), 0) < first - 1)

    unit = tl.full([R], SCALE * (1.0 if SOFTCAP > 0 else LOG2E), tl.float32)
    queries = queries_of(Q, at, there, C, COLUMNS)
    added = tl.zeros([R], tl.float32)
    if TURNED:
        channel, inside = channels_of(C, COLUMNS)
        mean = tl.load(MEAN + tl.program_id(1) * (8 * C) + channel, mask=inside, other=0.0).to(tl.float32)
        added = tl.sum(tl.sum(queries * mean, 2), 0) * unit
    shrink = tl.full([R], 1.0, tl.float32)
    if DOT == tl.float16:
        # Each row is scaled by a power of two to at most one, so nothing overflows; PACKED codes carry a factor of 2^-24.
        exponent = tl.minimum(tl.maximum((tl.max(tl.max(tl.abs(queries), 2), 0).to(tl.int32, bitcast=True) >> 23) & 255, 4), 250)
        shrink = ((253 - exponent) << 23).to(tl.float32, bitcast=True)
        unit = unit * ((exponent + 1) << 23).to(tl.float32, bitcast=True)
    if PACKED:
        unit = unit * 2.0**24
    nothing = tl.zeros([COLUMNS, R], tl.float32)
    never = tl.full([R], float("-inf"), tl.float32)
    state = (nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing), never, tl.zeros([R], tl.float32), never, never

    pair = tl.program_id(1).to(tl.int64)
    rows_of = s, h, there, limits
    masks = LO, KEEP, BIAS, lo_b, lo_s, keep_b, keep_t, kept, bias_b, bias_h, bias_s, bias_t, biased
    scores = SCORES + pair * slots * (G * S)
    planes = KEY_ENDS, KEY_SETTLED_SCALES, KEY_POOL, VALUE_ENDS, VALUE_SETTLED_SCALES, VALUE_POOL, WHERE
    of_split = share_of(first, SPLITS)
    share = split * of_split, tl.minimum((split + 1) * of_split, first), first, asks
    query = Q, at, shrink, unit, added
    # Levels ascend, and so do the widths of their keys.
    state = _of_width(
        state, query, planes, share, rows_of, b, k, masks, scores, 2, 0, FROM_3, K, G * S, R, C, COLUMNS, LEVELS, VALUE_BITS, TURNED,
        PACKED, DOT, SOFTCAP, HAS_LO, HAS_KEEP, BIAS_KIND, TELLS,
    )
    state = _of_width(
        state, query, planes, share, rows_of, b, k, masks, scores, 3, FROM_3, FROM_4, K, G * S, R, C, COLUMNS, LEVELS, VALUE_BITS, TURNED,
        PACKED, DOT, SOFTCAP, HAS_LO, HAS_KEEP, BIAS_KIND, TELLS,
    )
    state = _of_width(
        state, query, planes, share, rows_of, b, k, masks, scores, 4, FROM_4, FROM_8, K, G * S, R, C, COLUMNS, LEVELS, VALUE_BITS, TURNED,
        PACKED, DOT, SOFTCAP, HAS_LO, HAS_KEEP, BIAS_KIND, TELLS,
    )
    state = _of_width(
        state, query, planes, share, rows_of, b, k, masks, scores, 8, FROM_8, LEVELS, K, G * S, R, C, COLUMNS, LEVELS, VALUE_BITS, False,
        PACKED, DOT, SOFTCAP, HAS_LO, HAS_KEEP, BIAS_KIND, TELLS,
    )
    # Entering tokens come last, with keys and values of eight bits.
    q, excess = operands_of(apart(queries * shrink[None, :, None]), 8, PACKED, DOT)
    count = tl.minimum(pages * PAGE, tl.minimum(slots, last + 1) - first)
    of_split = share_of(count, SPLITS)
    places = split * of_split, tl.minimum((split + 1) * of_split, count), pair * PAGE, pair * 0 + rows * (K * PAGE), first, asks
    state = _attended(
        state, (q, excess, unit, added), (KEY_CODES, KEY_SCALES), (VALUE_CODES, VALUE_SCALES), places, rows_of, b, masks,
        scores + first * (G * S), 8, 8, G * S, R, C, COLUMNS, False, PACKED, DOT, SOFTCAP, HAS_LO, HAS_KEEP, BIAS_KIND,
        TELLS, False,
    )
    sums, top, total, peak, reference = state
    mine = pair * SPLITS + split
    channel, inside = channels_of(C, COLUMNS)
    parts = together(sums) * (2.0**24 if PACKED else 1.0)
    tl.store(PARTS + (mine * (8 * C) + channel) * (G * S) + r[None, :, None], parts, mask=inside & there[None, :, None])
    stats = STATS + (pair * (4 * R) + r) * SPLITS + split
    tl.store(stats, peak)
    tl.store(stats + R * SPLITS, top)
    tl.store(stats + 2 * R * SPLITS, total)
    tl.store(stats + 3 * R * SPLITS, reference)
