"""Masks: the operands of ``attend`` for mask terms that are not position arithmetic, and for learned sinks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import same, value_of
from kvcompile.passes.match.mask.masks import hiding
from kvcompile.passes.match.sites import MaskKind, MaskTerm, Site
from kvcompile.passes.plan.plan import SitePlan
from kvcompile.passes.rewrite.call_rows import rows_of_call
from kvcompile.passes.rewrite.left_padding import shown


def bias_of(emit: Emitter, item: SitePlan) -> fx.Node | None:
    """Emit all carried mask terms as one operand [B or 1, H or 1, S or 1, T]; None without any."""
    attention = item.site.attention
    read = value_of(attention.k).shape[attention.k_roles.index("T")]
    return joined(emit, item, item.site.bounds.carried, read)


def joined(emit: Emitter, item: SitePlan, terms: Sequence[MaskTerm], tokens: Any) -> fx.Node | None:
    """Emit mask terms over ``tokens`` tokens as one operand [B or 1, H or 1, S or 1, T], bool or float; None without terms."""
    combined: fx.Node | None = None
    boolean = True
    for term in terms:
        node = rows_of_call(emit, term.node, term.roles, item.site)
        dtype = value_of(term.node).dtype
        is_bool = term.kind is not MaskKind.ADD
        if is_bool and dtype != torch.bool:
            node = emit.call(aten.to.dtype, node, torch.bool)
        if term.kind is MaskKind.FILL:
            node = emit.call(aten.logical_not.default, node)
        if term.factor != 1.0:
            node = emit.call(aten.mul.Scalar, node, term.factor)
        node = emit.heads(node, term.roles, ("S", "T"), item.site.heads, item.site.groups)
        if "T" not in term.roles:
            # A term without a token dim holds for every token.
            node = emit.call(aten.expand.default, node, [-1, -1, -1, emit.size(tokens)])
        if combined is None:
            combined, boolean = node, is_bool
        elif is_bool and boolean:
            combined = emit.call(aten.logical_and.default, combined, node)
        else:
            left, right = _floats(emit, combined, boolean), _floats(emit, node, is_bool)
            combined, boolean = emit.call(aten.add.Tensor, left, right), False
    return combined


def _floats(emit: Emitter, node: fx.Node, boolean: bool) -> fx.Node:
    if not boolean:
        return node
    zero = emit.call(aten.zeros_like.default, node, dtype=torch.float32)
    return emit.call(aten.masked_fill.Scalar, zero, emit.call(aten.logical_not.default, node), float("-inf"))


def last_seen(emit: Emitter, site: Site, device: torch.device) -> fx.Node | None:
    """Emit the last position that carried masks let each query see, int64 [1 or B, 1 or S]; None if no term hides tokens."""
    found: list[fx.Node] = []
    for term in hiding(site.bounds):
        node = shown(emit, term, site)
        length = value_of(term.node).shape[term.roles.index("T")]
        behind = emit.call(aten.arange.start, 1, emit.call(operator.add, emit.size(length), 1), dtype=torch.int64, device=device)
        last = emit.call(aten.amax.default, emit.call(aten.mul.Tensor, node, behind), [1, 3])
        found.append(emit.call(aten.sub.Scalar, last, 1))
    if not found:
        return None
    node = found[0]
    for other in found[1:]:
        node = emit.call(aten.minimum.default, node, other)
    return node


def sinks_of(emit: Emitter, item: SitePlan) -> fx.Node | None:
    """Emit the learned sink logits as [H]; None without any."""
    if item.site.attention.sinks is None:
        return None
    node = emit.copies[item.site.attention.sinks]
    roles, shape = item.site.attention.sink_roles, value_of(item.site.attention.sinks).shape
    kept = tuple(role if not set(role) - set("HKG") and not same(size, 1) else "" for role, size in zip(roles, shape, strict=True))
    node = emit.heads(node, kept, (), item.site.heads, item.site.groups)
    return emit.call(aten.select.int, node, 0, 0)
