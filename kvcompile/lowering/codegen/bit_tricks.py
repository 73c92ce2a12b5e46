"""Unpacking in one or two instructions per PAIR of codes: small integers are already float16 numbers.

A field of up to ten bits, left in place in a 16-bit word, IS the float16 subnormal field * 2^-24 (times 2 for each bit
below the field); an e4m3 byte, with its sign moved to the top bit and its magnitude to the top of the mantissa, IS the
float16 number value * 2^-8. Tensor cores honour subnormals, and one instruction works on the two 16-bit words of a
register. The codes' bias is either subtracted at once (``centered``; exact) or left for the caller to take out of the sum.

A ``BitTrick`` is a description, printed as plain Triton (interpreter, tests) or as packed PTX. ``find_trick`` proposes a few
tricks and returns one only if it equals the scheme's eager ``unpack`` on every possible word. Words that hold one of e4m3's two
NaN codes are left out of that comparison if the scheme's scales hold NaN (see ``expressions``). Where codes alone hold NaN,
the trick adds a number that carries into the exponent for NaN codes only, and so turns them into float16 NaN (``nan``).
Without a match, the caller prints the traced expression.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch

from kvcompile.types import KernelFormat


@dataclasses.dataclass(frozen=True)
class BitTrick:
    """A way to unpack codes from a word: value = float16(bits) * 2**power - offset, with bits = fields(word >> shift) ^ flip.

    ``fields``: fields(w) is the union of (w << left) & mask over its pairs (left, mask), right if left is negative. Shifting first lets the
    parts of one byte share it. ``nan``: (add, mask, factor): ((bits + add) & mask) * factor is or-ed to the bits, which makes NaN codes
    NaN; None without NaN codes.
    """

    shift: int
    fields: tuple[tuple[int, int], ...]
    flip: int
    offset: int
    power: int
    nan: tuple[int, int, int] | None = None

    def evaluate(self, words16: torch.Tensor, beside: int = 0) -> torch.Tensor:
        """Return the float32 values of 16-bit words given as int32, computed as the printed code computes them.

        ``beside``: the neighbouring word of the register; its bits move in when both are shifted as one register.
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
        """Float16 bits of the bias that ``centered`` code subtracts, before the multiplication by 2**power."""
        bias = torch.tensor(self.offset * 2.0**-self.power, dtype=torch.float16, device="cpu")
        return int(bias.view(torch.int16).item()) & 0xFFFF

    def triton(self, word: str, centered: bool) -> str:
        """Return a plain Triton expression that unpacks the uint16 block ``word``; float16, not yet times 2**power.

        ``centered``: the codes' offset is subtracted.
        """
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
        """Return a Triton expression that unpacks the uint16 block ``word`` by PTX, two words at a time; float16, not yet times 2**power.

        ``centered``: the codes' offset is subtracted.
        """
        end = f"mov.b32 u, {_twice(self.bias_bits)}; sub.f16x2 $0, t, u;" if self.offset and centered else "mov.b32 $0, t;"
        return _assembly(f".reg .b32 t, u; {self._fields()} {end}", [self._source(word)], "tl.float16")

    def packed_scaled(self, word: str, scale: str, zero: str) -> str:
        """Return a Triton expression that unpacks the uint16 block ``word`` by PTX and returns unpacked * ``scale`` + ``zero``, float16.

        One multiply-add handles two elements. ``scale`` must include 2**power, and ``zero`` the codes' offset, since neither is applied
        here.
        """
        return _assembly(f".reg .b32 t, u; {self._fields()} fma.rn.f16x2 $0, t, $2, $3;", [self._source(word), scale, zero], "tl.float16")

    def _source(self, word: str) -> str:
        if not self.shift:
            return word
        # A separate operation, so that parts of one byte share it.
        return _assembly(f"{'shr' if self.shift > 0 else 'shl'}.b32 $0, $1, {abs(self.shift)};", [word], "tl.uint16")

    def leave(self, to: str, source: str) -> str:
        """Return PTX that unpacks two words into register ``to`` from ``source``, which is shifted already.

        Register ``u`` is overwritten.
        """
        lines = []
        for index, (left, mask) in enumerate(self.fields):
            if left:
                lines.append(f"{'shl' if left > 0 else 'shr'}.b32 u, {source}, {abs(left)};")
            # One instruction for (source & mask) ^ to; ptxas alone makes two of it.
            there = to if index else _twice(self.flip)
            lines.append(f"lop3.b32 {to}, {'u' if left else source}, {_twice(mask)}, {there}, 0x6a;")
        if self.nan is not None:
            add, mask, factor = self.nan
            # No sum overflows its 16 bits; or-ing bits that are set already changes nothing.
            filled = f"or.b32 {to}, {to}, u;" if factor == 1 else f"mul.lo.u32 u, u, {factor}; or.b32 {to}, {to}, u;"
            lines.append(f"add.u32 u, {to}, {_twice(add)}; and.b32 u, u, {_twice(mask)}; {filled}")
        return " ".join(lines)

    def _fields(self) -> str:
        """Return PTX that puts the unpacked bits of operand $1 into ``t``."""
        return self.leave("t", "$1")


def _shifted(words16: torch.Tensor, left: int, beside: int) -> torch.Tensor:
    """Return 16-bit words, held in int32, shifted left by ``left`` bits, or right if it is negative; bits of ``beside`` move in."""
    if left >= 0:
        return ((words16 << left) | (beside >> (16 - left))) & 0xFFFF
    return ((words16 | (beside << 16)) >> -left) & 0xFFFF


