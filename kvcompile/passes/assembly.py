"""Keys and values that are put together: from an attention operand to the stripes of channels that it is made of.

Multi-head latent attention caches a latent and a rotary part that all heads share. Its keys are a
projection of the first beside the second (by ``cat``, or by two writes into a fresh tensor), its values
another projection of the first. A stripe is a run of channels that come from one slot in one way; stripes
end where a join says so, so their edges are exact although what lies between is sampled.

A product with the queries may be taken on either side of a projection: q . (W c) = (W^T q) . c. So an
attention over stripes is an attention over what is cached, one kv head for all query heads (``absorb``).
Only a projection without bias and with nothing but views and numbers around it can be moved.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from kvcompile.passes import slots
from kvcompile.passes.caches import cache_behind
from kvcompile.passes.effects import Effects
from kvcompile.passes.patterns.projections import Side, sides
from kvcompile.passes.patterns.views import region
from kvcompile.passes.pullback import JOINS, Coords, Trail, factor, sample, step, trace
from kvcompile.passes.shapes import bind, is_tensor, op_name, operand, sizes
from kvcompile.passes.sites import Assembly, Attention, Miss, Projection, Slot, SlotKind, Stripe, WeightDim


class _Split(Exception):
    """The channels come from several places: where they must be cut."""

    def __init__(self, cuts: set[int]) -> None:
        super().__init__(cuts)
        self.cuts = cuts


@dataclass(frozen=True)
class _Run:
    """Sampled elements of a run of an operand's channels, and what is known of the graph around them."""

    node: fx.Node
    roles: tuple[str, ...]
    here: Coords
    attention: fx.Node
    effects: Effects

    @property
    def channel_dim(self) -> int:
        return self.roles.index("D")

    @property
    def channel(self) -> np.ndarray:
        return self.here[:, self.channel_dim]

    @property
    def token(self) -> np.ndarray:
        return self.here[:, self.roles.index("T")]

    def with_channels(self, column: np.ndarray) -> Coords:
        """The samples with other channels."""
        moved = self.here.copy()
        moved[:, self.channel_dim] = column
        return moved


def assemble(attention: Attention, effects: Effects, plain: Miss | slots.NoCache) -> Assembly:
    """How keys and values that are not what the cache holds are made from it.

    ``plain`` says why they are no plain views of a cache; it is raised where there is nothing better to say.
    """
    try:
        found = _assembly(attention, effects)
    except slots.NoCache:
        raise plain from None
    except Miss as miss:
        operands = (attention.k, attention.v)
        filled = any(_is_scratch(trace(node, lambda base: False).base, effects) for node in operands)
        cached = any(cache_behind(node, effects) is not None for node in operands)
        raise miss if cached and (filled or isinstance(plain, slots.NoCache)) else plain from None
    if len(found.keys) == 1 and not any(stripe.projection for stripe in (*found.keys, found.value)) and not _overlap(found):
        raise plain
    return found


def _overlap(found: Assembly) -> bool:
    """Whether values are among the channels of the keys."""
    key, value = found.keys[0], found.value
    same = key.slot.root is value.slot.root and key.slot.axes.select == value.slot.axes.select
    return same and key.first < value.first + value.count and value.first < key.first + key.count


def _assembly(attention: Attention, effects: Effects) -> Assembly:
    keys = _stripes(attention.k, attention.k_roles, attention.output, effects)
    value = _stripes(attention.v, attention.v_roles, attention.output, effects)
    if len(value) != 1:
        raise Miss("the values are put together from several parts", attention.v)
    stripes = (*keys, *value)
    heads = {stripe.projection.heads for stripe in stripes if stripe.projection is not None}
    own = {stripe.slot.heads for stripe in stripes}
    if len(heads) > 1:
        raise Miss("keys and values are made for different numbers of heads", attention.output)
    if len(own) > 1 or (heads and own != {1}):
        raise Miss("what keys and values are made from has several heads of its own", attention.output)
    if any(stripe.slot.tiled for stripe in stripes):
        raise Miss("parts that keys are put together from are repeated over the query heads in another order", attention.k)
    if len({(stripe.slot.root, stripe.slot.axes.select) for stripe in keys}) > 2:
        raise Miss("keys are put together from more than two caches", attention.k)
    between = _between((attention.k, attention.v), stripes, effects)
    return Assembly(keys, value[0], heads.pop() if heads else own.pop(), frozenset(between))


def _stripes(node: fx.Node, roles: tuple[str, ...], attention: fx.Node, effects: Effects) -> tuple[Stripe, ...]:
    """All channels of an operand, in order."""
    dim = roles.index("D")
    edges = {0, sizes(node)[dim]}
    while True:
        ordered = sorted(edges)
        try:
            found = []
            for start, stop in itertools.pairwise(ordered):
                here = sample((*sizes(node)[:dim], stop - start, *sizes(node)[dim + 1 :]))
                here[:, dim] += start
                found.append(_stripe(_Run(node, roles, here, attention, effects), start, stop - start))
            return tuple(found)
        except _Split as split:
            if split.cuts <= edges:
                raise Miss("keys or values are put together in a way that is not known", node) from None
            edges |= split.cuts


