"""Constants: numbers that graph values are known to equal, from literals, filled scalars and lifted constants."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.casts import cast
from kvcompile.passes.graph.dynamo import FakeTensor, OpOverload, no_modes
from kvcompile.passes.graph.operators import COPIES, VIEWS
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, value_of

CPU = torch.device("cpu")
MANY = 1 << 12
"""Largest number of elements of a tensor that is evaluated at compile time."""
DEEP = 32
"""Largest number of nodes that are evaluated for one constant."""


def constant(node: Any) -> float | None:
    """Return the number that an argument is known to be: a literal, a filled scalar or a lifted constant; None if unknown."""
    if isinstance(node, (int, float)) and not isinstance(node, bool):
        return float(node)
    if not isinstance(node, fx.Node):
        return None
    name = op_name(node)
    if name in COPIES and node.args:
        value = constant(node.args[0])
        return value if value is None or not is_tensor(node) else cast(value, value_of(node).dtype)
    if name in {"full", "scalar_tensor"} and is_tensor(node) and value_of(node).numel() == 1:
        arguments = bind(node)
        value = constant(arguments.get("fill_value", arguments.get("s")))
        return None if value is None else cast(value, value_of(node).dtype)
    if node.op == "get_attr":
        held: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            held = getattr(held, part)
        if isinstance(held, torch.Tensor) and held.numel() == 1:
            with no_modes():
                return float(held.item()) if not isinstance(held, FakeTensor) else None
    return None


def known(node: fx.Node) -> torch.Tensor | None:
    """Return the constant value of a tensor node, on the CPU, if it is computed from literals alone; else None.

    None too if that takes more than ``DEEP`` nodes or a tensor of more than ``MANY`` elements, or if a tensor on the way is written to.
    """
    found: dict[fx.Node, torch.Tensor] = {}
    waiting = [node]
    while waiting and len(found) <= DEEP:
        one = waiting[-1]
        if not isinstance(one.target, OpOverload) or one.target._schema.is_mutable or not is_tensor(one) or not _small(one):
            return None
        if any(isinstance(user.target, OpOverload) and user.target._schema.is_mutable for user in one.users):
            return None
        if missing := [item for item in one.all_input_nodes if item not in found]:
            waiting += missing
            continue
        waiting.pop()
        arguments = fx.node.map_arg((one.args, dict(one.kwargs)), lambda item: found[item])
        args, kwargs = fx.node.map_aggregate(arguments, lambda item: CPU if isinstance(item, torch.device) else item)
        with no_modes(), torch.no_grad():
            found[one] = one.target(*args, **kwargs)
    return found.get(node)


def _small(node: fx.Node) -> bool:
    """Return whether a tensor has static sizes and at most ``MANY`` elements."""
    shape = value_of(node).shape
    return all(isinstance(size, int) for size in shape) and math.prod(shape) <= MANY


def filled(node: Any) -> float | None:
    """Return the number that all elements of a tensor node equal, or a plain number itself; None if unknown."""
    found = constant(node)
    while found is None and isinstance(node, fx.Node):
        name = op_name(node)
        if name in {"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"}:
            return 0.0 if "zeros" in name else 1.0
        if name in {"full", "full_like", "new_full"}:
            return constant(bind(node)["fill_value"])
        if name not in VIEWS | COPIES or not node.args:
            return None
        node = node.args[0]
    return found
