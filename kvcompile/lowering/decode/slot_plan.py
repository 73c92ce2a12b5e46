"""The plan of an encoded slot's sub-dots: the scheme's side of the attend template, as plain data.

A row of a plane is W stored words. The kernel loads it as VIEW words (pairs of bytes as uint16 if
possible, since 16-bit elements can be transposed on their way to the tensor cores and two of them
unpack in one register), cut into CHUNKS: power-of-two runs of view words that do not cross a scale's
group in any part. A PIECE is one part of a chunk: a matrix [tokens, chunk] whose channels are
``first + step * column`` and share one scale. So scales multiply sub-dot results, never elements.

    D = 128, int4 in groups of 32: W = 64 bytes = 32 view words; 2 chunks of 16; 4 parts (low and high
    nibble of the even and of the odd byte); 8 pieces; 4 scales, two pieces each.

The plan's ``Decode``, chosen by the format, is the way in which codes become numbers.
"""

from __future__ import annotations

import dataclasses
import enum
import functools

import torch

from kvcompile import schemes
from kvcompile.lowering.codegen.bit_tricks import find_trick, multiplied
from kvcompile.lowering.codegen.expressions import TRITON_TYPES, triton_expression
from kvcompile.lowering.codegen.prmt_key_lookup import RUN, Codes, picked_word
from kvcompile.types import KernelFormat, Role, SlotSpec

INDEX_BITS = (2, 3, 4, 5)
"""Bits of table indices for which PICKED and PAIRED exist."""

MIN_CHUNK = 16
"""Least size of a dot along channels; shorter chunks are padded with masked columns."""


class Decode(enum.Enum):
    """Ways to apply scales, zero points and tables."""

    PLAIN = "the codes are the values, or are those times one number for each kv head"
    SCALED = "a token's scales multiply the results of its sub-dots, or its value elements"
    FOLDED = "keys: the scales of a block of tokens multiply the queries, its zero points add one number a block to the score"
    SHIFTED = "values: code * scale + zero point is one fused multiply-add in float16, two elements at a time"
    PICKED = "keys: levels as integers, picked in registers by the codes; integer products with queries in two parts, which scales multiply"
    PAIRED = "values: codes of two tokens are looked up in a table of pairs in shared memory and scaled; zero points have their own dot"
    ELEMENTS = "every element is decoded in float32 and rounded to the queries' dtype: whatever else a format says"


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A run of a row's words: words ``first`` to ``first + count`` - 1, in the dtype ``view_type``, loaded as ``block`` columns."""

    name: str
    first: int
    count: int
    block: int

    @property
    def padded(self) -> bool:
        """Whether the chunk's block has more columns than the chunk has words, so that some columns are masked."""
        return self.count != self.block


@dataclasses.dataclass(frozen=True)
class Piece:
    """One part of a chunk: column j is channel ``first + step * j``; ``expression`` unpacks ``{word}``.

    value = unpacked * 2**power - offset, unless the expression subtracts the offset. ``sides``: locations of the codes of PICKED keys,
    otherwise None.
    """

    name: str
    chunk: Chunk
    first: int
    step: int
    scale: int
    power: int
    expression: str
    offset: int = 0
    sides: tuple[Codes, Codes] | None = None

    @property
    def channels(self) -> range:
        """The channels that this piece unpacks, in the order of the words that hold their codes."""
        return range(self.first, self.first + self.step * self.chunk.count, self.step)

    def word(self, column: str) -> str:
        """Return the chunk's word of a column, as a Triton expression."""
        return picked_word(column) if self.sides else column

    def channel(self, column: str) -> str:
        """Return the channel of a column, as a Triton expression."""
        return f"({self.first} + {self.step} * {self.word(column)})"

    @property
    def block(self) -> int:
        """Number of columns of the piece's blocks, padding included."""
        return self.chunk.block

    def unpack(self, word: str, scale: str = "", zero: str = "") -> str:
        """Return the unpacked piece as a Triton expression on the block ``word``; packed SHIFTED pieces are scaled and shifted as well.

        ``scale``, ``zero``: Triton expressions for these.
        """
        return self.expression.replace("{word}", word).replace("{scale}", scale).replace("{zero}", zero)


