"""Decoding a tile of tokens of one slot to a matrix [tokens, channels] for the tensor cores: the scheme's side of the prefill template.

With many rows a tile is unpacked once for all of them, so elements are decoded completely, with scale and zero point, in one fused
multiply-add of float16 pairs: element = raw * lift + bias. ``raw`` is the code as the float16 subnormal that it already is
(``bit_tricks``), ``lift`` the scale times that power of two, ``bias`` the zero point less the codes' offset. One power of two for all
scales that the program sees (``up``) keeps them within float16; scores and sums are divided by it again. With it a step of the largest
scale is 2^-9, where neighbouring numbers differ by 2^-24: under a scale of 2^-k times the largest, decoding is off by up to 2^(k - 16) of a
step, 1.6% at a thousandth, where quantization itself is off by half a step.

Columns of the matrix are parts and bytes of the loaded words, not channels: column i * W + j is byte i % 2 of view word j, part i // 2.
Queries are loaded in that order and results stored by it, so nothing is shuffled.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from kvcompile import schemes
from kvcompile.lowering.codegen.bit_tricks import find_trick
from kvcompile.lowering.codegen.expressions import TRITON_TYPES
from kvcompile.types import Role, SlotSpec

PAIR = 2
"""Bytes of a view word."""

SHARED_COLUMNS = 8
"""Columns that one thread loads at once. A token's only scale is loaded once for each such run, so threads need not exchange it."""

FMA = (
    "tl.inline_asm_elementwise('fma.rn.f16x2 $0, $1, $2, $3;', '=r,r,r,r', [{raw}, {lift}, {bias}],"
    " dtype=tl.float16, is_pure=True, pack=2)"
)


@dataclasses.dataclass(frozen=True)
class Element:
    """One code of a view word, a pair of bytes: part ``part`` of byte ``byte``; its value is raw * 2**power - offset.

    ``expression``: Triton text that unpacks raw from ``{word}``.
    """

    part: int
    byte: int
    expression: str
    power: int
    offset: int

    def unpack(self, word: str) -> str:
        """Return the raw codes as a Triton expression."""
        return self.expression.replace("{word}", word)


