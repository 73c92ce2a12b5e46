"""Kernels that go over all tokens of a half where they lie: to say their widths, to decode them by position, to move them.

A program has TILE places of one bucket, or of the entering tokens, of one kv head. Grid: tiles of the longest, kv heads, buckets and one.
Channels are taken in eight runs of D / 8: whatever the width, a byte has codes of the same place in each run, so one piece of code reads
all widths, with numbers that the program's bucket says, and compiles once: neither sizes nor where a layer's part of a tensor begins
make a kernel of their own.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.append.rounding import MAGIC, quotient, rounded_up
from kvcompile.lowering.smartkv.kernels.tokens import PAGE, ROW, rows_of, tokens_of


@triton.jit
def _bucket(
    ENDS, pages, rows, K: tl.constexpr, D: tl.constexpr, WIDTHS: tl.constexpr, BITS_0: tl.constexpr, BITS_1: tl.constexpr,
    BITS_2: tl.constexpr, BITS_3: tl.constexpr,
):
    """The program's bucket: its tokens, the number of its first one, its first row of the pool, its bits."""
    held, first, pool_row, bits = rows * pages * PAGE, 0, tl.program_id(2).to(tl.int64) * 0, 8
    token, row = 0, tl.program_id(2).to(tl.int64) * 0
    for number in tl.static_range(WIDTHS):
        there = tokens_of(ENDS, rows, number, WIDTHS)
        here = tl.program_id(2) == number
        held, first, pool_row = tl.where(here, there, held), tl.where(here, token, first), tl.where(here, row, pool_row)
        bits = tl.where(here, BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3, bits)
        token += there
        row += rows_of(there, K, D, BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3)
    return held, first, pool_row, bits


@triton.jit
def _batch_row(ENDS, place, rows, WIDTHS: tl.constexpr):
    """The batch row of the tokens at places of the program's bucket."""
    row = tl.zeros_like(place)
    for each in range(rows):
        row += (place >= tl.load(ENDS + each * WIDTHS + tl.program_id(2))).to(tl.int32)
    return row


