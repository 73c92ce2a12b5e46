"""Order: queries of rows with tokens out of order become NaN, so that their attention yields NaN.

::

    out = attend(q, ...)   ->   out = attend(where(clock < LEAST_HELD, NaN, q), ...)

A windowed store takes each row's tokens in order. A row that gets others is marked in the store's clock from then on
(``ops.append_window``), on the device and without synchronising. The test costs no kernel: it fuses with the computation of queries.
"""

from __future__ import annotations

from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.plan.plan import SitePlan
from kvcompile.passes.rewrite.planes import Planes
from kvcompile.types import LEAST_HELD


def in_order(emit: Emitter, item: SitePlan, q: fx.Node, planes: Planes) -> fx.Node:
    """Emit queries [B, H, S, D] with NaN for rows that are broken in one of the site's stores; call it after the appends."""
    broken = [_broken(emit, planes.named(part)["clock"]) for part in item.parts if part.window]
    if not broken:
        return q
    rows = broken[0]
    for other in broken[1:]:
        rows = emit.call(aten.bitwise_or.Tensor, rows, other)
    for dim in (1, 2, 3):
        rows = emit.call(aten.unsqueeze.default, rows, dim)
    return emit.call(aten.masked_fill.Scalar, q, rows, float("nan"))


def _broken(emit: Emitter, clock: fx.Node) -> fx.Node:
    """Emit a mask of rows whose tokens came out of order, bool [B], from a clock [1, B, K, 1, 2]; see ``append_window.is_broken``."""
    held = clock
    for dim, at in ((4, 0), (3, 0), (2, 0), (0, 0)):
        held = emit.call(aten.select.int, held, dim, at)
    return emit.call(aten.lt.Scalar, held, LEAST_HELD)
