"""Magnitudes of the tokens that one slot was seen to hold: the largest of each kv head, and where a percentile lies."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kvcompile.extensions.static_scales.scales import ScaleExtent, Scales
from kvcompile.schemes.symmetric import stored_scale

BITS = 16
"""Low bits of a float32 that a histogram leaves out: its bins are 1/128 of their magnitude wide."""
BINS = 1 << (31 - BITS)


@dataclass
class Magnitudes:
    """The largest magnitude of each kv head, float32 [K], and a histogram of all, int64 [K, BINS], where percentiles are asked for.

    ``finite``: whether no NaN or Inf was seen. ``values``: how many magnitudes a head has.
    """

    counted: bool = False
    amax: torch.Tensor = field(default_factory=lambda: torch.zeros(0, device="cpu"))
    histogram: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64, device="cpu"))
    values: int = 0
    finite: bool = True

    def add(self, tokens_nKD: torch.Tensor) -> None:
        """Count tokens [n, K, D]; waits for the device."""
        size = tokens_nKD.detach().to(torch.float32).abs()
        heads = size.shape[1]
        if not self.values:
            self.amax = torch.zeros(heads, device="cpu")
            self.histogram = torch.zeros(heads, BINS, dtype=torch.int64, device="cpu") if self.counted else self.histogram
        if not size.numel():
            return
        self.finite = self.finite and bool(size.isfinite().all())
        self.amax = torch.maximum(self.amax, size.amax((0, 2)).cpu())
        self.values += size.shape[0] * size.shape[2]
        if self.counted:
            bins = (size.contiguous().view(torch.int32) >> BITS).to(torch.int64) + BINS * torch.arange(heads, device=size.device)[:, None]
            self.histogram += torch.bincount(bins.reshape(-1), minlength=heads * BINS)[: heads * BINS].cpu().view(heads, BINS)

    def covering(self, extent: ScaleExtent, percentile: float) -> torch.Tensor:
        """The magnitude [1] or [K] that so many of a hundred values do not exceed; exact at 100, else at most 1/128 above."""
        amax = self.amax if extent is ScaleExtent.HEAD else self.amax.amax().reshape(1)
        if percentile >= 100:
            return amax
        counts = self.histogram if extent is ScaleExtent.HEAD else self.histogram.sum(0, keepdim=True)
        rank = torch.tensor([math.ceil(percentile * int(row.sum()) / 100 - 1e-6) for row in counts], device="cpu")
        first = torch.searchsorted(counts.cumsum(1), rank[:, None].contiguous())
        edge = ((first + 1) << BITS).to(torch.int32).view(torch.float32).reshape(-1)
        return torch.minimum(edge, amax)

    def scales(self, extent: ScaleExtent, percentile: float, margin: float, largest: float) -> Scales:
        """The scales whose largest code stands for ``margin`` times that magnitude; a head of zeros alone has that of the others."""
        covered = self.covering(extent, percentile)
        covered = torch.where(covered > 0, covered, covered.amax())
        return Scales(stored_scale(covered * margin, largest, torch.float32))


@dataclass
class Clipped:
    """How many values lie beyond a slot's range [1] or [K], of how many."""

    reach: torch.Tensor
    beyond: int = 0
    values: int = 0

    def add(self, tokens_nKD: torch.Tensor) -> None:
        """Count tokens [n, K, D]; waits for the device."""
        # A scale was rounded, by less than two units in its last place.
        edge = (self.reach * (1 + 2.0**-22)).to(tokens_nKD.device)[:, None]
        self.beyond += int((tokens_nKD.to(torch.float32).abs() > edge).sum())
        self.values += tokens_nKD.numel()

    @property
    def share(self) -> float:
        """Return the share of values that are clipped; 0 where none were seen."""
        return self.beyond / self.values if self.values else 0.0
