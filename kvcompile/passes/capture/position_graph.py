"""The prologue: the few nodes that compute write positions and limits, as a graph of its own.

The host runs it where it must know a position and may wait for it: when a filled cache is adopted and
when an empty one is first written. In a decode step it never runs.
"""

from __future__ import annotations

import networkx as nx
import torch
from torch import fx

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.effects import Effects, written_arguments
from kvcompile.passes.graph.shapes import is_tensor


def dataflow(captured: Captured, effects: Effects) -> nx.DiGraph:
    """Return the graph of what every value is made from: its operands, and the writes that came before its reader."""
    flow = nx.DiGraph()
    for node in captured.graph.nodes:
        flow.add_node(node)
        flow.add_edges_from((operand, node) for operand in node.all_input_nodes)
        if is_tensor(node):
            flow.add_edges_from((write, node) for write in effects.writes_to(node) if write is not node)
    return flow


def extract(captured: Captured, wanted: tuple[fx.Node, ...], effects: Effects) -> tuple[fx.GraphModule, tuple[int, ...], bool]:
    """(module, arguments it takes, whether it writes to any of them) computing ``wanted`` as the graph would.

    Each as it is where the graph makes it: a view of a counter is not what the counter becomes behind the write.
    """
    flow = dataflow(captured, effects)
    needed = set(wanted).union(*(nx.ancestors(flow, node) for node in wanted))
    last = max((effects.order[node] for node in wanted), default=0)
    ordered = [node for node in captured.graph.nodes if node in needed and effects.order[node] <= last]
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    results: dict[fx.Node, fx.Node] = {}
    for node in ordered:
        env[node] = results[node] = graph.node_copy(node, lambda item: env[item])
        if node in wanted and effects.writes_after(node):
            results[node] = graph.call_function(torch.ops.aten.clone.default, (env[node],))
    graph.output(tuple(results[node] for node in wanted))
    taken = tuple(entry.index for entry in captured.inputs if entry.node in needed)
    writes = any(written_arguments(node) for node in ordered)
    return fx.GraphModule(captured.module, graph), taken, writes
