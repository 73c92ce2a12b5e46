"""Fragments of one slot's codes: sizes and instructions, from the format that the scheme gives.

A CHUNK is a run of a row's bytes of which a warp takes a fixed part a thread; chunk c, byte j and part i is channel
``i * row + c * chunk + j``. A chunk lies in one scale's group in every part. Instructions come from ``bit_tricks``, which are held to
``unpack`` on every word; what has none is not for this kernel.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from kvcompile import schemes
from kvcompile.lowering.codegen.bit_tricks import BitTrick, find_trick
from kvcompile.lowering.gluon.config import TileConfig
from kvcompile.types import KernelFormat, Role, SlotSpec

SIZES = (64, 128, 256)
"""Channels of a head that are known: powers of two."""


TWICE_HEADS = 4
"""Query heads of a kv head that stand twice in a product's columns."""


class NoFragments(Exception):
    """A format that the kernel has no fragments for; the text says what of it."""


@dataclasses.dataclass(frozen=True)
class KeyPlan:
    """Fragments of keys, tokens the rows.

    ``row``: bytes of a token. ``scales``: a token's scales, group g of all; 0 where scales are those of ``block`` tokens, one a channel.
    ``groups``: the scale of (chunk, part), ``chunk * parts + part``. ``lower``: octaves that a part's queries are smaller by, so that its
    codes have the unit 2**-``unit``. ``spans``: the accumulator of a part, each ``span_octaves`` above the unit of the first.
    """

    dim: int
    row: int
    parts: int
    chunk: int
    scales: int
    block: int
    groups: tuple[int, ...]
    lower: tuple[int, ...]
    spans: tuple[int, ...]
    span_octaves: tuple[int, ...]
    unit: int
    offset: int
    assembly: str
    constraints: str

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.row // self.chunk

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first channel of each (chunk, part)."""
        return tuple(part * self.row + chunk * self.chunk for chunk in range(self.chunks) for part in range(self.parts))

    @property
    def lowered(self) -> tuple[int, ...]:
        """The different octaves that queries are smaller by."""
        return tuple(dict.fromkeys(self.lower))


@dataclasses.dataclass(frozen=True)
class ValuePlan:
    """Fragments of values, tokens what is summed over.

    ``word``: bytes that a thread loads of a token. ``tiles``: for every product of 16 rows of a chunk what its rows 0 to 7 and 8 to 15
    are, as (part, byte of the word) each. ``halves``: 2 where columns 4 to 7 are the queries again, weighted by the scales of rows
    8 to 15, so that two groups share a product. ``sets``: operands of weighted probabilities. ``set_of``: the set of (chunk, tile).
    ``powers``: the power of two that a part's codes lack.
    """

    dim: int
    row: int
    parts: int
    chunk: int
    word: int
    scales: int
    halves: int
    sets: int
    zeros: bool
    offset: int
    powers: tuple[int, ...]
    tiles: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    set_of: tuple[int, ...]
    assembly: str
    constraints: str

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.row // self.chunk

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """The products of 16 rows: the chunk, and which outputs of the instructions are rows 0 to 7 and 8 to 15."""
        return tuple(
            (chunk, low[1] * self.parts + low[0], high[1] * self.parts + high[0])
            for chunk in range(self.chunks) for low, high in self.tiles
        )

    @property
    def firsts(self) -> tuple[tuple[int, int], ...]:
        """The channels of row 0 and row 8 of each product; the next row is ``word`` channels on."""
        return tuple(
            (low[0] * self.row + chunk * self.chunk + low[1], high[0] * self.row + chunk * self.chunk + high[1])
            for chunk in range(self.chunks) for low, high in self.tiles
        )

    @property
    def written(self) -> tuple[tuple[tuple[int, ...], int, int], ...]:
        """Runs of ``word`` channels that a thread has: which eight rows they are, low and high halves of products behind one another.

        Where ``halves`` is 2 each product is one such half, by its column. Then the channel of row 0, in columns 0 to 3 and 4 to 7.
        """
        if self.halves == 2:
            firsts = list(self.firsts)
        else:
            firsts = [(first, first) for pair in self.firsts for first in pair]
        starts = {pair: at for at, pair in enumerate(firsts)}
        return tuple(
            (tuple(starts[low + byte, high + byte] for byte in range(self.word)), low, high)
            for low, high in starts if low % self.word == 0
        )

    @property
    def units(self) -> tuple[tuple[float, float], ...]:
        """Factors that rows 0 to 7 and 8 to 15 of each product are multiplied by at the end."""
        return tuple((2.0 ** self.powers[low[0]], 2.0 ** self.powers[high[0]]) for _ in range(self.chunks) for low, high in self.tiles)

    @property
    def shifted(self) -> bool:
        """True where the weights are summed too, for an offset of the codes, or for zero points."""
        return self.zeros or self.offset != 0


MEASURED = {(True, 2): TileConfig(1, 32, 3, 8), (False, 4): TileConfig(4, 32, 3, 3)}
"""Cuts of formats that were measured to win, by (symmetric, codes of a byte): symmetric 4 bits; 2 bits with zero points."""

MEASURED_CHANNELS = 128
"""Channels of the heads that were measured."""

DEFAULT = TileConfig(1, 32, 3, 8)
"""The cut of all else; rings of wider heads leave room for half as many programs."""


@functools.lru_cache(maxsize=128)
def _kinds(key_scheme: str, value_scheme: str, dim: int) -> frozenset[tuple[bool, int]]:
    """The formats of both slots, as ``MEASURED`` has them."""
    formats = [
        schemes.parse(text).format(SlotSpec(1, dim, torch.bfloat16, role))
        for text, role in ((key_scheme, Role.KEY), (value_scheme, Role.VALUE))
    ]
    return frozenset((fmt.symmetric, fmt.parts) for fmt in formats)


def measured(key_scheme: str, value_scheme: str, dim: int) -> bool:
    """Whether attention over two slots was measured to be faster: both have one of ``MEASURED``'s formats, and heads are as wide."""
    kinds = _kinds(key_scheme, value_scheme, dim)
    return dim == MEASURED_CHANNELS and len(kinds) == 1 and kinds <= MEASURED.keys()


