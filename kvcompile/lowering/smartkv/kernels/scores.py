"""The keys' pass of smartkv's attention: see the package."""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RET505 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.smartkv.kernels.packed import part_of, words_of
from kvcompile.lowering.smartkv.kernels.tokens import PAGE, ROW, codes_of, entered, rows_of, settled, share_of, tokens_of

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _masked(
    x, position, ok, there, s, h, b, HI, LO, KEEP, BIAS, hi_b, hi_s, lo_b, lo_s, keep_b, keep_t, kept, bias_b, bias_h, bias_s, bias_t,
    biased, HAS_LO: tl.constexpr, HAS_KEEP: tl.constexpr, BIAS_KIND: tl.constexpr,
):
    """Scores [rows, tokens] with -inf where a row does not see a token, and what is added to them; BIAS_KIND: 0 none, 1 bool, 2 added."""
    seen = there[:, None] & ok[None, :]
    seen &= position[None, :] <= tl.load(HI + b * hi_b + s * hi_s, mask=there, other=-1)[:, None]
    if HAS_LO:
        seen &= position[None, :] >= tl.load(LO + b * lo_b + s * lo_s, mask=there, other=0)[:, None]
    if HAS_KEEP:
        seen &= tl.load(KEEP + b * keep_b + position * keep_t, mask=ok & (position < kept), other=0).to(tl.int1)[None, :]
    if BIAS_KIND > 0:
        at = BIAS + b.to(tl.int64) * bias_b + (h * bias_h + s * bias_s)[:, None].to(tl.int64) + (position * bias_t)[None, :]
        inside = seen & (position < biased)[None, :]
        if BIAS_KIND == 1:
            seen = inside & tl.load(at, mask=inside, other=0).to(tl.int1)
        else:
            x += tl.load(at, mask=inside, other=float("-inf")).to(tl.float32) * LOG2E
    return tl.where(seen, x, float("-inf"))


