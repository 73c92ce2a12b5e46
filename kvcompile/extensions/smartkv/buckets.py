"""Buckets: the stored tokens of a layer's keys or values. A bucket holds the tokens of one batch row and one level (``ladder``).

::

    entering   codes [N, B, K, page, D] uint8, scales [N, B, K, page, 1]   8 bits, the token at position first + i in row i
    first      int64 [1, 1, 1, 1, 1]                                       the position of the first entering token
    ends       int32 [1, B, 1, 1, 2 * levels]                              the index where each bucket ends, its first row of the pool
    scales     [M, 1, K, 1, 1]                                             of all buckets
    where      int32 [M, 1, 1, 1, 1]                                       the position of the token at each index
    pool       [P, 1, 1, 1, 16] uint8                                      codes of all buckets
    mean       bfloat16 [1, B, K, 1, D], keys in a frame of their own      the vector that is added to narrow keys

With tier 2 there are two more planes, ``entered`` after the entering scales and ``originals`` after the mean (``originals``).

A settled token is one that is in a bucket. Indices number the settled tokens: those of batch row 0, from the lowest level up, each level by
position; then row 1. Keys and values have the same indices. A bucket of n tokens from index p on has its scales [K, n] at K p. Its codes
begin at a whole row of the pool, head by head: [K, n, bytes] for each separately stored part of its width (``codes.parts_of``). So the
tokens of one head in a bucket are contiguous.

Only ``ends`` holds the buckets' lengths, so tokens change buckets while planes stay in place: the pool, ``scales`` and ``where`` may be
longer than their tokens need. Each token is stored once: at the index whose ``where`` is its position, or among the entering tokens if its
position is ``first`` or later.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvcompile.extensions.smartkv import codes as coder
from kvcompile.extensions.smartkv.codes import ENTERING, Frame
from kvcompile.schemes.adaptive import on_device
from kvcompile.schemes.base import Planes
from kvcompile.types import PAGE, Extent, PlaneSpec, SlotSpec

CODES, SCALES, FIRST, ENDS, SETTLED_SCALES, WHERE, POOL, MEAN = range(8)
"""The index of each plane in a layout without tier 2; only keys in a frame of their own have the last."""

ROW = 16
"""Bytes of a row of the pool."""

MEAN_DTYPE = torch.bfloat16
"""Any precision works, since all readers add the same rounded mean; bfloat16 has float32's range."""


@dataclass(frozen=True)
class BucketFormat:
    """The encoding of a slot's tokens: the bits of each level (``widths``), and the frame of codes narrower than 8 bits.

    ``keys``: whether the slot holds keys. ``kept``: whether full-precision copies are kept (tier 2).
    """

    widths: tuple[int, ...]
    frame: Frame = Frame.TURNED
    keys: bool = False
    kept: bool = False

    @property
    def turned(self) -> bool:
        """Whether codes narrower than 8 bits are made from rotated keys minus the keys' mean."""
        return self.keys and self.frame is Frame.TURNED

    @property
    def read(self) -> int:
        """The number of planes that attention reads: all but ``originals``, which comes last."""
        return MEAN + self.turned + self.kept


ENTERED, ORIGINALS = "entered", "originals"
"""Names of the planes of tier 2: full-precision copies of entering tokens, and of settled ones."""


def entered_spec(slot: SlotSpec) -> PlaneSpec:
    """Return the spec of the plane ``entered``: full-precision copies of a slot's entering tokens."""
    return PlaneSpec(ENTERED, slot.dtype, slot.head_dim, originals=True)


def originals_spec(slot: SlotSpec, host: bool) -> PlaneSpec:
    """Return the spec of the plane ``originals``: full-precision copies of a slot's settled tokens; ``host``: in pinned host memory."""
    return PlaneSpec(ORIGINALS, slot.dtype, slot.head_dim, PAGE, Extent.STORE, host=host, tally=True, originals=True)


