"""Telemetry of a store: what attention counts in a plane of it, and what that plane held when the store was made from another one."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcompile.schemes.certificate.telemetry import TELEMETRY_PLANE

PLANE = TELEMETRY_PLANE.name
"""The name of the plane that attention counts in."""


class TelemetryPlane(NamedTuple):
    """A telemetry plane, and what it held when its store was made from another one, None for nothing."""

    plane: torch.Tensor
    before: torch.Tensor | None
