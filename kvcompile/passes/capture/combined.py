"""Combined attention weights: rewrite their product with values as a combination of products, one for each softmax.

    (softmax(s1) - lam * softmax(s2)) @ v    is    softmax(s1) @ v - lam * (softmax(s2) @ v)

for factors that are equal for all cached tokens. Differential attention has this form, and so have weights scaled by a gate per query.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from kvcompile.passes.graph.constants import constant
from kvcompile.passes.graph.effects import Effects, analyse
from kvcompile.passes.graph.operators import COPIES, Kind, named
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, rank, same_shape, value_of

aten = torch.ops.aten

SOFTMAX = named(Kind.SOFTMAX)
THROUGH = COPIES | {"nan_to_num", "masked_fill", "where", "select", "view", "unsqueeze", "exp"}
"""Operators that may occur between a softmax and the combination."""

Call = Callable[..., fx.Node]


@dataclass(frozen=True)
class _SoftmaxTerm:
    """One softmax of a combination: its ``weights`` node, cast to ``casts`` in order, times (or divided by) ``factors``."""

    weights: fx.Node
    factors: tuple[tuple[fx.Node | float, bool], ...] = ()
    """Pairs (tensor or number, whether it divides)."""
    casts: tuple[torch.dtype, ...] = ()


def combine_behind(graph: fx.Graph) -> None:
    """Rewrite in place every product of combined attention weights and values as the combination of products."""
    products = [node for node in graph.nodes if op_name(node) in {"matmul", "bmm", "einsum"} and _letters(node) is not None]
    effects = None
    for node in products:
        weights = _operands(node)[0]
        tokens = _letters(node).tokens  # type: ignore[union-attr]
        parts = _parts(weights, tokens)
        if parts is None or (len(parts) == 1 and not parts[0].factors):
            continue
        effects = effects or analyse(graph)
        inside = {weights, *_between(weights, parts)}
        if any(effects.writes_to(item) for item in inside) or any(set(item.users) - inside - {node} for item in inside):
            continue
        if any(_depends(item, parts) for part in parts for item, _ in part.factors):
            continue
        if any(effects.writes_between(item, item, node) for part in parts for item, _ in part.factors if is_tensor(item)):
            # The rewrite reads a factor at the product, later than the original: a write between the two would change it.
            continue
        _turn(graph, node, parts, effects)
        for item in sorted(inside, reverse=True):
            graph.erase_node(item)


# --- terms of a combination --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Letters:
    """Dims of a product of weights and values as letters: the weights', the result's, and the index of the weights' token dim."""

    weights: str
    result: str
    tokens: int


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    arguments = bind(node)
    if op_name(node) == "einsum":
        first, second = arguments["tensors"]
        return first, second
    return node.args[0], node.args[1]  # type: ignore[return-value]


def _letters(node: fx.Node) -> _Letters | None:
    """Return the dims of a product's first operand and result as letters; None unless it sums over exactly one dim."""
    if op_name(node) != "einsum":
        first, second = _operands(node)
        if not is_tensor(first) or not is_tensor(second) or min(rank(first), rank(second)) < 2:
            return None
        own, result = rank(first), rank(node)
        names = "abcdefghijkl"[:result]
        # Dims are aligned from the right. The weights' last dim is summed over; the result's last dim is the values'.
        return _Letters(names[result - own : -1] + "z", names, own - 1) if own <= result <= 12 else None
    text = bind(node)["equation"].replace(" ", "")
    if len(bind(node)["tensors"]) != 2 or "->" not in text or "." in text:
        return None
    inputs, result = text.split("->")
    first, second = inputs.split(",")
    summed = [letter for letter in first if letter not in result]
    whole = set(first) - set(summed) <= set(result) and len(set(first)) == len(first) and len(set(result)) == len(result)
    return _Letters(first, result, first.index(summed[0])) if len(summed) == 1 and summed[0] in second and whole else None


def _parts(node: Any, tokens: int) -> list[_SoftmaxTerm] | None:
    """Return the softmax terms that add up to ``node``; None if it is not such a sum. ``tokens``: the dim of cached tokens."""
    name = op_name(node)
    if not is_tensor(node):
        return None
    off = name == "dropout" and (node.args[1] == 0.0 or not node.args[2])
    if (off or name in COPIES - {"dropout"}) and is_tensor(node.args[0]) and same_shape(node, node.args[0]):
        found = _parts(node.args[0], tokens)
        dtype = value_of(node).dtype
        return None if found is None else [
            replace(part, casts=(*part.casts, dtype)) if value_of(node.args[0]).dtype is not dtype else part for part in found
        ]
    if name in {"add", "sub"} and all(is_tensor(item) and same_shape(item, node) for item in node.args[:2]):
        first, second = (_parts(item, tokens) for item in node.args[:2])
        sign = float(bind(node)["alpha"]) * (-1 if name == "sub" else 1)
        return None if first is None or second is None else [*first, *(_times(part, sign, False) for part in second)]
    if name == "neg":
        found = _parts(node.args[0], tokens)
        return None if found is None else [_times(part, -1.0, False) for part in found]
    if name in {"mul", "div"} and len(node.args) == 2:
        sides = [(node.args[0], node.args[1])] + ([(node.args[1], node.args[0])] if name == "mul" else [])
        for carried, factor in sides:
            if is_tensor(carried) and same_shape(carried, node) and _is_factor(factor, node, tokens):
                found = _parts(carried, tokens)
                if found is not None:
                    return [_times(part, factor, name == "div") for part in found]
    return [_SoftmaxTerm(node)] if _is_weights(node) else None


