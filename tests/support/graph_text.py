"""A graph as text that people read and that stays the same: stable names, shapes, edges; no addresses, paths or devices."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.shapes import op_name

SILENT = {"alias", "detach", "detach_", "lift_fresh_copy", "lift_fresh"}
"""Copies and views that torch versions put in and leave out; a reader follows their operand."""
DROPPED = {"device", "pin_memory", "layout"}
SHORT = {
    torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "b8",
}


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{SHORT.get(value.dtype, str(value.dtype))}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, torch.SymInt):
        return f"int {value}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_type(item) for item in value) + ")"
    return type(value).__name__ if value is not None else ""


def _label(node: fx.Node) -> str:
    if node.op == "placeholder":
        # The planes are ours and have names; Dynamo's differ from version to version.
        return str(node.target) if re.fullmatch(r"kv\d+_\w+", str(node.target)) else "in"
    if node.op == "get_attr":
        return "const"
    namespace = node.target.namespace if isinstance(node.target, torch._ops.OpOverload) else "aten"
    return op_name(node) if namespace == "aten" else f"{namespace}::{op_name(node)}"


class _Printer:
    def __init__(self) -> None:
        self.names: dict[fx.Node, str] = {}
        self.taken: dict[str, int] = {}

    def name(self, node: fx.Node) -> str:
        """``softmax``, then ``softmax.1``, ...: the operator and its count."""
        if node not in self.names:
            label = _label(node)
            count = self.taken.get(label, 0)
            self.taken[label] = count + 1
            self.names[node] = f"%{label}.{count}" if count else f"%{label}"
        return self.names[node]

    def argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            while op_name(value) in SILENT:
                value = value.args[0]
            return self.name(value)
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(self.argument(item) for item in value) + "]"
        if isinstance(value, float):
            return f"{value:.6g}"
        if isinstance(value, torch.dtype):
            return SHORT.get(value, str(value))
        if isinstance(value, slice):
            return f"{self.argument(value.start)}:{self.argument(value.stop)}:{self.argument(value.step)}"
        return repr(value)

    def line(self, node: fx.Node) -> str:
        if node.op == "output":
            return "return " + self.argument(node.args[0])
        typed = f"{self.name(node)}: {_type(node.meta.get('val'))}".removesuffix(": ")
        if node.op in {"placeholder", "get_attr"}:
            return typed
        arguments = [self.argument(item) for item in node.args]
        arguments += [f"{key}={self.argument(item)}" for key, item in node.kwargs.items() if key not in DROPPED and item is not None]
        return f"{typed} = {_label(node)}({', '.join(arguments)})"


def graph_text(graph: fx.Graph) -> str:
    """One line a node, in order."""
    printer = _Printer()
    lines = []
    for node in graph.nodes:
        if op_name(node) in SILENT:
            continue
        lines.append(printer.line(node))
    return "\n".join(lines) + "\n"


def stable_symbols(text: str) -> str:
    """Symbolic sizes renamed in the order of their appearance."""
    seen: dict[str, str] = {}
    return re.sub(r"\b[su]\d+\b", lambda found: seen.setdefault(found.group(), f"s{len(seen)}"), text)
