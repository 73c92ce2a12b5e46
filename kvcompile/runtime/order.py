"""Order: whether the tokens of a call follow those that a window of exact tokens holds.

A window keeps its newest tokens exact and encodes a block once all of it is there. So it has no place for a token that leaves others
unwritten before it, and a write in the middle of a buffer loses what lies behind it. Neither matters to a store without a window. A call
that does the one, or attends to what the other lost (a sliding window that is written by hand as ``position % slots``, say), is served by
the dense cache.

Rows may have places of their own, where one of them took back tokens that another kept. Each row is asked by itself: its places have to
be the next ones of that row, one by one, or begin before them, where the window goes back in that row (``BoundGraph``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcompile.errors import Unsupported
from kvcompile.runtime.call import Call
from kvcompile.runtime.forms.form import CacheForm
from kvcompile.runtime.groups import Group
from kvcompile.runtime.sight import Sight
from kvcompile.runtime.state import CacheState


@dataclass(frozen=True)
class Broken:
    """The group whose window cannot serve a call, why, and whether tokens that attention sees would be lost: then no later call can."""

    group: Group
    why: str
    lost: bool


class TokenOrder:
    """Finds the cache whose window cannot take a call's tokens, by how far the graph's attentions see. May wait for the device."""

    def __init__(self, sight: Sight) -> None:
        self.sight = sight

    def broken(
        self, forms: Sequence[CacheForm], states: Sequence[CacheState], starts: Sequence[int], counts: Sequence[int], call: Call
    ) -> Broken | None:
        """Return the first group whose window cannot take a call's tokens, None where all can; raises Unsupported where some are missed."""
        for form, state, start, count in zip(forms, states, starts, counts, strict=True):
            if not (state.windowed and form.ordered):
                continue
            group, length = form.group, form.length(state, call)
            if broken := self._misplaced(form, state, call):
                return broken
            if start > length:
                why = f"tokens are written at position {start} of a cache that holds {length}, and a window takes tokens in their order"
                if state.top > length:
                    raise Unsupported(
                        expected="tokens in their order", found=f"{why}; those between are forgotten since a call went back behind them",
                        where=group.where, todo="write them again, or use a scheme without a window for this layer",
                    )
                return Broken(group, why, False)
            following = start >= state.behind and not form.goes_back(state, start, call)
            # A buffer in use is not waited for (see ``Linear.start``).
            end = max(form.reach(call), 0 if length else form.sees(call)) if following else self.sight.end(group.root, call)
            if end > start + count:
                return Broken(
                    group, f"attention sees {end} tokens after a write at positions {start} to {start + count - 1}, and a window "
                    + ("has nothing" if following else "forgets what lies") + " behind the tokens that were written last", True,
                )
        return None

    def _misplaced(self, form: CacheForm, state: CacheState, call: Call) -> Broken | None:
        """Return why a window cannot take the places that a call's tokens have in their rows, None where it can or nobody looks."""
        group, places = form.group, form.places(state, call)
        if places is None:
            return None
        first, consecutive = places
        if not consecutive:
            return Broken(group, "the tokens of a call are written at places that do not follow one another", False)
        if state.adaptive and len(first) > 1 and bool((first != first[0]).any()):
            scheme = group.first.plan.scheme.told()
            return Broken(group, f"rows go on at places of their own, and {scheme} has one length for all rows", False)
        ends = state.row_ends()
        ahead = first > ends
        if not isinstance(ends, torch.Tensor) or not bool(ahead.any()):
            return None
        row = int(ahead.nonzero()[0])
        found, held = int(first.expand_as(ends)[row]), int(ends[row])
        why = f"tokens of row {row} are written at position {found} of a cache that holds {held}, and a window takes tokens in their order"
        if state.tops is not None and bool((ahead & (state.tops > ends)).any()):
            raise Unsupported(
                expected="tokens in their order", found=f"{why}; those between are forgotten since a call went back behind them",
                where=group.where, todo="write them again, or use a scheme without a window for this layer",
            )
        return Broken(group, why, False)
