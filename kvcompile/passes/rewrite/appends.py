"""Appends: encode each slot's new tokens and write them once into its store.

::

    cache.index_copy_(2, pos, k)      ->  append(k, planes, positions, "int4")             a store without a window
                                          append_window(k, planes, positions, origin, ...)  one with a window: returns its newest tokens

A slot with planes calibrated from this call's queries is written at the attention, after its queries.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import same, size_along, value_of
from kvcompile.passes.plan.plan import SitePlan, SlotPlan
from kvcompile.passes.rewrite import rotation
from kvcompile.passes.rewrite.calibrate import calibrate
from kvcompile.passes.rewrite.context import Context, Part
from kvcompile.passes.rewrite.left_padding import padded_rows, padding
from kvcompile.passes.rewrite.new_tokens import new_tokens
from kvcompile.passes.rewrite.paged import PagedCaches
from kvcompile.passes.rewrite.planes import Planes
from kvcompile.passes.rewrite.positions import NewPositions
from kvcompile.passes.rewrite.rewritten import Variant
from kvcompile.passes.rewrite.rope import RopeTables
from kvcompile.passes.rewrite.sliding import SlidingCaches


@dataclass(frozen=True)
class ExactNewest:
    """Results of an append to a windowed store: the newest tokens, the start of the new ones, and the rows' origins (None: all 0)."""

    tokens: fx.Node
    start: fx.Node
    origin: fx.Node | None


