"""Kernels that go over all tokens of a half where they lie: to say their widths, to decode them by position, to move them.

A program has TILE places of one bucket, or of the entering tokens, of one kv head. Grid: tiles of the longest, kv heads, buckets and one.
Channels are taken in eight runs of D / 8: whatever the width, a byte has codes of the same place in each run.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RET505 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.append.rounding import MAGIC, quotient, rounded_up
from kvcompile.lowering.smartkv.kernels.tokens import PAGE, ROW, codes_of, rows_of, settled, tokens_of


@triton.jit
def _batch_row(ENDS, place, rows, NUMBER: tl.constexpr, WIDTHS: tl.constexpr):
    """The batch row of the tokens at places of bucket NUMBER."""
    row = tl.zeros_like(place)
    for each in range(rows):
        row += (place >= tl.load(ENDS + each * WIDTHS + NUMBER)).to(tl.int32)
    return row


@triton.jit
def _entering(NEW_SCALES, FIRST, pages, rows, k, K: tl.constexpr, TILE: tl.constexpr):
    """Of a tile of entering tokens: number in its plane, scale, batch row, position; ok where there is one."""
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row, place = number // (pages * PAGE), number % (pages * PAGE)
    ok = row < rows
    token = (((place // PAGE) * rows + row) * K + k).to(tl.int64) * PAGE + place % PAGE
    scale = tl.load(NEW_SCALES + token, mask=ok, other=0.0)
    return token, scale, row, tl.load(FIRST).to(tl.int32) + place, ok


@triton.jit
def say_widths(
    ENDS, WHERE, OUT, rows, count, K: tl.constexpr, D: tl.constexpr, WIDTHS: tl.constexpr, BITS_0: tl.constexpr, BITS_1: tl.constexpr,
    BITS_2: tl.constexpr, BITS_3: tl.constexpr, TILE: tl.constexpr,
):
    """Write the bits of all settled tokens below ``count`` to OUT int8 [B, count]. Grid: tiles, 1, buckets."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    offset = 0
    for number in tl.static_range(WIDTHS):
        held = tokens_of(ENDS, rows, number, WIDTHS)
        if tl.program_id(2) == number:
            ok = place < held
            position = tl.load(WHERE + offset + place, mask=ok, other=0)
            row = _batch_row(ENDS, place, rows, number, WIDTHS)
            bits = tl.zeros([TILE], tl.int8) + (BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3)
            tl.store(OUT + row * count + position, bits.to(tl.int8), mask=ok & (position < count))
        offset += held


@triton.jit
def _write(OUT, codes, scale, row, position, ok, count, heads, D: tl.constexpr, CHANNELS: tl.constexpr):
    """Write codes times scales to OUT [B, heads, count, D]."""
    channel = tl.arange(0, CHANNELS)
    at = ((row * heads + tl.program_id(1)).to(tl.int64) * count + position) * D
    found = codes.to(tl.float32) * scale.to(tl.float32)[:, None]
    tl.store(OUT + at[:, None] + channel[None, :], found, mask=ok[:, None] & (channel < D)[None, :])


