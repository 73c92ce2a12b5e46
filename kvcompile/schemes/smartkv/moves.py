"""Moves: tokens go to the buckets of their new widths, into planes that stay where they are as long as there is room.

What becomes narrower is coded again from its codes, the rest is moved as it is. A move reads the old planes and writes new ones of the same
length, which are then copied over the old ones: a graph that was recorded with them finds them where they were. Planes get a little more
room than their tokens need, so that few moves make others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvcompile.schemes.smartkv import buckets
from kvcompile.schemes.smartkv import codes as coder
from kvcompile.schemes.smartkv.buckets import ENTERING, Buckets, Part, Room
from kvcompile.types import PAGE, pages_for

SLACK = 128
"""Planes that are made anew have room for a 128th more than their tokens need."""


def with_slack(need: Room) -> Room:
    """Room for a little more than is needed."""
    return Room(need.rows + need.rows // SLACK, need.tokens + need.tokens // SLACK)


def fits(half: Buckets, need: Room) -> bool:
    """Whether a half's planes have the room."""
    return need.rows <= half.pool.shape[0] and need.tokens <= half.where.shape[0]


def held_bytes(half: Buckets, room: Room | None = None) -> int:
    """Bytes of a half's settled tokens with that room, or with the room that its planes have."""
    room = room or Room(half.pool.shape[0], half.where.shape[0])
    return room.rows * buckets.ROW + room.tokens * (half.heads * half.scales.itemsize + half.where.itemsize)


@dataclass(frozen=True)
class Order:
    """New places of a half's tokens: widths int8 [B, T], the number of each in its bucket int32 [B, T], ``ends`` int32 [B, widths].

    ``counts``: tokens of each bucket, on the host.
    """

    widths: torch.Tensor
    place: torch.Tensor
    ends: torch.Tensor
    counts: tuple[int, ...]


def placed(widths: torch.Tensor, bits: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of each token in its bucket, int32 [L, B, T], and ``ends``, int32 [L, B, widths], from widths int8 [L, B, T]."""
    flat = widths.flatten(1)
    place = torch.zeros_like(flat, dtype=torch.int32)
    ends = []
    for each in bits:
        chosen = flat == each
        place += torch.where(chosen, chosen.cumsum(1, dtype=torch.int32) - 1, 0)
        ends.append((widths == each).sum(-1).cumsum(-1))
    return place.view(widths.shape), torch.stack(ends, -1).to(torch.int32)


def order_of(widths_RT: torch.Tensor, bits: tuple[int, ...]) -> Order:
    """The order of one half alone. Waits for the device."""
    place, ends = placed(widths_RT.unsqueeze(0), bits)
    return Order(widths_RT, place[0], ends[0], tuple(ends[0, -1].tolist()))


class Movement(Protocol):
    """Reads and moves the tokens of a half on some device as ``Definition`` does."""

    def widths(self, half: Buckets, count: int) -> torch.Tensor:
        """Bits of the tokens at positions 0 to ``count`` - 1, int8 [B, T]."""

    def move(self, half: Buckets, order: Order, first: int, into: Buckets) -> None:
        """Write codes, scales and positions of all tokens below T into the planes of ``into``, in ``order``.

        ``first``: what the half's plane of that name holds. A token never becomes wider.
        """


class Definition:
    """Moves by operators of torch; waits for the device."""

    def widths(self, half: Buckets, count: int) -> torch.Tensor:
        return buckets.widths(half, count)

    def move(self, half: Buckets, order: Order, first: int, into: Buckets) -> None:
        targets = {part.bits: (part, number) for number, part in enumerate(into.parts)}
        begins = [sum(order.counts[:number]) for number in range(len(order.counts))]
        for bits, take, row, position in _sources(half, order.widths.shape[1], first):
            wanted, place = order.widths[row, position], order.place[row, position]
            for width, (part, number) in targets.items():
                chosen = (wanted == width).nonzero().flatten()
                if len(chosen):
                    coded = take(chosen)
                    words, scales = coded if width == bits else coder.narrower(coded, bits, width)
                    at = place[chosen].to(torch.int64)
                    part.codes[at], part.scales[at] = words, scales
                    into.where[begins[number] + at, 0, 0, 0, 0] = position[chosen].to(torch.int32)


MOVEMENTS: dict[str, Movement] = {}
"""Movements by kernels, by type of device; a room of kernels adds its own."""


def movement(device: torch.device) -> Movement:
    """Return the movement of a device: its kernels, or the definition."""
    return MOVEMENTS.get(device.type, Definition())


_Source = tuple[int, Callable[[torch.Tensor], coder.Coded], torch.Tensor, torch.Tensor]


def _sources(half: Buckets, count: int, first: int) -> Iterator[_Source]:
    """Places that tokens lie in: bits, a function from indices to codes, and the batch row and position of each index."""
    words, scales = half.entering
    row, place = (part.flatten() for part in torch.meshgrid(
        torch.arange(half.rows, device=words.device), torch.arange(count - first, device=words.device), indexing="ij",
    ))

    def entering(index: torch.Tensor) -> coder.Coded:
        at = place[index] // PAGE, row[index], slice(None), place[index] % PAGE
        return words[at], scales[at]

    yield ENTERING, entering, row, place + first
    for part in half.parts:
        yield part.bits, functools.partial(_taken, part), part.row, part.position


def _taken(part: Part, index: torch.Tensor) -> coder.Coded:
    return part.codes[index], part.scales[index]


def settled(half: Buckets, widths_RT: torch.Tensor) -> Buckets:
    """All T tokens moved to the buckets that ``widths`` int8 [B, T] say, in planes without slack. Waits for the device."""
    order, count = order_of(widths_RT, half.widths), widths_RT.shape[1]
    return moved(half, order, int(half.first), count, Room.of(order.counts, half))


def moved(half: Buckets, order: Order, first: int, held: int, room: Room | None) -> Buckets:
    """The half with its first T tokens moved, T from ``order``; those up to ``held`` are left entering.

    ``first``: what the plane of that name holds. ``room``: that of new planes; None: its own planes are written.
    """
    count = order.widths.shape[1]
    if room is None:
        scales, where, pool = (torch.empty_like(plane) for plane in (half.scales, half.where, half.pool))
        into = replace(half, ends=order.ends.view_as(half.ends), scales=scales, where=where, pool=pool)
    else:
        into = buckets.made(half, order.ends, torch.full_like(half.first, count), room)
    movement(half.ends.device).move(half, order, first, into)
    entering = _left(half, count - first, held - count)
    if room is not None:
        return replace(into, entering=entering)
    half.first.fill_(count)
    for name in ("ends", "scales", "where", "pool"):
        getattr(half, name).copy_(getattr(into, name))
    return replace(half, entering=entering)


def _left(half: Buckets, start: int, count: int) -> coder.Coded:
    """The entering planes with the ``count`` tokens from number ``start`` on at their beginning; the very tensors where of that size."""
    codes, scales = half.entering
    if count <= 1 and codes.shape[0] == 1:
        kept = [plane[:, :, :, start].clone() for plane in half.entering] if count else []
        scales.zero_()
        for plane, rows in zip(half.entering, kept, strict=False):
            plane[:, :, :, 0] = rows
        return half.entering
    number = start + torch.arange(count, device=codes.device)
    kept = [plane[number // PAGE, :, :, number % PAGE] for plane in half.entering] if count else []
    made = buckets.empty(half, max(1, pages_for(count)))
    place = torch.arange(count, device=codes.device)
    for plane, rows in zip(made, kept, strict=False):
        plane[place // PAGE, :, :, place % PAGE] = rows
    return made
