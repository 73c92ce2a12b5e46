"""Tables of levels and thresholds of one slot, of one attention, and of a whole model; frozen, compared by their contents.

Both are in units of the stored scale, so that a group spans 0 to 2^bits - 1: uniform levels are then the integers, exact in float32, and
``level * scale + zero`` is the value of a plain asymmetric code. The paper's normalised units (its Eqs. 2 to 4, where a group spans 0 to 1)
are these divided by 2^bits - 1.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvcompile.errors import BadTables, TablesMissing
from kvcompile.schemes.site_paths import entry_of, shown
from kvcompile.types import Role


def uniform_levels(bits: int) -> torch.Tensor:
    """Return the levels of plain asymmetric codes, float32 [2^bits], in units of scales (the paper's Eq. 3)."""
    return torch.arange(2**bits, dtype=torch.float32, device="cpu")


def uniform_thresholds(bits: int) -> torch.Tensor:
    """Return the thresholds of plain asymmetric codes, float32 [2^bits - 1], in units of scales (the paper's Eq. 4, adapted to ties).

    A value on a threshold gets the code above it, but rounding to nearest gives the even one: after an even code
    the threshold is the next float32 above the middle, so that codes equal ``round`` in every case.
    """
    middle = torch.arange(2**bits - 1, dtype=torch.float32, device="cpu") + 0.5
    above = torch.nextafter(middle, torch.full_like(middle, float("inf")))
    return torch.where(torch.arange(2**bits - 1, device="cpu") % 2 == 0, above, middle)


@dataclass(frozen=True, eq=False)
class Table:
    """Levels [K, D // group, 2^bits] and thresholds [K, D // group, 2^bits - 1] of one slot, float32 on the CPU, in units of scales.

    Raises BadTables for other shapes or dtypes, NaN or Inf, and falling thresholds.
    """

    levels: torch.Tensor
    thresholds: torch.Tensor

    def __post_init__(self) -> None:
        shapes = tuple(self.levels.shape), tuple(self.thresholds.shape)
        if self.levels.dim() != 3 or shapes[1] != (*shapes[0][:2], shapes[0][2] - 1):
            raise BadTables(expected="levels [K, groups, n] and thresholds [K, groups, n - 1]", found=shapes, todo="learn them anew")
        for name, plane in (("levels", self.levels), ("thresholds", self.thresholds)):
            if plane.dtype != torch.float32 or not plane.isfinite().all():
                raise BadTables(expected=f"finite float32 {name}", found=f"{plane.dtype}, or NaN or Inf", todo="learn them anew")
        if (self.thresholds.diff(dim=-1) < 0).any():
            raise BadTables(expected="thresholds in rising order", found="some that fall", todo="learn them anew")

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the contents, 16 hex digits."""
        found = hashlib.sha256(repr((tuple(self.levels.shape), tuple(self.thresholds.shape))).encode())
        for plane in (self.levels, self.thresholds):
            found.update(plane.contiguous().numpy().tobytes())
        return found.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return (self.levels.shape[2] - 1).bit_length()

    @property
    def reach(self) -> float:
        """The largest distance from a value to the level of its bin, in units of scales; a group's values are in [0, 2^bits - 1]."""
        edge = torch.zeros_like(self.thresholds[..., :1])
        top = float(self.levels.shape[2] - 1)
        inner = self.thresholds.clamp(0, top)
        low, high = torch.cat([edge, inner], -1), torch.cat([inner, edge + top], -1)
        # Bins that no value can fall into have no error.
        far = torch.maximum((self.levels - low).abs(), (self.levels - high).abs())
        held = (high > low) | (high == top)
        return float(torch.where(held, far, 0.0).max())


def uniform_table(bits: int, heads: int, groups: int) -> Table:
    """Return the table of plain asymmetric codes of ``bits`` bits, the same for ``heads`` kv heads of ``groups`` groups of channels."""
    return Table(uniform_levels(bits).repeat(heads, groups, 1), uniform_thresholds(bits).repeat(heads, groups, 1))


@dataclass(frozen=True)
class SiteTables:
    """The tables of one attention's keys and values."""

    key: Table
    value: Table

    def for_role(self, role: Role) -> Table:
        """Return the table of a slot of this role."""
        return self.key if role is Role.KEY else self.value


@dataclass(frozen=True, eq=False)
class ModelTables:
    """The tables of a model's attentions by their module paths, and the fingerprint of the model that they were learned for."""

    sites: Mapping[str, SiteTables]
    fingerprint: str
    group: int

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the contents, 16 hex digits."""
        digests = [(path, site.key.digest, site.value.digest) for path, site in sorted(self.sites.items())]
        return hashlib.sha256(repr((digests, self.fingerprint, self.group)).encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelTables) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return next(iter(self.sites.values())).key.bits

    @property
    def parameters(self) -> int:
        """The number of levels and thresholds of all tables, the paper's |phi| (its Appendix E)."""
        tables = [table for site in self.sites.values() for table in (site.key, site.value)]
        return sum(table.levels.numel() + table.thresholds.numel() for table in tables)

    def for_module(self, path: str) -> SiteTables:
        """Return the tables of the attention at ``path``, which may have a longer or shorter prefix than the path stored with the tables.

        Raises TablesMissing if there are none.
        """
        entry = entry_of(path, self.sites)
        if entry is None:
            raise TablesMissing(path=path or "(unknown)", known=shown(self.sites))
        return self.sites[entry]
