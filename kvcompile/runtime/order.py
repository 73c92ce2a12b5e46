"""Order: whether the tokens of a call follow those that a window of exact tokens holds.

A window keeps its newest tokens exact and encodes a block once all of it is there. So it has no place for a token that leaves others
unwritten before it, and a write in the middle of a buffer loses what lies behind it. Neither matters to a store without a window. A call
that does the one, or attends to what the other lost (a sliding window that is written by hand as ``position % slots``, say), is served by
the dense cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
            if start > length:
                why = f"tokens are written at position {start} of a cache that holds {length}, and a window takes tokens in their order"
                if state.top > length:
                    raise Unsupported(
                        expected="tokens in their order", found=f"{why}; those between are forgotten since a call went back behind them",
                        where=group.where, todo="write them again, or use a scheme without a window for this layer",
                    )
                return Broken(group, why, False)
            following = start >= state.behind
            # A buffer in use is not waited for (see ``Linear.start``).
            end = max(form.reach(call), 0 if length else form.sees(call)) if following else self.sight.end(group.root, call)
            if end > start + count:
                return Broken(
                    group, f"attention sees {end} tokens after a write at positions {start} to {start + count - 1}, and a window "
                    + ("has nothing" if following else "forgets what lies") + " behind the tokens that were written last", True,
                )
        return None