def _times(part: _SoftmaxTerm, factor: Any, divides: bool) -> _SoftmaxTerm:
    return part if factor == 1.0 and not divides else replace(part, factors=(*part.factors, (factor, divides)))


def _is_factor(item: Any, node: fx.Node, tokens: int) -> bool:
    """Return whether ``item`` is a finite nonzero number, or a floating-point tensor of size 1 along the dim of cached tokens."""
    if (value := constant(item)) is not None:
        return value != 0.0 and math.isfinite(value)
    if not is_tensor(item) or not value_of(item).dtype.is_floating_point:
        return False
    at = tokens - (rank(node) - rank(item))
    size = value_of(item).shape[at] if at >= 0 else 1
    return isinstance(size, int) and size == 1


def _is_weights(node: Any) -> bool:
    """Return whether a node comes, within eight steps, from a softmax or from a quotient with an exponential as its dividend."""
    for _ in range(8):
        if op_name(node) in SOFTMAX:
            return True
        if op_name(node) == "div":
            # Exponentials divided by their sum.
            node = node.args[0]
            return op_name(node) == "exp" or (op_name(node) in THROUGH | {"mul"} and any(op_name(x) == "exp" for x in node.args))
        if op_name(node) not in THROUGH:
            return False
        carried = [item for item in node.args[:3] if is_tensor(item) and (op_name(node) != "where" or item is not node.args[0])]
        node = next((item for item in carried if op_name(item) in THROUGH | SOFTMAX), None)
    return False


def _between(node: fx.Node, parts: list[_SoftmaxTerm]) -> Iterator[fx.Node]:
    """Yield the nodes between the combination ``node`` and its softmaxes and factors, these excluded."""
    leaves = {part.weights for part in parts} | {item for part in parts for item, _ in part.factors if isinstance(item, fx.Node)}
    stack = [node]
    while stack:
        item = stack.pop()
        if item not in leaves:
            yield item
            stack += item.all_input_nodes


def _depends(item: object, parts: list[_SoftmaxTerm]) -> bool:
    """Return whether a factor is computed from the weights themselves, such as a sum that they are divided by."""
    leaves = {part.weights for part in parts}
    first, stack, seen = min(leaves), [item], set()
    while stack:
        node = stack.pop()
        if not isinstance(node, fx.Node) or node in seen or node < first:
            continue
        if node in leaves:
            return True
        seen.add(node)
        stack += node.all_input_nodes
    return False


# --- combination of products ---------------------------------------------------------------------


def _turn(graph: fx.Graph, product: fx.Node, parts: list[_SoftmaxTerm], effects: Effects) -> None:
    """Replace ``product`` by the sum of one product for each of ``parts``, scaled and cast as before."""
    def call(target: Any, *args: Any) -> fx.Node:
        with graph.inserting_before(product):
            node = graph.call_function(target, args)
        node.meta = {key: value for key, value in product.meta.items() if key not in {"val", "tensor_meta"}}
        node.meta["val"] = target(*fx.node.map_arg(args, value_of))
        effects.order[node] = effects.order[product]
        return node

    letters = _letters(product)
    assert letters is not None
    total: fx.Node | None = None
    for part in parts:
        made = part.weights
        for dtype in part.casts:
            made = call(aten.to.dtype, made, dtype)
        made = call(product.target, *_with_first(product, made))
        number = 1.0
        for factor, divides in part.factors:
            if (value := constant(factor)) is not None:
                number = number / value if divides else number * value
            else:
                made = call(aten.div.Tensor if divides else aten.mul.Tensor, made, _lined_up(call, cast(fx.Node, factor), letters))
        joined = aten.sub.Tensor if number < 0.0 and total is not None else aten.add.Tensor
        number = abs(number) if joined is aten.sub.Tensor else number
        made = made if number == 1.0 else call(aten.mul.Scalar, made, number)
        total = made if total is None else call(joined, total, made)
    assert total is not None
    if value_of(total).dtype is not value_of(product).dtype:
        total = call(aten.to.dtype, total, value_of(product).dtype)
    product.replace_all_uses_with(total)
    graph.erase_node(product)


def _with_first(product: fx.Node, weights: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of ``product`` with its first operand replaced by ``weights``."""
    if op_name(product) == "einsum":
        return (product.args[0], [weights, product.args[1][1]], *product.args[2:])  # type: ignore[index]
    return (weights, *product.args[1:])


def _lined_up(call: Call, factor: fx.Node, letters: _Letters) -> fx.Node:
    """Return a factor that broadcasts against the weights, reshaped to broadcast against the product's result."""
    names = list(letters.weights[len(letters.weights) - rank(factor) :])
    summed = letters.weights[letters.tokens]
    if summed in names:
        factor = call(aten.select.int, factor, names.index(summed), 0)
        names.remove(summed)
    order = [names.index(letter) for letter in letters.result if letter in names]
    if order != sorted(order):
        factor = call(aten.permute.default, factor, order)
    placed = [letter for letter in letters.result if letter in names]
    first = letters.result.index(placed[0]) if placed else len(letters.result)
    for at, letter in enumerate(letters.result[first:]):
        if letter not in names:
            factor = call(aten.unsqueeze.default, factor, at)
    return factor