def plane_specs(slot: SlotSpec, form: BucketFormat, scale_dtype: torch.dtype, host: bool = False) -> tuple[PlaneSpec, ...]:
    """Return the specs of one slot's planes, in the order of ``Buckets``; ``host``: keep copies of settled tokens in pinned host memory."""
    own = Extent.STORE
    mean = (PlaneSpec("mean", MEAN_DTYPE, slot.head_dim, 1, Extent.ROW, tally=True),) if form.turned else ()
    return (
        PlaneSpec("codes", torch.uint8, slot.head_dim),
        PlaneSpec("scales", scale_dtype, 1),
        *((entered_spec(slot),) if form.kept else ()),
        PlaneSpec("first", torch.int64, 1, 1, Extent.BATCH, tally=True, shared=True, first=True),
        PlaneSpec("ends", torch.int32, 2 * len(form.widths), 1, Extent.ROW, tally=True, shared=True),
        PlaneSpec("settled_scales", scale_dtype, 1, 1, own, tally=True, pooled=True),
        PlaneSpec("where", torch.int32, 1, 1, own, tally=True, shared=True, pooled=True),
        PlaneSpec("pool", torch.uint8, ROW, 1, own, tally=True, shared=True, pooled=True),
        *mean,
        *((originals_spec(slot, host),) if form.kept else ()),
    )


PAGES_BEHIND = 16
"""Planes by position are made with room for 1/16 more pages than they need."""


@dataclass(frozen=True)
class Bucket:
    """The tokens of one batch row and one level, as views of the slot's planes.

    ``codes``: [K, n, bytes], one tensor for each part of ``codes.parts_of``; ``scales``: [K, n]; ``where``: their positions, int32 [n].
    """

    level: int
    bits: int
    row: int
    codes: tuple[torch.Tensor, ...]
    scales: torch.Tensor
    where: torch.Tensor

    @property
    def position(self) -> torch.Tensor:
        """Positions of the tokens, int64 [n]."""
        return self.where.to(torch.int64)

    def coded(self, heads: slice = slice(None), index: torch.Tensor | slice = slice(None)) -> coder.Coded:
        """Return the codes [K, n, bytes] and scales [K, n, 1] of the kv heads ``heads``, at the indices ``index`` within the bucket."""
        return torch.cat([each[heads][:, index] for each in self.codes], -1), self.scales[heads][:, index].unsqueeze(-1)

    def put(self, at: torch.Tensor, coded: coder.Coded, position: torch.Tensor) -> None:
        """Write tokens' codes and scales [K, n, ...] and positions [n] into the bucket, at its indices ``at``."""
        words, scales = coded
        for own, new in zip(self.codes, words.split([each.shape[-1] for each in self.codes], -1), strict=True):
            own[:, at] = new
        self.scales[:, at] = scales.squeeze(-1)
        self.where[at] = position.to(torch.int32)


