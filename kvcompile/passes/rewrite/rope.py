"""RoPE tables: what a rewritten graph does for keys that are stored before RoPE.

New keys are turned back by the angles of their place in the store, which counts from the row's first token, and
attention turns what it reads by the same angles; so neither needs to know the caller's positions, one table
serves all rows and layers, and the model's own keys come back exactly (``runtime.rope`` says more). The table
is made once a call for all layers that grow alike, for as many places as the stores have room for.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.match.rope.angles import tables
from kvcompile.passes.match.rope.rope import KeyRope
from kvcompile.passes.plan.plan import SlotPlan
from kvcompile.passes.rewrite.planes import Planes
from kvcompile.types import PAGE


class RopeTables:
    """Emits the cosines and sines that the sites of one graph need, each once.

    ``all_empty``: all stores are empty, so that this call's masks say where rows begin.
    """

    def __init__(self, planes: Planes, all_empty: bool) -> None:
        self.planes, self.all_empty = planes, all_empty
        self.places: dict[Any, fx.Node] = {}
        self.made: dict[Any, list[fx.Node]] = {}

    def undo(self, emit: Emitter, slot: SlotPlan, keys: fx.Node, position: fx.Node, origin: fx.Node | None) -> fx.Node:
        """New keys [B, K, S, D] at ``position`` as they are stored; ``origin``: the first token that this call's mask shows in each row."""
        rope = slot.rope
        if rope is None:
            return keys
        place = self._place(emit, slot, position, origin)
        cos, sin = self._at(emit, slot, rope, place)
        return emit.call(torch.ops.kvcompile.undo_rope.default, keys, cos, sin, rope.interleaved)

    def operands(self, emit: Emitter, slot: SlotPlan) -> list[Any]:
        """The operands of attend that turn what is stored: the tables of every place, and how channels are paired."""
        if slot.rope is None:
            return []
        plane = self.planes.of(slot)[0]
        # Stores that grow alike have as many places.
        key = "all", slot.growing
        if key not in self.places:
            count = emit.call(operator.mul, emit.call(aten.sym_size.int, plane, 0), PAGE)
            self.places[key] = emit.positions(count, 0, value_of(slot.slot.root).device)
        return [self._at(emit, slot, slot.rope, self.places[key]), slot.rope.interleaved]

    def _place(self, emit: Emitter, slot: SlotPlan, position: fx.Node, origin: fx.Node | None) -> fx.Node:
        """Where new tokens stand in the store, int64 [1 or B, S]: positions less the row's origin, as the append will count."""
        if origin is None:
            return position
        where = slot.slot.part
        key = (position, origin, None if self.all_empty else where)
        if key not in self.places:
            if not self.all_empty:
                # Of the store itself: nothing holds the stores of all layers together.
                clock = self.planes.named(slot)["clock"]
                for dim, at in ((0, 0), (1, 0), (1, 0), (1, 1)):
                    clock = emit.call(aten.select.int, clock, dim, at)
                # As ``append_window.begins`` has it.
                first = emit.call(aten.select.int, position, 1, 0)
                padded = emit.call(aten.ge.Tensor, emit.call(aten.minimum.default, clock, origin), first)
                begins = emit.call(aten.logical_or.default, emit.call(aten.eq.Scalar, first, 0), padded)
                origin = emit.call(aten.where.self, begins, origin, clock)
            self.places[key] = emit.call(aten.sub.Tensor, position, emit.call(aten.unsqueeze.default, origin, 1))
        return self.places[key]

    def _at(self, emit: Emitter, slot: SlotPlan, rope: KeyRope, place: fx.Node) -> list[fx.Node]:
        key = (rope.angles, rope.constants, place)
        if key not in self.made:
            constants = [emit.copies[node] for node in rope.constants]
            shapes = [value_of(node).shape for node in rope.constants]
            self.made[key] = tables(rope.angles, emit.call, place, constants, shapes, value_of(slot.slot.root).device)
        return self.made[key]