def multiplied(one: str, other: str) -> str:
    """Return a Triton expression for the product of two float16 blocks of one shape, by PTX on two elements at a time."""
    return _assembly("mul.rn.f16x2 $0, $1, $2;", [one, other], "tl.float16")


def scaled_by(values: str, factor: str, octaves: int = 0) -> str:
    """Return a Triton expression for a float16 block times a scalar, then times 2**octaves, in float16.

    Inline assembly, so that the compiler cannot recompute the product at each use.
    """
    more = f" mov.b32 t, {_twice((15 + octaves) << 10)}; mul.rn.f16x2 $0, $0, t;" if octaves else ""
    return _assembly(f".reg .b32 t; mul.rn.f16x2 $0, $1, $2;{more}", [values, factor], "tl.float16")


def _assembly(body: str, operands: list[str], dtype: str) -> str:
    constraints = ",".join(["=r", *("r" for _ in operands)])
    return (
        f"tl.inline_asm_elementwise('{{ {body} }}', '{constraints}', [{', '.join(operands)}], dtype={dtype}, is_pure=True, pack=2)"
    )


def field_of_pairs(bits: int, low: int, centered: bool) -> str:
    """Return PTX that reads two 16-bit words from $1 and writes to $0 the field of ``bits`` bits at bit ``low`` of each, as float16.

    The result is the field times 2^(low - 24); a field of 8 bits is two's complement, raised by 128. ``centered``: half of the field's
    range is subtracted first.
    """
    flip = 0x80 if bits == 8 else 0
    trick = BitTrick(0, ((0, ((1 << bits) - 1) << low),), flip, 1 << (bits - 1), 24 - low)
    end = f"mov.b32 u, {_twice(trick.bias_bits)}; sub.f16x2 $0, t, u;" if centered else "mov.b32 $0, t;"
    return f"{{ .reg .b32 t, u; {trick._fields()} {end} }}"


def select_of_pairs(mask: int) -> str:
    """Return PTX that selects, in two 16-bit words, the bits in ``mask`` from the first operand and the others from the second."""
    return f"{{ .reg .b32 m; mov.b32 m, {_twice(mask)}; lop3.b32 $0, $1, $2, m, 0xe4; }}"


def shift_of_pairs(left: int) -> str:
    """Return PTX that shifts a register of two 16-bit words left, or right if negative; bits move from one word into the other."""
    return f"{'shl' if left > 0 else 'shr'}.b32 $0, $1, {abs(left)};"


def _twice(half: int) -> str:
    """Return the 16-bit pattern ``half`` repeated in both halves of 32 bits, as hexadecimal text."""
    return f"0x{half:04x}{half:04x}"


def _candidates(byte: int) -> Iterator[BitTrick]:
    """Yield tricks to try for codes in byte ``byte`` of a 16-bit word; ``find_trick`` sets their offsets."""
    shift = 8 * byte
    for bits in (8, 4, 3, 2, 1):
        for low in range(0, 9 - bits, bits):
            # Not shifted: the power of two accounts for the field's position.
            yield BitTrick(shift, ((0, ((1 << bits) - 1) << low),), 0, 0, 24 - low)
    # Two's complement: flipping the sign bit adds 128.
    yield BitTrick(shift, ((0, 0xFF),), 0x80, 0, 24)
    yield BitTrick(0, ((8, 0x8000), (7, 0x3F80)), 0, 0, 8) if byte == 0 else BitTrick(0, ((0, 0x8000), (-1, 0x3F80)), 0, 0, 8)


def _candidates_with_nan(byte: int) -> Iterator[BitTrick]:
    """Yield tricks for codes with NaN: two's complement, w - 127 below zero, NaN is -128; e4m3, NaN has all magnitude bits set."""
    yield BitTrick(8 * byte, ((0, 0xFF),), 0x807F, 0, 24, (1, 0x100, 0x7E))
    plain = list(_candidates(byte))[-1]
    yield dataclasses.replace(plain, nan=(0x80, 0x4000, 1))


@functools.lru_cache(maxsize=256)
def find_trick(fmt: KernelFormat, part: int, byte: int) -> BitTrick | None:
    """Return a trick that equals ``unpack(word, part)`` for all 256 words in byte ``byte`` of a 16-bit word, or None."""
    if fmt.word_dtype.itemsize != 1 or fmt.word_dtype.is_floating_point:
        return None
    words = torch.arange(256, dtype=torch.int32, device="cpu")
    eager = fmt.unpack(words.to(torch.uint8).view(fmt.word_dtype), part).to(torch.float32)
    finite = eager.isfinite()
    # The word's other byte must not change the result: try several values.
    both = [(words << 8) | other if byte else words | (other << 8) for other in (0, 0xFF, 0x5A)]
    for trick in _candidates_with_nan(byte) if fmt.static else _candidates(byte):
        biased = dataclasses.replace(trick, offset=int((trick.evaluate(both[0]) - eager)[0].item()))
        found = [biased.evaluate(side, beside) for side in both for beside in (0, 0xFFFF)]
        right = all(torch.equal(values[finite], eager[finite]) for values in found)
        if right and (not fmt.static or all(bool(values[~finite].isnan().all()) for values in found)):
            return biased
    return None
