"""Magnitudes of one slot's tokens over a calibration: the largest of each kv head, and percentiles."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kvcompile.extensions.static_scales.scales import ScaleExtent, Scales
from kvcompile.schemes.symmetric import stored_scale

BITS = 16
"""Low bits of a float32 that the histogram ignores: its bins are 1/128 of their magnitude wide."""
BINS = 1 << (31 - BITS)


@dataclass
class Magnitudes:
    """The largest magnitude of each kv head, float32 [K], and if ``counted`` a histogram of all magnitudes, int64 [K, BINS].

    ``finite``: whether no NaN or Inf was seen. ``values``: the number of magnitudes per head.
    """

    counted: bool = False
    amax: torch.Tensor = field(default_factory=lambda: torch.zeros(0, device="cpu"))
    histogram: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64, device="cpu"))
    values: int = 0
    finite: bool = True

    def add(self, tokens_nKD: torch.Tensor) -> None:
        """Add the magnitudes of tokens [n, K, D] to the record, in place. Waits for the device."""
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
        """Return the magnitude [1] or [K] that ``percentile`` percent of the values do not exceed; exact at 100, else up to 1/128 above."""
        amax = self.amax if extent is ScaleExtent.HEAD else self.amax.amax().reshape(1)
        if percentile >= 100:
            return amax
        counts = self.histogram if extent is ScaleExtent.HEAD else self.histogram.sum(0, keepdim=True)
        rank = torch.tensor([math.ceil(percentile * int(row.sum()) / 100 - 1e-6) for row in counts], device="cpu")
        first = torch.searchsorted(counts.cumsum(1), rank[:, None].contiguous())
        edge = ((first + 1) << BITS).to(torch.int32).view(torch.float32).reshape(-1)
        return torch.minimum(edge, amax)

    def scales(self, extent: ScaleExtent, percentile: float, margin: float, largest: float) -> Scales:
        """Return the scales whose largest code decodes to ``margin`` times the magnitude of ``covering``.

        ``largest``: the largest code. A head of zeros gets the largest scale of the other heads.
        """
        covered = self.covering(extent, percentile)
        covered = torch.where(covered > 0, covered, covered.amax())
        return Scales(stored_scale(covered * margin, largest, torch.float32))


@dataclass
class Clipped:
    """The number of values beyond a slot's range ``reach``, [1] or [K], and the number of all values."""

    reach: torch.Tensor
    beyond: int = 0
    values: int = 0

    def add(self, tokens_nKD: torch.Tensor) -> None:
        """Add the values of tokens [n, K, D] to both numbers, in place. Waits for the device."""
        # The scale was rounded by less than two units in the last place.
        edge = (self.reach * (1 + 2.0**-22)).to(tokens_nKD.device)[:, None]
        self.beyond += int((tokens_nKD.to(torch.float32).abs() > edge).sum())
        self.values += tokens_nKD.numel()

    @property
    def share(self) -> float:
        """The share of values that are clipped; 0 if none were seen."""
        return self.beyond / self.values if self.values else 0.0
