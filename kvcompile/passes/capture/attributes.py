"""Attributes: tensors that Dynamo left as attributes of its graph become inputs like all others.

Parameters and buffers usually are inputs of Dynamo's graphs. Under Inductor's ``freezing`` (or Dynamo's ``prepare_freezing``), and where
the user marked their address as static with a guard, they are attributes, and a cache may be among them. Here each becomes an input
behind the caller's own, so that later passes handle one kind of tensor; the caller of the graph passes these tensors.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.dynamo import FakeTensor

SOURCES = "_param_name_to_source"
"""Attribute of Dynamo's graph: from attribute names to the sources (program values) that they come from."""
STATIC = "_dynamo_static_input_type"
"""Key of an input's metadata: its address is static. Inductor checks "unguarded" ones before it replays a CUDA graph."""


@dataclass(frozen=True)
class Lifted:
    """Dynamo's graph with tensor attributes turned into its last inputs, and the tensors for these inputs, without repeats."""

    module: fx.GraphModule
    tensors: tuple[torch.Tensor, ...] = field(default=(), repr=False)


def lifted(gm: fx.GraphModule) -> Lifted:
    """Return ``gm`` with one more input for each tensor that is its attribute or belongs to a module that it calls; ``gm`` if none does."""
    found = _tensors(gm)
    if not found:
        return Lifted(gm)
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    nodes = list(gm.graph.nodes)
    for node in (item for item in nodes if item.op == "placeholder"):
        env[node] = copy_node(graph, node, env)
    tensors = {id(tensor): tensor for tensor in found.values()}
    sources = getattr(gm, SOURCES, None) or {}
    inputs: dict[int, fx.Node] = {}
    for name, tensor in found.items():
        if id(tensor) not in inputs:
            inputs[id(tensor)] = made = graph.placeholder(name.replace(".", "_"))
            made.meta["tensor_dict"] = {STATIC: "unguarded"}
            made._dynamo_source = sources.get(name)
    for node in (item for item in nodes if item.op != "placeholder"):
        target = str(node.target)
        if node.op == "get_attr" and target in found:
            env[node] = inputs[id(found[target])]
            continue
        own = {name: inputs[id(found[name])] for name in found if name.startswith(f"{target}.")} if node.op == "call_module" else {}
        if not own:
            env[node] = copy_node(graph, node, env)
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
    """Return all tensors, by dotted path, that ``get_attr`` nodes read or that called modules own."""
    found: dict[str, torch.Tensor] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            found[str(node.target)] = operator.attrgetter(str(node.target))(gm)
        elif node.op == "call_module":
            part = gm.get_submodule(str(node.target))
            found.update((f"{node.target}.{name}", value) for name, value in (*part.named_parameters(), *part.named_buffers()))
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)}


def copy_node(graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, Any]) -> fx.Node:
    """Append a copy of ``node``, of Dynamo's graph, to ``graph``, its operands mapped by ``env``; return it. It keeps Dynamo's source."""
    new = graph.node_copy(node, env.__getitem__)
    if hasattr(node, "_dynamo_source"):
        new._dynamo_source = node._dynamo_source
    return new
