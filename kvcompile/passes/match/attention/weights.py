"""Softmax of every spelling: one operator, or exponentials divided by their sum.

    softmax(x)                                    log_softmax(x).exp()          exp(x - logsumexp(x))
    exp(x - max(x)) / sum(exp(x - max(x)))        (softmax(x) * mask) / its sum (exp(x) * mask) / its sum

What is multiplied by a factor of its own row before it is divided by its sum does not change, so the last
two are a softmax over what the mask keeps.

    exp(x - max(x)) / (sum(exp(x - max(x))) + 1e-9)                             softmax(x) / sum(softmax(x)).clamp(min=1e-9)

A sum of at least one does not change by an epsilon below its rounding. Nothing else is known to be as large: not the sum of exponentials
whose maximum was not subtracted, nor one of which a mask left some out that the scores' maximum was taken over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.constants import constant, filled
from kvcompile.passes.graph.operators import COPIES, Kind, named
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, operand, rank, value_of
from kvcompile.passes.match.sites import MaskKind, Miss

SOFTMAX = named(Kind.SOFTMAX)
SPELL = "use torch.softmax over the masked scores"


@dataclass(frozen=True)
class AttentionWeights:
    """Normalised attention weights: the scores they are a softmax of, over which dim, what was masked after the exponential."""

    scores: fx.Node
    dim: int
    nodes: tuple[fx.Node, ...]
    masks: tuple[tuple[fx.Node, MaskKind], ...] = ()
    zeroed: tuple[tuple[fx.Node, MaskKind], ...] = ()
    """What was masked after the exponential and must have been masked ahead of it as well."""
    epsilon: float = 0.0
    """What was added to a sum of at least one, below its dtype's rounding."""


def _same(node: Any) -> Any:
    """A value without the casts and copies around it."""
    while isinstance(node, fx.Node) and op_name(node) in COPIES - {"dropout"} and node.args:
        node = node.args[0]
    return node


def _between(node: Any, stop: Any) -> tuple[fx.Node, ...]:
    found = []
    while node is not stop and isinstance(node, fx.Node):
        found.append(node)
        node = node.args[0]
    return tuple(found)


def read(node: Any) -> AttentionWeights | None:
    """The softmax that a node completes, None where it completes none; raises Miss where it almost does."""
    name = op_name(node)
    if name in SOFTMAX:
        return AttentionWeights(node.args[0], _dim(node), (node,))
    if name == "exp":
        return _logarithmic(node)
    if name in {"div", "div_", "true_divide"}:
        return _divided(node)
    return None


def _dim(node: fx.Node) -> int:
    return int(bind(node)["dim"]) % rank(node)


def _logarithmic(node: fx.Node) -> AttentionWeights | None:
    """``exp`` of a log-softmax."""
    inner = _same(node.args[0])
    if op_name(inner) in {"log_softmax", "_log_softmax"}:
        return AttentionWeights(inner.args[0], _dim(inner), (*_between(node, inner), inner))
    if op_name(inner) != "sub" or not is_tensor(inner.args[1]):
        return None
    total = _same(inner.args[1])
    if op_name(total) == "unsqueeze":
        total = _same(total.args[0])
    if op_name(total) != "logsumexp" or _same(total.args[0]) is not _same(inner.args[0]):
        return None
    dims = [int(dim) % rank(node) for dim in bind(total)["dim"]]
    return AttentionWeights(inner.args[0], dims[0], (*_between(node, inner), inner)) if len(dims) == 1 else None


def _divided(node: fx.Node) -> AttentionWeights | None:
    """``e / e.sum(-1, keepdim=True)`` where ``e`` is an exponential or a softmax, masked or not."""
    top = node.args[0]
    numerator = _positive(top)
    if numerator is None:
        return None
    scores, dim, nodes, masks = numerator
    total = _total(node.args[1])
    if total is None:
        if masks or op_name(_same(nodes[-1])) == "exp":
            raise Miss(
                "exponentials of the scores are divided by something other than their sum", node,
                advice=SPELL + ", without a one; an epsilon is nothing only beside a sum of at least one",
            )
        return None
    dims = [int(item) % rank(node) for item in bind(total.sum)["dim"] or ()]
    if _same(total.sum.args[0]) is not _same(top):
        raise Miss("exponentials of the scores are divided by the sum of something else", node, advice=SPELL)
    if len(dims) != 1 or (dim is not None and dim != dims[0]):
        raise Miss("exponentials of the scores are summed over another dim than one", node, advice=SPELL)
    nodes = (node, *nodes, *total.nodes)
    if not total.epsilon and not total.floor:
        return AttentionWeights(scores, dims[0], nodes, masks)
    dtype = value_of(total.sum).dtype
    if total.epsilon > torch.finfo(dtype).eps / 2 or total.floor > LEAST or not (dim is not None or _less_maximum(scores)):
        raise Miss(
            f"exponentials of the scores are divided by something other than their sum, which {total.epsilon or total.floor:g} may change",
            node, advice=SPELL + f", or subtract the scores' maximum first and add no more than {torch.finfo(dtype).eps / 2:.0e}",
        )
    return AttentionWeights(scores, dims[0], nodes, (), masks, total.epsilon)