@triton.jit
def _tokens(
    NEW_CODES, NEW_SCALES, FIRST, ENDS, SCALES, WHERE, POOL, k, held, first, pool_row, bits, pages, rows, K: tl.constexpr,
    D: tl.constexpr, WIDTHS: tl.constexpr, TILE: tl.constexpr,
):
    """A tile of the program's tokens: pointers to their bytes, scales, batch rows, positions; ok where there is one."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ok = place < held
    if tl.program_id(2) == WIDTHS:
        row, place = place // (pages * PAGE), place % (pages * PAGE)
        token = (((place // PAGE) * rows + row) * K + k).to(tl.int64) * PAGE + place % PAGE
        at, scale = NEW_CODES + token * D, tl.load(NEW_SCALES + token, mask=ok, other=0.0)
        position = tl.load(FIRST).to(tl.int32) + place
    else:
        at = POOL + pool_row * ROW + (place * K + k).to(tl.int64) * (D * bits // 8)
        scale = tl.load(SCALES + (first + place).to(tl.int64) * K + k, mask=ok, other=0.0)
        row, position = _batch_row(ENDS, place, rows, WIDTHS), tl.load(WHERE + first + place, mask=ok, other=0)
    return at, scale, row, position, ok


@triton.jit
def _run_of(at, ok, bits, D: tl.constexpr, RUN: tl.constexpr, NUMBER: tl.constexpr):
    """Signed codes int32 [tokens, RUN] of the channels of run NUMBER, 0 behind D / 8, of tokens whose bytes begin at ``at``."""
    i = tl.arange(0, RUN)
    there = ok[:, None] & (i < D // 8)[None, :]
    three = bits == 3
    byte, shift = tl.where(three, 3 * NUMBER // 8, NUMBER % bits), tl.where(three, 3 * NUMBER % 8, bits * (NUMBER // bits))
    words = at[:, None] + (byte * (D // 8) + i)[None, :]
    word = tl.load(words, mask=there, other=0).to(tl.int32)
    if 3 * NUMBER % 8 > 5:
        word |= tl.load(words + D // 8, mask=there & three, other=0).to(tl.int32) << 8
    # Eight bits are two's complement, narrower ones have half of their range added.
    half = 1 << (bits - 1)
    code = ((word >> shift) ^ tl.where(bits == 8, 128, 0)) & (2 * half - 1)
    return tl.where(there, code - half, 0)


@triton.jit(do_not_specialize=["rows", "count"])
def say_widths(
    ENDS, WHERE, OUT, rows, count, K: tl.constexpr, D: tl.constexpr, WIDTHS: tl.constexpr, BITS_0: tl.constexpr, BITS_1: tl.constexpr,
    BITS_2: tl.constexpr, BITS_3: tl.constexpr, TILE: tl.constexpr,
):
    """Write the bits of all settled tokens below ``count`` to OUT int8 [B, count]. Grid: tiles, 1, buckets."""
    held, first, _pool_row, bits = _bucket(ENDS, 0, rows, K, D, WIDTHS, BITS_0, BITS_1, BITS_2, BITS_3)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ok = place < held
    position = tl.load(WHERE + first + place, mask=ok, other=0)
    found = (tl.zeros([TILE], tl.int32) + bits).to(tl.int8)
    tl.store(OUT + _batch_row(ENDS, place, rows, WIDTHS) * count + position, found, mask=ok & (position < count))


@triton.jit(do_not_specialize=["pages", "rows", "count", "from_head", "heads"])
def decode_tokens(
    NEW_CODES, NEW_SCALES, FIRST, ENDS, SCALES, WHERE, POOL, OUT, pages, rows, count, from_head, heads, K: tl.constexpr, D: tl.constexpr,
    RUN: tl.constexpr, WIDTHS: tl.constexpr, BITS_0: tl.constexpr, BITS_1: tl.constexpr, BITS_2: tl.constexpr, BITS_3: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the values of tokens below ``count`` to OUT float32 [B, heads, count, D], of ``heads`` kv heads from ``from_head`` on."""
    k = from_head + tl.program_id(1)
    held, first, pool_row, bits = _bucket(ENDS, pages, rows, K, D, WIDTHS, BITS_0, BITS_1, BITS_2, BITS_3)
    if tl.program_id(0) * TILE < held:
        at, scale, row, position, ok = _tokens(
            NEW_CODES, NEW_SCALES, FIRST, ENDS, SCALES, WHERE, POOL, k, held, first, pool_row, bits, pages, rows, K, D, WIDTHS, TILE,
        )
        ok &= position < count
        i = tl.arange(0, RUN)
        there = ok[:, None] & (i < D // 8)[None, :]
        out = OUT + (((row * heads + tl.program_id(1)).to(tl.int64) * count + position) * D)[:, None] + i[None, :]
        for number in tl.static_range(8):
            code = _run_of(at, ok, bits, D, RUN, number)
            tl.store(out + number * (D // 8), code.to(tl.float32) * scale.to(tl.float32)[:, None], mask=there)


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
def _narrowed(code, held, scale, same, BITS: tl.constexpr):
    """Signed codes of BITS bits, at ``scale``, of codes at the scale ``held``, 0 where it is NaN; the very codes if the ``same`` bits."""
    scaled = quotient(code.to(tl.float32) * held.to(tl.float32)[:, None], scale[:, None])
    # The low bits of the sum are the integer's.
    found = (scaled + MAGIC).to(tl.int32, bitcast=True) - 0x4B400000
    found = tl.minimum(tl.maximum(found, -(2 ** (BITS - 1))), 2 ** (BITS - 1) - 1)
    return tl.where(same, code, tl.where((scale == scale)[:, None], found, 0))


@triton.jit
def _into(
    SCALES, WHERE, WORDS, first, place, position, ok, wanted, k, held, same, largest, c0, c1, c2, c3, c4, c5, c6, c7, K: tl.constexpr,
    D: tl.constexpr, RUN: tl.constexpr, BITS: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr,
):
    """Write the tokens that are ``wanted`` with BITS bits to their places in a bucket."""
    mine = ok & (wanted == BITS)
    exact = rounded_up(largest * (1 / (2 ** (BITS - 1) - 1)), ULP, TINY, SCALES.dtype.element_ty)
    scale = tl.where(exact.to(tl.float32) < TINY, TINY, exact.to(tl.float32)).to(SCALES.dtype.element_ty)
    scale = tl.where(same, held, scale)
    _put(
        WORDS, place * K + k, mine, _narrowed(c0, held, scale, same, BITS), _narrowed(c1, held, scale, same, BITS),
        _narrowed(c2, held, scale, same, BITS), _narrowed(c3, held, scale, same, BITS), _narrowed(c4, held, scale, same, BITS),
        _narrowed(c5, held, scale, same, BITS), _narrowed(c6, held, scale, same, BITS), _narrowed(c7, held, scale, same, BITS), D, RUN,
        BITS,
    )
    tl.store(SCALES + (first + place).to(tl.int64) * K + k, scale, mask=mine)
    tl.store(WHERE + first + place, position, mask=mine & (k == 0))


@triton.jit(do_not_specialize=["pages", "rows", "count", "OF", "PLACE", "TO_ENDS"])
def move_tokens(
    NEW_CODES, NEW_SCALES, FIRST, ENDS, SCALES, WHERE, POOL, OF, PLACE, TO_ENDS, TO_SCALES, TO_WHERE, TO_POOL, pages, rows, count,
    K: tl.constexpr, D: tl.constexpr, RUN: tl.constexpr, WIDTHS: tl.constexpr, BITS_0: tl.constexpr, BITS_1: tl.constexpr,
    BITS_2: tl.constexpr, BITS_3: tl.constexpr, TILE: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr,
):
    """Write the tokens below ``count`` into planes TO_ENDS to TO_POOL, where OF int8 and PLACE int32 [B, count] say.

    As ``schemes.smartkv.moves.Definition`` does.
    """
    k = tl.program_id(1)
    held, first, pool_row, bits = _bucket(ENDS, pages, rows, K, D, WIDTHS, BITS_0, BITS_1, BITS_2, BITS_3)
    if tl.program_id(0) * TILE < held:
        at, scale, row, position, ok = _tokens(
            NEW_CODES, NEW_SCALES, FIRST, ENDS, SCALES, WHERE, POOL, k, held, first, pool_row, bits, pages, rows, K, D, WIDTHS, TILE,
        )
        ok &= position < count
        wanted = tl.load(OF + row * count + position, mask=ok, other=0).to(tl.int32)
        place = tl.load(PLACE + row * count + position, mask=ok, other=0)
        c0, c1 = _run_of(at, ok, bits, D, RUN, 0), _run_of(at, ok, bits, D, RUN, 1)
        c2, c3 = _run_of(at, ok, bits, D, RUN, 2), _run_of(at, ok, bits, D, RUN, 3)
        c4, c5 = _run_of(at, ok, bits, D, RUN, 4), _run_of(at, ok, bits, D, RUN, 5)
        c6, c7 = _run_of(at, ok, bits, D, RUN, 6), _run_of(at, ok, bits, D, RUN, 7)
        top = tl.maximum(tl.maximum(tl.abs(c0), tl.abs(c1)), tl.maximum(tl.abs(c2), tl.abs(c3)))
        top = tl.maximum(top, tl.maximum(tl.maximum(tl.abs(c4), tl.abs(c5)), tl.maximum(tl.abs(c6), tl.abs(c7))))
        largest = tl.max(top, 1).to(tl.float32) * scale.to(tl.float32)
        to, to_row = 0, tl.program_id(2).to(tl.int64) * 0
        for number in tl.static_range(WIDTHS):
            _into(
                TO_SCALES, TO_WHERE, TO_POOL + to_row * ROW, to, place, position, ok, wanted, k, scale,
                bits == (BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3), largest, c0, c1, c2, c3,
                c4, c5, c6, c7, K, D, RUN, BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3, ULP,
                TINY,
            )
            there = tokens_of(TO_ENDS, rows, number, WIDTHS)
            to += there
            to_row += rows_of(there, K, D, BITS_0 if number == 0 else BITS_1 if number == 1 else BITS_2 if number == 2 else BITS_3)
