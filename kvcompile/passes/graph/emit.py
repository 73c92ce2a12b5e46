"""Emit: small ATen subgraphs that bring operands into the layout that our operators expect.

They are built from dims' roles, with symbolic sizes: permutes, unflattens with static sizes, flattens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from kvcompile.errors import Unsupported
from kvcompile.passes.graph.shapes import source_line

aten = torch.ops.aten


class Emitter:
    """Inserts nodes before the node ``like``, with the metadata of ``like``.

    ``symbols``: returns the graph's node for a symbolic size. ``copies``: the graph's copy of each captured node.
    """

    def __init__(self, graph: fx.Graph, like: fx.Node, symbols: Callable[[Any], Any], copies: Mapping[fx.Node, fx.Node]) -> None:
        self.graph, self.like, self.symbols, self.copies = graph, like, symbols, copies

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call before ``like`` and return its node."""
        with self.graph.inserting_before(self.like):
            node = self.graph.call_function(target, args, kwargs)
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten"):
            if key in self.like.meta and key != "original_aten":
                node.meta[key] = self.like.meta[key]
        return node

    def size(self, value: Any) -> Any:
        """Return a size as an int or as the graph's node for it."""
        return value if isinstance(value, (int, fx.Node)) else self.symbols(value)

    def permute(self, node: fx.Node, dims: Sequence[int]) -> fx.Node:
        """Emit a permute; returns ``node`` itself if ``dims`` is the identity."""
        if list(dims) == list(range(len(dims))):
            return node
        return self.call(aten.permute.default, node, list(dims))

    def positions(self, count: Any, offset: Any, device: torch.device) -> fx.Node:
        """Emit positions int64 [1, count]: offset, offset + 1, ..."""
        iota = self.call(aten.arange.default, self.size(count), dtype=torch.int64, device=device)
        if not (isinstance(offset, int) and offset == 0):
            iota = self.call(aten.add.Tensor if isinstance(offset, fx.Node) and _is_tensor(offset) else aten.add.Scalar, iota, offset)
        return self.call(aten.unsqueeze.default, iota, 0)

    def constant_limit(self, count: Any, value: Any, device: torch.device) -> fx.Node:
        """Emit int64 [1, count] filled with ``value``."""
        return self.call(aten.full.default, [1, self.size(count)], value, dtype=torch.int64, device=device)

    def arrange(self, node: fx.Node, roles: Sequence[str], wanted: Sequence[str]) -> fx.Node:
        """Return ``node``, a tensor with dims of ``roles``, as a new node with dims ``wanted``, permuted.

        A dim without a role ('') has size 1 and is dropped; a role that is missing in ``roles`` becomes a dim of size 1.

        Raises Unsupported if ``roles`` has a role that is not wanted.
        """
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
        """Emit ``node`` as [B, H, *rest], from dims with any mix of B, H, K, G, flattened or not; return its node.

        A missing B or head dim has size 1; missing K or G dims are expanded to the sizes that ``heads`` and ``groups`` give. Raises
        Unsupported if ``roles`` has a role that the result lacks.
        """
        node, current = self.apart(node, roles, {"H": heads, "K": heads // groups, "G": groups})
        if not {"K", "G"} & set(current):
            return self.arrange(node, current, ["B", "H", *rest])
        node = self.arrange(node, current, ["B", "K", "G", *rest])
        if ("K" not in current and heads > groups) or ("G" not in current and groups > 1):
            node = self.call(aten.expand.default, node, [-1, heads // groups, groups, *[-1] * len(rest)])
        return self.call(aten.flatten.using_ints, node, 1, 2)

    def apart(self, node: fx.Node, roles: Sequence[str], known: Mapping[str, Any]) -> tuple[fx.Node, list[str]]:
        """Return (``node`` with dims of several roles unflattened, the role of each dim).

        ``known`` gives the sizes of roles; in one dim, the size of at most one role may be missing.
        """
        current = list(roles)
        for dim in range(len(current) - 1, -1, -1):
            parts = list(current[dim])
            if len(parts) > 1:
                node = self.call(aten.unflatten.int, node, dim, [known.get(part, -1) for part in parts])
                current[dim : dim + 1] = parts
        return node, current

    def from_heads(self, node: fx.Node, roles: Sequence[str], heads: int, groups: int) -> fx.Node:
        """Emit ``node`` [B, H, S, D] with dims of ``roles`` instead, of which some may be flattened; return its node.

        A dim without a role has size 1; of dims that ``roles`` lacks, entry 0 is taken. ``heads``, ``groups``: query heads, and query heads
        per kv head.
        """
        current = ["B", "H", "S", "D"]
        wanted = [part for role in roles for part in role]
        if {"K", "G"} & set(wanted):
            node = self.call(aten.unflatten.int, node, 1, [heads // groups, groups])
            current[1:2] = ["K", "G"]
        for dim in range(len(current) - 1, -1, -1):
            if current[dim] not in wanted:
                node = self.call(aten.select.int, node, dim, 0)
                current.pop(dim)
        node = self.permute(node, [current.index(part) for part in wanted])
        for dim, role in enumerate(roles):
            if not role:
                node = self.call(aten.unsqueeze.default, node, dim)
            elif len(role) > 1:
                node = self.call(aten.flatten.using_ints, node, dim, dim + len(role) - 1)
        return node


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
