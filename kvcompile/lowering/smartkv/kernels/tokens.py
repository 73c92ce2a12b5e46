"""Tiles of stored tokens: where they lie, and what their bytes stand for."""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RET505 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile import types
from kvcompile.schemes.smartkv import buckets

PAGE = tl.constexpr(types.PAGE)
ROW = tl.constexpr(buckets.ROW)


@triton.jit
def rows_of(count, K: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """Rows of the pool of a bucket of ``count`` tokens, int64."""
    return (count.to(tl.int64) * (K * (D * BITS // 8)) + (ROW - 1)) // ROW


@triton.jit
def tokens_of(ENDS, rows, NUMBER: tl.constexpr, WIDTHS: tl.constexpr):
    """How many tokens bucket NUMBER has, of all batch rows."""
    return tl.load(ENDS + (rows - 1) * WIDTHS + NUMBER).to(tl.int32)


@triton.jit
def codes_of(WORDS, token, ok, D: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr):
    """Signed codes, int32 [tokens, CHANNELS], of tokens by their number in a plane; 0 where not ``ok``, and behind channel D.

    ``schemes.smartkv.codes`` packs: part i of a word has the i-th of equal runs of channels, three bits lie across three bytes.
    """
    channel = tl.arange(0, CHANNELS)
    token = token.to(tl.int64) * (D * BITS // 8)
    there = ok[:, None] & (channel < D)[None, :]
    if BITS == 8:
        words = tl.load(WORDS + token[:, None] + channel[None, :], mask=there, other=0).to(tl.int32)
        return (words ^ 128) - 128
    elif BITS == 3:
        segment: tl.constexpr = D // 8
        bit = 3 * (channel // segment)
        first = (bit // 8) * segment + channel % segment
        low = tl.load(WORDS + token[:, None] + first[None, :], mask=there, other=0).to(tl.int32)
        # A code that ends in its first byte reads that byte twice.
        second = tl.where(bit % 8 > 5, first + segment, first)
        high = tl.load(WORDS + token[:, None] + second[None, :], mask=there, other=0).to(tl.int32)
        code = ((low | (high << 8)) >> (bit % 8)[None, :]) & 7
        return tl.where(there, code - 4, 0)
    else:
        run: tl.constexpr = D * BITS // 8
        words = tl.load(WORDS + token[:, None] + (channel % run)[None, :], mask=there, other=0).to(tl.int32)
        code = (words >> (BITS * (channel // run))[None, :]) & (2**BITS - 1)
        return tl.where(there, code - 2 ** (BITS - 1), 0)


@triton.jit
def share_of(ENDS, b, NUMBER: tl.constexpr, WIDTHS: tl.constexpr, split, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """The places in bucket NUMBER, from the first to before the last, that a split has of batch row b's tokens."""
    start = tl.load(ENDS + (b - 1) * WIDTHS + NUMBER, mask=b > 0, other=0).to(tl.int32)
    stop = tl.load(ENDS + b * WIDTHS + NUMBER).to(tl.int32)
    each = tl.cdiv(tl.cdiv(stop - start, SPLITS), TILE) * TILE
    first = start + split * each
    return first, tl.minimum(first + each, stop)


@triton.jit
def settled(SCALES, WHERE, place, ok, offset, k, K: tl.constexpr):
    """Scales float32 and positions of tokens at places of a bucket that begins at ``offset``."""
    token = (offset + place).to(tl.int64)
    scale = tl.load(SCALES + token * K + k, mask=ok, other=0.0).to(tl.float32)
    return scale, tl.load(WHERE + token, mask=ok, other=0).to(tl.int32)


@triton.jit
def entered(SCALES, place, ok, b, k, rows, K: tl.constexpr):
    """Numbers in their planes, and scales float32, of tokens that entered lately; ``place``: position less the first one's."""
    at = (((place // PAGE) * rows + b) * K + k).to(tl.int64) * PAGE + place % PAGE
    return at, tl.load(SCALES + at, mask=ok, other=0.0).to(tl.float32)
