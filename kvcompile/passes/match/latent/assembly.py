"""Keys and values assembled from cached parts: the stripes of channels that an attention operand consists of.

Multi-head latent attention caches a latent and a rotary part that all heads share. Its keys are a projection of the latent, joined with the
rotary part (by ``cat``, or by two writes into a fresh tensor); its values are another projection of the latent. A stripe is a run of
channels that come from one slot in one way. Stripes end at the edges of joins, so their ends are exact although the channels between are
sampled.

A product with the queries may be taken on either side of a projection: q . (W c) = (W^T q) . c. So an attention over stripes is an
attention over the cache itself, with one kv head for all query heads (``rewrite.latent``). A projection can be moved only if it has no bias
and nothing but views and constant factors around it.

::

    latent = index_copy_(cache, 1, pos, new)                              [B, T, 512 + 64]
    k, v   = split(linear(slice(latent, 2, 0, 512), W))                   of every head, made again at every step
    out    = scaled_dot_product_attention(q, cat([k, expand(slice(latent, 2, 512))], -1), v, ...)
    after:
    append(new, planes, unsqueeze(pos, 0), "int8")
    q2     = cat([einsum("bhsd,hdr->bhsr", [slice(q), W_k]), slice(q)], -1)
    out    = einsum("bhsr,hdr->bhsd", [slice(attend(q2, planes, planes, ...), 3, 0, 512), W_v])
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.operators import JOINS
from kvcompile.passes.graph.pullback import Coords, Trail, factor, sample, step, trace
from kvcompile.passes.graph.shapes import bind, hint, op_name, operand, sizes
from kvcompile.passes.match.cache import slots
from kvcompile.passes.match.cache.readings import Read
from kvcompile.passes.match.cache.views import region
from kvcompile.passes.match.latent.between import between, is_cached, is_scratch
from kvcompile.passes.match.latent.projections import sides
from kvcompile.passes.match.latent.weights import projection
from kvcompile.passes.match.sites import Assembly, Attention, Miss, Slot, Stripe
from kvcompile.passes.match.unmatched import cache_behind

WHOLE_RUNS = "join whole runs of channels with torch.cat, or copy them into slices of a fresh tensor"


class _Split(Exception):
    """Raised where channels come from several tensors; ``cuts``: the channels at which they must be cut."""

    def __init__(self, cuts: set[int]) -> None:
        super().__init__(cuts)
        self.cuts = cuts


@dataclass(frozen=True)
class _ChannelRun:
    """A run of an operand's channels: sampled elements of it (``here``), with the attention and the effects of its graph."""

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
        """Return the samples with ``column`` as their channels."""
        moved = self.here.copy()
        moved[:, self.channel_dim] = column
        return moved


def assemble(attention: Attention, effects: Effects, plain: Miss | slots.NoCache) -> Assembly:
    """Return how an attention's keys and values are made from cached slots.

    ``plain``: the Miss or NoCache that tells why they are not plain views of caches. If they are not made from cached slots either, raises
    ``plain``, or a better reason that is found here.
    """
    try:
        found = _assembly(attention, effects)
    except slots.NoCache as none:
        # If a cache is behind joins and projections, the node where they end is the better reason.
        further = isinstance(plain, slots.NoCache) and cache_behind(none.base, effects) is not None
        raise none if further else plain from None
    except Miss as miss:
        operands = (attention.k, attention.v)
        filled = any(is_scratch(trace(node, lambda base: False).base, effects) for node in operands)
        cached = any(cache_behind(node, effects) is not None for node in operands)
        raise miss if cached and (filled or isinstance(plain, slots.NoCache)) else plain from None
    if len(found.keys) == 1 and not any(stripe.projection for stripe in (*found.keys, found.value)) and not _overlap(found):
        raise plain
    return found


def _overlap(found: Assembly) -> bool:
    """Return whether values are some of the channels of the keys."""
    key, value = found.keys[0], found.value
    same = key.slot.root is value.slot.root and key.slot.axes.select == value.slot.axes.select
    return same and key.first < value.first + value.count and value.first < key.first + key.count