@triton.jit
def _decode_bucket(
    ENDS, SCALES, WHERE, WORDS, OUT, held, offset, k, rows, count, heads, K: tl.constexpr, D: tl.constexpr, CHANNELS: tl.constexpr,
    NUMBER: tl.constexpr, WIDTHS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):
    """Write the values of a tile of bucket NUMBER."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ok = place < held
    scale, position = settled(SCALES, WHERE, place, ok, offset, k, K)
    ok &= position < count
    codes = codes_of(WORDS, place * K + k, ok, D, CHANNELS, BITS)
    _write(OUT, codes, scale, _batch_row(ENDS, place, rows, NUMBER, WIDTHS), position, ok, count, heads, D, CHANNELS)


@triton.jit
def decode_tokens(
    NEW_CODES, NEW_SCALES, FIRST, ENDS, SCALES, WHERE, POOL, OUT, pages, rows, count, from_head, heads, K: tl.constexpr, D: tl.constexpr,
    CHANNELS: tl.constexpr, WIDTHS: tl.constexpr, BITS_0: tl.constexpr, BITS_1: tl.constexpr, BITS_2: tl.constexpr,
    BITS_3: tl.constexpr, TILE: tl.constexpr,
):
    """Write the values of tokens below ``count`` to OUT float32 [B, heads, count, D], of ``heads`` kv heads from ``from_head`` on."""
    k = from_head + tl.program_id(1)
    offset, pool_row = 0, 0
    for number in tl.static_range(WIDTHS):
        held = tokens_of(ENDS, rows, number, WIDTHS)
        if (tl.program_id(2) == number) & (tl.program_id(0) * TILE < held):
            _decode_bucket(
                ENDS, SCALES, WHERE, POOL + pool_row * ROW, OUT, held, offset, k, rows, count, heads, K, D, CHANNELS, number, WIDTHS,
                BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3, TILE,
            )
        offset += held
        pool_row += rows_of(held, K, D, BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3)
    if tl.program_id(2) == WIDTHS:
        token, scale, row, position, ok = _entering(NEW_SCALES, FIRST, pages, rows, k, K, TILE)
        ok &= position < count
        _write(OUT, codes_of(NEW_CODES, token, ok, D, CHANNELS, 8), scale, row, position, ok, count, heads, D, CHANNELS)


@triton.jit
def _run_of(WORDS, token, ok, D: tl.constexpr, RUN: tl.constexpr, BITS: tl.constexpr, NUMBER: tl.constexpr):
    """Signed codes int32 [tokens, RUN] of the channels of run NUMBER, 0 behind D / 8."""
    i = tl.arange(0, RUN)
    there = ok[:, None] & (i < D // 8)[None, :]
    at = WORDS + token.to(tl.int64)[:, None] * (D * BITS // 8) + i[None, :]
    if BITS == 8:
        words = tl.load(at + NUMBER * (D // 8), mask=there, other=0).to(tl.int32)
        return (words ^ 128) - 128
    elif BITS == 3:
        word = tl.load(at + (3 * NUMBER // 8) * (D // 8), mask=there, other=0).to(tl.int32)
        if 3 * NUMBER % 8 > 5:
            word |= tl.load(at + (3 * NUMBER // 8 + 1) * (D // 8), mask=there, other=0).to(tl.int32) << 8
        return tl.where(there, ((word >> (3 * NUMBER % 8)) & 7) - 4, 0)
    else:
        words = tl.load(at + (NUMBER % BITS) * (D // 8), mask=there, other=0).to(tl.int32)
        return tl.where(there, ((words >> (BITS * (NUMBER // BITS))) & (2**BITS - 1)) - 2 ** (BITS - 1), 0)


@triton.jit
def _put(WORDS, token, ok, c0, c1, c2, c3, c4, c5, c6, c7, D: tl.constexpr, RUN: tl.constexpr, BITS: tl.constexpr):
    """Write the signed codes of eight runs of channels as bytes, as ``schemes.smartkv.codes`` packs them."""
    i = tl.arange(0, RUN)
    run: tl.constexpr = D // 8
    there = ok[:, None] & (i < run)[None, :]
    at = WORDS + token.to(tl.int64)[:, None] * (D * BITS // 8) + i[None, :]
    half: tl.constexpr = 2 ** (BITS - 1)
    if BITS == 8:
        tl.store(at, c0.to(tl.uint8), mask=there)
        tl.store(at + run, c1.to(tl.uint8), mask=there)
        tl.store(at + 2 * run, c2.to(tl.uint8), mask=there)
        tl.store(at + 3 * run, c3.to(tl.uint8), mask=there)
        tl.store(at + 4 * run, c4.to(tl.uint8), mask=there)
        tl.store(at + 5 * run, c5.to(tl.uint8), mask=there)
        tl.store(at + 6 * run, c6.to(tl.uint8), mask=there)
        tl.store(at + 7 * run, c7.to(tl.uint8), mask=there)
    elif BITS == 4:
        tl.store(at, ((c0 + half) | ((c4 + half) << 4)).to(tl.uint8), mask=there)
        tl.store(at + run, ((c1 + half) | ((c5 + half) << 4)).to(tl.uint8), mask=there)
        tl.store(at + 2 * run, ((c2 + half) | ((c6 + half) << 4)).to(tl.uint8), mask=there)
        tl.store(at + 3 * run, ((c3 + half) | ((c7 + half) << 4)).to(tl.uint8), mask=there)
    elif BITS == 2:
        even = (c0 + half) | ((c2 + half) << 2) | ((c4 + half) << 4) | ((c6 + half) << 6)
        odd = (c1 + half) | ((c3 + half) << 2) | ((c5 + half) << 4) | ((c7 + half) << 6)
        tl.store(at, even.to(tl.uint8), mask=there)
        tl.store(at + run, odd.to(tl.uint8), mask=there)
    else:
        word = (c0 + half) | ((c1 + half) << 3) | ((c2 + half) << 6) | ((c3 + half) << 9)
        word |= ((c4 + half) << 12) | ((c5 + half) << 15) | ((c6 + half) << 18) | ((c7 + half) << 21)
        tl.store(at, (word & 255).to(tl.uint8), mask=there)
        tl.store(at + run, ((word >> 8) & 255).to(tl.uint8), mask=there)
        tl.store(at + 2 * run, ((word >> 16) & 255).to(tl.uint8), mask=there)


@triton.jit
def _narrowed(code, held, scale, BITS: tl.constexpr):
    """Signed codes of BITS bits, at ``scale``, of codes at the scale ``held``; 0 where it is NaN."""
    scaled = quotient(code.to(tl.float32) * held.to(tl.float32)[:, None], scale[:, None])
    # The low bits of the sum are the integer's.
    code = (scaled + MAGIC).to(tl.int32, bitcast=True) - 0x4B400000
    code = tl.minimum(tl.maximum(code, -(2 ** (BITS - 1))), 2 ** (BITS - 1) - 1)
    return tl.where((scale == scale)[:, None], code, 0)


@triton.jit
def _into(
    SCALES, WHERE, WORDS, offset, place, position, ok, wanted, k, held, largest, c0, c1, c2, c3, c4, c5, c6, c7, K: tl.constexpr,
    D: tl.constexpr, RUN: tl.constexpr, FROM: tl.constexpr, BITS: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr,
):
    """Write the tokens that are ``wanted`` with BITS bits, of codes of FROM bits, to their places in a bucket."""
    mine = ok & (wanted == BITS)
    to = place * K + k
    if BITS == FROM:
        scale = held
        _put(WORDS, to, mine, c0, c1, c2, c3, c4, c5, c6, c7, D, RUN, BITS)
    else:
        exact = rounded_up(largest * (1 / (2 ** (BITS - 1) - 1)), ULP, TINY, SCALES.dtype.element_ty)
        scale = tl.where(exact.to(tl.float32) < TINY, TINY, exact.to(tl.float32)).to(SCALES.dtype.element_ty)
        _put(
            WORDS, to, mine, _narrowed(c0, held, scale, BITS), _narrowed(c1, held, scale, BITS), _narrowed(c2, held, scale, BITS),
            _narrowed(c3, held, scale, BITS), _narrowed(c4, held, scale, BITS), _narrowed(c5, held, scale, BITS),
            _narrowed(c6, held, scale, BITS), _narrowed(c7, held, scale, BITS), D, RUN, BITS,
        )
    tl.store(SCALES + (offset + place).to(tl.int64) * K + k, scale, mask=mine)
    tl.store(WHERE + offset + place, position, mask=mine & (k == 0))


@triton.jit
def _move_bucket(
    ENDS, SCALES, WHERE, WORDS, held, offset, k, OF, PLACE, TO_ENDS, TO_SCALES, TO_WHERE, TO_POOL, rows, count, K: tl.constexpr,
    D: tl.constexpr, RUN: tl.constexpr, NUMBER: tl.constexpr, WIDTHS: tl.constexpr, BITS_0: tl.constexpr, BITS_1: tl.constexpr,
    BITS_2: tl.constexpr, BITS_3: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr,
):
    """Move a tile of bucket NUMBER."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ok = place < held
    at = offset + place
    scale = tl.load(SCALES + at.to(tl.int64) * K + k, mask=ok, other=0.0)
    position = tl.load(WHERE + at, mask=ok, other=0)
    row = _batch_row(ENDS, place, rows, NUMBER, WIDTHS)
    _moved(
        WORDS, place * K + k, scale, row, position, ok, k, OF, PLACE, TO_ENDS, TO_SCALES, TO_WHERE, TO_POOL, rows, count, K, D, RUN, WIDTHS,
        BITS_0, BITS_1, BITS_2, BITS_3, BITS, ULP, TINY,
    )


