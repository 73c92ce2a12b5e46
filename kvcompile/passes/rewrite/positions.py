"""Positions: the position of each new token in its store."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.match.sites import Position
from kvcompile.passes.plan.plan import SlotPlan
from kvcompile.passes.rewrite.rewritten import Variant


class NewPositions:
    """Positions of new tokens, int64 [1 or B, S]; equal writes share them.

    ::

        index_copy(cache, 2, cache_position, k)   ->  append(k, planes, unsqueeze(cache_position, 0))
        cat([past, k], 2)                         ->  append(k, planes, arange(S) + past.shape[2])
        any write into an empty cache (FRESH)     ->  append(k, planes, arange(S))
    """

    def __init__(self, variant: Variant, effects: Effects) -> None:
        self.variant, self.effects = variant, effects
        self._made: dict[Any, fx.Node] = {}

    def of(self, emit: Emitter, slot: SlotPlan) -> fx.Node:
        """Return the positions of a slot's new tokens, emitted once."""
        key = self._key(slot)
        if key not in self._made:
            self._made[key] = self._emit(emit, slot)
        return self._made[key]

    def _key(self, slot: SlotPlan) -> Any:
        """Return a key that is equal for writes at equal positions."""
        write = slot.slot.write
        where = write.position
        if self.variant is Variant.FRESH:
            return "fresh", str(write.count)
        if where.index is not None:
            return "index", where.index
        if where.past is not None:
            return "past", str(value_of(where.past).shape[write.token_dim]), str(write.count)
        return "offset", where.offset, str(write.count)

    def _emit(self, emit: Emitter, slot: SlotPlan) -> fx.Node:
        write = slot.slot.write
        where, device = write.position, value_of(write.values).device
        if self.variant is Variant.FRESH:
            return emit.positions(write.count, 0, device)
        if where.index is not None:
            found = indexed(emit, where)
            # Attention reads the positions too, and a counter that they are a view of is advanced before it.
            return emit.call(aten.clone.default, found) if self.effects.writes_after(where.index) else found
        if where.past is not None:
            return emit.positions(write.count, emit.size(value_of(where.past).shape[write.token_dim]), device)
        offset = emit.copies[where.offset] if isinstance(where.offset, fx.Node) else emit.size(where.offset)
        return emit.positions(write.count, offset, device)


def indexed(emit: Emitter, where: Position) -> fx.Node:
    """Emit positions from a tensor of the graph, as int64 [1 or B, S]."""
    assert where.index is not None
    index, seen = emit.copies[where.index], value_of(where.index)
    if seen.dtype != torch.int64:
        index = emit.call(aten.to.dtype, index, torch.int64)
    if where.roles:
        return emit.arrange(index, where.roles, ("B", "S"))
    if seen.dim() == 0:
        index = emit.call(aten.reshape.default, index, [1])
    if where.rows and seen.dim() == 1:
        index = emit.call(aten.unsqueeze.default, index, 1)
    return index if where.rows else emit.call(aten.unsqueeze.default, index, 0)
