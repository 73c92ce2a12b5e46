"""RoPE tables: cosines and sines for keys that are stored before RoPE.

New keys are rotated back by the angles of their index in the store, counted from the row's first token, and attention rotates the
keys that it reads by the same angles. So neither needs the caller's positions, one table serves all rows and layers, and the model's own
keys are recovered exactly (see ``runtime.store.rope``). Tables are computed once a call for all layers of equal growth, for the whole
capacity of the stores.
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
    """Emits the cosines and sines for the sites of one graph, each once.

    ``all_empty``: all stores are empty, so this call's masks define the rows' origins.
    """

    def __init__(self, planes: Planes, all_empty: bool) -> None:
        self.planes, self.all_empty = planes, all_empty
        self.places: dict[Any, fx.Node] = {}
        self.made: dict[Any, list[fx.Node]] = {}

    def undo(self, emit: Emitter, slot: SlotPlan, keys: fx.Node, position: fx.Node, origin: fx.Node | None) -> fx.Node:
        """Emit new keys [B, K, S, D] at ``position`` with their RoPE undone; ``origin``: the first visible token of each row, or None."""
        if slot.rope is None:
            return keys
        return emit.call(torch.ops.kvcompile.undo_rope.default, keys, *self.angles(emit, slot, position, origin), slot.rope.interleaved)

    def angles(self, emit: Emitter, slot: SlotPlan, position: fx.Node, origin: fx.Node | None) -> list[fx.Node]:
        """Emit cos and sin [1 or B, S, Dr] at ``position``, for a slot whose keys are stored before RoPE."""
        assert slot.rope is not None
        return self._at(emit, slot, slot.rope, self._place(emit, slot, position, origin))

    def operands(self, emit: Emitter, slot: SlotPlan) -> list[Any]:
        """Return ``attend``'s operands ``rope`` and ``interleaved``, as graph nodes, emitted if need be; [] for keys stored after RoPE.

        ``rope``: cos and sin of all positions of the store. ``interleaved``: whether channels are paired with their neighbours.
        """
        if slot.rope is None:
            return []
        plane = self.planes.of(slot)[0]
        # Stores of equal growth have the same number of positions.
        key = "all", slot.growing
        if key not in self.places:
            count = emit.call(operator.mul, emit.call(aten.sym_size.int, plane, 0), PAGE)
            self.places[key] = emit.positions(count, 0, value_of(slot.slot.root).device)
        return [self._at(emit, slot, slot.rope, self.places[key]), slot.rope.interleaved]

    def _place(self, emit: Emitter, slot: SlotPlan, position: fx.Node, origin: fx.Node | None) -> fx.Node:
        """Return a node for new tokens' indices in the store, int64 [1 or B, S]: positions less the row's origin, as the append counts."""
        if origin is None:
            return position
        where = slot.slot.part
        key = (position, origin, None if self.all_empty else where)
        if key not in self.places:
            if not self.all_empty:
                # Per store: the stores of different layers need not agree.
                clock = self.planes.named(slot)["clock"]
                for dim, at in ((0, 0), (1, 0), (1, 0), (1, 1)):
                    clock = emit.call(aten.select.int, clock, dim, at)
                # As in ``append_window.begins``.
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
