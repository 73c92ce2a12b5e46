"""Attributes: tensors that Dynamo left in its graph, as inputs like all others.

Parameters and buffers are inputs of the graphs that Dynamo makes. Under Inductor's ``freezing`` (or Dynamo's ``prepare_freezing``), and
where the user marked their address as static with a guard, they are attributes of the graph, and a cache may be among them. Here each
becomes an input behind the caller's own, so that what follows knows one kind of tensor; who runs the graph passes the tensors.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from kvcompile.passes.graph.dynamo import FakeTensor

SOURCES = "_param_name_to_source"
"""Where Dynamo says of an attribute of its graph which value of the program it is."""
STATIC = "_dynamo_static_input_type"
"""The mark of an input whose address stays from call to call; "unguarded" ones are looked at before a CUDA graph is replayed."""


@dataclass(frozen=True)
class Lifted:
    """Dynamo's graph without attributes that are tensors, and the tensors that its last inputs are, each once."""

    module: fx.GraphModule
    tensors: tuple[torch.Tensor, ...] = field(default=(), repr=False)


def lifted(gm: fx.GraphModule) -> Lifted:
    """Return the graph with an input for every tensor that it has as an attribute or inside of a module that it calls."""
    found = _tensors(gm)
    if not found:
        return Lifted(gm)
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    nodes = list(gm.graph.nodes)
    for node in (item for item in nodes if item.op == "placeholder"):
        env[node] = _copy(graph, node, env)
    tensors = {id(tensor): tensor for tensor in found.values()}
    sources = getattr(gm, SOURCES, None) or {}
    inputs: dict[int, fx.Node] = {}
    for name, tensor in found.items():
        if id(tensor) not in inputs:
            inputs[id(tensor)] = made = graph.placeholder(name.replace(".", "_"))
            made.meta["tensor_dict"] = {STATIC: "unguarded"}
            made._dynamo_source = sources.get(name)  # type: ignore[attr-defined]
    for node in (item for item in nodes if item.op != "placeholder"):
        target = str(node.target)
        if node.op == "get_attr" and target in found:
            env[node] = inputs[id(found[target])]
            continue
        own = {name: inputs[id(found[name])] for name in found if name.startswith(f"{target}.")} if node.op == "call_module" else {}
        if not own:
            env[node] = _copy(graph, node, env)
            continue
        part = gm.get_submodule(target)
        named = {name.removeprefix(f"{target}."): value for name, value in own.items()}
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
        env[node] = graph.call_function(functools.partial(torch.func.functional_call, part), (named, args, kwargs))
        env[node].meta = dict(node.meta)
    module = fx.GraphModule(gm, graph, gm.__class__.__name__)
    module.meta = dict(gm.meta)
    return Lifted(module, tuple(tensors.values()))


def _tensors(gm: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The tensors, by their path, that nodes of the graph get or that modules hold which it calls."""
    found: dict[str, torch.Tensor] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            found[str(node.target)] = operator.attrgetter(str(node.target))(gm)
        elif node.op == "call_module":
            part = gm.get_submodule(str(node.target))
            found.update((f"{node.target}.{name}", value) for name, value in (*part.named_parameters(), *part.named_buffers()))
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)}


def _copy(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    new = graph.node_copy(node, env.__getitem__)
    if hasattr(node, "_dynamo_source"):
        new._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    return new
