"""Find the one write into the part of a cache that an attention reads, in the cache's own memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from kvcompile.passes.graph.effects import Effects, same_memory, written_arguments
from kvcompile.passes.graph.pullback import Trail
from kvcompile.passes.graph.shapes import is_tensor
from kvcompile.passes.match.sites import Miss, Write


def one_write(
    root: fx.Node, trail: Trail, attention: fx.Node, effects: Effects, recognise: Callable[[fx.Node, fx.Node], Write | None],
) -> Write:
    """Return the one write into the part of ``root`` at which a trail ends; its field ``late`` is set if it comes after the attention.

    ``recognise(node, root)`` returns a node's write to the root, None where it writes another part. Raises Miss if there is no write, or
    more than one, if it goes to a copy, and if attention reads a copy that was made before the write.
    """
    writes = effects.writes.get(root, ())
    hits = []
    for node in writes:
        write = recognise(node, root)
        if write is None:
            continue
        fixed = dict(write.select)
        if all((trail.there[:, dim] == index).all() for dim, index in fixed.items()):
            hits.append(write)
    if not hits:
        raise Miss("no write goes to the part of the cache that attention reads", root, advice="write what is read in the same graph")
    if len(hits) > 1:
        raise Miss(
            f"the cache is written {len(hits)} times before it is read", *[hit.node for hit in hits],
            advice="write all new tokens of a call at once, after whatever changes them",
        )
    write = hits[0]
    if not same_memory(written_arguments(write.node)[0], root):
        raise Miss(
            "the write goes to a copy of the cache", write.node,
            advice="write into the cache itself, or update it out of place with cache.index_copy(...) and return the result",
        )
    if effects.order[write.node] > effects.order[attention]:
        return replace(write, late=True)
    for node in trail.path:
        early = effects.order[node] < effects.order[write.node]
        if early and is_tensor(node) and not same_memory(node, root):
            raise Miss("the attention reads a copy of the cache made before the write", node, advice="read the cache after the write")
    return write
