"""Token slots: the slot of the token at each position, in linear and sliding states.

A state counts tokens from its first one on; the token at position p is in slot p, or in p % slots in a sliding window. A tensor shows
the last tokens before its length. Codes move, unchanged, only into a new state, when the window's size changes or other code cut the
cache.
"""

from __future__ import annotations

import torch

from kvcompile.runtime.store.state import CacheState
from kvcompile.types import pages_for

LEAST_PAGES = 2
"""Smallest number of pages that compiled code does not specialise on."""


def readdressed(state: CacheState, slots: int | None, length: int, shown: int) -> tuple[CacheState, int]:
    """Return (state, length) for a tensor that shows the last ``shown`` of ``length`` tokens, with the tokens in ``slots`` slots.

    ``slots`` None: one slot per position. Returns ``state`` itself if no token must move, else a new state with the shown tokens.
    """
    first = length - shown
    if state.slots == slots and (first == 0 or (slots is not None and (first % slots == 0 or shown + 1 >= slots))):
        return state, length
    kept = shown if slots is None else min(shown, slots)
    small = slots is None or state.pages <= max(LEAST_PAGES, pages_for(slots))
    if first == 0 and state.in_order and kept == shown and small and (slots is None or state.top <= slots):
        state.slots = slots
        return state, length
    return state.moved(length - kept, kept, slots), kept


def cursors(sizes: tuple[int, ...], starts: dict[int, int], device: torch.device) -> list[torch.Tensor]:
    """Return the slot of the next token for each window size, int64 [1]; filled on the device, without a wait."""
    return [torch.full((1,), starts[size] % size, dtype=torch.int64, device=device) for size in sizes]