LEAST = 0.5
"""What a sum of at least one is never below, whatever rounding did to it."""


@dataclass(frozen=True)
class _Total:
    """A sum as it stands below a division: plus ``epsilon``, or never less than ``floor``; ``nodes`` are the steps behind the sum."""

    sum: fx.Node
    epsilon: float
    floor: float
    nodes: tuple[fx.Node, ...]


def _total(node: Any) -> _Total | None:
    """The sum that something is divided by; None where it is none."""
    nodes: list[fx.Node] = []
    epsilon = floor = 0.0
    while isinstance(node, fx.Node) and (name := op_name(node)) != "sum":
        nodes.append(node)
        if name in {"add", "add_"} and is_tensor(node.args[0]) and (value := constant(node.args[1])) is not None and value >= 0.0:
            epsilon += value * float(bind(node).get("alpha", 1))
        elif name in {"clamp", "clamp_min", "clamp_", "clamp_min_", "maximum"} and (value := constant(node.args[1])) is not None:
            if bind(node).get("max") is not None:
                return None
            floor = max(floor, value)
        elif name not in COPIES - {"dropout"} | {"unsqueeze"}:
            return None
        node = node.args[0]
    return _Total(node, epsilon, floor, (*nodes, node)) if isinstance(node, fx.Node) else None


def _less_maximum(scores: fx.Node) -> bool:
    """Whether scores are some less the largest of these: the largest exponential is then one."""
    base = _same(scores)
    if op_name(base) not in {"sub", "sub_"} or bind(base).get("alpha", 1) != 1:
        return False
    largest = base.args[1]
    while isinstance(largest, fx.Node) and op_name(largest) in COPIES - {"dropout"} | {"unsqueeze", "getitem"}:
        largest = largest.args[0]
    return op_name(largest) in {"amax", "max"} and largest.args[0] is base.args[0]


Positive = tuple[fx.Node, int | None, tuple[fx.Node, ...], tuple[tuple[fx.Node, MaskKind], ...]]


def _positive(node: Any) -> Positive | None:
    """(scores, the dim they are already normalised over, nodes, masks) where a value is exp(scores) * masks up to a factor of its row."""
    base = _same(node)
    if not is_tensor(base):
        return None
    casts = _between(node, base)
    name = op_name(base)
    if name in SOFTMAX:
        return operand(base), _dim(base), (*casts, base), ()
    if name == "exp":
        return operand(base), None, (*casts, base), ()
    zeros = masked(base)
    if zeros is None:
        return None
    inner, mask, kind = zeros
    found = _positive(inner)
    if found is None:
        return None
    scores, dim, nodes, masks = found
    return scores, dim, (*casts, base, *nodes), (*masks, (mask, kind))


def masked(node: Any) -> tuple[fx.Node, fx.Node, MaskKind] | None:
    """(what is masked, the mask, what it does) of a step that sets masked weights to zero."""
    name = op_name(node)
    if name in {"masked_fill", "masked_fill_"} and constant(node.args[2]) == 0.0:
        return node.args[0], node.args[1], MaskKind.FILL
    if name == "where" and len(node.args) == 3:
        if filled(node.args[2]) == 0.0 and is_tensor(node.args[1]):
            return node.args[1], node.args[0], MaskKind.BOOL
        if filled(node.args[1]) == 0.0 and is_tensor(node.args[2]):
            return node.args[2], node.args[0], MaskKind.FILL
    if name in {"mul", "mul_"} and is_tensor(node.args[0]) and is_tensor(node.args[1]):
        for inner, mask in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
            if zero_or_one(mask):
                return inner, mask, MaskKind.BOOL
    return None


def zero_or_one(node: Any) -> bool:
    """Whether a tensor is a boolean one, or such a one cast to numbers."""
    while isinstance(node, fx.Node):
        if is_tensor(node) and value_of(node).dtype == torch.bool:
            return True
        if op_name(node) not in COPIES | {"unsqueeze", "expand", "view", "reshape"} or not node.args:
            return False
        node = node.args[0]
    return False
