"""Moves: tokens are re-encoded into the buckets of their new levels, in the same planes as long as these are large enough.

A token that becomes narrower is encoded from its old codes and others are copied; with tier 2, a token that changes width is encoded from
its full-precision copy (``originals``). A move reads the old planes and writes temporary planes of the same lengths, which are then copied
over the old ones: a recorded CUDA graph that uses the planes stays valid. New planes get slack, so that few moves allocate new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvcompile.extensions.smartkv import buckets, originals
from kvcompile.extensions.smartkv import codes as coder
from kvcompile.extensions.smartkv.buckets import Buckets, PlaneLengths
from kvcompile.extensions.smartkv.codes import ENTERING
from kvcompile.extensions.smartkv.originals import Again
from kvcompile.schemes.base import Planes
from kvcompile.types import PAGE, pages_for

SLACK = 128
"""Newly made planes have room for 1/128 more than their tokens need."""


def with_slack(need: PlaneLengths) -> PlaneLengths:
    """Return lengths for new planes: ``need`` plus 1/128 of it."""
    return PlaneLengths(need.rows + need.rows // SLACK, need.tokens + need.tokens // SLACK)


def fits(slot_buckets: Buckets, need: PlaneLengths) -> bool:
    """Return whether a slot's present planes of settled tokens have at least the lengths ``need``."""
    return need.rows <= slot_buckets.pool.shape[0] and need.tokens <= slot_buckets.where.shape[0]


def held_bytes(slot_buckets: Buckets, room: PlaneLengths | None = None) -> int:
    """Return the bytes of a slot's settled tokens in planes of the lengths ``room``; None: in its present planes."""
    room = room or PlaneLengths(slot_buckets.pool.shape[0], slot_buckets.where.shape[0])
    return room.rows * buckets.ROW + room.tokens * (slot_buckets.heads * slot_buckets.scales.itemsize + slot_buckets.where.itemsize)


@dataclass(frozen=True)
class TokenMove:
    """A move of one slot's tokens: new levels int8 [B, T], each token's new index ``place`` int32 [B, T], and the new plane ``ends``.

    ``counts``: tokens of each row and level, on the host. ``again``: the tokens encoded from their full-precision copies; None without tier
    2.
    """

    levels: torch.Tensor
    place: torch.Tensor
    ends: torch.Tensor
    counts: tuple[tuple[int, ...], ...]
    again: Again | None = None


