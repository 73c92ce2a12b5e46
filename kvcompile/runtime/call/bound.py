"""Bound graph: find the stores of the caller's cache tensors, select the variant, call the compiled code, record the tokens.

All work here in a decode step is host bookkeeping on ints. The host waits for the device only outside of decode steps: to adopt a
cache that arrives filled, and for the first write into an empty one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.errors import CallRefused, LengthsDiffer, NotCompiled, NotServed
from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.dynamo import DisableTorchFunctionSubclass
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.plan.plan import Growing, SitePlan
from kvcompile.passes.rewrite.rewritten import Rewritten, Variant
from kvcompile.runtime.call.calibration import UncalibratedWarner, calibrated
from kvcompile.runtime.call.dense_calls import DenseCalls, warn_all_encoded
from kvcompile.runtime.call.fast_path import DecodeFastPath
from kvcompile.runtime.call.reallocation import Reallocation
from kvcompile.runtime.call.states import States
from kvcompile.runtime.call.token_order import OutOfOrder, TokenOrder
from kvcompile.runtime.call.undo import Undo
from kvcompile.runtime.call.variant_selector import VariantSelector
from kvcompile.runtime.forms.call_arguments import Call, SizeReader
from kvcompile.runtime.forms.form import CacheForm
from kvcompile.runtime.forms.positions import PositionReader, TokenPositions
from kvcompile.runtime.forms.slot_groups import Group
from kvcompile.runtime.handle import tensor as handles
from kvcompile.runtime.store.counters import CounterSnapshot
from kvcompile.runtime.store.growth import Growth
from kvcompile.runtime.store.live_caches import LiveCaches
from kvcompile.runtime.store.parked_rows import take_rows
from kvcompile.runtime.store.state import CacheState
from kvcompile.runtime.store.token_slots import LEAST_PAGES, cursors
from kvcompile.types import pages_for


@dataclass
class _CallStates:
    """The states of a call's cache tensors, the position and number of each one's new tokens, and the undo of the call's writes."""

    states: list[CacheState]
    starts: list[int]
    counts: list[int]
    undo: Undo


