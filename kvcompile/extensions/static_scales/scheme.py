"""int8-static, fp8-static: eight-bit codes by scales that were measured beforehand, as in vLLM and TensorRT-LLM.

    code = clamp(x / scale) rounded to int8 or e4m3;   value = code * scale

One scale for the keys and one for the values of each layer (per tensor), or one per kv head (per head), float32; a token stores only its
codes. Consequences of given scales:

* Values beyond the largest code saturate: their error is the excess. ``bound`` is half a step within the
  range, plus the excess outside. ``radius`` is None, since codes do not distinguish a clipped value from one at the edge.
* A token has no scale of its own that could be NaN, so codes hold NaN: int8 keeps -128 for it, which symmetric codes never use, e4m3 has
  a NaN. NaN and Inf are both stored as NaN: a saturated Inf would become a finite number.
* Scales are data, constant planes of a store. A scheme's text only states that they were measured, so equal layers share kernels.
* Without measurement one scale covers ``amax``. 448 is a scale of 1.0 for e4m3, which vLLM uses for a checkpoint without
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
from kvcompile.schemes.windowed import Windowed
from kvcompile.types import Extent, KernelFormat, Layout, PlaneSpec, SlotSpec, Static

LEAST_AMAX, MOST_AMAX = 2.0**-20, 2.0**20
NAN_BITS = 0x7FC00000
"""The bits of a float32 NaN: or'ed into those of any number they make it NaN."""


@dataclasses.dataclass(frozen=True)
class Calibrated(Windowed):
    """The base of the schemes with eight-bit codes by static scales; subclasses choose the codes.

    ``measured``: whether scales were measured or read, as in schemes from ``calibrate``, ``load_scales`` and ``read_scales``. ``amax``: the
    magnitude that the scale covers if none was measured. ``scales``: the scales of the whole model, or of one attention (``for_module``).
    """

    amax: float = 32.0
    measured: bool = False
    scales: ModelScales | SiteScales | None = dataclasses.field(default=None, metadata=DATA, repr=False)

    qmax: ClassVar[float]
    e4m3: ClassVar[bool] = False
    dynamic: ClassVar[str]
    """The name of the scheme with the same codes and a scale for every token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            isinstance(self.amax, float) and LEAST_AMAX <= self.amax <= MOST_AMAX, self.name, "amax",
            f"a float from {LEAST_AMAX:g} to {MOST_AMAX:g}", self.amax, "calibrate the model instead of choosing a value",
        )
        require(isinstance(self.measured, bool), self.name, "measured", "True or False", self.measured, "load_scales says it for you")
        require(
            self.scales is None or self.measured, self.name, "scales", "scales of a measured scheme", "scales and measured=False",
            "pass measured=True with them",
        )

    @classmethod
    def variants(cls) -> tuple[Scheme, ...]:
        return (cls(), dataclasses.replace(cls(), amax=cls().amax / 3), dataclasses.replace(cls(), window=32))

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
        """The report's warning about scales that were not measured; None for measured ones."""
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
        )).windowed(slot, self.window)

    def constants(self, slot: SlotSpec) -> dict[str, torch.Tensor]:
        return {"scales": self.scales_of(slot).values[:, None, None]}

    def scales_of(self, slot: SlotSpec) -> Scales:
        """Return the scales of a slot.

        Raises ScalesMissing for a measured scheme with the scales of a whole model; ``for_module`` selects those of one attention.
        """
        if isinstance(self.scales, SiteScales):
            return self.scales.for_role(slot.role)
        if self.measured:
            raise ScalesMissing(path="(none was named)", known="ask for_module(path) for the scheme of one attention")
        return Scales(self.guessed())

    def guessed(self) -> torch.Tensor:
        """Return the scale [1] that covers the magnitude ``amax``, for a scheme without measured scales."""
        return stored_scale(torch.tensor([self.amax], device="cpu"), self.qmax, torch.float32)

    @property
    def word_dtype(self) -> torch.dtype:
        """The dtype of one stored code."""
        raise NotImplementedError

    def format(self, slot: SlotSpec) -> KernelFormat:
        return KernelFormat(self.word_dtype, 1, slot.head_dim, False, self.unpack, static=True)

    def unpack(self, words: torch.Tensor, part: int) -> torch.Tensor:
        """Return stored codes as float32 numbers, NaN for the code of NaN."""
        raise NotImplementedError

    def pack(self, scaled: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        """Return the codes of ``scaled``, values in units of scales, float32; the code of NaN unless ``finite``."""
        raise NotImplementedError

    def rounding(self, scale: sympy.Expr) -> sympy.Expr:
        """Return a bound on the rounding error of a value within the range, an expression in AMAX."""
        raise NotImplementedError

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        """Return codes only; ``fixed``: the scales [1, 1, K, 1, 1]; without it the scale of ``amax``.

        Raises ScalesMissing for a measured scheme without ``fixed``.
        """
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
        """Return a bound on |x - decode(encode(x))| of one channel, in ``AMAX``: rounding in range plus the excess beyond it.

        None if ``scales`` are those of a whole model, which differ by attention.
        """
        if self.measured and not isinstance(self.scales, SiteScales):
            return None
        scales = self.scales_of(slot).values
        least, most = sympy.Float(float(scales.min())), sympy.Float(float(scales.max()))
        # Float32 rounding of x / scale and of code * scale: two units of the largest code; of the range: one.
        rounding = self.rounding(most) + most * sympy.Float(self.qmax * 2.0**-22)
        return rounding + sympy.Max(0, AMAX - least * sympy.Float(self.qmax * (1 - 2.0**-22)))


@dataclasses.dataclass(frozen=True)
class StaticInt8(Calibrated):
    """Eight-bit integers in [-127, 127], -128 for NaN, by measured scales."""

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
        # All ones for -128, else zero.
        return (whole.to(torch.float32).view(torch.int32) | (((whole + 127) >> 31) & NAN_BITS)).view(torch.float32)

    def rounding(self, scale: sympy.Expr) -> sympy.Expr:
        return scale / 2

    def pack(self, scaled: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        return torch.where(finite, torch.round(scaled).clamp(-127, 127), -128.0).to(torch.int8)


@dataclasses.dataclass(frozen=True)
class StaticFp8(Calibrated):
    """e4m3 floats as converted by torch, stored as bytes, by measured scales."""

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
        # 1 for the two NaN codes; kernels convert their bytes to +-480.
        nan = (((words & 127) + 1) >> 7).to(torch.int32)
        return (value.view(torch.int32) | (nan * NAN_BITS)).view(torch.float32)

    def rounding(self, scale: sympy.Expr) -> sympy.Expr:
        # Three mantissa bits; below 2^-6 codes are 2^-9 apart; at the top, 32.
        return sympy.Min(16 * scale, sympy.Max(AMAX / 16, scale * sympy.Rational(1, 1024)))

    def pack(self, scaled: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        codes = torch.where(finite, scaled, 0.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.where(finite, codes, torch.full_like(codes, 127))


STATIC: tuple[type[Calibrated], ...] = (StaticInt8, StaticFp8)
"""The schemes with static scales."""


def static_of(name: str) -> type[Calibrated] | None:
    """Return the scheme with static scales by its own name or that of the dynamic scheme with the same codes; None if there is none."""
    return next((kind for kind in STATIC if name in {kind.name, kind.dynamic}), None)


def with_scales(kind: type[Calibrated], scales: ModelScales, **options: Any) -> Calibrated:
    """Return a scheme of class ``kind`` with the measured scales of a model; ``options``: its other options."""
    return kind(measured=True, scales=scales, **options)
