"""Memory: learned tokens that attention reads before the cached ones, such as persistent memory (``num_mem_kv`` in x-transformers).

::

    k, v = cat([mem_k.expand(b, ...), cached_k], 2), cat([mem_v.expand(b, ...), cached_v], 2)
    out  = attention(q, k, v, pad(mask, (m, 0), value=True))

No cache holds them, so the rewritten graph attends to them in full precision and merges both results by their log-sums. The operands of the
cached tokens alone, ``k[..., m:, :]`` and ``mask[..., m:]``, are added to the captured graph as nodes that no other node reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import fx

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.operators import CONCATENATIONS
from kvcompile.passes.graph.pullback import trace
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, sizes, value_of
from kvcompile.passes.match.agreement import in_every_world
from kvcompile.passes.match.cache.readings import Read
from kvcompile.passes.match.cache.slots import axes_of
from kvcompile.passes.match.sites import Attention, MaskTerm, MemoryTokens, Miss

log = logging.getLogger(__name__)

END = torch.iinfo(torch.int64).max
KNOWN = "kvcompile_memory"
"""Key of a captured module's ``meta`` under which its graph and the parts found in it are kept."""
Recogniser = Callable[[fx.Node], Attention | None]


@dataclass(frozen=True)
class Parts:
    """The operands of an attention over memory, separated: the memory, keys and values of the cached tokens, and each mask's two parts.

    ``masks``: mask -> (its part over the memory, its part over the cached tokens).
    """

    memory: MemoryTokens
    k: fx.Node
    v: fx.Node
    masks: Mapping[fx.Node, tuple[fx.Node, fx.Node]]


def part(captured: Captured, recognisers: Sequence[Recogniser]) -> Mapping[fx.Node, Parts]:
    """Return the operands of every attention over learned memory tokens joined with a cache, sliced, by the attention's output node.

    The first call adds the slices to the captured graph; later calls return the same parts. Empty if the graph has no such attention.
    """
    graph = captured.graph
    learned = {entry.node for entry in captured.inputs if entry.learned}
    joins = {node for node in graph.nodes if op_name(node) in CONCATENATIONS and _begins_learned(node, learned)} if learned else set()
    if not joins:
        return {}
    known = captured.module.meta.get(KNOWN)
    if known is not None and known[0] is graph:
        return cast(Mapping[fx.Node, Parts], known[1])
    found = in_every_world(graph, lambda: _attentions(graph, recognisers, joins))[0]
    with captured.fake_mode:
        made = {attention.output: _cut(graph, attention, *both) for attention, both in found}
    captured.module.meta[KNOWN] = graph, made
    captured.module.recompile()
    return made


def _begins_learned(join: fx.Node, learned: set[fx.Node]) -> bool:
    """Return whether a node concatenates two tensors, the first computed from parameters alone."""
    parts = bind(join)["tensors"]
    if len(parts) != 2 or not all(is_tensor(item) for item in parts):
        return False
    seen, stack, weights = set[fx.Node](), [parts[0]], False
    while stack:
        node = stack.pop()
        if node in seen or not is_tensor(node):
            continue
        seen.add(node)
        if node.op == "placeholder" and node not in learned:
            return False
        weights = weights or node in learned
        stack += node.all_input_nodes
    return weights


def _attentions(
    graph: fx.Graph, recognisers: Sequence[Recogniser], joins: set[fx.Node]
) -> list[tuple[Attention, tuple[tuple[fx.Node, int], tuple[fx.Node, int]]]]:
    """Return the attentions with keys and values both from ``joins``, with (join, tokens of memory) of the keys and of the values."""
    found = []
    for node in graph.nodes:
        for recognise in recognisers:
            try:
                attention = recognise(node)
            except Exception:
                # ``match`` runs the recogniser again and refuses this attention.
                log.debug("an attention is not parted at %s", node.format_node(), exc_info=True)
                continue
            if attention is None or attention.causal or attention.zeroed or "T" not in attention.k_roles or "T" not in attention.v_roles:
                continue
            key, value = (
                _ahead(operand, roles, joins) for operand, roles in ((attention.k, attention.k_roles), (attention.v, attention.v_roles))
            )
            if key is not None and value is not None and key[1] == value[1]:
                found.append((attention, (key, value)))
    return found


