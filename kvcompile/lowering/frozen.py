"""Frozen: parameters as attributes of a graph, so that Inductor computes once all values that depend on them alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from kvcompile.lowering.host.torch_api import ConstantSource

SOURCES = "_param_name_to_source"
"""Name of the mapping in which AOTAutograd looks up a graph attribute's source in the program."""
FROZEN = "kvcompile_frozen_"
"""Prefix of the names of attributes that were inputs."""


class Frozen:
    """Compiled code without its frozen inputs; keeps these alive, so that no later tensor can reuse their identity."""

    def __init__(self, code: Callable[..., Any], constant: Mapping[int, torch.Tensor]) -> None:
        self.code, self.constant = code, constant

    def __call__(self, *args: Any) -> Any:
        return self.code(*[value for index, value in enumerate(args) if index not in self.constant])


def as_attributes(module: fx.GraphModule, tensors: Mapping[int, torch.Tensor]) -> fx.GraphModule:
    """Return the graph with the inputs at these indices as attributes, the form in which Inductor freezes them."""
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
        # AOTAutograd needs a source for each attribute.
        sources[name] = getattr(node, "_dynamo_source", None) or ConstantSource(name)
        env[node] = graph.get_attr(name)
        env[node].meta = {key: value for key, value in node.meta.items() if key != "tensor_dict"}
    made = fx.GraphModule(holder, graph)
    made.meta = dict(module.meta)
    setattr(made, SOURCES, sources)
    return made
