"""Symbols: the value of a symbolic size inside a rewritten graph, from the inputs and tensors that stay in it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from kvcompile.errors import Unsupported
from kvcompile.passes.capture import Captured
from kvcompile.passes.emit import aten
from kvcompile.passes.shapes import value_of


class Symbols:
    """Finds or makes the nodes that hold sizes; ``gone``: placeholders that leave the graph."""

    def __init__(self, captured: Captured, graph: fx.Graph, env: dict[fx.Node, fx.Node], gone: set[fx.Node | None]) -> None:
        self.captured, self.graph, self.env, self.gone = captured, graph, env, gone
        self.made: set[fx.Node] = set()

    def of(self, value: Any) -> Any:
        """The graph value of a symbolic size: a SymInt placeholder, or the size of a tensor that stays."""
        expr = value.node.expr if isinstance(value, torch.SymInt) else value
        if expr.is_number:
            return int(expr)
        for node in self.captured.graph.find_nodes(op="placeholder"):
            seen = value_of(node)
            if isinstance(seen, torch.SymInt) and seen.node.expr == expr:
                return self.env[node]
        for node in self.captured.graph.find_nodes(op="placeholder"):
            if isinstance(value_of(node), torch.Tensor) and node not in self.gone:
                for dim, size in enumerate(value_of(node).shape):
                    if isinstance(size, torch.SymInt) and size.node.expr == expr:
                        return self._early(aten.sym_size.int, self.env[node], dim)
        if expr.is_Add:
            parts = [self.of(part) for part in expr.args]
            total = parts[0]
            for part in parts[1:]:
                total = self._early(operator.add, total, part)
            return total
        if expr.is_Mul:
            total = self.of(expr.args[0])
            for part in expr.args[1:]:
                total = self._early(operator.mul, self.of(part), total)
            return total
        if isinstance(expr, FloorDiv):
            return self._early(operator.floordiv, *(self.of(part) for part in expr.args))
        raise Unsupported(
            expected="a symbolic size that is an input of the graph", found=str(expr), where="the captured graph",
            todo="please report this model; mark the batch size static as a workaround",
        )

    def _early(self, target: Any, *args: Any) -> fx.Node:
        """A node ahead of all others but those made here before, so that every later one may use it."""
        anchor = next(node for node in self.graph.nodes if node.op != "placeholder" and node not in self.made)
        with self.graph.inserting_before(anchor):
            made = self.graph.call_function(target, args)
        self.made.add(made)
        return made
