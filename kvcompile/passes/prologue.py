"""The prologue: the few nodes that compute write positions and limits, as a graph of its own.

The host runs it where it must know a position and may wait for it: when a filled cache is adopted and
when an empty one is first written. In a decode step it never runs.
"""

from __future__ import annotations

from torch import fx

from kvcompile.passes.capture import Captured
from kvcompile.passes.effects import Effects, written_arguments
from kvcompile.passes.shapes import is_tensor


def extract(captured: Captured, wanted: tuple[fx.Node, ...], effects: Effects) -> tuple[fx.GraphModule, tuple[int, ...], bool]:
    """(module, arguments it takes, whether it writes to any of them) computing ``wanted`` as the graph would."""
    needed: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        stack.extend(node.all_input_nodes)
        if is_tensor(node):
            # A value is what the writes before its readers made it.
            stack.extend(effects.writes.get(effects.root.get(node, node), ()))
    last = max((effects.order[node] for node in wanted), default=0)
    ordered = [node for node in captured.graph.nodes if node in needed and effects.order[node] <= last]
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in ordered:
        env[node] = graph.node_copy(node, lambda item: env[item])
    graph.output(tuple(env[node] for node in wanted))
    taken = tuple(entry.index for entry in captured.inputs if entry.node in needed)
    writes = any(written_arguments(node) for node in ordered)
    return fx.GraphModule(captured.module, graph), taken, writes
