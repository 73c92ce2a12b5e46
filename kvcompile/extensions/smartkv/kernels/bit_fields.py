"""Fields: the codes of a tile of tokens, eight runs of channels in 16-bit words (``smartkv.codes``), as operands of a product.

PACKED decodes two words at a time. A field of up to ten bits masked out of a 16-bit word is the float16 subnormal field * 2^(p-24), p its
lowest bit, so one ``and`` makes two operands. Runs in the upper byte are shifted down once for all of them, and the 3-bit run that is
split over two words is merged by a bitwise select. Keys' codes stay raised by 2^(bits-1): the excess per query is computed beforehand
(``operands_of``). Values are CENTERED, one more instruction, since sums of raised values over many tokens would cancel.

Without PACKED, in Triton's interpreter and for float32, fields are extracted by plain operations, centered, without a power of two.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, RET505, PLR0911 - kernels: operands are pointers and constants in capitals, branches are compiled alone.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.codegen.bit_tricks import field_of_pairs, select_of_pairs, shift_of_pairs

DOWN = tl.constexpr(shift_of_pairs(-8))
DOWN_7, LAST = tl.constexpr(shift_of_pairs(-7)), tl.constexpr(select_of_pairs(0xC0))
"""Shift the last bit of a word to bit 8, and select bits 6 and 7 from the first operand: for run 7 of three bits."""

RAISED_8, CENTERED_8 = tl.constexpr(field_of_pairs(8, 0, False)), tl.constexpr(field_of_pairs(8, 0, True))
RAISED_4_0, CENTERED_4_0 = tl.constexpr(field_of_pairs(4, 0, False)), tl.constexpr(field_of_pairs(4, 0, True))
RAISED_4_1, CENTERED_4_1 = tl.constexpr(field_of_pairs(4, 4, False)), tl.constexpr(field_of_pairs(4, 4, True))
RAISED_3_0, CENTERED_3_0 = tl.constexpr(field_of_pairs(3, 0, False)), tl.constexpr(field_of_pairs(3, 0, True))
RAISED_3_1, CENTERED_3_1 = tl.constexpr(field_of_pairs(3, 1, False)), tl.constexpr(field_of_pairs(3, 1, True))
RAISED_3_3, CENTERED_3_3 = tl.constexpr(field_of_pairs(3, 3, False)), tl.constexpr(field_of_pairs(3, 3, True))
RAISED_3_4, CENTERED_3_4 = tl.constexpr(field_of_pairs(3, 4, False)), tl.constexpr(field_of_pairs(3, 4, True))
RAISED_3_6, CENTERED_3_6 = tl.constexpr(field_of_pairs(3, 6, False)), tl.constexpr(field_of_pairs(3, 6, True))
RAISED_2_0, CENTERED_2_0 = tl.constexpr(field_of_pairs(2, 0, False)), tl.constexpr(field_of_pairs(2, 0, True))
RAISED_2_1, CENTERED_2_1 = tl.constexpr(field_of_pairs(2, 2, False)), tl.constexpr(field_of_pairs(2, 2, True))
RAISED_2_2, CENTERED_2_2 = tl.constexpr(field_of_pairs(2, 4, False)), tl.constexpr(field_of_pairs(2, 4, True))
RAISED_2_3, CENTERED_2_3 = tl.constexpr(field_of_pairs(2, 6, False)), tl.constexpr(field_of_pairs(2, 6, True))

POWERS_8, POWERS_4, POWERS_3, POWERS_2 = tl.constexpr(0), tl.constexpr(0x40404040), tl.constexpr(0x63041630), tl.constexpr(0x64206420)
"""The lowest bit of each run's field after the shift down, four bits per run, the first run lowest."""


