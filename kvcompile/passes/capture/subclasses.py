"""Subclasses: a call on wrapper subclasses (sharded or quantized weights) stays in the graph as the model wrote it.

The inner compiler decomposes it, as it does without this package. ATen before dispatch cannot express it: a trace would record the
operations of plain tensors, but only the class knows its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kvcompile.errors import Unsupported
from kvcompile.passes.graph.dynamo import get_proxy_mode, is_wrapper, no_proxies, track_values, tree_leaves
from kvcompile.passes.graph.shapes import AS_WRITTEN, source_line


def calls_on_composed(graph: fx.Graph) -> set[fx.Node]:
    """Return the calls of Dynamo's graph with a wrapper subclass among their operands or results."""
    made = {node for node in graph.nodes if any(is_wrapper(value) for value in tree_leaves(node.meta.get("example_value")))}
    calls = {node for node in graph.nodes if node.op in {"call_function", "call_method"}} if made else set()
    return {node for node in calls if node in made or not made.isdisjoint(node.all_input_nodes)}


def record_as_written(interpreter: fx.Interpreter, node: fx.Node) -> Any:
    """Run ``node`` of Dynamo's graph under ``make_fx``, record the call undecomposed and return its result.

    Raises Unsupported if an argument was not recorded by the trace.
    """
    tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]

    def recorded(argument: fx.Node) -> Any:
        value = interpreter.env[argument]
        found = tracer.unwrap_proxy(value)
        if isinstance(found, fx.Proxy):
            return found.node
        if isinstance(value, (torch.Tensor, torch.SymInt)):
            raise Unsupported(
                expected="a call on a sharded or quantized tensor to take the operands of the graph", found=f"{argument} from elsewhere",
                where=source_line(node), todo="please report this model",
            )
        return found

    args, kwargs = interpreter.fetch_args_kwargs_from_env(node)
    with no_proxies():
        result = getattr(fx.Interpreter, node.op)(interpreter, node.target, args, kwargs)
    copy = tracer.graph.create_node(
        node.op, node.target, fx.map_arg(node.args, recorded), fx.map_arg(node.kwargs, recorded), name=node.name,
    )
    copy.meta.update({key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta})
    copy.meta[AS_WRITTEN] = True
    track_values(result, fx.Proxy(copy, tracer), constant=None, tracer=tracer)
    return result
