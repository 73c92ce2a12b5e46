"""gauss: one 16-bit norm for each token and head, and indices of constant levels for its rotated channels.

    x = 2 n u;   code = number of edges below u;   x' = n * (2 level[code]);   n = half the root mean square of the channels

A Hadamard matrix makes a token's channels close to normally distributed, whatever the token; so levels need no data: they are those with
the least mean square error for a standard normal variable ("Quantizing for Minimum Distortion", Max 1960; "Least Squares Quantization in
PCM", Lloyd 1982). "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate" (Zandieh et al. 2025, arXiv 2504.19874)
quantizes caches in this way. Differences from it, and their reasons:

* Its rotation is dense and random. Here it is the block Hadamard matrix that other schemes have (``schemes.rotation``), without random
  signs: with them the KL divergence of SmolLM2 was not smaller (docs/ACCURACY.md).
* Its levels are for the exact distribution of a random unit vector's channel, which from 64 channels on differs little from a normal one.
* Its second form, one bit a channel more for an estimate of scores without bias, is left out.

Every token has codes of its own, so caches may be paged, slide, be cut and be reordered; with ``window`` the newest tokens
stay exact. A token of zeros has norm 0 and decodes to zeros; NaN or Inf in a token makes its norm NaN. Channels beyond
the outermost level are clipped to it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, ClassVar

import sympy
import torch

from kvcompile.schemes.asymmetric import PARTS, SEGMENTS, UNPACK, pack
from kvcompile.schemes.base import AMAX, QUIET, Planes, require, require_divides
from kvcompile.schemes.low_bit import LowBit
from kvcompile.schemes.norms import half_root_mean_square
from kvcompile.schemes.rotation import Rotate
from kvcompile.schemes.symmetric import SCALE_ULP, TINY, require_scale_dtype
from kvcompile.schemes.windowed import Windowed
from kvcompile.types import Cells, Extent, KernelFormat, Layout, PlaneSpec, SlotSpec

ABOVE_ZERO = {
    2: (0.45278003463649197, 1.510417608499095),
    3: (0.2450941789442217, 0.7560052812058766, 1.3439092785049997, 2.1519457045369847),
    4: (
        0.12839502985114706, 0.3880482994902907, 0.6567591185324636, 0.9423404564869622, 1.256231197347176, 1.6180463860218808,
        2.069017226531384, 2.732589570995159,
    ),
}
"""Levels above zero for a standard normal variable, by bits: each is the mean of its cell, whose edges are halfway between levels."""

LEVELS = {bits: (*(-2 * level for level in reversed(above)), *(2 * level for level in above)) for bits, above in ABOVE_ZERO.items()}
"""All levels in units of the stored norm, half a standard deviation."""
EDGES = {bits: tuple((low + high) / 2 for low, high in itertools.pairwise(levels)) for bits, levels in LEVELS.items()}
"""Edges between the cells of levels, in the same units."""


@dataclasses.dataclass(frozen=True)
class Gauss(Windowed, LowBit):
    """Codes that number the best levels for a normal variable, with one norm per token; keys and values rotated, 4 bits by default."""

    bits: int = 4
    scale_dtype: torch.dtype = torch.float16
    rotate: Rotate = dataclasses.field(default=Rotate.KV, kw_only=True, metadata=QUIET)

    name: ClassVar[str] = "gauss"
    source: ClassVar[str] = "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate, the form of least square error"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bits in LEVELS, self.name, "bits", "2, 3 or 4", self.bits, "4 is the default")
        require_scale_dtype(self.scale_dtype, self.name)

    @classmethod
    def variants(cls) -> tuple[Gauss, ...]:
        default = cls()
        changes: list[dict[str, Any]] = [
            {"bits": 3}, {"bits": 2, "scale_dtype": torch.bfloat16}, {"scale_dtype": torch.float32, "rotate": Rotate.NONE},
            {"bits": 3, "rotate": Rotate.K, "order": 16, "sinks": 5}, {"window": 32},
            {"bits": 2, "sinks": 5, "window": 16},
        ]
        return (default, *(dataclasses.replace(default, **change) for change in changes))

    @property
    def largest(self) -> float:
        return 2 * min(torch.finfo(self.scale_dtype).max, torch.finfo(torch.float32).max / 8) / (1 + 2 * SCALE_ULP[self.scale_dtype])

    def check(self, slot: SlotSpec) -> None:
        super().check(slot)
        require_divides(PARTS[self.bits], slot, self.name, "codes per word")

    def layout(self, slot: SlotSpec) -> Layout:
        return Layout((
            PlaneSpec("codes", torch.uint8, slot.head_dim * self.bits // 8), PlaneSpec("norms", self.scale_dtype, 1),
            PlaneSpec("levels", torch.float32, 2**self.bits, 1, Extent.BATCH, constant=True),
        )).windowed(slot, self.window).with_sinks(slot, self.sinks)

    def constants(self, slot: SlotSpec) -> dict[str, torch.Tensor]:
        return {"levels": torch.tensor(LEVELS[self.bits], device="cpu")}

    def format(self, slot: SlotSpec) -> KernelFormat:
        bits = self.bits
        return KernelFormat(torch.uint8, PARTS[bits], slot.head_dim, True, UNPACK[bits], levels=2**bits, segments=SEGMENTS[bits])

    def cells(self, head_dim: int) -> Cells | None:
        return Cells(self.bits, PARTS[self.bits], SEGMENTS[self.bits], head_dim, EDGES[self.bits], None) if type(self) is Gauss else None

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        del fixed
        norm = half_root_mean_square(x_BKSD, self.scale_dtype)
        size = norm.to(torch.float32)
        u = x_BKSD.to(torch.float32) / torch.where(size == 0, 1.0, size)
        codes = sum(((u > edge).to(torch.int32) for edge in EDGES[self.bits]), torch.zeros_like(u, dtype=torch.int32))
        return pack(codes, self.bits), norm

    def bound(self, slot: SlotSpec) -> sympy.Expr:
        ulp, tiny = sympy.Float(SCALE_ULP[self.scale_dtype]), sympy.Float(TINY[self.scale_dtype])
        # The root mean square is between the largest magnitude and that divided by the root of D.
        largest = sympy.Max(AMAX / 2 * (1 + ulp), AMAX / 2 + tiny)
        clipped = AMAX * sympy.Float(1 - LEVELS[self.bits][-1] / (2 * math.sqrt(slot.head_dim)))
        steps = (high - low for low, high in itertools.pairwise(LEVELS[self.bits]))
        # Float32 rounding is 4 units at most. No bound follows from the norm alone that is of use: one channel may have all of it.
        return sympy.Max(largest * sympy.Float(max(steps) / 2), clipped) + AMAX * sympy.Float(2.0**-20)