@dataclass(frozen=True)
class Buckets:
    """The planes of one slot, as the module's text lists them.

    ``mean`` is None unless narrow codes are rotated; ``entered`` and ``originals`` are None without tier 2. ``originals`` is also None in
    attention, which is not given that plane.
    """

    entering: coder.Coded
    first: torch.Tensor
    ends: torch.Tensor
    scales: torch.Tensor
    where: torch.Tensor
    pool: torch.Tensor
    mean: torch.Tensor | None
    form: BucketFormat
    entered: torch.Tensor | None = None
    originals: torch.Tensor | None = None

    @staticmethod
    def of(planes: Planes, form: BucketFormat) -> Buckets:
        """Return a slot's leading planes as a record; planes beyond those of ``form`` are ignored."""
        read = form.read
        mean, kept = planes[read - 1] if form.turned else None, planes[read] if form.kept and len(planes) > read else None
        entered = planes[FIRST] if form.kept else None
        codes, scales, first, ends, settled_scales, where, pool = (*planes[:FIRST], *planes[FIRST + form.kept : MEAN + form.kept])
        return Buckets((codes, scales), first, ends, settled_scales, where, pool, mean, form, entered, kept)

    @property
    def widths(self) -> tuple[int, ...]:
        """The bits of a code at each level, lowest level first."""
        return self.form.widths

    @property
    def planes(self) -> Planes:
        """The planes that are not None, in the order of the layout."""
        own = (*self.growing, self.first, self.ends, self.scales, self.where, self.pool)
        return (*own, *(plane for plane in (self.mean, self.originals) if plane is not None))

    @property
    def growing(self) -> Planes:
        """The planes of entering tokens: codes, scales, and with tier 2 ``entered``."""
        return self.entering if self.entered is None else (*self.entering, self.entered)

    def entered_as(self, growing: Planes) -> Buckets:
        """Return a copy of the record with the planes of entering tokens replaced by ``growing``."""
        codes, scales, *kept = growing
        return replace(self, entering=(codes, scales), entered=kept[0] if kept else None)

    @property
    def rows(self) -> int:
        """Number of batch rows."""
        return self.ends.shape[1]

    @property
    def heads(self) -> int:
        """Number of kv heads, K."""
        return self.entering[0].shape[2]

    @property
    def head_dim(self) -> int:
        """Number of channels per head, D."""
        return self.entering[0].shape[-1]

    @functools.cached_property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """The number of settled tokens by batch row and level, counts[row][level]. Waits for the device."""
        ends = self.ends[0, :, 0, 0, : len(self.widths)].flatten().tolist()
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return tuple(tuple(sizes[at : at + len(self.widths)]) for at in range(0, len(sizes), len(self.widths)))

    @functools.cached_property
    def parts(self) -> tuple[Bucket, ...]:
        """The buckets as views of the planes: all levels of batch row 0, then of row 1. Waits for the device."""
        return self.parts_of(self.counts)

    def parts_of(self, counts: Sequence[Sequence[int]]) -> tuple[Bucket, ...]:
        """Return the buckets as views of the planes, from the number of tokens by batch row and level. Does not wait for the device."""
        found, place = [], 0
        codes, scales, where = self.pool.flatten(), self.scales.flatten(), self.where.flatten()
        begins = iter(pool_rows(counts, self.widths, self.heads, self.head_dim))
        for row, of_row in enumerate(counts):
            for level, (bits, count) in enumerate(zip(self.widths, of_row, strict=True)):
                at, words = next(begins) * ROW, []
                for width in coder.parts_of(bits, self.head_dim):
                    size = self.heads * count * width
                    words.append(codes[at : at + size].view(self.heads, count, width))
                    at += size
                own = slice(place, place + count)
                of_scales = scales[place * self.heads :][: count * self.heads].view(self.heads, count)
                found.append(Bucket(level, bits, row, tuple(words), of_scales, where[own]))
                place += count
        return tuple(found)

    def histogram(self, count: int, first: int) -> dict[int, int]:
        """Return the number of tokens stored at each width, {bits: tokens}, among all rows' first ``count`` tokens.

        ``first``: the value of the plane ``first``; tokens from that position on are entering, at 8 bits.
        """
        found = {ENTERING: self.rows * max(count - first, 0)}
        for of_row in self.counts:
            for bits, number in zip(self.widths, of_row, strict=True):
                found[bits] = found.get(bits, 0) + number
        return {bits: number for bits, number in sorted(found.items()) if number}

    def plain(self, coded: coder.Coded, bits: int, row: int, heads: slice = slice(None)) -> torch.Tensor:
        """Return the values, float32 [K, n, D], that codes and scales of ``bits`` bits decode to, for ``heads`` of batch row ``row``.

        Narrow codes of rotated keys are rotated back, and the keys' mean is added.
        """
        found = coder.decode(coded, bits)
        if self.mean is None or bits == ENTERING:
            return found
        return coder.turned(found) + self.mean[0, row, heads].to(torch.float32)

    def narrowed(self, coded: coder.Coded, bits: int, to: int, row: int) -> coder.Coded:
        """Return ``coded``, codes [K, n, bytes] and scales of all heads of batch row ``row``, re-encoded from ``bits`` to ``to`` bits.

        Raises ValueError unless ``to`` is smaller, except for entering tokens of keys in a frame with a mean.
        """
        if self.mean is None or bits != ENTERING:
            return coder.narrower(coded, bits, to, self.form.frame)
        return self.coded(coder.decode(coded, bits), to, row)

    def coded(self, x: torch.Tensor, bits: int, row: int) -> coder.Coded:
        """Return the codes and scales at ``bits`` bits of ``x``, values [K, n, D] of all heads of batch row ``row``."""
        if self.mean is not None and bits != ENTERING:
            x = coder.turned(x - self.mean[0, row].to(torch.float32))
        return coder.encode(x, bits, self.scales.dtype, self.form.frame)


