"""Attention spelled out: product, steps on the scores, softmax, product.

The steps between the two products are read one by one into a normal form (scale, softcap, mask terms,
sinks), so their order and their spelling do not matter where the mathematics does not care.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from kvcompile.passes.constants import constant
from kvcompile.passes.patterns.products import Product, scores, weighted
from kvcompile.passes.patterns.sdpa import mask_roles
from kvcompile.passes.shapes import IDENTITIES, bind, is_tensor, op_name, sizes
from kvcompile.passes.sites import Attention, MaskKind, MaskTerm, Miss

SOFTMAX = {"softmax", "_softmax", "_safe_softmax"}
VIEWS = {"view", "reshape", "_unsafe_view"}
VERY_NEGATIVE = -1e4


@dataclass
class _Scores:
    """The scores' normal form while the steps are read from the product to the softmax."""

    product: Product
    roles: tuple[str, ...]
    scale: float = 1.0
    cap: float = 0.0
    capping: bool = False
    masks: list[MaskTerm] = field(default_factory=list)
    sinks: fx.Node | None = None


def _chain(softmax: fx.Node) -> tuple[Product, list[tuple[fx.Node, fx.Node]]]:
    """From the softmax back to the first product: (step, the operand it was reached through), product first."""
    steps: list[tuple[fx.Node, fx.Node]] = []
    node = softmax.args[0]
    while True:
        if not isinstance(node, fx.Node):
            raise Miss("the softmax is over no product of queries and keys", softmax)
        product = scores(node)
        if product is not None:
            return product, steps[::-1]
        operand = _scores_operand(node)
        if operand is None:
            raise Miss(f"the scores pass through {op_name(node) or node.op}, which is no known step of attention", node)
        steps.append((node, operand))
        node = operand


def _scores_operand(node: fx.Node) -> fx.Node | None:
    """The operand of a step that carries the scores: for where, the branch that is no constant."""
    name = op_name(node)
    if name == "where":
        branches = [item for item in node.args[1:3] if is_tensor(item) and constant(item) is None]
        return branches[0] if len(branches) == 1 else None
    if name in {"cat"}:
        operands = list(node.args[0])  # type: ignore[arg-type]
        return operands[0] if len(operands) == 2 else None
    if name in {"add", "add_", "mul", "mul_", "maximum"} and is_tensor(node.args[0]) and len(node.args) > 1 and is_tensor(node.args[1]):
        first, second = node.args[0], node.args[1]
        if constant(second) is not None:
            return first
        return first if _reaches_product(first) else second
    known = STEPS.keys() | IDENTITIES | VIEWS | {"slice"}
    return node.args[0] if name in known and node.args and is_tensor(node.args[0]) else None


def _reaches_product(node: Any, depth: int = 24) -> bool:
    while isinstance(node, fx.Node) and depth:
        if op_name(node) in {"matmul", "bmm", "baddbmm", "einsum"}:
            return True
        if not node.args or op_name(node) in {"linear", "mm", "addmm", "embedding"}:
            return False
        node, depth = (node.args[1] if op_name(node) == "where" else node.args[0]), depth - 1
    return False


def _scaled(state: _Scores, node: fx.Node, factor: float) -> None:
    if state.capping:
        state.scale, state.cap, state.capping = state.scale * factor, factor, False
        return
    if state.cap:
        raise Miss("the scores are scaled after a softcap", node)
    if factor <= 0.0 and state.masks:
        raise Miss("the scores are scaled after a mask by a number that is not positive", node)
    state.scale *= factor
    state.masks = [replace(term, factor=term.factor * factor) if term.kind is MaskKind.ADD else term for term in state.masks]


def _mul(state: _Scores, node: fx.Node, operand: fx.Node) -> None:
    other = node.args[1] if node.args[0] is operand else node.args[0]
    factor = constant(other)
    if factor is None:
        raise Miss("the scores are multiplied by a tensor", node)
    _scaled(state, node, factor)


def _div(state: _Scores, node: fx.Node, operand: fx.Node) -> None:
    factor = constant(node.args[1])
    if factor is None or node.args[0] is not operand:
        raise Miss("the scores are divided by a tensor", node)
    _scaled(state, node, 1 / factor)


def _tanh(state: _Scores, node: fx.Node, operand: fx.Node) -> None:
    del operand
    if state.masks or state.cap:
        raise Miss("a tanh over masked scores", node)
    state.capping = True


def _add(state: _Scores, node: fx.Node, operand: fx.Node) -> None:
    other = node.args[1] if node.args[0] is operand else node.args[0]
    value = constant(other)
    if value == 0.0:
        return
    if not is_tensor(other):
        raise Miss("a number is added to the scores", node)
    factor = float(bind(node).get("alpha", 1))
    if other is node.args[0] and factor != 1.0:
        raise Miss("the scores are added to a mask times a number", node)
    state.masks.append(MaskTerm(other, MaskKind.ADD, mask_roles(other, state.roles), factor))


def _fill(state: _Scores, node: fx.Node, operand: fx.Node) -> None:
    del operand
    value = constant(node.args[2])
    if value is None or value > VERY_NEGATIVE:
        raise Miss("masked scores are filled with a value that does not exclude them", node)
    state.masks.append(MaskTerm(node.args[1], MaskKind.FILL, mask_roles(node.args[1], state.roles)))  # type: ignore[arg-type]


