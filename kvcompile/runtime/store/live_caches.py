"""Ledger: the live caches of one backend, and the telemetry of those that are gone.

What attention says of itself is added up in a plane of each key store, on the device. When a cache dies that plane is kept and,
with others, added to one sum before many have gathered: no copy to the host, and nothing in a decode step. A copy of a cache (beam
search, batch select, ``deepcopy``) begins with its original's plane, whose counts are not its own: the ledger takes off what it began with.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvcompile.runtime.store.state import CacheState
from kvcompile.runtime.store.telemetry import Telling

MOST_KEPT = 256
"""Planes of dead caches that are added up together at the latest."""


class Ledger:
    """Keeps the states of live caches and the telemetry of dead ones; ``add_up`` makes one plane of many, without it nothing is kept."""

    def __init__(self, add_up: Callable[[Sequence[Telling]], torch.Tensor] | None = None) -> None:
        self.add_up = add_up
        self.states: weakref.WeakSet[CacheState] = weakref.WeakSet()
        self.dead: collections.deque[Telling] = collections.deque()

    def __iter__(self) -> Iterator[CacheState]:
        return iter(list(self.states))

    def __len__(self) -> int:
        return len(self.states)

    def add(self, state: CacheState) -> None:
        """Follow a state; do nothing where it is known."""
        if state in self.states:
            return
        self.states.add(state)
        state.tellings[:] = state.told()
        if self.add_up is not None and state.tellings:
            # Called wherever Python collects garbage: it only puts the planes aside.
            weakref.finalize(state, self.dead.extend, state.tellings).atexit = False
        if len(self.dead) > MOST_KEPT:
            self._settle()

    def tellings(self) -> list[Telling]:
        """Return the telemetry of all caches, those that live last."""
        self._settle()
        return [*self.dead, *(each for state in self for each in state.told())]

    def _settle(self) -> None:
        """Add up the telemetry of dead caches, to one plane a device."""
        by_device: dict[Any, list[Telling]] = {}
        if self.add_up is None:
            return
        while self.dead:
            telling = self.dead.popleft()
            by_device.setdefault(telling.plane.device, []).append(telling)
        for found in by_device.values():
            self.dead.append(Telling(self.add_up(found), None))
