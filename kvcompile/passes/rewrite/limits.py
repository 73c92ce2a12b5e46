"""Limits: emit a site's normalised mask as operands of ``attend``.

::

    scores + where(arange(T) <= cache_position, 0, -inf)   ->  attend(..., hi=cache_position)
    scores.masked_fill(~padding, -inf)                     ->  attend(..., keep=padding)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import same, size_along, value_of
from kvcompile.passes.match.mask.reach import exceeds, unbounded
from kvcompile.passes.match.sites import Limit, LimitKind, Site
from kvcompile.passes.plan.plan import SitePlan
from kvcompile.passes.rewrite.call_rows import rows_of_call
from kvcompile.passes.rewrite.context import Context, device_of
from kvcompile.passes.rewrite.masks import bias_of, last_seen
from kvcompile.passes.rewrite.planes import Planes
from kvcompile.passes.rewrite.positions import NewPositions
from kvcompile.passes.rewrite.rewritten import Variant
from kvcompile.passes.rewrite.sliding import covered
from kvcompile.passes.rewrite.visibility import Visibility
from kvcompile.types import PAGE


def visibility(context: Context, emit: Emitter, item: SitePlan, as_it_lies: bool) -> Visibility:
    """Emit the operands of a site's mask, over tokens in the model's order.

    ``as_it_lies``: attention reads a sliding cache in slot order, where a limit by position has no meaning; limits that every stored token
    meets are then left out.
    """
    site = item.site
    hi, lo = (
        _limit(context, emit, limit, item) if limit is not None and not (as_it_lies and covered(site, limit)) else None
        for limit in (site.bounds.hi, site.bounds.lo)
    )
    return Visibility(hi, lo, _keep(emit, site), bias_of(emit, item))


def within_length(context: Context, emit: Emitter, item: SitePlan, seen: Visibility) -> Visibility:
    """Return ``seen`` with its upper limit clamped to the last token that is read, if the limit may exceed that token."""
    site = item.site
    if seen.hi is None or site.key.sliding is not None or context.is_fresh(item.key) or not exceeds(site):
        return seen
    last = emit.call(aten.clamp_max.default, seen.hi, _less_one(emit, _tokens_read(site)))
    return Visibility(last, seen.lo, seen.keep, seen.bias)


def seeing(emit: Emitter, item: SitePlan, q: fx.Node, hi: fx.Node, planes: Planes, positions: NewPositions) -> fx.Node:
    """Emit queries [B, H, S, D]; a query with an upper limit beyond the store's end, or beyond a window's newest token, is NaN.

    No token exists there. The NaN shows the error without waiting for the device to check the mask.
    """
    if not unbounded(item.site):
        return q
    if item.key.window:
        last = emit.call(aten.slice.Tensor, positions.of(emit, item.key), 1, -1)
        behind = emit.call(aten.gt.Tensor, hi, last)
    else:
        room = emit.call(operator.mul, emit.call(aten.sym_size.int, planes.encoded(item.key)[0], 0), PAGE)
        behind = emit.call(aten.ge.Scalar, planes.from_first(emit, item.key, hi), room)
    for dim in (1, 3):
        behind = emit.call(aten.unsqueeze.default, behind, dim)
    return emit.call(aten.masked_fill.Scalar, q, behind, float("nan"))


def _tokens_read(site: Site) -> Any:
    return value_of(site.attention.k).shape[site.attention.k_roles.index("T")]


def _keep(emit: Emitter, site: Site) -> fx.Node | None:
    """Emit which positions any query of a row may attend to, bool [1 or B, T]; return the node, None for a mask without such padding."""
    if site.bounds.keep is None:
        return None
    mask, roles = site.bounds.keep
    keep = emit.arrange(rows_of_call(emit, mask, roles, site), roles, ("B", "T"))
    return keep if value_of(mask).dtype == torch.bool else emit.call(aten.to.dtype, keep, torch.bool)


def _limit(context: Context, emit: Emitter, limit: Limit, item: SitePlan) -> fx.Node:
    """Emit the last or first position that each query of this call sees by ``limit``, int64 [1 or B, S]; return the node."""
    site, kind, device = item.site, limit.kind, device_of(item)
    facts = site.key.kind.facts
    count = size_along(site.attention.q, site.attention.q_roles, "S", site.attention.folded)
    read = not facts.written or site.key.block_table is not None
    if limit.node is not None and (read or context.variant is not Variant.FRESH):
        return _from_tensor(emit, limit, limit.node, site, count)
    if kind in {LimitKind.OWN, LimitKind.NODE}:
        # The runtime selects the fresh variant only if the limits' tensors are 0, 1, 2, ...
        return emit.positions(count, _offset(emit, limit), device)
    if kind is LimitKind.CONST:
        return emit.constant_limit(count, _offset(emit, limit), device)
    if context.is_fresh(item.key) and not (facts.created and facts.fixed):
        # All keys of this call; in cross-attention their number differs from the queries'.
        return emit.constant_limit(count, _less_one(emit, item.key.slot.write.count), device)
    whole = emit.constant_limit(count, _less_one(emit, _tokens_read(site)), device)
    buffer = facts.filled and site.key.sliding is None
    seen = last_seen(emit, site, device) if buffer else None
    return whole if seen is None else emit.call(aten.minimum.default, seen, whole)


def _from_tensor(emit: Emitter, limit: Limit, origin: fx.Node, site: Site, count: Any) -> fx.Node:
    """Emit ``limit`` as the tensor ``origin`` of the captured graph plus the limit's offset, int64 [1 or B, S]; return the node.

    One limit for each of ``count`` queries: kernels read them so, and broadcast none.
    """
    node = rows_of_call(emit, origin, limit.roles, site)
    if value_of(origin).dtype != torch.int64:
        node = emit.call(aten.to.dtype, node, torch.int64)
    offset = _offset(emit, limit)
    if offset != 0:
        node = emit.call(aten.add.Tensor if isinstance(offset, fx.Node) else aten.add.Scalar, node, offset)
    found = emit.arrange(node, limit.roles, ("B", "S"))
    if same(value_of(origin).shape[limit.roles.index("S")] if "S" in limit.roles else 1, count):
        return found
    return emit.call(aten.expand.default, found, [-1, emit.size(count)])


def _offset(emit: Emitter, limit: Limit) -> Any:
    """Return a limit's constant part: an int, or a node if it includes a symbolic size."""
    if limit.amount is None:
        return limit.offset
    amount = emit.size(limit.amount.value)
    return amount if limit.offset == 0 else emit.call(operator.add, amount, limit.offset)


def _less_one(emit: Emitter, value: Any) -> Any:
    if isinstance(value, int):
        return value - 1
    return emit.call(operator.sub, emit.size(value), 1)
