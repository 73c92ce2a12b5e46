"""The values' pass of smartkv's attention, and what comes out of all passes: see the package."""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RET505 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.smartkv.kernels.packed import part_of, put_together, words_of
from kvcompile.lowering.smartkv.kernels.scores import LOG2E
from kvcompile.lowering.smartkv.kernels.tokens import PAGE, ROW, codes_of, entered, rows_of, settled, share_of, tokens_of


@triton.jit
def _weights(SCORES, position, ok, there, r, base, scale, ROWS: tl.constexpr):
    """Weights times scales, float32 [rows, tokens]. What nobody sees may be anything, and 0 * NaN is NaN."""
    x = tl.load(SCORES + position[None, :].to(tl.int64) * ROWS + r[:, None], mask=there[:, None] & ok[None, :], other=float("-inf"))
    return tl.where(x == float("-inf"), 0.0, tl.exp2(x - base[:, None]) * scale[None, :])


@triton.jit
def _added(sums, weight, codes, DTYPE: tl.constexpr):
    """Sums [rows, channels] with the values of a tile taken in."""
    if DTYPE.is_bf16():
        return tl.dot(weight.to(DTYPE), codes.to(DTYPE), sums)
    elif DTYPE.is_fp16():
        # Weights times scales are below what float16 has; codes are exact in 11 bits.
        return tl.dot(weight, codes.to(tl.float32), sums, input_precision="tf32")
    else:
        return tl.dot(weight, codes.to(tl.float32), sums, input_precision="ieee")


@triton.jit
def _tile(
    SCORES, SCALES, WHERE, offset, start, stop, k, there, r, base, K: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):
    """Numbers of a bucket's tokens in its plane, from place ``start`` on, which of them are before ``stop``, and their weights."""
    place = start + tl.arange(0, TILE)
    ok = place < stop
    scale, position = settled(SCALES, WHERE, place, ok, offset, k, K)
    return place * K + k, ok, _weights(SCORES, position, ok, there, r, base, scale, ROWS)


@triton.jit
def _of_bucket(
    SCORES, SCALES, WHERE, WORDS, offset, first, stop, k, there, r, base, K: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr,
):
    """Sums [rows, channels] of the values of a bucket's tokens from place ``first`` to before ``stop``."""
    run: tl.constexpr = D * BITS // 8
    if PACKED and BITS == 8:
        sums = tl.zeros([R, D], tl.float32)
        for start in range(first, stop, TILE):
            token, ok, weight = _tile(SCORES, SCALES, WHERE, offset, start, stop, k, there, r, base, K, ROWS, TILE)
            sums = tl.dot(weight.to(DTYPE), part_of(words_of(WORDS, token, ok, run), 8, 0), sums)
        return sums
    elif PACKED and BITS == 4:
        low, high = tl.zeros([R, run], tl.float32), tl.zeros([R, run], tl.float32)
        for start in range(first, stop, TILE):
            token, ok, weight = _tile(SCORES, SCALES, WHERE, offset, start, stop, k, there, r, base, K, ROWS, TILE)
            weight, words = weight.to(DTYPE), words_of(WORDS, token, ok, run)
            low, high = tl.dot(weight, part_of(words, 4, 0), low), tl.dot(weight, part_of(words, 4, 1), high)
        return put_together(low, high)
    elif PACKED and BITS == 2:
        a, b = tl.zeros([R, run], tl.float32), tl.zeros([R, run], tl.float32)
        c, d = tl.zeros([R, run], tl.float32), tl.zeros([R, run], tl.float32)
        for start in range(first, stop, TILE):
            token, ok, weight = _tile(SCORES, SCALES, WHERE, offset, start, stop, k, there, r, base, K, ROWS, TILE)
            weight, words = weight.to(DTYPE), words_of(WORDS, token, ok, run)
            a, b = tl.dot(weight, part_of(words, 2, 0), a), tl.dot(weight, part_of(words, 2, 1), b)
            c, d = tl.dot(weight, part_of(words, 2, 2), c), tl.dot(weight, part_of(words, 2, 3), d)
        return put_together(put_together(a, b), put_together(c, d))
    else:
        sums = tl.zeros([R, CHANNELS], tl.float32)
        for start in range(first, stop, TILE):
            token, ok, weight = _tile(SCORES, SCALES, WHERE, offset, start, stop, k, there, r, base, K, ROWS, TILE)
            sums = _added(sums, weight, codes_of(WORDS, token, ok, D, CHANNELS, BITS), DTYPE)
        return sums