def _assembly(attention: Attention, effects: Effects) -> Assembly:
    """Return the stripes of an attention's keys and values; raises Miss, or NoCache."""
    keys = _stripes(attention.k, attention.k_roles, attention.output, effects)
    operands = [attention.k, attention.v]
    if attention.beside is not None:
        # The second product's channels come after the first's.
        first = sizes(attention.k)[attention.k_roles.index("D")]
        more = _stripes(attention.beside.k, attention.beside.k_roles, attention.output, effects)
        keys = (*keys, *(replace(stripe, start=stripe.start + first) for stripe in more))
        operands.append(attention.beside.k)
    value = _stripes(attention.v, attention.v_roles, attention.output, effects)
    if len(value) != 1:
        raise Miss(
            "the values are put together from several parts", attention.v,
            advice="make all channels of the values from one cache by one weight",
        )
    stripes = (*keys, *value)
    heads = {stripe.projection.heads for stripe in stripes if stripe.projection is not None}
    own = {stripe.slot.heads for stripe in stripes}
    if len(heads) > 1:
        raise Miss("keys and values are made for different numbers of heads", attention.output, advice="make both for the same heads")
    if len(own) > 1 or (heads and own != {1}):
        raise Miss(
            "the cached latent that keys and values are made from has several heads", attention.output,
            advice="cache one latent for all heads, or the keys and values themselves",
        )
    if any(stripe.slot.tiled or stripe.slot.tiles > 1 for stripe in stripes):
        raise Miss(
            "parts that keys are put together from are repeated over the query heads in another order", attention.k,
            advice="repeat heads with repeat_interleave or expand",
        )
    if len({(stripe.slot.root, stripe.slot.axes.select) for stripe in keys}) > 2:
        raise Miss(
            "keys are put together from more than two caches", attention.k,
            advice="cache a latent and one rotary part, or all parts in one tensor",
        )
    cached = {node for stripe in stripes for node in effects.family(stripe.slot.root)}
    return Assembly(keys, value[0], heads.pop() if heads else own.pop(), between(tuple(operands), cached, effects))


def _stripes(node: fx.Node, roles: tuple[str, ...], attention: fx.Node, effects: Effects) -> tuple[Stripe, ...]:
    """Return the stripes that make up all channels of an operand, in order; raises Miss, or NoCache."""
    dim = roles.index("D")
    edges = {0, sizes(node)[dim]}
    while True:
        ordered = sorted(edges)
        try:
            found = []
            for start, stop in itertools.pairwise(ordered):
                here = sample((*sizes(node)[:dim], stop - start, *sizes(node)[dim + 1 :]))
                here[:, dim] += start
                found.append(_stripe(_ChannelRun(node, roles, here, attention, effects), start, stop - start))
            return tuple(found)
        except _Split as split:
            if split.cuts <= edges:
                raise Miss("keys or values are put together in a way that is not known", node, advice=WHOLE_RUNS) from None
            edges |= split.cuts


def _stripe(run: _ChannelRun, start: int, count: int) -> Stripe:
    """Return the stripe of a run of channels: its slot and, where it is projected, its weight.

    Raises _Split where the run must be cut, Miss, or NoCache.
    """
    node, coords, path = _follow(run.node, run.here, run)
    made = sides(node, coords)
    if made is None:
        slot, first = _slot(Trail(node, coords, run.here, tuple(path)), run)
        return Stripe(start, count, slot, first, factor=factor(path))
    if not any(is_cached(side.node, run.effects) for side in made):
        raise slots.NoCache(node)
    data, weight = made if is_cached(made[0].node, run.effects) else made[::-1]
    latent, there, further = _follow(data.node, data.coords, run)
    try:
        # The latent's channels take the role of the operand's.
        inside = replace(run, here=run.with_channels(data.coords[:, data.summed]))
        slot, first = _slot(Trail(latent, there, inside.here, (*path, node, *further)), inside)
    except slots.NoCache:
        if cache_behind(latent, run.effects) is None:
            raise
        raise Miss(
            f"the cached latent passes through {op_name(latent) or latent.op} before keys or values are made from it", latent,
            advice="cache what is projected: apply norms and activations before the write",
        ) from None
    if is_cached(weight.node, run.effects):
        raise Miss("keys or values are a product of two tensors that are both written in this call", node, advice="use fixed weights")
    if changed := run.effects.writes_between(weight.node, node, run.attention):
        raise Miss(
            f"the weight that makes keys or values is changed in place by {op_name(changed[0])} before the attention", changed[0],
            advice="change the weight before the call, or a copy of it",
        )
    heads, head = _heads(run, slot)
    made_by = projection(weight, heads, head, run.channel - run.channel.min(), data.inner, count)
    return Stripe(start, count, slot, first, made_by, factor(path) * factor(further))


def _follow(node: fx.Node, coords: Coords, run: _ChannelRun) -> tuple[fx.Node, Coords, list[fx.Node]]:
    """Follow a run of channels upstream through views, joins of channels and writes into fresh tensors; return (node, coordinates, path).

    ``node``: the first node that computes its values; ``path``: the nodes passed. Raises _Split if the run's channels come from different
    tensors.
    """
    path: list[fx.Node] = []
    while True:
        if op_name(node) in JOINS:
            moved = None if _grows(node, coords, run) else _through_join(node, coords, run)
        else:
            moved = step(node, coords, scales=True)
        if moved is None and is_scratch(node, run.effects):
            # A fresh tensor holds the values that were copied into it last.
            node, coords = _through_writes(node, coords, run)
            continue
        if moved is None:
            return node, coords, path
        path.append(node)
        node, coords = moved


