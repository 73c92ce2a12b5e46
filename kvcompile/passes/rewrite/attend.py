"""Attend: replace one attention of the captured graph by one operation over stores, or over this call's tokens.

::

    k = index_copy(key_cache, 2, pos, new_k)      append(new_k, key_planes, pos, "int4")
    v = index_copy(value_cache, 2, pos, new_v)    append(new_v, value_planes, pos, "int4")
    out = sdpa(q, k, v, attn_mask=j <= pos)  ->   out = attend(q, key_planes, value_planes, hi=pos, ..., "int4", "int4")

Masks are computed over tokens in the model's order, then mapped by ``VISIBILITY_STEPS`` to the store's order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import estimate, same, size_along, value_of
from kvcompile.passes.match.sites import LimitKind
from kvcompile.passes.plan.plan import SitePlan
from kvcompile.passes.rewrite import latent, log_sums, memory, rotation
from kvcompile.passes.rewrite.appends import Appends
from kvcompile.passes.rewrite.context import Context, device_of
from kvcompile.passes.rewrite.head_tiles import HeadTile
from kvcompile.passes.rewrite.left_padding import from_origin
from kvcompile.passes.rewrite.limits import seeing, visibility, within_length
from kvcompile.passes.rewrite.masks import sinks_of
from kvcompile.passes.rewrite.order import in_order
from kvcompile.passes.rewrite.planes import Planes
from kvcompile.passes.rewrite.rewritten import Variant
from kvcompile.passes.rewrite.rope import RopeTables
from kvcompile.passes.rewrite.sliding import SlidingCaches
from kvcompile.passes.rewrite.sources import Sources, read_planes, sources
from kvcompile.passes.rewrite.strides import free_strides
from kvcompile.passes.rewrite.visibility import Visibility
from kvcompile.schemes import Adaptive
from kvcompile.schemes.certificate.telemetry import REFILLED, TELEMETRY_PLANE
from kvcompile.types import BESIDE, QUERY_GROUP, QUERY_ROWS


@dataclass(frozen=True)
class Shared:
    """State shared by the sites of one graph: its context, planes, RoPE tables, sliding caches and appends."""

    context: Context
    planes: Planes
    rope: RopeTables
    sliding: SlidingCaches
    appends: Appends


def attend(shared: Shared, item: SitePlan) -> None:
    """Replace the attention of one planned site."""
    context, site, attention = shared.context, item.site, item.site.attention
    emit = context.emit_before(attention.output)
    source = sources(shared.appends, emit, item)
    if source.fresh is not None and isinstance(item.key.scheme, Adaptive):
        _observe(shared, emit, item, source)
    if source.fresh is not None and _is_plain_causal(context, item):
        out = _flash(emit, item, source)
    else:
        out = _over_planes(shared, emit, item, source)
    log: fx.Node | None = None
    both = out
    if attention.gives_log_sums:
        out, log = log_sums.apart(emit, both, source)
    if source.fresh is None:
        out = rotation.unrotated(emit, shared.planes, item.value, out)
    if site.assembly is not None and source.fresh is None:
        out = latent.result(emit, out, source.dtype, site.assembly.value, site.heads)
    if attention.memory is not None and log is not None:
        out, log = memory.merged(emit, item, source, out, log, like=both)
    dtype = value_of(attention.output).dtype
    if dtype != source.dtype:
        out = emit.call(aten.to.dtype, out, dtype)
    new = emit.from_heads(out, attention.out_roles, site.heads, site.groups)
    context.copies[attention.output].replace_all_uses_with(new)
    # A later attention may use this result as its queries.
    context.copies[attention.output] = new
    free_strides(new)
    if attention.log_sums is not None and log is not None:
        log_sums.replace(context, emit, item, log)


def _flash(emit: Emitter, item: SitePlan, source: Sources) -> fx.Node:
    """Emit SDPA with a causal mask over this call's tokens; returns [B, H, S, Dv]."""
    attention = item.site.attention
    assert source.fresh is not None
    count = size_along(attention.q, attention.q_roles, "S", attention.folded)
    fresh, grouped = source.fresh, source.grouped
    # On a GPU, SDPA with grouped float32 heads specialises on its sizes (torch 2.11), so one graph could not serve all lengths.
    if grouped and isinstance(count, torch.SymInt) and source.dtype == torch.float32:
        fresh, grouped = (_repeated(emit, fresh[0], item.site.groups), _repeated(emit, fresh[1], item.site.groups)), False
    q, k, v = source.q, *fresh
    if isinstance(count, torch.SymInt):
        made = item.site.assembly
        room = (item.key.spec.head_dim if made is None else sum(stripe.count for stripe in made.keys)) - source.value_dim
        # SDPA over two widths specialises on its sizes too (torch 2.11), and holds all scores at once (every torch).
        q, k, v = _padded(emit, q, -room), _padded(emit, k, -room), _padded(emit, v, room)
    out = emit.call(
        aten.scaled_dot_product_attention.default, q, k, v, None, 0.0, not same(count, 1), scale=abs(attention.scale), enable_gqa=grouped,
    )
    return out if v is fresh[1] else emit.call(aten.slice.Tensor, out, -1, 0, source.value_dim)