def placed(levels_LBT: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's new index in the buckets, int32 [L, B, T], and ``ends``, int32 [L, B, levels], from new levels int8 [L, B, T].

    All levels are below ``number``.
    """
    layers, rows, tokens = levels_LBT.shape
    found, order = levels_LBT.sort(dim=-1, stable=True)
    begin = (torch.arange(rows, device=order.device) * tokens).view(1, -1, 1)
    counting = torch.arange(tokens, device=order.device).expand_as(order)
    place = torch.zeros_like(order).scatter_(-1, order, counting) + begin
    each = torch.arange(number, device=order.device, dtype=found.dtype).expand(layers, rows, -1).contiguous()
    ends = torch.searchsorted(found, each, right=True) + begin
    return place.to(torch.int32), ends.to(torch.int32)


def order_of(levels_BT: torch.Tensor, slot_buckets: Buckets) -> TokenMove:
    """Return the move of one slot's tokens to the given levels. Waits for the device."""
    number = len(slot_buckets.widths)
    place, ends = placed(levels_BT.unsqueeze(0), number)
    plane = buckets.with_pool_rows(ends, slot_buckets.widths, slot_buckets.heads, slot_buckets.head_dim)[0]
    return TokenMove(levels_BT, place[0], plane, counts_of(ends[0].flatten().tolist(), number))


def counts_of(ends: Sequence[int], number: int) -> tuple[tuple[int, ...], ...]:
    """Return the number of tokens by batch row and level, from the indices where buckets end, row by row; ``number``: levels per row."""
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return tuple(tuple(sizes[at : at + number]) for at in range(0, len(sizes), number))


class Movement(Protocol):
    """The interface of a device's moves: it reads and re-encodes the tokens of one slot; ``EagerMoves`` defines the results."""

    def levels(self, slot_buckets: Buckets, count: int) -> torch.Tensor:
        """Return the levels of the tokens at positions 0 to ``count`` - 1, int8 [B, T]; entering tokens get len(widths)."""

    def move(self, slot_buckets: Buckets, order: TokenMove, first: int, into: Buckets) -> None:
        """Write codes, scales and positions of all tokens below position T into ``into``, at the levels and indices of ``order``.

        ``first``: the value of the slot's plane ``first``. Tokens never become wider, except those of ``order.again``, whose codes may be
        anything here: ``originals.code_again`` overwrites them.
        """


class EagerMoves:
    """The definition of moves by torch operators; waits for the device."""

    def levels(self, slot_buckets: Buckets, count: int) -> torch.Tensor:
        return buckets.levels(slot_buckets, count)

    def move(self, slot_buckets: Buckets, order: TokenMove, first: int, into: Buckets) -> None:
        number = len(slot_buckets.widths)
        ends = order.ends[0, :, 0, 0, :number]
        begins = ends - torch.tensor(order.counts, device=ends.device).view_as(ends)
        for bits, row, take, position in _sources(slot_buckets, order.levels.shape[1], first):
            wanted, place = order.levels[row, position], order.place[row, position]
            for part in into.parts[row * number : (row + 1) * number]:
                if order.again is not None and part.bits != bits:
                    continue
                chosen = (wanted == part.level).nonzero().flatten()
                if len(chosen):
                    coded = take(chosen)
                    coded = coded if part.bits == bits else into.narrowed(coded, bits, part.bits, row)
                    part.put(place[chosen].to(torch.int64) - begins[row, part.level], coded, position[chosen])


MOVEMENTS: dict[str, Movement] = {}
"""Movements by kernels, by device type; a package of kernels adds its own."""


def movement(device: torch.device) -> Movement:
    """Return the ``Movement`` of a device's type: the one by kernels if a package registered it, else ``EagerMoves``."""
    return MOVEMENTS.get(device.type, EagerMoves())


_Source = tuple[int, int, Callable[[torch.Tensor], coder.Coded], torch.Tensor]


def _sources(slot_buckets: Buckets, count: int, first: int) -> Iterator[_Source]:
    """Yield where the first ``count`` tokens are stored: each batch row's entering tokens (positions ``first`` on), then every bucket.

    Each source is its bits, its batch row, a function from indices within it to codes and scales [K, n, ...], and its tokens' positions.
    """
    words, scales = slot_buckets.entering
    place = torch.arange(count - first, device=words.device)
    for row in range(slot_buckets.rows):
        def entering(index: torch.Tensor, row: int = row) -> coder.Coded:
            at = place[index] // PAGE, slice(None), place[index] % PAGE
            return words[:, row][at].transpose(0, 1), scales[:, row][at].transpose(0, 1)

        yield ENTERING, row, entering, place + first
    for part in slot_buckets.parts:
        yield part.bits, part.row, lambda index, part=part: part.coded(index=index), part.position  # type: ignore[misc]


def settled(slot_buckets: Buckets, levels_BT: torch.Tensor) -> Buckets:
    """Return the slot with all T tokens moved into the buckets of ``levels`` int8 [B, T], in new planes without slack.

    Waits for the device.
    """
    order, count = order_of(levels_BT, slot_buckets), levels_BT.shape[1]
    return moved(slot_buckets, order, int(slot_buckets.first), count, PlaneLengths.of(order.counts, slot_buckets))


def mean_of(slot_buckets: Buckets, first: int, count: int, there_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean of the keys at positions below ``count``, as the plane ``mean`` [1, B, K, 1, D] of a slot without settled tokens.

    ``there`` [B, T]: the tokens that are present; those that are not finite are left out too, and the mean of no tokens is 0. ``first``,
    the number of settled tokens, must be 0.
    """
    assert slot_buckets.mean is not None
    assert first == 0
    x = coder.decode(slot_buckets.entering, ENTERING).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :count]
    there = (there_BT[:, None, :, None] & x.isfinite().all(-1, keepdim=True)).to(torch.float32)
    mean = (x.nan_to_num() * there).sum(2, keepdim=True) / there.sum(2, keepdim=True).clamp(min=1)
    return mean.to(slot_buckets.mean.dtype).unsqueeze(0)


def moved(slot_buckets: Buckets, order: TokenMove, first: int, held: int, room: PlaneLengths | None) -> Buckets:
    """Return the slot with its first T tokens moved as ``order`` says; tokens from position T up to ``held`` stay entering.

    ``first``: the value of the slot's plane ``first``. ``room``: the lengths of new planes; None overwrites the present planes in place.
    """
    count = order.levels.shape[1]
    if room is None:
        scales, where, pool = (torch.empty_like(plane) for plane in (slot_buckets.scales, slot_buckets.where, slot_buckets.pool))
        into = replace(slot_buckets, ends=order.ends, scales=scales, where=where, pool=pool)
    else:
        into = buckets.made(slot_buckets, order.ends, torch.full_like(slot_buckets.first, count), room)
    movement(slot_buckets.ends.device).move(slot_buckets, order, first, into)
    if order.again is not None:
        originals.settle(slot_buckets, first, count)
        originals.code_again(slot_buckets, order.again, order.place, into, order.counts)
    entering = _left(slot_buckets, count - first, held - count)
    if room is not None:
        return into.entered_as(entering)
    slot_buckets.first.fill_(count)
    for name in ("ends", "scales", "where", "pool"):
        getattr(slot_buckets, name).copy_(getattr(into, name))
    return slot_buckets.entered_as(entering)


def _left(slot_buckets: Buckets, start: int, count: int) -> Planes:
    """Return the planes of entering tokens that hold only the ``count`` tokens from index ``start`` on, now at the front.

    Planes of one page are changed in place; longer ones are replaced.
    """
    codes, scales = slot_buckets.entering
    if codes.shape[0] == 1 and count <= PAGE:
        for plane in slot_buckets.growing if count else ():
            plane[:, :, :, :count] = plane[:, :, :, start : start + count].clone()
        scales[:, :, :, count:].zero_()
        return slot_buckets.growing
    number = start + torch.arange(count, device=codes.device)
    kept = [plane[number // PAGE, :, :, number % PAGE] for plane in slot_buckets.growing] if count else []
    made = buckets.empty(slot_buckets, max(1, pages_for(count)))
    place = torch.arange(count, device=codes.device)
    for plane, rows in zip(made, kept, strict=False):
        plane[place // PAGE, :, :, place % PAGE] = rows
    return made
