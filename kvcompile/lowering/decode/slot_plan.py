"""Which sub-dots an encoded slot falls into: the scheme's side of the attend template, made of plain data.

A row of a plane is W stored words. The kernel loads it as VIEW words (pairs of bytes as uint16 where that
is possible, since 16-bit elements can be transposed on their way to the tensor cores and two of them
unpack in one register), cut into CHUNKS: power-of-two runs of view words that do not cross a scale's
group in any part. A PIECE is one part of a chunk: a matrix [tokens, chunk] whose channels are
``first + step * column`` and share one scale. So scales multiply sub-dot results, never elements.

    D = 128, int4 in groups of 32: W = 64 bytes = 32 view words; 2 chunks of 16; 4 parts (low and high
    nibble of the even and of the odd byte); 8 pieces; 4 scales, two pieces each.

How codes become numbers is the plan's ``Decode``, chosen by what the format says.
"""

from __future__ import annotations

import dataclasses
import enum
import functools

import torch

from kvcompile import schemes
from kvcompile.lowering.codegen.bit_tricks import find_trick, fused
from kvcompile.lowering.codegen.expressions import TRITON_TYPES, triton_expression
from kvcompile.types import KernelFormat, Role, SlotSpec

MIN_CHUNK = 16
"""The narrowest side of a dot along channels; shorter chunks are padded with masked columns."""


class Decode(enum.Enum):
    """Where scales, zero points and tables come in."""

    PLAIN = "the codes are the values, or are those times one number for each kv head"
    SCALED = "a token's scales multiply the results of its sub-dots, or its value elements"
    FOLDED = "keys: the scales of a block of tokens multiply the queries, its zero points add one number a block to the score"
    SHIFTED = "values: code * scale + zero point is one fused multiply-add in float16, two elements at a time"
    TABLED = "bytes are looked up in tables of pairs in shared memory; then as SCALED keys, or as SHIFTED values"
    ELEMENTS = "every element is decoded in float32 and rounded to the queries' dtype: whatever else a format says"


@dataclasses.dataclass(frozen=True)
class Chunk:
    """View words ``first`` .. ``first + count`` of a row, loaded as ``block`` columns."""

    name: str
    first: int
    count: int
    block: int

    @property
    def padded(self) -> bool:
        """Whether the block has columns beyond the run."""
        return self.count != self.block


