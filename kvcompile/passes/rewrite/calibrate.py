"""Calibrate: compute planes from the queries of the call that fills an empty store, before any token is encoded.

The queries are known at the attention, after the write, so the append of such a slot moves there: a store that is being filled is not
read in this call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import same, size_along
from kvcompile.passes.match.mask.masks import hiding
from kvcompile.passes.plan.plan import SitePlan
from kvcompile.passes.rewrite.left_padding import shown


def calibrate(
    emit: Emitter, item: SitePlan, q_BHSD: fx.Node, planes: list[fx.Node], keys: fx.Node | None, angles: list[fx.Node] | None
) -> None:
    """Emit the calibration of a key slot: ``planes`` are all planes of the slot; for ``keys`` and ``angles`` see ``calibrate_body``."""
    slot = item.key
    calibrated = [node for node, spec in zip(planes, slot.layout.planes, strict=True) if spec.name in slot.scheme.calibrated]
    attention = item.site.attention
    # Models split the scale of scores between queries and ``scale`` differently; equal scores must give equal planes.
    factor = abs(attention.scale) * math.sqrt(slot.spec.head_dim)
    if abs(factor - 1) > 1e-6:
        q_BHSD = emit.call(aten.mul.Scalar, q_BHSD, factor)
    # In cross-attention the mask describes padding of the keys only, not of the queries.
    own = same(size_along(attention.q, attention.q_roles, "S", attention.folded), slot.slot.write.count)
    keep = _real(emit, item) if own else None
    beside: list[Any] = [] if keys is None and angles is None else [keys]
    if angles is not None:
        assert slot.rope is not None
        beside += [angles, slot.rope.interleaved]
    emit.call(torch.ops.kvcompile.calibrate.default, q_BHSD, calibrated, keep, slot.scheme.spec(), *beside)


def _real(emit: Emitter, item: SitePlan) -> fx.Node | None:
    """Emit a mask of the tokens that some query sees, bool [B or 1, T]; return the node, None if no mask hides tokens."""
    real: fx.Node | None = None
    for term in hiding(item.site.bounds):
        mask = emit.call(aten.to.dtype, shown(emit, term, item.site), torch.int64)
        seen = emit.call(aten.gt.Scalar, emit.call(aten.amax.default, mask, [1, 2]), 0)
        real = seen if real is None else emit.call(aten.logical_and.default, real, seen)
    return real