@triton.jit
def _moved(
    WORDS, token, held, row, position, ok, k, OF, PLACE, TO_ENDS, TO_SCALES, TO_WHERE, TO_POOL, rows, count, K: tl.constexpr,
    D: tl.constexpr, RUN: tl.constexpr, WIDTHS: tl.constexpr, BITS_0: tl.constexpr, BITS_1: tl.constexpr, BITS_2: tl.constexpr,
    BITS_3: tl.constexpr, BITS: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr,
):
    """Move a tile of tokens of BITS bits to where OF int8 and PLACE int32 [B, count] say."""
    ok &= position < count
    at = row * count + position
    wanted = tl.load(OF + at, mask=ok, other=0).to(tl.int32)
    place = tl.load(PLACE + at, mask=ok, other=0)
    c0, c1 = _run_of(WORDS, token, ok, D, RUN, BITS, 0), _run_of(WORDS, token, ok, D, RUN, BITS, 1)
    c2, c3 = _run_of(WORDS, token, ok, D, RUN, BITS, 2), _run_of(WORDS, token, ok, D, RUN, BITS, 3)
    c4, c5 = _run_of(WORDS, token, ok, D, RUN, BITS, 4), _run_of(WORDS, token, ok, D, RUN, BITS, 5)
    c6, c7 = _run_of(WORDS, token, ok, D, RUN, BITS, 6), _run_of(WORDS, token, ok, D, RUN, BITS, 7)
    top = tl.maximum(tl.maximum(tl.abs(c0), tl.abs(c1)), tl.maximum(tl.abs(c2), tl.abs(c3)))
    top = tl.maximum(top, tl.maximum(tl.maximum(tl.abs(c4), tl.abs(c5)), tl.maximum(tl.abs(c6), tl.abs(c7))))
    largest = tl.max(top, 1).to(tl.float32) * held.to(tl.float32)
    offset, pool_row = 0, 0
    for number in tl.static_range(WIDTHS):
        if (BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3) <= BITS:
            _into(
                TO_SCALES, TO_WHERE, TO_POOL + pool_row * ROW, offset, place, position, ok, wanted, k, held, largest, c0, c1, c2, c3, c4,
                c5, c6, c7, K, D, RUN, BITS, BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3, ULP,
                TINY,
            )
        there = tokens_of(TO_ENDS, rows, number, WIDTHS)
        offset += there
        pool_row += rows_of(there, K, D, BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3)


