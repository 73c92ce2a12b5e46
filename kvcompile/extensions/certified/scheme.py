"""certified: int8 keys and int4 values whose error is bounded at run time ("Runtime-Certified Bounded-Error Quantized Attention", 2.3).

Keys: eight bits per channel of a block of 16 tokens, affine, step = (max - min) / 255, zero = min + 128 step, float32.
Steps have 16 significant bits, rounded up, so that code * step is exact: the notes then hold for every decoder, whether or not it adds the
zero point by a fused instruction.
Values: four bits per token in groups of 16 channels, with float16 scale and zero point, encoded as by ``kivi``.
Each block has notes: of keys kappa = max_t |k - decoded|_2 and mu = max_t |k|_2, of values eta = max_t |v - decoded|_2 and
nu = max_t |v|_2, over originals and float32 decoded tokens, rounded up. The newest 16 tokens stay in full precision, so the incomplete
block is always among them. The originals (tier 2: every token in full precision) are the last plane that grows.

Differences from the paper, and their reasons:

* kappa and mu: the paper has neither. With kappa Cauchy-Schwarz gives a smaller bound on a logit's error for most
  queries (bounds.py, theorem 1); mu bounds the rounding of the dot products. All notes take 1 byte per token and head.
* The value's zero point is rounded down and its scale up, so that rounding never clips.
* Tier 2 is in device memory, or with ``tier2=host`` in pinned host memory, which the same kernels read and write in place.
* With ``tier2=host`` recently promoted blocks are also cached in device memory, ``scratch`` of keys and ``value_scratch`` of
  values for each kv head of a row: the plane ``scratch``, which attention writes, has that many slots, in sets of 16. Block n belongs
  to set n modulo the number of sets. The plane ``places`` holds each block's slot in its set plus one, and the step of its last use.
  Zero means not cached, and is part of a block's encoding: an append that writes a block's originals also writes the zero, so nothing else
  needs to invalidate the scratch.
* ``values=full`` keeps values in full precision on the device, without codes: the paper's int8 keys with full-precision
  values. The paper counts that as 75% of dense; with the keys' steps and zero points it is 87.7%, 449 of 512 bytes per token and head at
  D = 128.
* The radius includes the rounding of the quotient to float32 and the clipping that it causes; the paper assumes none.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import ClassVar

import sympy
import torch

from kvcompile.errors import PairedSchemesDiffer
from kvcompile.schemes.asymmetric import Axis, Kivi
from kvcompile.schemes.base import AMAX, SPREAD, Planes, Scheme, require, require_divides
from kvcompile.schemes.certificate.policy import DEFAULTS, parse_policy
from kvcompile.schemes.certificate.telemetry import TELEMETRY_PLANE
from kvcompile.schemes.dense import Dense
from kvcompile.types import PAGE, Extent, KernelFormat, KeyOrValue, Layout, PlaneSpec, Role, SlotSpec

BLOCK = 16
"""Tokens of a block."""


ORIGINALS = "originals"
"""The name of the plane that holds every token in full precision: tier 2."""

SET = 16
"""Slots of a set of the scratch: a block may be in any slot of its set."""

SCRATCH = "scratch"
"""The name of the plane that caches blocks of originals on the device."""

PLACES = "places"
"""The name of the plane of blocks' slots in the scratch, int32: the slot in the set plus one, zero if not cached; the step of the last use.
"""

MOST_SCRATCH = 2**20
"""Largest number of blocks in a scratch: 16M tokens."""


class Tier2(enum.Enum):
    """The memory of the originals: the device's, or pinned host memory (without CUDA the two are the same)."""

    DEVICE = "device"
    HOST = "host"


class ValueStorage(enum.Enum):
    """The storage of values: four-bit codes, or full precision."""

    INT4 = "int4"
    FULL = "full"


Values = ValueStorage
"""The name in pickles of version 0.1 (``files.pickled``)."""


def _as_integer(words: torch.Tensor, part: int) -> torch.Tensor:
    del part
    return words.to(torch.float32)


def largest_norm(x_BKSD: torch.Tensor) -> torch.Tensor:
    """Return max_t |x_t|_2 of each block, float32 [B, K, S / 16], rounded up; NaN and Inf become NaN."""
    norms = torch.linalg.vector_norm(x_BKSD.to(torch.float64), dim=-1).unflatten(-1, (-1, BLOCK)).amax(-1)
    # The margin also covers a float64 norm that is summed in another order when it is checked.
    above = (norms * (1 + 2.0**-22) + 2.0**-149).to(torch.float32)
    return torch.where(torch.isfinite(above), torch.where(norms == 0, 0, above), float("nan"))


