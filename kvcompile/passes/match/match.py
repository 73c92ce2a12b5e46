"""Match: find every attention over a KV cache in a captured graph; every near miss becomes a refusal with a reason and advice.

Writes, cache layouts, head grouping, attentions and masks have recognisers of their own, whose results are composed here into sites. A
cache that anything but its attentions reads makes no site.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from kvcompile.passes.capture import flex
from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.effects import Effects, analyse
from kvcompile.passes.graph.pullback import trace
from kvcompile.passes.graph.shapes import at_most, equal, hint, module_path, op_name, size_along, sizes, source_line
from kvcompile.passes.match import memory as memories
from kvcompile.passes.match import soundness
from kvcompile.passes.match.agreement import ADVICE, DISAGREED, facts, in_every_world
from kvcompile.passes.match.attention import packed, sdpa, softmax
from kvcompile.passes.match.cache import sliding, slots
from kvcompile.passes.match.cache.advice import made_from
from kvcompile.passes.match.cache.first_rows import rows_held, same_rows
from kvcompile.passes.match.latent.assembly import assemble
from kvcompile.passes.match.mask import masks
from kvcompile.passes.match.mask.reach import reach
from kvcompile.passes.match.mask.zeroed import without_effect
from kvcompile.passes.match.sites import Assembly, Attention, Axes, MaskTerm, Miss, Refusal, Site, SlidingCache, Slot, Stage
from kvcompile.passes.match.unmatched import cache_behind, cut_short, unrecognised

log = logging.getLogger(__name__)

ATTENTIONS: tuple[Callable[[fx.Node], Attention | None], ...] = (
    sdpa.recognise,
    softmax.recognise,
    packed.recognise,
)
"""Recognisers of attention, one for each spelling; a new spelling is a module and a line here."""


@dataclass(frozen=True)
class Matched:
    """The result of matching a graph: its sites, its refusals, and how many attentions read no cache (``uncached``)."""

    sites: tuple[Site, ...]
    refusals: tuple[Refusal, ...]
    uncached: int
    effects: Effects


def refuse(miss: Miss, node: fx.Node, nearest: str = "", stage: Stage = Stage.MATCH, advice: str = "") -> Refusal:
    """Return the refusal of a miss at ``node``, with the source line of the first node of (node, evidence) that has one."""
    where = next((item for item in (node, *miss.evidence) if item.meta.get("stack_trace")), node)
    return Refusal(
        stage, miss.reason, source_line(where), module_path(where), nearest, miss.advice or advice,
        tuple(item.format_node() or item.name for item in miss.evidence),
    )


def _heads(attention: Attention, batch: int) -> int:
    """Return the number of query heads, from the sizes and roles of the query operand."""
    shape = sizes(attention.q)
    count = attention.folded
    for role, size in zip(attention.q_roles, shape, strict=True):
        if role and not set(role) - set("BHKG"):
            count *= size // batch if "B" in role and len(role) > 1 else size if role != "B" else 1
    return count


def _with_tiles(key: Slot, value: Slot, heads: int) -> Slot:
    """Return the value slot, with ``tiles`` set if it has fewer heads than the keys: key head k goes with value head k % value.heads."""
    tiles, rest = divmod(key.heads, value.heads)
    plain = key.tiles == 1 and not key.tiled and not rest and tiles > 1
    # Without groups the tiled values are tiles alone; a single head is the same in every order.
    if plain and (value.tiles == tiles or (value.tiled and heads == key.heads) or (value.heads == 1 and value.tiles == 1)):
        return replace(value, tiled=False, tiles=tiles)
    return value


def _check_tiles(attention: Attention, key: Slot, value: Slot) -> None:
    """Raise Miss where heads are tiled in different orders, or tiled over learned tokens, a sliding window or a paged cache."""
    if key.tiles == value.tiles == 1:
        return
    if key.tiles > 1 or key.heads != value.heads * value.tiles:
        raise Miss(
            "the heads of keys and values are repeated in different orders", key.root, value.root,
            advice="repeat both with repeat_interleave, or both with repeat",
        )
    if attention.memory is not None or key.sliding is not None or key.block_table is not None:
        raise Miss(
            "values of fewer heads than the keys are read beside learned tokens, from a sliding window or from a pool", value.root,
            advice="cache as many heads of values as of keys",
        )


def _check_pair(attention: Attention, key: Slot, value: Slot) -> tuple[int, int]:
    """Return (query heads, query heads per kv head) of a site; raise Miss where its key and value slots do not agree."""
    if key.kind.facts.written != value.kind.facts.written:
        unwritten = value if key.kind.facts.written else key
        what = "keys" if unwritten is key else "values"
        raise Miss(
            f"the cache of the {what} is read but not written in this graph, the other one is", unwritten.root,
            advice="write keys and values in the same compiled call",
        )
    if key.kind is not value.kind:
        raise Miss("keys and values are cached in different ways", key.root, value.root, advice="write both in the same way")
    _check_tiles(attention, key, value)
    if key.heads != value.heads * value.tiles or not equal(key.batch, value.batch):
        raise Miss(
            "the key and the value cache have different heads or batch sizes", key.root, value.root, advice="give both the same heads",
        )
    if not same_rows(key, value):
        raise Miss(
            "the key and the value cache are written in different rows", key.root, value.root, advice="write the same rows of both",
        )
    if key.root is value.root and _overlap(key.axes, value.axes):
        raise Miss("keys and values are the same cache entries", key.root, advice="cache keys and values apart")
    heads = _heads(attention, hint(key.batch))
    if heads % key.heads:
        raise Miss(f"{heads} query heads over {key.heads} kv heads", attention.output, advice="use a multiple of the kv heads")
    if key.tiled != value.tiled:
        raise Miss(
            "the heads of keys and values are repeated in different orders", key.root, value.root,
            advice="repeat both with repeat_interleave, or both with repeat",
        )
    if not equal(key.capacity, value.capacity) or not _alike(key.sliding, value.sliding):
        raise Miss(
            "the key and the value cache hold different numbers of tokens", key.root, value.root, advice="give both the same capacity",
        )
    return heads, heads // key.heads


def _overlap(key: Axes, value: Axes) -> bool:
    """Return whether two parts of one cache tensor have entries in common."""
    places = [(dict(axes.select), dict(axes.counts)) for axes in (key, value)]
    (one, some), (other, more) = places
    apart = [
        one[dim] + some.get(dim, 1) <= other[dim] or other[dim] + more.get(dim, 1) <= one[dim] for dim in one if dim in other
    ]
    return not any(apart)


def _alike(key: SlidingCache | None, value: SlidingCache | None) -> bool:
    """Return whether the key and the value cache slide in the same way; None is a cache that does not slide."""
    if key is None or value is None:
        return key is value
    return key.slots == value.slots and all(
        equal(0 if a is None else a, 0 if b is None else b)
        for a, b in ((key.past, value.past), (key.keep, value.keep), (key.end, value.end))
    )


def _check_assembly(attention: Attention, assembly: Assembly) -> tuple[int, int]:
    """Return (query heads, query heads per kv head in the operands) of an attention over a latent's ``Assembly``.

    Raises Miss where its slots differ in kind, batch size or length, or the query heads are no multiple of the kv heads.
    """
    found = [slot for slot in assembly.slots if slot is not None]
    for fact, of in (
        ("cached in different ways", lambda slot: slot.kind), ("caches of different batch sizes", lambda slot: hint(slot.batch)),
        ("caches of different lengths", lambda slot: hint(slot.capacity)),
    ):
        if len({of(slot) for slot in found}) > 1:
            raise Miss(
                f"the parts that keys and values are made from are {fact}", *[slot.root for slot in found],
                advice="cache all parts alike, or in one tensor",
            )
    heads = _heads(attention, hint(found[0].batch))
    if heads % assembly.heads:
        raise Miss(f"{heads} query heads over {assembly.heads} kv heads", attention.output, advice="use a multiple of the kv heads")
    named = dict(zip(attention.q_roles, sizes(attention.q), strict=True))
    kept = dict(zip(attention.k_roles, sizes(attention.k), strict=True))
    if attention.folded > 1:
        return heads, attention.folded
    return heads, named["G"] if "G" in named else heads // kept["K"] if "K" in kept else 1


def _plain(attention: Attention, effects: Effects) -> tuple[Attention, tuple[Slot, Slot], tuple[int, int]]:
    """Return (attention, (key slot, value slot), (query heads, group size)) where keys and values are plain views of caches.

    A factor of the cached keys moves into the attention's scale. Raises Miss, or NoCache where an operand reads no cache.
    """
    if attention.beside is not None:
        raise Miss(
            "the scores are a sum of two products, of which not both are with what is cached", attention.beside.k,
            advice="cache the keys of both, or concatenate queries and keys and take one product",
        )
    joins = (None, None) if attention.memory is None else attention.memory.joins
    key, value = (
        slots.find(operand, roles, attention.output, effects, join)
        for operand, roles, join in zip((attention.k, attention.v), (attention.k_roles, attention.v_roles), joins, strict=True)
    )
    value = _with_tiles(key, value, _heads(attention, hint(key.batch)))
    found = _check_pair(attention, key, value)
    if attention.memory is not None and key.factor != 1.0:
        raise Miss("cached keys are multiplied by a number beside learned ones", key.root, advice="scale the queries")
    if value.factor != 1.0:
        raise Miss(
            "the cached values are multiplied by a number after they are read", value.root,
            advice="multiply the attention's result, or the values before they are written",
        )
    return replace(_tiled(attention) if key.tiled else attention, scale=attention.scale * key.factor), (key, value), found


def _compose(attention: Attention, parts: memories.Parts | None, effects: Effects, index: int) -> Site:
    """Return the site of one reading of an attention; raises Miss, or NoCache where it reads no cache."""
    soundness.private(attention, effects)
    attention = memories.apart(attention, parts, effects)
    soundness.unchanged_operands(attention, effects)
    attention = without_effect(attention, effects)
    soundness.early_readers(attention, effects)
    more: Slot | None = None
    assembly: Assembly | None = None
    try:
        attention, (key, value), (heads, groups) = _plain(attention, effects)
    except (Miss, slots.NoCache) as plain:
        if attention.memory is not None:
            raise
        assembly = assemble(attention, effects, plain)
        key, value, more = assembly.slots
        heads, groups = _check_assembly(attention, assembly)
        attention = replace(attention, idiom=f"{attention.idiom} over a latent")
    for slot in (key, value, *([more] if more is not None else [])):
        soundness.unchanged_write(slot.write, attention.output, effects)
    bounds = masks.normalise(attention, effects)
    tokens = size_along(attention.q, attention.q_roles, "S", attention.folded)
    soundness.one_sink_a_head(attention)
    node = attention.output
    site = Site(
        index, attention, key, value, bounds, module_path(node), source_line(node), heads, groups, tokens, attention.k, more, assembly,
    )
    if key.kind.facts.created and key.kind.facts.fixed and key.sliding is None and not at_most(reach(site), key.write.count):
        raise Miss(
            "the attention reads places of a new cache that no token was written into", key.root,
            advice="mask what is not written yet, as every call after the first needs as well",
        )
    return site


def _best(attention: Attention, parts: memories.Parts | None, effects: Effects, index: int) -> Site:
    """Return the site of the reading of an attention that fits best; raises the first reading's Miss where none fits.

    Best: as many query tokens as written tokens, then the fewest mask tensors carried along, then the first.
    """
    found: list[tuple[bool, int, int, Site]] = []
    missed: list[Miss] = []
    for place, reading in enumerate((attention, *attention.others)):
        try:
            site = _compose(reading, parts, effects, index)
        except Miss as miss:
            missed.append(miss)
            continue
        found.append((hint(site.tokens) != hint(site.key.write.count), len(site.bounds.carried), place, site))
        if found[-1][:2] == (False, 0):
            break
    if not found:
        raise missed[0]
    return min(found, key=lambda item: item[:3])[3]


def _tiled(attention: Attention) -> Attention:
    """Return the attention with head dims read as groups, then kv heads: query head h = g * K + k."""
    swap = {"H": "GK", "BH": "BGK"}

    def turned(roles: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(swap.get(role, role) for role in roles)

    def masked(terms: tuple[MaskTerm, ...]) -> tuple[MaskTerm, ...]:
        return tuple(replace(term, roles=turned(term.roles)) for term in terms)

    memory = attention.memory
    return replace(
        attention, q_roles=turned(attention.q_roles), out_roles=turned(attention.out_roles), sink_roles=turned(attention.sink_roles),
        masks=masked(attention.masks), log_sum_roles=turned(attention.log_sum_roles),
        memory=None if memory is None else replace(memory, masks=masked(memory.masks)),
    )


def _sole_readers(sites: list[Site], effects: Effects) -> dict[Site, Miss]:
    """Return the sites whose cache has other readers, is read in two ways or only in part, or is returned in part, each with its Miss."""
    by_root: dict[fx.Node, list[Site]] = defaultdict(list)
    for site in sites:
        for slot in site.slots:
            if site not in by_root[slot.root]:
                by_root[slot.root].append(site)
    refused: dict[Site, Miss] = {}
    for root, users in by_root.items():
        if len({slot.block_table is None for site in users for slot in site.slots if slot.root is root}) > 1:
            miss = Miss("one attention gathers from the cache, another one reads it as it lies", root, advice="read it in one way")
            refused.update(dict.fromkeys(users, miss))
        allowed = {node for site in users for node in site.attention.nodes}
        slots_here = [slot for site in users for slot in site.slots if slot.root is root]
        allowed |= {node for slot in slots_here for node in (slot.write.node, *slot.write.via)}
        allowed.add(effects.output)
        # Keys that are scaled or projected after the read carry cached values: their readers count too.
        family = effects.family(root)
        copies = {node for slot in slots_here for node in slot.path}
        copies |= {node for site in users if site.assembly is not None for node in site.assembly.between}
        copies -= family
        allowed |= copies
        if returned := [node for node in copies if effects.output in node.users]:
            miss = Miss(
                "keys or values that are made from the cache are returned to the caller", *returned,
                advice="return the cache itself, or nothing",
            )
            gathered = any(slot.block_table is not None for slot in slots_here)
            refused.update({site: miss for site in users if site.assembly is not None or gathered})
        if any(slot.sliding is not None for slot in slots_here):
            readers = set(sliding.strangers(slots_here, allowed))
        else:
            readers = effects.readers(root) | {user for node in copies for user in node.users}
        for reader in readers - allowed:
            for site in users:
                refused[site] = Miss(
                    f"the cache is also read by {op_name(reader) or reader.op}, which would need it decoded", reader,
                    advice="read the cache in attention only, or leave this layer out: give its path None in a per-layer policy",
                )
        for site in users:
            refused.update(_extra(site, root, users, effects))
        lost = _left_over(root, slots_here) or _other_rows(root, slots_here)
        if lost is None and len({slot.write.late for slot in slots_here}) > 1:
            lost = Miss(
                "one attention reads the cache before its new tokens are written and another one after", root,
                advice="write the new tokens first, then attend",
            )
        if lost is not None:
            refused.update(dict.fromkeys(users, lost))
    return refused


def _left_over(root: fx.Node, read: list[Slot]) -> Miss | None:
    """Return the Miss of a cache tensor some of whose entries no attention reads (a store would lose them); None if all are read."""
    parts = {slot.axes.select: slot for slot in read if slot.axes.select and slot.sliding is None}
    tokens = {
        at: rows_held(slot) * hint(slot.capacity) if slot.block_table is None else slot.axes.room(sizes(root))
        for at, slot in parts.items()
    }
    held = sum(tokens[at] * slot.heads * slot.head_dim for at, slot in parts.items())
    if not parts or held == math.prod(sizes(root)):
        return None
    return Miss(
        f"{held} of the cache tensor's {math.prod(sizes(root))} entries are read by attention in this graph", root,
        advice="keep keys and values, and each graph's layers, in tensors of their own",
    )


def _other_rows(root: fx.Node, read: list[Slot]) -> Miss | None:
    """Return the Miss of a cache tensor whose attentions in one call read different batch rows; None if the rows agree."""
    if all(same_rows(read[0], slot) for slot in read[1:]):
        return None
    return Miss("attentions of one call read different rows of one cache", root, advice="read the same rows of it everywhere")


def _extra(site: Site, root: fx.Node, users: list[Site], effects: Effects) -> dict[Site, Miss]:
    """Return a site's Miss where a view of the cache is returned, the past has another reader, or different masks share one write."""
    slot = next(slot for slot in site.slots if slot.root is root)
    returned = effects.outputs_of(effects.family(root) if slot.sliding is None else slot.sliding.chain)
    if set(returned) - set(slot.outputs):
        return {site: Miss("a view of the cache is returned to the caller", root, advice="return the cache itself or nothing")}
    if slot.placeholder is not None and slot.placeholder is not root and slot.sliding is None:
        others = effects.readers(slot.placeholder) - {root}
        if slot.write.late:
            others -= {node for other in users for node in other.attention.nodes}
        if others:
            reader = next(iter(others))
            return {site: Miss(f"the past is also read by {op_name(reader) or reader.op}", reader)}
    one_write = len(users) > 1 and len({s.key.write.node for s in users}) == 1
    if one_write and slot.block_table is None and any(s.bounds.hi.kind is not site.bounds.hi.kind for s in users):
        return {site: Miss("several attentions with different masks share one cache", root)}
    return {}


