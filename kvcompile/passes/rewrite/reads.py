"""Reads: what a rewrite adds reads operands later than the model did, so none of them may have been written to in between.

::

    pos = counter[:n]; cache[pos] = k; counter.add_(n)      attend(..., base=pos - window) would see the counter as it is afterwards
"""

from __future__ import annotations

from torch import fx

from kvcompile.errors import Unsupported
from kvcompile.passes.graph.effects import analyse
from kvcompile.passes.graph.shapes import op_name, source_line, value_of


def check_reads(graph: fx.Graph) -> None:
    """Raise Unsupported where a node that the rewrite of ``graph`` added reads a value of the model that changed since it was made."""
    effects = analyse(graph)
    origins: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or value_of(node) is not None:
            continue
        for item in node.all_input_nodes:
            origin = item if value_of(item) is not None else origins.get(item)
            if origin is None:
                continue
            if changed := effects.writes_between(origin, origin, node):
                raise Unsupported(
                    expected="what an attention reads to stay as it was", found=f"{op_name(changed[0])} on {origin.name} before it is read",
                    where=source_line(changed[0]), todo="change a copy (x = x + 1 rather than x += 1)",
                )
            if _may_share(node, item):
                origins[node] = origin


def _may_share(node: fx.Node, item: fx.Node) -> bool:
    """Whether a call's result may lie in the memory of its first operand ``item``."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns or not schema.arguments or not node.args or node.args[0] is not item:
        return False
    out, into = schema.returns[0].alias_info, schema.arguments[0].alias_info
    return out is not None and into is not None and bool(out.before_set & into.before_set)
