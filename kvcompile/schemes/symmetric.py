"""fp8, int8, int4: online symmetric quantization, no calibration ("KV Cache Quantization", Per-Token Scaling; see docs/SCHEMES.md).

scale = amax / qmax, code = clamp(rne(x / scale)). Differences from the article, and why:

* The scale is rounded UP to its stored dtype and the codes are made from the stored scale, so that rounding the scale never clips: the
  error is at most half a step, always.
* The article floors the scale at 1e-12 and stores it in float16, where that is zero, so a tiny group decodes to 0 * inf. Here the floor is
  the smallest positive number of the stored dtype.
* NaN or Inf in a group makes its scale NaN, so every channel of that group decodes to NaN.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import sympy
import torch

from kvcompile.errors import HeadDimNotDivisible
from kvcompile.schemes.base import AMAX, Planes, require, require_divides
from kvcompile.schemes.certificate.bounds import STEP
from kvcompile.schemes.certificate.bounds import TINY as TINIEST
from kvcompile.schemes.low_bit import LowBit
from kvcompile.schemes.rotation import Rotate
from kvcompile.schemes.windowed import Windowed
from kvcompile.types import AbsMax, Granularity, KernelFormat, Layout, PlaneSpec, SlotSpec

DEFAULT_GROUP, LEAST_GROUP = 32, 8
"""Default and smallest number of channels that share a scale."""

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

TINY = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126}
SCALE_ULP = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-23}


def require_scale_dtype(dtype: object, scheme: str) -> None:
    """Raise BadOption unless a scheme's option ``scale_dtype`` is one of ``SCALE_DTYPES``."""
    require(dtype in SCALE_DTYPES, scheme, "scale_dtype", "float16, bfloat16 or float32", dtype, "float16 is the usual choice")


def stored_scale(amax: torch.Tensor, qmax: float, dtype: torch.dtype) -> torch.Tensor:
    """Return amax / qmax rounded up to ``dtype``, in the shape of ``amax``: at least the dtype's smallest positive number, never 0.

    NaN if amax is not finite. amax is multiplied by a constant reciprocal: devices and compilers divide by a constant differently, but
    agree on a product.
    """
    exact = torch.where(torch.isfinite(amax), amax * (1 / qmax), torch.full_like(amax, float("nan")))
    return rounded_up(exact, dtype).clamp(min=TINY[dtype])


