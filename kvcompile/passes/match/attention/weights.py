"""Softmax of every spelling: one operator, or exponentials divided by their sum.

    softmax(x)                                    log_softmax(x).exp()          exp(x - logsumexp(x))
    exp(x - max(x)) / sum(exp(x - max(x)))        (softmax(x) * mask) / its sum (exp(x) * mask) / its sum

Division by the sum cancels a factor of the whole row, so the last two are a softmax over the tokens that the mask keeps.

    exp(x - max(x)) / (sum(exp(x - max(x))) + 1e-9)                             softmax(x) / sum(softmax(x)).clamp(min=1e-9)

An epsilon below the rounding error does not change a sum that is at least one, as these two are. A sum can be smaller than one if the
maximum was not subtracted, or if it was taken over all scores before a mask removed some.
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
    """Normalised attention weights: a softmax of ``scores`` over ``dim``, with the masks that apply after the exponential."""

    scores: fx.Node
    dim: int
    nodes: tuple[fx.Node, ...]
    masks: tuple[tuple[fx.Node, MaskKind], ...] = ()
    zeroed: tuple[tuple[fx.Node, MaskKind], ...] = ()
    """Masks after the exponential that must have been applied to the scores as well."""
    epsilon: float = 0.0
    """The number that was added to a sum of at least one, below its dtype's rounding; 0 for none."""


def _same(node: Any) -> Any:
    """Return the value that ``node`` casts or copies, through any number of casts and copies."""
    while isinstance(node, fx.Node) and op_name(node) in COPIES - {"dropout"} and node.args:
        node = node.args[0]
    return node


def _between(node: Any, stop: Any) -> tuple[fx.Node, ...]:
    """Return the nodes from ``node`` up to ``stop`` (left out), along first operands."""
    found = []
    while node is not stop and isinstance(node, fx.Node):
        found.append(node)
        node = node.args[0]
    return tuple(found)


def read(node: Any) -> AttentionWeights | None:
    """Return the softmax whose last operation ``node`` is, None for other nodes. Raises Miss for an unknown spelling of a softmax."""
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
    """Return the softmax that is ``exp`` of a log-softmax; None for other exponentials."""
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
    """Return the softmax that is ``e / e.sum(-1, keepdim=True)``, with ``e`` an exponential or a softmax, masked or not.

    None for other divisions; raises Miss where exponentials are divided by something else.
    """
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
                advice=SPELL + ", which does not contain a one; an epsilon is negligible only next to a sum of at least one",
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
    if total.epsilon > torch.finfo(dtype).eps / 2 or total.floor > LEAST_SUM or not (dim is not None or _less_maximum(scores)):
        raise Miss(
            f"exponentials of the scores are divided by something other than their sum, which {total.epsilon or total.floor:g} may change",
            node, advice=SPELL + f", or subtract the scores' maximum first and add no more than {torch.finfo(dtype).eps / 2:.0e}",
        )
    return AttentionWeights(scores, dims[0], nodes, (), masks, total.epsilon)


LEAST_SUM = 0.5
"""A lower bound of sums that are at least one before rounding."""


@dataclass(frozen=True)
class _Total:
    """The divisor of exponentials: ``sum``, plus ``epsilon``, or clamped to at least ``floor``.

    ``nodes``: the sum and the steps after it.
    """

    sum: fx.Node
    epsilon: float
    floor: float
    nodes: tuple[fx.Node, ...]


def _total(node: Any) -> _Total | None:
    """Return a divisor that is a sum, plus an epsilon or with a floor; None for other divisors."""
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
    """Return whether the scores are a difference of scores and their maximum, so that the largest exponential is one."""
    base = _same(scores)
    if op_name(base) not in {"sub", "sub_"} or bind(base).get("alpha", 1) != 1:
        return False
    largest = base.args[1]
    while isinstance(largest, fx.Node) and op_name(largest) in COPIES - {"dropout"} | {"unsqueeze", "getitem"}:
        largest = largest.args[0]
    return op_name(largest) in {"amax", "max"} and largest.args[0] is base.args[0]


Positive = tuple[fx.Node, int | None, tuple[fx.Node, ...], tuple[tuple[fx.Node, MaskKind], ...]]


def _positive(node: Any) -> Positive | None:
    """Return (scores, dim, nodes, masks) of a value that is exp(scores) times masks, up to a factor of each row; None for others.

    ``dim``: the dim over which a softmax has already normalised the exponentials; None for plain exponentials.
    """
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
    """Return (weights, mask, effect of the mask) of a step that sets masked weights to zero; None for other nodes."""
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
    """Return whether a tensor holds only zeros and ones: a boolean tensor, or a cast of one to numbers."""
    while isinstance(node, fx.Node):
        if is_tensor(node) and value_of(node).dtype == torch.bool:
            return True
        if op_name(node) not in COPIES | {"unsqueeze", "expand", "view", "reshape"} or not node.args:
            return False
        node = node.args[0]
    return False
