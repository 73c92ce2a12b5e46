"""Rotation: emit the channel rotations of stores that keep rotated channels.

New tokens are rotated before they are stored and queries before they are used; attention's result over rotated values is rotated back.
Attention over this call's tokens alone is unrotated.
"""

from __future__ import annotations

import torch
from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.plan.plan import SlotPlan
from kvcompile.passes.rewrite.planes import Planes


def rotated(emit: Emitter, planes: Planes, slot: SlotPlan, node: fx.Node) -> fx.Node:
    """Emit tokens or queries [B, heads, S, D] rotated like the stored tokens of a slot."""
    return _emitted(emit, planes, slot, node, inverse=False)


def unrotated(emit: Emitter, planes: Planes, slot: SlotPlan, node: fx.Node) -> fx.Node:
    """Emit results [B, heads, S, D] over a slot's rotated tokens, rotated back."""
    return _emitted(emit, planes, slot, node, inverse=True)


def _emitted(emit: Emitter, planes: Planes, slot: SlotPlan, node: fx.Node, inverse: bool) -> fx.Node:
    rotation = slot.rotation
    if rotation is None:
        return node
    plane = None if rotation.plane is None else planes.named(slot)[rotation.plane]
    return emit.call(torch.ops.kvcompile.rotate_channels.default, node, rotation.order, plane, inverse)


def rotated_queries(emit: Emitter, planes: Planes, slots: tuple[SlotPlan, ...], q_BHSD: fx.Node) -> fx.Node:
    """Emit queries rotated like the keys; keys in several stores have consecutive channel ranges."""
    if all(slot.rotation is None for slot in slots):
        return q_BHSD
    if len(slots) == 1:
        return rotated(emit, planes, slots[0], q_BHSD)
    parts, start = [], 0
    for slot in slots:
        end = start + slot.spec.head_dim
        parts.append(rotated(emit, planes, slot, emit.call(aten.slice.Tensor, q_BHSD, 3, start, end)))
        start = end
    return emit.call(aten.cat.default, parts, -1)
