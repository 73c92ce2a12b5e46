"""Sliding caches: slots of new tokens, the tokens that attention reads, and masks in slot order.

One new token overwrites the oldest one, and attention reads the slots in storage order: the order of keys does not matter to it, so only
masks are mapped from token order to slot order. Several new tokens may exceed the cache's room: attention then reads a copy of the
codes in token order (``kvcompile::unroll``), and masks stay unchanged.

The slot of the next token is an input tensor, the cursor, one for each number of slots, so that no step recompiles, waits for the
device or records a new CUDA graph.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import at_most, same, value_of
from kvcompile.passes.match.sites import Limit, LimitKind, MaskKind, Site, SlidingCache, Slot
from kvcompile.passes.plan.plan import SitePlan, SlotPlan
from kvcompile.passes.rewrite.context import Part
from kvcompile.passes.rewrite.visibility import Visibility


@dataclass
class SlidingCaches:
    """The sliding caches of one graph during a rewrite."""

    graph: fx.Graph
    cursors: dict[int, fx.Node] = field(default_factory=dict)
    linear: dict[Part, list[fx.Node]] = field(default_factory=dict)
    orders: dict[Any, tuple[fx.Node, fx.Node]] = field(default_factory=dict)
    masks: dict[Any, Visibility] = field(default_factory=dict)
    positions: dict[Any, fx.Node] = field(default_factory=dict)

    def cursor(self, sliding: SlidingCache) -> fx.Node:
        """Return the cursor, the slot of the next token, int64 [1]: a placeholder, created at first use for each number of slots."""
        if sliding.slots not in self.cursors:
            last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
            with self.graph.inserting_after(last):
                self.cursors[sliding.slots] = self.graph.placeholder(f"kv_cursor_{sliding.slots}")
        return self.cursors[sliding.slots]

    def finalize(self) -> tuple[int, ...]:
        """Move the placeholders of the cursors behind those of the planes; return the number of slots for each cursor, in order."""
        for node in self.cursors.values():
            [item for item in self.graph.nodes if item.op == "placeholder"][-1].append(node)
        return tuple(self.cursors)

    # --- writing ---------------------------------------------------------------------------------

    def append(
        self, emit: Emitter, slot: SlotPlan, source: fx.Node, planes: list[fx.Node], tables: list[fx.Node], device: torch.device, anew: bool
    ) -> None:
        """Emit the append of one slot's new tokens ``source``, encoded with ``tables``; ``anew``: the cache is empty."""
        sliding = slot.slot.sliding
        assert sliding is not None
        one = isinstance(slot.slot.write.count, int) and slot.slot.write.count == 1
        if not (one or anew or sliding.refilled or slot.slot.placeholder is None):
            self.unroll(emit, slot, source, planes, tables)
        kept, count = self.newest(emit, slot, source)
        position = self.position(emit, slot, count, device, anew or slot.slot.placeholder is None)
        emit.call(torch.ops.kvcompile.append.default, kept, planes, position, slot.scheme.spec(), *([None, tables] if tables else []))

    def newest(self, emit: Emitter, slot: SlotPlan, source: fx.Node) -> tuple[fx.Node, Any]:
        """Return (the new tokens that remain in the cache after the call, their number); older ones are never written."""
        sliding, count = slot.slot.sliding, slot.slot.write.count
        assert sliding is not None
        most = sliding.keep if sliding.refilled else sliding.slots
        if at_most(count, most):
            return source, count
        if at_most(most, count):
            kept = most
            start = count - most if isinstance(count, int) else emit.call(operator.sub, emit.size(count), most)
        else:
            kept = emit.call(torch.sym_min, emit.size(count), most)
            start = emit.call(operator.sub, emit.size(count), kept)
        return emit.call(aten.slice.Tensor, source, 2, start), kept

    def position(self, emit: Emitter, slot: SlotPlan, kept: Any, device: torch.device, anew: bool) -> fx.Node:
        """Emit the slots of the ``kept`` newest tokens, int64 [1, kept]; ``anew``: the cache is filled from its first slot."""
        sliding, count = slot.slot.sliding, slot.slot.write.count
        assert sliding is not None
        key = (sliding.slots, str(count), str(kept), anew or sliding.refilled)
        if key not in self.positions:
            length = kept if isinstance(kept, fx.Node) else emit.size(kept)
            if anew or sliding.refilled:
                node = emit.positions(length, 0, device)
            elif isinstance(count, int) and count == 1:
                node = emit.call(aten.unsqueeze.default, self.cursor(sliding), 0)
            else:
                first = self.cursor(sliding)
                if kept is not count:
                    both = isinstance(count, int) and isinstance(kept, int)
                    skipped = count - kept if both else emit.call(operator.sub, emit.size(count), kept)
                    first = emit.call(aten.add.Scalar, first, skipped)
                iota = emit.call(aten.arange.default, length, dtype=torch.int64, device=device)
                ahead = emit.call(aten.remainder.Scalar, emit.call(aten.add.Tensor, iota, first), sliding.slots)
                node = emit.call(aten.unsqueeze.default, ahead, 0)
            self.positions[key] = node
        return self.positions[key]

    def unroll(self, emit: Emitter, slot: SlotPlan, source: fx.Node, planes: list[fx.Node], tables: list[fx.Node]) -> None:
        """Emit, before a write of several tokens, a copy of the tokens that attention will read, in token order."""
        sliding = slot.slot.sliding
        assert sliding is not None
        cursor, past = self.cursor(sliding), emit.size(sliding.past)
        given = (source, planes, cursor, past, sliding.slots, slot.scheme.spec(), *([tables] if tables else []))
        made = emit.call(torch.ops.kvcompile.unroll.default, *given)
        self.linear[slot.slot.part] = [emit.call(operator.getitem, made, at) for at in range(len(planes))]

    # --- reading ---------------------------------------------------------------------------------

    def reads_slots(self, slot: SlotPlan) -> bool:
        """Return whether attention reads a slot's store in slot order rather than a copy in token order."""
        return slot.slot.part not in self.linear

    def order(self, emit: Emitter, sliding: SlidingCache, count: Any, device: torch.device) -> tuple[fx.Node, fx.Node]:
        """Emit for each slot the index of its token among the ``count`` tokens read, and whether it holds one: int64 and bool [slots]."""
        key = (sliding.slots, str(count))
        if key not in self.orders:
            iota = emit.call(aten.arange.default, sliding.slots, dtype=torch.int64, device=device)
            # The newest token has the last index: its slot is the cursor's.
            behind = emit.call(aten.remainder.Scalar, emit.call(aten.sub.Tensor, self.cursor(sliding), iota), sliding.slots)
            last = count - 1 if isinstance(count, int) else emit.call(operator.sub, emit.size(count), 1)
            index = emit.call(aten.add.Scalar, emit.call(aten.neg.default, behind), last)
            self.orders[key] = index, emit.call(aten.ge.Scalar, index, 0)
        return self.orders[key]

    def in_slot_order(self, emit: Emitter, item: SitePlan, seen: Visibility, device: torch.device) -> Visibility:
        """Emit the mask operands of a call with one new token, mapped from token order to slot order, and return them."""
        sliding, site = item.key.slot.sliding, item.site
        assert sliding is not None
        count = sliding.past + 1
        if seen.hides_nothing and (same(count, sliding.slots) or _all_of_it(item.key.slot)):
            # Until the cache is full, its first slots hold the tokens in order (``runtime.store.token_slots.readdressed`` ensures it).
            last = count - 1 if isinstance(count, int) else emit.call(operator.sub, emit.size(count), 1)
            return Visibility(emit.constant_limit(1, last, device))
        key = (sliding.slots, str(count), site.bounds, site.heads, site.groups)
        if key in self.masks:
            return self.masks[key]
        index, held = self.order(emit, sliding, count, device)
        inside = emit.call(aten.clamp.default, index, 0)
        terms = [] if same(count, sliding.slots) else [emit.call(aten.view.default, held, [1, 1, 1, sliding.slots])]
        for limit, compare in ((seen.hi, aten.le.Tensor), (seen.lo, aten.ge.Tensor)):
            if limit is not None:
                spread = emit.call(aten.unsqueeze.default, emit.call(aten.unsqueeze.default, limit, 1), 3)
                terms.append(emit.call(compare, emit.call(aten.view.default, index, [1, 1, 1, sliding.slots]), spread))
        if seen.keep is not None:
            kept = emit.call(aten.index_select.default, seen.keep, 1, inside)
            terms.append(emit.call(aten.unsqueeze.default, emit.call(aten.unsqueeze.default, kept, 1), 1))
        made: fx.Node | None = None
        if seen.bias is not None:
            made = emit.call(aten.index_select.default, seen.bias, 3, inside)
        boolean = seen.bias is None or _boolean(site)
        for term in terms:
            if made is None:
                made = term
            elif boolean:
                made = emit.call(aten.logical_and.default, made, term)
            else:
                made = emit.call(aten.masked_fill.Scalar, made, emit.call(aten.logical_not.default, term), float("-inf"))
        self.masks[key] = Visibility(emit.constant_limit(1, sliding.slots - 1, device), bias=made)
        return self.masks[key]


def _all_of_it(slot: Slot) -> bool:
    """Return whether attention reads all tokens of a sliding cache that grows by concatenation."""
    assert slot.sliding is not None
    if not slot.kind.facts.extended or slot.placeholder is None:
        return False
    return same(slot.sliding.past, value_of(slot.placeholder).shape[slot.axes.token_dim])


def _boolean(site: Site) -> bool:
    return all(term.kind is not MaskKind.ADD for term in site.bounds.carried)


def covered(site: Site, limit: Limit) -> bool:
    """Return whether a limit can be left out: every token that is read meets it, or a carried mask hides the tokens that do not."""
    carried_says_so = len(site.attention.masks) == 1 and bool(site.bounds.carried) and not site.attention.causal
    if carried_says_so or limit.kind is LimitKind.ALL:
        return True
    if limit.kind is not LimitKind.CONST or site.key.sliding is None:
        return False
    at = limit.shift
    return at_most(site.key.sliding.past, at) if limit is site.bounds.hi else at_most(at, 0)
