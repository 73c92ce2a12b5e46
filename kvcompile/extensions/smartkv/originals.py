"""Tier 2: full-precision copies of keys or values, from which a move encodes the tokens that change width.

::

    entered    the cache's dtype [N, B, K, page, D]   entering tokens, indexed as ``Buckets.entering``
    originals  the cache's dtype [M, B, K, page, D]   settled tokens (those in buckets), by position; on the device or in pinned host memory

An append writes the first plane. A move copies from it into the second and encodes from the second only; attention reads neither. With
tier 2 a token's codes are always those of its full-precision copy, however often its width changed, and it may become wider. Without tier 2
new codes are made from old codes.

The host knows by then how many tokens are re-encoded, so nothing here waits for the device. On CUDA these torch operators run after the
kernel that moves all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcompile.extensions.smartkv.buckets import Buckets
from kvcompile.extensions.smartkv.codes import ENTERING
from kvcompile.types import PAGE, pages_for

AT_ONCE = 4096
"""Tokens of a batch row that are encoded at a time; bounds the float32 scratch of ``encode``."""


@dataclass(frozen=True)
class Again:
    """The tokens of one slot that a move encodes from full-precision copies.

    ``position``: int64 [B, T], their positions, sorted by new level, then those of all other tokens; ``counts``: their number by row and
    level.
    """

    position: torch.Tensor
    counts: tuple[tuple[int, ...], ...]


def changed(widths: tuple[int, ...], before_RT: torch.Tensor, after_RT: torch.Tensor) -> torch.Tensor:
    """Return whether each token changes its width, bool [R, T], from its levels before and after, int8 [R, T].

    Level ``len(widths)`` before the move marks a token that is still entering, at 8 bits.
    """
    bits = (*widths, ENTERING)
    same = torch.zeros_like(before_RT, dtype=torch.bool)
    for width in set(bits):
        levels = [level for level, each in enumerate(bits) if each == width]
        same |= _among(before_RT, levels) & _among(after_RT, levels)
    return ~same


def _among(level_RT: torch.Tensor, levels: Sequence[int]) -> torch.Tensor:
    """Return whether each level is one of ``levels``, which are consecutive; bool [R, T]."""
    return (level_RT >= levels[0]) & (level_RT <= levels[-1])


def counted(changed_RT: torch.Tensor, after_RT: torch.Tensor, number: int) -> torch.Tensor:
    """Return the number of changed tokens by new level, int64 [R, number]; ``number``: the number of levels."""
    return torch.stack([(changed_RT & (after_RT == level)).sum(-1) for level in range(number)], -1)


def again(widths: tuple[int, ...], before_BT: torch.Tensor, after_BT: torch.Tensor, counts: tuple[tuple[int, ...], ...]) -> Again:
    """Return the positions of all tokens [B, T]: tokens of changed width first, sorted by new level, then unchanged tokens.

    Takes the levels before and after, int8 [B, T]. ``counts``: the number of changed tokens by row and level, from ``counted``, on the
    host.
    """
    by_level = torch.where(changed(widths, before_BT, after_BT), after_BT, len(widths))
    return Again(by_level.argsort(dim=-1, stable=True), counts)


def settle(slot_buckets: Buckets, first: int, count: int) -> None:
    """Copy the full-precision copies of the tokens at positions ``first`` to ``count`` - 1 from ``entered`` into ``originals``, in place.

    ``first``: the position of the first entering token.
    """
    entered, originals = slot_buckets.entered, slot_buckets.originals
    assert entered is not None
    assert originals is not None
    assert originals.shape[0] >= pages_for(count), "no room in tier 2"
    if first % PAGE == 0:
        pages = pages_for(count - first)
        originals[first // PAGE :][:pages].copy_(entered[:pages])
        return
    number = torch.arange(count - first, device=entered.device)
    place = number + first
    originals[place // PAGE, :, :, place % PAGE] = entered[number // PAGE, :, :, number % PAGE]


def code_again(slot_buckets: Buckets, order: Again, place_BT: torch.Tensor, into: Buckets, counts: tuple[tuple[int, ...], ...]) -> None:
    """Encode the changed tokens of ``order`` from the plane ``originals``, and write codes, scales and positions into the buckets ``into``.

    ``place``: int32 [B, T], each token's new index. ``counts``: all tokens of ``into`` by row and level.
    """
    assert slot_buckets.originals is not None
    begins, parts = 0, iter(into.parts_of(counts))
    for row, (of_row, wanted) in enumerate(zip(counts, order.counts, strict=True)):
        taken = 0
        for held, number, part in zip(of_row, wanted, parts, strict=False):
            for start in range(taken, taken + number, AT_ONCE):
                position = order.position[row, start : min(start + AT_ONCE, taken + number)]
                x = slot_buckets.originals[position // PAGE, row, :, position % PAGE].transpose(0, 1)
                part.put(place_BT[row, position].to(torch.int64) - begins, slot_buckets.coded(x, part.bits, row), position)
            begins, taken = begins + held, taken + number
