"""Floats: which of the caller's Python floats a graph may keep as symbols, and which it must be compiled for as they are.

Dynamo hands over a float that changed (with ``dynamic=True`` every float) as a tensor of one element and an ``item``. Inductor keeps one
that only multiplies, divides or is added to tensors. For any other torch asks Dynamo to begin again with that float as a constant, and a
guard on it; it says so while it compiles, and our variants are compiled when a call first needs them, where nobody listens any more. So
all that is decided here, right behind the capture.
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
    """Raise TensorifyScalarRestartAnalysis, which makes Dynamo begin again, where floats must be constants that are symbols yet."""
    kept = _kept(captured.graph)
    names = {name for name in _floats(captured.fake_mode) if name not in kept and not TensorifyState.should_specialize(name)}
    for name in names:
        TensorifyState.specialize(name)
    if names:
        raise TensorifyScalarRestartAnalysis


@contextmanager
def constant_floats(graph: fx.Graph, fake_mode: Any) -> Iterator[None]:
    """Let torch compile a graph after Dynamo was done with it: the floats that it does not have as symbols are constants, with a guard.

    Where Dynamo listens nothing changes.
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
    """The names of all floats that were symbols at first, constants by now among them."""
    return {str(symbol) for symbol in known_symbols(fake_mode.shape_env) if is_float_symbol(symbol)}


def _symbols(graph: fx.Graph) -> set[str]:
    values = [value_of(node) for node in graph.nodes if op_name(node) in NUMBERS]
    return {str(symbol) for value in values if isinstance(value, torch.SymFloat) for symbol in value.node.expr.free_symbols}


def _kept(graph: fx.Graph) -> set[str]:
    """The names of the floats that a graph reads in no way but those that Inductor keeps."""
    lost: set[str] = set()
    for node in graph.nodes:
        value = value_of(node)
        if isinstance(value, torch.SymFloat) and not all(_keeps(user) for user in node.users):
            lost |= {str(symbol) for symbol in value.node.expr.free_symbols}
    return _symbols(graph) - lost


def _keeps(user: fx.Node) -> bool:
    """Whether an operand of ``user`` may be a symbolic float. A softcap, cap * tanh(x / cap), is what attention has as a number."""
    if not is_tensor(user):
        return isinstance(value_of(user), torch.SymFloat)
    capped = any(op_name(node) == "tanh" for node in (*user.all_input_nodes, *user.users))
    return op_name(user) in KEEPS and not capped