@dataclasses.dataclass(frozen=True)
class TemplateSlot:
    """All facts of one slot that the template uses.

    ``normalize``: whether queries must be scaled into float16's range first. ``offset``: by how much unpacked SCALED keys exceed the codes;
    queries are known before the loop, so the kernel subtracts it from the score, which costs one addition a score instead of one an
    element. SCALED values are unpacked without an offset, since their sum over many tokens would lose the bits that the offset takes.
    ``lifted``: whether values are multiplied by their scale element by element, two to an instruction: cheaper than one weighted copy of
    the probabilities, each converted to operand layout, for each of several scales a token. ``group``, ``token_block``, ``levels``,
    ``segments``, ``static``, ``norms``: as in the scheme's format.
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
    row_words: int

    @property
    def dot_type(self) -> str:
        """Dtype that the tensor cores multiply, as Triton's name."""
        return TRITON_TYPES[self.dtype]

    @property
    def view_type(self) -> str:
        """Dtype of one loaded word, as Triton's name."""
        return TRITON_TYPES[self.view]

    @property
    def coded(self) -> bool:
        """Whether words are codes with scales and must be unpacked."""
        return self.scaled or self.static

    @property
    def plain(self) -> bool:
        """Whether the codes are the values, possibly times one scale per kv head."""
        return self.decode is Decode.PLAIN

    @property
    def by_token(self) -> bool:
        """Whether a token's scales multiply the results of its sub-dots or its value elements (SCALED)."""
        return self.decode is Decode.SCALED

    def clear(self, lo: int, bias: int) -> bool:
        """Return whether a kernel with this slot as its values has a separate loop, without masks, for tiles that are wholly visible.

        ``lo``, ``bias``: the kernel's mask of first visible positions, and its kind of bias. False with token scales, whose loads gain from
        the layout that masks bring, and for PLAIN codes, whose loads the hardware masks.
        """
        return not (lo or bias or self.by_token or self.plain)

    @property
    def folded(self) -> bool:
        """Whether the scales of a block of tokens multiply the queries instead of the keys (FOLDED)."""
        return self.decode is Decode.FOLDED

    @property
    def shifted(self) -> bool:
        """Whether value elements are decoded in float16, by one multiply-add of scale and zero point (SHIFTED)."""
        return self.decode is Decode.SHIFTED

    @property
    def picked(self) -> bool:
        """Whether keys' levels are picked by codes from registers, as integers (PICKED)."""
        return self.decode is Decode.PICKED

    @property
    def paired(self) -> bool:
        """Whether codes of two tokens' values are looked up at once in a table in shared memory (PAIRED)."""
        return self.decode is Decode.PAIRED

    @property
    def bits(self) -> int:
        """Number of bits of a table index."""
        return (self.levels - 1).bit_length()

    @property
    def elements(self) -> bool:
        """Whether every element is decoded in float32 and rounded to the queries' dtype (ELEMENTS)."""
        return self.decode is Decode.ELEMENTS

    @property
    def runs(self) -> tuple[Chunk, ...]:
        """Channels of a full-precision token, cut into blocks."""
        return tuple(_chunks([self.dim]))

    @property
    def byte_runs(self) -> tuple[Chunk, ...]:
        """Bytes of a row, cut into the runs that PICKED keys load."""
        if self.segments == 1:
            return self.chunks
        whole, rest = divmod(self.row_words * self.segments, RUN)
        return tuple(Chunk(f"r{at}", at * RUN, RUN if at < whole else rest, RUN) for at in range(whole + bool(rest)))

    def place(self, channel: str) -> tuple[str, str]:
        """Return (piece, word index before ``picked_word``'s reordering) of a channel of PICKED keys, as Triton expressions."""
        part, word, count = f"({channel} // {self.row_words})", f"({channel} % {self.row_words})", self.pieces[0].chunk.count
        if self.row_words < RUN and self.segments > 1:
            return f"({channel} // {RUN})", f"({channel} % {RUN})"
        return f"({word} // {count} * {len(self.pieces) // len(self.chunks)} + {part})", f"({word} % {count})"

    def of_scale(self, scale: int) -> tuple[Piece, ...]:
        """Return the pieces that share one scale."""
        return tuple(piece for piece in self.pieces if piece.scale == scale)

    def powers_of(self, scale: int) -> tuple[int, ...]:
        """Return, in rising order, the distinct powers of two by which the pieces of one scale must be multiplied after unpacking."""
        return tuple(sorted({piece.power for piece in self.of_scale(scale)}))

    @property
    def spans(self) -> tuple[tuple[int, ...], ...]:
        """The distinct powers of two of the pieces, largest first, grouped so that a group spans at most two octaves.

        The pieces of a group share one accumulator (FOLDED keys).
        """
        spans: list[list[int]] = []
        for power in sorted({piece.power for piece in self.pieces}, reverse=True):
            if not spans or spans[-1][0] - power > 2:
                spans.append([])
            spans[-1].append(power)
        return tuple(tuple(span) for span in spans)

    def lowered(self, piece: Piece) -> int:
        """Return by how many octaves the queries of a FOLDED piece are scaled down, so that its accumulator's products share one unit."""
        return next(span[0] for span in self.spans if piece.power in span) - piece.power

    def single_group(self, piece: Piece) -> bool:
        """Return whether one scale covers all channels of a piece."""
        return len({channel // self.group for channel in piece.channels}) == 1


def dot_dtype(fmt: KernelFormat, query: torch.dtype) -> torch.dtype:
    """Return the dtype in which codes are multiplied without losing bits.

    float16 for codes if the query is a 16-bit float and all codes are exact in float16, which is checked
    here on every word. The kernel then scales bfloat16 queries into float16's range row by row.
    """
    if query == torch.float32:
        return query
    if not fmt.coded:
        return torch.promote_types(fmt.word_dtype, query)
    if fmt.segments > 1:
        # Words of several bytes hold integers of at most eight bits.
        return torch.float16
    words = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8).view(fmt.word_dtype)
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
) -> TemplateSlot:
    """Return how the decode template reads one slot: words and their dtypes, ways to unpack them and to apply scales.

    ``dim``: channels; ``word_dtype``: dtype of the plane of words; ``query``: dtype of the queries. ``wide``: bytes may be loaded in pairs
    (strides are even); ``packed``: inline PTX may be used; ``generic``: elements must be decoded one by one for any format. ``tall``: the
    tokens of a tile if tokens are the tall side, otherwise 0: scales are folded into few queries once a block of tokens, not into many.
    """
    fmt = schemes.parse(scheme).format(SlotSpec(1, dim, word_dtype, role))
    dtype = dot_dtype(fmt, query)
    words = dim // fmt.parts
    decode = _decode(fmt, role, dim, dtype, wide, generic, tall)
    if decode is Decode.ELEMENTS:
        return _elements(fmt, role, dim, query)
    if decode is Decode.PICKED:
        return _picked(fmt, dim)
    grouped = decode in {Decode.SCALED, Decode.SHIFTED, Decode.PAIRED}
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
                if decode is Decode.PAIRED:
                    # Looked up before, halved: the power of two makes up for it.
                    text = f"{{word}}_{part}_{byte}"
                    unpacked = multiplied(text, "{scale}") if packed else text, 1, 0
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
    return TemplateSlot(
        role, dim, dtype, torch.uint16 if pair else fmt.word_dtype, per, decode, fmt.coded and dtype == torch.float16,
        fmt.scaled, fmt.zeros, dim // fmt.group if fmt.scaled else 1, max(piece.power for piece in pieces), pieces[0].offset, lifted,
        fmt.group, fmt.block, fmt.levels, fmt.segments, fmt.static, fmt.norms, tuple(chunks), tuple(pieces), words,
    )


