"""Fragments of one slot's codes: sizes and instructions, from the scheme's kernel format.

A CHUNK is a run of a row's bytes; each thread of a warp takes a fixed part of it. Byte j of chunk c is, in part i, channel
``i * row + c * chunk + j``. A chunk is within one scale's group in every part. Instructions come from ``bit_tricks``, which are checked
against ``unpack`` on every word; codes without a trick are not supported.
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
"""Supported channels of a head."""


TWICE_HEADS = 4
"""Largest GQA group for which each head is duplicated in a product's columns."""


class NoFragments(Exception):
    """Raised for a format that the Gluon kernel does not support; the message says which property."""


@dataclasses.dataclass(frozen=True)
class KeyPlan:
    """The plan by which the Gluon kernel multiplies queries by keys on tensor cores, in fragments of keys with one token a row.

    ``row``: bytes of a token. ``scales``: scales of a token; 0 if each channel has one scale for ``block`` tokens. ``groups``: index of the
    scale of (chunk, part), ``chunk * parts + part``. ``lower``: octaves by which a part's queries are scaled down, so that its codes have
    the unit 2**-``unit``. ``spans``: index of a part's accumulator; ``span_octaves``: each accumulator's octaves above the first one's
    unit.
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
        """Number of chunks of a row: runs of ``chunk`` bytes."""
        return self.row // self.chunk

    @property
    def firsts(self) -> tuple[int, ...]:
        """First channel of each (chunk, part)."""
        return tuple(part * self.row + chunk * self.chunk for chunk in range(self.chunks) for part in range(self.parts))

    @property
    def lowered(self) -> tuple[int, ...]:
        """The distinct numbers of octaves by which queries are scaled down."""
        return tuple(dict.fromkeys(self.lower))


@dataclasses.dataclass(frozen=True)
class ValuePlan:
    """The plan by which the Gluon kernel multiplies weights by values on tensor cores, in fragments of values; products sum over tokens.

    ``word``: bytes that a thread loads of a token. ``tiles``: for every product of 16 rows of a chunk, (part, byte of the word) of its rows
    0 to 7 and of its rows 8 to 15. ``halves``: 2 if columns 4 to 7 repeat the queries, weighted by the scales of rows 8 to 15, so that two
    groups share a product. ``sets``: number of weighted-probability operands. ``set_of``: index of the set for (chunk, tile). ``powers``:
    power of two by which a part's codes must still be multiplied.
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
        """Number of chunks of a row: runs of ``chunk`` bytes."""
        return self.row // self.chunk

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """For each product of 16 rows: the index of its chunk, and the two outputs of the unpacking PTX for its rows 0 to 7 and 8 to 15."""
        return tuple(
            (chunk, low[1] * self.parts + low[0], high[1] * self.parts + high[0])
            for chunk in range(self.chunks) for low, high in self.tiles
        )

    @property
    def firsts(self) -> tuple[tuple[int, int], ...]:
        """For each product of 16 rows, the channels of its rows 0 and 8; each further row's channel is ``word`` larger."""
        return tuple(
            (low[0] * self.row + chunk * self.chunk + low[1], high[0] * self.row + chunk * self.chunk + high[1])
            for chunk in range(self.chunks) for low, high in self.tiles
        )

    @property
    def written(self) -> tuple[tuple[tuple[int, ...], int, int], ...]:
        """For each run of ``word`` consecutive result channels that a thread stores at once: (sources, first channel, other first channel).

        ``sources``: for each channel of the run, the index of the eight rows of a product that hold it. These row groups are numbered by
        product, rows 0 to 7 before rows 8 to 15; with ``halves`` 2 both are one group. The first channel is for columns 0 to 3, the other
        one for columns 4 to 7; they differ with ``halves`` 2 only.
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
        """For each product, the powers of two by which its sums in rows 0 to 7 and in rows 8 to 15 are multiplied at the end."""
        return tuple((2.0 ** self.powers[low[0]], 2.0 ** self.powers[high[0]]) for _ in range(self.chunks) for low, high in self.tiles)

    @property
    def shifted(self) -> bool:
        """Whether the kernel also sums the weights, to correct for an offset of the codes or for zero points."""
        return self.zeros or self.offset != 0


MEASURED = {(True, 2): TileConfig(1, 32, 3, 8), (False, 4): TileConfig(4, 32, 3, 3)}
"""Tile sizes of formats measured to be faster, by (symmetric, codes in a byte): symmetric 4 bits; 2 bits with zero points."""

MEASURED_CHANNELS = 128
"""Channels of a head in the measurements."""

DEFAULT = TileConfig(1, 32, 3, 8)
"""Tile sizes of all other formats; wider heads have larger rings, so half as many programs fit."""


@functools.lru_cache(maxsize=128)
def _kinds(key_scheme: str, value_scheme: str, dim: int) -> frozenset[tuple[bool, int]]:
    """Return the set of (symmetric, codes per word) of the kernel formats of keys and values: one entry if both agree, else two."""
    formats = [
        schemes.parse(text).format(SlotSpec(1, dim, torch.bfloat16, role))
        for text, role in ((key_scheme, Role.KEY), (value_scheme, Role.VALUE))
    ]
    return frozenset((fmt.symmetric, fmt.parts) for fmt in formats)


def measured(key_scheme: str, value_scheme: str, dim: int) -> bool:
    """Return whether the kernel was measured to be faster for this pair of schemes at head dim ``dim``.

    It was if keys and values have the same kernel format, that format is in ``MEASURED``, and ``dim`` is MEASURED_CHANNELS.
    """
    kinds = _kinds(key_scheme, value_scheme, dim)
    return dim == MEASURED_CHANNELS and len(kinds) == 1 and kinds <= MEASURED.keys()


def cut_of(key_scheme: str, value_scheme: str, dim: int) -> TileConfig:
    """Return the Gluon kernel's tile sizes for two schemes and head dim ``dim``: measured ones if their formats agree, else DEFAULT.

    Half as many programs for heads wider than MEASURED_CHANNELS.
    """
    kind, *others = _kinds(key_scheme, value_scheme, dim)
    found = DEFAULT if others else MEASURED.get(kind, DEFAULT)
    return found if dim <= MEASURED_CHANNELS else dataclasses.replace(found, programs=-(-found.programs // 2))


@functools.lru_cache(maxsize=128)
def key_plan(scheme: str, dim: int, word_dtype: torch.dtype) -> KeyPlan:
    """Return how the Gluon kernel reads a slot of keys. Raises NoFragments for a scheme or head dim that the kernel does not support."""
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
    """Return how the Gluon kernel reads a slot of values. Raises NoFragments for a scheme or head dim that it does not support.

    ``few_rows``: at most four query rows per kv head.
    """
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
    """Return how each code is taken out of two bytes of a word: the bit trick of (byte, part), at index byte * parts + part.

    Raises NoFragments as ``key_plan`` does.
    """
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
    """Return for each part the index of its accumulator, from the parts' powers of two.

    Parts at most two octaves apart share an accumulator, since queries scaled down further lose bits.
    """
    spans, top, at = {}, None, -1
    for power in sorted(set(powers), reverse=True):
        if top is None or top - power > 2:
            top, at = power, at + 1
        spans[power] = at
    return [spans[power] for power in powers]


def _fields(word: str, first: int, tricks: list[BitTrick]) -> list[str]:
    """Return PTX that extracts float16 pairs by each of ``tricks``, one number from each of the two 16-bit words in register ``word``.

    ``first``: the number of the first output register.
    """
    lines, source, moved = [], word, 0
    for at, trick in enumerate(tricks):
        if trick.shift != moved:
            lines.append(f"shr.b32 s, {word}, {trick.shift};")
            source, moved = "s", trick.shift
        lines.append(trick.leave(f"${first + at}", source))
    return lines


def _key_assembly(parts: int, tricks: list[BitTrick]) -> str:
    """Return PTX that unpacks a register, two 16-bit words of a key's row, to a float16 pair, one of each word, for each (byte, part)."""
    return " ".join(["{ .reg .b32 s, u;", *_fields(f"${2 * parts}", 0, tricks), "}"])


def _value_assembly(parts: int, word: int, tricks: list[BitTrick]) -> str:
    """Return PTX that unpacks ``word`` (2 or 4) bytes of each of two tokens to a float16 pair, one of each token, for each (byte, part)."""
    count = word * parts
    if word == 2:
        # A register holds the 16-bit words of both tokens.
        return " ".join(["{ .reg .b32 s, u;", *_fields(f"${count}", 0, tricks), "}"])
    lines = [f"prmt.b32 a, ${count}, ${count + 1}, 0x5410;", f"prmt.b32 b, ${count}, ${count + 1}, 0x7632;"]
    return " ".join(["{ .reg .b32 a, b, s, u;", *lines, *_fields("a", 0, tricks), *_fields("b", 2 * parts, tricks), "}"])
