"""Stacked caches: rewrite one concatenation for keys and one for values as a single concatenation of the stacked tensor.

    past_k, past_v = past.unbind(0)                          present = cat([past, stack([k, v])], 3)
    k, v = cat([past_k, k], 2), cat([past_v, v], 2)    is    k, v = present[0], present[1]
    present = stack([k, v])

as older GPT models write it. The separately concatenated parts become views of the one tensor that is returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.dynamo import OpOverload
from kvcompile.passes.graph.effects import analyse
from kvcompile.passes.graph.operators import CONCATENATIONS
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, operand, same, value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class _Grown:
    """One entry of a stacked past with new tokens appended: ``past[index]`` along ``dim``, joined with ``new`` along ``token_dim``."""

    past: fx.Node
    dim: int
    index: int
    new: fx.Node
    token_dim: int


def _part(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Return (tensor, dim, index) if a node is one entry of a tensor along a dim; else None."""
    if op_name(node) == "select":
        arguments = bind(node)
        index = arguments["index"]
    elif op_name(node) == "getitem" and op_name(node.args[0]) == "unbind":
        arguments, index = bind(operand(node)), node.args[1]
    else:
        return None
    shape = value_of(arguments["self"]).shape
    dim = arguments["dim"] % len(shape)
    if not isinstance(index, int) or (index < 0 and not isinstance(shape[dim], int)):
        return None
    return arguments["self"], dim, index if index >= 0 else index + shape[dim]


def _grown(node: fx.Node) -> _Grown | None:
    if op_name(node) not in CONCATENATIONS:
        return None
    parts = bind(node)["tensors"]
    if len(parts) != 2 or not all(is_tensor(part) for part in parts):
        return None
    found, rank = _part(parts[0]), value_of(node).dim()
    return None if found is None else _Grown(*found, parts[1], bind(node)["dim"] % rank)


def join_stacked(graph: fx.Graph) -> None:
    """Rewrite in place every stack of parts that were each concatenated with new tokens as one concatenation."""
    stacks = [node for node in graph.nodes if op_name(node) == "stack"]
    effects = analyse(graph) if stacks else None
    for node in stacks:
        assert effects is not None
        parts, dim = bind(node)["tensors"], bind(node)["dim"] % value_of(node).dim()
        grown = [_grown(part) for part in parts]
        first = grown[0]
        if first is None or [
            (item.past, item.dim, item.index, item.token_dim) for item in grown if item is not None
        ] != [(first.past, dim, at, first.token_dim) for at in range(len(parts))] or not same(value_of(first.past).shape[dim], len(parts)):
            continue
        if any(effects.writes_to(item) for item in (first.past, *parts)):
            # A view of the whole tensor would see later writes; the original copy does not.
            continue
        last = max(parts, key=effects.order.__getitem__)
        if any(effects.order[user] < effects.order[last] for part in parts for user in part.users):
            continue
        _join(graph, node, dim, [item for item in grown if item is not None], parts, last)
        effects = analyse(graph)


def _join(graph: fx.Graph, stack: fx.Node, dim: int, grown: list[_Grown], parts: list[fx.Node], last: fx.Node) -> None:
    first = grown[0]
    token_dim = first.token_dim + (first.token_dim >= dim)

    def call(target: OpOverload, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta = {key: value for key, value in stack.meta.items() if key not in {"val", "tensor_meta"}}
        made.meta["val"] = target(*fx.node.map_arg(args, value_of))
        return made

    with graph.inserting_after(last):
        # Each node is inserted after the previous one, so they follow ``last`` in this order.
        new = call(aten.stack.default, [item.new for item in grown], dim)
    with graph.inserting_after(new):
        whole = call(aten.cat.default, [first.past, new], token_dim)
    for at, part in enumerate(parts):
        with graph.inserting_after(whole):
            view = call(aten.select.int, whole, dim, at)
        part.replace_all_uses_with(view)
    stack.replace_all_uses_with(whole)
    graph.erase_node(stack)
    for part in parts:
        graph.erase_node(part)
