"""Nodes between a cache and the keys or values made from it: only the attention may read them, and none may be changed."""

from __future__ import annotations

from torch import fx

from kvcompile.passes.graph.effects import Effects, written_arguments
from kvcompile.passes.graph.operators import JOINS, MAKERS
from kvcompile.passes.graph.pullback import trace
from kvcompile.passes.graph.shapes import is_tensor, op_name, operand
from kvcompile.passes.match.sites import Miss
from kvcompile.passes.match.unmatched import cache_behind


def is_scratch(node: fx.Node, effects: Effects) -> bool:
    """Return whether a tensor is made in this graph, filled by copies alone, and not returned."""
    writes = effects.writes.get(node, ())
    if op_name(node) not in MAKERS or not writes or effects.outputs_of(effects.family(node)):
        return False
    return all(op_name(write) == "copy_" for write in writes)


def is_cached(node: fx.Node, effects: Effects) -> bool:
    """Return whether an operand of a projection is made from a cache."""
    base = trace(node, lambda item: op_name(item) in JOINS).base
    filled = base in effects.writes and (base.op == "placeholder" or op_name(base) in MAKERS)
    return filled or op_name(base) in JOINS or cache_behind(base, effects) is not None


def between(operands: tuple[fx.Node, ...], cached: set[fx.Node], effects: Effects) -> frozenset[fx.Node]:
    """Return the nodes that carry cached values to the operands, with the operands and without the ``cached`` nodes.

    Raises Miss where one of them is changed in place.
    """
    behind: set[fx.Node] = set()
    stack = [node for node in operands if node not in cached]
    while stack:
        node = stack.pop()
        if node in behind:
            continue
        behind.add(node)
        writes = effects.writes_to(node) if is_tensor(node) else ()
        stack += [item for item in (*node.all_input_nodes, *writes) if item not in cached]
    carrying: set[fx.Node] = set()
    roots: set[fx.Node] = set()
    ordered = sorted(behind, key=lambda item: effects.order[item])
    # A view of a fresh tensor may precede the write of cached values into it, so go through the nodes twice.
    for node in (*ordered, *ordered):
        carries = any(item in cached or item in carrying for item in node.all_input_nodes) or effects.root.get(node) in roots
        if carries and not op_name(node).startswith("sym_"):
            carrying.add(node)
            if op_name(node) == "copy_":
                roots.add(effects.root.get(operand(node), operand(node)))
    for node in carrying:
        if written_arguments(node) and not is_scratch(effects.root[written_arguments(node)[0]], effects):
            raise Miss(
                f"keys or values that are made from the cache are changed in place by {op_name(node)}", node,
                advice="compute them without changing them, or apply the change to what is cached",
            )
    return frozenset(carrying)