def _filled_elsewhere(sites: list[Site], captured: Captured) -> dict[Site, Miss]:
    """Return the sites that only read a cache which no compiled call has filled (other code may write to it again), each with its Miss."""
    filled = {entry.node for entry in captured.inputs if entry.compressed or entry.returned}
    return {
        site: Miss(
            "the cache is read but not written in this graph, and no compiled call has filled it (an uncompiled call has, or the write "
            "stands behind a graph break)", slot.root,
            advice="compile the call that fills the cache as well, and keep the write and the attention in one graph",
        )
        for site in sites for slot in site.slots if not slot.kind.facts.written and slot.root not in filled
    }


def _over_weights(attention: Attention, captured: Captured) -> bool:
    """Return whether an attention's keys and values are both views of parameters (learned prompts, say) rather than of a cache."""
    learned = {entry.node for entry in captured.inputs if entry.learned}
    return bool(learned) and all(trace(item, lambda node: False, scales=True).base in learned for item in (attention.k, attention.v))


def _borrowed(sites: list[Site], captured: Captured) -> dict[Site, Miss]:
    """Return the sites that write a cache in place in memory that no tensor owns alone (it cannot be freed), each with its Miss."""
    borrowed = {entry.node for entry in captured.inputs if not entry.owned}
    return {
        site: Miss(
            "no tensor owns the cache's memory alone (it is a view, a parameter or a subclass, or something else holds a view of it)",
            slot.root, advice="keep the cache in a plain tensor or a registered buffer of its own, and no view of it from call to call",
        )
        for site in sites for slot in site.slots if slot.kind.facts.in_place and slot.placeholder in borrowed
    }


