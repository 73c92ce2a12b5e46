"""Token order: check that a call's tokens follow the tokens in a window of exact tokens.

A window keeps its newest tokens exact and encodes a block once it is complete. So it has no slot for a token that skips positions before
it, and a write in the middle of a buffer loses all later tokens. A store without a window accepts both. A call that skips positions, or
attends to lost tokens (for example in a sliding window that is written by hand at ``position % slots``), is served by the dense cache.

Rows may be at different positions, for example if draft tokens were rejected in one row and accepted in another. Each row is checked
separately: its positions must continue that row one by one, or begin earlier, and then the window of that row is rolled back
(``BoundGraph``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcompile.errors import TokensForgotten
from kvcompile.runtime.forms.call_arguments import Call
from kvcompile.runtime.forms.form import CacheForm
from kvcompile.runtime.forms.mask_extent import MaskExtent
from kvcompile.runtime.forms.slot_groups import Group
from kvcompile.runtime.store.parked_rows import Counts, apart, ends_of, in_all, taking_part, tops_of
from kvcompile.runtime.store.state import CacheState


@dataclass(frozen=True)
class OutOfOrder:
    """The group with a window that cannot serve a call, and the reason.

    ``lost``: tokens that attention sees would be lost, so that no later call can be served either.
    """

    group: Group
    why: str
    lost: bool


class TokenOrder:
    """Finds the cache with a window that cannot take a call's tokens, using the extent of the graph's masks. May wait for the device."""

    def __init__(self, mask_extent: MaskExtent) -> None:
        self.mask_extent = mask_extent

    def out_of_order(
        self, forms: Sequence[CacheForm], states: Sequence[CacheState], starts: Sequence[int], counts: Sequence[int], call: Call
    ) -> OutOfOrder | None:
        """Return the refusal of the first group that cannot take a call's tokens or rows; None if all can.

        Raises TokensForgotten if tokens before the call's were lost by a rollback, TokensOutOfOrder for a broken row.
        """
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
        """Return the token counts of each group of a call's rows (stored, parked, never written), or the refusal of the call.

        The groups are merged into one if the host reads the position of each row. Raises the errors of ``_misplaced``.
        """
        if (places := form.places(state, call)) is not None and (out_of_order := self._misplaced(form, state, places, rows, call)):
            return out_of_order
        own, *others = taking_part(state, rows)
        held = [own._replace(length=form.length(state, call)), *others]
        return held if places is None else [in_all(held)]

    def _misplaced(
        self, form: CacheForm, state: CacheState, places: tuple[torch.Tensor, bool], rows: int, call: Call
    ) -> OutOfOrder | None:
        """Return why a window cannot take a call's tokens at the positions ``places`` of their rows, as a refusal; None if it can.

        Raises TokensOutOfOrder if a row continues that earlier calls, whose positions the host did not read, have broken, and Unsupported
        if tokens before the call's were lost by a rollback.
        """
        group, (first, consecutive) = form.group, places
        if not consecutive:
            return OutOfOrder(group, "the tokens of a call are written at slots that are not consecutive", False)
        if state.adaptive and len(first) > 1 and bool((first != first[0]).any()):
            scheme = group.any_binding.plan.scheme.display_name()
            return OutOfOrder(group, f"rows continue at different positions, and {scheme} has one length for all rows", False)
        for error in state.disorder(group.where) if state.windowed else ():
            row = int(str(error.facts["row"]))
            if row < rows and int(first[min(row, len(first) - 1)]):
                raise error
        if why := _shown_again(form, state, first, call):
            return OutOfOrder(group, why, False)
        if seen_behind := self._seen_behind(form, first, call):
            return seen_behind
        ends = ends_of(state, rows)
        ahead = first > ends
        if not isinstance(ends, torch.Tensor) or not bool(ahead.any()):
            return None
        row = int(ahead.nonzero()[0])
        found, held = int(first.expand_as(ends)[row]), int(ends[row])
        why = f"tokens of row {row} are written at position {found} of a cache that holds {held}, and a window needs tokens in order"
        if bool((ahead & (tops_of(state, rows) > ends)).any()):
            raise _forgotten(group, why)
        return OutOfOrder(group, why, False)

    def _seen_behind(self, form: CacheForm, first: torch.Tensor, call: Call) -> OutOfOrder | None:
        """Return the refusal of rows at different positions, if masks show a row tokens after its newest one; None otherwise."""
        group = form.group
        if not group.unbounded or not bool((first != first[0]).any()):
            return None
        first, count, seen = first.cpu(), form.count(call), self.mask_extent.row_ends(group.root, call)
        behind = seen > first + count
        if not bool(behind.any()):
            return None
        row = int(behind.nonzero()[0])
        found, at = int(seen.expand_as(behind)[row]), int(first[row])
        return OutOfOrder(group, (
            f"attention sees {found} tokens of row {row} after a write at positions {at} to {at + count - 1}, and a window has no tokens "
            "after the token of a row that was written last"
        ), True)

    def _out_of_order(self, form: CacheForm, state: CacheState, held: Counts, start: int, count: int, call: Call) -> OutOfOrder | None:
        """Return why rows with the counts ``held`` cannot take ``count`` tokens from position ``start`` on, as a refusal; None if they can.

        Raises TokensForgotten if tokens before the call's were lost by a rollback.
        """
        group, length = form.group, held.length
        if start > length:
            why = f"tokens are written at position {start} of a cache that holds {length}, and a window needs tokens in order"
            if held.top > length:
                raise _forgotten(group, why)
            return OutOfOrder(group, why, False)
        following = start >= held.behind and not form.goes_back(state, start, call)
        # A buffer in use is not waited for, unless its positions are read anyway.
        shown = form.sees(call) if not length or form.looks(state, call) else 0
        end = max(form.reach(call), shown) if following else self.mask_extent.end(group.root, call)
        if end <= start + count:
            return None
        return OutOfOrder(
            group, f"attention sees {end} tokens after a write at positions {start} to {start + count - 1}, and a window "
            + ("has no tokens" if following else "drops all tokens") + " after the tokens that were written last", True,
        )


def _shown_again(form: CacheForm, state: CacheState, first: torch.Tensor, call: Call) -> str:
    """Return why a call cannot be served whose mask shows tokens that an earlier mask hid as padding; "" if it shows none.

    Only padding that arrived in a dense cache is checked: a dense cache would still hold those tokens.
    """
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


def _forgotten(group: Group, why: str) -> TokensForgotten:
    """Return the error for a call after tokens that a rollback dropped from a window; ``why``: the gap in the positions."""
    return TokensForgotten(
        expected="tokens in their order", found=f"{why}; the tokens between them were dropped when a call went back",
        where=group.where, todo="write them again, or use a scheme without a window for this layer",
    )
