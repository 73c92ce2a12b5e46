"""kivi: asymmetric min-max codes, keys per channel, values per token ("KIVI", Liu et al. 2024, section 3; "SQuat", Table 1).

zero = min, scale = (max - min) / (2^bits - 1), code = rne((x - zero) / scale). Keys share a scale along ``group`` tokens of one channel,
since some channels of keys are far from zero and wide in every token; values share one along ``group`` channels of one token. The newest
``window`` tokens stay in full precision.

Differences from the sources, and why:

* The zero point is rounded DOWN and the scale UP to their stored dtype, and codes are made from the stored numbers, so that rounding them
  never clips: the error is at most half a step of the stored scale.
* The scale covers max - (stored zero). If rounding changes the zero point, a group of equal values still decodes to its value: the
  remainder has a scale of its own.
* NaN or Inf in a group makes its scale NaN.
* The sources encode a whole window of keys at once, when it is full, and keep its buffer allocated. Here keys roll as values do: codes of a
  block are made when the block is complete, and its tokens are read from the window while they are in it. The bytes are the same, and never
  fewer than ``window`` keys are exact.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, ClassVar, cast

import sympy
import torch

from kvcompile.schemes.base import AMAX, SPREAD, Planes, Scheme, optional, require, require_divides
from kvcompile.schemes.certificate import bounds
from kvcompile.schemes.certificate.bounds import STEP, ZERO
from kvcompile.schemes.low_bit import LowBit
from kvcompile.schemes.rotation import Rotate
from kvcompile.schemes.symmetric import SCALE_ULP, TINY, as_stored, require_scale_dtype, rounded_up
from kvcompile.types import PAGE, KernelFormat, Layout, MinMax, PlaneSpec, Role, SlotSpec


class Axis(enum.Enum):
    """The axis along which elements share a scale: tokens of one channel, or channels of one token.

    AUTO: CHANNEL for keys, TOKEN for values.
    """

    AUTO = "auto"
    CHANNEL = "channel"
    TOKEN = "token"


BITS = (2, 3, 4)
LEAST_WINDOW = 32
"""The default window where a group is no larger; else it is one group."""
MOST_GROUP = 128
"""Largest group; of keys per channel ``PAGE``, whose scales are rows of one page."""
PARTS = {2: 4, 3: 8, 4: 2, 5: 8, 8: 1}
"""Codes per word of the planar layout, by bits."""
SEGMENTS = {2: 1, 3: 3, 4: 1, 5: 5, 8: 1}
"""Bytes per word, by bits: eight codes of three or five bits take as many bytes, each in a segment of its own."""


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes int32 [..., D] as bytes [..., D * bits / 8]; part i of a word holds the i-th of ``PARTS[bits]`` runs of channels."""
    codes = codes.to(torch.int64) if SEGMENTS[bits] > 4 else codes
    words = torch.zeros_like(codes[..., : codes.shape[-1] // PARTS[bits]])
    for part, run in enumerate(codes.chunk(PARTS[bits], dim=-1)):
        words = words | (run << (bits * part))
    return torch.cat([(words >> (8 * byte)) & 255 for byte in range(SEGMENTS[bits])], dim=-1).to(torch.uint8)


def _unpack2(words: torch.Tensor, part: int) -> torch.Tensor:
    return ((words >> (2 * part)) & 3).to(torch.float32)


def _unpack3(words: torch.Tensor, part: int) -> torch.Tensor:
    return ((words >> (3 * part)) & 7).to(torch.float32)


def _unpack4(words: torch.Tensor, part: int) -> torch.Tensor:
    return ((words >> (4 * part)) & 15).to(torch.float32)


def _unpack5(words: torch.Tensor, part: int) -> torch.Tensor:
    return ((words >> (5 * part)) & 31).to(torch.float32)


def _unpack8(words: torch.Tensor, part: int) -> torch.Tensor:
    del part
    return words.to(torch.float32)


UNPACK = {2: _unpack2, 3: _unpack3, 4: _unpack4, 5: _unpack5, 8: _unpack8}


def rounded_down(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 ``x`` rounded down to ``dtype``, in its shape; infinite if x is beyond the dtype's range, NaN stays."""
    near = as_stored(x, dtype)
    below = torch.nextafter(near, torch.full_like(near, float("-inf"))) if dtype == torch.float32 else _before(near)
    return torch.where((near.to(torch.float32) > x) & torch.isfinite(near), below, near)


def _before(x: torch.Tensor) -> torch.Tensor:
    """Return the next smaller number of the same dtype for each finite element of ``x``, whose dtype is float16 or bfloat16."""
    raw = x.view(torch.int16)
    # Read as an integer, a positive float grows with its bits and a negative one falls; below both zeros is the smallest negative
    # subnormal.
    step = torch.where(raw < 0, raw + 1, raw - 1)
    least = torch.full_like(raw, -32768 + 1)
    return torch.where((raw & 32767) == 0, least, step).view(x.dtype)


def stored_range(grouped: torch.Tensor, dim: int, steps: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scale, zero point) as stored, for each group along ``dim`` of a float32 tensor, with size 1 along ``dim``.

    ``steps``: the number of scales from a group's minimum to its maximum.
    """
    low, high = grouped.amin(dim, keepdim=True), grouped.amax(dim, keepdim=True)
    zero = rounded_down(low, dtype)
    spread = high - zero.to(torch.float32)
    # A product by the reciprocal, which every device and compiler rounds alike; see ``stored_scale``.
    scale = rounded_up(spread * (1 / steps), dtype)
    return torch.where(spread == 0, torch.zeros_like(scale), scale), zero


def in_scales(grouped: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Return (grouped - zero) / scale in float32, in the shape of ``grouped``; 0 where ``stored_range`` gave the scale 0.

    All values of such a group equal its zero point.
    """
    step = scale.to(torch.float32)
    return (grouped - zero.to(torch.float32)) / torch.where(step == 0, torch.ones_like(step), step)


@dataclasses.dataclass(frozen=True)
class Kivi(LowBit):
    """Asymmetric codes, keys per channel and values per token, the newest tokens in full precision; 2 bits by default.

    ``window`` None: one group, at least 32 tokens.
    """

    bits: int = 2
    group: int = 32
    window: int = dataclasses.field(default=cast(int, None), metadata=optional(int))
    axis: Axis = Axis.AUTO
    scale_dtype: torch.dtype = torch.float16
    pre_rope: bool = False

    name: ClassVar[str] = "kivi"
    kernel_encoding: ClassVar[bool] = True
    source: ClassVar[str] = "KIVI: Asymmetric 2bit Quantization for KV Cache, section 3; SQuat, Table 1"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bits in BITS, self.name, "bits", "2, 3 or 4", self.bits, "2 is the paper's setting")
        require(
            isinstance(self.group, int) and 8 <= self.group <= MOST_GROUP and MOST_GROUP % self.group == 0, self.name, "group",
            f"a power of two from 8 to {MOST_GROUP}", self.group, "32 is the paper's setting",
        )
        if self.window is None:
            object.__setattr__(self, "window", max(LEAST_WINDOW, self.group))
        require(
            isinstance(self.window, int) and self.window >= self.group and self.window % self.group == 0, self.name, "window",
            f"a multiple of the group ({self.group}), at least one group", self.window, f"{self.group} or {4 * self.group} are usual",
        )
        require(isinstance(self.axis, Axis), self.name, "axis", "auto, channel or token", self.axis, "auto is the paper's setting")
        require_scale_dtype(self.scale_dtype, self.name)
        require(isinstance(self.pre_rope, bool), self.name, "pre_rope", "True or False", self.pre_rope, "False is the usual choice")
        require(
            not self.pre_rope or self.rotate is Rotate.NONE, self.name, "rotate", "none where keys are stored before RoPE", self.rotate,
            "RoPE turns pairs of channels, which a rotation mixes: leave pre_rope or rotate out",
        )

    @classmethod
    def variants(cls) -> tuple[Scheme, ...]:
        default = cls()
        changes: list[dict[str, Any]] = [
            {"bits": 4}, {"bits": 3}, {"group": 16, "window": 64}, {"scale_dtype": torch.bfloat16},
            {"scale_dtype": torch.float32, "bits": 4}, {"group": 64, "window": 64}, {"rotate": Rotate.KV, "order": 32, "sinks": 5},
        ]
        return (default, *(dataclasses.replace(default, **change) for change in changes))

    def for_role(self, role: Role) -> Kivi:
        axis = self.axis
        if axis is Axis.AUTO:
            axis = Axis.CHANNEL if role is Role.KEY else Axis.TOKEN
        return dataclasses.replace(self, axis=axis, pre_rope=self.pre_rope and role is Role.KEY)

    @property
    def block(self) -> int:
        return self.group if self.axis is Axis.CHANNEL else 1

    def minmax(self, head_dim: int) -> MinMax | None:
        del head_dim
        if not self.in_kernels:
            return None
        return MinMax(self.bits, PARTS[self.bits], SEGMENTS[self.bits], self.group, self.block)

    @property
    def largest(self) -> float:
        # The range of a group is up to twice its largest magnitude.
        return min(torch.finfo(self.scale_dtype).max, torch.finfo(torch.float32).max / 4)

    def check(self, slot: SlotSpec) -> None:
        super().check(slot)
        require_divides(PARTS[self.bits], slot, self.name, "codes per word")
        if self.for_role(slot.role).axis is Axis.TOKEN:
            require_divides(self.group, slot, self.name, "group")
            return
        require(
            self.group <= PAGE, self.name, "group", f"at most {PAGE} tokens for {slot.role.value}s that share scales along tokens",
            self.group, f"values take {self.group} channels a scale: 'k={self.name}(group={PAGE}),v={self.name}(group={self.group})'",
        )

    def layout(self, slot: SlotSpec) -> Layout:
        own = self.for_role(slot.role)
        rows, width = (PAGE // self.group, slot.head_dim) if own.axis is Axis.CHANNEL else (PAGE, slot.head_dim // self.group)
        return Layout((
            PlaneSpec("codes", torch.uint8, slot.head_dim * self.bits // 8),
            PlaneSpec("scales", self.scale_dtype, width, rows), PlaneSpec("zeros", self.scale_dtype, width, rows),
        )).windowed(slot, self.window).with_sinks(slot, self.sinks)

    def format(self, slot: SlotSpec) -> KernelFormat:
        own = self.for_role(slot.role)
        group, block = (1, self.group) if own.axis is Axis.CHANNEL else (self.group, 1)
        return KernelFormat(
            torch.uint8, PARTS[self.bits], group, True, UNPACK[self.bits], block=block, zeros=True, segments=SEGMENTS[self.bits]
        )

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        del fixed
        codes, scale, zero = self.quantize(x_BKSD)
        return pack(codes, self.bits), scale, zero

    def quantize(self, x_BKSD: torch.Tensor) -> Planes:
        """Return codes int32 [B, K, S, D], and scales and zero points in the layout's shapes."""
        assert self.axis is not Axis.AUTO, "keys or values? call for_role(role) first"
        x = x_BKSD.to(torch.float32)
        dim = -2 if self.axis is Axis.CHANNEL else -1
        grouped = torch.unflatten(x, dim, (x.shape[dim] // self.group, self.group))
        # [B, K, S / group, group, D] or [B, K, S, D / group, group]: the group axis is reduced to size 1.
        scale, zero = stored_range(grouped, dim, 2**self.bits - 1, self.scale_dtype)
        codes = torch.round(in_scales(grouped, scale, zero))
        codes = codes.clamp(0, 2**self.bits - 1).nan_to_num().to(torch.int32).flatten(dim - 1, dim)
        return codes, scale.squeeze(dim), zero.squeeze(dim)

    def radius(self, slot: SlotSpec) -> sympy.Expr | None:
        del slot
        # Half a step, and float32 rounding of x - zero, of the quotient and of code * scale + zero.
        return STEP / 2 + (ZERO + 2 * (2**self.bits - 1) * STEP) * sympy.Float(2.0**-21) + bounds.TINY

    def bound(self, slot: SlotSpec) -> sympy.Expr | None:
        del slot
        ulp, tiny, steps = sympy.Float(SCALE_ULP[self.scale_dtype]), sympy.Float(TINY[self.scale_dtype]), 2**self.bits - 1
        # The zero point is below the minimum by less than one unit in its last place; the scale is rounded up likewise.
        spread = SPREAD + AMAX * ulp + tiny
        scale = sympy.Max(spread / steps * (1 + ulp), spread / steps + tiny)
        # Half a step, and float32 rounding of x - zero, of the quotient and of code * scale + zero.
        return scale / 2 + (spread + AMAX) * sympy.Float(2.0**-21)
