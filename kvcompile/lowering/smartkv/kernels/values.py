"""The values' pass of smartkv's attention, and what comes out of all passes: see the package."""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RET505 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.smartkv.kernels.scores import LOG2E
from kvcompile.lowering.smartkv.kernels.tokens import PAGE, codes_of, entered, settled, share_of


@triton.jit
def highest(TOPS, SUMS, pair, r, R: tl.constexpr, SPLITS: tl.constexpr):
    """Each row's maximum over all splits, -inf where it sees nothing, and its sum of exp2 relative to that."""
    split = tl.arange(0, SPLITS)
    at = (pair * SPLITS + split[:, None]) * R + r[None, :]
    tops = tl.load(TOPS + at)
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(tl.load(SUMS + at) * tl.exp2(tops - base[None, :]), 0)


@triton.jit
def _weighed(sums, x, base, scale, codes, DTYPE: tl.constexpr):
    """Sums [rows, channels] with the values of a tile taken in, by scores [rows, tokens]."""
    # What nobody sees may be anything: 0 * NaN is NaN.
    weight = tl.where(x == float("-inf"), 0.0, tl.exp2(x - base[:, None]) * scale[None, :])
    if DTYPE.is_bf16():
        return tl.dot(weight.to(DTYPE), codes.to(DTYPE), sums)
    elif DTYPE.is_fp16():
        # Weights times scales are below what float16 has; codes are exact in 11 bits.
        return tl.dot(weight, codes.to(tl.float32), sums, input_precision="tf32")
    else:
        return tl.dot(weight, codes.to(tl.float32), sums, input_precision="ieee")


@triton.jit
def weigh_values(
    Q, NEW_CODES, NEW_SCALES, FIRST, ENDS, SCALES, WHERE, CODES_0, CODES_1, CODES_2, CODES_3, SCORES, TOPS, SUMS, PARTS, pages, rows,
    tokens, offset_1, offset_2, offset_3, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    CHANNELS: tl.constexpr, WIDTHS: tl.constexpr, BITS_0: tl.constexpr, BITS_1: tl.constexpr, BITS_2: tl.constexpr,
    BITS_3: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):
    """Write PARTS [B, K, SPLITS, R, CHANNELS], float32, relative to each row's maximum over all splits. Grid as ``score_keys``."""
    split, b, k = tl.program_id(0), tl.program_id(1) // K, tl.program_id(1) % K
    r, channel = tl.arange(0, R), tl.arange(0, CHANNELS)
    there = r < G * S
    top, _ = highest(TOPS, SUMS, tl.program_id(1), r, R, SPLITS)
    base = tl.where(top == float("-inf"), 0.0, top)
    scores = SCORES + tl.program_id(1).to(tl.int64) * tokens * (G * S)
    sums = tl.zeros([R, CHANNELS], tl.float32)
    i = tl.arange(0, TILE)
    for number in tl.static_range(WIDTHS):
        words = CODES_0 if number == 0 else CODES_1 if number == 1 else CODES_2 if number == 2 else CODES_3
        offset = 0 if number == 0 else offset_1 if number == 1 else offset_2 if number == 2 else offset_3
        first, stop = share_of(ENDS, b, number, WIDTHS, split, SPLITS, TILE)
        for start in range(first, stop, TILE):
            place = start + i
            ok = place < stop
            scale, position = settled(SCALES, WHERE, place, ok, offset, k, K)
            x = tl.load(
                scores + position[None, :].to(tl.int64) * (G * S) + r[:, None], mask=there[:, None] & ok[None, :], other=float("-inf")
            )
            codes = codes_of(
                words, place * K + k, ok, D, CHANNELS,
                BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3,
            )
            sums = _weighed(sums, x, base, scale, codes, Q.dtype.element_ty)
    begin = tl.load(FIRST).to(tl.int32)
    each = tl.cdiv(pages, SPLITS) * PAGE
    stop = tl.minimum(tl.minimum((split + 1) * each, pages * PAGE), tokens - begin)
    for start in range(split * each, stop, TILE):
        place = start + i
        ok = place < stop
        at, scale = entered(NEW_SCALES, place, ok, b, k, rows, K, D)
        x = tl.load(
            scores + (begin + place)[None, :].to(tl.int64) * (G * S) + r[:, None], mask=there[:, None] & ok[None, :], other=float("-inf")
        )
        sums = _weighed(sums, x, base, scale, codes_of(NEW_CODES, at, ok, D, CHANNELS, 8), Q.dtype.element_ty)
    mine = ((tl.program_id(1) * SPLITS + split) * R + r).to(tl.int64) * CHANNELS
    tl.store(PARTS + mine[:, None] + channel[None, :], sums)


@triton.jit
def with_sinks(total, top, SINKS, h, there, HAS_SINKS: tl.constexpr):
    """A row's sum with its head's sink taken in."""
    if HAS_SINKS:
        base = tl.where(top == float("-inf"), 0.0, top)
        total += tl.where(there, tl.exp2(tl.load(SINKS + h, mask=there, other=0.0).to(tl.float32) * LOG2E - base), 0.0)
    return total


@triton.jit
def peak_of(top, total):
    """The largest share of each row, 0 where it sees nothing or NaN."""
    found = tl.where((top == float("-inf")) | (total == 0), 0.0, 1 / total)
    return tl.where((found == found) & (found < float("inf")), found, 0.0)


@triton.jit
def merge(
    PARTS, TOPS, SUMS, SINKS, OUT, HEADS, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    CHANNELS: tl.constexpr, SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr, DECAY: tl.constexpr,
):
    """Write OUT [B, H, S, D] and move HEADS [B, K] on. Grid: batch rows times kv heads."""
    pair = tl.program_id(0)
    b, k = pair // K, pair % K
    r, channel = tl.arange(0, R), tl.arange(0, CHANNELS)
    s, h, there = r // G, k * G + r % G, r < G * S
    top, total = highest(TOPS, SUMS, pair, r, R, SPLITS)
    total = with_sinks(total, top, SINKS, h, there, HAS_SINKS)
    sums = tl.zeros([R, CHANNELS], tl.float32)
    for split in range(SPLITS):
        sums += tl.load(PARTS + ((pair * SPLITS + split) * R + r).to(tl.int64)[:, None] * CHANNELS + channel[None, :])
    out = tl.where((total == 0)[:, None], 0.0, sums / total[:, None])
    at = ((b * (K * G) + h) * S + s).to(tl.int64) * D
    tl.store(OUT + at[:, None] + channel[None, :], out.to(OUT.dtype.element_ty), mask=there[:, None] & (channel < D)[None, :])
    head = tl.load(HEADS + pair)
    head = tl.where(head == 0, 1.0, head)
    peak = peak_of(top, total)
    for query in tl.static_range(S):
        head = DECAY * head + (1 - DECAY) * tl.sum(tl.where(there & (s == query), peak, 0.0), 0) / G
    tl.store(HEADS + pair, head)
