"""Nested joins: rewrite ``cat(a, b, c)`` as ``cat(a, cat(b, c))`` where the graph has ``cat(b, c)`` too, as the matcher expects.

    keys = cat([memory, past, new], 2)              present = cat([past, new], 2)
    present = cat([past, new], 2)             is    keys = cat([memory, present], 2)

as models write it with learned memory tokens: attention reads them before the cached tokens, and the cache does not store them.
"""

from __future__ import annotations

import torch
from torch import fx

from kvcompile.passes.graph.effects import Effects, analyse
from kvcompile.passes.graph.operators import CONCATENATIONS
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, value_of

aten = torch.ops.aten


def nest_joins(graph: fx.Graph) -> None:
    """Rewrite in place each concatenation of three tensors as two nested ones, if the last two are also concatenated elsewhere."""
    joins = [node for node in graph.nodes if op_name(node) in CONCATENATIONS and len(bind(node)["tensors"]) == 3]
    effects = analyse(graph) if joins else None
    for node in joins:
        assert effects is not None
        twin = _twin(node, effects)
        if twin is None:
            continue
        first, *rest = bind(node)["tensors"]
        dim = bind(node)["dim"] % value_of(node).dim()
        with graph.inserting_before(node):
            inner = graph.call_function(aten.cat.default, (rest, dim))
            outer = graph.call_function(aten.cat.default, ([first, inner], dim))
        inner.meta, outer.meta = dict(twin.meta), dict(node.meta)
        for old, new in ((twin, inner), (node, outer)):
            if effects.order[old] >= effects.order[node]:
                old.replace_all_uses_with(new)
                graph.erase_node(old)
        if effects.order[twin] < effects.order[node]:
            inner.replace_all_uses_with(twin)
            graph.erase_node(inner)
        effects = analyse(graph)


def _twin(node: fx.Node, effects: Effects) -> fx.Node | None:
    """Return another concatenation of the last two parts of ``node``; None if there is none, or if either node is written to."""
    first, *rest = bind(node)["tensors"]
    if not all(is_tensor(part) for part in (first, *rest)):
        return None
    dim = bind(node)["dim"] % value_of(node).dim()
    other: fx.Node
    for other in rest[0].users:
        if op_name(other) not in CONCATENATIONS or bind(other)["tensors"] != rest or bind(other)["dim"] % value_of(other).dim() != dim:
            continue
        one, last = sorted((node, other), key=effects.order.__getitem__)
        written = [write for part in rest for write in effects.writes_between(part, one, last)]
        if not written and not effects.writes_to(node) and not effects.writes_to(other):
            return other
    return None
