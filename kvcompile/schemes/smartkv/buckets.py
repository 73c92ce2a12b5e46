"""Buckets: the stored tokens of one half (keys or values) of a layer, those of equal width together.

::

    entering   codes [N, B, K, page, D] uint8, scales [N, B, K, page, 1]   8 bits, the token at position first + i in row i
    first      int64 [1, 1, 1, 1, 1]                                       the position of the first entering token
    ends       int32 [1, B, 1, 1, widths]                                  where each batch row's tokens end in each bucket
    scales     [M, 1, K, 1, 1]                                             of all buckets, the narrowest first
    where      int32 [M, 1, 1, 1, 1]                                       positions, in the order of the scales
    codes      [M_w, 1, K, 1, D w / 8] uint8 for each width w              tokens of row 0 by position, of row 1, ...

Every plane is as long as it has tokens. A token is in one place: where its position stands in ``where``, or entering if that is not below
``first``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kvcompile.schemes.base import Planes
from kvcompile.schemes.smartkv import codes as coder
from kvcompile.types import PAGE, Extent, PlaneSpec, SlotSpec

ENTERING = 8
"""Bits of a channel of a token that has just come."""

CODES, SCALES, FIRST, ENDS, SETTLED_SCALES, WHERE, SETTLED = range(7)
"""The index of each plane in a layout; the codes of the buckets follow from the last one on."""


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
        *(PlaneSpec(f"codes{bits}", torch.uint8, slot.head_dim * bits // 8, 1, own, tally=True, pooled=True) for bits in widths),
    )


@dataclass(frozen=True)
class Buckets:
    """The planes of one half as the module says; ``widths`` are those of its buckets."""

    entering: coder.Coded
    first: torch.Tensor
    ends: torch.Tensor
    scales: torch.Tensor
    where: torch.Tensor
    codes: tuple[torch.Tensor, ...]
    widths: tuple[int, ...]

    @staticmethod
    def of(planes: Planes, widths: tuple[int, ...]) -> Buckets:
        """The record of a half's planes; those behind them are left alone."""
        codes = tuple(planes[SETTLED : SETTLED + len(widths)])
        return Buckets(
            (planes[CODES], planes[SCALES]), planes[FIRST], planes[ENDS], planes[SETTLED_SCALES], planes[WHERE], codes, widths,
        )

    @property
    def planes(self) -> Planes:
        """The planes in the order of the layout."""
        return (*self.entering, self.first, self.ends, self.scales, self.where, *self.codes)

    @property
    def rows(self) -> int:
        """Batch rows."""
        return self.ends.shape[1]

    @functools.cached_property
    def parts(self) -> tuple[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], ...]:
        """Each bucket as bits, codes [M, K, width], scales [M, K, 1], positions [M] and batch rows [M], both int64."""
        found, start = [], 0
        for number, (bits, words) in enumerate(zip(self.widths, self.codes, strict=True)):
            count = words.shape[0]
            at = slice(start, start + count)
            row = (torch.arange(count, device=words.device)[:, None] >= self.ends[0, :, 0, 0, number]).sum(1)
            found.append((bits, words[:, 0, :, 0], self.scales[at, 0, :, 0], self.where[at].flatten().to(torch.int64), row))
            start += count
        return tuple(found)

    def histogram(self, count: int, first: int) -> dict[int, int]:
        """How many of the first ``count`` tokens of all rows have how many bits; ``first`` is what the plane of that name holds."""
        found = {bits: int(words.shape[0]) for bits, words in zip(self.widths, self.codes, strict=True)}
        found[ENTERING] = found.get(ENTERING, 0) + self.rows * max(count - first, 0)
        return {bits: number for bits, number in sorted(found.items()) if number}


def values(half: Buckets, count: int, heads: slice = slice(None)) -> torch.Tensor:
    """The values at positions 0 to ``count`` - 1 of some heads, float32 [B, K, T, D]; zero where no token is. Waits for nothing."""
    entering = coder.decode((half.entering[0][:, :, heads], half.entering[1][:, :, heads]), ENTERING)
    entering = entering.permute(1, 0, 3, 2, 4).flatten(1, 2)
    rows, tokens, kv_heads, dim = entering.shape
    # Tokens behind the last one that was asked for go to one more place.
    out = entering.new_zeros(rows, count + 1, kv_heads, dim)
    at = (half.first.flatten() + torch.arange(tokens, device=out.device)).clamp(max=count)
    out.index_copy_(1, at, entering)
    flat = out.view(rows * (count + 1), kv_heads, dim)
    for bits, words, scales, position, row in half.parts:
        flat.index_copy_(0, row * (count + 1) + position.clamp(max=count), coder.decode((words[:, heads], scales[:, heads]), bits))
    return out[:, :count].transpose(1, 2)


def widths(half: Buckets, count: int) -> torch.Tensor:
    """Bits of the tokens at positions 0 to ``count`` - 1, int8 [B, T]."""
    found = torch.full((half.rows, count), ENTERING, dtype=torch.int8, device=half.ends.device)
    for bits, _, _, position, row in half.parts:
        found[row, position] = bits
    return found


def empty(half: Buckets, pages: int) -> coder.Coded:
    """Planes for ``pages`` pages of entering tokens."""
    made = [plane.new_zeros(pages, *plane.shape[1:]) for plane in half.entering]
    return made[0], made[1]


def with_room(half: Buckets, pages: int) -> Buckets:
    """Have ``pages`` pages for entering tokens."""
    codes, scales = half.entering
    return replace(half, entering=(grown(codes, pages), grown(scales, pages)))


