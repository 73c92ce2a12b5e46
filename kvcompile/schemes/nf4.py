"""nf4: four-bit indices of 16 levels at quantiles of a normal distribution, in a constant plane ("QLoRA", section 3)."""

from __future__ import annotations

import dataclasses
import itertools
from statistics import NormalDist
from typing import ClassVar

import sympy
import torch

from kvcompile.schemes.symmetric import Symmetric
from kvcompile.types import Cells, Extent, Granularity, KernelFormat, Layout, PlaneSpec, SlotSpec

OFFSET, LARGEST = 0.9677083, 8.0
"""The outermost quantile, from the paper's code; and its level, chosen so that scales are an eighth of the magnitude, which float16
holds."""


def _levels(count: int) -> list[float]:
    """Return quantiles above zero in falling order, rounded to float32, in units of the scale."""
    found = [NormalDist().inv_cdf(OFFSET + (0.5 - OFFSET) * step / count) for step in range(count)]
    return (torch.tensor(found, dtype=torch.float64, device="cpu") * (LARGEST / found[0])).to(torch.float32).tolist()


LEVELS = (*(-level for level in _levels(7)), 0.0, *reversed(_levels(8)))
EDGES = tuple((low + high) / 2 for low, high in itertools.pairwise(LEVELS))


@dataclasses.dataclass(frozen=True)
class Nf4(Symmetric):
    """4-bit codes that number 16 fixed levels, quantiles of a normal distribution (NormalFloat), with one scale per 32 channels by default.

    Two codes to a byte, part 0 in the low nibble. The paper has groups of 64 channels.
    """

    granularity: Granularity = Granularity.GROUP

    name: ClassVar[str] = "nf4"
    source: ClassVar[str] = "QLoRA, section 3 (4-bit NormalFloat); scales as in KV Cache Quantization"
    qmax: ClassVar[float] = LARGEST
    bits: ClassVar[int] = 4
    parts: ClassVar[int] = 2
    reach: ClassVar[sympy.Expr] = sympy.Float((LEVELS[1] - LEVELS[0]) / 2)

    def layout(self, slot: SlotSpec) -> Layout:
        groups, layout = slot.head_dim // self.channels_per_scale(slot.head_dim), super().layout(slot)
        grown, fixed = layout.planes[: layout.encoded], layout.planes[layout.encoded :]
        return Layout((*grown, PlaneSpec("levels", torch.float32, 16, groups, Extent.BATCH, constant=True), *fixed))

    def constants(self, slot: SlotSpec) -> dict[str, torch.Tensor]:
        return {"levels": torch.tensor(LEVELS, device="cpu")}

    def format(self, slot: SlotSpec) -> KernelFormat:
        return dataclasses.replace(super().format(slot), levels=16)

    def cells(self, head_dim: int) -> Cells | None:
        if type(self) is not Nf4 or self.granularity is Granularity.TENSOR:
            return None
        return Cells(self.bits, self.parts, 1, self.channels_per_scale(head_dim), EDGES, self.qmax)

    def unpack(self, words: torch.Tensor, part: int) -> torch.Tensor:
        return ((words >> (4 * part)) & 15).to(torch.float32)

    def pack(self, scaled: torch.Tensor) -> torch.Tensor:
        low, high = sum(((scaled > edge).to(torch.uint8) for edge in EDGES), torch.zeros_like(scaled, dtype=torch.uint8)).chunk(2, dim=-1)
        return low | (high << 4)
