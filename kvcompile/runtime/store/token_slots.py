"""Token slots: where the token at a position lies, in a slot of its own or in the slots of a sliding window.

A state counts tokens from its first one on; the token at position p lies in slot p, or p % slots once the state is a sliding window. A
tensor shows its last tokens: those before its length. Only a change of the window's size, or a cache that some other code cut, moves
codes, and then as they are: a copy into a new state.
"""

from __future__ import annotations

import torch

from kvcompile.runtime.store.state import CacheState
from kvcompile.types import pages_for

LEAST_PAGES = 2
"""Below this many pages compiled code takes their number for a constant."""


def readdressed(state: CacheState, slots: int | None, length: int, shown: int) -> tuple[CacheState, int]:
    """Return a state whose tokens lie in ``slots`` slots, None for one each, and its length, for a tensor of ``shown`` tokens.

    It is the same state where no token must be moved, else a new one with the tokens shown.
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
    """Return the slot of the next token of each window size, int64 [1]; filled on the device, so that nobody waits."""
    return [torch.full((1,), starts[size] % size, dtype=torch.int64, device=device) for size in sizes]
