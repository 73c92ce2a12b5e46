"""beyond: asymmetric codes by learned thresholds, decoded by learned levels ("Beyond: Better-than-Full-Precision KV Caches", section 3).

    x = (value - zero) / scale;   code = number of thresholds <= x;   value' = levels[code] * scale + zero

One table of 2^bits levels and 2^bits - 1 thresholds for each layer, keys or values, kv head and group of channels, shared by all
tokens; scale and zero point for each token and group. Keys are stored after RoPE. Differences from the paper, and their reasons:

* zero = min rounded DOWN and scale = (max - zero) / (2^bits - 1) rounded UP to their stored 16 bits, as in ``asymmetric``, and
  codes are computed with the stored numbers. So x leaves [0, 2^bits - 1] only by float32 rounding, nothing is clipped, and the paper's
  epsilon is not needed: a group of zero range has scale 0 and decodes to its value. Tables are in units of scales (``tables``).
* Levels may be anywhere; only thresholds are kept in order. The paper projects thresholds and does not mention levels: a level
  outside of a group's range extends it, and levels out of order still define a map. Both decode unchanged.
* A call that fills an empty cache attends to its dequantized tokens, as in the paper: decode steps do, and training did.
* NaN or Inf in a group makes its scale NaN.

Tables are data: constant planes of a store. A scheme's text only states that they were trained, so equal layers share kernels.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import sympy
import torch

from kvcompile.errors import BadTables, HeadDimNotDivisible, TablesMissing
from kvcompile.extensions.beyond.tables import ModelTables, SiteTables, Table, uniform_table, uniform_thresholds
from kvcompile.schemes.asymmetric import PARTS, SEGMENTS, UNPACK, in_scales, pack, stored_range
from kvcompile.schemes.base import AMAX, DATA, SPREAD, Planes, Scheme, require, require_divides
from kvcompile.schemes.certificate.bounds import STEP, ZERO
from kvcompile.schemes.certificate.bounds import TINY as TINIEST
from kvcompile.schemes.symmetric import SCALE_ULP, TINY, require_scale_dtype
from kvcompile.schemes.windowed import Windowed
from kvcompile.types import Bins, Extent, KernelFormat, Layout, PlaneSpec, SlotSpec

BITS, GROUPS = (2, 3, 4, 5), (32, 64, 128)
DEFAULT_GROUP, LEAST_GROUP = 32, 8


@dataclasses.dataclass(frozen=True)
class Beyond(Windowed):
    """The scheme beyond: codes by a table's thresholds and levels, a scale and zero point per token and group; uniform until learned.

    ``trained``: whether the tables were learned, as in schemes from ``load_tables`` and ``learn``. ``tables``: the tables of the whole
    model, or of one attention (``for_module``).

    Raises BadOption for other widths, group sizes or dtypes, and BadTables for tables of another width.
    """

    bits: int = 4
    group: int = 32
    scale_dtype: torch.dtype = torch.float16
    trained: bool = False
    tables: ModelTables | SiteTables | None = dataclasses.field(default=None, metadata=DATA, repr=False)

    name: ClassVar[str] = "beyond"
    append_kernel: ClassVar[str | None] = "kvcompile.extensions.beyond.threshold_rows"
    kernel_encoding: ClassVar[bool] = True
    prefill_reads_codes: ClassVar[bool] = True
    source: ClassVar[str] = "Beyond: Better-than-Full-Precision KV Caches via Learnable Non-Uniform Quantization, section 3"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bits in BITS, self.name, "bits", "2, 3, 4 or 5", self.bits, "4 is the paper's setting")
        require(self.group in GROUPS, self.name, "group", "32, 64 or 128", self.group, "32 is the paper's setting")
        require_scale_dtype(self.scale_dtype, self.name)
        require(isinstance(self.trained, bool), self.name, "trained", "True or False", self.trained, "load_tables says it for you")
        require(
            self.tables is None or self.trained, self.name, "tables", "tables of a trained scheme", "tables and trained=False",
            "pass trained=True with them",
        )
        for table in _tables(self.tables):
            if table.bits != self.bits:
                raise BadTables(expected=f"tables of {self.bits} bits", found=f"tables of {table.bits}", todo="load tables for these bits")

    @classmethod
    def variants(cls) -> tuple[Scheme, ...]:
        default = cls()
        changes: list[dict[str, Any]] = [
            {"bits": 2}, {"bits": 3}, {"bits": 5}, {"group": 64}, {"scale_dtype": torch.bfloat16},
            {"scale_dtype": torch.float32, "bits": 5}, {"window": 32},
        ]
        return (default, *(dataclasses.replace(default, **change) for change in changes))

    def for_module(self, path: str) -> Beyond:
        if not self.trained:
            return self
        if self.tables is None:
            raise TablesMissing(path=path or "(unknown)", known="none were given")
        return dataclasses.replace(self, tables=self.tables.for_module(path)) if isinstance(self.tables, ModelTables) else self

    def display_name(self) -> str:
        if isinstance(self.tables, SiteTables):
            return f"{self.spec()} with tables {self.tables.key.digest} and {self.tables.value.digest}"
        return self.spec()

    @property
    def largest(self) -> float:
        # The range of a group is up to twice its largest magnitude.
        return min(torch.finfo(self.scale_dtype).max, torch.finfo(torch.float32).max / 4)

    def channels(self, head_dim: int) -> int:
        """Return the number of consecutive channels that share a scale and a table: ``group``; the default shrinks to divide D."""
        if self.group != DEFAULT_GROUP:
            return self.group
        return head_dim if head_dim <= DEFAULT_GROUP else math.gcd(head_dim, DEFAULT_GROUP)

    def bins(self, head_dim: int) -> Bins | None:
        return Bins(self.bits, PARTS[self.bits], SEGMENTS[self.bits], self.channels(head_dim)) if self.in_kernels else None

    def check(self, slot: SlotSpec) -> None:
        require_divides(PARTS[self.bits], slot, self.name, "codes per word")
        group = self.channels(slot.head_dim)
        if group < LEAST_GROUP and group != slot.head_dim:
            raise HeadDimNotDivisible(scheme=self.name, what="group", head_dim=slot.head_dim, by=LEAST_GROUP)
        require_divides(group, slot, self.name, "group")
        if isinstance(self.tables, SiteTables):
            found, wanted = tuple(self.tables.for_role(slot.role).levels.shape), (slot.heads, slot.head_dim // group, 2**self.bits)
            if found != wanted:
                raise BadTables(
                    expected=f"tables [kv heads, groups, levels] of {wanted} for the {slot.role.value}s", found=found,
                    todo="learn tables with this bits and group for this very model",
                )

    def layout(self, slot: SlotSpec) -> Layout:
        groups, levels = slot.head_dim // self.channels(slot.head_dim), 2**self.bits
        return Layout((
            PlaneSpec("codes", torch.uint8, slot.head_dim * self.bits // 8),
            PlaneSpec("scales", self.scale_dtype, groups), PlaneSpec("zeros", self.scale_dtype, groups),
            PlaneSpec("levels", torch.float32, levels, groups, Extent.BATCH, constant=True),
            PlaneSpec("thresholds", torch.float32, levels - 1, groups, Extent.BATCH, constant=True, encoding=True),
        )).windowed(slot, self.window)

    def constants(self, slot: SlotSpec) -> dict[str, torch.Tensor]:
        table = self.table(slot)
        return {"levels": table.levels, "thresholds": table.thresholds}

    def table(self, slot: SlotSpec) -> Table:
        """Return the table of a slot.

        Raises TablesMissing for a trained scheme with the tables of a whole model; ``for_module`` selects those of one attention.
        """
        if isinstance(self.tables, SiteTables):
            return self.tables.for_role(slot.role)
        if self.trained:
            raise TablesMissing(path="(none was named)", known="ask for_module(path) for the scheme of one attention")
        return uniform_table(self.bits, slot.heads, slot.head_dim // self.channels(slot.head_dim))

    def format(self, slot: SlotSpec) -> KernelFormat:
        bits = self.bits
        return KernelFormat(
            torch.uint8, PARTS[bits], self.channels(slot.head_dim), True, UNPACK[bits], zeros=True, levels=2**bits, segments=SEGMENTS[bits]
        )

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        """Return codes, scales and zero points; ``fixed``: the thresholds [1, 1, K, D // group, 2^bits - 1]; without it uniform ones.

        Raises TablesMissing for a trained scheme without ``fixed``.
        """
        if fixed:
            # [K, 1, D // group, 1, 2^bits - 1], to broadcast over groups [B, K, S, D // group, group].
            thresholds = fixed[0][0, 0].to(torch.float32)[:, None, :, None]
        elif self.trained:
            raise TablesMissing(path="(none was named)", known="encode takes the plane of thresholds behind the tokens")
        else:
            thresholds = uniform_thresholds(self.bits).to(x_BKSD.device)
        return self._encode(x_BKSD, thresholds)

    def _encode(self, x_BKSD: torch.Tensor, thresholds: torch.Tensor) -> Planes:
        x = x_BKSD.to(torch.float32)
        group = self.channels(x.shape[-1])
        grouped = x.unflatten(-1, (x.shape[-1] // group, group))
        scale, zero = stored_range(grouped, -1, 2**self.bits - 1, self.scale_dtype)
        codes = codes_of(in_scales(grouped, scale, zero), thresholds)
        return pack(codes.flatten(-2), self.bits), scale.squeeze(-1), zero.squeeze(-1)

    def spoiled(self, heads: int, head_dim: int, device: torch.device | None = None) -> Planes:
        nothing = torch.full((1, heads, 1, head_dim), float("nan"), device=device)
        return self._encode(nothing, uniform_thresholds(self.bits).to(device))

    def radius(self, slot: SlotSpec) -> sympy.Expr | None:
        """Return None for learned tables, since a certificate is made from the scheme's text, which does not contain them; else a bound."""
        del slot
        if self.trained:
            return None
        return STEP / 2 + (ZERO + 2 * (2**self.bits - 1) * STEP) * sympy.Float(2.0**-21) + TINIEST

    def bound(self, slot: SlotSpec) -> sympy.Expr | None:
        if self.trained and not isinstance(self.tables, SiteTables):
            return None
        reach = sympy.Float(self.table(slot).reach) if self.trained else sympy.Rational(1, 2)
        ulp, tiny, steps = sympy.Float(SCALE_ULP[self.scale_dtype]), sympy.Float(TINY[self.scale_dtype]), 2**self.bits - 1
        # The zero point is below the minimum by less than one unit in its last place; the scale is rounded up likewise.
        spread = SPREAD + AMAX * ulp + tiny
        scale = sympy.Max(spread / steps * (1 + ulp), spread / steps + tiny)
        # Float32 rounding of x - zero, of the quotient and of level * scale + zero.
        return scale * reach + (spread + AMAX) * sympy.Float(2.0**-21)


def codes_of(x: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """Return codes, int32, of values in units of scales: the number of thresholds <= x, counted along their last axis.

    The other axes of ``thresholds`` broadcast over x. NaN has code 0. Bin k is [t_k, t_k+1), the paper's Eq. 2.
    """
    codes = torch.zeros(x.shape, dtype=torch.int32, device=x.device)
    for at in range(thresholds.shape[-1]):
        codes = codes + (x >= thresholds[..., at]).to(torch.int32)
    return codes


def _tables(tables: ModelTables | SiteTables | None) -> list[Table]:
    """Return all tables, by site and role; [] for None."""
    if tables is None:
        return []
    sites = tables.sites.values() if isinstance(tables, ModelTables) else [tables]
    return [table for site in sites for table in (site.key, site.value)]