def _decode(fmt: KernelFormat, role: Role, dim: int, dtype: torch.dtype, wide: bool, generic: bool, tall: int) -> Decode:
    """Return the cheapest ``Decode`` that decodes the format exactly under the given limits; the arguments are as in ``slot_plan``.

    ``dtype``: the dtype that the tensor cores multiply.
    """
    if not fmt.scaled and not fmt.levels:
        return Decode.ELEMENTS if generic else Decode.PLAIN
    if generic or (fmt.segments > 1 and not fmt.levels):
        return Decode.ELEMENTS
    words = dim // fmt.parts
    if fmt.levels:
        edges = _edges(fmt, words)
        if not (tall > 0 and dtype == torch.float16 and _indices(fmt)) or min(_runs(edges)) < MIN_CHUNK:
            return Decode.ELEMENTS
        if role is Role.KEY:
            # All pieces must have one shape: 32 channels of one scale.
            alike = len(set(_runs(edges))) == 1 if fmt.segments == 1 else words == MIN_CHUNK or words % RUN == 0
            return Decode.PICKED if alike else Decode.ELEMENTS
        return Decode.PAIRED if wide and all(edge % 2 == 0 for edge in edges) else Decode.ELEMENTS
    if fmt.symmetric:
        return Decode.SCALED
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


def _indices(fmt: KernelFormat) -> bool:
    """Return whether part i of a word is exactly its i-th bit field, of a supported width, with scales by token and group."""
    bits = (fmt.levels - 1).bit_length()
    if bits not in INDEX_BITS or fmt.levels != 1 << bits or fmt.parts * bits != 8 * fmt.segments:
        return False
    if not fmt.scaled or fmt.block > 1 or fmt.norms:
        return False
    words = torch.randint(0, 1 << (8 * fmt.segments), (4096,), generator=torch.Generator().manual_seed(0), device="cpu")
    given = words.to(fmt.whole_dtype if fmt.segments > 1 else fmt.word_dtype)
    fields = ((words >> (bits * part)) & (fmt.levels - 1) for part in range(fmt.parts))
    return all(torch.equal(fmt.unpack(given, part), field.float()) for part, field in enumerate(fields))


