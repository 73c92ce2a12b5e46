"""Symbols: values of symbolic sizes inside a rewritten graph, from its remaining inputs and tensors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from kvcompile.errors import Unsupported
from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.dynamo import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod
from kvcompile.passes.graph.emit import aten
from kvcompile.passes.graph.shapes import value_of

FOLDED: dict[Any, Callable[..., Any]] = {
    sympy.Add: operator.add, sympy.Mul: operator.mul, Min: torch.sym_min, Max: torch.sym_max,
    FloorDiv: operator.floordiv, CleanDiv: operator.floordiv, Mod: operator.mod, PythonMod: operator.mod,
}
"""Functions in Dynamo's expressions of sizes, and the equivalent functions of two sizes, applied from left to right."""


class Symbols:
    """Finds or creates the nodes for sizes; ``gone``: placeholders that leave the graph.

    A size that only leaving inputs have becomes a new input: ``extra`` maps its symbol to that placeholder.
    """

    def __init__(self, captured: Captured, graph: fx.Graph, env: dict[fx.Node, fx.Node], gone: set[fx.Node | None]) -> None:
        self.captured, self.graph, self.env, self.gone = captured, graph, env, gone
        self.made: set[fx.Node] = set()
        self.extra: dict[Any, fx.Node] = {}
        self.known = {
            symbol for entry in captured.inputs for size in _sizes(value_of(entry.node)) for symbol in size.node.expr.free_symbols
        }

    def of(self, value: Any) -> Any:
        """Return a symbolic size as an int or node: a SymInt placeholder, a remaining tensor's size, or computed from these.

        Raises Unsupported if no input has it.
        """
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
        if expr.func in FOLDED:
            return functools.reduce(functools.partial(self._early, FOLDED[expr.func]), [self.of(part) for part in expr.args])
        if expr in self.known:
            return self.input(expr)
        raise Unsupported(
            expected="a symbolic size that is an input of the graph", found=str(expr), where="the captured graph",
            todo="please report this model; mark the batch size static as a workaround",
        )

    def input(self, symbol: Any) -> fx.Node:
        """Return the graph's placeholder for one symbol, created after all other placeholders at first use."""
        if symbol not in self.extra:
            with self.graph.inserting_before(next(node for node in self.graph.nodes if node.op != "placeholder")):
                self.extra[symbol] = self.graph.placeholder(f"kv_size_{symbol}")
        return self.extra[symbol]

    def finalize(self) -> tuple[Any, ...]:
        """Add inputs for symbols that the graph still needs, move all new inputs after the others, and return their symbols in order.

        Inductor reads a symbol from an input that is that symbol, or from the size of a tensor. A symbol known only from a removed cache
        tensor, under whatever name the tracer chose, would be undefined.
        """
        used: set[Any] = set()
        bound: set[Any] = set()
        for node in self.graph.nodes:
            for size in _sizes(node.meta.get("val")):
                used |= size.node.expr.free_symbols
                if node.op == "placeholder":
                    bound.add(size.node.expr)
        for symbol in sorted((used & self.known) - bound, key=str):
            self.input(symbol)
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        for node in self.extra.values():
            first.prepend(node)
        return tuple(self.extra)

    def _early(self, target: Any, *args: Any) -> fx.Node:
        """Emit a node at the start of the graph, after the nodes emitted here before, so that every other node may use it."""
        anchor = next(node for node in self.graph.nodes if node.op != "placeholder" and node not in self.made)
        with self.graph.inserting_before(anchor):
            made = self.graph.call_function(target, args)
        self.made.add(made)
        return made


def _sizes(value: Any) -> list[torch.SymInt]:
    """Return the SymInts of ``value``: itself, or a tensor's sizes and strides; empty for other values."""
    if isinstance(value, torch.SymInt):
        return [value]
    if not isinstance(value, torch.Tensor):
        return []
    return [size for size in (*value.shape, *value.stride()) if isinstance(size, torch.SymInt)]