def _stripe(run: _Run, start: int, count: int) -> Stripe:
    node, coords, path = _follow(run.node, run.here, run)
    made = sides(node, coords)
    if made is None:
        slot, first = _slot(Trail(node, coords, run.here, tuple(path)), run)
        return Stripe(start, count, slot, first, factor=factor(path))
    if not any(_cached(side, run) for side in made):
        raise slots.NoCache(node)
    data, weight = made if _cached(made[0], run) else made[::-1]
    latent, there, further = _follow(data.node, data.coords, run)
    try:
        # The latent's channels stand where the operand's stood.
        inside = replace(run, here=run.with_channels(data.coords[:, data.summed]))
        slot, first = _slot(Trail(latent, there, inside.here, tuple(further)), inside)
    except slots.NoCache:
        if cache_behind(latent, run.effects) is None:
            raise
        raise Miss(
            f"the cached latent passes through {op_name(latent) or latent.op} before keys or values are made from it", latent,
            advice="cache what is projected: apply norms and activations before the write",
        ) from None
    if _cached(weight, run):
        raise Miss("keys or values are a product of two caches", node)
    return Stripe(start, count, slot, first, _projection(weight, run, slot, data.inner, count), factor(path) * factor(further))


def _cached(side: Side, run: _Run) -> bool:
    """Whether an operand of a projection is made from a cache."""
    base = trace(side.node, lambda node: op_name(node) in JOINS).base
    return base in run.effects.writes or op_name(base) in JOINS or cache_behind(base, run.effects) is not None


def _follow(node: fx.Node, coords: Coords, run: _Run) -> tuple[fx.Node, Coords, list[fx.Node]]:
    """Upstream through views, joins of channels and writes into fresh tensors; raises _Split where channels part ways."""
    path: list[fx.Node] = []
    while True:
        if op_name(node) in JOINS:
            moved = None if _grows(node, coords, run) else _through_join(node, coords, run)
        else:
            moved = step(node, coords, scales=True)
        if moved is None and _is_scratch(node, run.effects):
            moved = _through_writes(node, coords, run)
        if moved is None:
            return node, coords, path
        path.append(node)
        node, coords = moved


def _grows(node: fx.Node, coords: Coords, run: _Run) -> bool:
    """Whether a join puts new tokens behind cached ones."""
    if op_name(node) == "stack":
        return False
    dim = int(bind(node)["dim"]) % coords.shape[1]
    return bool((coords[:, dim] == run.token).all()) and sizes(node)[dim] == sizes(run.node)[run.roles.index("T")]


def _cuts(column: np.ndarray, run: _Run, edges: list[int], node: fx.Node) -> set[int]:
    """The operand's channels at which a column crosses one of ``edges``."""
    shift = column - run.channel
    if not (shift == shift[0]).all():
        raise Miss("keys or values are put together in a way that is not known", node)
    moved = {edge - int(shift[0]) for edge in edges}
    return {edge for edge in moved if run.channel.min() < edge <= run.channel.max()}


def _through_join(node: fx.Node, coords: Coords, run: _Run) -> tuple[fx.Node, Coords]:
    moved = step(node, coords, through_joins=True)
    if moved is not None:
        return moved
    dim = int(bind(node)["dim"]) % coords.shape[1]
    joined: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    edges = np.cumsum([sizes(item)[dim] for item in joined if len(sizes(item)) == coords.shape[1]])
    raise _Split(_cuts(coords[:, dim], run, edges.tolist(), node))


def _is_scratch(node: fx.Node, effects: Effects) -> bool:
    """A tensor that is made in this graph, filled by copies, and not returned."""
    writes = effects.writes.get(node, ())
    if op_name(node) not in slots.MAKERS or not writes or effects.outputs_of(effects.family(node)):
        return False
    return all(op_name(write) == "copy_" for write in writes)


def _through_writes(node: fx.Node, coords: Coords, run: _Run) -> tuple[fx.Node, Coords]:
    """From elements of a fresh tensor to the elements that were copied there last."""
    for write in reversed(run.effects.writes[node]):
        if run.effects.order[write] > run.effects.order[run.attention]:
            raise Miss("what attention reads is written to after it", write)
        covered = region(operand(write), node)
        inside = covered.inside(coords)
        if inside.all():
            source = operand(write, 1)
            return source, covered.source(coords, sizes(source))
        if inside.any():
            for dim, (first, count) in covered.bounds.items():
                if not ((coords[:, dim] >= first) & (coords[:, dim] < first + count)).all():
                    raise _Split(_cuts(coords[:, dim], run, [first, first + count], write))
    raise Miss("attention reads a fresh tensor that is not filled", node)


