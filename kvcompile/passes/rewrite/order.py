"""Order: queries of rows whose tokens came out of their order become NaN, so that no such row's attention gives a number.

::

    out = attend(q, ...)   ->   out = attend(where(clock < LEAST_HELD, NaN, q), ...)

A store with exact newest tokens takes a row's tokens one behind the other. Where it was given others its clock says so from then on
(``ops.append_window``), on the device and without a wait. Reading it costs no kernel: the choice is part of what makes the queries.
"""

from __future__ import annotations

from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.plan.plan import SitePlan
from kvcompile.passes.rewrite.planes import Planes
from kvcompile.types import LEAST_HELD


def in_order(emit: Emitter, item: SitePlan, q: fx.Node, planes: Planes) -> fx.Node:
    """Return queries [B, H, S, D] with NaN for rows one of whose stores is broken; behind the appends of the call."""
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
    """Emit whether each row is broken, bool [B], from a clock [1, B, K, 1, 2]; see ``append_window.is_broken``."""
    held = clock
    for dim, at in ((4, 0), (3, 0), (2, 0), (0, 0)):
        held = emit.call(aten.select.int, held, dim, at)
    return emit.call(aten.lt.Scalar, held, LEAST_HELD)
