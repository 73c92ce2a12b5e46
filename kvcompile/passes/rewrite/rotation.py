"""Basis: what a rewritten graph does for stores whose channels are rotated.

New tokens are rotated on their way into a store, queries on their way to it, and what attention makes of rotated values is rotated back.
Attention over the tokens of this call alone takes all of them as the model made them.
"""

from __future__ import annotations

import torch
from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.plan.plan import SlotPlan
from kvcompile.passes.rewrite.planes import Planes


def changed(emit: Emitter, planes: Planes, slot: SlotPlan, node: fx.Node, back: bool = False) -> fx.Node:
    """Emit tokens, queries or results [B, heads, S, D] of a slot in the basis of its store, or ``back`` from it."""
    basis = slot.basis
    if basis is None:
        return node
    plane = None if basis.plane is None else planes.named(slot)[basis.plane]
    return emit.call(torch.ops.kvcompile.change_basis.default, node, basis.order, plane, back)


def queries(emit: Emitter, planes: Planes, slots: tuple[SlotPlan, ...], q_BHSD: fx.Node) -> fx.Node:
    """Emit queries in the basis of the keys that they meet, whose channels stand behind one another where they lie in several stores."""
    if all(slot.basis is None for slot in slots):
        return q_BHSD
    if len(slots) == 1:
        return changed(emit, planes, slots[0], q_BHSD)
    parts, start = [], 0
    for slot in slots:
        end = start + slot.spec.head_dim
        parts.append(changed(emit, planes, slot, emit.call(aten.slice.Tensor, q_BHSD, 3, start, end)))
        start = end
    return emit.call(aten.cat.default, parts, -1)
