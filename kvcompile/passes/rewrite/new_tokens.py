"""New tokens: the values written into a cache, in the layout of the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import same, value_of
from kvcompile.passes.plan.plan import SlotPlan


def new_tokens(emit: Emitter, slot: SlotPlan) -> fx.Node:
    """Emit a slot's new keys or values as [B, K, S, D]."""
    axes, write = slot.slot.axes, slot.slot.write
    held, rows = value_of(slot.slot.root).shape, write.first_rows
    full = [
        write.count if dim == write.token_dim else rows.count if rows is not None and dim == rows.dim else held[dim] for dim in write.dims
    ]
    node = broadcast(emit, write.values, full)
    roles: list[str] = []
    outside = dict(write.select)
    wanted, counts = dict(axes.select), dict(axes.counts)
    position = 0
    for dim in write.dims:
        label = axes.labels[dim]
        if not label:
            node = emit.call(aten.select.int, node, position, wanted.get(dim, outside.get(dim, 0)))
            continue
        if dim in counts:
            node = emit.call(aten.slice.Tensor, node, position, wanted[dim], wanted[dim] + counts[dim])
        if len(label) == 2:
            inner = slot.spec.head_dim if label[1] == "D" else slot.spec.heads
            node = emit.call(aten.unflatten.int, node, position, [-1, inner])
            position += 1
        position += 1
        roles += ["S" if role == "T" else role for role in label]
    if value_of(write.values).dtype != slot.spec.dtype:
        node = emit.call(aten.to.dtype, node, slot.spec.dtype)
    return emit.arrange(node, roles, ("B", "K", "S", "D"))


def broadcast(emit: Emitter, values: fx.Node, full: Sequence[Any]) -> fx.Node:
    """Emit written values broadcast to the sizes ``full`` (ints or SymInts) of the written region."""
    node, seen = emit.copies[values], value_of(values).shape
    missing = len(full) - len(seen)
    for _ in range(missing):
        node = emit.call(aten.unsqueeze.default, node, 0)
    given = [*[1] * missing, *seen]
    if all(same(have, want) for have, want in zip(given, full, strict=True)):
        return node
    # Only dims of size 1 are expanded.
    wanted = [emit.size(want) if same(have, 1) and not same(want, 1) else -1 for have, want in zip(given, full, strict=True)]
    return emit.call(aten.expand.default, node, wanted)
