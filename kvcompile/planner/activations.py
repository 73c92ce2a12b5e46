"""Activations: the most bytes of intermediate values that a captured graph holds at once, by liveness over its nodes.

Every value has a buffer of its own from the node that makes it to its last reader, views share their base's, and nothing is fused. A
compiler that fuses holds less, so this is an estimate from above of what is live; an allocator's rounding and the workspaces of
kernels come on top. Attention is taken as rewritten: it reads queries and the new keys and values, and needs no mask in memory, no
repeated heads and no dense cache, so that what only these need is left out. Weights and other arguments of the call count elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import fx

from kvcompile.passes.graph.effects import same_memory, view_parent
from kvcompile.passes.graph.shapes import hint, is_tensor, value_of
from kvcompile.passes.match.sites import Site
from kvcompile.planner.observer import Seen


def _nbytes(node: fx.Node) -> int:
    value = value_of(node)
    return math.prod(hint(size) for size in value.shape) * value.dtype.itemsize


def _reads(node: fx.Node, sites: dict[fx.Node, Site]) -> Iterable[fx.Node]:
    """The values that a node reads; those of a rewritten attention are its queries and the new tokens of its cache."""
    site = sites.get(node)
    if site is None:
        return node.all_input_nodes
    attention = site.attention
    beside = [] if attention.beside is None else [attention.beside.q]
    return [attention.q, *beside, *(slot.write.values for slot in site.slots if slot.kind.facts.written)]


def _needed(outputs: Iterable[fx.Node], sites: dict[fx.Node, Site]) -> set[fx.Node]:
    """The nodes that ``outputs`` need once attentions are rewritten."""
    found: set[fx.Node] = set()
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += _reads(node, sites)
    return found


def _owner(node: fx.Node) -> fx.Node:
    """The node whose buffer a value lies in: the base of its views."""
    parent = view_parent(node)
    while parent is not None and is_tensor(parent) and same_memory(node, parent):
        node, parent = parent, view_parent(parent)
    return node


def peak_bytes(seen: Seen) -> int:
    """Bytes that are live at once in one graph, at the sizes that it was captured with."""
    graph = seen.captured.graph
    sites = {site.attention.output: site for site in seen.matched.sites}
    caches = {index for site in seen.matched.sites for slot in site.slots for index in slot.outputs}
    results = graph.output_node().args[0]
    listed = results if isinstance(results, (list, tuple)) else (results,)
    outputs = [item for index, item in enumerate(listed) if isinstance(item, fx.Node) and index not in caches]
    order = [node for node in graph.nodes if node.op == "call_function"]
    needed = _needed(outputs, sites)
    last: dict[fx.Node, int] = {}
    for index, node in enumerate(order):
        if node in needed:
            for read in _reads(node, sites):
                if is_tensor(read):
                    last[_owner(read)] = index
    for node in outputs:
        if is_tensor(node):
            last[_owner(node)] = len(order)
    dying: dict[int, list[fx.Node]] = {}
    for owner, index in last.items():
        dying.setdefault(index, []).append(owner)
    live, most = {}, 0
    total = 0
    for index, node in enumerate(order):
        if node in needed and is_tensor(node) and node in last and _owner(node) is node:
            live[node] = _nbytes(node)
            total += live[node]
            most = max(most, total)
        for owner in dying.get(index, ()):
            total -= live.pop(owner, 0)
    return most
