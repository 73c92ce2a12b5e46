"""Left padding in windowed stores: each row's first token, and masks counted from there.

Tokens of a block share scales, so a row's blocks must begin at its first token, not at its padding. That first token is read from the
masks: positions before the first one visible to any query of any head are padding.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.match.mask.masks import hidden_at, hiding
from kvcompile.passes.match.sites import Bounds, MaskKind, MaskTerm, Site
from kvcompile.passes.rewrite.call_rows import rows_of_call
from kvcompile.passes.rewrite.visibility import Visibility


def padding(bounds: Bounds) -> tuple[MaskTerm, ...]:
    """Return the mask terms that may hide different positions in different batch rows."""
    return tuple(term for term in hiding(bounds) if _per_row(term))


def _per_row(term: MaskTerm) -> bool:
    return any("B" in role for role in term.roles)


def shown(emit: Emitter, term: MaskTerm, site: Site) -> fx.Node:
    """Emit which tokens a mask term leaves visible, bool [B or 1, H or 1, S or 1, T]."""
    node = rows_of_call(emit, term.node, term.roles, site)
    if term.kind is MaskKind.ADD:
        # Not "greater than": NaN must count as visible.
        node = emit.call(aten.logical_not.default, emit.call(aten.le.Scalar, node, hidden_at(term)))
    elif value_of(term.node).dtype != torch.bool:
        node = emit.call(aten.ne.Scalar, node, 0)
    if term.kind is MaskKind.FILL:
        node = emit.call(aten.logical_not.default, node)
    return emit.heads(node, term.roles, ("S", "T"), site.heads, site.groups)


def padded_rows(emit: Emitter, terms: tuple[MaskTerm, ...], site: Site, made: dict[Any, fx.Node]) -> fx.Node:
    """Emit the first visible position of each row, int64 [B]; ``made`` shares it between sites with equal masks."""
    key = terms
    if key in made:
        return made[key]
    found: fx.Node | None = None
    for term in terms:
        seen = emit.call(aten.amax.default, emit.call(aten.to.dtype, shown(emit, term, site), torch.int64), [1, 2])
        # A separate operation: Inductor fused the search with its neighbours, and Triton 3.6 could not compile that for one row.
        first = emit.call(torch.ops.kvcompile.first_visible.default, seen)
        found = first if found is None else emit.call(aten.maximum.default, found, first)
    assert found is not None
    made[key] = found
    return found


def from_origin(
    emit: Emitter, origin: fx.Node, device: torch.device, bounds: Bounds, seen: Visibility,
) -> Visibility:
    """Emit limits and masks [B or 1, ...] with positions counted from each row's ``origin`` [B]."""
    hi, lo, keep, bias = seen.hi, seen.lo, seen.keep, seen.bias
    assert hi is not None
    column = emit.call(aten.unsqueeze.default, origin, 1)
    batch = emit.call(aten.sym_size.int, column, 0)

    def shifted(mask: fx.Node, dim: int) -> tuple[fx.Node, fx.Node]:
        """Emit a mask shifted along ``dim`` so that index 0 is each row's origin, and a mask of the indices that exist after the shift."""
        size = emit.call(aten.sym_size.int, mask, dim)
        index = emit.call(aten.add.Tensor, emit.call(aten.arange.default, size, dtype=torch.int64, device=device), column)
        inside = emit.call(aten.lt.Scalar, index, size)
        index = emit.call(aten.clamp.default, index, None, emit.call(operator.sub, size, 1))
        rows = emit.call(aten.expand.default, mask, [batch, *[-1] * dim])
        for _ in range(dim - 1):
            index, inside = (emit.call(aten.unsqueeze.default, each, 1) for each in (index, inside))
        return emit.call(aten.gather.default, rows, dim, emit.call(aten.expand_as.default, index, rows)), inside

    hi = emit.call(aten.sub.Tensor, hi, column)
    if lo is not None:
        lo = emit.call(aten.sub.Tensor, lo, column)
    if keep is not None:
        keep = emit.call(aten.logical_and.default, *shifted(keep, 1))
    if bias is not None:
        taken, inside = shifted(bias, 3)
        if all(term.kind is not MaskKind.ADD for term in bounds.carried):
            bias = emit.call(aten.logical_and.default, taken, inside)
        else:
            bias = emit.call(aten.masked_fill.Scalar, taken, emit.call(aten.logical_not.default, inside), float("-inf"))
    return Visibility(hi, lo, keep, bias)
