"""Live caches: the states of one backend's caches, and the telemetry of caches that are gone.

Attention adds its telemetry to a plane of each key store, on the device. When a cache is collected that plane is kept, and many kept
planes are summed into one, without a copy to the host and without work in a decode step. A copied cache (beam search, batch select,
``deepcopy``) starts with its source's plane, whose counts are not its own: the sum subtracts them.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from kvcompile.runtime.store.state import CacheState
from kvcompile.runtime.store.telemetry import TelemetryPlane
from kvcompile.types import PlaneSpec

MOST_KEPT = 256
"""Largest number of kept planes of dead caches before they are summed."""

_EVERY: weakref.WeakSet[LiveCaches] = weakref.WeakSet()
"""The live caches of all backends: a fork is added to the backends of the cache that it was made from."""


class LiveCaches:
    """Keeps the states of live caches and the telemetry of dead ones.

    ``add_up`` sums telemetry planes into one; without it the telemetry of dead caches is not kept.
    """

    def __init__(self, add_up: Callable[[Sequence[TelemetryPlane]], torch.Tensor] | None = None) -> None:
        self.add_up = add_up
        self.states: weakref.WeakSet[CacheState] = weakref.WeakSet()
        self.dead: collections.deque[TelemetryPlane] = collections.deque()
        self.peak = 0
        """Most bytes that the stores of live caches held at once, as far as ``measure`` saw."""
        _EVERY.add(self)

    def __iter__(self) -> Iterator[CacheState]:
        return iter(list(self.states))

    def __len__(self) -> int:
        return len(self.states)

    def add(self, state: CacheState) -> None:
        """Track a state; does nothing if it is tracked."""
        if state in self.states:
            return
        self.states.add(state)
        state.telemetry_planes[:] = state.telemetry()
        if self.add_up is not None and state.telemetry_planes:
            # Runs during garbage collection, so it only stores the planes.
            weakref.finalize(state, self.dead.extend, state.telemetry_planes).atexit = False
        if len(self.dead) > MOST_KEPT:
            self._add_up()

    def measure(self) -> None:
        """Update ``peak`` with the bytes that live caches hold now. Called where a store has grown, which no step of the fast path does."""
        self.peak = max(self.peak, sum(plane.untyped_storage().nbytes() for plane, _ in distinct_planes(self)))

    def telemetry_planes(self) -> list[TelemetryPlane]:
        """Return the telemetry of all caches: sums of dead ones, then live ones."""
        self._add_up()
        return [*self.dead, *(each for state in self for each in state.telemetry())]

    def _add_up(self) -> None:
        """Sum the telemetry of dead caches to one plane for each device."""
        by_device: dict[Any, list[TelemetryPlane]] = {}
        if self.add_up is None:
            return
        while self.dead:
            telling = self.dead.popleft()
            by_device.setdefault(telling.plane.device, []).append(telling)
        for found in by_device.values():
            self.dead.append(TelemetryPlane(self.add_up(found), None))


def add_fork(state: CacheState, source: CacheState) -> None:
    """Track ``state`` in every LiveCaches that tracks ``source``, with which it shares planes: their bytes are counted together."""
    for live in list(_EVERY):
        if source in live.states:
            live.add(state)


def distinct_planes(states: Iterable[CacheState]) -> Iterator[tuple[torch.Tensor, PlaneSpec]]:
    """Yield each plane of the states' stores with its spec; one that several stores share once."""
    seen: set[int] = set()
    queue = [store for state in states for group in state.groups for store in group.stores.values()]
    while queue:
        store = queue.pop()
        queue += [] if store.padding is None else [store.padding]
        for plane, spec in store.described():
            if id(plane) not in seen:
                seen.add(id(plane))
                yield plane, spec
