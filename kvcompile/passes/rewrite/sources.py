"""Sources: a site's queries, and the keys and values that its attention reads, from stores or from this call's tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.match.sites import Factor, Slot
from kvcompile.passes.plan.plan import DTYPES, SitePlan, SlotPlan
from kvcompile.passes.rewrite import latent, rotation
from kvcompile.passes.rewrite.appends import Appends
from kvcompile.passes.rewrite.blocks import PoolBlocks, blocks_of
from kvcompile.passes.rewrite.context import device_of
from kvcompile.passes.rewrite.paged import rows_of

DENSE = "dense()"


@dataclass(frozen=True)
class Sources:
    """Operands of one attention.

        q             queries [B, H, S, D] in ``dtype``; if stores are read, with channels rotated like the keys'
        keys, values  planes of stores, or one plane each of this call's tokens, encoded as ``schemes`` say
        fresh         this call's keys and values [B, K, S, D]; None if stores are read
        grouped       whether ``fresh`` has fewer heads than the queries
    """

    q: fx.Node
    dtype: torch.dtype
    keys: list[fx.Node]
    values: list[fx.Node]
    schemes: tuple[str, str]
    value_dim: int
    fresh: tuple[fx.Node, fx.Node] | None = None
    grouped: bool = False
    asked: fx.Node | None = None
    """The queries before any rotation of channels."""
    blocks: PoolBlocks | None = None
    """The blocks in which a pool's tokens are read in place; None if ``keys`` and ``values`` are in the order of tokens."""
    table: fx.Node | None = None
    """The numbers of each row's blocks, int64 [B, E]."""


def sources(appends: Appends, emit: Emitter, item: SitePlan) -> Sources:
    """Return the operands of a site, and emit the nodes that compute them."""
    q, dtype = _queries(emit, item)
    blocks, table = blocks_of(item, appends.paged.effects), None
    if blocks is None:
        keys, values = (read_planes(appends, slot, item) for slot in (item.key, item.value))
    else:
        keys, values = ([*_grown(appends, slot), *appends.planes.constant(slot)] for slot in (item.key, item.value))
        table = _block_table(appends, item, blocks)
    stored = Sources(
        q, dtype, keys, values, (item.key.scheme.spec(), item.value.scheme.spec()), item.value.spec.head_dim, asked=q, blocks=blocks,
        table=table,
    )
    if appends.context.is_fresh(item.key):
        return _of_this_call(appends, emit, item, stored)
    made, site = item.site.assembly, item.site
    if made is not None:
        q = latent.queries(emit, q, dtype, made.keys, site.read_as_keys, site.heads)
    return replace(stored, q=rotation.rotated_queries(emit, appends.planes, item.keys, q))


def _queries(emit: Emitter, item: SitePlan) -> tuple[fx.Node, torch.dtype]:
    """Emit queries [B, H, S, D], negated if the attention's scale is negative; return (their node, the dtype of the attention)."""
    site, attention = item.site, item.site.attention
    q = emit.heads(emit.copies[attention.q], attention.q_roles, ("S", "D"), site.heads, site.groups)
    if attention.beside is not None:
        more = emit.heads(emit.copies[attention.beside.q], attention.beside.q_roles, ("S", "D"), site.heads, site.groups)
        q = emit.call(aten.cat.default, [q, latent.scaled(emit, more, attention.beside.factor)], -1)
    dtype = value_of(attention.q).dtype
    q = _times(emit, q, dtype, attention.factors)
    if attention.scale < 0.0:
        # SDPA takes the root of its scale, and certificates bound scores by it: both get the magnitude, and queries the sign.
        q = emit.call(aten.neg.default, q)
    if dtype in DTYPES or item.key.spec.dtype not in DTYPES:
        return q, dtype
    # float64: no kernel supports it, and only trials use such caches.
    return emit.call(aten.to.dtype, q, torch.float32), torch.float32


def _times(emit: Emitter, q: fx.Node, dtype: torch.dtype, factors: tuple[Factor, ...]) -> fx.Node:
    """Emit queries [B, H, S, D] times the factors of the scores that are known only at run time, in ``dtype``."""
    for factor in factors:
        node, value = emit.copies[factor.node], value_of(factor.node)
        if isinstance(value, torch.Tensor) and value.dim():
            node = emit.call(aten.reshape.default, node, [])
        q = emit.call(aten.div.Tensor if factor.divides else aten.mul.Tensor, q, node)
    return q


def _of_this_call(appends: Appends, emit: Emitter, item: SitePlan, stored: Sources) -> Sources:
    """Return the operands for attention over only this call's new tokens, in full precision."""
    site, made, dtype = item.site, item.site.assembly, stored.dtype
    grouped, value_dim = site.groups > 1, stored.value_dim
    if made is not None:
        def new(slot: Slot) -> fx.Node:
            return mapped[slot.part]

        mapped = {part.slot.part: appends.read_back(emit, part, appends.tokens[part.slot.part]) for part in item.parts}

        k, v = (latent.expanded(emit, stripes, new, dtype, made.heads) for stripes in (made.keys, (made.value,)))
        grouped, value_dim = site.heads > made.heads, made.value.count
    else:
        appends.calibrate(emit, item, stored.q)
        # First rounded to the cache's dtype, then cast to attention's: a cache may be kept in another precision.
        k, v = (
            part if slot.spec.dtype == dtype else emit.call(aten.to.dtype, part, dtype)
            for slot in (item.key, item.value) for part in [appends.read_back(emit, slot, appends.append(slot, emit))]
        )
    if (tiles := site.value.tiles) > 1:
        v = emit.call(aten.repeat.default, v, [1, tiles, 1, 1])
    keys, values = [emit.call(aten.unsqueeze.default, k, 0)], [emit.call(aten.unsqueeze.default, v, 0)]
    return replace(stored, keys=keys, values=values, schemes=(DENSE, DENSE), value_dim=value_dim, fresh=(k, v), grouped=grouped)


def read_planes(appends: Appends, slot: SlotPlan, item: SitePlan) -> list[fx.Node]:
    """Return the planes that attention reads, in token order; a paged cache's planes are gathered for the site's rows."""
    planes = _grown(appends, slot)
    if slot.slot.block_table is not None:
        emit = appends.context.emit_before(slot.slot.block_table.gather)
        planes = appends.paged.gathered(emit, slot, planes, device_of(item), rows_of(item.site))
    return [*planes, *appends.planes.constant(slot)]


def _grown(appends: Appends, slot: SlotPlan) -> list[fx.Node]:
    """Return the planes that grow with tokens and that attention reads."""
    constant, read = appends.planes.constant(slot), slot.scheme.planes_read(slot.spec)
    return (appends.sliding.linear.get(slot.slot.part) or appends.planes.of(slot))[: read - len(constant)]


def _block_table(appends: Appends, item: SitePlan, blocks: PoolBlocks) -> fx.Node:
    """Emit the block numbers of each row's tokens, int64 [B, E], at the node where the model gathers the keys."""
    table = item.key.slot.block_table
    assert table is not None
    return appends.paged.blocks(appends.context.emit_before(table.gather), item.key, device_of(item), rows_of(item.site), blocks)