def _unrecognised(product: fx.Node) -> Miss:
    if op_name(product) == flex.NAME:
        return Miss(
            "the cache is read by flex_attention, whose score or mask function could not be run over whole index grids", product,
            advice="write score_mod and mask_mod in operations that broadcast, or use scaled_dot_product_attention",
        )
    if cut_short(product):
        return Miss(
            f"the cache is read by {op_name(product)}, whose result leaves this graph before it meets a softmax and the values: a graph "
            "break stands in the middle of the attention", product,
            advice="keep the attention in one graph (TORCH_LOGS=graph_breaks shows what breaks it)",
        )
    return Miss(
        f"the cache is read by {op_name(product)}, and no softmax or scaled_dot_product_attention was found around it", product,
        advice="spell the attention with torch.softmax or scaled_dot_product_attention",
    )


def failed(error: Exception) -> Miss:
    """Return the Miss of an attention at which a recogniser raised ``error``."""
    first = next(iter(str(error).splitlines()), "")
    return Miss(
        f"it could not be analysed: {type(error).__name__}: {first}",
        advice="please report this model with the output of TORCH_LOGS=+kvcompile",
    )


def match(captured: Captured) -> Matched:
    """Return all sites and refusals of a captured graph; a site must be the same in every world of the graph's sizes (``graph.worlds``)."""
    parted = memories.part(captured, ATTENTIONS)
    effects = analyse(captured.graph)
    first, *others = in_every_world(captured.graph, lambda: _matched(captured, parted, effects))
    facts_of_others = [{site.attention.output: facts(site) for site in other.sites} for other in others]
    disagreed = [site for site in first.sites if any(there.get(site.attention.output) != facts(site) for there in facts_of_others)]
    if not disagreed:
        return first
    roots = {slot.root for site in disagreed for slot in site.slots}
    while beside := [site for site in first.sites if site not in disagreed and not roots.isdisjoint(slot.root for slot in site.slots)]:
        disagreed += beside
        roots |= {slot.root for site in beside for slot in site.slots}
    outputs = [(site.attention.output, site.attention.idiom) for site in disagreed]
    refusals = [refuse(Miss(DISAGREED, output, advice=ADVICE), output, idiom) for output, idiom in outputs]
    return replace(first, sites=tuple(site for site in first.sites if site not in disagreed), refusals=(*first.refusals, *refusals))


