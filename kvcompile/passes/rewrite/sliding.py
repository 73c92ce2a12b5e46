"""Sliding caches: where new tokens go, what attention reads, and masks in the order of the slots.

One new token is written over the oldest one and attention reads the slots as they lie: the order of keys does
not matter to it, so only masks have to follow, from the order of the tokens to that of the slots. Several new
tokens may be more than the cache has room for: attention then reads a copy of the codes in the order of the
tokens (``kvcompile::unroll``), and masks stay as they are.

The position of the next token comes as an input, the cursor: one a number of slots, a tensor, so that no step
recompiles, waits for the device or is recorded again.
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
    """The sliding caches of one graph while it is rewritten."""

    graph: fx.Graph
    cursors: dict[int, fx.Node] = field(default_factory=dict)
    linear: dict[Part, list[fx.Node]] = field(default_factory=dict)
    orders: dict[Any, tuple[fx.Node, fx.Node]] = field(default_factory=dict)
    masks: dict[Any, Visibility] = field(default_factory=dict)
    positions: dict[Any, fx.Node] = field(default_factory=dict)

    def cursor(self, sliding: SlidingCache) -> fx.Node:
        """The slot of the next token, int64 [1]."""
        if sliding.slots not in self.cursors:
            last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
            with self.graph.inserting_after(last):
                self.cursors[sliding.slots] = self.graph.placeholder(f"kv_cursor_{sliding.slots}")
        return self.cursors[sliding.slots]

    def finalize(self) -> tuple[int, ...]:
        """Move the cursors behind the planes; the numbers of slots of their caches, in order."""
        for node in self.cursors.values():
            [item for item in self.graph.nodes if item.op == "placeholder"][-1].append(node)
        return tuple(self.cursors)

    # --- writing ---------------------------------------------------------------------------------

    def append(
        self, emit: Emitter, slot: SlotPlan, source: fx.Node, planes: list[fx.Node], tables: list[fx.Node], device: torch.device, anew: bool
    ) -> None:
        """Write the new tokens of one slot, encoded with ``tables``; ``anew``: the cache is empty."""
        sliding = slot.slot.sliding
        assert sliding is not None
        one = isinstance(slot.slot.write.count, int) and slot.slot.write.count == 1
        if not (one or anew or sliding.refilled or slot.slot.placeholder is None):
            self.unroll(emit, slot, source, planes, tables)
        kept, count = self.newest(emit, slot, source)
        position = self.position(emit, slot, count, device, anew or slot.slot.placeholder is None)
        emit.call(torch.ops.kvcompile.append.default, kept, planes, position, slot.scheme.spec(), *([None, tables] if tables else []))

    def newest(self, emit: Emitter, slot: SlotPlan, source: fx.Node) -> tuple[fx.Node, Any]:
        """(the new tokens that are still there after the call, how many they are); the others are never written."""
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
        """Slots of the ``kept`` newest tokens, int64 [1, kept]; ``anew``: the cache is filled from its first slot."""
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
        """Ahead of a write of several tokens: what attention will read, in the order of the tokens."""
        sliding = slot.slot.sliding
        assert sliding is not None
        cursor, past = self.cursor(sliding), emit.size(sliding.past)
        given = (source, planes, cursor, past, sliding.slots, slot.scheme.spec(), *([tables] if tables else []))
        made = emit.call(torch.ops.kvcompile.unroll.default, *given)
        self.linear[slot.slot.part] = [emit.call(operator.getitem, made, at) for at in range(len(planes))]

    # --- reading ---------------------------------------------------------------------------------

    def reads_slots(self, slot: SlotPlan) -> bool:
        """Whether attention reads a slot's store in the order of its slots, and not a copy in the order of the tokens."""
        return slot.slot.part not in self.linear

    def order(self, emit: Emitter, sliding: SlidingCache, count: Any, device: torch.device) -> tuple[fx.Node, fx.Node]:
        """(which of the ``count`` tokens read each slot holds, whether it holds one): int64 and bool [slots]."""
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
        """The mask of one new token over the slots, from its mask over the tokens that are read."""
        sliding, site = item.key.slot.sliding, item.site
        assert sliding is not None
        count = sliding.past + 1
        if seen.hides_nothing and (same(count, sliding.slots) or _all_of_it(item.key.slot)):
            # Until such a sliding cache is full its first slots hold the tokens, in order (``runtime.token_slots.readdressed`` sees to it).
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
    """Whether attention reads all of a cache tensor that is as long as it has tokens."""
    assert slot.sliding is not None
    if not slot.kind.facts.extended or slot.placeholder is None:
        return False
    return same(slot.sliding.past, value_of(slot.placeholder).shape[slot.axes.token_dim])


def _boolean(site: Site) -> bool:
    return all(term.kind is not MaskKind.ADD for term in site.bounds.carried)


def covered(site: Site, limit: Limit) -> bool:
    """Whether a limit over the tokens that are read hides none of them, or none that a carried mask does not hide as well."""
    carried_says_so = len(site.attention.masks) == 1 and bool(site.bounds.carried) and not site.attention.causal
    if carried_says_so or limit.kind is LimitKind.ALL:
        return True
    if limit.kind is not LimitKind.CONST or site.key.sliding is None:
        return False
    at = limit.shift
    return at_most(site.key.sliding.past, at) if limit is site.bounds.hi else at_most(at, 0)