@triton.jit
def weigh_values(
    Q, NEW_CODES, NEW_SCALES, FIRST, ENDS, SCALES, WHERE, POOL, SCORES, TOPS, SUMS, SINKS, PARTS, HIGHEST,
    WHOLE, pages, rows, tokens, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, CHANNELS: tl.constexpr, WIDTHS: tl.constexpr, BITS_0: tl.constexpr, BITS_1: tl.constexpr, BITS_2: tl.constexpr,
    BITS_3: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, PACKED: tl.constexpr, HAS_SINKS: tl.constexpr,
):
    """Write PARTS [B, K, SPLITS, R, CHANNELS], float32, relative to each row's maximum over all splits. Grid as ``score_keys``.

    The first split writes HIGHEST and WHOLE [B, K, R]: that maximum, -inf where a row sees nothing, and the sum with its head's sink.
    """
    split, pair = tl.program_id(0), tl.program_id(1)
    b, k = pair // K, pair % K
    r, channel = tl.arange(0, R), tl.arange(0, CHANNELS)
    there = r < G * S
    at = (pair * SPLITS + tl.arange(0, SPLITS)[:, None]) * R + r[None, :]
    tops = tl.load(TOPS + at)
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    if split == 0:
        total = tl.sum(tl.load(SUMS + at) * tl.exp2(tops - base[None, :]), 0)
        if HAS_SINKS:
            sink = tl.load(SINKS + k * G + r % G, mask=there, other=0.0).to(tl.float32)
            total += tl.where(there, tl.exp2(sink * LOG2E - base), 0.0)
        tl.store(HIGHEST + pair * R + r, top)
        tl.store(WHOLE + pair * R + r, total)
    scores = SCORES + pair.to(tl.int64) * tokens * (G * S)
    sums = tl.zeros([R, CHANNELS], tl.float32)
    offset, row = 0, 0
    for number in tl.static_range(WIDTHS):
        words = POOL + row * ROW
        first, stop = share_of(ENDS, b, number, WIDTHS, split, SPLITS, TILE)
        sums += _of_bucket(
            scores, SCALES, WHERE, words, offset, first, stop, k, there, r, base, K, G * S, R, D, CHANNELS,
            BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3, TILE, Q.dtype.element_ty, PACKED,
        )
        held = tokens_of(ENDS, rows, number, WIDTHS)
        offset += held
        row += rows_of(held, K, D, BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3)
    begin = tl.load(FIRST).to(tl.int32)
    each = tl.cdiv(pages, SPLITS) * PAGE
    stop = tl.minimum(tl.minimum((split + 1) * each, pages * PAGE), tokens - begin)
    for start in range(split * each, stop, TILE):
        place = start + tl.arange(0, TILE)
        ok = place < stop
        token, scale = entered(NEW_SCALES, place, ok, b, k, rows, K)
        weight = _weights(scores, begin + place, ok, there, r, base, scale, G * S)
        if PACKED:
            sums = tl.dot(weight.to(Q.dtype.element_ty), part_of(words_of(NEW_CODES, token, ok, D), 8, 0), sums)
        else:
            sums = _added(sums, weight, codes_of(NEW_CODES, token, ok, D, CHANNELS, 8), Q.dtype.element_ty)
    mine = ((pair * SPLITS + split) * R + r).to(tl.int64) * CHANNELS
    tl.store(PARTS + mine[:, None] + channel[None, :], sums, mask=there[:, None])


@triton.jit
def peak_of(top, total):
    """The largest share of each row, 0 where it sees nothing or NaN."""
    found = tl.where((top == float("-inf")) | (total == 0), 0.0, 1 / total)
    return tl.where((found == found) & (found < float("inf")), found, 0.0)


@triton.jit
def merge(
    PARTS, HIGHEST, WHOLE, OUT, HEADS, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    CHANNELS: tl.constexpr, SPLITS: tl.constexpr, DECAY: tl.constexpr,
):
    """Write OUT [B, H, S, D] and move HEADS [B, K] on. Grid: rows of a kv head, batch rows times kv heads."""
    row, pair = tl.program_id(0), tl.program_id(1)
    b, k = pair // K, pair % K
    split, channel = tl.arange(0, SPLITS), tl.arange(0, CHANNELS)
    parts = tl.load(PARTS + ((pair * SPLITS + split) * R + row).to(tl.int64)[:, None] * CHANNELS + channel[None, :])
    total = tl.load(WHOLE + pair * R + row)
    out = tl.where(total == 0, 0.0, tl.sum(parts, 0) / total)
    at = ((b * (K * G) + k * G + row % G) * S + row // G).to(tl.int64) * D
    tl.store(OUT + at + channel, out.to(OUT.dtype.element_ty), mask=channel < D)
    if row == 0:
        r = tl.arange(0, R)
        peak = peak_of(tl.load(HIGHEST + pair * R + r), tl.load(WHOLE + pair * R + r))
        head = tl.load(HEADS + pair)
        head = tl.where(head == 0, 1.0, head)
        for query in tl.static_range(S):
            head = DECAY * head + (1 - DECAY) * tl.sum(tl.where((r < G * S) & (r // G == query), peak, 0.0), 0) / G
        tl.store(HEADS + pair, head)
