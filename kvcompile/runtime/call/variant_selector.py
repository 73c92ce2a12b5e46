"""Variant selector: FRESH if the stores are empty and attention needs the new tokens alone, else PAST."""

from __future__ import annotations

from collections.abc import Sequence

from kvcompile.errors import NotServed
from kvcompile.passes.rewrite.rewritten import Variant
from kvcompile.runtime.forms.call_arguments import Call
from kvcompile.runtime.forms.form import CacheForm
from kvcompile.runtime.store.state import CacheState


class VariantSelector:
    """Selects a variant for each call of one graph; ``calibrated``: indices of the caches with planes computed from queries."""

    def __init__(self, forms: Sequence[CacheForm], calibrated: Sequence[int], positions: bool) -> None:
        self.forms, self.calibrated, self.positions = forms, calibrated, positions
        self.written = tuple(index for index, form in enumerate(forms) if form.kind.written)
        self.created_only = bool(self.written) and all(forms[index].kind.created for index in self.written)
        late = any(item.plan.slot.write.late for form in forms for item in form.group.bindings)
        self.with_past = late or any(form.kind.extended for form in forms)
        self.past_only = self.with_past or not self.written or any(form.rolls for form in forms)

    def of(self, states: Sequence[CacheState], starts: Sequence[int], counts: Sequence[int], call: Call) -> Variant:
        """Return a call's variant: FRESH if no token is cached and attention reads only new tokens at positions 0, 1, 2, ...; else PAST.

        A single new token is PAST too, unless a plane is calibrated or the graph creates its caches. Raises NotServed for the first call of
        a cache created by the graph that neither variant can serve.
        """
        if self.past_only:
            return Variant.PAST
        beyond = any(self.forms[index].reach(call) > counts[index] for index in self.written)
        if beyond and not self.created_only:
            return Variant.PAST
        once = max(counts[index] for index in self.written) == 1 and not self.calibrated
        filled = any(states[index].length for index in self.written if self.forms[index].slots is None)
        if not self.created_only and (filled or once):
            return Variant.PAST
        if beyond or any(self.forms[index].sees(call) > counts[index] for index in self.written):
            if not self.created_only:
                return Variant.PAST
            raise self._not_served("attention over the first tokens of a new cache", "attention over slots that were not written yet")
        if not self.positions:
            return Variant.FRESH if not any(starts[index] for index in self.written) else Variant.PAST
        ordered = call.positions().ordered(call.read)
        if self.created_only and not ordered:
            raise self._not_served("the first tokens of a new cache at positions 0, 1, 2...", "other positions")
        return Variant.FRESH if ordered else Variant.PAST

    def _not_served(self, expected: str, found: str) -> NotServed:
        return NotServed(
            expected=expected, found=found, where=self.forms[0].group.where,
            todo="run this first call without kvcompile: the filled cache is adopted afterwards",
        )