class BoundGraph:
    """A compiled graph with its stores bound at run time: the callable that Dynamo gets."""

    def __init__(
        self, captured: Captured, forms: tuple[CacheForm, ...], pairs: tuple[tuple[int, int], ...],
        compile_variant: Callable[[Variant], tuple[Rewritten, Callable[..., Any]]], positions: PositionReader | None,
        growth: Growth, live: LiveCaches, decode_arguments: tuple[int, ...], densified: Mapping[int, str], order: TokenOrder,
        sites: Sequence[SitePlan],
    ) -> None:
        self.captured, self.forms, self.pairs = captured, forms, pairs
        self.compile_variant, self.positions, self.growth = compile_variant, positions, growth
        self.decode_arguments, self.densified, self.order = decode_arguments, densified, order
        self.variants: dict[Variant, tuple[Rewritten, Callable[..., Any]]] = {}
        self.uncompiled: set[Variant] = set()
        self.sizes = SizeReader(captured)
        self.fast_path: DecodeFastPath | None = None
        self.calibration = UncalibratedWarner()
        self.states = States(captured, forms, growth, live, self.calibration)
        self.ropes = tuple(self.states.ropes.values())
        # Only buffers with positions that the host does not follow step by step: from the graph's own counters, as long as no other code
        # moves them, or from positions on a device, which would have to be waited for (see ``Linear.start``).
        self.counters = positions.counters if positions is not None else ()
        counted = positions is not None and positions.counted
        self.trusted = all(form.takes_fast_path(counted and order.mask_extent.comes_from(form.group, self.counters)) for form in forms)
        self.returned = tuple(
            (output, form.group.argument) for form in forms if form.kind.in_place and form.group.argument is not None
            for output in form.group.outputs
        )
        self.calibrated = tuple(index for index, form in enumerate(forms) if form.kind.written and calibrated(form.group))
        self.choice = VariantSelector(forms, self.calibrated, positions is not None)
        self.reallocation = Reallocation(forms, sites)
        self.undone = any(form.windowed or form.slots is not None for form in forms)
        self.dense: DenseCalls | None = None  # a trial has none

    @property
    def groups(self) -> tuple[Group, ...]:
        """The graph's slots, grouped by cache tensor."""
        return tuple(form.group for form in self.forms)

    @property
    def created_only(self) -> bool:
        """Whether this graph creates every cache that it writes."""
        return self.choice.created_only

    @property
    def with_past(self) -> bool:
        """Whether attention always reads tokens of earlier calls."""
        return self.choice.with_past

    def __call__(self, *args: Any) -> Any:
        with DisableTorchFunctionSubclass():
            return self._run(args)

    def _run(self, args: tuple[Any, ...]) -> Any:
        if self.decode_arguments:
            args = tuple(handles.densify(args, self.decode_arguments, self.densified))
        if not all(reader.unchanged(args) for reader in self.ropes):
            self.fast_path = None
        counters = tuple(args[index] for index in self.counters)
        if self.fast_path is not None and (states := self.fast_path.ready(args, counters)) is not None:
            return self._fast_step(self.fast_path, states, args)
        for form in self.forms:
            if form.group.argument is not None:
                handles.refresh_argument(args[form.group.argument])
        shapes = [tuple(args[form.group.argument].shape) if form.group.argument is not None else None for form in self.forms]
        positions = self.positions.of_call(args) if self.positions is not None else functools.partial(TokenPositions, {})
        call = Call(args, self.sizes, positions, counters=counters)
        try:
            if self.dense is not None and (unrewritten := self.dense.results(self.forms, call, self.densified)) is not None:
                return unrewritten
            step = self._prepare(call)
            out_of_order = self.order.out_of_order(self.forms, step.states, step.starts, step.counts, call)
            if out_of_order is not None and self.dense is not None:
                return self.dense.out_of_order(self.forms, args, out_of_order, self.densified)
            self._take_rows(step, call)
            self._go_back(step, call)
        except CallRefused as refused:
            if self.dense is None:
                raise
            return self.dense.refused(self.forms, args, refused, self.densified)
        try:
            with step.undo:
                rewritten, results = self._compute(step, call)
        except (NotCompiled, CallRefused) as error:
            if self.dense is None:
                raise
            if isinstance(error, CallRefused) and not isinstance(error, NotServed):
                return self.dense.refused(self.forms, args, error, self.densified)
            # A cache whose first call cannot be served is adopted by the next call, unless PAST is the variant that cannot be compiled.
            out_of_order = OutOfOrder(
                self.forms[0].group, str(error), not isinstance(error, CallRefused) and Variant.PAST in self.uncompiled
            )
            return self.dense.out_of_order(self.forms, args, out_of_order, self.densified)
        self._mark_checked(step, call, rewritten)
        given = self._commit(step, call, shapes, results, rewritten)
        self.reallocation.after(step.states)
        return given

    def _fast_step(self, path: DecodeFastPath, states: Sequence[CacheState], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run a decode step that needs no checks and no new pages, by the compiled code of the variant PAST; return the graph's results."""
        rewritten, compiled = self.variants[Variant.PAST]
        planes, slots = path.planes(states), path.cursors(states, rewritten.cursors)
        with Undo() as undo:
            if self.undone:
                undo.keep(states, [state.behind for state in states], [row.count for row in path.rows])
            sizes = [self.sizes.value(size, args) for size in rewritten.sizes]
            results = compiled(*[args[index] for index in rewritten.kept], *planes, *slots, *sizes)
        path.commit(states, args, CounterSnapshot([args[index] for index in self.counters]))
        self.reallocation.after(states)
        return self._results(results, self._given_back(args), rewritten)

    def _prepare(self, call: Call) -> _CallStates:
        """Return the state of every cache tensor, with the position and number of this call's tokens.

        Raises LengthsDiffer if new keys and values start at different positions.
        """
        step = _CallStates([], [], [], Undo())
        for form in self.forms:
            state = self.states.find(form, call, self._say_all_encoded)
            start = form.start(state, call)
            count = form.span(state, start, call)
            form.check_branch(state, start, call)
            step.states.append(state)
            step.starts.append(start)
            step.counts.append(count)
        for key, value in self.pairs:
            if step.starts[key] != step.starts[value]:
                raise LengthsDiffer(keys=step.starts[key], values=step.starts[value], where=self.forms[key].group.where)
        return step

    def _say_all_encoded(self, form: CacheForm, tensor: torch.Tensor) -> None:
        """Warn, unless in a trial, that a dense cache is encoded over its whole length, unwritten positions included."""
        if self.dense is not None:
            warn_all_encoded(form, tensor)

    def _take_rows(self, step: _CallStates, call: Call) -> None:
        """Make the stores of every state hold the batch rows of this call: park further rows, or join parked rows (``take_rows``)."""
        with step.undo:
            for form, state in zip(self.forms, step.states, strict=True):
                parting = take_rows(state, form.rows(call))
                if parting is not None:
                    step.undo.then(parting)

    def _go_back(self, step: _CallStates, call: Call) -> None:
        """Roll every state back to the start of this call's tokens, or none of them. Raises WindowPassed if a window has lost them."""
        with step.undo:
            for form, state, start, count in zip(self.forms, step.states, step.starts, step.counts, strict=True):
                if form.kind.written and form.goes_back(state, start, call):
                    # Ahead of the undo, which puts back the planes that it finds.
                    state.own()
                    step.undo.whole(state, start, count)
                    state.rewind(form.rows_start(start, call))

    def _compute(self, step: _CallStates, call: Call) -> tuple[Rewritten, list[Any]]:
        """Run the variant that serves a call, compiled if need be; return it and the results of its compiled code.

        Raises NotCompiled if the variant cannot be compiled.
        """
        variant = self.choice.of(step.states, step.starts, step.counts, call)
        if variant not in self.variants:
            try:
                self.variants[variant] = self.compile_variant(variant)
            except NotCompiled:
                self.uncompiled.add(variant)
                raise
        if variant is Variant.PAST:
            for index in self.calibrated:
                if not step.states[index].length:
                    self.calibration.missed(self.forms[index].group, "is read in its first call beyond what that call writes")
        rewritten, compiled = self.variants[variant]
        self._make_room(step, call)
        by_root = {
            (form.group.root, item.part): state.stores[item.part]
            for form, state in zip(self.forms, step.states, strict=True) for item in form.group.bindings
        }
        planes = [plane for item in rewritten.bindings for plane in by_root[item.plan.slot.root, item.part].planes]
        last = (*self._cursors(rewritten, step), *(self.sizes.value(size, call.args) for size in rewritten.sizes))
        if self.undone:
            step.undo.keep(step.states, step.starts, step.counts)
        return rewritten, list(compiled(*[call.args[index] for index in rewritten.kept], *planes, *last))

    def _make_room(self, step: _CallStates, call: Call) -> None:
        """Allocate pages in every store for this call; stores of equal growth in a graph have the same number of pages."""
        pages: dict[Growing, int] = {}
        tokens: list[int] = []
        for form, state, start, count in zip(self.forms, step.states, step.starts, step.counts, strict=True):
            needed, capacity = form.room(start, count, call)
            tokens.append(needed)
            wanted = pages_for(needed) if form.growing.still else self.growth.pages(needed, capacity)
            pages[form.growing] = max(pages.get(form.growing, LEAST_PAGES), wanted, state.pages)
        grown = False
        for form, state, needed in zip(self.forms, step.states, tokens, strict=True):
            before = [store.planes[0] for store in state.stores.values()]
            for store in state.stores.values():
                store.reserve(pages[form.growing], needed)
            state.own(form.kind.written)
            grown = grown or any(store.planes[0] is not plane for store, plane in zip(state.stores.values(), before, strict=True))
        if grown:
            self.states.live.measure()

    def _cursors(self, rewritten: Rewritten, step: _CallStates) -> list[torch.Tensor]:
        """Return the cursors of sliding windows (the slots of their next tokens) as tensors, in the order of the compiled code's inputs.

        Empty if the graph has no sliding window with a cursor.
        """
        starts: dict[int, int] = {}
        for form, start in zip(self.forms, step.starts, strict=True):
            form.add_cursor(starts, start)
        return cursors(rewritten.cursors, starts, value_of(self.forms[0].group.root).device) if rewritten.cursors else []

    def _mark_checked(self, step: _CallStates, call: Call, rewritten: Rewritten) -> None:
        """Mark the states of a call as checked, so that later steps, which differ from it only in lengths, take the fast path.

        Does nothing for a variant other than PAST, or if some cache of the graph can never take that path (``trusted``).
        """
        if rewritten.variant is not Variant.PAST or not self.trusted:
            return
        if self.fast_path is None:
            rows = [form.row(form.count(call), call) for form in self.forms]
            self.fast_path = DecodeFastPath.of(rows, [form.group.root for form in self.forms], self.pairs, rewritten)
        self.fast_path.mark_checked(step.states)

    def _commit(self, step: _CallStates, call: Call, shapes: list[Any], results: list[Any], rewritten: Rewritten) -> tuple[Any, ...]:
        """Record a call's new tokens in the states of its caches; return the graph's results with the caches among them.

        ``shapes``: by form, the shape of the cache argument, None if the graph creates the cache. ``results``: those of the compiled code,
        without caches.
        """
        made: dict[int, Any] = {}
        moment = CounterSnapshot(call.counters)
        for form, state, start, count, shape in zip(self.forms, step.states, step.starts, step.counts, shapes, strict=True):
            if not form.kind.written:
                continue
            form.commit(state, start, count, call)
            state.moment = moment
            if form.kind.returned:
                made.update((output, form.returned(state, shape, call)) for output in form.group.outputs)
        return self._results(results, {**made, **self._given_back(call.args)}, rewritten)

    def _given_back(self, args: tuple[Any, ...]) -> dict[int, Any]:
        """Return {output index: argument} for the buffers that the graph returns unchanged."""
        return {output: args[argument] for output, argument in self.returned}

    @staticmethod
    def _results(results: Any, made: dict[int, Any], rewritten: Rewritten) -> tuple[Any, ...]:
        """Return the results of compiled code, with the caches of ``made`` inserted at their output indices."""
        if not made:
            return tuple(results)
        rest = iter(results)
        return tuple(made[index] if index in made else next(rest) for index in range(rewritten.results))
