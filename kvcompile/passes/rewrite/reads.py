"""Reads: what a rewrite adds reads operands later than the model did, so none of them may have been written to in between.

::

    pos = counter[:n]; cache[pos] = k; counter.add_(n)      attend(..., base=pos - window) would see the counter as it is afterwards
"""

from __future__ import annotations

from torch import fx

from kvcompile.errors import Unsupported
from kvcompile.passes.graph.effects import view_parent
from kvcompile.passes.graph.shapes import op_name, source_line
from kvcompile.passes.rewrite.context import Context


def check_reads(context: Context) -> None:
    """Raise Unsupported where a node that the rewrite added reads a value of the model behind a write that the model reads it ahead of."""
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
            writes = effects.writes.get(effects.root.get(origin, origin), ())
            later = [write for write in writes if effects.order[write] > max(effects.order[origin], _last_read(origin, effects.order))]
            changed = [write for write in later if place.get(context.copies[write], len(place)) < place[node]]
            if changed:
                raise Unsupported(
                    expected="what an attention reads to stay as it was", found=f"{op_name(changed[0])} on {origin.name} before it is read",
                    where=source_line(changed[0]), todo="change a copy (x = x + 1 rather than x += 1)",
                )
            if _may_share(node, item):
                origins[node] = origin


def _last_read(node: fx.Node, order: dict[fx.Node, int]) -> int:
    """Where in the model a value, or a view of it, is read last; a write to it is no reading."""
    last = -1
    for user in node.users:
        if view_parent(user) is node:
            last = max(last, order[user] if not _writes(user) else -1, _last_read(user, order))
        elif user.op != "output":
            last = max(last, order[user])
    return last


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _may_share(node: fx.Node, item: fx.Node) -> bool:
    """Whether a call's result may lie in the memory of its first operand ``item``."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns or not schema.arguments or not node.args or node.args[0] is not item:
        return False
    out, into = schema.returns[0].alias_info, schema.arguments[0].alias_info
    return out is not None and into is not None and bool(out.before_set & into.before_set)
