"""Call rows: mask and limit tensors of the rewritten graph, cut to the batch rows and queries of a call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import same, size_along, value_of
from kvcompile.passes.match.sites import Site


def rows_of_call(emit: Emitter, origin: fx.Node, roles: Sequence[str], site: Site) -> fx.Node:
    """Emit a tensor of the captured graph with dims B and S cut to the sizes of the site's queries; dims of size 1 stay.

    A model may index a mask by ``arange(batch)``, which reads its first rows without revealing how many it has.
    """
    attention, node = site.attention, emit.copies[origin]
    for dim, (role, size) in enumerate(zip(roles, value_of(origin).shape, strict=True)):
        # Batch rows that are flattened with heads have no size of their own.
        if same(size, 1) or not (role == "S" or (role == "B" and role in attention.q_roles)):
            continue
        wanted = size_along(attention.q, attention.q_roles, role, attention.folded)
        if not same(size, wanted):
            node = emit.call(aten.slice.Tensor, node, dim, 0, emit.size(wanted))
    return node