def _padded(emit: Emitter, x: fx.Node, room: int) -> fx.Node:
    """Emit ``x`` with ``room`` channels of zeros appended, which change neither scores nor the other channels of the result."""
    if room <= 0:
        return x
    # Not constant_pad_nd, which specialises as well.
    one = emit.call(aten.slice.Tensor, x, -1, 0, 1)
    return emit.call(aten.cat.default, [x, emit.call(aten.zeros_like.default, emit.call(aten.expand.default, one, [-1, -1, -1, room]))], -1)


def _repeated(emit: Emitter, x: fx.Node, groups: int) -> fx.Node:
    """Emit keys or values repeated for each query head: [B, K, T, D] to [B, K * groups, T, D]."""
    wide = emit.call(aten.expand.default, emit.call(aten.unsqueeze.default, x, 2), [-1, -1, groups, -1, -1])
    return emit.call(aten.flatten.using_ints, wide, 1, 2)


def _is_plain_causal(context: Context, item: SitePlan) -> bool:
    """Return whether attention over this call's tokens has a plain causal mask and nothing else, as flash attention computes."""
    bounds, attention = item.site.bounds, item.site.attention
    hi = bounds.hi
    # A refilled window's first position is unknown; otherwise the runtime has checked that positions start at 0 (see ``limits``).
    refilled = item.key.slot.sliding is not None and context.variant is not Variant.FRESH
    counted = {LimitKind.OWN} if refilled else {LimitKind.OWN, LimitKind.NODE}
    own = hi.kind in counted and hi.offset == 0 and hi.amount is None
    alone = same(item.site.tokens, 1) and hi.kind is LimitKind.CONST and hi.offset == 0 and hi.amount is None
    limits_only = not bounds.carried and bounds.lo is None and bounds.keep is None
    return (own or alone) and limits_only and not attention.softcap and attention.sinks is None and not attention.gives_log_sums


def _over_planes(shared: Shared, emit: Emitter, item: SitePlan, source: Sources) -> fx.Node:
    """Emit the attention over planes [B, H, S, Dv] (with log-sums Dv + 1), and its error report if the site has ``certify``."""
    if source.blocks is not None:
        return _with_rows(emit.call(torch.ops.kvcompile.attend_blocks.default, *_block_operands(shared, emit, item, source)), item)
    operands, fill = _operands(shared, emit, item, source), item.site.bounds.fill
    filled: dict[str, Any] = {"fill": fill} if fill != -math.inf else {}
    if item.site.attention.gives_log_sums:
        filled["log_sums"] = True
    if source.fresh is not None:
        return _with_rows(emit.call(torch.ops.kvcompile.attend.default, *operands, **filled), item)
    optional, exact_first, scheme = _optional(shared, emit, item), _exact_first(shared, emit, item), item.key.scheme
    planes, own = shared.planes.named(item.key), shared.planes.named(item.value)
    written = [planes.get(name) for name in scheme.attention_writes] + [own.get(name) for name in scheme.attention_writes_values]
    operation = getattr(torch.ops.kvcompile, scheme.attention).default
    if (tiles := item.site.value.tiles) > 1:
        of_all = frozenset(planes[spec.name] for spec in item.key.layout.planes if spec.shared)
        parts = [HeadTile(emit, item, number, tiles, of_all) for number in range(tiles)]
        made = [
            _with_rows(
                emit.call(operation, *part.operands(operands), *part.optional(optional), **part.exact_first(exact_first), **filled), item
            )
            for part in parts
        ]
        for further in made[1:]:
            further.meta[BESIDE] = True
        return emit.call(aten.cat.default, made, 1)
    out = _with_rows(emit.call(operation, *operands, *optional, *written, **exact_first, **filled), item)
    if item.certify is not None:
        emit.call(
            torch.ops.kvcompile.report_site.default, out, *operands, *(optional or [None, None]), planes[TELEMETRY_PLANE.name],
            item.certify.spec(), planes.get(REFILLED), planes.get(scheme.error_feedback_plane or ""), **exact_first,
        )
    return out


def _operands(shared: Shared, emit: Emitter, item: SitePlan, source: Sources) -> list[Any]:
    """Return the operands that every attention operation takes."""
    attention = item.site.attention
    seen = visibility(shared.context, emit, item, as_it_lies=_reads_slots(shared, item, source))
    q = source.q
    if source.fresh is None:
        seen = within_length(shared.context, emit, item, seen)
        q = q if seen.hi is None else seeing(emit, item, q, seen.hi, shared.planes, shared.appends.positions)
        q = in_order(emit, item, q, shared.planes)
    for step in VISIBILITY_STEPS:
        seen = step(shared, emit, item, source, seen)
    return [
        q, source.keys, source.values, seen.hi, seen.lo, seen.keep, seen.bias, sinks_of(emit, item), *source.schemes,
        abs(attention.scale), attention.softcap, source.value_dim,
    ]


