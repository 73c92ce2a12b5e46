"""Floats: sorts the caller's Python floats into symbols of the graph and constants that the graph is specialised for.

Dynamo passes a float that changed (with ``dynamic=True`` every float) as a tensor of one element and an ``item``. Inductor keeps a symbolic
float that only multiplies, divides, is added to or subtracted from tensors. For any other, torch asks Dynamo to restart with that float as
a guarded constant. It asks during compilation, but our variants are compiled lazily, when Dynamo can no longer restart. So the decision is
made here, right after the capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.dynamo import TensorifyScalarRestartAnalysis, TensorifyState, TracingContext, is_float_symbol
from kvcompile.passes.graph.shapes import is_tensor, op_name, value_of
from kvcompile.passes.graph.worlds import known_symbols
from kvcompile.types import NUMBERS

KEEPS = frozenset({"mul", "mul_", "div", "div_", "add", "add_", "sub", "sub_"})
"""Operators on tensors that a symbolic float may be an operand of."""


def require_constants(captured: Captured) -> None:
    """Raise TensorifyScalarRestartAnalysis, upon which Dynamo restarts, if a float is a symbol that Inductor would not keep."""
    kept = _kept(captured.graph)
    names = {name for name in _floats(captured.fake_mode) if name not in kept and not TensorifyState.should_specialize(name)}
    for name in names:
        TensorifyState.specialize(name)
    if names:
        raise TensorifyScalarRestartAnalysis


@contextmanager
def constant_floats(graph: fx.Graph, fake_mode: Any) -> Iterator[None]:
    """Specialise floats that ``graph`` does not keep as symbols while torch compiles it after Dynamo has finished.

    Does nothing while Dynamo is active (it has a tracing context).
    """
    if TracingContext.try_get() is not None:
        yield
        return
    before = set(TensorifyState.force_specializations)
    TensorifyState.force_specializations |= _floats(fake_mode) - _symbols(graph)
    try:
        yield
    finally:
        TensorifyState.force_specializations &= before


def _floats(fake_mode: Any) -> set[str]:
    """Return the names of all floats that were ever symbols, including floats that became constants."""
    return {str(symbol) for symbol in known_symbols(fake_mode.shape_env) if is_float_symbol(symbol)}


def _symbols(graph: fx.Graph) -> set[str]:
    values = [value_of(node) for node in graph.nodes if op_name(node) in NUMBERS]
    return {str(symbol) for value in values if isinstance(value, torch.SymFloat) for symbol in value.node.expr.free_symbols}


def _kept(graph: fx.Graph) -> set[str]:
    """Return the names of the symbolic floats that the graph uses only in ways that Inductor keeps symbolic."""
    lost: set[str] = set()
    for node in graph.nodes:
        value = value_of(node)
        if isinstance(value, torch.SymFloat) and not all(_keeps(user) for user in node.users):
            lost |= {str(symbol) for symbol in value.node.expr.free_symbols}
    return _symbols(graph) - lost


def _keeps(user: fx.Node) -> bool:
    """Return whether an operand of ``user`` may be a symbolic float. False in a softcap, cap * tanh(x / cap): attention needs a number."""
    if not is_tensor(user):
        return isinstance(value_of(user), torch.SymFloat)
    capped = any(op_name(node) == "tanh" for node in (*user.all_input_nodes, *user.users))
    return op_name(user) in KEEPS and not capped
