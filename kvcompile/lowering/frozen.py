"""Frozen: parameters that stand in a graph as attributes, so that Inductor computes once what depends on them alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from kvcompile.lowering.host.torch_api import ConstantSource

SOURCES = "_param_name_to_source"
"""Where AOTAutograd looks for which value of the program an attribute of a graph is."""
FROZEN = "kvcompile_frozen_"
"""What the names of attributes begin with that were inputs."""


class Frozen:
    """Code without the inputs that were frozen into it; holds those, so that no later tensor can have the identity of one."""

    def __init__(self, code: Callable[..., Any], constant: Mapping[int, torch.Tensor]) -> None:
        self.code, self.constant = code, constant

    def __call__(self, *args: Any) -> Any:
        return self.code(*[value for index, value in enumerate(args) if index not in self.constant])


def as_attributes(module: fx.GraphModule, tensors: Mapping[int, torch.Tensor]) -> fx.GraphModule:
    """Return the graph with the inputs of these indices as attributes again, which is how Inductor takes what it may freeze."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    holder = fx.GraphModule(module, module.graph)
    sources = dict(getattr(module, SOURCES, None) or {})
    place = -1
    for node in module.graph.nodes:
        place += node.op == "placeholder"
        if node.op != "placeholder" or place not in tensors:
            env[node] = new = graph.node_copy(node, env.__getitem__)
            if hasattr(node, "_dynamo_source"):
                new._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
            continue
        name, tensor = f"{FROZEN}{place}", tensors[place]
        if isinstance(tensor, torch.nn.Parameter):
            holder.register_parameter(name, tensor)
        else:
            holder.register_buffer(name, tensor)
        # AOTAutograd wants one for each.
        sources[name] = getattr(node, "_dynamo_source", None) or ConstantSource(name)
        env[node] = graph.get_attr(name)
        env[node].meta = {key: value for key, value in node.meta.items() if key != "tensor_dict"}
    made = fx.GraphModule(holder, graph)
    made.meta = dict(module.meta)
    setattr(made, SOURCES, sources)
    return made
