"""Unpacking in two or three instructions per PAIR of codes: small integers are already float16 bits.

A field of up to ten bits, or-ed under the exponent pattern 0x6400, IS the float16 number 1024 + field; one
packed subtraction gives the code. An e4m3 byte, its sign moved to the top and its magnitude to the top of
the mantissa, IS the float16 number value * 2^-8. Both work on two 16-bit words of one register at once.

A ``BitTrick`` is a description, printed as plain Triton (interpreter, tests) or as packed PTX. It is never
assumed: ``find_trick`` proposes a few and returns one only where it equals the scheme's eager ``unpack`` on
every possible word (the two NaN codes of e4m3 excepted, see ``expressions``). Otherwise None, and the caller
prints the traced expression.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch

from kvcompile.types import KernelFormat

_ONE_K = 0x6400
"""The float16 bits of 1024, whose unit in the last place is one."""


@dataclasses.dataclass(frozen=True)
class BitTrick:
    """value = (float16 bits of ((fields of the word) ^ flip) - offset) * 2**power.

    ``fields`` are (right shift, mask after the shift); a negative shift goes left.
    """

    fields: tuple[tuple[int, int], ...]
    flip: int
    offset: int
    power: int

    def evaluate(self, words16: torch.Tensor) -> torch.Tensor:
        """The values of 16-bit words given as int32, by the same steps as the printed code."""
        bits = torch.full_like(words16, self.flip)
        for shift, mask in self.fields:
            moved = words16 >> shift if shift >= 0 else words16 << -shift
            bits = bits ^ (moved & mask)
        halves = bits.to(torch.int32).to(torch.uint16).view(torch.float16)
        return (halves - self.offset).to(torch.float32) * 2.0**self.power

    def triton(self, word: str) -> str:
        """As plain Triton on a uint16 block; float16, still to be multiplied by 2**power."""
        terms = []
        for shift, mask in self.fields:
            moved = word if shift == 0 else f"({word} >> {shift})" if shift > 0 else f"({word} << {-shift})"
            terms.append(f"({moved} & {mask})")
        bits = f"(({' | '.join(terms)}) ^ {self.flip})" if self.flip else f"({' | '.join(terms)})"
        halves = f"{bits}.to(tl.uint16).to(tl.float16, bitcast=True)"
        return f"({halves} - {float(self.offset)})" if self.offset else halves

    def packed(self, word: str) -> str:
        """As PTX on two uint16 words at a time; float16, still to be multiplied by 2**power."""
        lines = [".reg .b32 t, u;"]
        for index, (shift, mask) in enumerate(self.fields):
            source = "$1"
            if shift:
                lines.append(f"{'shr' if shift > 0 else 'shl'}.b32 u, $1, {abs(shift)};")
                source = "u"
            # One instruction for (source & mask) ^ what is there already; ptxas alone makes two of it.
            there = "t" if index else _twice(self.flip)
            lines.append(f"lop3.b32 t, {source}, {_twice(mask)}, {there}, 0x6a;")
        if self.offset:
            half = int(torch.tensor(float(self.offset), dtype=torch.float16).view(torch.int16).item()) & 0xFFFF
            lines.append(f"mov.b32 u, {_twice(half)};")
            lines.append("sub.f16x2 $0, t, u;")
        else:
            lines.append("mov.b32 $0, t;")
        body = " ".join(lines)
        return (
            f"tl.inline_asm_elementwise('{{ {body} }}', '=r,r', [{word}], dtype=tl.float16, is_pure=True, pack=2)"
        )


def _twice(half: int) -> str:
    """A 16-bit pattern in both halves of a register."""
    return f"0x{half:04x}{half:04x}"


def _candidates(byte: int) -> Iterator[BitTrick]:
    """Tricks worth trying for codes in byte ``byte`` of a 16-bit word; offsets are set by ``find_trick``."""
    low = 8 * byte
    for bits in (8, 4, 3, 2, 1):
        mask = (1 << bits) - 1
        for shift in range(0, 9 - bits, bits):
            yield BitTrick(((low + shift, mask),), _ONE_K, 1024, 0)
    # Two's complement: flipping the sign bit adds 128.
    yield BitTrick(((low, 0xFF),), _ONE_K | 0x80, 1024, 0)
    yield BitTrick(((low - 8, 0x8000), (low - 7, 0x3F80)), 0, 0, 8)


@functools.lru_cache(maxsize=256)
def find_trick(fmt: KernelFormat, part: int, byte: int) -> BitTrick | None:
    """A trick that equals ``unpack(word, part)`` for all 256 words in byte ``byte``, or None."""
    if fmt.word_dtype.itemsize != 1 or fmt.word_dtype.is_floating_point:
        return None
    words = torch.arange(256, dtype=torch.int32)
    eager = fmt.unpack(words.to(torch.uint8).view(fmt.word_dtype), part).to(torch.float32)
    finite = eager.isfinite()
    # The other byte of the word must not show: it is filled with both extremes.
    both = [(words << 8) | other if byte else words | (other << 8) for other in (0, 0xFF, 0x5A)]
    for trick in _candidates(byte):
        base = trick.evaluate(both[0])
        shifted = trick
        if trick.offset:
            shifted = dataclasses.replace(trick, offset=trick.offset + int((base - eager)[0].item()))
        if all(torch.equal(shifted.evaluate(side)[finite], eager[finite]) for side in both):
            return shifted
    return None
