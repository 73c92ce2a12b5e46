"""Fields: the codes of a tile of tokens, eight runs of channels in words of 16 bits (``schemes.smartkv.codes``), as operands of a product.

PACKED decodes two words at a time. A field of up to ten bits left alone in a 16-bit word is the float16 subnormal field * 2^(p-24), p its
lowest bit, so one ``and`` makes two operands; runs in the upper byte are shifted down once for all of them, and the one run of three bits
that lies in two places is put together by a bitwise choice. Raised codes are what keys multiply queries with: what
is too much is known before. Values are CENTERED, one more instruction, as sums over many tokens would lose what cancels.

Otherwise, in Triton's interpreter and for float32, fields are taken out by plain operations, centered, without a power of two.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, RET505, PLR0911 - kernels: operands are pointers and constants in capitals, branches are compiled alone.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.codegen.bit_tricks import field_of_pairs, select_of_pairs, shift_of_pairs

DOWN = tl.constexpr(shift_of_pairs(-8))
DOWN_7, LAST = tl.constexpr(shift_of_pairs(-7)), tl.constexpr(select_of_pairs(0xC0))
"""The last bit of a word to bit 8, and the choice of bits 6 and 7 from the first operand: run 7 of three bits."""

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
"""The lowest bit of each run's field once it has been shifted down, four bits for each run, the first one lowest."""


@triton.jit
def _of(word, TEXT: tl.constexpr):
    return tl.inline_asm_elementwise(TEXT, "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _moved(word, TEXT: tl.constexpr):
    return tl.inline_asm_elementwise(TEXT, "=r,r", [word], dtype=tl.uint16, is_pure=True, pack=2)


@triton.jit
def _chosen(one, other, TEXT: tl.constexpr):
    return tl.inline_asm_elementwise(TEXT, "=r,r,r", [one, other], dtype=tl.uint16, is_pure=True, pack=2)


@triton.jit
def pointers(WORDS, HIGH, BITS: tl.constexpr, C: tl.constexpr):
    """Pointers to all words of tokens: WORDS to those of the first C, HIGH to those that have the rest of three bits."""
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
    """Pointers to the words of tokens that are so many further on."""
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
    """For each run, words of which some bits are its codes, from what ``pointers`` gives.

    ``second``: where a column is in the upper byte of its word of the rest of three bits, of the shape of the words.
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
    """The codes of a run in DOT, from its words; PACKED: float16, times 2^(power - 24), those of keys raised by 2^(BITS - 1)."""
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
