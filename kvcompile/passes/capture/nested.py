"""Nested regions: inline every call of a region's graph into Dynamo's graph.

``torch.compiler.nested_compile_region`` marks a function, for example a layer, that Dynamo traces once and calls many times
(``invoke_subgraph``). The matcher reads one flat graph: it would miss an attention inside of a region, or a cache write there.
"""

from __future__ import annotations

import operator
from typing import Any, cast

from torch import fx

from kvcompile.passes.capture.attributes import copy_node

REGION = "invoke_subgraph"
STACK = "nn_module_stack"


def is_region(node: fx.Node) -> bool:
    """Return whether a node calls a region's graph, with arguments (graph, name of the graph, inputs)."""
    return node.op == "call_function" and getattr(node.target, "_name", "") == REGION


def inlined(gm: Any) -> fx.GraphModule:
    """Return ``gm`` with all calls of regions inlined; ``gm`` itself if it has none."""
    if not any(map(is_region, gm.graph.nodes)):
        return cast(fx.GraphModule, gm)
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
            env[node] = copy_node(graph, node, env)
            if node.op in {"get_attr", "call_module"}:
                attributes[str(node.target)] = operator.attrgetter(str(node.target))(gm)
    flat = fx.GraphModule(attributes, graph, gm.__class__.__name__)
    flat.meta = dict(gm.meta)
    return flat


def _body(
    graph: fx.Graph, body: fx.GraphModule, name: str, inputs: Any, attributes: dict[str, Any], calls: tuple[fx.Node, fx.Node]
) -> Any:
    """Copy a region's nodes into ``graph`` and return its results; ``calls`` are the region's first (traced) call and this one."""
    env: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
    traced, here = (dict(call.meta.get(STACK) or {}) for call in calls)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            return fx.node.map_arg(node.args[0], env.__getitem__)
        env[node] = new = copy_node(graph, node, env)
        if node.op in {"get_attr", "call_module"}:
            new.target = f"{name}_{node.target}".replace(".", "_")
            attributes[new.target] = operator.attrgetter(str(node.target))(body)
        if STACK in node.meta:
            new.meta[STACK] = _moved(node.meta[STACK], traced, here)
    raise AssertionError("a graph without an output")


def _moved(inner: dict[str, Any], traced: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """Return the module stack of a region's node in the call ``here``, from its stack ``inner`` in the traced call."""
    if traced == here or not traced or not here:
        return inner
    before, after = (next(reversed(stack.values()))[0] for stack in (traced, here))
    deeper = {key: (path.replace(before, after, 1), kind) for key, (path, kind) in inner.items() if key not in traced}
    return {**here, **deeper}
