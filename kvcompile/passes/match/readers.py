"""Readers: refuse an attention if other nodes read its cache, or the graph returns it, since the codes would have to be decoded."""

from __future__ import annotations

import math
from collections import defaultdict

from torch import fx

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.shapes import hint, op_name, sizes
from kvcompile.passes.match.cache import sliding
from kvcompile.passes.match.cache.first_rows import rows_held, same_rows
from kvcompile.passes.match.sites import Miss, Site, Slot


def read_elsewhere(sites: list[Site], effects: Effects) -> dict[Site, Miss]:
    """Return the sites whose cache has other readers, is read in two ways or only in part, or is returned in part, each with its Miss."""
    by_root: dict[fx.Node, list[Site]] = defaultdict(list)
    for site in sites:
        for slot in site.slots:
            if site not in by_root[slot.root]:
                by_root[slot.root].append(site)
    refused: dict[Site, Miss] = {}
    for root, users in by_root.items():
        if len({slot.block_table is None for site in users for slot in site.slots if slot.root is root}) > 1:
            miss = Miss("one attention gathers from the cache, another one reads it contiguously", root, advice="read it in one way")
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
    """Return {site: Miss} if something else reads the cache ``root`` of ``site``; empty if nothing does.

    That is: a view of it is returned, the past has another reader, or several attentions with different masks share one write.
    """
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


def filled_elsewhere(sites: list[Site], captured: Captured) -> dict[Site, Miss]:
    """Return the sites that only read a cache which no compiled call has filled (other code may write to it again), each with its Miss."""
    filled = {entry.node for entry in captured.inputs if entry.compressed or entry.returned}
    return {
        site: Miss(
            "the cache is read but not written in this graph, and no compiled call has filled it (an uncompiled call has, or a graph break "
            "separates the write from the attention)", slot.root,
            advice="compile the call that fills the cache as well, and keep the write and the attention in one graph",
        )
        for site in sites for slot in site.slots if not slot.kind.facts.written and slot.root not in filled
    }


def borrowed(sites: list[Site], captured: Captured) -> dict[Site, Miss]:
    """Return the sites that write a cache in place in memory that no tensor owns alone (it cannot be freed), each with its Miss."""
    borrowed = {entry.node for entry in captured.inputs if not entry.owned}
    return {
        site: Miss(
            "no tensor owns the cache's memory alone (it is a view, a parameter or a subclass, or something else holds a view of it)",
            slot.root, advice="keep the cache in a plain tensor or a registered buffer of its own, and no view of it from call to call",
        )
        for site in sites for slot in site.slots if slot.kind.facts.in_place and slot.placeholder in borrowed
    }