def _slot(trail: Trail, run: _Run) -> tuple[Slot, int]:
    """The slot at the end of a trail, whole, and the first of its channels that is read."""
    shape = list(sizes(run.node))
    column, first = run.channel - run.channel.min(), 0
    shape[run.channel_dim] = int(column.max()) + 1
    for dim, size in enumerate(sizes(trail.base)):
        shift = trail.there[:, dim] - column
        if column.any() and (shift == shift[0]).all():
            # A run of a cache's channels is read as a part of all of them.
            column, first = trail.there[:, dim], int(shift[0])
            shape[run.channel_dim] = size
            break
    # Heads may share what is cached, however the operand names them.
    read = slots.Read(run.node, tuple({"K": "H", "BK": "BH"}.get(role, role) for role in run.roles), tuple(shape))
    slot = slots.behind(replace(trail, here=run.with_channels(column)), read, run.attention, run.effects)
    if slot.kind is SlotKind.READ:
        raise slots.NoCache(trail.base)
    return slot, first


def _projection(weight: Side, run: _Run, slot: Slot, inner: int, count: int) -> Projection:
    """Which matrix each head has: the weight's coordinates as forms of head and channel."""
    heads, column = _heads(run, slot)
    channel = run.channel - run.channel.min()
    for kept in (n for n in range(1, heads + 1) if heads % n == 0):
        forms = [
            WeightDim(summed=True) if dim == weight.summed else _form(weight.coords[:, dim], column // (heads // kept), channel)
            for dim in range(weight.coords.shape[1])
        ]
        known = tuple(form for form in forms if form is not None)
        if len(known) == len(forms) and _one_block(known, sizes(weight.node), kept, count):
            return Projection(weight.node, known, kept, count, inner)
    raise Miss(
        "keys or values are made from the cache by a weight that is no matrix of its own for each head", weight.node,
        advice="make the channels of a head from neighboring rows of the weight",
    )


def _one_block(forms: tuple[WeightDim, ...], shape: tuple[int, ...], heads: int, channels: int) -> bool:
    """Whether heads and channels run along one dim of the weight each, or along one together, without gaps."""
    by_head = [form for form in forms if form.head]
    by_channel = [form for form in forms if form.channel]
    if len(by_head) != (heads > 1) or len(by_channel) != (channels > 1):
        return False
    for form, size in zip(forms, shape, strict=True):
        low, high = sorted((form.head, form.channel))
        if low < 0 or (high and not low and high != 1) or (low and (low != 1 or size % high)):
            return False
        if low and form.start % high + (channels if form.head > form.channel else heads) > high:
            return False
    return True


def _heads(run: _Run, slot: Slot) -> tuple[int, np.ndarray]:
    """How many heads an operand has, and the head of every sample."""
    for role in ("K", "H"):
        if role in run.roles:
            dim = run.roles.index(role)
            return sizes(run.node)[dim], run.here[:, dim]
    flat = next((role for role in ("BH", "BK") if role in run.roles), None)
    if flat is not None:
        dim = run.roles.index(flat)
        heads = sizes(run.node)[dim] // slot.batch
        return heads, run.here[:, dim] % heads
    return 1, np.zeros(len(run.here), dtype=np.int64)


def _form(column: np.ndarray, head: np.ndarray, channel: np.ndarray) -> WeightDim | None:
    """column = a * head + b * channel + c, or None where it is no such form."""
    rows = np.stack([head, channel, np.ones_like(head)], axis=1).astype(float)
    found, *_ = np.linalg.lstsq(rows, column.astype(float), rcond=None)
    a, b, c = (round(float(value)) for value in found)
    return WeightDim(a, b, c) if (a * head + b * channel + c == column).all() else None


def _between(operands: tuple[fx.Node, ...], stripes: tuple[Stripe, ...], effects: Effects) -> set[fx.Node]:
    """The nodes between the cache and the operands that carry cached values, the operands among them."""
    cached = {node for stripe in stripes for node in effects.family(stripe.slot.root)}
    behind: set[fx.Node] = set()
    stack = [node for node in operands if node not in cached]
    while stack:
        node = stack.pop()
        if node in behind:
            continue
        behind.add(node)
        writes = effects.writes.get(effects.root.get(node, node), ()) if is_tensor(node) else ()
        stack += [item for item in (*node.all_input_nodes, *writes) if item not in cached]
    carrying: set[fx.Node] = set()
    roots: set[fx.Node] = set()
    ordered = sorted(behind, key=lambda item: effects.order[item])
    # A view of a fresh tensor may stand before the write that brings cached values into it: hence twice.
    for node in (*ordered, *ordered):
        carries = any(item in cached or item in carrying for item in node.all_input_nodes) or effects.root.get(node) in roots
        if carries and not op_name(node).startswith("sym_"):
            carrying.add(node)
            if op_name(node) == "copy_":
                roots.add(effects.root.get(operand(node), operand(node)))
    return carrying
