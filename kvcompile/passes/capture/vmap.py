"""Regions under ``vmap`` in Dynamo's graph, as plain ATen.

Dynamo keeps ``vmap`` as calls that enter and leave a level, with what runs under it between them. Recorded before
dispatch, those calls mean nothing to the operators around them; so each outermost region is traced by itself, below
the level, where ``vmap`` has already become operators over one more dim.
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
    """From an outermost entry of ``vmap`` to the end of it: its nodes in order, what it takes and what is read of it behind it."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @classmethod
    def of(cls, nodes: list[fx.Node]) -> VmapRegion:
        """The region of consecutive ``nodes``."""
        own = set(nodes)
        taken = dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in own)
        return cls(tuple(nodes), tuple(taken), tuple(node for node in nodes if any(user not in own for user in node.users)))

    def traced(self, owner: fx.GraphModule) -> fx.GraphModule:
        """The region as ATen, in the fake mode that is on."""
        graph = fx.Graph()
        env = {node: graph.placeholder(node.name) for node in self.inputs}
        for node in self.nodes:
            env[node] = graph.node_copy(node, lambda item: env[item])
        graph.output(tuple(env[node] for node in self.outputs))
        module = fx.GraphModule(owner, graph)
        with _balanced():
            return make_fx(lambda *args: fx.Interpreter(module).run(*args), tracing_mode="real")(*[_like(node) for node in self.inputs])


def _like(node: fx.Node) -> Any:
    """Return the value that Dynamo saw a node give, in the fake mode that is on: Dynamo's own mode was another one."""
    seen = node.meta["example_value"]
    if not isinstance(seen, torch.Tensor):
        return seen
    return torch.empty_strided(seen.shape, seen.stride(), dtype=seen.dtype, device=seen.device)


@contextlib.contextmanager
def _balanced() -> Iterator[None]:
    """Leaves as many levels of ``vmap`` as there were: one that fails half way has not left its own."""
    levels = len(functorch_interpreters())
    try:
        yield
    finally:
        while len(functorch_interpreters()) > levels:
            leave_vmap()


def regions(graph: fx.Graph) -> list[VmapRegion]:
    """Every outermost region under ``vmap``, in order."""
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
