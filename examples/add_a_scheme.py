"""A scheme of your own in one file: ``fp4``, four-bit floats (e2m1) with a power-of-two scale for every 32 channels, as MXFP4 has.

Importing this file is all that is needed: ``kvcompile.backend("fp4")`` then compresses any model's cache with it. Nothing here knows
a kernel, a cache or a model. ``kvcompile dump file.py:factory --scheme fp4 --stage triton`` shows what became of ``unpack``.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import sympy
import torch

import kvcompile
from kvcompile.schemes import AMAX, Planes
from kvcompile.schemes.certificate.bounds import STEP
from kvcompile.types import KernelFormat, Layout, PlaneSpec, SlotSpec

GROUP = 32
"""Consecutive channels that share a scale."""

EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between neighbors of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, the magnitudes of the codes 0 to 7; 8 is the sign."""


def unpack(words: torch.Tensor, part: int) -> torch.Tensor:
    """Values before scaling of one nibble of every byte, by the operators that kernels can spell: shifts, masks, sums, products."""
    code = (words >> (4 * part)).to(torch.int32)
    exponent = (code >> 1) & 3
    normal = (exponent | (exponent >> 1)) & 1
    halves = (2 * normal + (code & 1)) << (exponent - normal)
    return (halves * (1 - ((code >> 2) & 2))).to(torch.float32) * 0.5


@kvcompile.register
@dataclasses.dataclass(frozen=True)
class Fp4(kvcompile.Scheme):
    """Four-bit floats, two to the byte, part 0 in the low nibble; the scale is the least power of two that fits the group in [-6, 6]."""

    name: ClassVar[str] = "fp4"
    source: ClassVar[str] = "OCP Microscaling Formats (MX) 1.0, with the scale kept in bfloat16"

    def check(self, slot: SlotSpec) -> None:
        kvcompile.require_divides(GROUP, slot, self.name, "group")

    def layout(self, slot: SlotSpec) -> Layout:
        return Layout((PlaneSpec("codes", torch.uint8, slot.head_dim // 2), PlaneSpec("scales", torch.bfloat16, slot.head_dim // GROUP)))

    def format(self, slot: SlotSpec) -> KernelFormat:
        return KernelFormat(torch.uint8, parts=2, group=GROUP, scaled=True, unpack=unpack)

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        x = x_BKSD.to(torch.float32).unflatten(-1, (-1, GROUP))
        amax = x.abs().amax(-1, keepdim=True)
        # Adding all bits of the mantissa and dropping them rounds up to a power of two; NaN and Inf spoil their group.
        power = (((amax / 6).view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32).clamp(min=2.0**-126)
        scale = torch.where(torch.isfinite(amax), power, float("nan"))
        scaled = (x / scale).flatten(-2)
        codes = sum(((scaled.abs() > edge).to(torch.uint8) for edge in EDGES), (scaled < 0).to(torch.uint8) << 3)
        low, high = codes.chunk(2, dim=-1)
        return low | (high << 4), scale.squeeze(-1).to(torch.bfloat16)

    def bound(self, slot: SlotSpec) -> sympy.Expr:
        """Half of the widest gap, one scale, which is less than a third of the largest magnitude."""
        return AMAX / 3 * (1 + sympy.Float(2.0**-20)) + sympy.Float(2.0**-126)

    @property
    def largest(self) -> float:
        """Beyond this a group's scale times six is no float32 any more."""
        return 3 * 2.0**126

    def radius(self, slot: SlotSpec) -> sympy.Expr:
        """The same by the scale that is stored, for reports of the error at every step (``certify=``)."""
        return STEP * (1 + sympy.Float(2.0**-20))
