"""Buckets: the stored tokens of one half (keys or values) of a layer, those of equal width together.

::

    entering   codes [N, B, K, page, D] uint8, scales [N, B, K, page, 1]   8 bits, the token at position first + i in row i
    first      int64 [1, 1, 1, 1, 1]                                       the position of the first entering token
    ends       int32 [1, B, 1, 1, widths]                                  where each batch row's tokens end in each bucket
    scales     [M, 1, K, 1, 1]                                             of all buckets, the narrowest first
    where      int32 [M, 1, 1, 1, 1]                                       positions, in the order of the scales
    pool       [P, 1, 1, 1, 16] uint8                                      codes of all buckets, the narrowest first

A bucket has the codes [n, K, D w / 8] of its n tokens, those of batch row 0 by position, then those of row 1; it begins at a whole row of
the pool. ``ends`` alone says how many tokens a bucket has, so tokens change buckets while planes stay where they are: the pool, ``scales``
and ``where`` may be longer than their tokens are. A token is in one place: where its position stands in ``where``, or entering if that is
not below ``first``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from kvcompile.schemes.base import Planes
from kvcompile.schemes.smartkv import codes as coder
from kvcompile.types import Extent, PlaneSpec, SlotSpec

ENTERING = 8
"""Bits of a channel of a token that has just come."""

CODES, SCALES, FIRST, ENDS, SETTLED_SCALES, WHERE, POOL, PLANES = range(8)
"""The index of each plane in a layout, and how many there are."""

ROW = 16
"""Bytes of a row of the pool."""


def plane_specs(slot: SlotSpec, widths: tuple[int, ...], scale_dtype: torch.dtype) -> tuple[PlaneSpec, ...]:
    """The planes of one half, in the order of ``Buckets``."""
    own = Extent.STORE
    return (
        PlaneSpec("codes", torch.uint8, slot.head_dim),
        PlaneSpec("scales", scale_dtype, 1),
        PlaneSpec("first", torch.int64, 1, 1, Extent.BATCH, tally=True, shared=True, first=True),
        PlaneSpec("ends", torch.int32, len(widths), 1, Extent.ROW, tally=True, shared=True),
        PlaneSpec("settled_scales", scale_dtype, 1, 1, own, tally=True, pooled=True),
        PlaneSpec("where", torch.int32, 1, 1, own, tally=True, shared=True, pooled=True),
        PlaneSpec("pool", torch.uint8, ROW, 1, own, tally=True, shared=True, pooled=True),
    )


PAGES_BEHIND = 16
"""Planes by position have room for a 16th more pages than they needed when they were made."""


@dataclass(frozen=True)
class Part:
    """A bucket: bits, codes [n, K, width], scales [n, K, 1], positions [n] and batch rows [n], both int64."""

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    position: torch.Tensor
    row: torch.Tensor


@dataclass(frozen=True)
class Buckets:
    """The planes of one half as the module says; ``widths`` are those of its buckets."""

    entering: coder.Coded
    first: torch.Tensor
    ends: torch.Tensor
    scales: torch.Tensor
    where: torch.Tensor
    pool: torch.Tensor
    widths: tuple[int, ...]

    @staticmethod
    def of(planes: Planes, widths: tuple[int, ...]) -> Buckets:
        """The record of a half's planes; those behind them are left alone."""
        codes, scales, first, ends, settled_scales, where, pool = planes[:PLANES]
        return Buckets((codes, scales), first, ends, settled_scales, where, pool, widths)

    @property
    def planes(self) -> Planes:
        """The planes in the order of the layout."""
        return (*self.entering, self.first, self.ends, self.scales, self.where, self.pool)

    @property
    def rows(self) -> int:
        """Batch rows."""
        return self.ends.shape[1]

    @property
    def heads(self) -> int:
        """Kv heads K."""
        return self.entering[0].shape[2]

    @property
    def head_dim(self) -> int:
        """Channels D."""
        return self.entering[0].shape[-1]

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each bucket. Waits for the device."""
        return tuple(self.ends[0, -1, 0, 0].tolist())

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """The buckets. Waits for the device."""
        found, token = [], 0
        flat = self.pool.flatten()
        starts = rows_of_pool(self.counts, self.widths, self.heads, self.head_dim)
        for number, (bits, count) in enumerate(zip(self.widths, self.counts, strict=True)):
            width, at = self.head_dim * bits // 8, slice(token, token + count)
            words = flat[starts[number] * ROW :][: count * self.heads * width].view(count, self.heads, width)
            row = (torch.arange(count, device=flat.device)[:, None] >= self.ends[0, :, 0, 0, number]).sum(1)
            found.append(Part(bits, words, self.scales[at, 0, :, 0], self.where[at].flatten().to(torch.int64), row))
            token += count
        return tuple(found)

    def histogram(self, count: int, first: int) -> dict[int, int]:
        """How many of the first ``count`` tokens of all rows have how many bits; ``first`` is what the plane of that name holds."""
        found = dict(zip(self.widths, self.counts, strict=True))
        found[ENTERING] = found.get(ENTERING, 0) + self.rows * max(count - first, 0)
        return {bits: number for bits, number in sorted(found.items()) if number}


def rows_of_pool(counts: tuple[int, ...], widths: tuple[int, ...], heads: int, head_dim: int) -> list[int]:
    """The first row of the pool of each bucket, and behind them how many rows there are."""
    found = [0]
    for bits, count in zip(widths, counts, strict=True):
        found.append(found[-1] + -(-count * heads * (head_dim * bits // 8) // ROW))
    return found


@dataclass(frozen=True)
class Room:
    """The lengths of planes: rows of the pool, and tokens of ``scales`` and ``where``."""

    rows: int
    tokens: int

    @staticmethod
    def of(counts: tuple[int, ...], like: Buckets) -> Room:
        """The room that some tokens of each bucket need."""
        return Room(rows_of_pool(counts, like.widths, like.heads, like.head_dim)[-1], sum(counts))


def values(half: Buckets, count: int, heads: slice = slice(None)) -> torch.Tensor:
    """The values at positions 0 to ``count`` - 1 of some heads, float32 [B, K, T, D]; zero where no token is. Waits for the device."""
    entering = coder.decode((half.entering[0][:, :, heads], half.entering[1][:, :, heads]), ENTERING)
    entering = entering.permute(1, 0, 3, 2, 4).flatten(1, 2)
    rows, tokens, kv_heads, dim = entering.shape
    # Tokens behind the last one that was asked for go to one more place.
    out = entering.new_zeros(rows, count + 1, kv_heads, dim)
    at = (half.first.flatten() + torch.arange(tokens, device=out.device)).clamp(max=count)
    out.index_copy_(1, at, entering)
    flat = out.view(rows * (count + 1), kv_heads, dim)
    for part in half.parts:
        coded = part.codes[:, heads], part.scales[:, heads]
        flat.index_copy_(0, part.row * (count + 1) + part.position.clamp(max=count), coder.decode(coded, part.bits))
    return out[:, :count].transpose(1, 2)


def widths(half: Buckets, count: int) -> torch.Tensor:
    """Bits of the tokens at positions 0 to ``count`` - 1, int8 [B, T]. Waits for the device."""
    found = torch.full((half.rows, count), ENTERING, dtype=torch.int8, device=half.ends.device)
    for part in half.parts:
        found[part.row, part.position] = part.bits
    return found


def empty(half: Buckets, pages: int) -> coder.Coded:
    """Planes for ``pages`` pages of entering tokens."""
    made = [plane.new_zeros(pages, *plane.shape[1:]) for plane in half.entering]
    return made[0], made[1]


def with_room(half: Buckets, pages: int) -> Buckets:
    """Have ``pages`` pages for entering tokens, or twice as many as there were if that is more: few steps change the planes."""
    codes, scales = half.entering
    if pages <= codes.shape[0]:
        return half
    pages = max(pages, 2 * codes.shape[0])
    return replace(half, entering=(grown(codes, pages), grown(scales, pages)))


def grown(plane: torch.Tensor, pages: int) -> torch.Tensor:
    """The plane with ``pages`` pages at least, new ones zero; itself where it has them."""
    held = plane.shape[0]
    return plane if pages <= held else torch.cat([plane, plane.new_zeros(pages - held, *plane.shape[1:])])


def pages_by_position(pages: int) -> int:
    """How many pages a plane that grows with all positions gets where it needs so many: a little more, so that few steps change it."""
    return pages + pages // PAGES_BEHIND


def made(half: Buckets, ends: torch.Tensor, first: torch.Tensor, room: Room) -> Buckets:
    """Buckets with room for some tokens, none of them written, and no entering token; ``ends`` [B, widths]."""
    return replace(
        half, entering=empty(half, 0), first=first, ends=ends.to(torch.int32).view(1, ends.shape[0], 1, 1, -1),
        scales=half.scales.new_zeros(room.tokens, *half.scales.shape[1:]), where=half.where.new_zeros(room.tokens, *half.where.shape[1:]),
        pool=half.pool.new_zeros(room.rows, *half.pool.shape[1:]),
    )


def cut(half: Buckets, count: int) -> Buckets:
    """The first ``count`` tokens; codes as they are. Waits for the device."""
    if count >= int(half.first):
        return half
    kept = [(part.position < count).nonzero().flatten() for part in half.parts]
    row_of = [part.row[index] for index, part in zip(kept, half.parts, strict=True)]
    return _chosen(half, kept, row_of, half.rows, torch.full_like(half.first, count))


def of_rows(half: Buckets, rows: torch.Tensor) -> Buckets:
    """The tokens of the given batch rows, in their order; codes as they are. Waits for the device."""
    picked, row_of = [], []
    for part in half.parts:
        each = [(part.row == wanted).nonzero().flatten() for wanted in rows.tolist()]
        picked.append(torch.cat(each))
        row_of.append(torch.repeat_interleave(torch.arange(len(each), device=part.row.device), torch.tensor(
            [len(index) for index in each], device=part.row.device,
        )))
    words, scales = (plane.index_select(1, rows) for plane in half.entering)
    return replace(_chosen(half, picked, row_of, len(rows), half.first.clone()), entering=(words, scales))


def _chosen(half: Buckets, index: list[torch.Tensor], row: list[torch.Tensor], rows: int, first: torch.Tensor) -> Buckets:
    """Some tokens of each bucket, which belong to batch rows ``row`` of ``rows``, ascending."""
    ends = torch.stack([torch.bincount(each, minlength=rows).cumsum(0) for each in row], -1)
    chosen = made(half, ends, first, Room.of(tuple(len(each) for each in index), half))
    chosen.where.flatten().copy_(torch.cat([part.position[at] for at, part in zip(index, half.parts, strict=True)]))
    for at, old, new in zip(index, half.parts, chosen.parts, strict=True):
        new.codes.copy_(old.codes[at])
        new.scales.copy_(old.scales[at])
    return chosen
