"""Codes as bfloat16, four at a time: the bytes of four words become two registers of two numbers each.

A byte u < 128 below the byte 0x43 is the number 128 + u, exactly, and so is what a constant leaves of it. Eight bits of two's complement
are 128 + (u & 127) less 128 + (u & 128), which is the number of 0x43 above 0 or 0x80. PTX for capability 8.0 and later.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, RET505 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

EIGHT = tl.constexpr(
    "{ .reg .b32 a, b, c, d, one; mov.b32 one, 0x3f803f80; and.b32 a, $2, 0x7f7f7f7f; and.b32 b, $2, 0x80808080;"
    " prmt.b32 c, a, 0x43434343, 0x4140; prmt.b32 d, b, 0xc3c3c3c3, 0x4140; fma.rn.bf16x2 $0, c, one, d;"
    " prmt.b32 c, a, 0x43434343, 0x4342; prmt.b32 d, b, 0xc3c3c3c3, 0x4342; fma.rn.bf16x2 $1, c, one, d; }"
)
"""Two's complement of eight bits."""

NARROW = tl.constexpr(
    " prmt.b32 c, a, 0x43434343, 0x4140; fma.rn.bf16x2 $0, c, one, d; prmt.b32 c, a, 0x43434343, 0x4342; fma.rn.bf16x2 $1, c, one, d; }"
)
"""The end of what decodes narrow codes, which are the bytes of a."""

REGISTERS = tl.constexpr("{ .reg .b32 a, c, d, one; mov.b32 one, 0x3f803f80;")
FOUR_0 = tl.constexpr(" mov.b32 d, 0xc308c308; and.b32 a, $2, 0x0f0f0f0f;")
FOUR_1 = tl.constexpr(" mov.b32 d, 0xc308c308; shr.b32 a, $2, 4; and.b32 a, a, 0x0f0f0f0f;")
TWO_0 = tl.constexpr(" mov.b32 d, 0xc302c302; and.b32 a, $2, 0x03030303;")
TWO_1 = tl.constexpr(" mov.b32 d, 0xc302c302; shr.b32 a, $2, 2; and.b32 a, a, 0x03030303;")
TWO_2 = tl.constexpr(" mov.b32 d, 0xc302c302; shr.b32 a, $2, 4; and.b32 a, a, 0x03030303;")
TWO_3 = tl.constexpr(" mov.b32 d, 0xc302c302; shr.b32 a, $2, 6; and.b32 a, a, 0x03030303;")


@triton.jit
def _by(words, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=r,=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def part_of(words, BITS: tl.constexpr, PART: tl.constexpr):
    """Signed codes, bfloat16, of part PART of words of 8, 4 or 2 bits a code."""
    if BITS == 8:
        return _by(words, EIGHT)
    elif BITS == 4:
        return _by(words, REGISTERS + (FOUR_0 if PART == 0 else FOUR_1) + NARROW)
    else:
        return _by(words, REGISTERS + (TWO_0 if PART == 0 else TWO_1 if PART == 1 else TWO_2 if PART == 2 else TWO_3) + NARROW)


@triton.jit
def words_of(WORDS, token, ok, RUN: tl.constexpr):
    """Bytes [tokens, RUN] of tokens by their number in a plane."""
    return tl.load(WORDS + token.to(tl.int64)[:, None] * RUN + tl.arange(0, RUN)[None, :], mask=ok[:, None], other=0)


@triton.jit
def put_together(a, b):
    """Two runs of channels [rows, RUN] behind each other."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [a.shape[0], 2 * a.shape[1]])
