"""Linear caches: every position has its own slot, in a tensor of fixed length or in one that grows with each call."""

from __future__ import annotations

import torch
from torch import fx

from kvcompile.errors import CacheBranched, PositionsNegative, PositionsUnknown
from kvcompile.passes.graph.dynamo import mark_dynamic
from kvcompile.passes.graph.shapes import value_of
from kvcompile.runtime.forms.call_arguments import Call
from kvcompile.runtime.forms.form import CacheForm
from kvcompile.runtime.forms.mask_extent import MaskExtent
from kvcompile.runtime.forms.slot_groups import Group
from kvcompile.runtime.handle.tensor import CompressedCache
from kvcompile.runtime.store import host_reads
from kvcompile.runtime.store.state import CacheState


class Linear(CacheForm):
    """A cache with the token at position p in slot p."""

    def __init__(self, group: Group, mask_extent: MaskExtent) -> None:
        super().__init__(group)
        self.mask_extent, self.ordered = mask_extent, self.kind.filled

    def reach(self, call: Call) -> int:
        """Return the number of tokens that attention reads even if fewer were written; includes masks' extents if known without a wait."""
        most = super().reach(call)
        known = self.group.root in call.ends or host_reads.free(value_of(self.group.root).device)
        return max(most, self.sees(call)) if known else most

    def sees(self, call: Call) -> int:
        """Return the end of the positions that queries see, if a mask may show positions after the newest token; otherwise 0.

        May wait for the device.
        """
        if not self.group.unbounded:
            return 0
        if (end := call.ends.get(self.group.root)) is None:
            end = call.ends[self.group.root] = self.mask_extent.end(self.group.root, call)
        return end

    def prior(self, tensor: torch.Tensor, call: Call) -> int:
        if not self.kind.filled:
            return int(tensor.shape[self.token_dim])
        position = self.write.position
        if position.index is None:
            return self._offset(position.offset, call)
        # Tokens that the mask shows to the new ones exist too, even if the write goes below some of them.
        return min(max(self._first(call), call.positions().visible(self.group.limits) - self.count(call)), self.capacity(call))

    def disordered(self, call: Call) -> str:
        if not self.ordered or self.write.position.index is None:
            return ""
        first, consecutive = call.positions().rows(self.write.position.index)
        if not consecutive:
            return "the tokens of a call are written at slots that are not consecutive, and a window needs them in order"
        apart = bool((first != first[0]).any())
        return "its rows continue at different positions, and a window needs rows of one length" if apart else ""

    def encoded(self, prior: int, call: Call) -> int:
        """Return the number of tokens to encode: those before the call, and later ones that attention reads (none with a window)."""
        if not self.kind.filled or self.windowed:
            return prior
        reached = min(max(self.reach(call), self.sees(call)), self.capacity(call))
        return reached if reached > prior + self.count(call) else prior

    def holds_more(self, tensor: torch.Tensor, kept: int) -> bool:
        places = tensor.shape[self.token_dim]
        return self.kind.filled and kept < places and bool(tensor.narrow(self.token_dim, kept, places - kept).any())

    def restarts(self, length: int, state: CacheState) -> bool:
        return self.kind.filled and not self.kind.in_place and not length and bool(state.length)

    def start(self, state: CacheState, call: Call) -> int:
        """Return the position of the first token; 0 for a cache that is never written.

        On a GPU a buffer in use is assumed to be written in order, so that the device need not be waited for.
        """
        if self.kind.extended:
            return self.length(state, call)
        if not self.kind.written:
            return 0
        if self.kind.created:
            return state.length
        position = self.write.position
        if position.index is None:
            return self._offset(position.offset, call)
        length = self._next(state, call)
        # On a GPU reading positions waits; needed if the new tokens would overflow the cache (full, or restarted), or a counter moved.
        return self._first(call) if self.looks(state, call) else length

    def looks(self, state: CacheState, call: Call) -> bool:
        """Return whether the host reads a call's positions: always on a CPU; elsewhere not for a buffer in use that continues in order."""
        if not (self.kind.filled and self.write.position.index is not None) or self.kind.extended:
            return False
        # Rows that come or go belong to other requests.
        regrouped = state.rows != self.rows(call)
        if regrouped or self._seen() or not state.followed_by(call.counters):
            return True
        length = self._next(state, call)
        return not length or length + self.count(call) > self.capacity(call)

    def _seen(self) -> bool:
        """Return whether the host knows a call's write positions without waiting: they follow from sizes, or are on the CPU."""
        index = self.write.position.index
        return index is None or host_reads.free(value_of(index).device)

    def _next(self, state: CacheState, call: Call) -> int:
        """Return the position after the token that was written last."""
        return state.behind if self.kind.in_place else self.length(state, call)

    def check_branch(self, state: CacheState, start: int, call: Call) -> None:
        if not self.kind.filled or self.kind.in_place:
            return
        length = self.length(state, call)
        if state.length > length and max(start, self.reach(call)) > length:
            raise CacheBranched(length=length)

    def span(self, state: CacheState, start: int, call: Call) -> int:
        count = self.count(call)
        if not self.kind.written or not self.looks(state, call):
            return count
        return max(count, call.positions().first_written(self.write.position.index)[2] + 1 - start)  # type: ignore[arg-type]

    def places(self, state: CacheState, call: Call) -> tuple[torch.Tensor, bool] | None:
        index = self.write.position.index
        if index is None or not self.ordered or not state.windowed or not self.looks(state, call):
            return None
        return call.positions().rows(index)

    def rows_start(self, start: int, call: Call) -> int | torch.Tensor:
        position = self.write.position
        if position.index is None or not position.rows or not self.kind.filled:
            return start
        return call.positions().values[position.index][:, 0]

    def commit(self, state: CacheState, start: int, count: int, call: Call) -> None:
        if not self.kind.fixed:
            state.advance(start, count)
            return
        end = min(start + count, self.capacity(call))
        if self.kind.in_place:
            state.overwrite(end)
            if not self._seen():
                # From now on tokens may be in any slot; unwritten ones are zero.
                state.held = self.capacity(call)
            self.stamp(state, call)
            return
        length = max(self.length(state, call), end)
        # If rows have their own positions, any token may have been overwritten.
        state.advance(0 if self.write.position.rows else start, count)
        state.length = length

    def returned(self, state: CacheState, shape: tuple[int, ...] | None, call: Call) -> CompressedCache:
        handle = super().returned(state, shape, call)
        if self.kind.grows:
            # The next call brings a longer one; without this mark, Dynamo would first compile for this length alone.
            mark_dynamic(handle, self.token_dim)
        return handle

    def follows(self, counted: bool) -> bool:
        return self.write.position.index is not None and (counted or not self._seen())

    def _first(self, call: Call) -> int:
        """Return the first new token's position in the row that is furthest.

        Raises PositionsNegative or PositionsUnknown if a position is outside of the cache.
        """
        first, least, most = call.positions().first_written(self.write.position.index)  # type: ignore[arg-type]
        capacity = self.capacity(call)
        if least < 0 or most >= capacity:
            # Dense tensors count negative positions from the end; other positions are invalid and must not reach the device.
            kind = PositionsNegative if -capacity <= least and most < capacity else PositionsUnknown
            raise kind(capacity=capacity, found=f"{least}..{most}", where=self.group.where)
        return first

    def _offset(self, offset: fx.Node | int, call: Call) -> int:
        return offset if isinstance(offset, int) else call.read(value_of(offset))
