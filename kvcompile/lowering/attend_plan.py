"""Which sub-dots an encoded slot falls into: the scheme's side of the attend template, made of plain data.

A row of a plane is W stored words. The kernel loads it as VIEW words (pairs of bytes as uint16 where that
is possible, since 16-bit elements can be transposed on their way to the tensor cores and two of them
unpack in one register), cut into CHUNKS: power-of-two runs of view words that do not cross a scale's
group in any part. A PIECE is one part of a chunk: a matrix [tokens, chunk] whose channels are
``first + step * column`` and share one scale. So scales multiply sub-dot results, never elements.

    D = 128, int4 in groups of 32: W = 64 bytes = 32 view words; 2 chunks of 16; 4 parts (low and high
    nibble of the even and of the odd byte); 8 pieces; 4 scales, two pieces each.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from kvcompile import schemes
from kvcompile.lowering.bit_tricks import find_trick
from kvcompile.lowering.expressions import TRITON_TYPES, triton_expression
from kvcompile.types import KernelFormat, Role, SlotSpec

MIN_CHUNK = 16
"""The narrowest side of a dot along channels; shorter chunks are padded with masked columns."""


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

    value = unpacked * 2**power, less the slot's offset where that is not subtracted already.
    """

    name: str
    chunk: Chunk
    first: int
    step: int
    scale: int
    power: int
    expression: str

    @property
    def block(self) -> int:
        """Columns of the piece's blocks, padding included."""
        return self.chunk.block

    def unpack(self, word: str) -> str:
        """The unpacked piece as a Triton expression on the chunk's block."""
        return self.expression.replace("{word}", word)


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """All that the template needs of one slot.

    ``normalize`` says that queries must be brought into float16's range first. ``offset`` is what unpacked
    keys are too large by: queries are known before the loop, so the kernel takes it out of the score, where it
    costs one addition a score instead of one an element. Values are unpacked without an offset, since their
    sum over many tokens would lose the bits that the offset takes. ``lifted`` values are multiplied by their
    scale element by element, two to an instruction: cheaper than a weighted copy of the probabilities, each
    to be brought into operand layout, for every one of several scales a token.
    """

    dim: int
    dtype: torch.dtype
    view: torch.dtype
    words_per_view: int
    normalize: bool
    scaled: bool
    scales: int
    power: int
    offset: int
    lifted: bool
    chunks: tuple[Chunk, ...]
    pieces: tuple[Piece, ...]

    @property
    def dot_type(self) -> str:
        """What the tensor cores multiply, as Triton's name."""
        return TRITON_TYPES[self.dtype]

    @property
    def view_type(self) -> str:
        """The dtype of one loaded word, as Triton's name."""
        return TRITON_TYPES[self.view]

    def of_scale(self, scale: int) -> tuple[Piece, ...]:
        """The pieces that share one scale."""
        return tuple(piece for piece in self.pieces if piece.scale == scale)


def dot_dtype(fmt: KernelFormat, query: torch.dtype) -> torch.dtype:
    """In which dtype codes are multiplied without losing a bit of them.

    float16 for codes whenever the query is a 16-bit float: all codes must be exact in it, which is checked
    here on every word. The kernel then brings bfloat16 queries into float16's range row by row.
    """
    if query == torch.float32:
        return query
    if not fmt.scaled:
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
    scheme: str, role: Role, dim: int, word_dtype: torch.dtype, query: torch.dtype, wide: bool, packed: bool
) -> SlotPlan:
    """The plan of one slot.

    ``wide`` says that bytes may be loaded in pairs (strides are even); ``packed`` that inline PTX may be used.
    """
    fmt = schemes.parse(scheme).format(SlotSpec(1, dim, word_dtype, role))
    words = dim // fmt.parts
    dtype = dot_dtype(fmt, query)
    edges = _edges(fmt, words)
    pair = wide and fmt.scaled and dtype == torch.float16 and all(edge % 2 == 0 for edge in edges)
    per = 2 if pair else 1
    chunks = _chunks([edge // per for edge in edges])
    pieces, offsets = [], set()
    tricks = [find_trick(fmt, part, byte) for part in range(fmt.parts) for byte in range(per)]
    lifted = role is Role.VALUE and pair and fmt.group < dim and None not in tricks
    centered = role is Role.VALUE
    for chunk in chunks:
        for part in range(fmt.parts):
            for byte in range(per):
                first = part * words + chunk.first * per + byte
                expression, power, offset = _expression(fmt, part, byte, pair, packed, dtype, centered)
                offsets.add(offset)
                name = f"{chunk.name}_{part * per + byte}"
                pieces.append(Piece(name, chunk, first, per, first // fmt.group if fmt.scaled else 0, power, expression))
    assert len(offsets) == 1, "parts of one scheme have different offsets"
    return SlotPlan(
        dim, dtype, torch.uint16 if pair else fmt.word_dtype, per, fmt.scaled and dtype == torch.float16,
        fmt.scaled, dim // fmt.group if fmt.scaled else 1, max(piece.power for piece in pieces), offsets.pop(), lifted,
        tuple(chunks), tuple(pieces),
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