def _block_operands(shared: Shared, emit: Emitter, item: SitePlan, source: Sources) -> list[Any]:
    """Return the operands of attention over a pool's blocks in place."""
    attention, blocks = item.site.attention, source.blocks
    assert blocks is not None
    hi = visibility(shared.context, emit, item, as_it_lies=False).hi
    assert hi is not None
    if blocks.cut:
        hi = emit.call(aten.clamp_max.default, hi, value_of(attention.k).shape[attention.k_roles.index("T")] - 1)
    return [
        source.q, source.keys, source.values, source.table, blocks.every, hi, blocks.window, sinks_of(emit, item), *source.schemes,
        abs(attention.scale), attention.softcap, source.value_dim,
    ]


def _observe(shared: Shared, emit: Emitter, item: SitePlan, source: Sources) -> None:
    """Emit the update of the keys' planes by this call's queries over this call's tokens, for an adaptive scheme."""
    scheme, planes = item.key.scheme, shared.planes.named(item.key)
    assert isinstance(scheme, Adaptive)
    written = [planes[name] for name in scheme.attention_writes]
    operation = getattr(torch.ops.kvcompile, scheme.observes).default
    emit.call(operation, *_operands(shared, emit, item, source), *written, scheme.spec())


def _with_rows(out: fx.Node, item: SitePlan) -> fx.Node:
    """Return attention node ``out`` with two numbers added to its metadata, by which a kernel is chosen.

    QUERY_ROWS: new tokens times query heads per kv head, estimated if symbolic; 1 for a single new token, whatever the heads. QUERY_GROUP:
    query heads per kv head.
    """
    site, attention = item.site, item.site.attention
    count = size_along(attention.q, attention.q_roles, "S", attention.folded)
    alone = isinstance(count, int) and count == 1
    group = site.heads // item.key.spec.heads
    out.meta[QUERY_ROWS], out.meta[QUERY_GROUP] = 1 if alone else estimate(count) * group, group
    return out


# --- from the model's order to the store's ----------------------------------------------------------


def _from_padding(shared: Shared, emit: Emitter, item: SitePlan, source: Sources, seen: Visibility) -> Visibility:
    """Return ``seen`` with positions counted from each row's origin if the store has a window; else ``seen`` itself."""
    if source.fresh is not None or not item.key.window:
        return seen
    origin = shared.appends.exact_newest[item.site.key.part].origin
    return seen if origin is None else from_origin(emit, origin, device_of(item), item.site.bounds, seen)


def _in_slot_order(shared: Shared, emit: Emitter, item: SitePlan, source: Sources, seen: Visibility) -> Visibility:
    """Return ``seen`` with masks in the slot order of a sliding cache if attention reads its slots; else ``seen`` itself."""
    return shared.sliding.in_slot_order(emit, item, seen, device_of(item)) if _reads_slots(shared, item, source) else seen


VISIBILITY_STEPS: tuple[Callable[[Shared, Emitter, SitePlan, Sources, Visibility], Visibility], ...] = (
    _from_padding, _in_slot_order,
)
"""Steps, in order, that map a mask over tokens in the model's order to one over the store's positions."""


def _reads_slots(shared: Shared, item: SitePlan, source: Sources) -> bool:
    """Return whether attention reads a sliding cache in slot order."""
    return item.site.key.sliding is not None and source.fresh is None and shared.sliding.reads_slots(item.key)


# --- optional operands -------------------------------------------------------------------------------


def _optional(shared: Shared, emit: Emitter, item: SitePlan) -> list[Any]:
    """Return the optional positional operands: newest tokens and their start, RoPE tables, a second store of keys."""
    exact_newest, tables = _exact_newest(shared, emit, item), shared.rope.operands(emit, item.key)
    if item.extra_key is not None:
        extra_key = [read_planes(shared.appends, item.extra_key, item), item.extra_key.scheme.spec(), item.extra_key.spec.head_dim]
        return [*(exact_newest or [None, None]), *(tables or [None, False]), *extra_key]
    return [*(exact_newest or ([None, None] if tables else [])), *tables]


def _exact_first(shared: Shared, emit: Emitter, item: SitePlan) -> dict[str, Any]:
    """Return the keyword operands for sinks: their planes, and their first position if not 0; {} without sinks."""
    if not item.key.sinks:
        return {}
    rows = [shared.planes.named(slot)["sinks"] for slot in item.keys]
    keys = rows[0] if len(rows) == 1 else emit.call(aten.cat.default, rows, -1)
    found: dict[str, Any] = {"exact_first": [keys, shared.planes.named(item.value)["sinks"]]}
    origin = shared.planes.named(item.key).get("origin")
    return found if origin is None else {**found, "exact_first_at": origin}


def _exact_newest(shared: Shared, emit: Emitter, item: SitePlan) -> list[Any]:
    """Return the newest keys and values of a site with a window, and the position of the first of them; [] without a window."""
    if not item.key.window:
        return []
    made = shared.appends.exact_newest
    key, value = (made[slot.slot.part] for slot in (item.key, item.value))
    keys = key.tokens
    if item.extra_key is not None:
        keys = emit.call(aten.cat.default, [keys, made[item.extra_key.slot.part].tokens], -1)
    return [[keys, value.tokens], emit.call(aten.sub.Scalar, key.start, item.key.window)]
