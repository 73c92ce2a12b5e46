"""Run: bind stores to the caller's cache tensors, choose the variant, call the compiled code.

All that happens here per step is host bookkeeping on plain integers: finding the state behind each cache
tensor, making room, counting tokens. The only waits for the device are the two that are no decode steps:
adopting a cache that arrives filled, and the first write into an empty one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kvcompile.errors import CacheFull, LayoutChanged, LengthsDiffer, PositionsUnknown, SchemeChanged, Unsupported
from kvcompile.passes.capture import Captured
from kvcompile.passes.rewrite import BORN, Binding, Rewritten, Variant
from kvcompile.passes.shapes import source_line, value_of
from kvcompile.passes.sites import LimitKind, SlotKind
from kvcompile.runtime import handle as handles
from kvcompile.runtime.growth import Growth
from kvcompile.runtime.state import CacheState, bring
from kvcompile.runtime.store import Store, StoreSpec

log = logging.getLogger(__name__)

Prologue = Callable[..., tuple[torch.Tensor, ...]]


class SizeReader:
    """Evaluates the captured graph's symbolic sizes from the arguments of a call."""

    def __init__(self, captured: Captured) -> None:
        self.where: dict[Any, tuple[int, int | None]] = {}
        for index, fake in enumerate(captured.fakes):
            if isinstance(fake, torch.SymInt):
                self.where.setdefault(fake.node.expr, (index, None))
            elif isinstance(fake, torch.Tensor):
                for dim, size in enumerate(fake.shape):
                    if isinstance(size, torch.SymInt):
                        self.where.setdefault(size.node.expr, (index, dim))

    def read(self, size: Any, args: tuple[Any, ...]) -> int:
        """A size as a plain int for this call."""
        if isinstance(size, int):
            return size
        values = {}
        for symbol in size.node.expr.free_symbols:
            index, dim = self.where[symbol]
            values[symbol] = int(args[index]) if dim is None else args[index].shape[dim]
        return int(size.node.expr.xreplace(values))


@dataclass(frozen=True)
class Group:
    """The slots that live in one cache tensor: an argument of the call, or a result that this graph makes."""

    kind: SlotKind
    argument: int | None
    outputs: tuple[int, ...]
    bindings: tuple[Binding, ...]
    root: fx.Node = field(repr=False)
    where: str
    whole: bool

    @property
    def first(self) -> Binding:
        """Any of the slots: they share tokens and batch rows."""
        return self.bindings[0]

    @property
    def token_dim(self) -> int:
        """The dim of the cache tensor that tokens run along."""
        return self.first.plan.slot.axes.token_dim


@dataclass
class _Call:
    """What one call works on: the state of each group, where its tokens start, how many come."""

    states: list[CacheState]
    starts: list[int]
    counts: list[int]


