"""Attentions without a cache, as in a forward pass for training, with the new keys and values that a cache would hold.

The recognisers of cached attention find them, and coordinates show the tensor that keys and values are views of, with its layout and the kv
heads before they are repeated. A cache would hold that tensor: keys after RoPE, values after their projection. An attention that sees later
tokens (an encoder's), or another sequence (cross-attention), has no such cache and is left out.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import fx

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.effects import Effects, analyse
from kvcompile.passes.graph.shapes import hint, module_path, size_along, source_line, value_of
from kvcompile.passes.match import soundness
from kvcompile.passes.match.agreement import ADVICE, DISAGREED, disagreed, in_every_world
from kvcompile.passes.match.cache.uncached_tokens import without_cache
from kvcompile.passes.match.mask import masks
from kvcompile.passes.match.mask.zeroed import without_effect
from kvcompile.passes.match.match import ATTENTIONS, failed, refuse
from kvcompile.passes.match.sites import Attention, LimitKind, Miss, Refusal, Slot, Stage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UncachedSite:
    """One causal attention over the tokens of its own call; the roots of its slots are the tensors that a cache would hold."""

    attention: Attention
    key: Slot
    value: Slot
    path: str
    line: str


@dataclass(frozen=True)
class Uncached:
    """The attentions without a cache of a graph, and the refusals of all others."""

    sites: tuple[UncachedSite, ...]
    refusals: tuple[Refusal, ...]
    effects: Effects


def _site(attention: Attention, effects: Effects) -> UncachedSite:
    """Return the site of one reading of an attention; raises Miss if it is not causal or reads other tokens than its own."""
    soundness.private(attention, effects)
    soundness.unchanged_operands(attention, effects)
    attention = without_effect(attention, effects)
    if attention.beside is not None:
        raise Miss("the scores are a sum of two products", attention.beside.k, advice="concatenate queries and keys and take one product")
    if attention.k is attention.v:
        raise Miss("keys and values are one tensor", attention.k)
    key, value = (without_cache(node, roles, effects) for node, roles in (
        (attention.k, attention.k_roles), (attention.v, attention.v_roles),
    ))
    if (key.root, key.axes.select) == (value.root, value.axes.select):
        raise Miss("keys and values are the same entries of one tensor", key.root, advice="compute keys and values apart")
    if key.heads != value.heads or key.tiled != value.tiled:
        raise Miss("keys and values have different heads", key.root, value.root, advice="give both the same heads")
    queries = hint(size_along(attention.q, attention.q_roles, "S", attention.folded))
    if queries != hint(key.write.count):
        count = hint(key.write.count)
        raise Miss(f"{queries} queries attend to {count} tokens, so this is no causal attention over its own tokens", attention.output)
    bounds = masks.normalise(attention, effects)
    if bounds.hi.kind in {LimitKind.ALL, LimitKind.CONST} and not bounds.carried and queries > 1:
        raise Miss("its mask lets tokens attend to later ones, as in an encoder", attention.output)
    return UncachedSite(attention, key, value, module_path(attention.output), source_line(attention.output))


def _first_reading(attention: Attention, effects: Effects) -> UncachedSite:
    """Return the site of the first reading of an attention's roles that fits; raises the first reading's Miss where none does."""
    missed: list[Miss] = []
    for reading in (attention, *attention.others):
        try:
            return _site(reading, effects)
        except Miss as miss:
            missed.append(miss)
    raise missed[0]


def find(captured: Captured) -> Uncached:
    """Return the attentions without a cache of a captured graph; an attention that differs between worlds of its sizes is refused."""
    effects = analyse(captured.graph)
    first, *others = in_every_world(captured.graph, lambda: _found(captured, effects))
    refused = disagreed(captured.graph, first.sites, [other.sites for other in others])
    refusals = [refuse(Miss(DISAGREED, site.attention.output, advice=ADVICE), site.attention.output) for site in refused]
    return Uncached(tuple(site for site in first.sites if site not in refused), (*first.refusals, *refusals), effects)


def _found(captured: Captured, effects: Effects) -> Uncached:
    """Return the attentions without a cache, with symbolic sizes as they are in the current world."""
    sites: list[UncachedSite] = []
    missed: list[tuple[fx.Node, Refusal]] = []
    for node in captured.graph.nodes:
        for recognise in ATTENTIONS:
            attention = None
            try:
                attention = recognise(node)
                if attention is not None:
                    sites.append(_first_reading(attention, effects))
            except Miss as miss:
                # A softmax that is no attention (over a router's classes) is refused here too.
                missed.append((node, refuse(miss, node, attention.idiom if attention else "", Stage.MATCH)))
            except Exception as error:
                # An unforeseen graph: only this attention is left out.
                log.debug("a recogniser failed at %s", node.format_node(), exc_info=True)
                missed.append((node, refuse(failed(error), node, attention.idiom if attention else "", Stage.MATCH)))
    inside = {node for site in sites for node in site.attention.nodes}
    return Uncached(tuple(sites), tuple(refusal for node, refusal in missed if node not in inside), effects)


def operand_heads(site: UncachedSite) -> int:
    """Return how many times the key operand repeats each kv head; 1 if its dims have no heads."""
    attention, slot = site.attention, site.key
    shape = dict(zip(attention.k_roles, value_of(attention.k).shape, strict=True))
    if "G" in shape:
        return int(shape["G"])
    if "H" in shape:
        return int(shape["H"]) // slot.heads
    return int(shape["BH"] // (slot.batch * slot.heads)) if "BH" in shape else 1
