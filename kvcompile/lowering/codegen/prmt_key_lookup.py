"""Levels of keys as integers, picked by their codes in registers: ``prmt`` picks a byte of eight by four bits of a selector.

A level is an integer of 14 bits, two planes of bytes below 128, and four codes that stand four bits apart are a selector as they are. Bit
3 of a selector asks for the sign of a byte, which is none here: the eight levels that a code is not of give 0. What blocks of eight levels
give need not even be merged, since integer products add up.
"""

from __future__ import annotations

import dataclasses

from kvcompile.lowering.codegen.shared_tables import PLANES, assembly, eight_levels, moved, plane_registers

LARGEST = (1 << 14) - 1
"""The largest level as an integer."""

RUN = 32
"""Bytes of a token's keys that are one operand of the tensor cores."""


@dataclasses.dataclass(frozen=True)
class Codes:
    """Sixteen codes of a token on one side of ``picked``: part ``part`` of words whose bytes lie in ``halves``, one a byte.

    A half is (operand, 0 or 1): bytes 4 t .. 4 t + 3, or 16 + 4 t .., of the run that an operand of the assembly is.
    """

    part: int
    halves: tuple[tuple[int, int], ...]

    def brought(self, bits: int, to: str, spare: str, first: int, row: int, left: int) -> str:
        """PTX that brings the codes of one token, four to a register, ``left`` up from their bytes' lowest bit.

        Bits beside them are others'. Operands of the assembly are numbered from ``first`` on.
        """
        byte, place = divmod(bits * self.part, 8)
        registers = [f"${first + 4 * run + 2 * half + row}" for run, half in self.halves]
        lower = moved(to, registers[byte], place - left)
        if place + bits <= 8:
            return lower
        mask = (1 << (8 - place)) - 1
        mask = _fourfold(mask << left if left >= 0 else mask >> -left)
        return f"{lower}{moved(spare, registers[byte + 1], place - 8 - left)}lop3.b32 {to}, {to}, {spare}, 0x{mask:08x}, 0xe4; "


def picked_blocks(bits: int) -> int:
    """How many blocks of one plane ``picked`` gives: one for each eight levels."""
    return max(1, (1 << bits) // 8)


def picked_names(bits: int) -> str:
    """Names of the blocks that ``picked`` gives, in their order, for the left side of an assignment."""
    return ", ".join(f"{plane}_{block}" for plane in ("high", "low") for block in range(picked_blocks(bits)))


def picked(bits: int, sides: tuple[Codes, Codes], runs: list[str], name: str, at: int) -> str:
    """Bytes of the levels that codes of uint8 runs [tokens, 32] stand for: int8 blocks of the upper plane, then of the lower one.

    The blocks of a plane add up. Sixteen bytes at a time: of four registers of a run, 0 and 2 hold bytes 4 t .. 4 t + 3 and 16 + 4 t .. of
    a token, as the tensor cores have them, 1 and 3 those of another. Columns of the results are codes of both sides in turn.
    """
    blocks = picked_blocks(bits)
    outputs = 4 * PLANES * blocks
    selectors = "stuv"[:blocks]
    lines = [plane_registers(bits, name, at), ".reg .b32 s, t, u, v, w, x;"]
    for row in range(2):
        lines.append(_selectors(bits, sides, outputs, row))
        for half in range(2):
            if half:
                lines += [f"shr.u32 {selector}, {selector}, 16;" for selector in selectors]
            for plane in range(PLANES):
                for block, selector in enumerate(selectors):
                    to = f"${4 * (plane * blocks + block) + row + 2 * half}"
                    lines.append(f"prmt.b32 {to}, {eight_levels(bits, plane, block)}, {selector};")
    return assembly(" ".join(lines), ["=&r"] * outputs, ["r"] * (4 * len(runs)), runs, ["tl.int8"] * (PLANES * blocks), 16)


def _selectors(bits: int, sides: tuple[Codes, Codes], first: int, row: int) -> str:
    """PTX that leaves a selector for each eight levels in s, t, u, v: codes of both sides in turn, bit 3 set where they are of others."""

    def nibbles(left: int, one: str, other: str) -> str:
        # Codes of the first side in the lower four bits of a byte, those of the second in the upper ones.
        brought = sides[0].brought(bits, one, "w", first, row, left) + sides[1].brought(bits, other, "w", first, row, left + 4)
        return f"{brought}lop3.b32 {one}, {one}, {other}, 0x0f0f0f0f, 0xe4; "

    lines = nibbles(0, "s", "t")
    if bits < 4:
        mask = (1 << bits) - 1
        return f"{lines}and.b32 s, s, 0x{_fourfold(mask | mask << 4):08x};"
    if bits == 4:
        return f"{lines}xor.b32 t, s, 0x88888888;"
    # Bits 3 and 4 of a code say which eight levels it is of.
    luts = (("t", "0xde"), ("u", "0xf6"), ("v", "0x7e"), ("s", "0xfc"))
    each = " ".join(f"lop3.b32 {to}, s, x, 0x88888888, {lut};" for to, lut in luts)
    return f"{lines}{nibbles(-1, 'x', 'u')}and.b32 x, x, 0x88888888; {each}"


def _fourfold(byte: int) -> int:
    """A byte in each byte of a register."""
    return byte * 0x01010101


def picked_word(column: str) -> str:
    """Which word a column of a block of ``picked`` is of, 16 and more on the second side; an expression of Triton or Python."""
    return f"({column} // 32 * 32 + {column} % 16 // 4 * 4 + {column} % 32 // 16 * 2 + {column} % 4 // 2 + {column} % 2 * 16)"


def picked_column(word: str) -> str:
    """The column that a word has in a block of ``picked``."""
    return f"({word} // 32 * 32 + {word} % 16 // 4 * 4 + {word} % 4 // 2 * 16 + {word} % 2 * 2 + {word} % 32 // 16)"
