"""Undo: what a call overwrites in the stores is kept until the call has returned, so that a step that raises leaves them as they were.

The host's lengths are counted after compiled code has returned, and codes behind them are nobody's: a step that is tried again writes the
same codes to the same places. Three things are overwritten while they are still read:

* a window: the new tokens take the slots of its oldest ones, which the step attends to, and its lengths goes on
* a window that goes back before the step: it is refilled, so all of it is kept
* a sliding window: the new tokens take the slots of its oldest ones

Each is at most as many tokens as the call brings, or one window. They are kept where the stores are on a CPU. On a GPU a copy of each
layer's slot would be a launch a layer in every step: there an interrupted step moves the lengthss back, and what a window lost is put back
from its codes, within the scheme's rounding, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from kvcompile.lowering.ops.operations import write_rows
from kvcompile.lowering.ops.sliding import taken
from kvcompile.runtime.store import host_reads
from kvcompile.runtime.store.state import CacheState
from kvcompile.runtime.store.store import Store

log = logging.getLogger(__name__)


class Undo:
    """Keeps the tokens that one call overwrites; a context that is left by an exception puts them back."""

    def __init__(self) -> None:
        self.planes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.slots: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.again: list[tuple[CacheState, int]] = []
        self.stores: list[tuple[Store, list[torch.Tensor]]] = []
        self.last: list[Callable[[], None]] = []

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            self.restore()

    def then(self, action: Callable[[], None]) -> None:
        """Do something behind all that is put back."""
        self.last.append(action)

    def whole(self, state: CacheState) -> None:
        """Keep the windows of a state that goes back."""
        for store in state.stores.values():
            self.stores.append((store, list(store.planes)))
            if store.window is not None:
                self.planes += [(plane, plane.clone()) for plane in store.rolled_back]

    def keep(self, states: Sequence[CacheState], starts: Sequence[int], counts: Sequence[int]) -> None:
        """Keep the tokens that a call overwrites, by where it begins in each state and how many tokens it brings."""
        if not host_reads.free(states[0].device):
            self.again = list(zip(states, starts, strict=True))
            return
        for state, start, count in zip(states, starts, counts, strict=True):
            for store in state.stores.values():
                if state.windowed and (window := store.window) is not None:
                    self._window(window, store.lengths, count)
                elif state.slots is not None and start + count > state.slots > count:
                    at = torch.arange(start, start + count, device="cpu") % state.slots
                    self.rows += [(plane, taken(plane, at), at.unsqueeze(0)) for plane in store.encoded]

    def _window(self, window: torch.Tensor, lengths: torch.Tensor, count: int) -> None:
        size, held = window.shape[2], lengths[0, :, 0, 0, :1]
        self.planes.append((lengths, lengths.clone()))
        if count >= size:
            self.planes.append((window, window.clone()))
            return
        at = (held + torch.arange(count, device="cpu")) % size
        at = at[:, None, :, None].expand(*window.shape[:2], count, window.shape[3])
        self.slots.append((window, window.gather(2, at), at))

    def restore(self) -> None:
        """Bring the stores back to what they held before the call."""
        with torch.inference_mode(False), torch.no_grad():
            for window, kept, at in self.slots:
                window.scatter_(2, at, kept)
            for plane, kept, at in self.rows:
                write_rows(plane, kept, at)
            # The last first: what a rollback kept is older than what the call did.
            for plane, kept in reversed(self.planes):
                plane.copy_(kept)
        for store, planes in reversed(self.stores):
            store.restore(planes)
        for state, start in self.again:
            state.rewind(start)
        for action in self.last:
            action()
        if any(state.windowed for state, _ in self.again):
            log.warning("a step was interrupted: what the windows of its caches lost is put back from their codes")
