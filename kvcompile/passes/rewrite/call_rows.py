"""Tensors of masks and limits in the rewritten graph, cut to the batch rows and queries of a call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import same, size_along, value_of
from kvcompile.passes.match.sites import Site


def rows_of_call(emit: Emitter, origin: fx.Node, roles: Sequence[str], site: Site) -> fx.Node:
    """Return a tensor of the captured graph with as many batch rows and queries as the site's queries have, or one where it has one.

    A model may index a mask by ``arange(batch)``, which reads its first rows and says nothing about how many it has.
    """
    attention, node = site.attention, emit.copies[origin]
    for dim, (role, size) in enumerate(zip(roles, value_of(origin).shape, strict=True)):
        # Batch rows that are folded with heads are not counted apart.
        if same(size, 1) or not (role == "S" or (role == "B" and role in attention.q_roles)):
            continue
        wanted = size_along(attention.q, attention.q_roles, role, attention.folded)
        if not same(size, wanted):
            node = emit.call(aten.slice.Tensor, node, dim, 0, emit.size(wanted))
    return node
