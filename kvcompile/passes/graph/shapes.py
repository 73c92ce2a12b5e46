"""Shapes: sizes of graph values, and names and arguments of operators.

A symbolic size has no number. ``hint`` and ``sizes`` return one in the current world (``worlds``), in which the matcher reads samples,
and raise SizeRead outside of one; ``same``, ``at_most`` and ``negative`` prove or guard. Rewrites emit symbolic sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.graph.dynamo import OpOverload
from kvcompile.passes.graph.worlds import as_number, value_in_capture

PACKAGE = str(Path(__file__).parents[2])
"""Path of this package: Dynamo traces through its frames for compressed caches, and they are not the model's source."""


def hint(value: Any) -> int:
    """Return an int, SymInt or a node's value as an int, in the current world. Raises SizeRead for a symbol outside of a world."""
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    return as_number(value) if isinstance(value, torch.SymInt) else int(value)


def estimate(value: Any) -> int:
    """Return a size as it was at capture (1 for an unknown symbol): for reports and tuning only, which change no result."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    expr, env = value.node.expr, value.node.shape_env
    known = {symbol: value_in_capture(env, symbol) for symbol in expr.free_symbols}
    return int(expr.xreplace({symbol: 1 if number is None else number for symbol, number in known.items()}))


def same(a: Any, b: Any) -> bool:
    """Return whether two sizes are equal for all sizes that the guards admit; False if that cannot be proved. Adds no guard."""
    return a == b if isinstance(a, int) and isinstance(b, int) else statically_known_true(a == b)


def equal(a: Any, b: Any) -> bool:
    """Return whether two related sizes are equal in every call: proved, or equal at capture and then guarded.

    Valid programs never break such a guard: for example, keys and values have one length.
    """
    return same(a, b) or (estimate(a) == estimate(b) and bool(a == b))


def at_most(a: Any, b: Any) -> bool:
    """Return whether a <= b for all sizes that the guards admit; False if that cannot be proved. Adds no guard."""
    return a <= b if isinstance(a, int) and isinstance(b, int) else statically_known_true(a <= b)


def plain(size: Any) -> Any:
    """Return a SymInt without free symbols as an int; any other size unchanged."""
    return int(size.node.expr) if isinstance(size, torch.SymInt) and size.node.expr.is_number else size


def negative(size: Any) -> bool:
    """Return whether a size is negative in every call: proved, or else by a guard on its sign at capture, as slicing adds one."""
    return size < 0 if isinstance(size, int) else not at_most(0, size) and bool(size < 0)


def fixed_by_guard(size: Any) -> int:
    """Return a size's value in the captured call, and add a guard that fixes it to that value."""
    return int(size)


def value_of(node: fx.Node) -> Any:
    """Return the fake value of a node, or None."""
    return node.meta.get("val")


def is_tensor(node: object) -> TypeGuard[fx.Node]:
    """Return whether ``node`` is an FX node whose fake value is a tensor."""
    return isinstance(node, fx.Node) and isinstance(value_of(node), torch.Tensor)


def operand(node: fx.Node, position: int = 0) -> fx.Node:
    """Return argument number ``position`` of a call, which must be a node."""
    found = node.args[position]
    assert isinstance(found, fx.Node), f"argument {position} of {node.format_node()} is no graph value"
    return found


def sizes(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a tensor node in the current world. Raises SizeRead for a symbolic size outside of one."""
    return tuple(hint(size) for size in value_of(node).shape)


def rank(node: Any) -> int:
    """Return the number of dims of a tensor node."""
    return len(value_of(node).shape)


def same_shape(node: fx.Node, other: fx.Node) -> bool:
    """Return whether two tensor nodes have the same shape, as integers or as equal symbolic expressions."""
    first, second = value_of(node).shape, value_of(other).shape
    exact = [size.node.expr if isinstance(size, torch.SymInt) else size for size in (*first, *second)]
    return exact[: len(first)] == exact[len(first) :]


def size_along(node: fx.Node, roles: tuple[str, ...], role: str, folded: int = 1) -> Any:
    """Return the size (int or SymInt) of the dim with ``role``, divided by ``folded`` (sizes merged with it); 1 without such a dim."""
    found = [size for item, size in zip(roles, value_of(node).shape, strict=True) if role in item]
    return found[0] // folded if found else 1


AS_WRITTEN = "as_written"
"""Metadata key of a call on wrapper subclasses, recorded undecomposed: its operator's name says nothing about its effect."""


def op_name(node: object) -> str:
    """Return an operator's bare name, such as ``add`` for ``aten.add.Tensor``; '' for other nodes and calls marked ``AS_WRITTEN``."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or AS_WRITTEN in node.meta:
        return ""
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.name.rpartition("::")[2]
    return getattr(target, "__name__", "")


def bind(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an ATen call by schema name, with defaults filled in."""
    target = node.target
    assert isinstance(target, OpOverload)
    bound: dict[str, Any] = {}
    for position, argument in enumerate(target._schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            bound[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return bound


def source_line(node: fx.Node) -> str:
    """Return the model's source line of a node, as ``file:line: code``: the innermost frame outside of torch and this package."""
    trace = node.meta.get("stack_trace") or ""
    frames = [block.strip() for block in trace.split("  File ") if block.strip()]
    for frame in reversed(frames):
        head, _, code = frame.partition("\n")
        if ("/torch/" in head and "/torch/nn/modules/module.py" not in head) or PACKAGE in head:
            continue
        path, _, rest = head.strip().strip(",").partition('", line ')
        line = rest.partition(",")[0]
        return f"{path.strip(chr(34))}:{line}: {code.strip().splitlines()[0] if code.strip() else ''}".rstrip()
    return "source line unknown"


def module_path(node: fx.Node) -> str:
    """Return the dotted path of the module that a node came from, as Dynamo recorded it; '' if unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    for name, _ in reversed(list(stack.values())):
        return clean_path(name)
    return ""


def clean_path(name: str) -> str:
    """Return a module name without Dynamo's notation: ``L['self']._modules['layers']._modules['0']`` becomes ``layers.0``."""
    text = name
    for old, new in (("L['self']", ""), ("._modules['", "."), ("['", "."), ("']", ""), ("[", "."), ("]", "")):
        text = text.replace(old, new)
    return text.strip(".")
