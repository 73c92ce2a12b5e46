"""Reads: check that no operand is written to between the model's read and the rewritten graph's later read.

::

    pos = counter[:n]; cache[pos] = k; counter.add_(n)      attend(..., base=pos - window) would see the advanced counter
"""

from __future__ import annotations

from torch import fx

from kvcompile.errors import Unsupported
from kvcompile.passes.graph.effects import gives_view, view_parent, written_arguments
from kvcompile.passes.graph.shapes import op_name, source_line
from kvcompile.passes.rewrite.context import Context


def check_reads(context: Context) -> None:
    """Raise Unsupported if an added node reads a value after a write to it, while the model only reads it before that write."""
    effects = context.effects
    captured = {new: old for old, new in context.copies.items()}
    place = {node: index for index, node in enumerate(context.graph.nodes)}
    origins: dict[fx.Node, fx.Node] = {}
    for node in context.graph.nodes:
        if node.op != "call_function" or node in captured:
            continue
        for item in node.all_input_nodes:
            origin = captured.get(item, origins.get(item))
            if origin is None:
                continue
            ahead = [write for write in effects.writes_after(origin) if place.get(context.copies[write], len(place)) < place[node]]
            changed = [write for write in ahead if effects.order[write] > _last_read(origin, effects.order)]
            if changed:
                raise Unsupported(
                    expected="operands that nothing changes before the attention",
                    found=f"{op_name(changed[0])} on {origin.name} before it is read",
                    where=source_line(changed[0]), todo="change a copy (x = x + 1 rather than x += 1)",
                )
            if node.args[:1] == (item,) and gives_view(node):
                origins[node] = origin


def _last_read(node: fx.Node, order: dict[fx.Node, int]) -> int:
    """Return the index in ``order`` of the last reader of a value or of its views, writes to it excluded; -1 without any."""
    last = -1
    for user in node.users:
        if view_parent(user) is node:
            last = max(last, -1 if written_arguments(user) else order[user], _last_read(user, order))
        elif user.op != "output":
            last = max(last, order[user])
    return last
