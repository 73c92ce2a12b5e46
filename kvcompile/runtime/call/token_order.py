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
from kvcompile.runtime.forms.call_arguments import Call
from kvcompile.runtime.forms.form import CacheForm
from kvcompile.runtime.forms.mask_extent import MaskExtent
from kvcompile.runtime.forms.slot_groups import Group
from kvcompile.runtime.store.parked_rows import Counts, apart, ends_of, in_all, taking_part, tops_of
from kvcompile.runtime.store.state import CacheState


@dataclass(frozen=True)
class OutOfOrder:
    """The group whose window cannot serve a call, why, and whether tokens that attention sees would be lost: then no later call can."""

    group: Group
    why: str
    lost: bool


class TokenOrder:
    """Finds the cache whose window cannot take a call's tokens, by how far the graph's attentions see. May wait for the device."""

    def __init__(self, mask_extent: MaskExtent) -> None:
        self.mask_extent = mask_extent

    def out_of_order(
        self, forms: Sequence[CacheForm], states: Sequence[CacheState], starts: Sequence[int], counts: Sequence[int], call: Call
    ) -> OutOfOrder | None:
        """Return the first group whose window cannot take a call's tokens, None where all can; raises Unsupported where some are missed."""
        for form, state, start, count in zip(forms, states, starts, counts, strict=True):
            rows = form.rows(call)
            if why := apart(state, rows):
                return OutOfOrder(form.group, why, False)
            if not (state.windowed and form.ordered):
                continue
            held = self._groups(form, state, rows, call)
            if isinstance(held, OutOfOrder):
                return held
            for counts in held:
                if out_of_order := self._out_of_order(form, state, counts, start, count, call):
                    return out_of_order
        return None

    def _groups(self, form: CacheForm, state: CacheState, rows: int, call: Call) -> list[Counts] | OutOfOrder:
        """Return what is counted of the groups of rows that a call takes, as one where each row was asked for its own place."""
        if (places := form.places(state, call)) is not None and (out_of_order := self._misplaced(form, state, places, rows, call)):
            return out_of_order
        own, *others = taking_part(state, rows)
        held = [own._replace(length=form.length(state, call)), *others]
        return held if places is None else [in_all(held)]

    def _misplaced(
        self, form: CacheForm, state: CacheState, places: tuple[torch.Tensor, bool], rows: int, call: Call
    ) -> OutOfOrder | None:
        """Return why a window cannot take the places that a call's tokens have in their rows, None where it can.

        Raises TokensOutOfOrder where a row goes on that calls which nobody looked at have broken.
        """
        group, (first, consecutive) = form.group, places
        if not consecutive:
            return OutOfOrder(group, "the tokens of a call are written at places that do not follow one another", False)
        if state.adaptive and len(first) > 1 and bool((first != first[0]).any()):
            scheme = group.any_binding.plan.scheme.display_name()
            return OutOfOrder(group, f"rows go on at places of their own, and {scheme} has one length for all rows", False)
        for error in state.disorder(group.where) if state.windowed else ():
            row = int(str(error.facts["row"]))
            if row < rows and int(first[min(row, len(first) - 1)]):
                raise error
        if why := _shown_again(form, state, first, call):
            return OutOfOrder(group, why, False)
        ends = ends_of(state, rows)
        ahead = first > ends
        if not isinstance(ends, torch.Tensor) or not bool(ahead.any()):
            return None
        row = int(ahead.nonzero()[0])
        found, held = int(first.expand_as(ends)[row]), int(ends[row])
        why = f"tokens of row {row} are written at position {found} of a cache that holds {held}, and a window takes tokens in their order"
        if bool((ahead & (tops_of(state, rows) > ends)).any()):
            raise _forgotten(group, why)
        return OutOfOrder(group, why, False)

    def _out_of_order(self, form: CacheForm, state: CacheState, held: Counts, start: int, count: int, call: Call) -> OutOfOrder | None:
        """Return why rows that hold so much cannot take a call's tokens, None where they can; raises Unsupported where some are missed."""
        group, length = form.group, held.length
        if start > length:
            why = f"tokens are written at position {start} of a cache that holds {length}, and a window takes tokens in their order"
            if held.top > length:
                raise _forgotten(group, why)
            return OutOfOrder(group, why, False)
        following = start >= held.behind and not form.goes_back(state, start, call)
        # A buffer in use is not waited for, but where its positions are looked at.
        shown = form.sees(call) if not length or form.looks(state, call) else 0
        end = max(form.reach(call), shown) if following else self.mask_extent.end(group.root, call)
        if end <= start + count:
            return None
        return OutOfOrder(
            group, f"attention sees {end} tokens after a write at positions {start} to {start + count - 1}, and a window "
            + ("has nothing" if following else "forgets what lies") + " behind the tokens that were written last", True,
        )


def _shown_again(form: CacheForm, state: CacheState, first: torch.Tensor, call: Call) -> str:
    """Say which tokens a call's mask shows that an earlier one's made padding, "" for none; only of those that a dense cache would have."""
    begins = [store.left_padding for store in state.stores.values() if store.padding is not None]
    if not begins or begins[0] is None:
        return ""
    count = min(len(begins[0]), form.rows(call))
    kept, given = begins[0][:count], call.positions().left_padding(form.group.site)
    shown = torch.zeros_like(kept) if given is None else given[:count]
    again = ((first if len(first) == 1 else first[:count]) != 0) & (shown < kept)
    if not bool(again.any()):
        return ""
    row = int(again.nonzero()[0])
    return (
        f"row {row} was compressed by a call whose mask hid the tokens before position {int(kept[row])}, and now a mask shows them from "
        f"position {int(shown[row])} on"
    )


def _forgotten(group: Group, why: str) -> Unsupported:
    """Make the error for tokens that begin behind some that a window forgot when a call went back."""
    return Unsupported(
        expected="tokens in their order", found=f"{why}; those between are forgotten since a call went back behind them",
        where=group.where, todo="write them again, or use a scheme without a window for this layer",
    )
