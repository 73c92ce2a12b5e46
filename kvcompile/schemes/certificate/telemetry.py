"""Planes that certificates write: sums over steps of each kv head, and the first token of a window that still holds originals."""

from __future__ import annotations

import torch

from kvcompile.types import Extent, PlaneSpec

TELEMETRY = 34
"""Accumulators of each kv head and row; ``lowering.certificate.telemetry`` names them."""

TELEMETRY_PLANE = PlaneSpec("telemetry", torch.float64, TELEMETRY, 1, Extent.ROW)
"""The plane of these accumulators, the last one of a key store that grows with its attention."""

REFILLED = "refilled"
"""The name of the plane with the first token from which on a window holds originals: a rollback puts those before back from codes."""

REFILLED_PLANE = PlaneSpec(REFILLED, torch.int64, 1, 1, Extent.ROW, tally=True)
"""The plane of that token, int64 and counted from the row's origin as the clock counts, of a store whose attention reports its error."""