def pool_rows(counts: Sequence[Sequence[int]], widths: tuple[int, ...], heads: int, head_dim: int) -> list[int]:
    """Return each bucket's first row of the plane ``pool``, bucket by bucket, then the number of rows that all buckets take.

    ``counts``: tokens by batch row and level; ``heads``: kv heads.
    """
    found = [0]
    for of_row in counts:
        for bits, count in zip(widths, of_row, strict=True):
            found.append(found[-1] + -(-count * heads * (head_dim * bits // 8) // ROW))
    return found


def with_pool_rows(ends_LBn: torch.Tensor, widths: tuple[int, ...], heads: int, head_dim: int) -> torch.Tensor:
    """Return the planes ``ends`` of L layers, int32 [L, 1, B, 1, 1, 2 * levels]: the ends of buckets, then their first rows of the pool.

    ``ends_LBn``: the ends of buckets, int32 [L, B, levels]. Does not wait for the device.
    """
    sizes = on_device([heads * (head_dim * bits // 8) for bits in widths], ends_LBn.device)
    flat = ends_LBn.flatten(1).to(torch.int64)
    counts = flat - torch.nn.functional.pad(flat[:, :-1], (1, 0))
    needed = (counts.view(ends_LBn.shape) * sizes + (ROW - 1)) // ROW
    begins = (needed.flatten(1).cumsum(1).view(ends_LBn.shape) - needed).to(ends_LBn.dtype)
    return torch.cat([ends_LBn, begins], -1).view(len(ends_LBn), 1, ends_LBn.shape[1], 1, 1, -1)


@dataclass(frozen=True)
class PlaneLengths:
    """Lengths of a slot's planes of settled tokens: ``rows`` of ``pool``, and ``tokens`` entries of each of ``scales`` and ``where``."""

    rows: int
    tokens: int

    @staticmethod
    def of(counts: Sequence[Sequence[int]], like: Buckets) -> PlaneLengths:
        """Return the least lengths of planes that hold the given numbers of settled tokens, by batch row and level.

        ``like``: buckets with the same widths, kv heads and head dim.
        """
        return PlaneLengths(pool_rows(counts, like.widths, like.heads, like.head_dim)[-1], sum(map(sum, counts)))


def values(slot_buckets: Buckets, count: int, heads: slice = slice(None)) -> torch.Tensor:
    """Return the values at positions 0 to ``count`` - 1 of some heads, float32 [B, K, T, D]; zero for absent tokens.

    Waits for the device.
    """
    entering = coder.decode((slot_buckets.entering[0][:, :, heads], slot_buckets.entering[1][:, :, heads]), ENTERING)
    entering = entering.permute(1, 2, 0, 3, 4).flatten(2, 3)
    rows, kv_heads, tokens, dim = entering.shape
    # Tokens at or after ``count`` are written to one extra index, which is dropped.
    out = entering.new_zeros(rows, kv_heads, count + 1, dim)
    at = (slot_buckets.first.flatten() + torch.arange(tokens, device=out.device)).clamp(max=count)
    out.index_copy_(2, at, entering)
    for part in slot_buckets.parts:
        out[part.row].index_copy_(1, part.position.clamp(max=count), slot_buckets.plain(part.coded(heads), part.bits, part.row, heads))
    return out[:, :, :count]


def levels(slot_buckets: Buckets, count: int) -> torch.Tensor:
    """Return the levels of the tokens at positions 0 to ``count`` - 1, int8 [B, T]; entering tokens get len(widths).

    Waits for the device.
    """
    found = torch.full((slot_buckets.rows, count), len(slot_buckets.widths), dtype=torch.int8, device=slot_buckets.ends.device)
    for part in slot_buckets.parts:
        found[part.row, part.position] = part.level
    return found


def empty(slot_buckets: Buckets, pages: int) -> Planes:
    """Return zeroed planes for ``pages`` pages of entering tokens, of the kinds in ``Buckets.growing``."""
    return tuple(plane.new_zeros(pages, *plane.shape[1:]) for plane in slot_buckets.growing)


def with_room(slot_buckets: Buckets, pages: int) -> Buckets:
    """Return the slot with at least ``pages`` pages for entering tokens; if pages are added, their number at least doubles."""
    held = slot_buckets.entering[0].shape[0]
    if pages <= held:
        return slot_buckets
    pages = max(pages, 2 * held)
    return slot_buckets.entered_as(tuple(grown(plane, pages) for plane in slot_buckets.growing))


def grown(plane: torch.Tensor, pages: int) -> torch.Tensor:
    """Return a plane [N, ...] with at least ``pages`` pages, new ones zero; ``plane`` itself if it has as many."""
    held = plane.shape[0]
    return plane if pages <= held else torch.cat([plane, plane.new_zeros(pages - held, *plane.shape[1:])])


def pages_by_position(pages: int) -> int:
    """Return how many pages to allocate for a plane, indexed by position, that needs ``pages``: 1/16 more, so that it seldom grows."""
    return pages + pages // PAGES_BEHIND


def made(slot_buckets: Buckets, ends: torch.Tensor, first: torch.Tensor, room: PlaneLengths) -> Buckets:
    """Return a slot whose planes of settled tokens are new, zeroed and of the lengths ``room``, without entering tokens.

    ``ends`` and ``first``: the contents of the planes of these names.
    """
    return replace(
        slot_buckets.entered_as(empty(slot_buckets, 0)), first=first, ends=ends.clone(),
        scales=slot_buckets.scales.new_zeros(room.tokens, *slot_buckets.scales.shape[1:]),
        where=slot_buckets.where.new_zeros(room.tokens, *slot_buckets.where.shape[1:]),
        pool=slot_buckets.pool.new_zeros(room.rows, *slot_buckets.pool.shape[1:]),
    )


def cut(slot_buckets: Buckets, count: int) -> Buckets:
    """Return the slot with its first ``count`` tokens only, its codes and scales unchanged. Waits for the device."""
    if count >= int(slot_buckets.first):
        return slot_buckets
    picked = [(part, (part.position < count).nonzero().flatten()) for part in slot_buckets.parts]
    return _chosen(
        slot_buckets, [picked[at : at + len(slot_buckets.widths)] for at in range(0, len(picked), len(slot_buckets.widths))],
        torch.full_like(
        slot_buckets.first, count,
    ))


def of_rows(slot_buckets: Buckets, rows: torch.Tensor) -> Buckets:
    """Return the slot with only the batch rows ``rows``, in that order, codes and scales unchanged. Waits for the device."""
    number = len(slot_buckets.widths)
    picked = [
        [(part, torch.arange(part.scales.shape[1], device=rows.device)) for part in slot_buckets.parts[row * number : (row + 1) * number]]
        for row in rows.tolist()
    ]
    chosen = _chosen(slot_buckets, picked, slot_buckets.first.clone()).entered_as(
        tuple(plane.index_select(1, rows) for plane in slot_buckets.growing)
    )
    mean, kept = (None if plane is None else plane.index_select(1, rows) for plane in (slot_buckets.mean, slot_buckets.originals))
    return replace(chosen, mean=mean, originals=kept)


def _chosen(slot_buckets: Buckets, picked: list[list[tuple[Bucket, torch.Tensor]]], first: torch.Tensor) -> Buckets:
    """Return new buckets with copies of some settled tokens of ``slot_buckets``.

    ``picked[row][level]``: the bucket to copy that bucket of the result from, and the indices of its tokens to copy, in order. ``first``:
    the plane ``first`` of the result.
    """
    counts = [[len(index) for _, index in of_row] for of_row in picked]
    sizes = torch.tensor(counts, dtype=torch.int32, device=slot_buckets.ends.device).view(len(picked), len(slot_buckets.widths))
    ends = sizes.flatten().cumsum(0, dtype=torch.int32).view(1, *sizes.shape)
    chosen = made(
        slot_buckets, with_pool_rows(ends, slot_buckets.widths, slot_buckets.heads, slot_buckets.head_dim)[0], first,
        PlaneLengths.of(counts, slot_buckets)
    )
    for (old, index), new in zip((item for of_row in picked for item in of_row), chosen.parts, strict=True):
        new.put(torch.arange(len(index), device=index.device), old.coded(index=index), old.position[index])
    return chosen
