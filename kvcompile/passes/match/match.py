"""Match: find every attention over a KV cache in a captured graph; every near miss becomes a refusal with a reason and advice.

Writes, cache layouts, head grouping, attentions and masks have recognisers of their own, whose results are composed here into sites. A
cache that anything but its attentions reads makes no site.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.effects import Effects, analyse
from kvcompile.passes.graph.pullback import trace
from kvcompile.passes.graph.shapes import at_most, hint, module_path, size_along, source_line
from kvcompile.passes.match import memory as memories
from kvcompile.passes.match import soundness
from kvcompile.passes.match.agreement import ADVICE, DISAGREED, disagreed, in_every_world
from kvcompile.passes.match.attention import packed, sdpa, softmax
from kvcompile.passes.match.cache import slots
from kvcompile.passes.match.cache.advice import made_from
from kvcompile.passes.match.latent.assembly import assemble
from kvcompile.passes.match.mask import masks
from kvcompile.passes.match.mask.reach import reach
from kvcompile.passes.match.mask.zeroed import without_effect
from kvcompile.passes.match.pairs import check_assembly, check_pair, query_heads, with_tiles
from kvcompile.passes.match.readers import borrowed, filled_elsewhere, read_elsewhere
from kvcompile.passes.match.sites import Assembly, Attention, MaskTerm, Miss, Refusal, Site, Slot, Stage
from kvcompile.passes.match.unmatched import cache_behind, unrecognised

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
    """Return the refusal of a miss at ``node``, with the source line of the first node of (node, evidence) that has one.

    ``nearest``: the idiom that the node resembles; ``advice``: for a miss without any.
    """
    where = next((item for item in (node, *miss.evidence) if item.meta.get("stack_trace")), node)
    return Refusal(
        stage, miss.reason, source_line(where), module_path(where), nearest, miss.advice or advice,
        tuple(item.format_node() or item.name for item in miss.evidence),
    )


def _plain(attention: Attention, effects: Effects) -> tuple[Attention, tuple[Slot, Slot], tuple[int, int]]:
    """Return (attention, (key slot, value slot), (query heads, group size)) where keys and values are plain views of caches.

    A factor of the cached keys moves into the attention's scale. Raises Miss, or NoCache where an operand reads no cache.
    """
    if attention.beside is not None:
        raise Miss(
            "the scores are a sum of two products, and only one of them reads the cache", attention.beside.k,
            advice="cache the keys of both, or concatenate queries and keys and take one product",
        )
    joins = (None, None) if attention.memory is None else attention.memory.joins
    key, value = (
        slots.find(operand, roles, attention.output, effects, join)
        for operand, roles, join in zip((attention.k, attention.v), (attention.k_roles, attention.v_roles), joins, strict=True)
    )
    value = with_tiles(key, value, query_heads(attention, hint(key.batch)))
    found = check_pair(attention, key, value)
    if attention.memory is not None and key.factor != 1.0:
        raise Miss(
            "cached keys are multiplied by a number, but the learned keys next to them are not", key.root, advice="scale the queries",
        )
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
        heads, groups = check_assembly(attention, assembly)
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
            "the attention reads slots of a new cache that no token was written into", key.root,
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


def _over_weights(attention: Attention, captured: Captured) -> bool:
    """Return whether an attention's keys and values are both views of parameters (learned prompts, say) rather than of a cache."""
    learned = {entry.node for entry in captured.inputs if entry.learned}
    return bool(learned) and all(trace(item, lambda node: False, scales=True).base in learned for item in (attention.k, attention.v))


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
    refused = disagreed(captured.graph, first.sites, [other.sites for other in others])
    if not refused:
        return first
    roots = {slot.root for site in refused for slot in site.slots}
    while beside := [site for site in first.sites if site not in refused and not roots.isdisjoint(slot.root for slot in site.slots)]:
        refused += beside
        roots |= {slot.root for site in beside for slot in site.slots}
    outputs = [(site.attention.output, site.attention.idiom) for site in refused]
    refusals = [refuse(Miss(DISAGREED, output, advice=ADVICE), output, idiom) for output, idiom in outputs]
    return replace(first, sites=tuple(site for site in first.sites if site not in refused), refusals=(*first.refusals, *refusals))


def _matched(captured: Captured, parted: Mapping[fx.Node, memories.Parts], effects: Effects) -> Matched:
    """Return all sites and refusals of a captured graph, with symbolic sizes as they are in the current world.

    ``parted``: for attentions over learned memory, the operands over the cached tokens alone (``memory.part``).
    """
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
    refusals += [refuse(miss, product) for product, miss in unrecognised(captured, effects, spoken)]
    rejected = {**read_elsewhere(sites, effects), **borrowed(sites, captured), **filled_elsewhere(sites, captured)}
    refusals += [refuse(miss, site.attention.output, site.attention.idiom) for site, miss in rejected.items()]
    kept = tuple(site for site in sites if site not in rejected)
    return Matched(kept, tuple(refusals), uncached, effects)
