"""Absorb: attention over latents, with the projections moved to the queries and to the result.

    q . (W_K c) = (W_K^T q) . c            sum_t p_t (W_V c_t) = W_V (sum_t p_t c_t)

So queries become as wide as the cached latent, attention reads it as keys and as values (one kv head for all query heads), and keys and
values of single heads are never computed. In prefill it is the opposite: there are as many queries as keys, so keys and values of the
new tokens are computed once, as the model does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.match.sites import Projection, Slot, Stripe

New = Callable[[Slot], fx.Node]


def matrices(emit: Emitter, projection: Projection, dtype: torch.dtype) -> fx.Node:
    """Emit the weight of a projection as [heads, channels, inner] in ``dtype``; return its node."""
    node, roles = emit.copies[projection.weight], []
    shape = value_of(projection.weight).shape
    at = 0
    for dim, form in enumerate(projection.dims):
        if form.summed:
            roles.append("R")
        elif form.head and form.channel:
            # The faster index is the inner of two dims.
            outer, inner = ("H", "D") if form.head > form.channel else ("D", "H")
            step = max(form.head, form.channel)
            count = {"H": projection.heads, "D": projection.channels}
            node = emit.call(aten.unflatten.int, node, at, [shape[dim] // step, step])
            node = _narrow(emit, node, at, form.start // step, count[outer], shape[dim] // step)
            node = _narrow(emit, node, at + 1, form.start % step, count[inner], step)
            roles += [outer, inner]
            at += 1
        elif form.head or form.channel:
            role, count_here = ("H", projection.heads) if form.head else ("D", projection.channels)
            node = _narrow(emit, node, at, form.start, count_here, shape[dim])
            roles.append(role)
        elif shape[dim] == 1:
            roles.append("")
        else:
            node = _narrow(emit, node, at, form.start, 1, shape[dim])
            roles.append("")
        at += 1
    node = emit.arrange(node, roles, ("H", "D", "R"))
    return node if value_of(projection.weight).dtype == dtype else emit.call(aten.to.dtype, node, dtype)


def _narrow(emit: Emitter, node: fx.Node, dim: int, start: int, count: int, size: int) -> fx.Node:
    return node if (start, count) == (0, size) else emit.call(aten.slice.Tensor, node, dim, start, start + count)


def scaled(emit: Emitter, node: fx.Node, factor: float) -> fx.Node:
    """Emit ``node`` times ``factor``; return the node itself for a factor of one."""
    return node if factor == 1.0 else emit.call(aten.mul.Scalar, node, factor)


def _by_head(emit: Emitter, node: fx.Node, matrix: fx.Node, groups: int, equation: str) -> fx.Node:
    """Emit the product of ``node`` [B, H, S, x] with one ``matrix`` for each of H / ``groups`` heads; return its node.

    ``equation``: the letters of x, a comma, and those of a head's matrix, as in einsum; the matrix's other letter is the result's last dim.
    """
    left, right = equation.split(",")
    if groups == 1:
        return emit.call(aten.einsum.default, f"bhs{left},h{right}->bhs{_result(left, right)}", [node, matrix])
    node = emit.call(aten.unflatten.int, node, 1, [-1, groups])
    made = emit.call(aten.einsum.default, f"bhgs{left},h{right}->bhgs{_result(left, right)}", [node, matrix])
    return emit.call(aten.flatten.using_ints, made, 1, 2)


def _result(left: str, right: str) -> str:
    return right.replace(left, "")


def queries(
    emit: Emitter, q: fx.Node, dtype: torch.dtype, stripes: tuple[Stripe, ...], slots: tuple[Slot, ...], heads: int
) -> fx.Node:
    """Emit queries q [B, H, S, D] projected to the cached channels of ``slots``, one slot after another; return the node.

    ``stripes``: the runs of channels of which keys consist; ``dtype``: that of the projections; ``heads``: number of query heads.
    """
    parts: list[fx.Node] = []
    width = sum(stripe.count for stripe in stripes)
    for slot in slots:
        runs: list[tuple[int, int, fx.Node]] = []
        for stripe in stripes:
            if not _same(stripe.slot, slot):
                continue
            part, size = scaled(emit, _narrow(emit, q, 3, stripe.start, stripe.count, width), stripe.factor), stripe.count
            if stripe.projection is not None:
                groups = heads // stripe.projection.heads
                part = _by_head(emit, part, matrices(emit, stripe.projection, dtype), groups, "d,dr")
                size = stripe.projection.inner
            runs.append((stripe.first, size, part))
        parts.append(_side_by_side(emit, runs, slot.head_dim))
    return parts[0] if len(parts) == 1 else emit.call(aten.cat.default, parts, -1)


def _same(a: Slot, b: Slot) -> bool:
    return a.root is b.root and a.axes.select == b.axes.select


def _side_by_side(emit: Emitter, runs: list[tuple[int, int, fx.Node]], width: int) -> fx.Node:
    """Emit one operand of ``width`` channels from ``runs`` of (first channel, number of channels, values).

    Other channels are zero; overlapping runs are added.
    """
    runs = sorted(runs, key=lambda run: run[:2])
    ends = [0, *[first + size for first, size, _ in runs]]
    if [first for first, _, _ in runs] == ends[:-1] and ends[-1] == width:
        nodes = [node for _, _, node in runs]
        return nodes[0] if len(nodes) == 1 else emit.call(aten.cat.default, nodes, -1)
    padded = [emit.call(aten.constant_pad_nd.default, node, [first, width - first - size]) for first, size, node in runs]
    total = padded[0]
    for other in padded[1:]:
        total = emit.call(aten.add.Tensor, total, other)
    return total


def result(emit: Emitter, out: fx.Node, dtype: torch.dtype, value: Stripe, heads: int) -> fx.Node:
    """Emit the attention's result [B, H, S, Dv] from ``out``, the weighted sum of cached channels [B, H, S, D]; return the node.

    ``value``: the run of cached channels that values are made from; ``heads``: number of query heads.
    """
    inner = value.count if value.projection is None else value.projection.inner
    out = _narrow(emit, out, 3, value.first, inner, value.slot.head_dim)
    if value.projection is not None:
        groups = heads // value.projection.heads
        out = _by_head(emit, out, matrices(emit, value.projection, dtype), groups, "r,dr")
    return scaled(emit, out, value.factor)


def expanded(emit: Emitter, stripes: tuple[Stripe, ...], new: New, dtype: torch.dtype, heads: int) -> fx.Node:
    """Emit keys or values [B, heads, S, D] of new tokens; ``new(slot)`` gives a slot's tokens [B, K, S, D]."""
    parts = []
    for stripe in stripes:
        inner = stripe.count if stripe.projection is None else stripe.projection.inner
        part = _narrow(emit, new(stripe.slot), 3, stripe.first, inner, stripe.slot.head_dim)
        if value_of(stripe.slot.root).dtype != dtype:
            part = emit.call(aten.to.dtype, part, dtype)
        if stripe.projection is not None:
            latent = emit.call(aten.select.int, part, 1, 0)
            part = emit.call(aten.einsum.default, "bsr,hdr->bhsd", [latent, matrices(emit, stripe.projection, dtype)])
        elif stripe.slot.heads != heads:
            part = emit.call(aten.expand.default, part, [-1, heads, -1, -1])
        parts.append(scaled(emit, part, stripe.factor))
    return parts[0] if len(parts) == 1 else emit.call(aten.cat.default, parts, -1)