@dataclasses.dataclass(frozen=True)
class Piece:
    """One part of a chunk: column j is channel ``first + step * j``; ``expression`` unpacks ``{word}``.

    value = unpacked * 2**power - offset, where the offset is not subtracted already.
    """

    name: str
    chunk: Chunk
    first: int
    step: int
    scale: int
    power: int
    expression: str
    offset: int = 0

    @property
    def channels(self) -> range:
        """The channels in the order of their columns."""
        return range(self.first, self.first + self.step * self.chunk.count, self.step)

    @property
    def block(self) -> int:
        """Columns of the piece's blocks, padding included."""
        return self.chunk.block

    def unpack(self, word: str, scale: str = "", zero: str = "") -> str:
        """The unpacked piece as a Triton expression on the chunk's block; packed SHIFTED pieces are scaled and shifted as well."""
        return self.expression.replace("{word}", word).replace("{scale}", scale).replace("{zero}", zero)


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """All that the template needs of one slot.

    ``normalize`` says that queries must be brought into float16's range first. ``offset`` is what unpacked
    SCALED keys are too large by: queries are known before the loop, so the kernel takes it out of the score, where it
    costs one addition a score instead of one an element. SCALED values are unpacked without an offset, since their
    sum over many tokens would lose the bits that the offset takes. ``lifted`` values are multiplied by their
    scale element by element, two to an instruction: cheaper than a weighted copy of the probabilities, each
    to be brought into operand layout, for every one of several scales a token.
    ``group``, ``token_block``, ``levels``, ``segments``, ``static``, ``norms``: as the format has them.
    """

    role: Role
    dim: int
    dtype: torch.dtype
    view: torch.dtype
    words_per_view: int
    decode: Decode
    normalize: bool
    scaled: bool
    zeros: bool
    scales: int
    power: int
    offset: int
    lifted: bool
    group: int
    token_block: int
    levels: int
    segments: int
    static: bool
    norms: bool
    chunks: tuple[Chunk, ...]
    pieces: tuple[Piece, ...]

    @property
    def dot_type(self) -> str:
        """Return the dtype that the tensor cores multiply, as Triton's name."""
        return TRITON_TYPES[self.dtype]

    @property
    def view_type(self) -> str:
        """The dtype of one loaded word, as Triton's name."""
        return TRITON_TYPES[self.view]

    @property
    def coded(self) -> bool:
        """Whether words are codes that scales belong to, which have to be unpacked."""
        return self.scaled or self.static

    @property
    def plain(self) -> bool:
        """Whether the codes are the values, or are those times one number for each kv head."""
        return self.decode is Decode.PLAIN

    @property
    def by_token(self) -> bool:
        """Whether a token's scales are applied to sub-dots or to lifted elements."""
        return self.decode is Decode.SCALED or (self.tabled and self.role is Role.KEY)

    @property
    def folded(self) -> bool:
        """Whether the queries take the scales."""
        return self.decode is Decode.FOLDED

    @property
    def shifted(self) -> bool:
        """Whether elements are decoded in float16, scale and zero point at once."""
        return self.decode is Decode.SHIFTED or (self.tabled and self.role is Role.VALUE)

    @property
    def tabled(self) -> bool:
        """Whether codes are looked up."""
        return self.decode is Decode.TABLED

    @property
    def elements(self) -> bool:
        """Whether elements are decoded in float32."""
        return self.decode is Decode.ELEMENTS

    @property
    def runs(self) -> tuple[Chunk, ...]:
        """The channels of a token that is not encoded, cut into blocks."""
        return tuple(_chunks([self.dim]))

    @property
    def row_words(self) -> int:
        """Stored words of one segment of a row."""
        return sum(chunk.count for chunk in self.chunks) * self.words_per_view

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Return the scales of TABLED codes for the two parts of every chunk: one table of pairs each."""
        return tuple(dict.fromkeys(self.pair_of(chunk) for chunk in self.chunks))

    def pair_of(self, chunk: Chunk) -> tuple[int, int]:
        """The scales of a chunk's first and second part."""
        first, second = (piece.scale for piece in self.pieces if piece.chunk == chunk and piece.first % 2 == 0)
        return first, second

    def of_scale(self, scale: int) -> tuple[Piece, ...]:
        """The pieces that share one scale."""
        return tuple(piece for piece in self.pieces if piece.scale == scale)

    def powers_of(self, scale: int) -> tuple[int, ...]:
        """The different powers of the pieces that share one scale."""
        return tuple(sorted({piece.power for piece in self.of_scale(scale)}))

    @property
    def spans(self) -> tuple[tuple[int, ...], ...]:
        """The different powers, largest first, in runs of at most two octaves: what one accumulator of FOLDED keys serves."""
        spans: list[list[int]] = []
        for power in sorted({piece.power for piece in self.pieces}, reverse=True):
            if not spans or spans[-1][0] - power > 2:
                spans.append([])
            spans[-1].append(power)
        return tuple(tuple(span) for span in spans)

    def lowered(self, piece: Piece) -> int:
        """The octaves that a FOLDED piece's queries are smaller by, so that its accumulator has one unit."""
        return next(span[0] for span in self.spans if piece.power in span) - piece.power

    def single_group(self, piece: Piece) -> bool:
        """Whether one scale covers all channels of a piece."""
        return len({channel // self.group for channel in piece.channels}) == 1


def dot_dtype(fmt: KernelFormat, query: torch.dtype) -> torch.dtype:
    """In which dtype codes are multiplied without losing a bit of them.

    float16 for codes whenever the query is a 16-bit float: all codes must be exact in it, which is checked
    here on every word. The kernel then brings bfloat16 queries into float16's range row by row.
    """
    if query == torch.float32:
        return query
    if not fmt.coded:
        return torch.promote_types(fmt.word_dtype, query)
    words = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt.word_dtype)
    for part in range(fmt.parts):
        values = fmt.unpack(words, part)
        values = values[values.isfinite()]
        if not torch.equal(values.to(torch.float16).to(torch.float32), values):
            return torch.float32
    return torch.float16


@functools.lru_cache(maxsize=256)
def slot_plan(
    scheme: str, role: Role, dim: int, word_dtype: torch.dtype, query: torch.dtype, wide: bool, packed: bool, generic: bool = False,
    tall: int = 16,
) -> SlotPlan:
    """The plan of one slot.

    ``wide`` says that bytes may be loaded in pairs (strides are even); ``packed`` that inline PTX may be used;
    ``generic`` that elements must be decoded one by one whatever the format allows. ``tall``: the tokens
    of a tile where they lie on the tall side, else 0: scales go into few queries, not into many, once a block of tokens.
    """
    fmt = schemes.parse(scheme).format(SlotSpec(1, dim, word_dtype, role))
    dtype = query if fmt.segments > 1 else dot_dtype(fmt, query)
    words = dim // fmt.parts
    decode = _decode(fmt, role, dim, dtype, wide and packed if fmt.levels else wide, generic, tall)
    if decode is Decode.ELEMENTS:
        return _elements(fmt, role, dim, query)
    grouped = decode in {Decode.SCALED, Decode.SHIFTED, Decode.TABLED}
    edges = _edges(fmt, words) if grouped else [words]
    pair = wide and fmt.coded and dtype == torch.float16 and all(edge % 2 == 0 for edge in edges)
    per = 2 if pair else 1
    chunks = _chunks([edge // per for edge in edges])
    pieces = []
    tricks = [find_trick(fmt, part, byte) for part in range(fmt.parts) for byte in range(per)]
    lifted = decode is Decode.SCALED and role is Role.VALUE and pair and fmt.group < dim and None not in tricks
    centered = role is Role.VALUE
    for chunk in chunks:
        for part in range(fmt.parts):
            for byte in range(per):
                first = part * words + chunk.first * per + byte
                name = f"{chunk.name}_{part * per + byte}"
                if decode is Decode.TABLED:
                    # Both parts of a byte are looked up at once, before. Values come out halved, as what they are multiplied by.
                    text = f"{{word}}_{part}_{byte}"
                    unpacked = fused(text, "{scale}", "{zero}") if centered else text, int(centered), 0
                elif decode is Decode.SHIFTED:
                    trick = find_trick(fmt, part, byte)
                    assert trick is not None
                    text = trick.packed_scaled("{word}", "{scale}", "{zero}") if packed else trick.triton("{word}", False)
                    unpacked = text, trick.power, 0
                else:
                    unpacked = _expression(fmt, part, byte, pair, packed, dtype, centered)
                scale = first // fmt.group if grouped and fmt.scaled else 0
                pieces.append(Piece(name, chunk, first, per, scale, unpacked[1], unpacked[0], unpacked[2]))
    offsets = {piece.offset for piece in pieces}
    assert len(offsets) == 1 or decode is Decode.SHIFTED, "parts of one scheme have different offsets"
    return SlotPlan(
        role, dim, dtype, torch.uint16 if pair else fmt.word_dtype, per, decode, fmt.coded and dtype == torch.float16,
        fmt.scaled, fmt.zeros, dim // fmt.group if fmt.scaled else 1, max(piece.power for piece in pieces), pieces[0].offset, lifted,
        fmt.group, fmt.block, fmt.levels, 1, fmt.static, fmt.norms, tuple(chunks), tuple(pieces),
    )


def _decode(fmt: KernelFormat, role: Role, dim: int, dtype: torch.dtype, wide: bool, generic: bool, tall: int) -> Decode:
    """The cheapest way that gives the format's values."""
    if not fmt.scaled and not fmt.levels:
        return Decode.ELEMENTS if generic else Decode.PLAIN
    if generic or fmt.segments > 1:
        return Decode.ELEMENTS
    if fmt.levels:
        return Decode.TABLED if _nibbles(fmt, dim, dtype, wide and tall > 0) else Decode.ELEMENTS
    if fmt.symmetric:
        return Decode.SCALED
    words = dim // fmt.parts
    pairs = tall > 0 and wide and dtype == torch.float16 and words % 2 == 0
    places = [(part, byte) for part in range(fmt.parts) for byte in range(2)]
    tricks = [find_trick(fmt, *place) for place in places]
    if not (pairs and fmt.zeros and all(trick is not None and trick.offset == 0 for trick in tricks)):
        return Decode.ELEMENTS
    if role is Role.KEY and fmt.group == 1 and fmt.block >= tall:
        return Decode.FOLDED
    if role is Role.VALUE and fmt.block == 1 and all(edge % 2 == 0 for edge in _edges(fmt, words)):
        return Decode.SHIFTED
    return Decode.ELEMENTS


def _nibbles(fmt: KernelFormat, dim: int, dtype: torch.dtype, wide: bool) -> bool:
    """Whether part i of a byte is its i-th nibble as a plain index into 16 levels, scales lying by token and group."""
    if not (wide and dtype == torch.float16 and fmt.levels == 16 and fmt.parts == 2 and fmt.scaled and fmt.zeros and fmt.block == 1):
        return False
    words = torch.arange(256, dtype=torch.int32)
    plain = all(torch.equal(fmt.unpack(words.to(fmt.word_dtype), part), ((words >> (4 * part)) & 15).float()) for part in range(2))
    return plain and all(edge % 2 == 0 for edge in _edges(fmt, dim // 2))


def _elements(fmt: KernelFormat, role: Role, dim: int, query: torch.dtype) -> SlotPlan:
    """The plan that serves every format: words of one code's dtype, printed expressions, no tricks."""
    words = dim // fmt.parts
    chunks = _chunks(_edges(fmt, words) if fmt.group >= MIN_CHUNK else [words])
    pieces = tuple(
        Piece(f"{chunk.name}_{part}", chunk, part * words + chunk.first, 1, 0, 0, triton_expression(fmt, part, "{word}"))
        for chunk in chunks for part in range(fmt.parts)
    )
    return SlotPlan(
        role, dim, query, fmt.word_dtype, 1, Decode.ELEMENTS, False, fmt.scaled, fmt.zeros, dim // fmt.group if fmt.scaled else 1, 0, 0,
        False, fmt.group, fmt.block, fmt.levels, fmt.segments, fmt.static, fmt.norms, tuple(chunks), pieces,
    )


def _edges(fmt: KernelFormat, words: int) -> list[int]:
    """Where chunks must end: at the row's end and wherever any part of a word enters another scale's group."""
    edges = {words}
    if fmt.scaled and fmt.group < words * fmt.parts:
        edges |= {w for w in range(1, words) for part in range(fmt.parts) if (part * words + w) % fmt.group == 0}
    return sorted(edges)


def _chunks(edges: list[int]) -> list[Chunk]:
    """Power-of-two runs between the edges, longest first; the last one of a run may be padded."""
    chunks: list[Chunk] = []
    start = 0
    for edge in edges:
        while start < edge:
            left = edge - start
            count = left if left <= MIN_CHUNK else 1 << (left.bit_length() - 1)
            block = max(MIN_CHUNK, 1 << (count - 1).bit_length())
            chunks.append(Chunk(f"c{len(chunks)}", start, count, block))
            start += count
    return chunks


def _expression(
    fmt: KernelFormat, part: int, byte: int, pair: bool, packed: bool, dtype: torch.dtype, centered: bool
) -> tuple[str, int, int]:
    """Text that unpacks ``{word}`` to ``dtype``, the power of two that it lacks, the offset that it has too much."""
    name = TRITON_TYPES[dtype]
    if not pair:
        text = triton_expression(fmt, part, "{word}")
        return (text if dtype == torch.float32 else f"{text}.to({name})"), 0, 0
    trick = find_trick(fmt, part, byte)
    if trick is not None:
        text = trick.packed("{word}", centered) if packed else trick.triton("{word}", centered)
        return text, trick.power, 0 if centered else trick.offset
    shifted = f"({{word}} >> {8 * byte})" if byte else "{word}"
    single = f"({shifted} & 255).to(tl.uint8)"
    if fmt.word_dtype != torch.uint8:
        single = f"{single}.to({TRITON_TYPES[fmt.word_dtype]}, bitcast=True)"
    return f"{triton_expression(fmt, part, single)}.to({name})", 0, 0