def _grows(node: fx.Node, coords: Coords, run: _ChannelRun) -> bool:
    """Return whether a concatenation appends new tokens to cached ones."""
    if op_name(node) == "stack":
        return False
    dim = int(bind(node)["dim"]) % coords.shape[1]
    return bool((coords[:, dim] == run.token).all()) and sizes(node)[dim] == sizes(run.node)[run.roles.index("T")]


def _cuts(column: np.ndarray, run: _ChannelRun, edges: list[int], node: fx.Node) -> set[int]:
    """Return the channels of a run at which the coordinates ``column``, one per channel, pass one of ``edges``.

    ``edges``: coordinates. Raises Miss at ``node`` unless all channels of the run are equally far from their coordinates.
    """
    shift = column - run.channel
    if not (shift == shift[0]).all():
        raise Miss("keys or values are put together in a way that is not known", node, advice=WHOLE_RUNS)
    moved = {edge - int(shift[0]) for edge in edges}
    return {edge for edge in moved if run.channel.min() < edge <= run.channel.max()}


def _through_join(node: fx.Node, coords: Coords, run: _ChannelRun) -> tuple[fx.Node, Coords]:
    """Return (joined tensor, coordinates in it) of elements of a join; raises _Split where they come from several tensors."""
    moved = step(node, coords, through_joins=True)
    if moved is not None:
        return moved
    dim = int(bind(node)["dim"]) % coords.shape[1]
    joined: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    edges = np.cumsum([sizes(item)[dim] for item in joined if len(sizes(item)) == coords.shape[1]])
    raise _Split(_cuts(coords[:, dim], run, edges.tolist(), node))


def _through_writes(node: fx.Node, coords: Coords, run: _ChannelRun) -> tuple[fx.Node, Coords]:
    """Return (copied tensor, coordinates in it) of elements of a fresh tensor, by the last copy that wrote them; raises _Split, or Miss."""
    for write in reversed(run.effects.writes[node]):
        if run.effects.order[write] > run.effects.order[run.attention]:
            raise Miss("what attention reads is written to after it", write, advice="write first, then attend")
        covered = region(operand(write), node)
        inside = covered.inside(coords)
        if inside.all():
            source = operand(write, 1)
            return source, covered.source(coords, sizes(source))
        if inside.any() or covered.meets(coords):
            for dim, (first, count) in covered.bounds.items():
                if not ((coords[:, dim] >= first) & (coords[:, dim] < first + count)).all():
                    raise _Split(_cuts(coords[:, dim], run, [first, first + count], write))
            raise Miss("keys or values are put together in a way that is not known", write, advice=WHOLE_RUNS)
    raise Miss("attention reads a fresh tensor that is not filled", node, advice="write all its channels before attention reads it")


def _slot(trail: Trail, run: _ChannelRun) -> tuple[Slot, int]:
    """Return (slot at the end of a trail, the first of its channels that the run reads); the slot has all channels of the cache.

    Raises Miss, or NoCache.
    """
    shape = list(sizes(run.node))
    column, first = run.channel - run.channel.min(), 0
    shape[run.channel_dim] = int(column.max()) + 1
    for dim, size in enumerate(sizes(trail.base)):
        shift = trail.there[:, dim] - column
        if column.any() and (shift == shift[0]).all():
            # The slot has all channels of the cache, of which the run is a part.
            column, first = trail.there[:, dim], int(shift[0])
            shape[run.channel_dim] = size
            break
    slot = _shared(replace(trail, here=run.with_channels(column)), tuple(shape), run)
    if not slot.kind.facts.written:
        raise slots.NoCache(trail.base)
    return slot, first


def _shared(trail: Trail, shape: tuple[int, ...], run: _ChannelRun) -> Slot:
    """Return the slot at the end of a trail, whose cache has either a head for each head of the operand or one head that all share.

    Raises Miss if neither fits.
    """

    def behind(names: dict[str, str]) -> Slot:
        read = Read(run.node, tuple(names.get(role, role) for role in run.roles), shape)
        return slots.at(trail, read, run.attention, run.effects)

    try:
        return behind({"K": "H"})
    except Miss:
        if "BK" not in run.roles:
            raise
        return behind({"BK": "BH"})


def _heads(run: _ChannelRun, slot: Slot) -> tuple[int, np.ndarray]:
    """Return (number of heads of the run's operand, head index of each sampled element); 1 and zeros if the operand has no heads."""
    for role in ("K", "H"):
        if role in run.roles:
            dim = run.roles.index(role)
            return sizes(run.node)[dim], run.here[:, dim]
    flat = next((role for role in ("BH", "BK") if role in run.roles), None)
    if flat is not None:
        dim = run.roles.index(flat)
        heads = sizes(run.node)[dim] // hint(slot.batch)
        return heads, run.here[:, dim] % heads
    return 1, np.zeros(len(run.here), dtype=np.int64)