def rounded_up(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return nonnegative float32 numbers rounded up to ``dtype``, by at most one unit in the last place; float32 as they are.

    NaN stays, Inf becomes NaN, and a finite number beyond the dtype's range becomes Inf.
    """
    exact = torch.where(torch.isfinite(exact), exact, torch.full_like(exact, float("nan")))
    if dtype == torch.float32:
        return exact
    # Raised by half a unit in the last place (or half a subnormal step) before rounding to nearest, so the stored scale is never below
    # the exact one.
    nudged = torch.maximum(exact * (1 + SCALE_ULP[dtype] / 2), exact + TINY[dtype] / 2)
    return as_stored(nudged, dtype)


def as_stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 x rounded to ``dtype``, in compiled code too: codes must be made from the stored number.

    Inductor keeps float32 where a 16-bit number is widened again at once, and it removes a view of the bits that changes nothing. Inverting
    the bits twice is a change that it leaves to the compiler after it.
    """
    near = x.to(dtype)
    return near.view(torch.int16).bitwise_not().bitwise_not().view(dtype) if dtype.itemsize == 2 else near


@dataclasses.dataclass(frozen=True)
class Symmetric(Windowed, LowBit):
    """Symmetric codes with one scale per token and head, per channel group, or per write."""

    granularity: Granularity = Granularity.TOKEN
    group: int = DEFAULT_GROUP
    scale_dtype: torch.dtype = torch.float16

    qmax: ClassVar[float]
    bits: ClassVar[int]
    parts: ClassVar[int] = 1
    e4m3: ClassVar[bool] = False
    source: ClassVar[str] = "KV Cache Quantization: FP8, INT8, INT4, Per-Token Scaling; Quantization Masterclass 6"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            isinstance(self.granularity, Granularity), self.name, "granularity",
            "one of " + ", ".join(g.value for g in Granularity), self.granularity, "pass a Granularity or its name",
        )
        require(
            isinstance(self.group, int) and self.group >= LEAST_GROUP and self.group & (self.group - 1) == 0, self.name, "group",
            f"a power of two, at least {LEAST_GROUP}", self.group, f"{DEFAULT_GROUP} is the usual choice",
        )
        require_scale_dtype(self.scale_dtype, self.name)

    @classmethod
    def variants(cls) -> tuple[Symmetric, ...]:
        default = cls()
        changes: list[dict[str, Any]] = [
            *({"granularity": item} for item in Granularity), *({"scale_dtype": item} for item in SCALE_DTYPES),
            {"granularity": Granularity.GROUP, "group": 8}, {"granularity": Granularity.GROUP, "group": 64, "scale_dtype": torch.float32},
            {"rotate": Rotate.KV, "sinks": 5}, {"window": 32}, {"rotate": Rotate.KV, "sinks": 5, "window": 16},
        ]
        return tuple(dict.fromkeys((default, *(dataclasses.replace(default, **change) for change in changes))))

    @property
    def by_token(self) -> bool:
        return self.granularity is not Granularity.TENSOR

    @property
    def largest(self) -> float:
        ulp = SCALE_ULP[self.scale_dtype]
        return min(self.qmax * torch.finfo(self.scale_dtype).max, torch.finfo(torch.float32).max) / (1 + 2 * ulp)

    @property
    def warning(self) -> str | None:  # type: ignore[override]
        """The report's warning about this setting, or None."""
        if self.granularity is Granularity.TENSOR:
            return "granularity 'tensor' lets one scale cover all heads of a write: for comparison only"
        return None

    def absmax(self, head_dim: int) -> AbsMax | None:
        if self.granularity is Granularity.TENSOR or not self.in_kernels:
            return None
        return AbsMax(self.bits, self.parts, self.channels_per_scale(head_dim), self.qmax, self.e4m3)

    def channels_per_scale(self, head_dim: int) -> int:
        """Return the number of consecutive channels of a head that one stored scale covers.

        The default group adapts to the head: the whole head if it is no larger, else the largest power of two that divides both.
        """
        if self.granularity is not Granularity.GROUP:
            return head_dim
        if self.group != DEFAULT_GROUP:
            return self.group
        return head_dim if head_dim <= DEFAULT_GROUP else math.gcd(head_dim, DEFAULT_GROUP)

    def check(self, slot: SlotSpec) -> None:
        super().check(slot)
        require_divides(self.parts, slot, self.name, "codes per byte")
        group = self.channels_per_scale(slot.head_dim)
        if group < LEAST_GROUP and group != slot.head_dim:
            raise HeadDimNotDivisible(scheme=self.name, what="group", head_dim=slot.head_dim, by=LEAST_GROUP)
        require_divides(group, slot, self.name, "group")

    def layout(self, slot: SlotSpec) -> Layout:
        return Layout((
            PlaneSpec("codes", self.word_dtype, slot.head_dim // self.parts),
            PlaneSpec("scales", self.scale_dtype, slot.head_dim // self.channels_per_scale(slot.head_dim)),
        )).windowed(slot, self.window).with_sinks(slot, self.sinks)

    def format(self, slot: SlotSpec) -> KernelFormat:
        return KernelFormat(self.word_dtype, self.parts, self.channels_per_scale(slot.head_dim), True, self.unpack)

    @property
    def word_dtype(self) -> torch.dtype:
        """The dtype of one stored word."""
        return torch.uint8

    def unpack(self, words: torch.Tensor, part: int) -> torch.Tensor:
        """Return the values before scaling of part ``part`` of every word, float32."""
        raise NotImplementedError

    def pack(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return words [..., D // parts] of x / scale, float32 [..., D]."""
        raise NotImplementedError

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        del fixed
        x = x_BKSD.to(torch.float32)
        group = self.channels_per_scale(x.shape[-1])
        grouped = torch.unflatten(x, -1, (x.shape[-1] // group, group))
        amax = grouped.abs().amax(dim=-1, keepdim=True)
        if self.granularity is Granularity.TENSOR:
            amax = amax.amax(dim=(1, 2), keepdim=True).expand(-1, x.shape[1], x.shape[2], -1, -1)
        scale = stored_scale(amax, self.qmax, self.scale_dtype)
        scaled = (grouped / scale.to(torch.float32)).flatten(-2)
        return self.pack(scaled), scale.squeeze(-1)

    reach: ClassVar[sympy.Expr] = sympy.Rational(1, 2)
    """Half the distance between neighbouring codes, in scales."""

    @property
    def per_scale(self) -> sympy.Expr:
        """The largest error of a channel as a multiple of its stored scale.

        It includes the float32 rounding of x / scale and of code * scale, 2 units at qmax.
        """
        return self.reach + sympy.Float(self.qmax * 2.0**-22)

    def radius(self, slot: SlotSpec) -> sympy.Expr | None:
        del slot
        return STEP * self.per_scale + TINIEST

    def bound(self, slot: SlotSpec) -> sympy.Expr:
        del slot
        return self.largest_scale() * self.per_scale

    def largest_scale(self) -> sympy.Expr:
        """Return an upper bound on the stored scale, as an expression in AMAX: the exact scale plus one unit in its last place.

        At least the dtype's ``TINY`` is added.
        """
        ulp, tiny = SCALE_ULP[self.scale_dtype], TINY[self.scale_dtype]
        return sympy.Max(AMAX / sympy.Float(self.qmax) * (1 + sympy.Float(ulp)), AMAX / sympy.Float(self.qmax) + sympy.Float(tiny))


@dataclasses.dataclass(frozen=True)
class Int8(Symmetric):
    """Eight-bit integers in [-127, 127]; one scale per token and head by default."""

    name: ClassVar[str] = "int8"
    kernel_encoding: ClassVar[bool] = True
    qmax: ClassVar[float] = 127.0
    bits: ClassVar[int] = 8

    @property
    def word_dtype(self) -> torch.dtype:
        return torch.int8

    def unpack(self, words: torch.Tensor, part: int) -> torch.Tensor:
        del part
        return words.to(torch.float32)

    def pack(self, scaled: torch.Tensor) -> torch.Tensor:
        return torch.round(scaled).clamp(-127, 127).to(torch.int8)


@dataclasses.dataclass(frozen=True)
class Int4(Symmetric):
    """Four-bit integers in [-7, 7], two to the byte, part 0 in the low nibble; groups of 32 channels, or of the most up to 32 that fit."""

    granularity: Granularity = Granularity.GROUP

    name: ClassVar[str] = "int4"
    kernel_encoding: ClassVar[bool] = True
    qmax: ClassVar[float] = 7.0
    bits: ClassVar[int] = 4
    parts: ClassVar[int] = 2

    def unpack(self, words: torch.Tensor, part: int) -> torch.Tensor:
        return (((words >> (4 * part)) & 15).to(torch.int32) - 8).to(torch.float32)

    def pack(self, scaled: torch.Tensor) -> torch.Tensor:
        codes = (torch.round(scaled).clamp(-7, 7) + 8).to(torch.uint8)
        low, high = codes.chunk(2, dim=-1)
        return low | (high << 4)


@dataclasses.dataclass(frozen=True)
class Fp8(Symmetric):
    """e4m3 floats by torch's conversion, stored as bytes; one scale per token and head by default."""

    name: ClassVar[str] = "fp8"
    kernel_encoding: ClassVar[bool] = True
    qmax: ClassVar[float] = 448.0
    e4m3: ClassVar[bool] = True
    # Scaled values reach 448, where neighboring floats are 32 apart.
    reach: ClassVar[sympy.Expr] = sympy.Integer(16)
    bits: ClassVar[int] = 8

    def unpack(self, words: torch.Tensor, part: int) -> torch.Tensor:
        del part
        return words.view(torch.float8_e4m3fn).to(torch.float32)

    def pack(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
