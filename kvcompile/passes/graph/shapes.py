"""Sizes of graph values, and names of operators.

A symbolic size is no number. ``hint`` and ``sizes`` give one in the current world (``worlds``), in which recognition reads samples, and
raise SizeRead elsewhere; ``same``, ``at_most`` and ``negative`` prove or guard; what a rewrite emits stays symbolic.
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
"""Our own frames, through which Dynamo traces what is done to a compressed cache, are not the model's source."""


def hint(value: Any) -> int:
    """A plain int for an int, a SymInt or a node that carries one, in the current world; raises SizeRead for a symbol outside of one."""
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    return as_number(value) if isinstance(value, torch.SymInt) else int(value)


def estimate(value: Any) -> int:
    """A size as it was when the graph was captured: for reports and for tuning, which change no result."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    expr, env = value.node.expr, value.node.shape_env
    known = {symbol: value_in_capture(env, symbol) for symbol in expr.free_symbols}
    return int(expr.xreplace({symbol: 1 if number is None else number for symbol, number in known.items()}))


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for all sizes that the graph's guards admit; asks without adding a guard."""
    return a == b if isinstance(a, int) and isinstance(b, int) else statically_known_true(a == b)


def equal(a: Any, b: Any) -> bool:
    """Whether two sizes that belong together are equal in every call: proved, or guarded where they are in the captured one.

    No program that runs breaks such a guard: keys and values have one length.
    """
    return same(a, b) or (estimate(a) == estimate(b) and bool(a == b))


def at_most(a: Any, b: Any) -> bool:
    """Whether a <= b for all sizes that the graph's guards admit; asks without adding a guard."""
    return a <= b if isinstance(a, int) and isinstance(b, int) else statically_known_true(a <= b)


def plain(size: Any) -> Any:
    """Return a symbolic size without symbols as an int; any other as it is."""
    return int(size.node.expr) if isinstance(size, torch.SymInt) and size.node.expr.is_number else size


def negative(size: Any) -> bool:
    """Whether a size is below zero, in every call: proved, or else asked with a guard, as a slice from there did when it was traced."""
    return size < 0 if isinstance(size, int) else not at_most(0, size) and bool(size < 0)


def fixed_by_guard(size: Any) -> int:
    """A size that must be a number as the one that it was in the captured call, which a guard holds from here on."""
    return int(size)


def value_of(node: fx.Node) -> Any:
    """The fake value that a node carries, or None."""
    return node.meta.get("val")


def is_tensor(node: object) -> TypeGuard[fx.Node]:
    """Whether a node carries a tensor."""
    return isinstance(node, fx.Node) and isinstance(value_of(node), torch.Tensor)


def operand(node: fx.Node, position: int = 0) -> fx.Node:
    """The argument of a call that is a graph value."""
    found = node.args[position]
    assert isinstance(found, fx.Node), f"argument {position} of {node.format_node()} is no graph value"
    return found


def sizes(node: fx.Node) -> tuple[int, ...]:
    """The shape of a tensor node in the current world; raises SizeRead for a symbolic one outside of one."""
    return tuple(hint(size) for size in value_of(node).shape)


def rank(node: Any) -> int:
    """The number of dims of a tensor node."""
    return len(value_of(node).shape)


def same_shape(node: fx.Node, other: fx.Node) -> bool:
    """Whether two tensor nodes have one shape whatever their symbolic sizes are."""
    first, second = value_of(node).shape, value_of(other).shape
    exact = [size.node.expr if isinstance(size, torch.SymInt) else size for size in (*first, *second)]
    return exact[: len(first)] == exact[len(first) :]


def size_along(node: fx.Node, roles: tuple[str, ...], role: str, folded: int = 1) -> Any:
    """The size, an int or a SymInt, of the dim of a tensor node that has ``role`` (``folded`` with others); 1 where none has."""
    found = [size for item, size in zip(roles, value_of(node).shape, strict=True) if role in item]
    return found[0] // folded if found else 1


AS_WRITTEN = "as_written"
"""The key of a node's metadata that marks a call on tensors that are made of others: no operator's name says what it does."""


def op_name(node: object) -> str:
    """``aten.add.Tensor`` is ``add``: the packet's bare name, empty for what is no ATen call."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or AS_WRITTEN in node.meta:
        return ""
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.name.rpartition("::")[2]
    return getattr(target, "__name__", "")


def bind(node: fx.Node) -> dict[str, Any]:
    """Arguments of an ATen call by schema name, defaults filled in."""
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
    """The model's source line of a node: the innermost frame outside torch, as ``file:line: code``."""
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
    """The dotted path of the module that a node came from, as Dynamo recorded it; '' where unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    for name, _ in reversed(list(stack.values())):
        return clean_path(name)
    return ""


def clean_path(name: str) -> str:
    """``L['self']._modules['model']._modules['layers']._modules['0']`` is ``model.layers.0``."""
    text = name
    for old, new in (("L['self']", ""), ("._modules['", "."), ("['", "."), ("']", ""), ("[", "."), ("]", "")):
        text = text.replace(old, new)
    return text.strip(".")
