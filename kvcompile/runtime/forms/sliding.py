"""Sliding windows: caches of the newest tokens only, with the token at position p in slot p % slots."""

from __future__ import annotations

import torch

from kvcompile.errors import CacheStale, Unsupported
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.match.sites import SlidingCache
from kvcompile.runtime.forms.call_arguments import Call
from kvcompile.runtime.forms.form import CacheForm
from kvcompile.runtime.forms.slot_groups import Group
from kvcompile.runtime.store.state import CacheState


class Sliding(CacheForm):
    """A cache of the newest tokens, described by ``sliding``."""

    def __init__(self, group: Group, sliding: SlidingCache) -> None:
        super().__init__(group)
        self.sliding, self.slots, self.rolls = sliding, sliding.slots, not sliding.refilled

    def prior(self, tensor: torch.Tensor, call: Call) -> int:
        """Return the number of tokens in a dense cache tensor. Raises Unsupported if the window has fewer slots."""
        if self.kind.filled:
            prior = call.read(self.sliding.end) if not self.sliding.refilled else 0
        else:
            prior = int(tensor.shape[self.token_dim])
        self._check_held(prior)
        return prior

    def holds_more(self, tensor: torch.Tensor, kept: int) -> bool:
        places = tensor.shape[self.token_dim]
        if not self.kind.filled or kept >= places or self.sliding.refilled or self.sliding.slots < places:
            return False
        return bool(tensor.narrow(self.token_dim, kept, places - kept).any())

    def fit(self, state: CacheState, length: int, shown: int) -> tuple[CacheState, int]:
        if self.sliding.refilled:
            return (state, length) if state.slots == self.slots else (state.moved(0, 0, self.slots), 0)
        return super().fit(state, length, shown)

    def start(self, state: CacheState, call: Call) -> int:
        """Return the first token's position: after the past that it is joined to, or 0 in a window that each call refills.

        Raises CacheStale if that past was overwritten, Unsupported if the window has fewer slots than the call needs.
        """
        if self.kind.created:
            return state.length
        if self.sliding.refilled:
            return 0
        places = call.args[self.group.argument].shape[self.token_dim]  # type: ignore[index]
        length = self.length(state, call)
        start: int = length - min(length, places) + call.read(self.sliding.end)
        past = call.read(self.sliding.past)
        self._check_held(past + (self.count(call) == 1))
        if start - past < state.top - self.sliding.slots:
            raise CacheStale(length=start)
        return start

    def room(self, start: int, count: int, call: Call) -> tuple[int, int | None]:
        return min(start + count, self.sliding.slots), self.sliding.slots

    def add_cursor(self, starts: dict[int, int], start: int) -> None:
        """Record in ``starts``, by number of slots, the position ``start`` of the call's first token.

        A window that each call refills records none. Windows of one size share a cursor. Raises Unsupported if the first tokens of two of
        them fall into different slots.
        """
        if self.sliding.refilled:
            return
        slots = self.sliding.slots
        known = starts.setdefault(slots, start)
        if known % slots != start % slots:
            raise Unsupported(
                expected="the same number of tokens in all caches of one call that keep their newest ones", found=f"{known} and {start}",
                where=self.group.where, todo="reset the caches so that they start together",
            )

    def commit(self, state: CacheState, start: int, count: int, call: Call) -> None:
        if not self.sliding.refilled and not self.kind.in_place:
            state.advance(start, count)
            return
        state.epoch += 1
        state.length = state.behind = call.read(self.sliding.keep) if self.sliding.refilled else start + count
        state.top = state.length if self.sliding.refilled else max(state.top, state.length)
        self.stamp(state, call)

    def shown(self, state: CacheState, call: Call) -> int:
        return call.read(self.sliding.keep)

    def follows(self, counted: bool) -> bool:
        """Return whether every call's new tokens follow the cache's last one: they do if the call joins them to the whole cache tensor."""
        end = self.sliding.end
        return isinstance(end, int) and bool(end == value_of(self.group.root).shape[self.token_dim])

    def _check_held(self, tokens: int) -> None:
        """Raise Unsupported if the window has fewer than ``tokens`` slots."""
        if tokens > self.sliding.slots:
            raise Unsupported(
                expected=f"at most {self.sliding.slots} tokens in a cache that keeps its newest ones", found=f"{tokens}",
                where=self.group.where, todo="pass the cache that an earlier call returned, or start a new one",
            )
