"""Form: the base class of cache forms, for one cache tensor of a graph and all host work of a call on it."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcompile.errors import CacheFull, NotServed, Unsupported
from kvcompile.passes.graph.shapes import value_of
from kvcompile.runtime.forms.call_arguments import Call
from kvcompile.runtime.forms.slot_groups import Group
from kvcompile.runtime.handle import tensor as handles
from kvcompile.runtime.store.dense_layout import tokens_of
from kvcompile.runtime.store.parked_rows import ends_of
from kvcompile.runtime.store.state import CacheState
from kvcompile.runtime.store.token_slots import readdressed
from kvcompile.runtime.store.written_once import Earlier
from kvcompile.types import pages_for


@dataclass(frozen=True)
class FastPathSlot:
    """One cache tensor on the decode fast path: its argument index, capacity, new tokens, and slots of its sliding window (0: none).

    ``written``: whether the graph writes it, so that its positions depend on the call's counters.
    """

    argument: int
    capacity: int
    count: int
    slots: int
    written: bool = True


class CacheForm(abc.ABC):
    """One cache tensor of a graph; a subclass defines its mapping from positions to slots, its start in a call and its state afterwards."""

    slots: int | None = None
    """Number of slots of a sliding window; None if every position has its own slot."""
    rolls: bool = False
    """Whether attention reads earlier tokens even if the host counts none."""

    ordered: bool = False
    """Whether a window of exact tokens needs this cache's tokens in order."""

    def __init__(self, group: Group) -> None:
        self.group, self.kind = group, group.kind.facts
        slot = group.any_binding.plan.slot
        self.axes, self.write, self.token_dim = slot.axes, slot.write, slot.axes.token_dim
        self.growing = group.any_binding.plan.growing
        self.windowed = any(item.plan.in_order for item in group.bindings)

    # --- sizes -----------------------------------------------------------------------------------

    def capacity(self, call: Call) -> int:
        """Return the number of slots of the cache tensor."""
        shape = value_of(self.group.root).shape
        return math.prod(call.read(shape[dim]) for dim in self.axes.token_dims)

    def reach(self, call: Call) -> int:
        """Return how many tokens attention reads even if fewer were written, such as a buffer's length; 0 if positions limit them."""
        return max(call.read(size) for size in self.group.reach)

    def sees(self, call: Call) -> int:
        """Return the end of the positions that queries see, if a mask may show positions after the newest token; otherwise 0.

        May wait for the device.
        """
        del call
        return 0

    def count(self, call: Call) -> int:
        """Return the number of tokens that a call may write."""
        return call.read(self.write.count)

    def rows(self, call: Call) -> int:
        """Return the number of batch rows that a call brings."""
        # Read from the argument, whose sizes are ints; symbolic sizes would be evaluated in every step.
        tensor = value_of(self.group.root) if self.group.argument is None else call.args[self.group.argument]
        return call.read(self.group.any_binding.plan.slot.rows(tensor.shape))

    def length(self, state: CacheState, call: Call) -> int:
        """Return the length of a call's cache tensor; an older tensor of a state that has advanced since is shorter."""
        tensor = call.args[self.group.argument] if self.group.argument is not None else None
        if not handles.is_handle(tensor):
            return state.length
        # Parked rows may be longer than the rows of the call.
        return min(tensor._length, state.length) if self.kind.in_place else tensor._length

    # --- adopting a dense cache ------------------------------------------------------------------

    @abc.abstractmethod
    def prior(self, tensor: torch.Tensor, call: Call) -> int:
        """Return the number of tokens in a dense cache tensor before this call's write."""

    def encoded(self, prior: int, call: Call) -> int:
        """Return the number of tokens of a dense cache tensor to encode; ``prior`` of them precede the call."""
        del call
        return prior

    def holds_more(self, tensor: torch.Tensor, kept: int) -> bool:
        """Return whether a dense cache tensor has nonzero values after its first ``kept`` tokens. Waits for the device."""
        del tensor, kept
        return False

    def adopt(
        self, tensor: torch.Tensor, state: CacheState, prior: int, call: Call, whole: Callable[[], None], padded: bool = True,
    ) -> int:
        """Encode a dense cache tensor into a new state; return the number of encoded tokens, by which callers warn of missed calibration.

        ``prior``: the number of tokens before the call. ``whole``: called if all slots are encoded. ``padded``: the tensor's rows are those
        of the call, so its masks define their padding. Raises Unsupported if a window would have to hold more than the ``prior`` tokens.
        """
        places = tensor.shape[self.token_dim]
        capacity = places if self.kind.filled else None
        kept = self.encoded(prior, call)
        if self.holds_more(tensor, kept):
            if self.windowed:
                raise Unsupported(
                    expected="a cache that is zero after its tokens, as a window needs tokens in order",
                    found=f"nonzero values after its first {kept} tokens", where=self.group.where,
                    todo="make the cache of zeros, or use a scheme without a window for this layer",
                )
            whole()
            kept = places
        for item in self.group.bindings if kept else ():
            store = state.stores[item.part]
            store.reserve(pages_for(kept) if self.growing.still else state.growth.pages(kept, capacity), kept)
            dense = tokens_of(tensor, item.plan.slot.axes, item.plan.spec.heads, item.plan.spec.head_dim)
            padding = call.positions().left_padding(self.group.site) if padded and item.plan.knows_padding else None
            Earlier(tensor, item.part, store).encode(store, dense[:, :, :kept], padding)
        state.length = state.top = state.behind = prior
        state.held = kept
        return kept

    def disordered(self, call: Call) -> str:
        """Return why a window cannot start with the tokens that a call finds in, and writes to, a dense cache tensor; "" if it can."""
        del call
        return ""

    # --- a call ----------------------------------------------------------------------------------

    def check_layout(self, state: CacheState) -> None:
        """Raise NotServed if a cache that was stored as rows of tokens is now read by a block table, or vice versa."""
        held = next(iter(state.axes.values()))
        if held.paged == self.axes.paged and (not held.paged or held.labels == self.axes.labels):
            return
        raise NotServed(
            expected="a cache that every compiled call reads in one way, contiguously or through a gather", found="both",
            where=self.group.where, todo="read it through the gather in every call, or give this call a cache of its own",
        )

    def restarts(self, length: int, state: CacheState) -> bool:
        """Return whether a cache tensor of ``length`` tokens starts a new sequence, unrelated to its state."""
        del length, state
        return False

    def fit(self, state: CacheState, length: int, shown: int) -> tuple[CacheState, int]:
        """Return (state, length) for a tensor that shows the last ``shown`` of ``length`` tokens, each in this form's slot for it.

        If the number of slots has changed, it is a new state with the tokens moved (``readdressed``).
        """
        return readdressed(state, self.slots, length, shown)

    @abc.abstractmethod
    def start(self, state: CacheState, call: Call) -> int:
        """Return the position of this call's first token."""

    def check_branch(self, state: CacheState, start: int, call: Call) -> None:
        """Raise CacheBranched if a tensor would show positions as unwritten zeros that a newer tensor of the same cache has written."""
        del state, start, call

    def span(self, state: CacheState, start: int, call: Call) -> int:
        """Return the number of positions from ``start`` to the last one written.

        It is the number of new tokens, or more if the host reads positions and the call skips some.
        """
        del state, start
        return self.count(call)

    def looks(self, state: CacheState, call: Call) -> bool:
        """Return whether the host reads the positions of a call; reading them may wait for the device."""
        del state, call
        return False

    def places(self, state: CacheState, call: Call) -> tuple[torch.Tensor, bool] | None:
        """Return (each row's first position, int64 [1 or B], whether its other positions follow consecutively).

        None if no window needs them, or the host does not read positions.
        """
        del state, call
        return None

    def goes_back(self, state: CacheState, start: int, call: Call) -> bool:
        """Return whether a row of this call starts before the end of its tokens in a window."""
        if start < state.behind or (places := self.places(state, call)) is None:
            return start < state.behind
        return bool((places[0] < ends_of(state, self.rows(call))).any())

    def rows_start(self, start: int, call: Call) -> int | torch.Tensor:
        """Return the position of this call's first token in each row: ``start``, or int64 [B] if rows have their own positions."""
        del call
        return start

    def room(self, start: int, count: int, call: Call) -> tuple[int, int | None]:
        """Return (tokens that a call needs room for, capacity or None). Raises CacheFull for more new tokens than a fixed capacity."""
        needed = max(start + count, self.reach(call))
        if not self.kind.fixed:
            return needed, None
        capacity = self.capacity(call)
        if count > capacity:
            raise CacheFull(needed=start + count, capacity=capacity, where=self.group.where)
        return min(needed, capacity), capacity

    def add_cursor(self, starts: dict[int, int], start: int) -> None:
        """Record the position ``start`` of a call's first token in ``starts``, by number of slots; only sliding windows do."""
        del starts, start

    @abc.abstractmethod
    def commit(self, state: CacheState, start: int, count: int, call: Call) -> None:
        """Record ``count`` new tokens from position ``start`` on in the state."""

    def stamp(self, state: CacheState, call: Call) -> None:
        """Set the length and epoch of the written tensor's handle to those of the state."""
        if self.group.argument is not None:
            tensor = call.args[self.group.argument]
            tensor._length, tensor._epoch = state.longest, state.epoch

    def shown(self, state: CacheState, call: Call) -> int:
        """Return the number of tokens in the tensor that a call returns for a growing cache, the new tokens included."""
        del call
        return state.length

    def returned(self, state: CacheState, shape: tuple[int, ...] | None, call: Call) -> handles.CompressedCache:
        """Return the handle for the cache tensor that a call returns; ``shape``: that of its argument, None without an argument."""
        fake = value_of(self.group.root)
        if shape is None:
            shape = tuple(call.read(size) for size in fake.shape)
        if self.kind.grows:
            length = self.shown(state, call)
            shape = tuple(length if dim == self.token_dim else size for dim, size in enumerate(shape))
        return handles.make(state, shape, fake.dtype, fake.device)

    # --- decode fast path ----------------------------------------------------------------------------

    def takes_fast_path(self, counted: bool) -> bool:
        """Return whether all steps after a fully checked one differ from it only in the lengths of caches.

        ``counted``: positions depend on the graph's own counters alone.
        """
        numbers = [self.write.count, value_of(self.group.root).shape[self.token_dim], *self.group.reach]
        numbers += [self.write.first_rows.count] if self.write.first_rows is not None else []
        in_place = self.kind.filled and self.kind.in_place
        return in_place and all(isinstance(number, int) for number in numbers) and self.follows(counted)

    @abc.abstractmethod
    def follows(self, counted: bool) -> bool:
        """Return whether the host may assume that a call's tokens follow the previous call's, without reading positions.

        ``counted``: positions depend on the graph's own counters alone.
        """

    def row(self, count: int, call: Call) -> FastPathSlot:
        """Return the cache tensor's ``FastPathSlot`` for steps of ``count`` new tokens."""
        return FastPathSlot(self.group.argument or 0, self.capacity(call), count, self.slots or 0, self.kind.written)
