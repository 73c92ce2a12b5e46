"""int8-static, fp8-static: eight-bit codes by scales that were measured beforehand, as vLLM and TensorRT-LLM have them.

    code = clamp(x / scale) rounded to int8 or e4m3;   value = code * scale

One scale for each layer and half (per tensor), or for each kv head of it (per head), float32; a token stores its codes and nothing
else. What follows from scales that are given:

* Values beyond the largest code saturate: their error is how far they are beyond it. ``bound`` says so: half a step within the
  range, the excess outside. ``radius`` is None, as what is stored does not tell a clipped value from one at the edge.
* No scale of a token can hold NaN, so codes do: int8 keeps -128 for it, which symmetric codes never use, e4m3 has a NaN of its own.
  NaN and Inf are both stored as NaN, Inf too: saturating it would make a number of it.
* Scales are data, constant planes of a store. The text of a scheme only says that they were measured, so equal layers share kernels.
* Nothing measured: one scale covers ``amax``. 448 is a scale of 1.0 for e4m3, which is what vLLM does with a checkpoint without
  scales; 32 for int8 is a guess. The report warns of both.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import sympy
import torch

from kvcompile.errors import BadScales, LatentNotHeld, ScalesMissing
from kvcompile.extensions.static_scales.scales import ModelScales, Scales, SiteScales
from kvcompile.schemes.base import AMAX, DATA, Planes, Scheme, require
from kvcompile.schemes.symmetric import stored_scale
from kvcompile.types import Extent, KernelFormat, Layout, PlaneSpec, SlotSpec, Static

LEAST_AMAX, MOST_AMAX = 2.0**-20, 2.0**20
NAN_BITS = 0x7FC00000
"""The bits of a float32 NaN: or-ed into those of any number they make it one."""


@dataclasses.dataclass(frozen=True)
class Calibrated(Scheme):
    """Eight-bit codes by static scales; its subclasses say which codes.

    ``measured``: scales were measured or read; ``calibrate``, ``load_scales`` and ``read_scales`` return schemes that have them.
    ``amax``: the magnitude that the scale covers where none was. ``scales``: of the whole model, or of one attention (``at``).
    """

    amax: float = 32.0
    measured: bool = False
    scales: ModelScales | SiteScales | None = dataclasses.field(default=None, metadata=DATA, repr=False)

    qmax: ClassVar[float]
    e4m3: ClassVar[bool] = False
    dynamic: ClassVar[str]
    """The name of the scheme that has the same codes and scales of its own for every token."""

    def __post_init__(self) -> None:
        require(
            isinstance(self.amax, float) and LEAST_AMAX <= self.amax <= MOST_AMAX, self.name, "amax",
            f"a float from {LEAST_AMAX:g} to {MOST_AMAX:g}", self.amax, "calibrate the model in place of choosing one",
        )
        require(isinstance(self.measured, bool), self.name, "measured", "True or False", self.measured, "load_scales says it for you")
        require(
            self.scales is None or self.measured, self.name, "scales", "scales of a measured scheme", "scales and measured=False",
            "pass measured=True with them",
        )

    @classmethod
    def variants(cls) -> tuple[Scheme, ...]:
        return (cls(), dataclasses.replace(cls(), amax=cls().amax / 3))

    def for_module(self, path: str) -> Calibrated:
        if not self.measured:
            return self
        if self.scales is None:
            raise ScalesMissing(path=path or "(unknown)", known="none were given")
        return dataclasses.replace(self, scales=self.scales.for_module(path)) if isinstance(self.scales, ModelScales) else self

    def display_name(self) -> str:
        if isinstance(self.scales, SiteScales):
            return f"{self.spec()} with scales {self.scales.key.digest} and {self.scales.value.digest}"
        return self.spec()

    @property
    def warning(self) -> str | None:  # type: ignore[override]
        """Return what the report must say about scales that nobody measured."""
        if self.measured:
            return None
        return f"scales were not calibrated: one covers magnitudes up to {self.amax:g}, and larger values are clipped"

    def static(self, head_dim: int) -> Static | None:
        del head_dim
        return Static(self.qmax, self.e4m3) if self.in_kernels else None

    def check(self, slot: SlotSpec) -> None:
        if isinstance(self.scales, SiteScales) and not self.scales.for_role(slot.role).fits(slot.heads):
            found = self.scales.for_role(slot.role).values.numel()
            raise BadScales(
                expected=f"one scale, or one for each of {slot.heads} kv heads, for the {slot.role.value}s", found=f"{found} scales",
                todo="calibrate this very model",
            )

    def check_pair(self, keys: Scheme, values: Scheme, latent: bool, path: str) -> None:
        super().check_pair(keys, values, latent, path)
        if latent and self.measured:
            raise LatentNotHeld(scheme=self.spec(), path=path)

    def layout(self, slot: SlotSpec) -> Layout:
        return Layout((
            PlaneSpec("codes", self.word_dtype, slot.head_dim),
            PlaneSpec("scales", torch.float32, 1, 1, Extent.BATCH, constant=True, encoding=True),
        ))

    def constants(self, slot: SlotSpec) -> dict[str, torch.Tensor]:
        return {"scales": self.scales_of(slot).values[:, None, None]}

    def scales_of(self, slot: SlotSpec) -> Scales:
        """The scales of a slot; raises ScalesMissing where they were measured and this is no scheme of one attention (``at``)."""
        if isinstance(self.scales, SiteScales):
            return self.scales.for_role(slot.role)
        if self.measured:
            raise ScalesMissing(path="(none was named)", known="ask at(path) for the scheme of one attention")
        return Scales(self.guessed())

    def guessed(self) -> torch.Tensor:
        """The scale [1] where none was measured."""
        return stored_scale(torch.tensor([self.amax], device="cpu"), self.qmax, torch.float32)

    @property
    def word_dtype(self) -> torch.dtype:
        """The dtype of one stored code."""
        raise NotImplementedError

    def format(self, slot: SlotSpec) -> KernelFormat:
        return KernelFormat(self.word_dtype, 1, slot.head_dim, False, self.unpack, static=True)

    def unpack(self, words: torch.Tensor, part: int) -> torch.Tensor:
        """The codes as float32 numbers, NaN where they say so."""
        raise NotImplementedError

    def pack(self, scaled: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        """Codes of x / scale, float32; NaN's where not ``finite``."""
        raise NotImplementedError

    def rounding(self, scale: sympy.Expr) -> sympy.Expr:
        """How far a code is at most from a value within the range, given AMAX."""
        raise NotImplementedError

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        """Codes alone; ``fixed``: the scales [1, 1, K, 1, 1], where none are given that of ``amax``."""
        if fixed:
            scale = fixed[0][0, 0]
        elif self.measured:
            raise ScalesMissing(path="(none was named)", known="encode takes the plane of scales behind the tokens")
        else:
            scale = self.guessed().to(x_BKSD.device)
        x = x_BKSD.to(torch.float32)
        return (self.pack(x / scale, torch.isfinite(x)),)

    def spoiled(self, heads: int, head_dim: int, device: torch.device | None = None) -> Planes:
        nothing = torch.zeros(1, heads, 1, head_dim, device=device)
        return (self.pack(nothing, nothing != 0),)

    def bound(self, slot: SlotSpec) -> sympy.Expr | None:
        """A step's part within the range, the excess beyond it; None for a model's scales, which are many."""
        if self.measured and not isinstance(self.scales, SiteScales):
            return None
        scales = self.scales_of(slot).values
        least, most = sympy.Float(float(scales.min())), sympy.Float(float(scales.max()))
        # Float32 rounding of x / scale and of code * scale, two units of the largest code; of the range, one.
        rounding = self.rounding(most) + most * sympy.Float(self.qmax * 2.0**-22)
        return rounding + sympy.Max(0, AMAX - least * sympy.Float(self.qmax * (1 - 2.0**-22)))


