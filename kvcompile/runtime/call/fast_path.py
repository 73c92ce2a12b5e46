"""Fast path: a decode step on static caches that earlier steps have fully checked.

A step of a 32-layer model passes 64 cache tensors. Finding their states, checking their schemes and making room costs about a millisecond
of Python in ``bound``, which nothing overlaps under CUDA graphs. A state that has passed all checks of a graph is marked, and until it is
cleared, outgrown or replaced, only facts that can change are checked: the tensor's type, its length, and the room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.passes.rewrite.rewritten import Rewritten
from kvcompile.runtime.forms.form import FastPathSlot
from kvcompile.runtime.handle.tensor import CompressedCache
from kvcompile.runtime.store.counters import CounterSnapshot
from kvcompile.runtime.store.state import CacheState, Part
from kvcompile.runtime.store.token_slots import cursors


@dataclass(frozen=True, eq=False)
class DecodeFastPath:
    """The fast path of one graph: its cache tensors, the order of the planes, and pairs of caches that must have equal lengths."""

    rows: tuple[FastPathSlot, ...]
    order: tuple[tuple[int, Part], ...]
    pairs: tuple[tuple[int, int], ...]

    @staticmethod
    def of(rows: Sequence[FastPathSlot], roots: Sequence[Any], pairs: tuple[tuple[int, int], ...], rewritten: Rewritten) -> DecodeFastPath:
        """Return the fast path of a graph.

        ``rows``: one entry for each cache tensor; ``roots``: the cache tensors' nodes; ``pairs``: indices of caches that must have equal
        lengths; ``rewritten``: its bindings give the order of the planes.
        """
        place = {root: index for index, root in enumerate(roots)}
        return DecodeFastPath(tuple(rows), tuple((place[item.plan.slot.root], item.part) for item in rewritten.bindings), pairs)

    def mark_checked(self, states: Sequence[CacheState]) -> None:
        """Mark these states as checked for this graph."""
        for index, state in enumerate(states):
            state.checked_for.add((self, index))

    def ready(self, args: tuple[Any, ...], counters: Sequence[torch.Tensor]) -> list[CacheState] | None:
        """Return the states of a call that needs neither checks nor new pages; None if ``BoundGraph`` must take the full path."""
        states = []
        moments: set[CounterSnapshot | None] = set()
        rooms: dict[int, int] = {}
        cursors: dict[int, int] = {}
        for index, row in enumerate(self.rows):
            tensor = args[row.argument]
            if type(tensor) is not CompressedCache:
                return None
            state = tensor._kv
            if (self, index) not in state.checked_for or not state.length or tensor._length != state.longest:
                return None
            room = state.room
            if not state.adaptive and rooms.setdefault(row.slots or row.capacity, room) != room:
                return None
            if row.slots:
                slot = state.length % row.slots
                if state.slots != row.slots or state.length < row.capacity or room < row.slots:
                    return None
                if cursors.setdefault(row.slots, slot) != slot:
                    return None
            elif state.behind + row.count > min(room, row.capacity) or not state.in_order:
                return None
            states.append(state)
            if row.written:
                moments.add(state.moment)
        if not all(moment is not None and moment.holds(counters) for moment in moments):
            return None
        if any(states[key].behind != states[value].behind for key, value in self.pairs):
            return None
        return states

    def planes(self, states: Sequence[CacheState]) -> list[torch.Tensor]:
        """Return the planes in the order of the graph's inputs."""
        return [plane for index, part in self.order for plane in states[index].stores[part].planes]

    def cursors(self, states: Sequence[CacheState], sizes: tuple[int, ...]) -> list[torch.Tensor]:
        """Return the slot of the next token for each window size, int64 [1] each; [] without windows."""
        if not sizes:
            return []
        starts = {row.slots: state.length for row, state in zip(self.rows, states, strict=True)}
        return cursors(sizes, starts, states[0].device)

    def commit(self, states: Sequence[CacheState], args: tuple[Any, ...], moment: CounterSnapshot) -> None:
        """Record the new tokens; ``moment``: the values that the call's position counters had after it."""
        for row, state in zip(self.rows, states, strict=True):
            state.overwrite(state.behind + row.count)
            tensor = args[row.argument]
            tensor._length, tensor._epoch = state.longest, state.epoch
            if row.written:
                state.moment = moment