def _sixteen_bits(x: torch.Tensor) -> torch.Tensor:
    """Return nonnegative float32 numbers rounded up to 16 significant bits, in the shape of ``x``; NaN and Inf are unchanged."""
    return ((x.view(torch.int32) + 0xFF) & ~0xFF).view(torch.float32)


@dataclasses.dataclass(frozen=True)
class Certified(Scheme):
    """The scheme certified: int8 keys and int4 values with the norms that certificates need, and all tokens in full precision in tier 2."""

    group: int = 16
    certify: str = DEFAULTS
    key_or_value: KeyOrValue = KeyOrValue.AUTO
    tier2: Tier2 = Tier2.DEVICE
    scratch: int = 1024
    value_scratch: int = 256
    values: ValueStorage = ValueStorage.INT4

    name: ClassVar[str] = "certified"
    renamed: ClassVar[Mapping[str, str]] = {"half": "key_or_value"}
    source: ClassVar[str] = "Runtime-Certified Bounded-Error Quantized Attention, sections 2.3 and 3.1"
    window = BLOCK
    attention: ClassVar[str] = "certified_site"
    attention_writes: ClassVar[tuple[str, ...]] = (TELEMETRY_PLANE.name, PLACES, SCRATCH)
    attention_writes_values: ClassVar[tuple[str, ...]] = (PLACES, SCRATCH)
    kernels: ClassVar[str | None] = "kvcompile.extensions.certified.plugin"
    warning: ClassVar[str | None] = (
        "certified keeps full-precision keys and values next to the codes or (tier2=host) in pinned host memory, so it saves device memory "
        "with tier2=host only; its kernels are for CUDA, and elsewhere every step reads everything"
    )

    def __post_init__(self) -> None:
        require(
            isinstance(self.group, int) and 8 <= self.group <= PAGE and PAGE % self.group == 0, self.name, "group",
            f"a power of two from 8 to {PAGE}", self.group, "16 is the paper's setting",
        )
        require(isinstance(self.certify, str) and bool(self.certify), self.name, "certify", "text like v_tol:0.02/rank:1", self.certify,
                "leave it out for the paper's policy, or pass backend(certify=Certify(...))")
        if self.certify != DEFAULTS:
            parse_policy(self.certify)
        require(
            isinstance(self.key_or_value, KeyOrValue), self.name, "key_or_value", "auto, key or value", self.key_or_value,
            "auto takes the role of the slot",
        )
        require(isinstance(self.tier2, Tier2), self.name, "tier2", "device or host", self.tier2, "host is pinned memory, read over the bus")
        for option in ("scratch", "value_scratch"):
            blocks = getattr(self, option)
            require(
                type(blocks) is int and 0 <= blocks <= MOST_SCRATCH and blocks % SET == 0, self.name, option,
                f"a number of blocks of {BLOCK} tokens, a multiple of {SET} up to {MOST_SCRATCH}", blocks,
                "0 reads tier 2 over the bus at every step; tier2=device needs no scratch",
            )
        right = isinstance(self.values, ValueStorage)
        require(right, self.name, "values", "int4 or full", self.values, "int4 is the paper's setting")

    @classmethod
    def variants(cls) -> tuple[Scheme, ...]:
        return cls(), cls(values=ValueStorage.FULL)

    def for_role(self, role: Role) -> Certified:
        return dataclasses.replace(self, key_or_value=self.key_or_value.for_role(role))

    @property
    def block(self) -> int:
        return BLOCK

    @property
    def largest(self) -> float:
        return self.value_scheme.largest

    @property
    def value_scheme(self) -> Kivi:
        """The scheme that encodes values as four-bit codes."""
        return Kivi(bits=4, group=self.group, window=max(self.group, BLOCK), axis=Axis.TOKEN)

    def _is_keys(self, slot: SlotSpec) -> bool:
        return self.for_role(slot.role).key_or_value is KeyOrValue.KEY

    def coded(self, slot: SlotSpec) -> bool:
        """Return whether a slot's tokens are stored as codes, besides their originals."""
        return self._is_keys(slot) or self.values is ValueStorage.INT4

    def check_pair(self, keys: Scheme, values: Scheme, latent: bool, path: str) -> None:
        if keys != values:
            raise PairedSchemesDiffer(scheme=self.name, keys=keys.spec(), values=values.spec(), path=path)
        super().check_pair(keys, values, latent, path)

    def certifying(self, certify: str) -> Certified:
        return dataclasses.replace(self, certify=certify)

    def check(self, slot: SlotSpec) -> None:
        if not self._is_keys(slot) and self.coded(slot):
            require_divides(self.group, slot, self.name, "group")

    def layout(self, slot: SlotSpec) -> Layout:
        rows, keys = PAGE // BLOCK, self._is_keys(slot)
        own: tuple[PlaneSpec, ...] = ()
        if keys:
            own = (
                PlaneSpec("codes", torch.int8, slot.head_dim), PlaneSpec("scales", torch.float32, slot.head_dim, rows),
                PlaneSpec("zeros", torch.float32, slot.head_dim, rows),
            )
        elif self.coded(slot):
            own = self.value_scheme.layout(slot).planes[:3]
        host = self.tier2 is Tier2.HOST and self.coded(slot)
        notes = PlaneSpec("notes", torch.float32, 2, rows)
        originals = PlaneSpec(ORIGINALS, slot.dtype, slot.head_dim, host=host, originals=True)
        grown = (*own, notes, originals) if self.coded(slot) else (originals, notes)
        telemetry = (TELEMETRY_PLANE,) if keys else ()
        if not (slots := self.slots(slot)):
            return Layout((*Layout(grown).windowed(slot, self.window).planes, *telemetry))
        places = PlaneSpec(PLACES, torch.int32, 2, rows, placed=True)
        scratch = PlaneSpec(SCRATCH, slot.dtype, slot.head_dim, slots * BLOCK, Extent.ROW, tally=True, placed=True)
        return Layout((*Layout((*grown, places)).windowed(slot, self.window).planes, *telemetry, scratch))

    def slots(self, slot: SlotSpec) -> int:
        """Return the number of scratch slots for each kv head of a batch row, a multiple of the 16 slots of a set; 0 without a scratch."""
        if self.tier2 is not Tier2.HOST or not self.coded(slot):
            return 0
        return self.scratch if self._is_keys(slot) else self.value_scratch

    def planes_read(self, slot: SlotSpec) -> int:
        return 5 if self.coded(slot) else 2

    def format(self, slot: SlotSpec) -> KernelFormat:
        if self._is_keys(slot):
            return KernelFormat(torch.int8, 1, 1, True, _as_integer, block=BLOCK, zeros=True)
        return self.value_scheme.format(slot) if self.coded(slot) else Dense().format(slot)

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        del fixed
        assert self.key_or_value is not KeyOrValue.AUTO, "keys or values? call for_role(role) first"
        x = x_BKSD.to(torch.float32)
        role = Role.KEY if self.key_or_value is KeyOrValue.KEY else Role.VALUE
        slot = SlotSpec(x.shape[1], x.shape[3], x.dtype, role)
        if not self.coded(slot):
            # A residual of zero, or NaN if a value is not finite.
            return x_BKSD, torch.stack([largest_norm(x - x), largest_norm(x)], dim=-1)
        coded = self._encode_keys(x) if role is Role.KEY else self.value_scheme.encode(x)
        decoded = self.decode(coded, slot)
        # In float64: the difference of two float32 numbers is exact there, or close to it.
        residual = x.to(torch.float64) - decoded.to(torch.float64)
        made = *coded, torch.stack([largest_norm(residual), largest_norm(x)], dim=-1), x_BKSD
        if not self.slots(slot):
            return made
        return *made, torch.zeros(*x.shape[:2], x.shape[2] // BLOCK, 2, dtype=torch.int32, device=x.device)

    def _encode_keys(self, x: torch.Tensor) -> Planes:
        grouped = x.unflatten(2, (-1, BLOCK))
        low, high = grouped.amin(3), grouped.amax(3)
        step = _sixteen_bits((high - low) / 255)
        zero = low + 128 * step
        # NaN or Inf makes the scale of the whole channel of the block NaN.
        step = torch.where(torch.isfinite(zero) & torch.isfinite(high - low), step, float("nan"))
        apart = grouped - zero.unsqueeze(3)
        codes = torch.round(apart / torch.where(step == 0, 1, step).unsqueeze(3))
        # A channel of zero range has codes of zero, and its zero point is its value.
        codes = torch.where((step == 0).unsqueeze(3), 0, codes).clamp(-128, 127).nan_to_num()
        return codes.to(torch.int8).flatten(2, 3), step, zero

    def bound(self, slot: SlotSpec) -> sympy.Expr | None:
        if not self._is_keys(slot):
            return self.value_scheme.bound(slot) if self.coded(slot) else sympy.Integer(0)
        return SPREAD / 510 + (AMAX + SPREAD) * sympy.Float(2.0**-20) + sympy.Float(2.0**-116)
