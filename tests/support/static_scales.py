"""Static scales for the attentions of a model: not measured, but each layer, half and head has its own."""

from __future__ import annotations

import torch

from kvcompile.extensions.static_scales.scales import ModelScales, Scales, SiteScales
from kvcompile.extensions.static_scales.scheme import Calibrated, static_of, with_scales


def random_slot(heads: int, seed: int, amax: float = 3.0, qmax: float = 127.0) -> Scales:
    """Scales of one slot, one for each head, that cover magnitudes around ``amax``."""
    spread = torch.rand(heads, generator=torch.Generator().manual_seed(seed)) + 0.5
    return Scales(spread * amax / qmax)


def random_scales(paths: list[str], name: str = "int8", heads: int = 2, seed: int = 0, amax: float = 3.0) -> Calibrated:
    """A scheme with random scales for attentions at module paths; the name of a scheme with the same codes."""
    kind = static_of(name)
    assert kind is not None
    sites = {
        path: SiteScales(*(random_slot(heads, seed + 2 * at + half, amax, kind.qmax) for half in range(2))) for at, path in enumerate(paths)
    }
    return with_scales(kind, ModelScales(sites, "test"))
