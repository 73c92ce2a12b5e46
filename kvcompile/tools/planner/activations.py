"""Activations: the most bytes of intermediate values that a captured graph holds at once, by liveness over its nodes.

Every value has a buffer of its own from the node that computes it to its last reader; views share their base's; nothing is fused. A
compiler that fuses holds less, so this is an upper estimate of live bytes, without an allocator's rounding and workspaces of kernels.
Attention counts as rewritten: it reads queries and the new keys and values, so a mask in memory, repeated heads and a dense cache are left
out. Weights and other arguments are not counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from kvcompile.passes.graph.effects import same_memory, view_parent
from kvcompile.passes.graph.shapes import estimate, is_tensor, value_of
from kvcompile.passes.match.sites import Site
from kvcompile.tools.planner.observer import Seen


@dataclass(frozen=True)
class Activations:
    """The most bytes of intermediate values live at one time in a prompt, per row.

    For each moment that may need the most: (bytes per token, bytes per pair). A pair is one of two tokens of the prompt: attentions that
    are not rewritten have scores and masks with an entry for each pair. Which moment needs the most depends on the length.
    """

    moments: tuple[tuple[float, float], ...] = ()

    def nbytes(self, tokens: int, rows: int = 1) -> int:
        """Return the most bytes of intermediate values that are live at once in a call on ``rows`` prompts of ``tokens`` tokens each."""
        return math.ceil(rows * max((tokens * (each + tokens * pair) for each, pair in self.moments), default=0.0))

    def __or__(self, other: Activations) -> Activations:
        """Return activations whose bytes are, at every length, the larger of both."""
        return Activations(_largest([*self.moments, *other.moments]))


def _largest(moments: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return the moments that need the most bytes at some length: those not exceeded by another moment in both numbers."""
    kept: list[tuple[float, float]] = []
    for each, pair in sorted(set(moments), reverse=True):
        if not kept or pair > kept[-1][1]:
            kept.append((each, pair))
    return tuple(kept)


def _nbytes(node: fx.Node) -> int:
    value = value_of(node)
    return math.prod(estimate(size) for size in value.shape) * value.dtype.itemsize


def _reads(node: fx.Node, sites: dict[fx.Node, Site]) -> Iterable[fx.Node]:
    """Return the values that a node reads; for a rewritten attention, its queries and the new tokens of its cache."""
    site = sites.get(node)
    if site is None:
        return node.all_input_nodes
    attention = site.attention
    beside = [] if attention.beside is None else [attention.beside.q]
    return [attention.q, *beside, *(slot.write.values for slot in site.slots if slot.kind.facts.written)]


def _needed(outputs: Iterable[fx.Node], sites: dict[fx.Node, Site]) -> set[fx.Node]:
    """Return the nodes that ``outputs`` need after attentions are rewritten."""
    found: set[fx.Node] = set()
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += _reads(node, sites)
    return found


def _owner(node: fx.Node) -> fx.Node:
    """Return the node that owns a value's buffer: the base of its views."""
    parent = view_parent(node)
    while parent is not None and is_tensor(parent) and same_memory(node, parent):
        node, parent = parent, view_parent(parent)
    return node


def activations(seen: Seen) -> Activations:
    """Return the most bytes of intermediate values that are live at once in one traced graph, per token and per pair of tokens.

    From the values that are live after each node; attentions are counted as rewritten, and an entry is kept for each moment that may be the
    largest at some length.
    """
    graph = seen.captured.graph
    tokens = max(estimate(site.tokens) for site in seen.matched.sites)
    rows = max(estimate(site.key.batch) for site in seen.matched.sites)
    sites = {site.attention.output: site for site in seen.matched.sites}
    caches = {index for site in seen.matched.sites for slot in site.slots for index in slot.outputs}
    results = graph.output_node().args[0]
    listed = results if isinstance(results, (list, tuple)) else (results,)
    outputs = [item for index, item in enumerate(listed) if isinstance(item, fx.Node) and index not in caches]
    order = [node for node in graph.nodes if node.op == "call_function"]
    needed = _needed(outputs, sites)
    last: dict[fx.Node, int] = {}
    for index, node in enumerate(order):
        for read in _reads(node, sites) if node in needed else ():
            if is_tensor(read):
                last[_owner(read)] = index
    last |= {_owner(node): len(order) for node in outputs if is_tensor(node)}
    dying: dict[int, list[fx.Node]] = defaultdict(list)
    for owner, index in last.items():
        dying[index].append(owner)
    born: set[fx.Node] = set()
    live = [0, 0]
    moments: set[tuple[float, float]] = set()
    for index, node in enumerate(order):
        if node in needed and is_tensor(node) and node in last and _owner(node) is node:
            born.add(node)
            live[_pairs(node, tokens)] += _nbytes(node)
            moments.add((live[0] / (tokens * rows), live[1] / (tokens * tokens * rows)))
        for owner in dying[index]:
            if owner in born:
                live[_pairs(owner, tokens)] -= _nbytes(owner)
    return Activations(_largest(moments))


def _pairs(node: fx.Node, tokens: int) -> bool:
    """Return whether a value has an entry for every pair of a prompt's tokens."""
    return tokens > 1 and [estimate(size) for size in value_of(node).shape].count(tokens) > 1
