"""Telemetry: the plane in which attention counts, and its contents when its store was copied from another one."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcompile.schemes.certificate.telemetry import TELEMETRY_PLANE

PLANE = TELEMETRY_PLANE.name
"""Name of the plane in which attention counts."""


class TelemetryPlane(NamedTuple):
    """A telemetry plane, and its contents when its store was copied from another one (None: nothing)."""

    plane: torch.Tensor
    before: torch.Tensor | None
