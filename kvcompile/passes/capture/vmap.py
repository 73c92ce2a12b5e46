"""Vmap regions: trace the parts of Dynamo's graph that run under ``vmap`` as plain ATen.

Dynamo keeps ``vmap`` as calls that enter and leave a level, with the mapped calls between them. Before dispatch these two calls have no
effect on the operators between them. So each outermost region is traced separately, below the level, where ``vmap`` has already
become operators with one more dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.passes.graph.dynamo import functorch_interpreters, leave_vmap

ENTER, LEAVE = "_vmap_increment_nesting", "_vmap_decrement_nesting"


@dataclass(frozen=True)
class VmapRegion:
    """One outermost ``vmap`` region: its nodes in order, the values that it reads from outside, and its nodes that are read outside."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @classmethod
    def of(cls, nodes: list[fx.Node]) -> VmapRegion:
        """Return the region of ``nodes`` with its inputs (outside operands) and outputs (nodes with outside users)."""
        own = set(nodes)
        taken = dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in own)
        return cls(tuple(nodes), tuple(taken), tuple(node for node in nodes if any(user not in own for user in node.users)))

    def traced(self, owner: fx.GraphModule) -> fx.GraphModule:
        """Return the region as an ATen graph module, traced under the active fake mode; ``owner`` has its submodules."""
        graph = fx.Graph()
        env = {node: graph.placeholder(node.name) for node in self.inputs}
        for node in self.nodes:
            env[node] = graph.node_copy(node, lambda item: env[item])
        graph.output(tuple(env[node] for node in self.outputs))
        module = fx.GraphModule(owner, graph)
        with _balanced():
            return make_fx(lambda *args: fx.Interpreter(module).run(*args), tracing_mode="real")(*[_like(node) for node in self.inputs])


def _like(node: fx.Node) -> Any:
    """Return an empty tensor like the value that Dynamo saw for a node, under the active fake mode (Dynamo's own mode was another)."""
    seen = node.meta["example_value"]
    if not isinstance(seen, torch.Tensor):
        return seen
    return torch.empty_strided(seen.shape, seen.stride(), dtype=seen.dtype, device=seen.device)


@contextlib.contextmanager
def _balanced() -> Iterator[None]:
    """Restore the number of ``vmap`` levels on exit: a trace that fails inside of a region has not left its level."""
    levels = len(functorch_interpreters())
    try:
        yield
    finally:
        while len(functorch_interpreters()) > levels:
            leave_vmap()


def regions(graph: fx.Graph) -> list[VmapRegion]:
    """Return all outermost ``vmap`` regions of the graph, in order."""
    found: list[list[fx.Node]] = []
    depth = 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name == ENTER:
            if not depth:
                found.append([])
            depth += 1
        if depth:
            found[-1].append(node)
        if name == LEAVE:
            depth -= 1
    return [VmapRegion.of(nodes) for nodes in found]