@triton.jit
def _products(
    Q, rows, there, WORDS, token, ok, R: tl.constexpr, D: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr, PACKED: tl.constexpr
):
    """Products [rows, tokens] of queries, which begin at Q + rows, and codes: all are exact."""
    if PACKED and BITS != 3:
        run: tl.constexpr = D * BITS // 8
        words = words_of(WORDS, token, ok, run)
        x = tl.zeros([R, token.shape[0]], tl.float32)
        for part in tl.static_range(8 // BITS):
            q = tl.load(Q + rows[:, None] + (part * run + tl.arange(0, run))[None, :], mask=there[:, None], other=0.0)
            x = tl.dot(q, tl.trans(part_of(words, BITS, part)), x)
        return x
    else:
        channel = tl.arange(0, CHANNELS)
        q = tl.load(Q + rows[:, None] + channel[None, :], mask=there[:, None] & (channel < D)[None, :], other=0.0)
        codes = codes_of(WORDS, token, ok, D, CHANNELS, BITS)
        return tl.dot(q, tl.trans(codes.to(q.dtype)), input_precision="ieee")


@triton.jit
def _scored(x, scale, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Scores [rows, tokens] in units of log2 of products."""
    x *= scale[None, :] * SCALE
    if SOFTCAP > 0:
        # tanh by exp of what is not positive, so that nothing is infinite.
        e = tl.exp2(tl.abs(x / SOFTCAP) * (-2 * LOG2E))
        tanh = (1 - e) / (1 + e)
        x = SOFTCAP * tl.where(x < 0, -tanh, tl.where(x == x, tanh, x))
    return x * LOG2E


@triton.jit
def _taken(x, top, total):
    """The maximum and the sum of exp2 relative to it of each row, with scores [rows, tokens] taken in."""
    higher = tl.maximum(top, tl.max(x, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, total * tl.exp2(top - base) + tl.sum(tl.exp2(x - base[:, None]), 1)


@triton.jit
def score_keys(
    Q, NEW_CODES, NEW_SCALES, FIRST, ENDS, SCALES, WHERE, POOL, HI, LO, KEEP, BIAS, SCORES, TOPS, SUMS,
    pages, rows, tokens, q_b, q_h, q_s, hi_b, hi_s, lo_b, lo_s, keep_b, keep_t, kept, bias_b, bias_h, bias_s,
    bias_t, biased, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, R: tl.constexpr, D: tl.constexpr, CHANNELS: tl.constexpr,
    WIDTHS: tl.constexpr, BITS_0: tl.constexpr, BITS_1: tl.constexpr, BITS_2: tl.constexpr, BITS_3: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, PACKED: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_LO: tl.constexpr,
    HAS_KEEP: tl.constexpr, BIAS_KIND: tl.constexpr,
):
    """Write SCORES [B, K, T, rows], and TOPS and SUMS [B, K, SPLITS, R]. Grid: splits, batch rows times kv heads.

    Queries [B, H, S, D]; limits and masks as ``attend`` has them; planes as ``schemes.smartkv.buckets`` says.
    """
    split, b, k = tl.program_id(0), tl.program_id(1) // K, tl.program_id(1) % K
    r = tl.arange(0, R)
    s, h, there = r // G, k * G + r % G, r < G * S
    query = b.to(tl.int64) * q_b + h * q_h + s * q_s
    out = SCORES + tl.program_id(1).to(tl.int64) * tokens * (G * S)
    top, total = tl.full([R], float("-inf"), tl.float32), tl.zeros([R], tl.float32)
    i = tl.arange(0, TILE)
    offset, row = 0, 0
    for number in tl.static_range(WIDTHS):
        words = POOL + row * ROW
        first, stop = share_of(ENDS, b, number, WIDTHS, split, SPLITS, TILE)
        for start in range(first, stop, TILE):
            place = start + i
            ok = place < stop
            scale, position = settled(SCALES, WHERE, place, ok, offset, k, K)
            products = _products(
                Q, query, there, words, place * K + k, ok, R, D, CHANNELS,
                BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3, PACKED,
            )
            x = _masked(
                _scored(products, scale, SCALE, SOFTCAP), position, ok, there, s, h, b, HI, LO, KEEP, BIAS, hi_b, hi_s, lo_b, lo_s,
                keep_b, keep_t, kept, bias_b, bias_h, bias_s, bias_t, biased, HAS_LO, HAS_KEEP, BIAS_KIND,
            )
            top, total = _taken(x, top, total)
            tl.store(out + position[None, :].to(tl.int64) * (G * S) + r[:, None], x, mask=there[:, None] & ok[None, :])
        held = tokens_of(ENDS, rows, number, WIDTHS)
        offset += held
        row += rows_of(held, K, D, BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3)
    begin = tl.load(FIRST).to(tl.int32)
    each = tl.cdiv(pages, SPLITS) * PAGE
    stop = tl.minimum(tl.minimum((split + 1) * each, pages * PAGE), tokens - begin)
    for start in range(split * each, stop, TILE):
        place = start + i
        ok = place < stop
        at, scale = entered(NEW_SCALES, place, ok, b, k, rows, K)
        position = begin + place
        products = _products(Q, query, there, NEW_CODES, at, ok, R, D, CHANNELS, 8, PACKED)
        x = _masked(
            _scored(products, scale, SCALE, SOFTCAP), position, ok, there, s, h, b, HI, LO, KEEP,
            BIAS, hi_b, hi_s, lo_b, lo_s, keep_b, keep_t, kept, bias_b, bias_h, bias_s, bias_t, biased, HAS_LO, HAS_KEEP, BIAS_KIND,
        )
        top, total = _taken(x, top, total)
        tl.store(out + position[None, :].to(tl.int64) * (G * S) + r[:, None], x, mask=there[:, None] & ok[None, :])
    mine = (tl.program_id(1) * SPLITS + split) * R + r
    tl.store(TOPS + mine, top)
    tl.store(SUMS + mine, total)
