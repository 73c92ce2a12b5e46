"""Paged caches: slot indices that are written and read, and attention over gathered tokens.

The store of a pool is one row of tokens, one for each slot. New tokens are encoded into their slots, and each row's tokens are gathered
from the planes as codes (``kvcompile::gather``), so that attention reads an ordinary store and masks stay unchanged; where they lie in
blocks (``blocks``), attention finds them by the numbers of the blocks instead. Layers that share a table share the indices.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import size_along, value_of
from kvcompile.passes.match.paged_places import BlockTable, Picked, Places
from kvcompile.passes.match.sites import Site
from kvcompile.passes.plan.plan import SlotPlan
from kvcompile.passes.rewrite.blocks import PoolBlocks
from kvcompile.passes.rewrite.new_tokens import broadcast

NOWHERE = -(2**40)
"""Value of an out-of-range index: no sum with it is a valid slot."""


def rows_of(site: Site) -> Any:
    """Return the number of batch rows of a site, an int or a SymInt, also if heads are flattened into them."""
    attention = site.attention
    known = {"H": site.heads, "K": site.heads // site.groups, "G": site.groups, "B": 1}
    inside = math.prod(known[part] for role in attention.q_roles if "B" in role for part in role)
    return size_along(attention.q, attention.q_roles, "B", inside)


@dataclass
class PagedCaches:
    """The paged caches of one graph during a rewrite."""

    effects: Effects
    made: dict[Any, fx.Node] = field(default_factory=dict)
    read: dict[Any, tuple[int, fx.Node]] = field(default_factory=dict)
    """Slot indices that are read, each with the order of the gather (in the captured graph) that they were emitted for."""

    # --- writing ---------------------------------------------------------------------------------

    def new_tokens(self, emit: Emitter, slot: SlotPlan) -> fx.Node:
        """Emit the written tokens as [1, K, S, D], with all token dims flattened to S slots."""
        write, spec = slot.slot.write, slot.spec
        assert write.places is not None
        node = broadcast(emit, write.values, write.places.shape)
        known = {"K": spec.heads, "D": spec.head_dim}
        chosen = dict(write.places.select)
        roles = list(write.places.dims)
        for at in range(len(roles) - 1, -1, -1):
            if not roles[at]:
                node = emit.call(aten.select.int, node, at, chosen.get(at, 0))
                roles.pop(at)
        node, roles = emit.apart(node, roles, known)
        along = write.places.along
        node = emit.arrange(node, roles, ("K", *(along or ("a",)), "D"))
        if len(along) > 1:
            node = emit.call(aten.flatten.using_ints, node, 1, len(along))
        if value_of(write.values).dtype != spec.dtype:
            node = emit.call(aten.to.dtype, node, spec.dtype)
        return emit.call(aten.unsqueeze.default, node, 0)

    def written(self, emit: Emitter, slot: SlotPlan, device: torch.device) -> fx.Node:
        """Emit the pool slots that the new tokens are written to, int64 [1, S]."""
        write = slot.slot.write
        places = write.places
        assert places is not None
        key = self._key(places, write.node)
        if key in self.made:
            return self.made[key]
        along = places.along
        terms = [emit.arrange(self._checked(emit, item), item.roles, along) for item in places.picked]
        for run in places.running:
            size = places.shape[places.dims.index(run.role)]
            iota = emit.call(aten.arange.default, emit.size(size), dtype=torch.int64, device=device)
            terms.append(emit.arrange(self._times(emit, iota, run.weight), (run.role,), along))
        node = self._total(emit, terms, places.first)
        self.made[key] = emit.call(aten.reshape.default, node, [1, -1])
        return self.made[key]

    # --- reading ---------------------------------------------------------------------------------

    def gathered(self, emit: Emitter, slot: SlotPlan, planes: list[fx.Node], device: torch.device, batch: Any) -> list[fx.Node]:
        """Emit the gather of a slot's ``planes``; return the gathered planes that attention reads, [1, B, K, T, width] each."""
        table = slot.slot.block_table
        assert table is not None
        key = ("planes", table.gather, *planes)
        if key not in self.made:
            places = self._read(emit, slot, device, batch)
            self.made[key] = emit.call(torch.ops.kvcompile.gather.default, planes, places, slot.spec.head_dim, slot.scheme.spec())
        gather = self.made[key]
        return [emit.call(operator.getitem, gather, at) for at in range(len(planes))]

    def _read(self, emit: Emitter, slot: SlotPlan, device: torch.device, batch: Any) -> fx.Node:
        """Emit the pool slots that hold each batch row's tokens, int64 [B, T], in the order of tokens."""
        table = slot.slot.block_table
        assert table is not None
        return self._slots_of(emit, table, device, batch, table.tokens, 1)

    def blocks(self, emit: Emitter, slot: SlotPlan, device: torch.device, batch: Any, blocks: PoolBlocks) -> fx.Node:
        """Emit the numbers of the pool's blocks that hold each batch row's tokens, int64 [B, E], negative where the pool has no block."""
        table = slot.slot.block_table
        assert table is not None
        return self._slots_of(emit, table, device, batch, blocks.entries, blocks.every)

    def _slots_of(self, emit: Emitter, table: BlockTable, device: torch.device, batch: Any, entries: Any, every: int) -> fx.Node:
        """Emit the slot of the first of every ``every`` tokens of each batch row, divided by ``every``: int64 [B, entries]."""
        places = table.places
        key, at = (*self._key(places, table.gather), str(entries), every, str(batch)), self.effects.order[table.gather]
        if key in self.read and self.read[key][0] <= at:
            return self.read[key][1]
        token = emit.call(aten.arange.default, emit.size(entries), dtype=torch.int64, device=device)
        token = self._times(emit, token, every)
        terms = [self._along_tokens(emit, item, token, table.tokens, batch) for item in places.picked]
        for run in places.running:
            if run.role == "T":
                column = emit.call(aten.unsqueeze.default, emit.call(aten.remainder.Scalar, token, run.size), 0)
            else:
                rows = emit.call(aten.arange.default, emit.size(batch), dtype=torch.int64, device=device)
                column = emit.call(aten.unsqueeze.default, rows, 1)
            terms.append(self._times(emit, column, run.weight))
        node = self._total(emit, terms, places.first)
        if every > 1:
            node = emit.call(aten.div.Scalar_mode, node, every, rounding_mode="floor")
        self.read[key] = at, emit.call(aten.expand.default, node, [emit.size(batch), emit.size(entries)])
        return self.read[key][1]

    def _along_tokens(self, emit: Emitter, item: Picked, token: fx.Node, tokens: Any, batch: Any) -> fx.Node:
        """Emit an index tensor's contribution to the slot of every token, int64 [1 or B, 1 or T]."""
        node, roles = emit.apart(self._checked(emit, item), item.roles, {"B": emit.size(batch)})
        inner = [role for role in ("N", "O", "T") if role in roles]
        node = emit.arrange(node, roles, ("B", *(inner or ("T",))))
        if not inner:
            return node
        if len(inner) > 1:
            node = emit.call(aten.flatten.using_ints, node, 1, 2)
        at = token
        if inner == ["N"]:
            at = emit.call(aten.div.Scalar_mode, token, item.every, rounding_mode="floor")
        elif inner == ["O"]:
            at = emit.call(aten.remainder.Scalar, token, item.every)
        elif "T" in item.roles and str(value_of(item.node).shape[item.roles.index("T")]) == str(tokens):
            return node
        return emit.call(aten.index_select.default, node, 1, at)

    # --- both ------------------------------------------------------------------------------------

    def _key(self, places: Places, user: fx.Node) -> tuple[Any, ...]:
        """Return a key that is equal for indices with equal values; it includes ``user`` if the graph writes to an index tensor."""
        changing = any(self.effects.writes_to(item.node) for item in places.picked)
        return (places, user) if changing else (places,)

    def _checked(self, emit: Emitter, item: Picked) -> fx.Node:
        """Emit an index tensor as int64, multiplied by its weight, with NOWHERE for indices out of range."""
        node = emit.copies[item.node]
        if value_of(item.node).dtype != torch.int64:
            node = emit.call(aten.to.dtype, node, torch.int64)
        negative = emit.call(aten.lt.Scalar, node, 0)
        if item.wraps:
            node = emit.call(aten.where.self, negative, emit.call(aten.add.Scalar, node, item.size), node)
            negative = emit.call(aten.lt.Scalar, node, 0)
        outside = emit.call(aten.logical_or.default, negative, emit.call(aten.ge.Scalar, node, item.size))
        return emit.call(aten.masked_fill.Scalar, self._times(emit, node, item.weight), outside, NOWHERE)

    def _times(self, emit: Emitter, node: fx.Node, weight: int) -> fx.Node:
        return node if weight == 1 else emit.call(aten.mul.Scalar, node, weight)

    def _total(self, emit: Emitter, terms: list[fx.Node], first: int) -> fx.Node:
        node = terms[0]
        for other in terms[1:]:
            node = emit.call(aten.add.Tensor, node, other)
        return emit.call(aten.add.Scalar, node, first) if first else node
