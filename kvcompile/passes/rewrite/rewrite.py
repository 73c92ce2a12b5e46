"""Rewrite: every planned site becomes ``kvcompile::append`` + ``kvcompile::attend`` on store planes (or the attention of their scheme).

Where a certificate is asked of another scheme, ``kvcompile::report_site`` stands behind ``attend`` and adds to the keys' last plane.

The planes are new placeholders behind the old ones; the cache tensor itself leaves the graph. Two
variants of one graph exist, because whether anything is cached yet is known on the host before the
call and needs neither a recompile nor a branch on the device:

PAST    attention reads the store, into which the new tokens have just been appended
FRESH   the store is empty: attention reads the new keys and values as they are, in full precision, by
        flash attention where the mask is causal, and the store is only written
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.effects import Effects, written_arguments
from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import hint, op_name, size_along, value_of
from kvcompile.passes.match.mask.reach import exceeds
from kvcompile.passes.match.sites import Limit, LimitKind, Position, Site, Slot, SlotKind
from kvcompile.passes.plan.plan import DTYPES, Plan, SitePlan, SlotPlan
from kvcompile.passes.rewrite import latent as absorb
from kvcompile.passes.rewrite.calibrate import teach
from kvcompile.passes.rewrite.left_padding import from_origin, padded_rows, padding
from kvcompile.passes.rewrite.masks import bias_of, last_seen, sinks_of
from kvcompile.passes.rewrite.new_tokens import new_tokens
from kvcompile.passes.rewrite.paged import Pools, rows_of
from kvcompile.passes.rewrite.rewritten import Binding, Rewritten, Variant
from kvcompile.passes.rewrite.rope import Turning
from kvcompile.passes.rewrite.sliding import Rings, covered
from kvcompile.passes.rewrite.strides import free_strides
from kvcompile.passes.rewrite.symbols import Symbols
from kvcompile.schemes.certificate.telemetry import REFILLED

DENSE = "dense()"
BORN = {SlotKind.BORN_BUFFER, SlotKind.BORN_CONCAT}


@dataclass(frozen=True)
class Recent:
    """The results of an append to a slot with a window: the newest tokens, where the new ones start, the rows' origins (None: all 0)."""

    tokens: fx.Node
    start: fx.Node
    origin: fx.Node | None


