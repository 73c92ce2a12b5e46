"""Position graph: the few nodes that compute write positions and limits, as a separate graph.

The host runs it when it needs a position and may wait for it: when a filled cache is adopted, and when an empty one is first written.
Decode steps never run it.
"""

from __future__ import annotations

import networkx as nx
import torch
from torch import fx

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.effects import Effects, written_arguments
from kvcompile.passes.graph.shapes import is_tensor


def dataflow(captured: Captured, effects: Effects) -> nx.DiGraph:
    """Return the dataflow graph of all nodes: edges from operands, and from every write to a tensor, to its node."""
    flow = nx.DiGraph()
    for node in captured.graph.nodes:
        flow.add_node(node)
        flow.add_edges_from((operand, node) for operand in node.all_input_nodes)
        if is_tensor(node):
            flow.add_edges_from((write, node) for write in effects.writes_to(node) if write is not node)
    return flow


def extract(captured: Captured, wanted: tuple[fx.Node, ...], effects: Effects) -> tuple[fx.GraphModule, tuple[int, ...], bool]:
    """Return (a module that computes ``wanted``, the indices of the inputs it takes, whether it writes to any of them).

    Each value is that which its node has in the captured graph: a later write, for example to a counter, does not change it.
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
