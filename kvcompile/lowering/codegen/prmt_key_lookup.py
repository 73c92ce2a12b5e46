"""Key levels as integers, looked up by their codes in registers: ``prmt`` selects a byte of eight by four bits of a selector.

A level is an integer of 14 bits, stored as two planes of bytes below 128. Four codes at a distance of four bits are a selector without
further work. Bit 3 of a selector asks for the byte's sign, which is 0 here: so a lookup in eight levels gives 0 for a code of the other
levels. The results of several blocks of eight levels need not be merged, since integer products add up.
"""

from __future__ import annotations

import dataclasses

from kvcompile.lowering.codegen.shared_tables import PLANES, assembly, eight_levels, moved, plane_registers

LARGEST = (1 << 14) - 1
"""Largest level, as an integer of 14 bits."""

RUN = 32
"""Key bytes of a token in one operand of the tensor cores."""


@dataclasses.dataclass(frozen=True)
class Codes:
    """The origin of sixteen codes of a token, for one side of ``picked``: part ``part`` of the bytes of words.

    ``halves``: for each byte of a word, the operand of the assembly and the half of its run of bytes: bytes 4 t .. 4 t + 3 (0) or 16 + 4 t
    .. (1).
    """

    part: int
    halves: tuple[tuple[int, int], ...]

    def brought(self, bits: int, to: str, spare: str, first: int, row: int, left: int) -> str:
        """Return PTX that moves the codes of token ``row`` into ``to``, four to a register, each ``left`` bits above its byte's lowest bit.

        Other bits of ``to`` are undefined, and ``spare`` is overwritten. ``first``: the number of the first operand of the assembly.
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
    """Return the number of blocks that ``picked`` returns for each plane: one for each eight levels."""
    return max(1, (1 << bits) // 8)


def picked_names(bits: int) -> str:
    """Return the variable names for the blocks that ``picked`` returns, in order, for the left side of an assignment."""
    return ", ".join(f"{plane}_{block}" for plane in ("high", "low") for block in range(picked_blocks(bits)))


def picked(bits: int, sides: tuple[Codes, Codes], runs: list[str], name: str, at: int) -> str:
    """Return a Triton expression for key levels by codes in uint8 runs [tokens, 32]: int8 blocks of the high plane, then of the low.

    The blocks of a plane add up. Each call handles sixteen bytes: of a run's four registers, 0 and 2 hold bytes 4 t .. 4 t + 3 and
    16 + 4 t .. of one token, as in a tensor-core operand, 1 and 3 those of another token. The results' columns alternate between the sides.
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
    """Return PTX that packs the codes of token ``row`` into selectors for ``prmt``: registers s, t, u, v, one per block of eight levels.

    The two ``sides`` are the columns whose codes share the bytes of a selector: a byte's low four bits hold a code of the first side, its
    high four bits one of the second. In the selector of a block, bit 3 of a code of another block is set, so that its lookup gives 0.
    ``first``: the number of the assembly's first operand.
    """

    def nibbles(left: int, one: str, other: str) -> str:
        # The first side's codes go to the lower four bits of a byte, the second side's to the upper four.
        brought = sides[0].brought(bits, one, "w", first, row, left) + sides[1].brought(bits, other, "w", first, row, left + 4)
        return f"{brought}lop3.b32 {one}, {one}, {other}, 0x0f0f0f0f, 0xe4; "

    lines = nibbles(0, "s", "t")
    if bits < 4:
        mask = (1 << bits) - 1
        return f"{lines}and.b32 s, s, 0x{_fourfold(mask | mask << 4):08x};"
    if bits == 4:
        return f"{lines}xor.b32 t, s, 0x88888888;"
    # Bits 3 and 4 of a code select its block of eight levels.
    luts = (("t", "0xde"), ("u", "0xf6"), ("v", "0x7e"), ("s", "0xfc"))
    each = " ".join(f"lop3.b32 {to}, s, x, 0x88888888, {lut};" for to, lut in luts)
    return f"{lines}{nibbles(-1, 'x', 'u')}and.b32 x, x, 0x88888888; {each}"


def _fourfold(byte: int) -> int:
    """Return the number whose four bytes all equal ``byte``."""
    return byte * 0x01010101


def picked_word(column: str) -> str:
    """Return source text, Triton or Python, for the index of the word that is in column ``column`` of a block of ``picked``.

    Words of odd columns belong to the second side: their index is 16 larger.
    """
    return f"({column} // 32 * 32 + {column} % 16 // 4 * 4 + {column} % 32 // 16 * 2 + {column} % 4 // 2 + {column} % 2 * 16)"


def picked_column(word: str) -> str:
    """Return source text, Triton or Python, for the column of a block of ``picked`` with word ``word``; the inverse of ``picked_word``."""
    return f"({word} // 32 * 32 + {word} % 16 // 4 * 4 + {word} % 4 // 2 * 16 + {word} % 2 * 2 + {word} % 32 // 16)"
