"""Telemetry: the plane to which attention adds its counts, and the counts that a copied store inherited."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcompile.schemes.certificate.telemetry import TELEMETRY_PLANE

PLANE = TELEMETRY_PLANE.name
"""Name of the plane in which attention counts."""


class TelemetryPlane(NamedTuple):
    """A telemetry plane; ``before``: the counts that it had when its store was copied from another one (None: zero)."""

    plane: torch.Tensor
    before: torch.Tensor | None
