"""Emit: small ATen subgraphs that put an operand of any spelling into the form the ops want.

Everything is built from roles, with sizes left symbolic: permutes, unflattens with static sizes, flattens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from kvcompile.errors import Unsupported
from kvcompile.passes.shapes import source_line

aten = torch.ops.aten


class Emitter:
    """Inserts nodes before a point of a graph, each with the metadata of the node that it replaces."""

    def __init__(self, graph: fx.Graph, like: fx.Node, symbols: Callable[[Any], Any]) -> None:
        self.graph, self.like, self.symbols = graph, like, symbols

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """One node, inserted before ``like``."""
        with self.graph.inserting_before(self.like):
            node = self.graph.call_function(target, args, kwargs)
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten"):
            if key in self.like.meta and key != "original_aten":
                node.meta[key] = self.like.meta[key]
        return node

    def size(self, value: Any) -> Any:
        """A size as an int or as the graph node that holds it."""
        return value if isinstance(value, (int, fx.Node)) else self.symbols(value)

    def permute(self, node: fx.Node, dims: Sequence[int]) -> fx.Node:
        """Permute, or the node itself where nothing moves."""
        if list(dims) == list(range(len(dims))):
            return node
        return self.call(aten.permute.default, node, list(dims))

    def positions(self, count: Any, offset: Any, device: torch.device) -> fx.Node:
        """int64 [1, count]: offset, offset + 1, ..."""
        iota = self.call(aten.arange.default, self.size(count), dtype=torch.int64, device=device)
        if not (isinstance(offset, int) and offset == 0):
            iota = self.call(aten.add.Tensor if isinstance(offset, fx.Node) and _is_tensor(offset) else aten.add.Scalar, iota, offset)
        return self.call(aten.unsqueeze.default, iota, 0)

    def constant_limit(self, count: Any, value: Any, device: torch.device) -> fx.Node:
        """int64 [1, count] filled with ``value``."""
        return self.call(aten.full.default, [1, self.size(count)], value, dtype=torch.int64, device=device)

    def arrange(self, node: fx.Node, roles: Sequence[str], wanted: Sequence[str]) -> fx.Node:
        """A tensor with dims of ``roles`` ('' of size one) as dims of ``wanted``; missing roles become size one."""
        current = list(roles)
        for dim in range(len(current) - 1, -1, -1):
            if current[dim] == "":
                node = self.call(aten.select.int, node, dim, 0)
                current.pop(dim)
        order = [current.index(role) for role in wanted if role in current]
        if len(order) != len(current):
            raise Unsupported(
                expected=f"an operand with the dims {tuple(wanted)}", found=f"dims {tuple(current)}", where=source_line(self.like),
                todo="please report this model",
            )
        node = self.permute(node, order)
        present = [role for role in wanted if role in current]
        for dim, role in enumerate(wanted):
            if role not in present:
                node = self.call(aten.unsqueeze.default, node, dim)
                present.insert(dim, role)
        return node

    def heads(self, node: fx.Node, roles: Sequence[str], rest: Sequence[str], heads: int, groups: int) -> fx.Node:
        """To [B, H, *rest] from any mix of B, H, K, G and the flattened BH; broadcasts B and H where missing."""
        current = list(roles)
        if "BH" in current:
            dim = current.index("BH")
            node = self.call(aten.unflatten.int, node, dim, [-1, heads])
            current[dim : dim + 1] = ["B", "H"]
        if "K" in current and "H" not in current:
            wanted = ["B", "K", "G", *rest]
            node = self.arrange(node, current, wanted)
            if "G" not in current:
                node = self.call(aten.repeat_interleave.self_int, node, groups, 2) if groups > 1 else node
            return self.call(aten.flatten.using_ints, node, 1, 2)
        if "G" in current and "K" not in current:
            current[current.index("G")] = "H"
        return self.arrange(node, current, ["B", "H", *rest])

    def from_heads(self, node: fx.Node, roles: Sequence[str], groups: int) -> fx.Node:
        """From [B, H, S, D] to the dims of ``roles``."""
        current = ["B", "H", "S", "D"]
        if "K" in roles:
            node = self.call(aten.unflatten.int, node, 1, [-1, groups])
            current[1:2] = ["K", "G"]
            if "G" not in roles:
                node = self.call(aten.squeeze.dim, node, 2)
                current.remove("G")
        if "BH" in roles:
            node = self.permute(node, [current.index(r) for r in ("B", "H", *[x for x in roles if x != "BH"])])
            node = self.call(aten.flatten.using_ints, node, 0, 1)
            return node
        if "B" not in roles:
            node = self.call(aten.select.int, node, 0, 0)
            current.remove("B")
        return self.permute(node, [current.index(role) for role in roles])


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
