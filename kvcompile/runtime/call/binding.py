"""Binding: make the callable that finds the stores of each call's cache tensors and runs the compiled code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.match.mask.reach import reach
from kvcompile.passes.plan.plan import Plan
from kvcompile.passes.rewrite.rewritten import Rewritten, Variant
from kvcompile.runtime.call.bound import BoundGraph
from kvcompile.runtime.call.token_order import TokenOrder
from kvcompile.runtime.forms.form import CacheForm
from kvcompile.runtime.forms.linear import Linear
from kvcompile.runtime.forms.mask_extent import MaskExtent
from kvcompile.runtime.forms.paged import Paged
from kvcompile.runtime.forms.positions import limits_of, positions_of
from kvcompile.runtime.forms.sliding import Sliding
from kvcompile.runtime.forms.slot_groups import Group, group_bindings
from kvcompile.runtime.store.growth import Growth
from kvcompile.runtime.store.live_caches import LiveCaches


def form_of(group: Group, mask_extent: MaskExtent) -> CacheForm:
    """Return the form of a group's cache tensor."""
    slot = group.any_binding.plan.slot
    if slot.block_table is not None:
        return Paged(group)
    return Linear(group, mask_extent) if slot.sliding is None else Sliding(group, slot.sliding)


def bind(
    captured: Captured, planned: Plan, effects: Effects, first: Rewritten,
    compile_variant: Callable[[Variant], tuple[Rewritten, Callable[..., Any]]], growth: Growth, live: LiveCaches,
    decoded: tuple[int, ...] = (), densified: Mapping[int, str] | None = None,
) -> BoundGraph:
    """Return the callable of a captured graph with rewritten sites; ``first`` is any of its variants.

    ``compile_variant``: compiles a variant when a call first needs it. ``decoded``: indices of compressed arguments that belong to no site;
    those in ``densified`` are written by the graph (see ``BoundGraph``).
    """
    by_root = {(slot.root, slot.axes.select): item for item in planned.sites for slot in item.site.slots}
    sites = [by_root[binding.plan.slot.root, binding.part] for binding in first.bindings]
    groups = group_bindings(
        first.bindings, [item.site for item in sites], [reach(item.site) for item in sites], [limits_of(item.site) for item in sites]
    )
    index = {group.root: position for position, group in enumerate(groups)}
    pairs = tuple((index[item.site.key.root], index[slot.root]) for item in planned.sites for slot in item.site.slots[1:])
    positions = positions_of(captured, planned, effects)
    mask_extent = MaskExtent(captured, planned, effects)
    forms = tuple(form_of(group, mask_extent) for group in groups)
    order = TokenOrder(mask_extent)
    return BoundGraph(captured, forms, pairs, compile_variant, positions, growth, live, decoded, densified or {}, order, planned.sites)
