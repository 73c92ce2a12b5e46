"""Undo: keep the tokens that a call overwrites until it has returned, so that a failing step leaves the stores unchanged.

The host updates lengths after compiled code has returned, and codes beyond the lengths are unused: a repeated step writes the same codes
to the same slots. Three things are overwritten while they are still read:

* a window: new tokens take the slots of its oldest ones, which the step attends to, and its lengths advance
* a cache that goes back before the step: its window is refilled, so all of it is kept, and so are the pages that the step writes again
* a sliding window: new tokens take the slots of its oldest ones

Each is at most as many tokens as the call brings, or one window. They are kept if the stores are on a CPU. On a GPU, copying each layer's
slots would add one launch a layer to every step: there an interrupted step moves the lengths back, and tokens lost from a window are
restored from their codes, within the scheme's rounding, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from kvcompile.lowering.ops.operations import write_rows
from kvcompile.lowering.ops.sliding import taken
from kvcompile.runtime.store import host_reads
from kvcompile.runtime.store.adaptive_store import AdaptiveStore
from kvcompile.runtime.store.state import CacheState
from kvcompile.runtime.store.store import Store
from kvcompile.types import PAGE, Extent

log = logging.getLogger(__name__)


class Undo:
    """Keeps the tokens that one call overwrites; leaving the context by an exception restores them."""

    def __init__(self) -> None:
        self.planes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.slots: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.again: list[tuple[CacheState, int]] = []
        self.stores: list[tuple[Store, list[torch.Tensor], Store | None]] = []
        self.pages: list[tuple[Store, int, int, torch.Tensor]] = []
        self.last: list[Callable[[], None]] = []

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            self.restore()

    def then(self, action: Callable[[], None]) -> None:
        """Register an action to run after all other contents have been restored."""
        self.last.append(action)

    def whole(self, state: CacheState, start: int, count: int) -> None:
        """Keep a copy of everything in ``state`` that its rollback, and then a call of ``count`` tokens at ``start``, change.

        These are the list of planes, the window and its clock, ``padding``, and the pages that the call writes again.
        """
        for store in state.stores.values():
            self.stores.append((store, list(store.planes), store.padding))
            if store.window is not None:
                self.planes += [(plane, plane.clone()) for plane in store.rolled_back]
            if host_reads.free(state.device) and not isinstance(store, AdaptiveStore):
                self._pages(store, start, count, wraps=state.slots is not None)

    def _pages(self, store: Store, start: int, count: int, wraps: bool) -> None:
        """Keep the pages of ``count`` tokens at ``start``, and those of the blocks of tokens that leave a window during the call."""
        window = 0 if store.window is None else store.window.shape[2]
        first = 0 if wraps else max(0, start - window - PAGE) // PAGE
        for index, (plane, spec) in enumerate(store.described()):
            if index < store.spec.layout.encoded and spec.extent is Extent.TOKENS:
                end = len(plane) if wraps else -(-(start + count) // PAGE)
                self.pages.append((store, index, first, plane[first:end].clone()))

    def keep(self, states: Sequence[CacheState], starts: Sequence[int], counts: Sequence[int]) -> None:
        """Keep the tokens that a call overwrites, from its start and number of tokens in each state."""
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
        """Restore the stores' contents from before the call."""
        with torch.inference_mode(False), torch.no_grad():
            for window, kept, at in self.slots:
                window.scatter_(2, at, kept)
            for plane, kept, at in self.rows:
                write_rows(plane, kept, at)
            # In reverse order: values kept before a rollback are older than those kept for the call.
            for plane, kept in reversed(self.planes):
                plane.copy_(kept)
        for store, planes, padding in reversed(self.stores):
            store.restore(planes)
            store.padding = padding
        with torch.inference_mode(False), torch.no_grad():
            for store, index, first, kept in self.pages:
                # A store that has grown since has other planes.
                store.planes[index][first : first + len(kept)].copy_(kept)
        for state, start in self.again:
            state.rewind(start)
        for action in self.last:
            action()
        if any(state.windowed for state, _ in self.again):
            log.warning("a step was interrupted: tokens that left the windows of its caches are restored from codes")