def _runs(edges: list[int]) -> list[int]:
    """Return the differences of consecutive edges, the first from 0."""
    return [edge - start for start, edge in zip([0, *edges], edges, strict=False)]


def _picked(fmt: KernelFormat, dim: int) -> TemplateSlot:
    """Return the plan of PICKED keys: runs of a row's bytes; pieces of 32 channels, with columns of integers in ``picked_word``'s order.

    Two sides of a piece are words 0 .. 15 and 16 .. 31 of a chunk or, if a row has at most 16 words, two parts of them.
    """
    words = dim // fmt.parts
    narrow = fmt.segments > 1 and words < RUN
    chunks = [Chunk("c0", 0, RUN, RUN)] if narrow else _chunks(_edges(fmt, words), RUN, RUN)
    pieces = []
    for chunk in chunks:
        for part in range(0, fmt.parts, 2 if narrow else 1):
            # For byte ``segment`` of each side's words: its run of the row, and the half of that run.
            starts = [(segment * words + chunk.first) // MIN_CHUNK for segment in range(fmt.segments)]
            if narrow:
                sides = [Codes(part + side, tuple((start // 2, start % 2) for start in starts)) for side in range(2)]
            elif fmt.segments == 1:
                sides = [Codes(part, ((chunks.index(chunk), side),)) for side in range(2)]
            else:
                sides = [Codes(part, tuple((start // 2, side) for start in starts)) for side in range(2)]
            first = part * words + chunk.first
            pieces.append(Piece(f"{chunk.name}_{part}", chunk, first, 1, first // fmt.group, 0, "", sides=(sides[0], sides[1])))
    return TemplateSlot(
        Role.KEY, dim, torch.float16, fmt.word_dtype, 1, Decode.PICKED, True, True, fmt.zeros, dim // fmt.group, 0, 0, False, fmt.group,
        1, fmt.levels, fmt.segments, False, False, tuple(chunks), tuple(pieces), words,
    )


def _elements(fmt: KernelFormat, role: Role, dim: int, query: torch.dtype) -> TemplateSlot:
    """Return the ELEMENTS plan, which every format has: words loaded as stored, not in pairs, and unpacked by the printed ``unpack``.

    Raises UnprintableUnpack for a scheme whose ``unpack`` cannot be printed.
    """
    words = dim // fmt.parts
    chunks = _chunks(_edges(fmt, words) if fmt.group >= MIN_CHUNK else [words])
    pieces = tuple(
        Piece(f"{chunk.name}_{part}", chunk, part * words + chunk.first, 1, 0, 0, triton_expression(fmt, part, "{word}"))
        for chunk in chunks for part in range(fmt.parts)
    )
    return TemplateSlot(
        role, dim, query, fmt.word_dtype, 1, Decode.ELEMENTS, False, fmt.scaled, fmt.zeros, dim // fmt.group if fmt.scaled else 1, 0, 0,
        False, fmt.group, fmt.block, fmt.levels, fmt.segments, fmt.static, fmt.norms, tuple(chunks), pieces, words,
    )


def _edges(fmt: KernelFormat, words: int) -> list[int]:
    """Return the ends of chunks: the row's end, and each word at which any part enters another scale's group."""
    edges = {words}
    if fmt.scaled and fmt.group < words * fmt.parts:
        edges |= {w for w in range(1, words) for part in range(fmt.parts) if (part * words + w) % fmt.group == 0}
    return sorted(edges)


def _chunks(edges: list[int], least: int = MIN_CHUNK, most: int = 1 << 30) -> list[Chunk]:
    """Return power-of-two runs between the edges, longest first, none longer than ``most``; the last one before an edge may be padded."""
    chunks: list[Chunk] = []
    start = 0
    for edge in edges:
        while start < edge:
            left = edge - start
            count = min(most, left if left <= least else 1 << (left.bit_length() - 1))
            block = max(least, 1 << (count - 1).bit_length())
            chunks.append(Chunk(f"c{len(chunks)}", start, count, block))
            start += count
    return chunks


def _expression(
    fmt: KernelFormat, part: int, byte: int, pair: bool, packed: bool, dtype: torch.dtype, centered: bool
) -> tuple[str, int, int]:
    """Return (Triton text that unpacks ``{word}`` to ``dtype``, the power of two to multiply it by, the offset to subtract).

    ``part``, ``byte``: the part of a word to unpack, and its byte if ``pair``, two bytes loaded as one word. ``packed``: by inline PTX.
    ``centered``: the text subtracts the offset itself. Raises UnprintableUnpack.
    """
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
