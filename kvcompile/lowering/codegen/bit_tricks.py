"""Unpacking in one or two instructions per PAIR of codes: small integers are already float16 numbers.

A field of up to ten bits, left alone in a 16-bit word, IS the float16 subnormal field * 2^-24 (times 2 for
every place that it stands to the left); an e4m3 byte, its sign moved to the top and its magnitude to the top
of the mantissa, IS the float16 number value * 2^-8. Tensor cores honour subnormals, and one instruction
works on the two 16-bit words of a register. What codes are biased by is either subtracted at once
(``centered``; exact) or left for the caller to take out of the sum.

A ``BitTrick`` is a description, printed as plain Triton (interpreter, tests) or as packed PTX. It is never
assumed: ``find_trick`` proposes a few and returns one only where it equals the scheme's eager ``unpack`` on
every possible word (the two NaN codes of e4m3 excepted where scales hold NaN, see ``expressions``). Where codes hold
NaN themselves, one carry finds them and fills their exponent. Otherwise None, and the caller
prints the traced expression.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch

from kvcompile.types import KernelFormat


@dataclasses.dataclass(frozen=True)
class BitTrick:
    """value = float16 of ((fields of the word >> shift) ^ flip) * 2**power - offset.

    ``fields`` are (left shift, or right where negative, mask after it); ``shift`` (right) comes first and is shared by parts of one byte.
    ``nan``: (add, mask, factor), after which the bits are or-ed with ((bits + add) & mask) * factor: NaN where the sum carries.
    """

    shift: int
    fields: tuple[tuple[int, int], ...]
    flip: int
    offset: int
    power: int
    nan: tuple[int, int, int] | None = None

    def evaluate(self, words16: torch.Tensor, beside: int = 0) -> torch.Tensor:
        """The values of 16-bit words given as int32, by the same steps as the printed code.

        ``beside``: the word in the other half of the register, whose bits move in where a pair is shifted as one.
        """
        bits = torch.full_like(words16, self.flip)
        source = _shifted(words16, -self.shift, beside)
        for left, mask in self.fields:
            bits = bits ^ (_shifted(source, left, beside) & mask)
        if self.nan is not None:
            add, mask, factor = self.nan
            bits = bits | ((bits + add) & mask) * factor
        halves = bits.to(torch.uint16).view(torch.float16)
        return halves.to(torch.float32) * 2.0**self.power - self.offset

    @property
    def bias_bits(self) -> int:
        """The float16 bits of what ``centered`` subtracts, before the power of two."""
        bias = torch.tensor(self.offset * 2.0**-self.power, dtype=torch.float16, device="cpu")
        return int(bias.view(torch.int16).item()) & 0xFFFF

    def triton(self, word: str, centered: bool) -> str:
        """As plain Triton on a uint16 block; float16, still to be multiplied by 2**power."""
        source = f"({word} {'>>' if self.shift > 0 else '<<'} {abs(self.shift)})" if self.shift else word
        terms = []
        for left, mask in self.fields:
            moved = f"({source} {'<<' if left > 0 else '>>'} {abs(left)})" if left else source
            terms.append(f"({moved} & {mask})")
        bits = f"({' | '.join(terms)})"
        if self.flip:
            bits = f"({bits} ^ {self.flip})"
        if self.nan is not None:
            add, mask, factor = self.nan
            bits = f"({bits} | ((({bits} + {add}) & {mask}) * {factor}))"
        halves = f"{bits}.to(tl.uint16).to(tl.float16, bitcast=True)"
        return f"({halves} - {self.offset * 2.0**-self.power!r})" if self.offset and centered else halves

    def packed(self, word: str, centered: bool) -> str:
        """As PTX on two uint16 words at a time; float16, still to be multiplied by 2**power."""
        end = f"mov.b32 u, {_twice(self.bias_bits)}; sub.f16x2 $0, t, u;" if self.offset and centered else "mov.b32 $0, t;"
        return _assembly(f".reg .b32 t, u; {self._fields()} {end}", [self._source(word)], "tl.float16")

    def packed_scaled(self, word: str, scale: str, zero: str) -> str:
        """Unpack codes times ``scale`` plus ``zero``, float16 blocks of the words' shape: one fused instruction on two elements."""
        return _assembly(f".reg .b32 t, u; {self._fields()} fma.rn.f16x2 $0, t, $2, $3;", [self._source(word), scale, zero], "tl.float16")

    def _source(self, word: str) -> str:
        if not self.shift:
            return word
        # An operation of its own, so that parts of one byte share it.
        return _assembly(f"{'shr' if self.shift > 0 else 'shl'}.b32 $0, $1, {abs(self.shift)};", [word], "tl.uint16")

    def leave(self, to: str, source: str) -> str:
        """PTX that leaves the bits of two words in register ``to``; ``source`` is shifted already, and ``u`` is overwritten."""
        lines = []
        for index, (left, mask) in enumerate(self.fields):
            if left:
                lines.append(f"{'shl' if left > 0 else 'shr'}.b32 u, {source}, {abs(left)};")
            # One instruction for (source & mask) ^ what is there already; ptxas alone makes two of it.
            there = to if index else _twice(self.flip)
            lines.append(f"lop3.b32 {to}, {'u' if left else source}, {_twice(mask)}, {there}, 0x6a;")
        if self.nan is not None:
            add, mask, factor = self.nan
            # No sum leaves its half of the register; or-ing what is there already loses nothing.
            filled = f"or.b32 {to}, {to}, u;" if factor == 1 else f"mul.lo.u32 u, u, {factor}; or.b32 {to}, {to}, u;"
            lines.append(f"add.u32 u, {to}, {_twice(add)}; and.b32 u, u, {_twice(mask)}; {filled}")
        return " ".join(lines)

    def _fields(self) -> str:
        """PTX that leaves the bits in ``t``."""
        return self.leave("t", "$1")