def _matched(captured: Captured, parted: Mapping[fx.Node, memories.Parts], effects: Effects) -> Matched:
    """Return all sites and refusals of a captured graph, with symbolic sizes as they are in the current world."""
    sites: list[Site] = []
    missed: list[tuple[fx.Node, Refusal]] = []
    uncached = 0
    spoken: set[fx.Node] = set()
    for node in captured.graph.nodes:
        for recognise in ATTENTIONS:
            attention = None
            try:
                attention = recognise(node)
                if attention is not None:
                    spoken.update(attention.nodes)
                    if _over_weights(attention, captured):
                        uncached += 1
                        continue
                    sites.append(_best(attention, parted.get(attention.output), effects, len(sites)))
            except slots.NoCache as none:
                behind = cache_behind(attention.k, effects) or cache_behind(attention.v, effects)  # type: ignore[union-attr]
                if behind is None:
                    uncached += 1
                else:
                    missed.append((node, refuse(made_from(behind, none.base), node, attention.idiom)))  # type: ignore[union-attr]
            except Miss as miss:
                if attention is not None or cache_behind(node, effects) is not None:
                    spoken.add(node)
                    nearest = attention.idiom if attention else recognise.__module__.rpartition(".")[2]
                    missed.append((node, refuse(miss, node, nearest)))
                else:
                    uncached += 1
            except Exception as error:
                # An unforeseen graph: this attention is not rewritten, and the program still runs.
                log.debug("a recogniser failed at %s", node.format_node(), exc_info=True)
                spoken.add(node)
                missed.append((node, refuse(failed(error), node, recognise.__module__.rpartition(".")[2])))
    # A softmax inside another one (masked weights, divided by their sum again) belongs to the outer attention.
    inside = {node for site in sites for node in site.attention.nodes}
    refusals = [refusal for node, refusal in missed if node not in inside]
    spoken |= {node for site in sites if site.assembly is not None for node in site.assembly.between}
    refusals += [refuse(_unrecognised(product), product) for product in unrecognised(captured, effects, spoken)]
    rejected = {**_sole_readers(sites, effects), **_borrowed(sites, captured), **_filled_elsewhere(sites, captured)}
    refusals += [refuse(miss, site.attention.output, site.attention.idiom) for site, miss in rejected.items()]
    kept = tuple(site for site in sites if site not in rejected)
    return Matched(kept, tuple(refusals), uncached, effects)
