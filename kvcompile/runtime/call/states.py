"""States: find the state behind each cache tensor of a call, or make one for a new or dense cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvcompile.errors import CachesSwapped, SchemeChanged, Unsupported
from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.match.rope.rope import KeyRope
from kvcompile.passes.rewrite.rewritten import Binding
from kvcompile.runtime.call.calibration import UncalibratedWarner
from kvcompile.runtime.forms.call_arguments import Call
from kvcompile.runtime.forms.form import CacheForm
from kvcompile.runtime.handle import tensor as handles
from kvcompile.runtime.store.adaptive_store import store_class
from kvcompile.runtime.store.growth import Growth
from kvcompile.runtime.store.live_caches import LiveCaches
from kvcompile.runtime.store.rope import Rope, RopeReader
from kvcompile.runtime.store.state import CacheState
from kvcompile.runtime.store.store import StoreSpec
from kvcompile.runtime.store.written_once import forget, remember_rows


def store_spec(binding: Binding) -> StoreSpec:
    """Return the spec of the store that a slot of the rewritten graph needs."""
    return StoreSpec(binding.plan.spec, binding.plan.scheme, binding.plan.layout)


def _other_store(expected: StoreSpec, found: StoreSpec | None, where: str) -> SchemeChanged:
    """Return the error for a cache with store ``found`` (None: no store for that part) instead of ``expected``."""
    if found is None:
        return SchemeChanged(expected=expected.scheme.display_name(), found="nothing for this part", where=where)
    if found.slot.role is not expected.slot.role:
        return CachesSwapped(
            expected=f"{expected.slot.role.value}s", found=f"that of {found.slot.role.value}s", scheme=expected.scheme.display_name(),
            where=where
        )
    names = [spec.scheme.display_name() for spec in (expected, found)]
    if names[0] == names[1]:
        names = [
            f"{text} of {slot.heads} heads of {slot.head_dim} channels in {str(slot.dtype).removeprefix('torch.')}"
            for text, slot in zip(names, (expected.slot, found.slot), strict=True)
        ]
    return SchemeChanged(expected=names[0], found=names[1], where=where)


class States:
    """Finds and creates the states of one graph's cache tensors, and registers them in ``live``."""

    def __init__(
        self, captured: Captured, forms: Sequence[CacheForm], growth: Growth, live: LiveCaches, calibration: UncalibratedWarner
    ) -> None:
        self.growth, self.live, self.calibration = growth, live, calibration
        rotations = {item.plan.rope for form in forms for item in form.group.bindings if item.plan.rope is not None}
        self.ropes: dict[KeyRope | None, RopeReader] = {rope: RopeReader(captured, rope) for rope in rotations}

    def find(self, form: CacheForm, call: Call, whole: Callable[[CacheForm, torch.Tensor], None]) -> CacheState:
        """Return the state of a call's cache tensor, found, created, or made by encoding a dense tensor.

        ``whole``: called if all slots of a dense tensor are encoded, written or not.

        Raises NotServed, SchemeChanged, CachesSwapped or AnglesChanged for a cache that this graph cannot serve, CacheStale for a handle
        whose tokens were overwritten.
        """
        group = form.group
        if group.argument is None:
            return self._empty(form, value_of(group.root).device, call)
        tensor = call.args[group.argument]
        if not handles.is_handle(tensor):
            return self._adopted(form, tensor, call, whole)
        state = tensor._kv
        form.check_layout(state)
        self._check_stores(form, state, call)
        if form.restarts(tensor._length, state):
            # A new sequence from the same empty cache: the two have no tokens in common.
            return self._empty(form, tensor.device, call)
        seen = handles.visible_length(tensor)
        state.resume(tensor._length, tensor._epoch, seen)
        state, length = form.fit(state, tensor._length, seen)
        if state is not tensor._kv:
            handles.attach(tensor, state, length)
        # An unpickled cache does not know its module.
        state.path, state.where = state.path or form.group.site.path, form.group.where
        self.live.add(state)
        return state

    def _check_stores(self, form: CacheForm, state: CacheState, call: Call) -> None:
        """Raise SchemeChanged or CachesSwapped if the stores of a state are not those that this graph's plan makes.

        For stores that hold keys before RoPE, also sets the angles; raises AnglesChanged if they changed.
        """
        where = form.group.where
        for item in form.group.bindings:
            store = state.stores.get(item.part)
            if store is None or store.spec != store_spec(item):
                raise _other_store(store_spec(item), store.spec if store is not None else None, where)
            if (reader := self.ropes.get(item.plan.rope)) is not None:
                store.rope = reader.check(store.rope, call.args, state.length, store.device, where)

    def _empty(self, form: CacheForm, device: torch.device, call: Call) -> CacheState:
        """Return a state without tokens for a new cache, with the number of rows and the device of a call."""
        state = self._made(form, form.rows(call), device, call.args)
        _count_places(form, state, call)
        return state

    def _made(self, form: CacheForm, batch: int, device: torch.device, args: tuple[Any, ...], known: bool = True) -> CacheState:
        """Return a state without tokens for ``batch`` rows on ``device``; ``args``: the call's arguments, from which RoPE angles are read.

        ``known``: register the state in ``live``.
        """
        bindings = form.group.bindings
        specs = {item: store_spec(item) for item in bindings}
        stores = {item.part: store_class(spec)(spec, batch, device, 0, self._rope(item, args)) for item, spec in specs.items()}
        axes = {item.part: item.plan.slot.axes for item in bindings}
        path = form.group.site.path
        state = CacheState(axes, stores, slots=form.slots, growth=self.growth, grown=form.kind.grows, path=path, where=form.group.where)
        if known:
            self.live.add(state)
        return state

    def _rope(self, binding: Binding, args: tuple[Any, ...]) -> Rope | None:
        reader = self.ropes.get(binding.plan.rope)
        return reader.read(args) if reader is not None else None

    def _adopted(self, form: CacheForm, tensor: torch.Tensor, call: Call, whole: Callable[[CacheForm, torch.Tensor], None]) -> CacheState:
        """Return a new state with the tokens of a dense cache tensor; the tensor becomes the state's handle, in place.

        Raises Unsupported if the graph writes the tensor in place and it does not own its memory. ``whole``: called if all slots are
        encoded.
        """
        prior = form.prior(tensor, call)
        owned = handles.can_take_over(tensor)
        if not owned and form.kind.in_place:
            raise Unsupported(
                expected="a cache tensor that owns its memory alone, as when this graph was compiled",
                found="a view, a parameter or a subclass, or one that something else holds a view of", where=form.group.where,
                todo="keep the cache in a plain tensor or buffer of its own, a clone of what was loaded from a file, and no view of it "
                "from call to call",
            )
        rows, said = form.rows(call), functools.partial(whole, form, tensor)
        state = self._made(form, rows, tensor.device, call.args)
        if (first := form.write.first_rows) is None or rows == tensor.shape[first.dim]:
            kept = form.adopt(tensor, state, prior, call, said)
        else:
            own, rest = tensor.tensor_split([rows], first.dim)
            remember_rows(tensor, own, 0)
            remember_rows(tensor, rest, rows)
            kept = form.adopt(own, state, prior, call, said)
            if rest.any():
                # Rows that this call does not bring hold tokens of an earlier one.
                others = self._made(form, rest.shape[first.dim], tensor.device, call.args, known=False)
                form.adopt(rest, others, prior, call, said, padded=False)
                state.parked = [others]
            del own, rest
        _count_places(form, state, call)
        self.live.measure()
        if kept:
            self.calibration.missed(form.group, "arrived filled")
        if owned:
            forget(tensor)
            handles.take_over(tensor, state)
        return state


def _count_places(form: CacheForm, state: CacheState, call: Call) -> None:
    """Record in the state how many tokens the caller's tensor has room for, if the tensor has a fixed length."""
    for group in state.groups if form.kind.fixed else ():
        group.places = form.capacity(call)