def _shifted(words16: torch.Tensor, left: int, beside: int) -> torch.Tensor:
    """A word shifted, right where ``left`` is negative, bits of its neighbor moving in."""
    if left >= 0:
        return ((words16 << left) | (beside >> (16 - left))) & 0xFFFF
    return ((words16 | (beside << 16)) >> -left) & 0xFFFF


def multiplied(one: str, other: str) -> str:
    """The product of two float16 blocks of one shape, two elements at a time, wherever they come from."""
    return _assembly("mul.rn.f16x2 $0, $1, $2;", [one, other], "tl.float16")


def scaled_by(values: str, factor: str, octaves: int = 0) -> str:
    """A float16 block times a scalar, then times 2**octaves, in float16.

    What a compiler must compute it pairs once, and not again at every use.
    """
    more = f" mov.b32 t, {_twice((15 + octaves) << 10)}; mul.rn.f16x2 $0, $0, t;" if octaves else ""
    return _assembly(f".reg .b32 t; mul.rn.f16x2 $0, $1, $2;{more}", [values, factor], "tl.float16")


def _assembly(body: str, operands: list[str], dtype: str) -> str:
    constraints = ",".join(["=r", *("r" for _ in operands)])
    return (
        f"tl.inline_asm_elementwise('{{ {body} }}', '{constraints}', [{', '.join(operands)}], dtype={dtype}, is_pure=True, pack=2)"
    )


def field_of_pairs(bits: int, low: int, centered: bool) -> str:
    """PTX that leaves the field of two 16-bit words from bit ``low`` on as float16, times 2^(low - 24); eight bits are two's complement.

    ``centered``: less half of the field's range.
    """
    flip = 0x80 if bits == 8 else 0
    trick = BitTrick(0, ((0, ((1 << bits) - 1) << low),), flip, 1 << (bits - 1), 24 - low)
    end = f"mov.b32 u, {_twice(trick.bias_bits)}; sub.f16x2 $0, t, u;" if centered else "mov.b32 $0, t;"
    return f"{{ .reg .b32 t, u; {trick._fields()} {end} }}"


def select_of_pairs(mask: int) -> str:
    """PTX that takes the bits of ``mask`` of two 16-bit words from the first operand, all others from the second."""
    return f"{{ .reg .b32 m; mov.b32 m, {_twice(mask)}; lop3.b32 $0, $1, $2, m, 0xe4; }}"


def shift_of_pairs(left: int) -> str:
    """PTX that shifts a register of two 16-bit words, right where ``left`` is negative; bits of one word move into the other."""
    return f"{'shl' if left > 0 else 'shr'}.b32 $0, $1, {abs(left)};"


def _twice(half: int) -> str:
    """A 16-bit pattern in both halves of a register."""
    return f"0x{half:04x}{half:04x}"


def _candidates(byte: int) -> Iterator[BitTrick]:
    """Tricks worth trying for codes in byte ``byte`` of a 16-bit word; offsets are set by ``find_trick``."""
    shift = 8 * byte
    for bits in (8, 4, 3, 2, 1):
        for low in range(0, 9 - bits, bits):
            # Left where it stands: the power of two takes its place into account.
            yield BitTrick(shift, ((0, ((1 << bits) - 1) << low),), 0, 0, 24 - low)
    # Two's complement: flipping the sign bit adds 128.
    yield BitTrick(shift, ((0, 0xFF),), 0x80, 0, 24)
    yield BitTrick(0, ((8, 0x8000), (7, 0x3F80)), 0, 0, 8) if byte == 0 else BitTrick(0, ((0, 0x8000), (-1, 0x3F80)), 0, 0, 8)


def _candidates_with_nan(byte: int) -> Iterator[BitTrick]:
    """Tricks for codes that hold NaN: two's complement as w - 127 below zero, where -128 has all eight bits; e4m3, where NaN has seven."""
    yield BitTrick(8 * byte, ((0, 0xFF),), 0x807F, 0, 24, (1, 0x100, 0x7E))
    plain = list(_candidates(byte))[-1]
    yield dataclasses.replace(plain, nan=(0x80, 0x4000, 1))


@functools.lru_cache(maxsize=256)
def find_trick(fmt: KernelFormat, part: int, byte: int) -> BitTrick | None:
    """A trick that equals ``unpack(word, part)`` for all 256 words in byte ``byte``, or None."""
    if fmt.word_dtype.itemsize != 1 or fmt.word_dtype.is_floating_point:
        return None
    words = torch.arange(256, dtype=torch.int32, device="cpu")
    eager = fmt.unpack(words.to(torch.uint8).view(fmt.word_dtype), part).to(torch.float32)
    finite = eager.isfinite()
    # The other byte of the word must not show: it is filled with both extremes.
    both = [(words << 8) | other if byte else words | (other << 8) for other in (0, 0xFF, 0x5A)]
    for trick in _candidates_with_nan(byte) if fmt.static else _candidates(byte):
        biased = dataclasses.replace(trick, offset=int((trick.evaluate(both[0]) - eager)[0].item()))
        found = [biased.evaluate(side, beside) for side in both for beside in (0, 0xFFFF)]
        right = all(torch.equal(values[finite], eager[finite]) for values in found)
        if right and (not fmt.static or all(bool(values[~finite].isnan().all()) for values in found)):
            return biased
    return None