def _ahead(operand: fx.Node, roles: tuple[str, ...], joins: set[fx.Node]) -> tuple[fx.Node, int] | None:
    """Return (join, number of learned tokens) if an operand is a view of one of ``joins`` that keeps the tokens' dim, else None.

    None also where the number of memory tokens is symbolic.
    """
    trail = trace(operand, lambda node: node in joins)
    if trail.base not in joins:
        return None
    dim = int(bind(trail.base)["dim"]) % len(sizes(trail.base))
    if not (trail.there[:, dim] == trail.here[:, roles.index("T")]).all():
        return None
    count = value_of(bind(trail.base)["tensors"][0]).shape[dim]
    return (trail.base, count) if isinstance(count, int) else None


def _cut(graph: fx.Graph, attention: Attention, key: tuple[fx.Node, int], value: tuple[fx.Node, int]) -> Parts:
    """Add slices over the cached tokens (of keys, values, masks) and over the memory (of masks) to the graph; return the Parts."""
    count = key[1]

    def piece(node: fx.Node, dim: int, start: int, end: int) -> fx.Node:
        with graph.inserting_after(node):
            made = graph.call_function(torch.ops.aten.slice.Tensor, (node, dim, start, end))
        made.meta = {name: item for name, item in node.meta.items() if name not in {"val", "tensor_meta"}}
        made.meta["val"] = torch.ops.aten.slice.Tensor(value_of(node), dim, start, end)
        return made

    k, v = (
        piece(node, roles.index("T"), count, END)
        for node, roles in ((attention.k, attention.k_roles), (attention.v, attention.v_roles))
    )
    masks: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for term in attention.masks:
        if "T" in term.roles and term.node not in masks:
            dim = term.roles.index("T")
            masks[term.node] = piece(term.node, dim, 0, count), piece(term.node, dim, count, END)
    first = [bind(join)["tensors"][0] for join, _ in (key, value)]
    return Parts(MemoryTokens(first[0], first[1], count, (key[0], value[0])), k, v, masks)


def apart(attention: Attention, parts: Parts | None, effects: Effects) -> Attention:
    """Return the attention over the cached tokens alone, with its ``memory``; unchanged where ``parts`` is None.

    Raises Miss where a mask replaces scores by a number, or the memory is written to.
    """
    if parts is None:
        return attention
    memory = parts.memory
    if any(term.fill != -torch.inf for term in attention.masks):
        raise Miss(
            "masked scores are replaced by a number, which still counts where all other scores are lower, and learned tokens are joined to "
            "the cache",
            attention.output, advice="fill with -inf or with the lowest number of the scores' dtype (torch.finfo(scores.dtype).min)",
        )
    if written := [write for node in (memory.keys, memory.values, *memory.joins) for write in effects.writes_to(node)]:
        raise Miss("learned memory keys or values are written to in place", written[0], advice="make them without such writes")

    def cut(side: int) -> tuple[MaskTerm, ...]:
        return tuple(replace(term, node=parts.masks[term.node][side]) if term.node in parts.masks else term for term in attention.masks)

    roles = _roles(parts.k, attention.k_roles, memory.joins[0]), _roles(parts.v, attention.v_roles, memory.joins[1])
    memory = replace(memory, masks=cut(0), roles=roles)
    return replace(attention, k=parts.k, v=parts.v, masks=cut(1), memory=memory)


def _roles(operand: fx.Node, named: tuple[str, ...], join: fx.Node) -> tuple[str, ...]:
    """Return the roles of a join's dims, from the roles (``named``) of its slice over the cached tokens.

    Raises Miss where attention reads a part of the cache only.
    """
    trail = trace(operand, lambda node: node is join)
    dim = int(bind(join)["dim"]) % len(sizes(join))
    there = trail.there.copy()
    there[:, dim] = trail.here[:, named.index("T")]
    axes, _, _ = axes_of(replace(trail, there=there), Read(operand, named, sizes(operand)), dim)
    if axes.select:
        raise Miss(
            "learned memory keys or values are joined to a cache of which attention reads a part", join, advice="join them to that part",
        )
    return tuple("".join(label) for label in axes.labels)