class _Rewriter:
    def __init__(self, captured: Captured, plan: Plan, variant: Variant, effects: Effects) -> None:
        self.captured, self.plan, self.variant, self.effects = captured, plan, variant, effects
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        output = self.graph.graph_copy(captured.graph, self.env)
        self.out = self.graph.output(output)
        for old, new in self.env.items():
            new.meta = dict(old.meta)
        self.planes: dict[tuple[fx.Node, Any], list[fx.Node]] = {}
        self.positions: dict[Any, fx.Node] = {}
        self.sources: dict[tuple[fx.Node, Any], fx.Node] = {}
        self.recent: dict[tuple[fx.Node, Any], Recent] = {}
        self.origins: dict[Any, fx.Node] = {}
        self.turning = Turning(self.env, self.planes, variant is Variant.FRESH)
        self.bindings: list[Binding] = []
        self.rings = Rings(self.graph)
        self.pools = Pools(self.env, effects)
        gone = {slot.placeholder for item in plan.sites for slot in item.site.slots}
        self.symbols = Symbols(captured, self.graph, self.env, gone)
        self.symbol = self.symbols.of
        self.device = torch.device("cpu")

    # --- operands --------------------------------------------------------------------------------

    def tokens(self, slot: SlotPlan) -> Any:
        """New tokens of a write, an int or a SymInt."""
        return slot.slot.write.count

    def position(self, emit: Emitter, slot: SlotPlan) -> fx.Node:
        """Positions of the new tokens, int64 [1 or B, S]; shared by slots that write at the same place."""
        write = slot.slot.write
        where = write.position
        if self.variant is Variant.FRESH:
            key: Any = ("fresh", str(self.tokens(slot)))
        elif where.index is not None:
            key = ("index", where.index)
        elif where.past is not None:
            size = value_of(where.past).shape[write.token_dim]
            key = ("past", str(size), str(self.tokens(slot)))
        else:
            key = ("offset", where.offset, str(self.tokens(slot)))
        if key in self.positions:
            return self.positions[key]
        if self.variant is Variant.FRESH:
            node = emit.positions(self.tokens(slot), 0, self.device)
        elif where.index is not None:
            node = self._indexed(emit, where)
        elif where.past is not None:
            node = emit.positions(self.tokens(slot), emit.size(value_of(where.past).shape[write.token_dim]), self.device)
        else:
            offset = self.env[where.offset] if isinstance(where.offset, fx.Node) else emit.size(where.offset)
            node = emit.positions(self.tokens(slot), offset, self.device)
        self.positions[key] = node
        return node

    def _indexed(self, emit: Emitter, where: Position) -> fx.Node:
        """Positions that are a tensor of the graph, int64 [1 or B, S]."""
        assert where.index is not None
        index, seen = self.env[where.index], value_of(where.index)
        if seen.dtype != torch.int64:
            index = emit.call(aten.to.dtype, index, torch.int64)
        if where.roles:
            return emit.arrange(index, where.roles, ("B", "S"))
        if seen.dim() == 0:
            index = emit.call(aten.reshape.default, index, [1])
        if where.rows and seen.dim() == 1:
            index = emit.call(aten.unsqueeze.default, index, 1)
        return index if where.rows else emit.call(aten.unsqueeze.default, index, 0)

    def limit(self, emit: Emitter, limit: Limit, item: SitePlan, count: Any) -> fx.Node:
        """A position limit as int64 [1 or B, S]."""
        kind = limit.kind
        read = item.site.key.kind is SlotKind.READ or item.site.key.table is not None
        if limit.node is not None and (read or self.variant is not Variant.FRESH):
            node = self.env[limit.node]
            if value_of(limit.node).dtype != torch.int64:
                node = emit.call(aten.to.dtype, node, torch.int64)
            offset = self._offset(emit, limit)
            if offset != 0:
                node = emit.call(aten.add.Tensor if isinstance(offset, fx.Node) else aten.add.Scalar, node, offset)
            return emit.arrange(node, limit.roles, ("B", "S"))
        if kind in {LimitKind.OWN, LimitKind.NODE}:
            # The runtime takes the fresh variant only where tensors of limits are 0, 1, 2, ...
            return emit.positions(count, self._offset(emit, limit), self.device)
        if kind is LimitKind.CONST:
            return emit.constant_limit(count, self._offset(emit, limit), self.device)
        if self._fresh(item.key) and item.site.key.kind is not SlotKind.BORN_BUFFER:
            # All keys of this call, which are not as many as its queries where attention goes across.
            return emit.constant_limit(count, self._less_one(emit, self.tokens(item.key)), self.device)
        length = value_of(item.site.attention.k).shape[item.site.attention.k_roles.index("T")]
        whole = emit.constant_limit(count, self._less_one(emit, length), self.device)
        buffer = item.site.key.kind in {SlotKind.BUFFER, SlotKind.UPDATED} and item.site.key.ring is None
        seen = last_seen(emit, self.env, item.site, self.device) if buffer else None
        return whole if seen is None else emit.call(aten.minimum.default, seen, whole)

    def _offset(self, emit: Emitter, limit: Limit) -> Any:
        """The constant part of a limit: an int, or a node where symbolic ints take part."""
        total: Any = limit.offset
        for node, coefficient in limit.symbols:
            part = self.env[node] if coefficient == 1 else emit.call(operator.mul, self.env[node], coefficient)
            total = part if isinstance(total, int) and total == 0 else emit.call(operator.add, part, total)
        return total

    @staticmethod
    def _less_one(emit: Emitter, value: Any) -> Any:
        if isinstance(value, int):
            return value - 1
        return emit.call(operator.sub, emit.size(value), 1)

    # --- sites -----------------------------------------------------------------------------------

    def plane_nodes(self, slot: SlotPlan) -> list[fx.Node]:
        """The placeholders of a slot's planes, made on first use, behind all other placeholders."""
        key = (slot.slot.root, slot.slot.axes.select)
        if key in self.planes:
            return self.planes[key]
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        made: list[fx.Node] = []
        for spec in slot.layout.planes:
            with self.graph.inserting_after(last):
                last = self.graph.placeholder(f"kv{len(self.planes)}_{slot.role.value}_{spec.name}")
            made.append(last)
        taken = sum(len(nodes) for nodes in self.planes.values())
        self.planes[key] = made
        placeholder = slot.slot.placeholder
        index = next((i.index for i in self.captured.inputs if i.node is placeholder), None)
        self.bindings.append(Binding(slot, index, slot.slot.outputs, taken))
        return made

    def append(self, slot: SlotPlan, late: Emitter | None = None) -> fx.Node:
        """Encode and write the new tokens of one slot, once, at the write or where ``late`` says; returns them as [B, K, S, D]."""
        assert slot.slot.kind is not SlotKind.READ
        key = (slot.slot.root, slot.slot.axes.select)
        if key in self.sources:
            return self.sources[key]
        planes, write = self.plane_nodes(slot), slot.slot.write
        emit = Emitter(self.graph, self.env[write.at], self.symbol)
        self.device = value_of(write.values).device
        if write.places is not None:
            source, where = self.pools.new_tokens(emit, slot), self.pools.written(emit, slot, self.device)
            emit.call(torch.ops.kvcompile.append.default, source, planes, where, slot.scheme.spell())
            self.sources[key] = source
            return source
        source, planes = new_tokens(emit, self.env, slot), planes[: slot.layout.written]
        if slot.slot.ring is not None:
            self.rings.append(emit, slot, source, planes, self.device, self.variant is Variant.FRESH)
            self.sources[key] = source
            return source
        position = self.position(emit, slot)
        if late is not None:
            # What was written is what was there at the write.
            changes = self.effects.writes.get(self.effects.root.get(write.values, write.values))
            source, emit = emit.call(aten.clone.default, source) if changes else source, late
        if slot.window:
            self._append_window(emit, slot, source, position)
        else:
            self._append_rows(emit, slot, source, position)
        self.sources[key] = source
        return source

    def _append_rows(self, emit: Emitter, slot: SlotPlan, source: fx.Node, position: fx.Node) -> None:
        """Append to a store without a window; where its scheme shares scales among tokens, with the rows' padding."""
        planes = self.planes[slot.slot.root, slot.slot.axes.select][: slot.layout.written]
        origin = None
        if slot.scheme.keeps_padding_out:
            emit, position, origin = self._padding(emit, slot, position)
        stored = self.turning.back(emit, slot, source, position, origin)
        apart = [] if origin is None else [origin]
        emit.call(torch.ops.kvcompile.append.default, stored, planes, position, slot.scheme.spell(), *apart)

    def attend(self, item: SitePlan) -> None:
        """Replace one attention."""
        site = item.site
        emit = Emitter(self.graph, self.env[site.attention.output], self.symbol)
        attention = site.attention
        q = emit.heads(self.env[attention.q], attention.q_roles, ("S", "D"), site.heads, site.groups)
        if attention.beside is not None:
            more = emit.heads(self.env[attention.beside.q], attention.beside.q_roles, ("S", "D"), site.heads, site.groups)
            q = emit.call(aten.cat.default, [q, absorb.scaled(emit, more, attention.beside.factor)], -1)
        dtype = value_of(attention.q).dtype
        if dtype not in DTYPES and item.key.spec.dtype in DTYPES:
            # Double precision: no kernel has it, and only the caches of a trial hold it.
            dtype = torch.float32
            q = emit.call(aten.to.dtype, q, dtype)
        count = size_along(attention.q, attention.q_roles, "S", attention.folded)
        fresh, made = self._fresh(item.key), site.assembly
        keys, values = self._read(item.key, site), self._read(item.value, site)
        schemes = item.key.scheme.spell(), item.value.scheme.spell()
        grouped, value_dim = site.groups > 1, item.value.spec.head_dim
        if fresh and made is not None:
            new_k, new_v = (absorb.expanded(emit, self.env, of, self._new, dtype, made.heads) for of in (made.keys, (made.value,)))
            grouped, value_dim = site.heads > made.heads, made.value.count
        elif made is not None:
            q = absorb.queries(emit, self.env, q, dtype, made.keys, site.read_as_keys, site.heads)
        elif fresh:
            if self._learns(item.key) and (site.key.root, site.key.axes.select) not in self.sources:
                teach(emit, self.env, item, self._taught(emit, item, q), self.plane_nodes(item.key), self.tokens(item.key))
            # As the cache rounds them, then as the attention takes them: a cache may be kept in another precision than it is used in.
            new_k, new_v = (
                part if slot.spec.dtype == dtype else emit.call(aten.to.dtype, part, dtype)
                for slot in (item.key, item.value) for part in [self.append(slot, emit)]
            )
        if fresh:
            keys, values = [emit.call(aten.unsqueeze.default, new_k, 0)], [emit.call(aten.unsqueeze.default, new_v, 0)]
            schemes = DENSE, DENSE
        if fresh and self._plain_causal(item):
            out = emit.call(
                aten.scaled_dot_product_attention.default, q, new_k, new_v, None, 0.0, hint(count) > 1,
                scale=attention.scale, enable_gqa=grouped,
            )
        else:
            ring = site.key.ring
            rolled = ring is not None and not fresh and self.rings.rolled(item.key)
            hi, lo = (
                self.limit(emit, limit, item, count) if limit is not None and not (rolled and covered(site, limit)) else None
                for limit in (site.bounds.hi, site.bounds.lo)
            )
            keep = emit.arrange(self.env[site.bounds.keep[0]], site.bounds.keep[1], ("B", "T")) if site.bounds.keep else None
            if keep is not None and value_of(site.bounds.keep[0]).dtype != torch.bool:  # type: ignore[index]
                keep = emit.call(aten.to.dtype, keep, torch.bool)
            bias = bias_of(emit, self.env, item)
            if hi is not None and ring is None and not fresh and exceeds(site):
                length = value_of(attention.k).shape[attention.k_roles.index("T")]
                hi = emit.call(aten.clamp_max.default, hi, self._less_one(emit, length))
            if not fresh and item.key.window and (origin := self.recent[site.key.root, site.key.axes.select].origin) is not None:
                assert hi is not None
                hi, lo, keep, bias = from_origin(emit, origin, self.device, site.bounds, hi, lo, keep, bias)
            if rolled:
                hi, bias = self.rings.mask(emit, item, hi, lo, keep, bias, self.device)
                lo = keep = None
            name = "attend" if fresh else item.key.scheme.attention
            operands = [
                q, keys, values, hi, lo, keep, bias, sinks_of(emit, self.env, item), *schemes, attention.scale, attention.softcap,
                value_dim,
            ]
            beside = [] if fresh else self._beside(emit, item)
            out = emit.call(
                getattr(torch.ops.kvcompile, name).default, *operands, *beside, *([] if fresh else self._attention_writes(item.key)),
            )
            if item.certify is not None and not fresh:
                planes = self._named(item.key)
                emit.call(
                    torch.ops.kvcompile.report_site.default, out, *operands, *(beside or [None, None]), planes["telemetry"],
                    item.certify.spell(), planes.get(REFILLED),
                )
        if made is not None and not fresh:
            out = absorb.result(emit, self.env, out, dtype, made.value, site.heads)
        old = self.env[attention.output]
        if value_of(attention.output).dtype != dtype:
            out = emit.call(aten.to.dtype, out, value_of(attention.output).dtype)
        new = emit.from_heads(out, attention.out_roles, site.heads, site.groups)
        old.replace_all_uses_with(new)
        # The next attention may take this one's result as its queries.
        self.env[attention.output] = new
        free_strides(new)

    def _taught(self, emit: Emitter, item: SitePlan, q_BHSD: fx.Node) -> fx.Node:
        """The queries that a scheme learns from: turned back as the keys are, where it learns before RoPE and both stand at one place."""
        attention, slot = item.site.attention, item.key
        own = hint(size_along(attention.q, attention.q_roles, "S", attention.folded)) == hint(self.tokens(slot))
        if not slot.scheme.learns_before_rope or not own:
            return q_BHSD
        emit, position, origin = self._padding(emit, slot, self.position(emit, slot))
        return self.turning.back(emit, slot, q_BHSD, position, origin)

    def _attention_writes(self, slot: SlotPlan) -> list[fx.Node]:
        """The planes of keys that the attention of their scheme writes, those that they have."""
        planes = self._named(slot)
        return [planes[name] for name in slot.scheme.attention_writes if name in planes]

    def _named(self, slot: SlotPlan) -> dict[str, fx.Node]:
        """The planes of a slot by name."""
        return {spec.name: node for spec, node in zip(slot.layout.planes, self.plane_nodes(slot), strict=True)}

    def _new(self, slot: Slot) -> fx.Node:
        """The new tokens of a slot whose append stands in the graph."""
        return self.sources[slot.root, slot.axes.select]

    def _fresh(self, slot: SlotPlan) -> bool:
        """Whether what reads the slot attends to the tokens of this call alone."""
        kind, ring = slot.slot.kind, slot.slot.ring
        if slot.slot.table is not None:
            return False
        return kind is not SlotKind.READ and (self.variant is Variant.FRESH or kind in BORN or (ring is not None and ring.refilled))

    def _learns(self, slot: SlotPlan) -> bool:
        """Whether the queries of this call make planes of the slot."""
        return self._fresh(slot) and slot.scheme.learns(slot.spec)

    def _read(self, slot: SlotPlan, site: Site | None = None) -> list[fx.Node]:
        """The planes that attention reads, gathered for the rows of a ``site`` where they are a pool's."""
        planes = self.rings.linear.get((slot.slot.root, slot.slot.axes.select)) or self.plane_nodes(slot)
        planes = planes[: slot.scheme.planes_read(slot.spec)]
        if slot.slot.table is None or site is None:
            return planes
        emit = Emitter(self.graph, self.env[slot.slot.table.gather], self.symbol)
        return self.pools.gathered(emit, slot, planes, self.device, rows_of(site))

    def _append_window(self, emit: Emitter, slot: SlotPlan, source: fx.Node, position: fx.Node) -> None:
        """Append to a store with a window."""
        key = slot.slot.root, slot.slot.axes.select
        emit, position, origin = self._padding(emit, slot, position)
        stored = self.turning.back(emit, slot, source, position, origin)
        planes = self.planes[key][: slot.layout.written]
        made = emit.call(torch.ops.kvcompile.append_window.default, stored, planes, position, origin, slot.scheme.spell())
        tokens, used = (emit.call(operator.getitem, made, index) for index in (0, 1))
        start = emit.call(aten.select.int, position, 1, 0)
        if origin is not None:
            start = emit.call(aten.sub.Tensor, start, used)
        self.recent[key] = Recent(tokens, start, used if origin is not None else None)

    def _padding(self, emit: Emitter, slot: SlotPlan, position: fx.Node) -> tuple[Emitter, fx.Node, fx.Node | None]:
        """Where to append and at which position, at the write or later if the masks are, and the rows' origins [B] where they have any."""
        site = next(item.site for item in self.plan.sites for part in item.parts if part is slot)
        terms = padding(site.bounds)
        if not terms:
            return emit, position, None
        if max(self.effects.order[term.node] for term in terms) > self.effects.order[slot.slot.write.node]:
            # The position is taken where the write stood: its counter may have moved on by then.
            position = emit.call(aten.clone.default, position)
            emit = Emitter(self.graph, self.env[site.attention.output], self.symbol)
        return emit, position, padded_rows(emit, self.env, terms, site, self.origins)

    def _beside(self, emit: Emitter, item: SitePlan) -> list[Any]:
        """The optional operands: the newest tokens and where they begin, the angles that turn keys stored before RoPE, more keys."""
        recent, turned = self._recent(emit, item), self.turning.operands(emit, item.key)
        if item.more is not None:
            more = [self._read(item.more, item.site), item.more.scheme.spell(), item.more.spec.head_dim]
            return [*(recent or [None, None]), *(turned or [None, False]), *more]
        return [*(recent or ([None, None] if turned else [])), *turned]

    def _recent(self, emit: Emitter, item: SitePlan) -> list[Any]:
        """The newest tokens of a site with a window, and the position of the first of them."""
        if not item.key.window:
            return []
        key, value = (self.recent[part.slot.root, part.slot.axes.select] for part in (item.key, item.value))
        keys = key.tokens
        if item.more is not None:
            keys = emit.call(aten.cat.default, [keys, self.recent[item.more.slot.root, item.more.slot.axes.select].tokens], -1)
        return [[keys, value.tokens], emit.call(aten.sub.Scalar, key.start, item.key.window)]

    def _plain_causal(self, item: SitePlan) -> bool:
        """Whether attention over the fresh tokens is what flash attention does by itself."""
        bounds, attention = item.site.bounds, item.site.attention
        hi = bounds.hi
        # Nothing says where a window that is filled anew begins; elsewhere the runtime has looked (see ``limit``).
        refilled = item.key.slot.ring is not None and self.variant is not Variant.FRESH
        counted = {LimitKind.OWN} if refilled else {LimitKind.OWN, LimitKind.NODE}
        own = hi.kind in counted and hi.offset == 0 and not hi.symbols
        alone = item.site.tokens == 1 and hi.kind is LimitKind.CONST and hi.offset == 0 and not hi.symbols
        limits_only = not bounds.carried and bounds.lo is None and bounds.keep is None
        return (own or alone) and limits_only and not attention.softcap and attention.sinks is None

    def run(self) -> Rewritten:
        """Rewrite all sites, then drop what nobody needs any more."""
        # In the order of the writes, so that what one append computes (positions) stands before the next.
        slots = [part for item in self.plan.sites for part in item.parts]
        for part in sorted(slots, key=lambda part: self.effects.order[part.slot.write.at]):
            self.plane_nodes(part)
            if part.slot.kind is not SlotKind.READ and not self._learns(part):
                self.append(part)
        for item in self.plan.sites:
            self.attend(item)
        self._detach_sizes()
        dropped = tuple(sorted({index for binding in self.bindings for index in binding.outputs}))
        returned = list(self.out.args[0])  # type: ignore[arg-type]
        self.out.args = (tuple(item for index, item in enumerate(returned) if index not in dropped),)
        self._clean()
        cursors = self.rings.settle()
        kept = tuple(i.index for i in self.captured.inputs if not self._gone(i.node))
        for entry in self.captured.inputs:
            if self._gone(entry.node):
                self.graph.erase_node(self.env[entry.node])
        sizes = self.symbols.settle()
        module = fx.GraphModule(self.captured.module, self.graph)
        self.graph.lint()
        return Rewritten(module, self.variant, kept, tuple(self.bindings), dropped, len(returned), cursors, sizes)

    def _detach_sizes(self) -> None:
        """Sizes that are asked of what leaves the graph come from the graph's own symbols instead."""
        roots, chains = self._roots(), self._chains()
        for old in list(self.captured.graph.nodes):
            if op_name(old) != "sym_size" or (self.effects.root.get(old.args[0]) not in roots and old.args[0] not in chains):
                continue
            self.env[old].replace_all_uses_with(self.symbol(value_of(old)))

    def _roots(self) -> set[fx.Node]:
        found = set()
        for item in self.plan.sites:
            for part in item.parts:
                found |= {part.slot.root, part.slot.placeholder or part.slot.root}
        return found

    def _chains(self) -> set[fx.Node]:
        """Return the nodes that lead from a ring's past and new tokens to what is read and kept, and what is gathered from a pool."""
        parts = [part.slot for item in self.plan.sites for part in item.parts]
        gathered = {node for slot in parts if slot.table is not None for node in slot.path if self.effects.root.get(node) is not slot.root}
        return gathered | {node for slot in parts if slot.ring is not None for node in slot.ring.chain}

    def _gone(self, placeholder: fx.Node) -> bool:
        return any(
            placeholder is part.slot.placeholder for item in self.plan.sites for part in item.parts
        )

    def _clean(self) -> None:
        """Erase what is dead; the rewritten slots' own writes and steps in place on scores count as dead, every other write stays."""
        writes = {self.env[part.slot.write.node] for item in self.plan.sites for part in item.parts}
        writes |= {self.env[node] for item in self.plan.sites if item.site.assembly for node in item.site.assembly.between}
        writes |= {self.env[node] for item in self.plan.sites for node in item.site.attention.nodes}
        writes |= {self.env[node] for node in self._chains()}
        for node in reversed(list(self.graph.nodes)):
            if node.op in {"placeholder", "output"} or node.users:
                continue
            if node in writes or not (written_arguments(node) or _effectful(node)):
                self.graph.erase_node(node)


def _effectful(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        return True
    return node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload) and node.is_impure()


def rewrite(captured: Captured, plan: Plan, variant: Variant, effects: Effects) -> Rewritten:
    """The rewritten graph of one variant; the captured graph is left as it was."""
    return _Rewriter(captured, plan, variant, effects).run()