@dataclasses.dataclass(frozen=True)
class TileSlot:
    """One slot for the prefill template: an element is one channel, part of one byte of a view word.

    Dense slots have no elements and are multiplied without decoding. A token has ``words`` words of the view's dtype. A row of ``scales``
    scales covers ``block`` tokens, and each element's columns use ``groups`` of them; ``repeated``: all columns use a single one.
    ``halves``: scales are float16, and stay float16: two multiplications of pairs by powers of two cost as little as one conversion.
    """

    dim: int
    dtype: torch.dtype
    scaled: bool = False
    zeros: bool = False
    words: int = 0
    scales: int = 0
    groups: int = 1
    block: int = 1
    repeated: bool = False
    by_channel: bool = False
    halves: bool = False
    elements: tuple[Element, ...] = ()
    packed: bool = True

    @property
    def dot_type(self) -> str:
        """Dtype that the tensor cores multiply, as Triton's name."""
        return TRITON_TYPES[self.dtype]

    @property
    def powers(self) -> tuple[int, ...]:
        """Distinct powers of two that raw codes must be multiplied by, largest first."""
        return tuple(sorted({element.power for element in self.elements}, reverse=True))

    @property
    def exponents(self) -> tuple[int, int]:
        """Range (lowest, highest) of ``{name}_exponent`` for which the factors of ``scaling`` are finite.

        2 ** ``{name}_exponent`` is the one power of two by which all elements are multiplied, so that no scale leaves float16.
        """
        return (-28, 30 - self.powers[0]) if self.halves else (-120, 120)

    def scaling(self, name: str) -> list[str]:
        """Return statements that compute the factors for ``decode``, ``{name}_lift*`` and ``{name}_bias``, from ``{name}_exponent``."""
        wanted = {f"{name}_lift{power}": power for power in self.powers} | {f"{name}_bias": 0}
        lines = []
        for factor, power in wanted.items():
            lines.append(f"{factor} = {name}_exponent + {power}")
            if self.halves:
                for half, exponent in (("b", f"({factor} - {factor} // 2)"), ("a", f"({factor} // 2)")):
                    lines.append(f"{factor}_{half} = {_power(exponent)}.to(tl.float16)")
            else:
                lines.append(f"{factor} = {_power(factor)}")
        return lines

    def scaled_by(self, block: str, factor: str) -> str:
        """Return Triton source that multiplies ``block``, scales or zero points, by the variable ``factor``: in float16 or in float32."""
        return f"({block} * {factor}_a * {factor}_b)" if self.halves else f"({block}.to(tl.float32) * {factor})"

    def channel(self, column: str) -> str:
        """Return the channel of a column, as a Triton expression."""
        if not self.scaled:
            return column
        run, part = self.words, PAIR * self.words
        return f"(({column} // {run}) // {PAIR} * {part} + {PAIR} * ({column} % {run}) + ({column} // {run}) % {PAIR})"

    def rows(self, tokens: int) -> int:
        """Return the number of rows of scales in a tile of ``tokens`` tokens."""
        return tokens // self.block

    @property
    def width(self) -> int:
        """Number of columns of the loaded block of scales."""
        return self.groups if self.repeated else self.scales

    def decode(self, name: str, tokens: int, valid: str | None = None) -> list[str]:
        """Return Triton statements that compute ``{name}_tile``, [tokens, dim], from the loaded words, scales and zero points of the slot.

        They read ``{name}_words``, ``{name}_scales``, ``{name}_zeros`` and the factors that ``scaling`` computes. Elements are multiplied
        by 2 ** ``{name}_exponent``, which scores and sums are divided by again. ``valid``: the name of a block of bool [tokens]; others
        become 0 (None: all are valid). Columns are in the order of ``elements``, not of channels.
        """
        rows = self.rows(tokens)
        cut = (rows, self.block, self.groups, self.words // self.groups)
        lines = [f"{name}_cut = {name}_words.reshape({', '.join(map(str, cut))})"]
        named = self._spread(lines, f"{name}_scales", rows)
        zeros = self._spread(lines, f"{name}_zeros", rows) if self.zeros else []
        by_row = valid if self.block == 1 else None
        made: dict[tuple[int, int], tuple[str, str | None]] = {}
        pieces = []
        for index, element in enumerate(self.elements):
            key = self._key(element)
            if (key, element.power) not in made:
                made[key, element.power] = self._line(lines, name, index, element, named[key], zeros[key] if zeros else None, by_row, cut)
            lift, bias = made[key, element.power]
            raw = element.unpack(f"{name}_cut")
            if bias is None:
                value = f"{raw} * {lift}"
            elif self.packed:
                value = FMA.format(raw=raw, lift=lift, bias=bias)
            else:
                value = f"({raw}.to(tl.float32) * {lift}.to(tl.float32) + {bias}.to(tl.float32)).to(tl.float16)"
            lines.append(f"{name}_{index} = {value}")
            pieces.append(f"{name}_{index}")
        depth = len(pieces).bit_length() - 1
        order = (0, 1, *range(3 + depth, 3, -1), 2, 3)
        lines.append(f"{name}_tile = {_joined(pieces)}.permute({', '.join(map(str, order))}).reshape({tokens}, {self.dim})")
        if valid is not None and by_row is None:
            lines.append(f"{name}_tile = tl.where({valid}[:, None], {name}_tile, 0.0)")
        return lines

    def _key(self, element: Element) -> int:
        """Return the index, among the blocks of ``_spread``, of the scales that an element's columns use."""
        if self.by_channel:
            return PAIR * element.part + element.byte
        parts = len(self.elements) // PAIR
        runs = 1 if self.repeated else self.scales // self.groups
        return element.part * runs // parts

    def _spread(self, lines: list[str], block: str, rows: int) -> list[str]:
        """Return the names of blocks [rows, groups] into which ``block``, loaded scales or zero points, is split, in ``_key`` order.

        The statements that make them are appended to ``lines``. ``rows``: rows of scales in the tile. There is one block for each distinct
        set of scales: one of all channels (``block`` itself), one of each run of parts, or one of each part and byte (``by_channel``).
        """
        count = 1 if self.repeated else self.scales // self.groups
        if count == 1:
            return [block]
        bits = count.bit_length() - 1
        twos = ", ".join(["2"] * bits)
        if self.by_channel:
            # Channels are ordered by part, word, byte; move the words first.
            cut = f"{block}.reshape({rows}, {count // PAIR}, {self.groups}, {PAIR}).permute(0, 2, 1, 3)"
        else:
            cut = f"{block}.reshape({rows}, {count}, {self.groups}).permute(0, 2, 1)"
        lines.append(f"{block}_cut = {cut}.reshape({rows}, {self.groups}, {twos})")
        level = [f"{block}_cut"]
        for _ in range(bits):
            # Splitting takes the lowest bit of the index, so earlier splits are lower bits.
            lower, upper = [f"{name}0" for name in level], [f"{name}1" for name in level]
            lines += [f"{low}, {high} = tl.split({name})" for name, low, high in zip(level, lower, upper, strict=True)]
            level = lower + upper
        return level

    def _line(
        self, lines: list[str], name: str, index: int, element: Element, scale: str, zero: str | None, valid: str | None,
        cut: tuple[int, ...],
    ) -> tuple[str, str | None]:
        """Append the statements that compute ``lift`` and ``bias`` of an element, broadcast to the block of words; return both names.

        The name of the bias is None if neither a zero point nor an offset is to be added.
        """

        def spread(text: str) -> str:
            kept = f"tl.where({valid}[:, None], {text}, 0.0)" if valid else text
            return f"tl.broadcast_to({kept}.to(tl.float16)[:, None, :, None], ({', '.join(map(str, cut))}))"

        lift, bias = (f"{name}_{what}_{index}" for what in ("lift", "bias"))
        lines.append(f"{lift} = {spread(self.scaled_by(scale, f'{name}_lift{element.power}'))}")
        terms = ([self.scaled_by(zero, f"{name}_bias")] if zero else [])
        terms += [f"{self.scaled_by(scale, f'{name}_bias')} * {-float(element.offset)!r}"] if element.offset else []
        if not terms:
            return lift, None
        lines.append(f"{bias} = {spread('(' + ' + '.join(terms) + ')')}")
        return lift, bias


def _power(exponent: str) -> str:
    """Return 2**exponent as a float32 scalar expression."""
    return f"((127 + {exponent}) << 23).to(tl.float32, bitcast=True)"


def _joined(pieces: list[str]) -> str:
    """Return a Triton expression that joins 2^n pieces along n new last axes.

    The lowest bit of a piece's index is its index along the first of these axes.
    """
    if len(pieces) == 1:
        return pieces[0]
    half = len(pieces) // 2
    return f"tl.join({_joined(pieces[:half])}, {_joined(pieces[half:])})"


@functools.lru_cache(maxsize=256)
def tile_slot(scheme: str, role: Role, dim: int, word_dtype: torch.dtype, query: torch.dtype, packed: bool) -> TileSlot | None:
    """Return the plan of one slot, or None if the prefill template does not support it; the decode template does.

    It needs 16-bit queries, a power-of-two head dim, codes that unpack in packed pairs, and scale groups
    that divide the parts of a word evenly.
    """
    made, spec = schemes.parse(scheme).for_role(role), SlotSpec(1, dim, word_dtype, role)
    fmt = made.format(spec)
    if query not in {torch.float16, torch.bfloat16} or dim & (dim - 1) or not 32 <= dim <= 256:
        return None
    if not fmt.scaled:
        return TileSlot(dim, query) if fmt.word_dtype == query else None
    row = dim // fmt.parts
    if fmt.levels or fmt.norms or fmt.segments > 1 or fmt.word_dtype.itemsize != 1 or row < 2 * PAIR or fmt.block & (fmt.block - 1):
        return None
    tricks = [(part, byte, find_trick(fmt, part, byte)) for part in range(fmt.parts) for byte in range(PAIR)]
    if any(trick is None for _, _, trick in tricks):
        return None
    elements = tuple(
        Element(part, byte, trick.packed("{word}", False) if packed else trick.triton("{word}", False), trick.power, trick.offset)
        for part, byte, trick in tricks if trick is not None
    )
    words, scales = row // PAIR, dim // fmt.group
    slot = TileSlot(
        dim, torch.float16, True, fmt.zeros, words, scales, block=fmt.block, elements=elements, packed=packed, by_channel=fmt.group == 1,
        halves=made.layout(spec).planes[1].dtype == torch.float16,
    )
    if fmt.group == 1:
        return dataclasses.replace(slot, groups=words)
    if scales == 1:
        return dataclasses.replace(slot, groups=max(1, words // SHARED_COLUMNS), repeated=True)
    if fmt.group % row == 0:
        return slot
    even = row % fmt.group == 0 and fmt.group % PAIR == 0
    return dataclasses.replace(slot, groups=row // fmt.group) if even else None