def cut_of(key_scheme: str, value_scheme: str, dim: int) -> TileConfig:
    """Return how the attention over two slots is cut."""
    kind, *others = _kinds(key_scheme, value_scheme, dim)
    found = DEFAULT if others else MEASURED.get(kind, DEFAULT)
    return found if dim <= MEASURED_CHANNELS else dataclasses.replace(found, programs=-(-found.programs // 2))


@functools.lru_cache(maxsize=128)
def key_plan(scheme: str, dim: int, word_dtype: torch.dtype) -> KeyPlan:
    """The plan of a slot of keys; raises NoFragments."""
    fmt = schemes.parse(scheme).format(SlotSpec(1, dim, word_dtype, Role.KEY))
    tricks = _tricks(fmt, dim)
    row = dim // fmt.parts
    folded = not fmt.symmetric
    if folded and not (fmt.group == 1 and fmt.zeros and fmt.block >= 32):
        raise NoFragments("scales that are neither a token's nor a channel's over 32 tokens or more")
    chunk = min(row, 64, 64 if folded else fmt.group)
    if chunk < 16:
        raise NoFragments(f"rows of {row} bytes in groups of {fmt.group} channels")
    powers = [tricks[part].power for part in range(fmt.parts)]
    unit = max(powers)
    spans = _spans(powers) if folded else [0] * fmt.parts
    tops = [max(power for power, span in zip(powers, spans, strict=True) if span == at) for at in range(max(spans) + 1)]
    groups = tuple((part * row + at * chunk) // fmt.group for at in range(row // chunk) for part in range(fmt.parts))
    offset = _offset(tricks)
    return KeyPlan(
        dim, row, fmt.parts, chunk, 0 if folded else dim // fmt.group, fmt.block if folded else 0, groups,
        tuple(tops[span] - power for power, span in zip(powers, spans, strict=True)), tuple(spans), tuple(top - unit for top in tops), unit,
        offset, _key_assembly(fmt.parts, tricks), ",".join(["=&r"] * (2 * fmt.parts) + ["r"]),
    )


@functools.lru_cache(maxsize=128)
def value_plan(scheme: str, dim: int, word_dtype: torch.dtype, few_rows: bool) -> ValuePlan:
    """The plan of a slot of values; ``few_rows``: there are at most four rows of queries. Raises NoFragments."""
    fmt = schemes.parse(scheme).format(SlotSpec(1, dim, word_dtype, Role.VALUE))
    tricks = _tricks(fmt, dim)
    if fmt.block > 1:
        raise NoFragments("scales of several tokens on values")
    row, parts = dim // fmt.parts, fmt.parts
    word = 4 if min(row, fmt.group) >= 32 else 2
    chunk = 8 * word
    if min(row, fmt.group) < chunk:
        raise NoFragments(f"rows of {row} bytes in groups of {fmt.group} channels")
    scales = dim // fmt.group
    halves = 2 if few_rows and scales > 1 and parts > 1 else 1
    if halves == 2:
        tiles = tuple(((part, byte), (part + parts // 2, byte)) for byte in range(word) for part in range(parts // 2))
    else:
        tiles = tuple(((part, byte), (part, byte + 1)) for byte in range(0, word, 2) for part in range(parts))
    sets = scales // halves
    set_of = tuple((tile[0][0] * row + at * chunk) // fmt.group for at in range(row // chunk) for tile in tiles)
    assert max(set_of) < sets
    return ValuePlan(
        dim, row, parts, chunk, word, scales, halves, sets, fmt.zeros, _offset(tricks), tuple(tricks[part].power for part in range(parts)),
        tiles, set_of, _value_assembly(parts, word, tricks), ",".join(["=&r"] * (word * parts) + ["r"] * (word // 2)),
    )


def _tricks(fmt: KernelFormat, dim: int) -> list[BitTrick]:
    """The tricks of both bytes of a pair, byte * parts + part."""
    if dim not in SIZES:
        raise NoFragments(f"heads of {dim} channels")
    if fmt.norms:
        raise NoFragments("norms of tokens")
    if not fmt.scaled or fmt.levels or fmt.static or fmt.segments > 1:
        raise NoFragments("codes that no scale of a token or block belongs to" if not fmt.levels else "tables of levels")
    found = [find_trick(fmt, part, byte) for byte in range(2) for part in range(fmt.parts)]
    tricks = [trick for trick in found if trick is not None and trick.nan is None]
    if len(tricks) < len(found) or any(tricks[part].power != tricks[fmt.parts + part].power for part in range(fmt.parts)):
        raise NoFragments("codes that are no small integers")
    return tricks


def _offset(tricks: list[BitTrick]) -> int:
    (offset,) = {trick.offset for trick in tricks}
    return offset


def _spans(powers: list[int]) -> list[int]:
    """The accumulator of each part: at most two octaves apart, as what is smaller would lose bits of queries times scales."""
    spans, top, at = {}, None, -1
    for power in sorted(set(powers), reverse=True):
        if top is None or top - power > 2:
            top, at = power, at + 1
        spans[power] = at
    return [spans[power] for power in powers]


def _fields(word: str, first: int, tricks: list[BitTrick]) -> list[str]:
    """Instructions that leave the fields of a pair of 16-bit words in the outputs from ``first`` on, by byte and part."""
    lines, source, moved = [], word, 0
    for at, trick in enumerate(tricks):
        if trick.shift != moved:
            lines.append(f"shr.b32 s, {word}, {trick.shift};")
            source, moved = "s", trick.shift
        lines.append(trick.leave(f"${first + at}", source))
    return lines


def _key_assembly(parts: int, tricks: list[BitTrick]) -> str:
    """Two words of 16 bits, side by side in a row, to pairs of float16 for every byte and part."""
    return " ".join(["{ .reg .b32 s, u;", *_fields(f"${2 * parts}", 0, tricks), "}"])


def _value_assembly(parts: int, word: int, tricks: list[BitTrick]) -> str:
    """One word of each of two tokens to pairs of float16 of both, for every byte and part."""
    count = word * parts
    if word == 2:
        # Words of 16 bits come in pairs.
        return " ".join(["{ .reg .b32 s, u;", *_fields(f"${count}", 0, tricks), "}"])
    lines = [f"prmt.b32 a, ${count}, ${count + 1}, 0x5410;", f"prmt.b32 b, ${count}, ${count + 1}, 0x7632;"]
    return " ".join(["{ .reg .b32 a, b, s, u;", *lines, *_fields("a", 0, tricks), *_fields("b", 2 * parts, tricks), "}"])