@dataclasses.dataclass(frozen=True)
class StaticInt8(Calibrated):
    """Eight-bit integers in [-127, 127], -128 for NaN; scales that were measured."""

    name: ClassVar[str] = "int8-static"
    append_kernel: ClassVar[str | None] = "kvcompile.extensions.static_scales.static_rows"
    kernel_encoding: ClassVar[bool] = True
    dynamic: ClassVar[str] = "int8"
    qmax: ClassVar[float] = 127.0
    source: ClassVar[str] = "static per-tensor scales of TensorRT-LLM (kv_cache_scaling_factor); per-head as in vLLM"

    @property
    def word_dtype(self) -> torch.dtype:
        return torch.int8

    def unpack(self, words: torch.Tensor, part: int) -> torch.Tensor:
        del part
        whole = words.to(torch.int32)
        # All ones below -127, else none.
        return (whole.to(torch.float32).view(torch.int32) | (((whole + 127) >> 31) & NAN_BITS)).view(torch.float32)

    def rounding(self, scale: sympy.Expr) -> sympy.Expr:
        return scale / 2

    def pack(self, scaled: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        return torch.where(finite, torch.round(scaled).clamp(-127, 127), -128.0).to(torch.int8)


@dataclasses.dataclass(frozen=True)
class StaticFp8(Calibrated):
    """e4m3 floats by the real conversion, kept as bytes; scales that were measured."""

    amax: float = 448.0

    name: ClassVar[str] = "fp8-static"
    append_kernel: ClassVar[str | None] = "kvcompile.extensions.static_scales.static_rows"
    kernel_encoding: ClassVar[bool] = True
    dynamic: ClassVar[str] = "fp8"
    qmax: ClassVar[float] = 448.0
    e4m3: ClassVar[bool] = True
    source: ClassVar[str] = "fp8 e4m3 KV cache of vLLM (k_scale, v_scale) and TensorRT-LLM (kv_cache_scaling_factor)"

    @property
    def word_dtype(self) -> torch.dtype:
        return torch.uint8

    def unpack(self, words: torch.Tensor, part: int) -> torch.Tensor:
        del part
        value = words.view(torch.float8_e4m3fn).to(torch.float32)
        # One for the two NaN codes; kernels convert their bytes to +-480.
        nan = (((words & 127) + 1) >> 7).to(torch.int32)
        return (value.view(torch.int32) | (nan * NAN_BITS)).view(torch.float32)

    def rounding(self, scale: sympy.Expr) -> sympy.Expr:
        # Three bits behind the leading one; below 2^-6 codes are 2^-9 apart; at the top, 32.
        return sympy.Min(16 * scale, sympy.Max(AMAX / 16, scale * sympy.Rational(1, 1024)))

    def pack(self, scaled: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        codes = torch.where(finite, scaled, 0.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.where(finite, codes, torch.full_like(codes, 127))


STATIC: tuple[type[Calibrated], ...] = (StaticInt8, StaticFp8)
"""The schemes with static scales."""


def static_of(name: str) -> type[Calibrated] | None:
    """The scheme with static scales of a name, its own or that of the scheme with the same codes; None where there is none."""
    return next((kind for kind in STATIC if name in {kind.name, kind.dynamic}), None)


def with_scales(kind: type[Calibrated], scales: ModelScales, **options: Any) -> Calibrated:
    """A scheme with the scales of a model."""
    return kind(measured=True, scales=scales, **options)
