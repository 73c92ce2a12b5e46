"""The form of a cache at run time: one cache tensor of a graph, and all that a call does with it on the host."""

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


@dataclass(frozen=True)
class FastPathSlot:
    """One cache tensor of a steady step: its argument, capacity and new tokens, and the slots of its sliding window, 0 for none.

    ``written``: whether the graph writes it, so that the call's counters say where its tokens go.
    """

    argument: int
    capacity: int
    count: int
    slots: int
    written: bool = True


class CacheForm(abc.ABC):
    """One cache tensor of a graph; a subclass knows where tokens lie in it, and so where a call begins and what it leaves."""

    slots: int | None = None
    """The number of slots that tokens of a sliding window go around in; None where every position has its own."""
    rolls: bool = False
    """Whether attention reads tokens of earlier calls even where the host counts none."""

    ordered: bool = False
    """Whether a window of exact tokens takes this cache's tokens in their order only."""

    def __init__(self, group: Group) -> None:
        self.group, self.kind = group, group.kind.facts
        slot = group.any_binding.plan.slot
        self.axes, self.write, self.token_dim = slot.axes, slot.write, slot.axes.token_dim
        self.growing = group.any_binding.plan.growing
        self.windowed = any(item.plan.in_order for item in group.bindings)

    # --- sizes -----------------------------------------------------------------------------------

    def capacity(self, call: Call) -> int:
        """Count the places for tokens in the cache tensor."""
        shape = value_of(self.group.root).shape
        return math.prod(call.read(shape[dim]) for dim in self.axes.token_dims)

    def reach(self, call: Call) -> int:
        """Count the tokens that attention reads whatever was written."""
        return max(call.read(size) for size in self.group.reach)

    def sees(self, call: Call) -> int:
        """Count the places up to the last that a query sees, 0 where that is never behind the newest token. May wait for the device."""
        del call
        return 0

    def count(self, call: Call) -> int:
        """Count the tokens that a call may write."""
        return call.read(self.write.count)

    def rows(self, call: Call) -> int:
        """Count the batch rows that a call brings of its cache tensor."""
        # Of a tensor that came in, whose sizes are numbers; symbolic ones would be evaluated in every step.
        tensor = value_of(self.group.root) if self.group.argument is None else call.args[self.group.argument]
        return call.read(self.group.any_binding.plan.slot.rows(tensor.shape))

    def length(self, state: CacheState, call: Call) -> int:
        """Count the tokens of a call's cache tensor: an older tensor of a state that has gone on since holds fewer."""
        tensor = call.args[self.group.argument] if self.group.argument is not None else None
        if not handles.is_handle(tensor):
            return state.length
        # Parked rows may be longer than those of the call.
        return min(tensor._length, state.length) if self.kind.in_place else tensor._length

    # --- adopting a dense cache ------------------------------------------------------------------

    @abc.abstractmethod
    def prior(self, tensor: torch.Tensor, call: Call) -> int:
        """Count the tokens that a dense cache tensor holds before this call's write."""

    def encoded(self, prior: int, call: Call) -> int:
        """Count the tokens of a dense cache tensor that are encoded; ``prior`` of them were there before the call."""
        del call
        return prior

    def holds_more(self, tensor: torch.Tensor, kept: int) -> bool:
        """Whether a dense cache tensor holds anything behind its first ``kept`` tokens. Waits for the device."""
        del tensor, kept
        return False

    def adopt(
        self, tensor: torch.Tensor, state: CacheState, prior: int, call: Call, whole: Callable[[], None], padded: bool = True,
    ) -> int:
        """Encode a dense cache tensor into a new state; return how many of its tokens. ``whole`` is called where all of them are.

        ``padded``: its rows are those of the call, whose masks say what of them is padding.
        Raises Unsupported where a window would have to take more than the ``prior`` tokens.
        """
        places = tensor.shape[self.token_dim]
        capacity = places if self.kind.filled else None
        kept = self.encoded(prior, call)
        if self.holds_more(tensor, kept):
            if self.windowed:
                raise Unsupported(
                    expected="a cache of zeros behind its tokens, as a window takes tokens in their order",
                    found=f"values behind its first {kept} tokens", where=self.group.where,
                    todo="make the cache of zeros, or use a scheme without a window for this layer",
                )
            whole()
            kept = places
        for item in self.group.bindings if kept else ():
            store = state.stores[item.part]
            store.reserve(state.growth.pages(kept, capacity), kept)
            dense = tokens_of(tensor, item.plan.slot.axes, item.plan.spec.heads, item.plan.spec.head_dim)
            padding = call.positions().left_padding(self.group.site) if padded and item.plan.knows_padding else None
            Earlier(tensor, item.part, store).encode(store, dense[:, :, :kept], padding)
        state.length = state.top = state.behind = prior
        state.held = kept
        return kept

    def disordered(self, call: Call) -> str:
        """Say why a window cannot begin with what a call finds and writes in a dense cache tensor, "" where it can."""
        del call
        return ""

    # --- a call ----------------------------------------------------------------------------------

    def check_layout(self, state: CacheState) -> None:
        """Raise where a cache that was filled as rows of tokens is now read by a block table, or the other way round."""
        held = next(iter(state.axes.values()))
        if held.paged == self.axes.paged and (not held.paged or held.labels == self.axes.labels):
            return
        raise NotServed(
            expected="a cache that every compiled call reads in one way, as it lies or through a gather", found="both",
            where=self.group.where, todo="read it through the gather in every call, or give this call a cache of its own",
        )

    def restarts(self, length: int, state: CacheState) -> bool:
        """Whether a cache tensor of ``length`` tokens begins a sequence that has nothing in common with its state's."""
        del length, state
        return False

    def fit(self, state: CacheState, length: int, shown: int) -> tuple[CacheState, int]:
        """Return the state whose tokens lie where this form looks for them, and its length; see ``readdressed``."""
        return readdressed(state, self.slots, length, shown)

    @abc.abstractmethod
    def start(self, state: CacheState, call: Call) -> int:
        """Return the position of this call's first token."""

    def check_branch(self, state: CacheState, start: int, call: Call) -> None:
        """Raise where an older tensor would see, as unwritten zeros, places that a newer one has written since."""
        del state, start, call

    def span(self, state: CacheState, start: int, call: Call) -> int:
        """Count the places from ``start`` to the last one that a call writes: its tokens, and gaps between them where the host looks."""
        del state, start
        return self.count(call)

    def looks(self, state: CacheState, call: Call) -> bool:
        """Whether the host looks at a call's positions, which may wait for the device."""
        del state, call
        return False

    def places(self, state: CacheState, call: Call) -> tuple[torch.Tensor, bool] | None:
        """Return each row's first position, int64 [1 or B], and whether its others follow; None where no window asks or nobody looks."""
        del state, call
        return None

    def goes_back(self, state: CacheState, start: int, call: Call) -> bool:
        """Whether a row of this call begins before the end of what a window holds of it."""
        if start < state.behind or (places := self.places(state, call)) is None:
            return start < state.behind
        return bool((places[0] < ends_of(state, self.rows(call))).any())

    def rows_start(self, start: int, call: Call) -> int | torch.Tensor:
        """Return where this call's tokens go in each row: ``start``, or int64 [B] where rows have positions of their own."""
        del call
        return start

    def room(self, start: int, count: int, call: Call) -> tuple[int, int | None]:
        """Return the tokens that a call needs room for, and the most there can be; raises CacheFull."""
        needed = max(start + count, self.reach(call))
        if not self.kind.fixed:
            return needed, None
        capacity = self.capacity(call)
        if count > capacity:
            raise CacheFull(needed=start + count, capacity=capacity, where=self.group.where)
        return min(needed, capacity), capacity

    def add_cursor(self, starts: dict[int, int], start: int) -> None:
        """Note where the next token of a sliding window goes, by its number of slots."""
        del starts, start

    @abc.abstractmethod
    def commit(self, state: CacheState, start: int, count: int, call: Call) -> None:
        """Count ``count`` new tokens from position ``start`` on."""

    def stamp(self, state: CacheState, call: Call) -> None:
        """Let the tensor that was written in place show all of its state."""
        if self.group.argument is not None:
            tensor = call.args[self.group.argument]
            tensor._length, tensor._epoch = state.longest, state.epoch

    def shown(self, state: CacheState, call: Call) -> int:
        """Count the tokens of the longer tensor that a call returns."""
        del call
        return state.length

    def returned(self, state: CacheState, shape: tuple[int, ...] | None, call: Call) -> handles.CompressedCache:
        """Make the cache tensor that a call returns; ``shape`` is that of the one it came with, None where it came with none."""
        fake = value_of(self.group.root)
        if shape is None:
            shape = tuple(call.read(size) for size in fake.shape)
        if self.kind.grows:
            length = self.shown(state, call)
            shape = tuple(length if dim == self.token_dim else size for dim, size in enumerate(shape))
        return handles.make(state, shape, fake.dtype, fake.device)

    # --- steady steps ----------------------------------------------------------------------------

    def takes_fast_path(self, counted: bool) -> bool:
        """Whether later steps differ from the first in nothing but lengths; ``counted``: positions come from the graph's own counters."""
        numbers = [self.write.count, value_of(self.group.root).shape[self.token_dim], *self.group.reach]
        numbers += [self.write.first_rows.count] if self.write.first_rows is not None else []
        in_place = self.kind.filled and self.kind.in_place
        return in_place and all(isinstance(number, int) for number in numbers) and self.follows(counted)

    @abc.abstractmethod
    def follows(self, counted: bool) -> bool:
        """Whether the host takes a call's tokens to follow those of the call before, without a look at positions."""

    def row(self, count: int, call: Call) -> FastPathSlot:
        """Describe the cache tensor for steady steps of ``count`` tokens."""
        return FastPathSlot(self.group.argument or 0, self.capacity(call), count, self.slots or 0, self.kind.written)