class BoundGraph:
    """A compiled graph with its stores bound at run time; the callable that Dynamo gets."""

    def __init__(
        self, captured: Captured, groups: tuple[Group, ...], pairs: tuple[tuple[int, int], ...],
        compile_variant: Callable[[Variant], tuple[Rewritten, Callable[..., Any]]], prologue: tuple[Prologue, int, int] | None,
        growth: Growth, live: weakref.WeakSet[Any], decode_arguments: tuple[int, ...],
    ) -> None:
        self.captured, self.groups, self.pairs = captured, groups, pairs
        self.compile_variant, self.prologue, self.growth, self.live = compile_variant, prologue, growth, live
        self.decode_arguments = decode_arguments
        self.variants: dict[Variant, tuple[Rewritten, Callable[..., Any]]] = {}
        self.sizes = SizeReader(captured)
        self.born_only = all(group.kind in BORN for group in groups)
        self.with_past = any(group.kind is SlotKind.CONCAT for group in groups)

    # --- finding the states ----------------------------------------------------------------------

    def _spec(self, binding: Binding) -> StoreSpec:
        plan = binding.plan
        return StoreSpec(plan.spec, plan.scheme, plan.layout)

    def _new_state(self, group: Group, batch: int, device: torch.device) -> CacheState:
        stores = {item.part: Store(self._spec(item), batch, device, 0) for item in group.bindings}
        state = CacheState({item.part: item.plan.slot.axes for item in group.bindings}, stores)
        self.live.add(state)
        return state

    def _state(self, group: Group, args: tuple[Any, ...], call_prior: Callable[[], list[int]]) -> CacheState:
        """The state behind a group's argument; a dense one is adopted."""
        if group.argument is None:
            batch = self.sizes.read(self._batch(group), args)
            return self._new_state(group, batch, value_of(group.root).device)
        tensor = args[group.argument]
        if not handles.is_handle(tensor):
            return self._adopt(group, tensor, args, call_prior)
        state = tensor._kv
        for item in group.bindings:
            store = state.stores.get(item.part)
            if store is None or store.spec != self._spec(item):
                found = "nothing for this part" if store is None else store.spec.scheme.spell()
                raise SchemeChanged(expected=item.plan.scheme.spell(), found=found, where=group.where)
        state.resume(tensor._length, tensor._epoch)
        self.live.add(state)
        return state

    def _batch(self, group: Group) -> Any:
        labels = group.first.plan.slot.axes.labels
        return value_of(group.root).shape[labels.index(("B",))] if ("B",) in labels else 1

    def _adopt(self, group: Group, tensor: torch.Tensor, args: tuple[Any, ...], call_prior: Callable[[], list[int]]) -> CacheState:
        """Encode a dense cache that arrives from outside, then free it: one cache tensor at a time."""
        if group.kind is SlotKind.CONCAT:
            prior = tensor.shape[group.token_dim]
        else:
            prior = self._prior(group, args, call_prior)
        slot = group.first.plan.slot
        labels = slot.axes.labels
        batch = tensor.shape[labels.index(("B",))] if ("B",) in labels else 1
        state = self._new_state(group, batch, tensor.device)
        capacity = tensor.shape[group.token_dim] if group.kind is SlotKind.BUFFER else None
        kept = capacity if group.whole and capacity is not None else prior
        for item in group.bindings:
            store = state.stores[item.part]
            if kept:
                store.reserve(self.growth.pages(kept, capacity))
                dense = bring(tensor, item.plan.slot.axes, item.plan.spec.heads, item.plan.spec.head_dim)
                store.adopt(dense[:, :, :kept])
        state.length = prior
        if handles.can_take_over(tensor):
            handles.take_over(tensor, state)
        elif group.kind is SlotKind.BUFFER:
            raise Unsupported(
                expected="a cache tensor that owns its memory", found="a view, a parameter or a subclass", where=group.where,
                todo="keep the cache in a plain tensor or buffer of its own",
            )
        return state

    def _prior(self, group: Group, args: tuple[Any, ...], call_prior: Callable[[], list[int]]) -> int:
        """Tokens that a filled buffer holds before this call's write."""
        position = group.first.plan.slot.write.position
        if position.index is None:
            return self._offset(position.offset, args)
        del call_prior
        assert self.prologue is not None
        run, _, _ = self.prologue
        values = run(*args)[self._position_slot(group)]
        capacity = self.sizes.read(value_of(group.root).shape[group.token_dim], args)
        least, most = (int(v) for v in torch.aminmax(values))
        if least < 0 or most >= capacity:
            raise PositionsUnknown(capacity=capacity, found=f"{least}..{most}", where=group.where)
        first = values[..., 0] if values.dim() else values
        return int(first.max())

    def _position_slot(self, group: Group) -> int:
        return self.position_slots[id(group.first.plan.slot.write.position.index)]

    def _offset(self, offset: fx.Node | int, args: tuple[Any, ...]) -> int:
        if isinstance(offset, int):
            return offset
        seen = value_of(offset)
        return self.sizes.read(seen, args)

    position_slots: dict[int, int] = {}

    # --- one call --------------------------------------------------------------------------------

    def _prepare(self, args: tuple[Any, ...]) -> _Call:
        states, starts, counts = [], [], []
        for group in self.groups:
            state = self._state(group, args, list)
            if group.kind is SlotKind.CONCAT:
                tensor = args[group.argument]
                start = tensor._length if handles.is_handle(tensor) else state.length
            elif group.kind is SlotKind.BUFFER and group.first.plan.slot.write.position.index is None:
                start = self._offset(group.first.plan.slot.write.position.offset, args)
            else:
                start = state.length
            write = group.first.plan.slot.write
            shape = value_of(write.values).shape
            count = self.sizes.read(shape[write.dims.index(write.token_dim)], args) if write.token_dim in write.dims else 1
            states.append(state)
            starts.append(start)
            counts.append(count)
        for key, value in self.pairs:
            if starts[key] != starts[value]:
                raise LengthsDiffer(keys=starts[key], values=starts[value], where=self.groups[key].where)
        return _Call(states, starts, counts)

    def _variant(self, call: _Call, args: tuple[Any, ...]) -> Variant:
        """FRESH where every store is empty and the new tokens are the first ones, in order."""
        if self.with_past:
            return Variant.PAST
        if not self.born_only and (any(state.length for state in call.states) or max(call.counts) == 1):
            return Variant.PAST
        if self.prologue is None:
            return Variant.FRESH if not any(call.starts) else Variant.PAST
        run, positions, limits = self.prologue
        ordered = True
        for value in run(*args)[: positions + limits]:
            flat = value.reshape(-1, value.shape[-1]) if value.dim() else value.reshape(1, 1)
            ordered &= bool((flat == torch.arange(flat.shape[-1], device=flat.device)).all())
        if self.born_only and not ordered:
            raise Unsupported(
                expected="the first tokens of a new cache at positions 0, 1, 2...", found="other positions",
                where=self.groups[0].where, todo="run this first call without kvcompile: the filled cache is adopted afterwards",
            )
        return Variant.FRESH if ordered else Variant.PAST

    def _make_room(self, call: _Call, args: tuple[Any, ...]) -> None:
        """Enough pages in every store; all stores of a graph have the same number of pages."""
        pages = 2
        for group, state, start, count in zip(self.groups, call.states, call.starts, call.counts, strict=True):
            capacity = None
            if group.kind in {SlotKind.BUFFER, SlotKind.BORN_BUFFER}:
                capacity = self.sizes.read(value_of(group.root).shape[group.token_dim], args)
                if count > capacity:
                    raise CacheFull(needed=start + count, capacity=capacity, where=group.where)
            needed = capacity if group.whole and capacity is not None else start + count
            if capacity is not None:
                needed = min(needed, capacity)
            pages = max(pages, self.growth.pages(needed, capacity), *(store.pages for store in state.stores.values()))
        for state in call.states:
            for store in state.stores.values():
                store.reserve(pages)

    def __call__(self, *args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self._run(args)

    def _run(self, args: tuple[Any, ...]) -> Any:
        if self.decode_arguments:
            args = tuple(handles.decoded(arg) if index in self.decode_arguments else arg for index, arg in enumerate(args))
        shapes = [tuple(args[group.argument].shape) if group.argument is not None else None for group in self.groups]
        call = self._prepare(args)
        variant = self._variant(call, args)
        if variant not in self.variants:
            self.variants[variant] = self.compile_variant(variant)
        rewritten, compiled = self.variants[variant]
        self._make_room(call, args)
        by_root = {
            (group.root, item.part): state.stores[item.part]
            for group, state in zip(self.groups, call.states, strict=True) for item in group.bindings
        }
        planes = [
            plane for item in rewritten.bindings for plane in by_root[item.plan.slot.root, item.part].planes
        ]
        results = list(compiled(*[args[index] for index in rewritten.kept], *planes))
        return self._commit(call, args, shapes, results, rewritten)

    def _commit(self, call: _Call, args: tuple[Any, ...], shapes: list[Any], results: list[Any], rewritten: Rewritten) -> tuple[Any, ...]:
        made: dict[int, Any] = {}
        for group, state, start, count, shape in zip(self.groups, call.states, call.starts, call.counts, shapes, strict=True):
            if group.kind in {SlotKind.BUFFER, SlotKind.BORN_BUFFER}:
                capacity = self.sizes.read(value_of(group.root).shape[group.token_dim], args)
                state.epoch += 1
                state.length = min(max(state.length, start + count), capacity)
                if group.argument is not None:
                    tensor = args[group.argument]
                    tensor._length, tensor._epoch = state.length, state.epoch
            else:
                state.advance(start, count)
            for output in group.outputs:
                made[output] = self._handle(group, state, shape, args)
        if not made:
            return tuple(results)
        rest = iter(results)
        return tuple(made[index] if index in made else next(rest) for index in range(rewritten.results))

    def _handle(self, group: Group, state: CacheState, shape: tuple[int, ...] | None, args: tuple[Any, ...]) -> Any:
        fake = value_of(group.root)
        if shape is None:
            shape = tuple(self.sizes.read(size, args) for size in fake.shape)
        if group.kind in {SlotKind.CONCAT, SlotKind.BORN_CONCAT}:
            shape = tuple(state.length if dim == group.token_dim else size for dim, size in enumerate(shape))
        return handles.make(state, shape, fake.dtype, fake.device)


def group_bindings(captured: Captured, bindings: tuple[Binding, ...], whole: Callable[[Binding], bool]) -> tuple[Group, ...]:
    """Bindings grouped by the cache tensor that they live in."""
    by_root: dict[fx.Node, list[Binding]] = {}
    for item in bindings:
        by_root.setdefault(item.plan.slot.root, []).append(item)
    groups = []
    for root, items in by_root.items():
        first = items[0]
        groups.append(Group(
            first.plan.slot.kind, first.argument, first.outputs, tuple(items), root, source_line(first.plan.slot.write.node),
            any(whole(item) for item in items),
        ))
    del captured
    return tuple(groups)


def reads_whole(limit: LimitKind, kind: SlotKind, read: Any, capacity: Any) -> bool:
    """Whether an attention may read a buffer beyond what was written: then all of it must be held."""
    if kind not in {SlotKind.BUFFER, SlotKind.BORN_BUFFER}:
        return False
    if limit is LimitKind.CONST:
        return True
    return limit is LimitKind.ALL and isinstance(read, int) and isinstance(capacity, int) and read == capacity


__all__ = ["BoundGraph", "Group", "LayoutChanged", "SizeReader", "group_bindings", "reads_whole"]
