"""Live caches of one backend, and the telemetry of those that are gone.

What attention says of itself is added up in a plane of each key store, on the device. When a cache dies that plane is kept and,
with others, added to one sum before many have gathered: no copy to the host, and nothing in a decode step. A copy of a cache (beam
search, batch select, ``deepcopy``) begins with its original's plane, whose counts are not its own: the sum takes off what it began with.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvcompile.runtime.store.state import CacheState
from kvcompile.runtime.store.telemetry import TelemetryPlane

MOST_KEPT = 256
"""Planes of dead caches that are added up together at the latest."""


class LiveCaches:
    """Keeps the states of live caches and the telemetry of dead ones; ``add_up`` makes one plane of many, without it nothing is kept."""

    def __init__(self, add_up: Callable[[Sequence[TelemetryPlane]], torch.Tensor] | None = None) -> None:
        self.add_up = add_up
        self.states: weakref.WeakSet[CacheState] = weakref.WeakSet()
        self.dead: collections.deque[TelemetryPlane] = collections.deque()

    def __iter__(self) -> Iterator[CacheState]:
        return iter(list(self.states))

    def __len__(self) -> int:
        return len(self.states)

    def add(self, state: CacheState) -> None:
        """Follow a state; do nothing where it is known."""
        if state in self.states:
            return
        self.states.add(state)
        state.telemetry_planes[:] = state.telemetry()
        if self.add_up is not None and state.telemetry_planes:
            # Called wherever Python collects garbage: it only puts the planes aside.
            weakref.finalize(state, self.dead.extend, state.telemetry_planes).atexit = False
        if len(self.dead) > MOST_KEPT:
            self._add_up()

    def telemetry_planes(self) -> list[TelemetryPlane]:
        """Return the telemetry of all caches, those that live last."""
        self._add_up()
        return [*self.dead, *(each for state in self for each in state.telemetry())]

    def _add_up(self) -> None:
        """Add up the telemetry of dead caches, to one plane a device."""
        by_device: dict[Any, list[TelemetryPlane]] = {}
        if self.add_up is None:
            return
        while self.dead:
            telling = self.dead.popleft()
            by_device.setdefault(telling.plane.device, []).append(telling)
        for found in by_device.values():
            self.dead.append(TelemetryPlane(self.add_up(found), None))