def grown(plane: torch.Tensor, pages: int) -> torch.Tensor:
    """The plane with ``pages`` pages at least, new ones zero; itself where it has them."""
    held = plane.shape[0]
    return plane if pages <= held else torch.cat([plane, plane.new_zeros(pages - held, *plane.shape[1:])])


def settled(half: Buckets, widths_RT: torch.Tensor, first: int | None = None) -> Buckets:
    """All T tokens moved to the buckets that ``widths`` int8 [B, T] say, none of which may be wider than the token is. May wait.

    What becomes narrower is coded again from its codes; the rest is moved as it is. No token is left entering. ``first``: what the plane
    of that name holds, where the host knows.
    """
    rows, count = widths_RT.shape
    sources = list(_sources(half, count, int(half.first) if first is None else first))
    # For each token the number of its source, and where it lies there.
    origin = torch.zeros((2, rows, count), dtype=torch.int64, device=widths_RT.device)
    for number, (_, _, row, position) in enumerate(sources):
        origin[0, row, position] = number
        origin[1, row, position] = torch.arange(len(row), device=row.device)
    made: list[coder.Coded] = []
    where, ends = [], []
    for bits in half.widths:
        of_bits = widths_RT == bits
        row, position = of_bits.nonzero(as_tuple=True)
        number, index = origin[:, row, position]
        words, scales = _gathered(sources, number, index, bits, half.entering)
        made.append((words[:, None, :, None].contiguous(), scales[:, None, :, None].contiguous()))
        where.append(position)
        ends.append(of_bits.sum(1).cumsum(0))
    return Buckets(
        empty(half, 0), torch.full_like(half.first, count), torch.stack(ends, -1).to(torch.int32).view_as(half.ends),
        torch.cat([scales for _, scales in made]), torch.cat(where).to(torch.int32).view(-1, 1, 1, 1, 1),
        tuple(words for words, _ in made), half.widths,
    )


_Source = tuple[int, Callable[[torch.Tensor], coder.Coded], torch.Tensor, torch.Tensor]


def _sources(half: Buckets, count: int, first: int) -> Iterator[_Source]:
    """Places that tokens lie in: bits, a function from indices to codes, and the batch row and position of each index."""
    device, (words, scales) = half.ends.device, half.entering
    row, place = (part.flatten() for part in torch.meshgrid(
        torch.arange(half.rows, device=device), torch.arange(count - first, device=device), indexing="ij",
    ))

    def entering(index: torch.Tensor) -> coder.Coded:
        at = place[index] // PAGE, row[index], slice(None), place[index] % PAGE
        return words[at], scales[at]

    yield ENTERING, entering, row, place + first
    for bits, own, scale, position, of_row in half.parts:
        yield bits, functools.partial(_taken, own, scale), of_row, position


def _taken(words: torch.Tensor, scales: torch.Tensor, index: torch.Tensor) -> coder.Coded:
    return words[index], scales[index]


def _gathered(sources: list[_Source], number: torch.Tensor, index: torch.Tensor, bits: int, like: coder.Coded) -> coder.Coded:
    """Codes [M, K, .] and scales [M, K, 1] of ``bits`` of tokens by their source and place there; ``like``: the entering planes."""
    heads, dim = like[0].shape[2], like[0].shape[-1]
    words, scales = like[0].new_empty(len(index), heads, dim * bits // 8), like[1].new_empty(len(index), heads, 1)
    for source, (held, take, row, _) in enumerate(sources):
        if not len(row):
            continue
        chosen = (number == source).nonzero().flatten()
        if len(chosen):
            coded = take(index[chosen])
            words[chosen], scales[chosen] = coded if held == bits else coder.narrower(coded, held, bits)
    return words, scales


def cut(half: Buckets, count: int) -> Buckets:
    """The first ``count`` tokens; codes as they are. Waits for the device."""
    if count >= int(half.first):
        return half
    kept = [(position < count).nonzero().flatten() for _, _, _, position, _ in half.parts]
    chosen = _chosen(half, kept, [row[index] for index, (*_, row) in zip(kept, half.parts, strict=True)], half.rows)
    return replace(chosen, entering=empty(half, 0), first=torch.full_like(half.first, count))


def of_rows(half: Buckets, rows: torch.Tensor) -> Buckets:
    """The tokens of the given batch rows, in their order; codes as they are. Waits for the device."""
    picked, row_of = [], []
    for _, _, _, _, row in half.parts:
        each = [(row == wanted).nonzero().flatten() for wanted in rows.tolist()]
        picked.append(torch.cat(each))
        row_of.append(torch.repeat_interleave(torch.arange(len(each), device=row.device), torch.tensor(
            [len(index) for index in each], device=row.device,
        )))
    chosen = _chosen(half, picked, row_of, len(rows))
    words, scales = (plane.index_select(1, rows) for plane in half.entering)
    return replace(chosen, entering=(words, scales), first=half.first.clone())


def _chosen(half: Buckets, index: list[torch.Tensor], row: list[torch.Tensor], rows: int) -> Buckets:
    """Some tokens of each bucket, which belong to batch rows ``row`` of ``rows``, ascending."""
    parts = half.parts
    ends = torch.stack([torch.bincount(each, minlength=rows).cumsum(0) for each in row], -1).to(torch.int32)
    return replace(
        half, ends=ends.view(1, rows, 1, 1, -1),
        scales=torch.cat([scales[at] for at, (_, _, scales, _, _) in zip(index, parts, strict=True)])[:, None, :, None].contiguous(),
        where=torch.cat([position[at] for at, (*_, position, _) in zip(index, parts, strict=True)]).to(torch.int32).view(-1, 1, 1, 1, 1),
        codes=tuple(words[at][:, None, :, None].contiguous() for at, (_, words, *_) in zip(index, parts, strict=True)),
    )