@triton.jit
def _of(word, TEXT: tl.constexpr):
    """Return float16 numbers from 16-bit words by PTX ``TEXT`` on two words at a time."""
    return tl.inline_asm_elementwise(TEXT, "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _moved(word, TEXT: tl.constexpr):
    """Return 16-bit words from 16-bit words by PTX ``TEXT``, a shift, on two words at a time."""
    return tl.inline_asm_elementwise(TEXT, "=r,r", [word], dtype=tl.uint16, is_pure=True, pack=2)


@triton.jit
def _chosen(one, other, TEXT: tl.constexpr):
    """Return 16-bit words with bits of ``one`` or of ``other`` by PTX ``TEXT``, a select, on two words at a time."""
    return tl.inline_asm_elementwise(TEXT, "=r,r,r", [one, other], dtype=tl.uint16, is_pure=True, pack=2)


@triton.jit
def pointers(WORDS, HIGH, BITS: tl.constexpr, C: tl.constexpr):
    """Return pointers to all words of tokens, from WORDS, a pointer to their first C, and HIGH, to the rest of 3-bit codes.

    C: channels of a run.
    """
    if BITS == 8:
        return (WORDS, WORDS + C, WORDS + 2 * C, WORDS + 3 * C)
    elif BITS == 4:
        return (WORDS, WORDS + C)
    elif BITS == 3:
        return (WORDS, HIGH)
    else:
        return (WORDS,)


@triton.jit
def advanced(at, tokens, BITS: tl.constexpr, C: tl.constexpr):
    """Return the pointers ``at``, results of ``pointers``, advanced by ``tokens`` tokens."""
    if BITS == 8:
        return (at[0] + tokens * (4 * C), at[1] + tokens * (4 * C), at[2] + tokens * (4 * C), at[3] + tokens * (4 * C))
    elif BITS == 4:
        return (at[0] + tokens * (2 * C), at[1] + tokens * (2 * C))
    elif BITS == 3:
        return (at[0] + tokens * C, at[1] + tokens * (C // 2))
    else:
        return (at[0] + tokens * C,)


@triton.jit
def load_words(at, ok, second, BITS: tl.constexpr, PACKED: tl.constexpr):
    """Load, for each run, the words that contain its codes, through the pointers ``at`` of ``pointers``; ``ok`` masks the loads.

    ``second``: whether a column's byte of the second part of 3-bit codes is the upper one of its word; has the shape of the words. BITS:
    the width of the codes.
    """
    a = tl.load(at[0], mask=ok)
    if BITS == 8:
        b, c, d = tl.load(at[1], mask=ok), tl.load(at[2], mask=ok), tl.load(at[3], mask=ok)
        if PACKED:
            return (a, _moved(a, DOWN), b, _moved(b, DOWN), c, _moved(c, DOWN), d, _moved(d, DOWN))
        else:
            return (a, a >> 8, b, b >> 8, c, c >> 8, d, d >> 8)
    elif BITS == 4:
        b = tl.load(at[1], mask=ok)
        if PACKED:
            c, d = _moved(a, DOWN), _moved(b, DOWN)
        else:
            c, d = a >> 8, b >> 8
        return (a, a, c, c, b, b, d, d)
    elif BITS == 2:
        if PACKED:
            b = _moved(a, DOWN)
        else:
            b = a >> 8
        return (a, a, a, a, b, b, b, b)
    else:
        rest = tl.load(at[1], mask=ok)
        high = tl.where(second, rest >> 8, rest)
        if PACKED:
            b, last = _moved(a, DOWN), _chosen(high, _moved(a, DOWN_7), LAST)
        else:
            b, last = a >> 8, (high & 0xC0) | ((a >> 7) & 0x100)
        return (a, a, a, b, b, high, high, last)


@triton.jit
def field(word, BITS: tl.constexpr, RUN: tl.constexpr, VALUES: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr):
    """Return the codes of run number RUN, of BITS bits, in DOT from ``word``, the words that contain them.

    PACKED: as float16 times 2^(power - 24); keys' codes, unless VALUES, stay raised by 2^(BITS - 1).
    """
    POWER: tl.constexpr = ((POWERS_8 if BITS == 8 else POWERS_4 if BITS == 4 else POWERS_3 if BITS == 3 else POWERS_2) >> (4 * RUN)) & 15
    if not PACKED:
        code = (word.to(tl.int32) >> POWER) & (2**BITS - 1)
        if BITS == 8:
            code = code ^ 128
        return (code - 2 ** (BITS - 1)).to(DOT)
    elif BITS == 8:
        return _of(word, CENTERED_8 if VALUES else RAISED_8)
    elif BITS == 4:
        if POWER == 0:
            return _of(word, CENTERED_4_0 if VALUES else RAISED_4_0)
        else:
            return _of(word, CENTERED_4_1 if VALUES else RAISED_4_1)
    elif BITS == 3:
        if POWER == 0:
            return _of(word, CENTERED_3_0 if VALUES else RAISED_3_0)
        elif POWER == 1:
            return _of(word, CENTERED_3_1 if VALUES else RAISED_3_1)
        elif POWER == 3:
            return _of(word, CENTERED_3_3 if VALUES else RAISED_3_3)
        elif POWER == 4:
            return _of(word, CENTERED_3_4 if VALUES else RAISED_3_4)
        else:
            return _of(word, CENTERED_3_6 if VALUES else RAISED_3_6)
    elif POWER == 0:
        return _of(word, CENTERED_2_0 if VALUES else RAISED_2_0)
    elif POWER == 2:
        return _of(word, CENTERED_2_1 if VALUES else RAISED_2_1)
    elif POWER == 4:
        return _of(word, CENTERED_2_2 if VALUES else RAISED_2_2)
    else:
        return _of(word, CENTERED_2_3 if VALUES else RAISED_2_3)
