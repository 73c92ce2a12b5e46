"""Run: bind stores to the caller's cache tensors, choose the variant, call the compiled code.

All that happens here per step is host bookkeeping on plain integers: finding the state behind each cache
tensor, making room, counting tokens. The only waits for the device are the two that are no decode steps:
adopting a cache that arrives filled, and the first write into an empty one.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvcompile.errors import CacheFull, CacheStale, LengthsDiffer, NotCompiled, PositionsUnknown, SchemeChanged, Unsupported
from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.match.rope.rope import Rotation
from kvcompile.passes.match.sites import Ring, SlotKind
from kvcompile.passes.rewrite.context import BORN
from kvcompile.passes.rewrite.rewritten import Binding, Rewritten, Variant
from kvcompile.runtime import adoption, pools, rings
from kvcompile.runtime import handle as handles
from kvcompile.runtime.groups import Group, SizeReader
from kvcompile.runtime.growth import Growth
from kvcompile.runtime.ledger import Ledger
from kvcompile.runtime.order import Broken, Seen
from kvcompile.runtime.positions import Found, Positions
from kvcompile.runtime.rotary import Rotary, RotaryReader
from kvcompile.runtime.state import CacheState, bring
from kvcompile.runtime.steady import Row, Steady
from kvcompile.runtime.store import Store, StoreSpec
from kvcompile.runtime.undo import Undo

log = logging.getLogger(__name__)


@dataclass
class _Call:
    """The states of one call: for each group its state, where its tokens start, how many come."""

    states: list[CacheState]
    starts: list[int]
    counts: list[int]
    undo: Undo


class BoundGraph:
    """A compiled graph with its stores bound at run time; the callable that Dynamo gets."""

    def __init__(
        self, captured: Captured, groups: tuple[Group, ...], pairs: tuple[tuple[int, int], ...],
        compile_variant: Callable[[Variant], tuple[Rewritten, Callable[..., Any]]], positions: Positions | None,
        growth: Growth, live: Ledger, decode_arguments: tuple[int, ...], thawed: Mapping[int, str], seen: Seen,
    ) -> None:
        self.captured, self.groups, self.pairs = captured, groups, pairs
        self.compile_variant, self.positions, self.growth, self.live = compile_variant, positions, growth, live
        self.decode_arguments, self.thawed, self.seen = decode_arguments, thawed, seen
        self.variants: dict[Variant, tuple[Rewritten, Callable[..., Any]]] = {}
        self.sizes = SizeReader(captured)
        self.steady: Steady | None = None
        turned = {item.plan.rotation for group in groups for item in group.bindings if item.plan.rotation is not None}
        self.rotaries: dict[Rotation | None, RotaryReader] = {rotation: RotaryReader(captured, rotation) for rotation in turned}
        # Only buffers written at positions that are not followed on the host step by step: counters of the graph's own,
        # or positions on a device, which would have to be waited for (see ``_start``).
        counted = positions is not None and positions.counted
        self.trusted = all(
            group.kind is SlotKind.BUFFER and isinstance(group.first.plan.slot.write.count, int)
            and isinstance(value_of(group.root).shape[group.token_dim], int) and all(isinstance(size, int) for size in group.reach)
            and (group.pool or group.goes_on or ((index := group.first.plan.slot.write.position.index) is not None
                                     and (counted or value_of(index).device.type != "cpu")))
            for group in groups
        )
        self.written = tuple(index for index, group in enumerate(groups) if group.kind is not SlotKind.READ)
        self.returned = tuple(
            (output, group.argument) for group in groups if group.kind is SlotKind.BUFFER and group.argument is not None
            for output in group.outputs
        )
        self.born_only = bool(self.written) and all(groups[index].kind in BORN for index in self.written)
        late = any(item.plan.slot.write.late for group in groups for item in group.bindings)
        self.with_past = late or any(group.kind is SlotKind.CONCAT for group in groups)
        self.learners = tuple(
            index for index in self.written if any(item.plan.scheme.learns(item.plan.spec) for item in groups[index].bindings)
        )
        self.undone = any(item.plan.window for group in groups for item in group.bindings) or any(group.ring for group in groups)
        self.warned = False
        self.left: adoption.Left | None = None  # a trial has none

    # --- finding the states ----------------------------------------------------------------------

    def _spec(self, binding: Binding) -> StoreSpec:
        plan = binding.plan
        return StoreSpec(plan.spec, plan.scheme, plan.layout)

    def _new_state(self, group: Group, batch: int, device: torch.device, args: tuple[Any, ...]) -> CacheState:
        stores = {item.part: Store(self._spec(item), batch, device, 0, self._rotary(item, args)) for item in group.bindings}
        axes, ring = {item.part: item.plan.slot.axes for item in group.bindings}, None if group.ring is None else group.ring.slots
        state = CacheState(axes, stores, ring=ring, growth=self.growth, grown=group.grows)
        self.live.add(state)
        return state

    def _state(self, group: Group, args: tuple[Any, ...], found: Callable[[], Found]) -> CacheState:
        """The state behind a group's argument; a dense one is adopted."""
        if group.argument is None:
            batch = self.sizes.read(self._batch(group), args)
            return self._new_state(group, batch, value_of(group.root).device, args)
        tensor = args[group.argument]
        if not handles.is_handle(tensor):
            return self._adopt(group, tensor, args, found)
        state = tensor._kv
        pools.check(group, state)
        for item in group.bindings:
            store = state.stores.get(item.part)
            if store is None or store.spec != self._spec(item):
                held = "nothing for this part" if store is None else store.spec.scheme.spell()
                raise SchemeChanged(expected=item.plan.scheme.spell(), found=held, where=group.where)
            if (reader := self.rotaries.get(item.plan.rotation)) is not None:
                store.rotary = reader.check(store.rotary, args, state.length, store.device, group.where)
        if group.kind is SlotKind.UPDATED and not tensor._length and state.length:
            # Another sequence from the same empty cache: the two have nothing in common.
            return self._new_state(group, self.sizes.read(self._batch(group), args), tensor.device, args)
        seen = handles.shown(tensor)
        state.resume(tensor._length, tensor._epoch, seen)
        state, length = rings.fitted(state, group.ring, tensor._length, seen)
        if state is not tensor._kv:
            handles.rebind(tensor, state, length)
        self.live.add(state)
        return state

    def _rotary(self, binding: Binding, args: tuple[Any, ...]) -> Rotary | None:
        reader = self.rotaries.get(binding.plan.rotation)
        return reader.read(args) if reader is not None else None

    def _batch(self, group: Group) -> Any:
        labels = group.first.plan.slot.axes.labels
        return value_of(group.root).shape[labels.index(("B",))] if ("B",) in labels else 1

    def _adopt(self, group: Group, tensor: torch.Tensor, args: tuple[Any, ...], found: Callable[[], Found]) -> CacheState:
        """Encode a dense cache that arrives from outside, then free it: one cache tensor at a time."""
        if group.kind in {SlotKind.CONCAT, SlotKind.READ} or group.pool:
            prior = tensor.shape[group.token_dim]
        else:
            prior = self._prior(group, args, found)
        if group.ring is not None and prior > group.ring.slots:
            rings.check_past(CacheState({}, {}), group.ring, prior, prior, False, group.where)
        owned = handles.can_take_over(tensor)
        if not owned and group.kind is SlotKind.BUFFER:
            raise Unsupported(
                expected="a cache tensor that owns its memory alone, as when this graph was compiled",
                found="a view, a parameter or a subclass, or one that something else holds a view of", where=group.where,
                todo="keep the cache in a plain tensor or buffer of its own, and no view of it from call to call",
            )
        slot = group.first.plan.slot
        labels = slot.axes.labels
        batch = tensor.shape[labels.index(("B",))] if ("B",) in labels else 1
        state = self._new_state(group, batch, tensor.device, args)
        capacity = tensor.shape[group.token_dim] if group.kind in {SlotKind.BUFFER, SlotKind.UPDATED} else None
        kept = prior if capacity is None or group.ring is not None else self._kept(group, prior, capacity, args)
        if group.pool:
            pools.adopt(group, tensor, state)
            handles.take_over(tensor, state)
            return state
        if adoption.whole(group, tensor, kept):
            if self.left is not None:
                adoption.say_whole(group, tensor)
            kept = tensor.shape[group.token_dim]
        for item in group.bindings:
            store = state.stores[item.part]
            if kept:
                store.reserve(self.growth.pages(kept, capacity))
                dense = bring(tensor, item.plan.slot.axes, item.plan.spec.heads, item.plan.spec.head_dim)
                origin = found().origin(group.site) if item.plan.window or item.plan.scheme.keeps_padding_out else None
                store.adopt(dense[:, :, :kept], origin)
        state.length = state.top = state.behind = prior
        state.held = kept
        if kept:
            self._untaught(group, "arrived filled")
        if owned:
            handles.take_over(tensor, state)
        return state

    def _kept(self, group: Group, prior: int, capacity: int, args: tuple[Any, ...]) -> int:
        """How many tokens of a dense buffer are encoded: those there before this call, and what attention reads behind its own."""
        reached = min(self._reach(group, args), capacity)
        count = self.sizes.read(group.first.plan.slot.write.count, args) if group.kind is not SlotKind.READ else 0
        if reached <= prior + count:
            return prior
        if any(item.plan.window for item in group.bindings):
            raise Unsupported(
                expected=f"attention over the {prior} tokens of a filled cache and {count} new ones", found=f"attention over {reached}",
                where=group.where, todo="use a scheme without a window for this layer, or mask what was not written yet",
            )
        return reached

    def _prior(self, group: Group, args: tuple[Any, ...], found: Callable[[], Found]) -> int:
        """Tokens that a filled buffer holds before this call's write."""
        position = group.first.plan.slot.write.position
        if group.ring is not None:
            return self.sizes.read(group.ring.end, args) if not group.ring.refilled else 0
        if position.index is None:
            return self._offset(position.offset, args)
        # What the mask lets the new tokens see is there too, even where the write goes somewhere below it.
        count, capacity = self.sizes.read(group.first.plan.slot.write.count, args), self._capacity(group, args)
        return min(max(self._first(group, args, found()), found().seen(group.limits) - count), capacity)

    def _first(self, group: Group, args: tuple[Any, ...], found: Found) -> int:
        """The position of the first new token, of the row that is furthest; raises where it lies outside the cache."""
        first, least, most = found.first(group.first.plan.slot.write.position.index)  # type: ignore[arg-type]
        capacity = self._capacity(group, args)
        if least < 0 or most >= capacity:
            raise PositionsUnknown(capacity=capacity, found=f"{least}..{most}", where=group.where)
        return first

    def _capacity(self, group: Group, args: tuple[Any, ...]) -> int:
        shape = value_of(group.root).shape
        return math.prod(self.sizes.read(shape[dim], args) for dim in group.first.plan.slot.axes.token_dims)

    def _offset(self, offset: fx.Node | int, args: tuple[Any, ...]) -> int:
        return offset if isinstance(offset, int) else self.sizes.read(value_of(offset), args)

    # --- one call --------------------------------------------------------------------------------

    def _start(self, group: Group, state: CacheState, args: tuple[Any, ...], found: Callable[[], Found]) -> int:
        """Where this call's tokens go; on a GPU a buffer in use is trusted to be written in order, without a wait."""
        if group.ring is not None and group.kind not in BORN:
            return self._ring_start(group, group.ring, state, args)
        if group.kind is SlotKind.CONCAT:
            tensor = args[group.argument]  # type: ignore[index]
            return tensor._length if handles.is_handle(tensor) else state.length
        position = group.first.plan.slot.write.position
        if group.kind is SlotKind.READ or group.pool:
            return 0
        if group.kind not in {SlotKind.BUFFER, SlotKind.UPDATED}:
            return state.length
        if position.index is None:
            return self._offset(position.offset, args)
        count = self.sizes.read(group.first.plan.slot.write.count, args)
        length = state.behind if group.kind is SlotKind.BUFFER else self._length(group, state, args)
        if length and value_of(position.index).device.type != "cpu" and length + count <= self._capacity(group, args):
            return length
        # On a GPU this waits, once the tokens counted fill the cache: it is full, or its caller started again.
        return self._first(group, args, found())

    def _ring_start(self, group: Group, ring: Ring, state: CacheState, args: tuple[Any, ...]) -> int:
        """The position of the first new token in a ring: behind the past that is lined up with it."""
        if ring.refilled:
            return 0
        tensor = args[group.argument]  # type: ignore[index]
        length = tensor._length if handles.is_handle(tensor) else state.length
        start = length - min(length, tensor.shape[group.token_dim]) + self.sizes.read(ring.end, args)
        past = self.sizes.read(ring.past, args)
        one = self.sizes.read(group.first.plan.slot.write.count, args) == 1
        rings.check_past(state, ring, start, past, one, group.where)
        return start

    def _prepare(self, args: tuple[Any, ...], found: Callable[[], Found]) -> _Call:
        states, starts, counts, undo = [], [], [], Undo()
        for group in self.groups:
            state = self._state(group, args, found)
            start = self._start(group, state, args, found)
            # Any place of a pool may be written.
            count = self._capacity(group, args) if group.pool else self.sizes.read(group.first.plan.slot.write.count, args)
            if group.kind is SlotKind.UPDATED:
                self._branched(group, state, start, args)
            states.append(state)
            starts.append(start)
            counts.append(count)
        for key, value in self.pairs:
            if starts[key] != starts[value]:
                raise LengthsDiffer(keys=starts[key], values=starts[value], where=self.groups[key].where)
        return _Call(states, starts, counts, undo)

    def _go_back(self, call: _Call, found: Callable[[], Found]) -> None:
        """Bring every state back to where this call's tokens start, or none; raises WindowPassed."""
        with call.undo:
            for group, state, start in zip(self.groups, call.states, call.starts, strict=True):
                if start < state.behind:
                    call.undo.whole(state)
                    state.rewind(self._rows_start(group, start, found))

    def _rows_start(self, group: Group, start: int, found: Callable[[], Found]) -> int | torch.Tensor:
        """Where this call's tokens go in each row, int64 [B] where rows have positions of their own."""
        position = group.first.plan.slot.write.position
        if position.index is None or not position.rows or group.kind not in {SlotKind.BUFFER, SlotKind.UPDATED}:
            return start
        return found().values[position.index][:, 0]

    def _length(self, group: Group, state: CacheState, args: tuple[Any, ...]) -> int:
        """Tokens that the cache tensor of this call holds: an older tensor of a state that has gone on since holds fewer."""
        tensor = args[group.argument] if group.argument is not None else None
        return tensor._length if handles.is_handle(tensor) else state.length  # type: ignore[union-attr]

    def _branched(self, group: Group, state: CacheState, start: int, args: tuple[Any, ...]) -> None:
        """Raise where an older tensor would see, as unwritten zeros, places that a newer one has written since."""
        length = self._length(group, state, args)
        if state.length > length and max(start, self._reach(group, args)) > length:
            raise CacheStale(length=length)

    def _variant(self, call: _Call, args: tuple[Any, ...], found: Callable[[], Found]) -> Variant:
        """FRESH where every store is empty, the new tokens are the first ones, in order, and nothing behind them is read."""
        rolls = any(group.pool or (group.ring is not None and not group.ring.refilled) for group in self.groups)
        if self.with_past or not self.written or rolls:
            return Variant.PAST
        written = [(self.groups[index], call.states[index], call.starts[index], call.counts[index]) for index in self.written]
        beyond = any(self._reach(group, args) > count for group, _, _, count in written)
        if beyond and not self.born_only:
            return Variant.PAST
        once = max(count for *_, count in written) == 1 and not self.learners
        filled = any(state.length for group, state, _, _ in written if group.ring is None)
        if not self.born_only and (filled or once):
            return Variant.PAST
        if beyond:
            raise Unsupported(
                expected="attention over the first tokens of a new cache", found="attention over what was not written yet",
                where=self.groups[0].where, todo="run this first call without kvcompile: the filled cache is adopted afterwards",
            )
        if self.positions is None:
            return Variant.FRESH if not any(start for _, _, start, _ in written) else Variant.PAST
        ordered = found().ordered(lambda size: self.sizes.read(size, args))
        if self.born_only and not ordered:
            raise Unsupported(
                expected="the first tokens of a new cache at positions 0, 1, 2...", found="other positions",
                where=self.groups[0].where, todo="run this first call without kvcompile: the filled cache is adopted afterwards",
            )
        return Variant.FRESH if ordered else Variant.PAST

    def _reach(self, group: Group, args: tuple[Any, ...]) -> int:
        return max(self.sizes.read(size, args) for size in group.reach)

    def _make_room(self, call: _Call, args: tuple[Any, ...]) -> None:
        """Enough pages in every store; all stores of a graph that grow alike have the same number of pages."""
        pages: dict[int | None, int] = {}
        for group, state, start, count in zip(self.groups, call.states, call.starts, call.counts, strict=True):
            capacity = None
            if group.ring is not None:
                capacity = group.ring.slots
            elif group.kind in {SlotKind.BUFFER, SlotKind.BORN_BUFFER, SlotKind.UPDATED}:
                capacity = self._capacity(group, args)
                if count > capacity:
                    raise CacheFull(needed=start + count, capacity=capacity, where=group.where)
            needed = max(start + count, self._reach(group, args) if group.ring is None else 0)
            if capacity is not None:
                needed = min(needed, capacity)
            end = group.first.plan.end
            pages[end] = max(pages.get(end, rings.LEAST_PAGES), self.growth.pages(needed, capacity), state.pages)
        for group, state in zip(self.groups, call.states, strict=True):
            for store in state.stores.values():
                store.reserve(pages[group.first.plan.end])

    def _cursors(self, rewritten: Rewritten, call: _Call) -> list[torch.Tensor]:
        starts: dict[int, int] = {}
        for group, start in zip(self.groups, call.starts, strict=True):
            if group.ring is not None and not group.ring.refilled:
                rings.one_start(starts, group.ring, start, group.where)
        return rings.cursors(rewritten.cursors, starts, value_of(self.groups[0].root).device) if rewritten.cursors else []

    def __call__(self, *args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self._run(args)

    def _run(self, args: tuple[Any, ...]) -> Any:
        if self.decode_arguments:
            args = tuple(handles.in_full(args, self.decode_arguments, self.thawed))
        if not all(reader.unchanged(args) for reader in self.rotaries.values()):
            self.steady = None
        if self.steady is not None and (settled := self.steady.ready(args)) is not None:
            rewritten, compiled = self.variants[Variant.PAST]
            planes, cursors = self.steady.planes(settled), self.steady.cursors(settled, rewritten.cursors)
            with Undo() as undo:
                if self.undone:
                    undo.keep(settled, [state.behind for state in settled], [row.count for row in self.steady.rows])
                sizes = [self.sizes.value(size, args) for size in rewritten.sizes]
                results = compiled(*[args[index] for index in rewritten.kept], *planes, *cursors, *sizes)
            self.steady.commit(settled, args)
            return self._results(results, self._given_back(args), rewritten)
        shapes = [tuple(args[group.argument].shape) if group.argument is not None else None for group in self.groups]
        found = self.positions.once(args) if self.positions is not None else functools.partial(Found, {})
        prior = functools.partial(self._prior, args=args, found=found)
        if self.left is not None and (dense := self.left.results(self.groups, args, prior, self.thawed)) is not None:
            return dense
        call = self._prepare(args, found)
        broken = self.seen.broken(self.groups, call.states, call.starts, call.counts, args, found, self.sizes)
        if broken is not None and self.left is not None:
            return self.left.out_of_order(self.groups, args, broken, self.thawed)
        self._go_back(call, found)
        try:
            with call.undo:
                rewritten, results = self._compute(call, args, found)
        except NotCompiled as error:
            if self.left is None:
                raise
            broken = Broken(self.groups[0], str(error), Variant.PAST not in self.variants)
            return self.left.out_of_order(self.groups, args, broken, self.thawed)
        self._settle(call, args, rewritten)
        return self._commit(call, args, shapes, results, rewritten)

    def _compute(self, call: _Call, args: tuple[Any, ...], found: Callable[[], Found]) -> tuple[Rewritten, list[Any]]:
        """The variant that serves a call, and what its compiled code gives."""
        variant = self._variant(call, args, found)
        if variant not in self.variants:
            self.variants[variant] = self.compile_variant(variant)
        if variant is Variant.PAST:
            for index in self.learners:
                if not call.states[index].length:
                    self._untaught(self.groups[index], "is read in its first call beyond what that call writes")
        rewritten, compiled = self.variants[variant]
        self._make_room(call, args)
        by_root = {
            (group.root, item.part): state.stores[item.part]
            for group, state in zip(self.groups, call.states, strict=True) for item in group.bindings
        }
        planes = [
            plane for item in rewritten.bindings for plane in by_root[item.plan.slot.root, item.part].planes
        ]
        last = (*self._cursors(rewritten, call), *(self.sizes.value(size, args) for size in rewritten.sizes))
        if self.undone:
            call.undo.keep(call.states, call.starts, call.counts)
        return rewritten, list(compiled(*[args[index] for index in rewritten.kept], *planes, *last))

    def _untaught(self, group: Group, why: str) -> None:
        """Say once that a store is filled without what its scheme learns from queries."""
        names = {item.plan.scheme.name for item in group.bindings if item.plan.scheme.learns(item.plan.spec)}
        if names and not self.warned:
            self.warned = True
            log.warning(
                "%s learns from the queries of the compiled call that fills an empty cache; the cache at %s %s: its keys are encoded with "
                "lam=0, as kivi would", ", ".join(sorted(names)), group.where, why,
            )

    def _settle(self, call: _Call, args: tuple[Any, ...], rewritten: Rewritten) -> None:
        """Let the next step of these caches take the short way, where nothing but their lengths can differ."""
        if rewritten.variant is not Variant.PAST or not self.trusted:
            return
        if self.steady is None:
            rows = [
                Row(g.argument or 0, self._capacity(g, args), 0 if g.pool else n, g.ring.slots if g.ring is not None else 0)
                for g, n in zip(self.groups, call.counts, strict=True)
            ]
            self.steady = Steady.of(rows, [group.root for group in self.groups], self.pairs, rewritten)
        self.steady.settle(call.states)

    def _commit(self, call: _Call, args: tuple[Any, ...], shapes: list[Any], results: list[Any], rewritten: Rewritten) -> tuple[Any, ...]:
        made: dict[int, Any] = {}
        for group, state, start, count, shape in zip(self.groups, call.states, call.starts, call.counts, shapes, strict=True):
            if group.kind is SlotKind.READ:
                continue
            if group.ring is not None and (group.ring.refilled or group.kind is SlotKind.BUFFER):
                keep = self.sizes.read(group.ring.keep, args)
                state.epoch += 1
                state.length = state.behind = keep if group.ring.refilled else start + count
                state.top = state.length if group.ring.refilled else max(state.top, state.length)
                if group.argument is not None:
                    tensor = args[group.argument]
                    tensor._length, tensor._epoch = state.length, state.epoch
            elif group.kind in {SlotKind.BUFFER, SlotKind.BORN_BUFFER}:
                state.overwrite(min(start + count, self._capacity(group, args)))
                if group.argument is not None:
                    tensor = args[group.argument]
                    tensor._length, tensor._epoch = state.length, state.epoch
            elif group.kind is SlotKind.UPDATED:
                length = max(self._length(group, state, args), min(start + count, self._capacity(group, args)))
                # Where rows have positions of their own, any token may have been written over.
                state.advance(0 if group.first.plan.slot.write.position.rows else start, count)
                state.length = length
            else:
                state.advance(start, count)
            if group.kind is not SlotKind.BUFFER:
                made.update((output, self._handle(group, state, shape, args)) for output in group.outputs)
        return self._results(results, {**made, **self._given_back(args)}, rewritten)

    def _given_back(self, args: tuple[Any, ...]) -> dict[int, Any]:
        """By result the buffers that the graph returns as they came in."""
        return {output: args[argument] for output, argument in self.returned}

    @staticmethod
    def _results(results: Any, made: dict[int, Any], rewritten: Rewritten) -> tuple[Any, ...]:
        """Return the results of compiled code, with the caches among them."""
        if not made:
            return tuple(results)
        rest = iter(results)
        return tuple(made[index] if index in made else next(rest) for index in range(rewritten.results))

    def _handle(self, group: Group, state: CacheState, shape: tuple[int, ...] | None, args: tuple[Any, ...]) -> Any:
        fake = value_of(group.root)
        if shape is None:
            shape = tuple(self.sizes.read(size, args) for size in fake.shape)
        if group.grows:
            length = state.length if group.ring is None else self.sizes.read(group.ring.keep, args)
            shape = tuple(length if dim == group.token_dim else size for dim, size in enumerate(shape))
        handle = handles.make(state, shape, fake.dtype, fake.device)
        if group.grows and group.ring is None:
            # The next call has a longer one: Dynamo would learn that by compiling the first step for this length alone.
            torch._dynamo.maybe_mark_dynamic(handle, group.token_dim)
        return handle
