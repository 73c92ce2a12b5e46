"""Nested regions: Dynamo's graph in which every call of a region's graph is replaced by that graph's own nodes.

``torch.compiler.nested_compile_region`` marks a function, say a layer, that Dynamo then traces once and calls many times
(``invoke_subgraph``). Recognisers read one flat graph: an attention inside of a region that is called would stay dense unseen, and a
cache written there would look unwritten.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

REGION = "invoke_subgraph"
STACK = "nn_module_stack"


def is_region(node: fx.Node) -> bool:
    """Return whether a node calls a region's graph: operands (graph, name of the graph, its inputs)."""
    return node.op == "call_function" and getattr(node.target, "_name", "") == REGION


def inlined(gm: Any) -> fx.GraphModule:
    """Return the graph without calls of regions; the graph itself where it has none."""
    if not any(map(is_region, gm.graph.nodes)):
        return gm
    graph, attributes, first = fx.Graph(), dict[str, Any](), dict[str, fx.Node]()
    env: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if is_region(node):
            name = str(node.args[0].target)
            inputs = fx.node.map_arg(node.args[2:], env.__getitem__)
            env[node] = _body(graph, inlined(gm.get_submodule(name)), name, inputs, attributes, (first.setdefault(name, node), node))
        elif node.target is operator.getitem and node.args[0].op != "placeholder" and is_region(node.args[0]):
            env[node] = env[node.args[0]][node.args[1]]
        elif not (node.op == "get_attr" and node.users and all(map(is_region, node.users))):
            env[node] = _copy(graph, node, env)
            if node.op in {"get_attr", "call_module"}:
                attributes[str(node.target)] = operator.attrgetter(str(node.target))(gm)
    flat = fx.GraphModule(attributes, graph, gm.__class__.__name__)
    flat.meta = dict(gm.meta)
    return flat


def _body(
    graph: fx.Graph, body: fx.GraphModule, name: str, inputs: Any, attributes: dict[str, Any], calls: tuple[fx.Node, fx.Node]
) -> Any:
    """Copy a region's nodes and return its results; ``calls`` are the one that was traced and this one."""
    env: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
    traced, here = (dict(call.meta.get(STACK) or {}) for call in calls)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            return fx.node.map_arg(node.args[0], env.__getitem__)
        env[node] = new = _copy(graph, node, env)
        if node.op in {"get_attr", "call_module"}:
            new.target = f"{name}_{node.target}".replace(".", "_")
            attributes[new.target] = operator.attrgetter(str(node.target))(body)
        if STACK in node.meta:
            new.meta[STACK] = _moved(node.meta[STACK], traced, here)
    raise AssertionError("a graph without an output")


def _copy(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
    new = graph.node_copy(node, env.__getitem__)
    if hasattr(node, "_dynamo_source"):
        new._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    return new


def _moved(inner: dict[str, Any], traced: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """Return the modules around a node of a region as the call ``here`` has them, from those that the traced call has."""
    if traced == here or not traced or not here:
        return inner
    before, after = (next(reversed(stack.values()))[0] for stack in (traced, here))
    deeper = {key: (path.replace(before, after, 1), kind) for key, (path, kind) in inner.items() if key not in traced}
    return {**here, **deeper}