@triton.jit
def move_tokens(
    NEW_CODES, NEW_SCALES, FIRST, ENDS, SCALES, WHERE, POOL, OF, PLACE, TO_ENDS, TO_SCALES, TO_WHERE, TO_POOL, pages, rows, count,
    K: tl.constexpr, D: tl.constexpr, RUN: tl.constexpr, WIDTHS: tl.constexpr, BITS_0: tl.constexpr, BITS_1: tl.constexpr,
    BITS_2: tl.constexpr, BITS_3: tl.constexpr, TILE: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr,
):
    """Write the tokens below ``count`` into planes TO_ENDS to TO_POOL, as ``schemes.smartkv.moves.Definition`` does."""
    k = tl.program_id(1)
    offset, pool_row = 0, 0
    for number in tl.static_range(WIDTHS):
        held = tokens_of(ENDS, rows, number, WIDTHS)
        if (tl.program_id(2) == number) & (tl.program_id(0) * TILE < held):
            _move_bucket(
                ENDS, SCALES, WHERE, POOL + pool_row * ROW, held, offset, k, OF, PLACE, TO_ENDS, TO_SCALES, TO_WHERE, TO_POOL, rows, count,
                K, D, RUN, number, WIDTHS, BITS_0, BITS_1, BITS_2, BITS_3,
                BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3, TILE, ULP, TINY,
            )
        offset += held
        pool_row += rows_of(held, K, D, BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3)
    if tl.program_id(2) == WIDTHS:
        token, scale, row, position, ok = _entering(NEW_SCALES, FIRST, pages, rows, k, K, TILE)
        _moved(
            NEW_CODES, token, scale, row, position, ok, k, OF, PLACE, TO_ENDS, TO_SCALES, TO_WHERE, TO_POOL, rows, count, K, D, RUN,
            WIDTHS, BITS_0, BITS_1, BITS_2, BITS_3, 8, ULP, TINY,
        )
