"""Rings at run time: which tokens a cache tensor shows, where their codes lie, and how a state becomes a ring.

A state counts tokens from its first one on; the token at position p lies in slot p, or p % slots once the state
is a ring. A tensor shows its last tokens: those before its length. Only a change of the ring's size, or a cache
that some other code cut, moves codes, and then as they are: a copy into a new state.
"""

from __future__ import annotations

import torch

from kvcompile.errors import CacheStale, Unsupported
from kvcompile.passes.match.sites import Ring
from kvcompile.runtime.state import CacheState
from kvcompile.types import pages_for

LEAST_PAGES = 2
"""Below this many pages compiled code takes their number for a constant."""


def fitted(state: CacheState, ring: Ring | None, length: int, shown: int) -> tuple[CacheState, int]:
    """(the state, or a new one with the same tokens, as a graph with ``ring`` addresses it; its length), for a tensor of ``shown`` ones."""
    first = length - shown
    slots = ring.slots if ring is not None else None
    if ring is not None and ring.refilled:
        return (state, length) if state.ring == slots else (state.moved(0, 0, slots), 0)
    if state.ring == slots and (first == 0 or (slots is not None and (first % slots == 0 or shown + 1 >= slots))):
        return state, length
    kept = shown if slots is None else min(shown, slots)
    small = slots is None or state.pages <= max(LEAST_PAGES, pages_for(slots))
    if first == 0 and state.in_order and kept == shown and small and (slots is None or state.top <= slots):
        state.ring = slots
        return state, length
    return state.moved(length - kept, kept, slots), kept


def check_past(state: CacheState, ring: Ring, start: int, past: int, one: bool, where: str) -> None:
    """Raise where the tokens that attention reads before position ``start`` are not in the ring, or no longer."""
    if past + one > ring.slots:
        raise Unsupported(
            expected=f"at most {ring.slots} tokens in a cache that keeps its newest ones", found=f"{past + one}", where=where,
            todo="pass the cache that an earlier call returned, or start a new one",
        )
    if start - past < state.top - ring.slots:
        raise CacheStale(length=start)


def cursors(sizes: tuple[int, ...], starts: dict[int, int], device: torch.device) -> list[torch.Tensor]:
    """The slot of the next token of each ring size, int64 [1]; filled on the device, so that nobody waits."""
    return [torch.full((1,), starts[size] % size, dtype=torch.int64, device=device) for size in sizes]


def one_start(starts: dict[int, int], ring: Ring, start: int, where: str) -> None:
    """Note where the tokens of a ring go; all rings of one size in a graph share a cursor."""
    known = starts.setdefault(ring.slots, start)
    if known % ring.slots != start % ring.slots:
        raise Unsupported(
            expected="the same number of tokens in all caches of one call that keep their newest ones", found=f"{known} and {start}",
            where=where, todo="reset the caches so that they start together",
        )
