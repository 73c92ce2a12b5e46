"""Paged caches: attention gathers tokens by a block table, and new tokens go to any slots in any order.

The host does not know which slots hold tokens, so a paged cache's store holds all slots from its first call on, and its length is its
capacity.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvcompile.runtime.forms.call_arguments import Call
from kvcompile.runtime.forms.form import CacheForm, FastPathSlot
from kvcompile.runtime.store.codec import ENCODED_AT_ONCE
from kvcompile.runtime.store.dense_layout import tokens_of
from kvcompile.runtime.store.state import CacheState
from kvcompile.runtime.store.written_once import Earlier
from kvcompile.types import pages_for


class Paged(CacheForm):
    """A cache of blocks, written in place by a slot mapping and read by a block table."""

    rolls = True

    def count(self, call: Call) -> int:
        """Return the capacity: a call may write any slot."""
        return self.capacity(call)

    def prior(self, tensor: torch.Tensor, call: Call) -> int:
        return int(tensor.shape[self.token_dim])

    def adopt(
        self, tensor: torch.Tensor, state: CacheState, prior: int, call: Call, whole: Callable[[], None], padded: bool = True,
    ) -> int:
        """Encode all slots of the dense pool ``tensor`` into the stores of ``state``, a few blocks at a time; always return 0.

        No second dense copy is made, and the state's length becomes the capacity. ``CacheForm.adopt`` returns the number of encoded tokens,
        by which the caller warns of a cache that was filled without calibration. A pool needs no warning: schemes with planes computed from
        queries are refused for it when the graph is planned (``plan._check_table``). ``prior``, ``call``, ``whole`` and ``padded`` are
        unused.
        """
        for item in self.group.bindings:
            axes, spec, store = item.plan.slot.axes, item.plan.spec, state.stores[item.part]
            capacity, outer = axes.room(tensor.shape), axes.token_dim
            store.reserve(pages_for(capacity))
            places = capacity // max(tensor.shape[outer], 1)
            step, earlier = max(1, ENCODED_AT_ONCE // places), Earlier(tensor, item.part, store)
            for start in range(0, tensor.shape[outer], step):
                part = tensor.narrow(outer, start, min(step, tensor.shape[outer] - start))
                earlier.encode(store, tokens_of(part, axes, spec.heads, spec.head_dim), first=start * places)
            state.length = state.top = state.behind = capacity
        return 0

    def start(self, state: CacheState, call: Call) -> int:
        return 0

    def commit(self, state: CacheState, start: int, count: int, call: Call) -> None:
        state.overwrite(min(start + count, self.capacity(call)))
        self.stamp(state, call)

    def follows(self, counted: bool) -> bool:
        return True

    def row(self, count: int, call: Call) -> FastPathSlot:
        return super().row(0, call)