def _where(state: _Scores, node: fx.Node, operand: fx.Node) -> None:
    condition, yes, no = node.args[:3]
    kind = MaskKind.BOOL if yes is operand else MaskKind.FILL
    value = constant(no if yes is operand else yes)
    if value is None or value > VERY_NEGATIVE:
        raise Miss("masked scores are replaced by a value that does not exclude them", node)
    state.masks.append(MaskTerm(condition, kind, mask_roles(condition, state.roles)))  # type: ignore[arg-type]


def _sinks(state: _Scores, node: fx.Node, operand: fx.Node) -> None:
    other = list(node.args[0])[1]  # type: ignore[arg-type]
    if sizes(other)[-1] != 1 or sizes(node)[-1] != sizes(operand)[-1] + 1:
        raise Miss("the scores are concatenated with more than one extra column", node)
    state.sinks = other


def _shifted(state: _Scores, node: fx.Node, operand: fx.Node) -> None:
    other = node.args[1]
    while isinstance(other, fx.Node) and op_name(other) in IDENTITIES | {"getitem"}:
        other = other.args[0]
    if op_name(other) in {"amax", "max"} and other.args[0] is operand:  # type: ignore[union-attr]
        return
    term, alpha = node.args[1], float(bind(node).get("alpha", 1))
    if node.args[0] is not operand or not is_tensor(term) or "T" not in mask_roles(term, state.roles):
        raise Miss("something other than their maximum or a mask is subtracted from the scores", node)
    state.masks.append(MaskTerm(term, MaskKind.ADD, mask_roles(term, state.roles), -alpha))


def _floor(state: _Scores, node: fx.Node, operand: fx.Node) -> None:
    del state, operand
    value = constant(node.args[1])
    if value is None or value > VERY_NEGATIVE:
        raise Miss("the scores are bounded from below", node)


def _reshaped(state: _Scores, node: fx.Node, operand: fx.Node) -> None:
    del operand
    shape = sizes(node)
    if state.roles[0] == "BH" and len(shape) == 4:
        state.roles = ("B", "H", *state.roles[1:])
    elif state.roles[:2] == ("B", "H") and len(shape) == 3:
        state.roles = ("BH", *state.roles[2:])
    elif len(shape) != len(state.roles):
        raise Miss("the scores are reshaped in a way that is not known", node)


STEPS = {
    "mul": _mul, "mul_": _mul, "div": _div, "div_": _div, "true_divide": _div, "tanh": _tanh, "add": _add, "add_": _add,
    "masked_fill": _fill, "masked_fill_": _fill, "where": _where, "cat": _sinks, "sub": _shifted, "sub_": _shifted,
    "max": _floor, "maximum": _floor, "clamp": _floor, "clamp_min": _floor,
    **dict.fromkeys(VIEWS, _reshaped),
}


def _forward(softmax: fx.Node, roles: tuple[str, ...], had_sinks: bool) -> tuple[list[fx.Node], Product]:
    """From the softmax on to the second product, through casts, dropout, reshapes and the dropping of sinks."""
    node = softmax
    path: list[fx.Node] = []
    dropped = not had_sinks
    while True:
        users = [user for user in node.users if op_name(user) not in {"sym_size"}]
        if len(users) != 1:
            raise Miss("the attention weights are read by more than the product with the values", node)
        product = weighted(users[0], node, roles)
        if product is not None:
            if not dropped:
                raise Miss("the sinks' column is not dropped before the values", node)
            return path, product
        node = users[0]
        name = op_name(node)
        path.append(node)
        if name == "slice" and had_sinks and sizes(node)[-1] == sizes(node.args[0])[-1] - 1:  # type: ignore[arg-type]
            dropped = True
        elif name in VIEWS:
            shell = _Scores(product, roles)  # type: ignore[arg-type]
            _reshaped(shell, node, node)
            roles = shell.roles
        elif name == "dropout" and (node.args[1] == 0.0 or not node.args[2]):
            continue
        elif name not in IDENTITIES or name == "dropout":
            raise Miss(f"the attention weights pass through {name or node.op} before the values", node)


def recognise(node: fx.Node) -> Attention | None:
    """The attention around a softmax node; None where there is none, Miss where it almost is."""
    if op_name(node) not in SOFTMAX:
        return None
    dim = bind(node)["dim"]
    if int(dim) % len(sizes(node)) != len(sizes(node)) - 1:
        return None
    product, steps = _chain(node)
    state = _Scores(product, product.roles, scale=product.alpha)
    if product.bias is not None:
        state.masks.append(MaskTerm(product.bias, MaskKind.ADD, mask_roles(product.bias, product.roles)))
    for step, operand in steps:
        name = op_name(step)
        if name in IDENTITIES:
            continue
        STEPS[name](state, step, operand)
    if state.capping:
        raise Miss("a tanh that is not scaled back", node)
    path, last = _forward(node, state.roles, state.sinks is not None)
    nodes = (product.node, *(step for step, _ in steps), node, *path, last.node)
    return Attention(
        op_name(product.node) + "-softmax-" + op_name(last.node), last.node, nodes,
        product.left, product.left_roles, product.right, product.right_roles, last.right, last.right_roles,
        last.roles, state.scale, state.cap, tuple(state.masks), False, state.sinks,
    )