class Appends:
    """The appends of one graph during a rewrite; ``tokens`` and ``exact_newest`` are keyed by the slot's part of a cache tensor."""

    def __init__(self, context: Context, planes: Planes, rope: RopeTables, sliding: SlidingCaches, paged: PagedCaches) -> None:
        self.context, self.planes, self.rope, self.sliding, self.paged = context, planes, rope, sliding, paged
        self.positions = NewPositions(context.variant, context.effects)
        self.tokens: dict[Part, fx.Node] = {}
        self.exact_newest: dict[Part, ExactNewest] = {}
        self._origins: dict[Any, fx.Node] = {}
        self._taken: dict[Part, fx.Node] = {}

    def append(self, slot: SlotPlan, late: Emitter | None = None) -> fx.Node:
        """Emit the append of one slot's new tokens, at the write or at ``late`` if given; return the tokens as [B, K, S, D]."""
        assert slot.slot.kind.facts.written
        part = slot.slot.part
        if part not in self.tokens:
            self.tokens[part] = self._append(slot, late)
        return self.tokens[part]

    def _append(self, slot: SlotPlan, late: Emitter | None) -> fx.Node:
        write, planes = slot.slot.write, self.planes.of(slot)
        emit, device = self.context.emit_before(write.at), value_of(write.values).device
        if write.places is not None:
            tokens, where = self.paged.new_tokens(emit, slot), self.paged.written(emit, slot, device)
            self._emit(emit, slot, rotation.rotated(emit, self.planes, slot, tokens), planes, where, None)
            return tokens
        if slot.slot.sliding is not None:
            tokens = new_tokens(emit, slot)
            anew = self.context.variant is Variant.FRESH
            stored = rotation.rotated(emit, self.planes, slot, tokens)
            self.sliding.append(emit, slot, stored, self.planes.written(slot), self.planes.encoding(slot), device, anew)
            return tokens
        position, tokens = self.positions.of(emit, slot), self._new(slot, late)
        self._encode(emit if late is None else late, slot, tokens, position)
        return tokens

    def _new(self, slot: SlotPlan, late: Emitter | None) -> fx.Node:
        """Return the new tokens [B, K, S, D] of a linear store, with their values at the write; emitted once.

        ``late``: the emitter of a later append, None for an append at the write. If the values may change in between, they are copied.
        """
        part, write = slot.slot.part, slot.slot.write
        if part not in self._taken:
            emit = self.context.emit_before(write.at)
            tokens = new_tokens(emit, slot)
            # They may be changed in place before a later append.
            changes = late is not None and self.context.effects.writes_to(write.values)
            self._taken[part] = emit.call(aten.clone.default, tokens) if changes else tokens
        return self._taken[part]

    def _stored(
        self, emit: Emitter, slot: SlotPlan, tokens: fx.Node, position: fx.Node
    ) -> tuple[fx.Node, Emitter, fx.Node, fx.Node | None]:
        """Return (tokens as the store keeps them, emitter, positions, row origins) for an append of ``tokens``.

        The store may keep keys with RoPE undone, and channels rotated. The row origins are None if positions are counted from 0.
        """
        origin = None
        if slot.knows_padding:
            emit, position, origin = self._counted_from_padding(emit, slot, position)
        stored = rotation.rotated(emit, self.planes, slot, self.rope.undo(emit, slot, tokens, position, origin))
        return stored, emit, position, origin

    def _encode(self, emit: Emitter, slot: SlotPlan, tokens: fx.Node, position: fx.Node) -> None:
        """Emit the append of ``tokens`` [B, K, S, D] to a linear store; positions count from each row's origin if the scheme needs it."""
        stored, emit, position, origin = self._stored(emit, slot, tokens, position)
        planes, scheme = self.planes.written(slot), slot.scheme.spec()
        if not slot.window:
            place = self.planes.from_first(emit, slot, position)
            self._emit(emit, slot, stored, planes, place, origin if slot.scheme.keeps_padding_out else None)
            self._keep_first(emit, slot, stored, position, origin)
            return
        tables = self.planes.encoding(slot)
        made = emit.call(
            torch.ops.kvcompile.append_window.default, stored, planes, position, origin, scheme, *([tables] if tables else [])
        )
        newest, used = (emit.call(operator.getitem, made, index) for index in (0, 1))
        if slot.sinks:
            # Taken from the window, which holds NaN for tokens that arrived out of order.
            self._keep_first(emit, slot, emit.call(aten.slice.Tensor, newest, 2, slot.window), position, used)
        start = emit.call(aten.select.int, position, 1, 0)
        if origin is not None:
            start = emit.call(aten.sub.Tensor, start, used)
        self.exact_newest[slot.slot.part] = ExactNewest(newest, start, used if origin is not None else None)

    def _keep_first(self, emit: Emitter, slot: SlotPlan, stored: fx.Node, position: fx.Node, origin: fx.Node | None) -> None:
        """Emit the write of each row's first tokens in full precision, if the slot keeps any."""
        planes = [node for spec, node in zip(slot.layout.planes, self.planes.of(slot), strict=True) if spec.exact_first]
        if planes:
            emit.call(torch.ops.kvcompile.keep_first.default, stored, planes, position, origin)

    def _emit(
        self, emit: Emitter, slot: SlotPlan, tokens: fx.Node, planes: list[fx.Node], position: fx.Node, origin: fx.Node | None
    ) -> None:
        """Emit ``append`` with only the optional operands that it needs."""
        tables = self.planes.encoding(slot)
        optional = [origin, tables] if tables else [] if origin is None else [origin]
        emit.call(torch.ops.kvcompile.append.default, tokens, planes, position, slot.scheme.spec(), *optional)

    def read_back(self, emit: Emitter, slot: SlotPlan, tokens: fx.Node) -> fx.Node:
        """Return new tokens [B, K, S, D] as a prefill's attention reads them: decoded if the scheme demands it, else unchanged."""
        if not slot.scheme.prefill_reads_codes or slot.window:
            return tokens
        levels, tables = self.planes.constant(slot), self.planes.encoding(slot)
        return emit.call(torch.ops.kvcompile.read_back.default, tokens, levels, tables, slot.scheme.spec())

    def _counted_from_padding(self, emit: Emitter, slot: SlotPlan, position: fx.Node) -> tuple[Emitter, fx.Node, fx.Node | None]:
        """Return (emitter, positions, row origins [B] or None) for an append to a store that counts from each row's first token.

        The emitter is at the write, or at the attention if a mask that defines the origins is computed after the write.
        """
        site, order = self.context.site_of(slot).site, self.context.effects.order
        terms = padding(site.bounds)
        if not terms:
            return emit, position, None
        if max(order[term.node] for term in terms) > order[slot.slot.write.node]:
            # The position is copied at the write: its counter may change before the later append.
            position = emit.call(aten.clone.default, position)
            emit = self.context.emit_before(site.attention.output)
        return emit, position, padded_rows(emit, terms, site, self._origins)

    def calibrate(self, emit: Emitter, item: SitePlan, q_BHSD: fx.Node) -> None:
        """Emit the key planes that are computed from queries, if this call fills an empty store and nothing is encoded yet."""
        slot = item.key
        if not self.context.is_calibrated(slot) or slot.slot.part in self.tokens:
            return
        queries, angles = self._before_rope(emit, item, q_BHSD)
        if slot.rotation is not None and slot.rotation.plane is None:
            queries = rotation.rotated(emit, self.planes, slot, queries)
        keys = None
        if slot.scheme.calibrates_on_keys:
            keys = self._stored(emit, slot, self._new(slot, emit), self.positions.of(self.context.emit_before(slot.slot.write.at), slot))[0]
        calibrate(emit, item, queries, self.planes.of(slot), keys, angles)

    def _before_rope(self, emit: Emitter, item: SitePlan, q_BHSD: fx.Node) -> tuple[fx.Node, list[fx.Node] | None]:
        """Return the queries for calibration, and the RoPE angles that were undone on them; (queries unchanged, None) if none were.

        RoPE is undone if the scheme asks for it and the queries have the positions of the new keys.
        """
        attention, slot = item.site.attention, item.key
        own = same(size_along(attention.q, attention.q_roles, "S", attention.folded), slot.slot.write.count)
        if not slot.scheme.calibrates_before_rope or not own:
            return q_BHSD, None
        emit, position, origin = self._counted_from_padding(emit, slot, self.positions.of(emit, slot))
        return self.rope.undo(emit, slot, q_BHSD, position, origin), self.rope.angles(emit, slot, position, origin)
