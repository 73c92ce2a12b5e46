"""Tier 2: the originals of a half's tokens, from which a move makes the codes of every width that it changes.

::

    entered    the cache's dtype [N, B, K, page, D]   of entering tokens, as they lie in ``Buckets.entering``
    originals  the cache's dtype [M, B, K, page, D]   of settled tokens by position, on the device or in pinned host memory

An append writes the first, a move copies its tokens to the second and reads nothing else; attention reads neither. So with tier 2 a token
has the codes of its original at its width, however often that changed, and may become wider. Without it codes are made from codes.

How many tokens are coded again is known on the host by then, so nothing here waits for the device: on CUDA these are operators of torch
behind the kernel that moves all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcompile.extensions.smartkv.buckets import Buckets
from kvcompile.extensions.smartkv.codes import ENTERING
from kvcompile.types import PAGE, pages_for

AT_ONCE = 4096
"""Tokens of a batch row that are coded at a time; bounds the float32 scratch of ``encode``."""


@dataclass(frozen=True)
class Again:
    """The tokens of a half that a move codes again: positions int64 [B, T], by new level, and how many of each level of each row."""

    position: torch.Tensor
    counts: tuple[tuple[int, ...], ...]


def changed(widths: tuple[int, ...], before_RT: torch.Tensor, after_RT: torch.Tensor) -> torch.Tensor:
    """Which tokens change their width, bool [R, T], from levels int8; one more than the largest ``before`` is a token that enters."""
    bits = (*widths, ENTERING)
    same = torch.zeros_like(before_RT, dtype=torch.bool)
    for width in set(bits):
        levels = [level for level, each in enumerate(bits) if each == width]
        same |= _among(before_RT, levels) & _among(after_RT, levels)
    return ~same


def _among(level_RT: torch.Tensor, levels: Sequence[int]) -> torch.Tensor:
    """Whether a level is one of some that follow each other."""
    return (level_RT >= levels[0]) & (level_RT <= levels[-1])


def counted(changed_RT: torch.Tensor, after_RT: torch.Tensor, number: int) -> torch.Tensor:
    """Changed tokens by new level, int64 [R, number]."""
    return torch.stack([(changed_RT & (after_RT == level)).sum(-1) for level in range(number)], -1)


def again(widths: tuple[int, ...], before_BT: torch.Tensor, after_BT: torch.Tensor, counts: tuple[tuple[int, ...], ...]) -> Again:
    """The tokens that are coded again, from levels int8 before and after and what ``counted`` gave, on the host."""
    by_level = torch.where(changed(widths, before_BT, after_BT), after_BT, len(widths))
    return Again(by_level.argsort(dim=-1, stable=True), counts)


def settle(slot_buckets: Buckets, first: int, count: int) -> None:
    """Copy the originals of the entering tokens below ``count`` to their positions; ``first``: that of the first of them."""
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
    """Write the codes of changed tokens into ``into``, from their originals, which are settled.

    ``place``: int32 [B, T], the new place of each token. ``counts``: all tokens of each level of each row there.
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
