"""Static scales of one slot, of one attention, and of a whole model; frozen, compared by their contents.

A slot has one scale for all kv heads (per tensor) or one for each (per head), float32: a value is its code times the scale.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvcompile.errors import BadScales, ScalesMissing
from kvcompile.schemes.site_paths import entry_of, shown
from kvcompile.types import Role

LEAST_SCALE = torch.finfo(torch.float32).tiny
"""The smallest scale: a normal float32 number, so that dividing by it is exact to rounding."""
MOST_SCALE = torch.finfo(torch.float32).max / 448
"""The largest scale: times the largest code (448 of e4m3) it is finite."""


class ScaleExtent(enum.Enum):
    """The extent of one scale: a slot, or one kv head of it."""

    TENSOR = "tensor"
    HEAD = "head"


@dataclass(frozen=True, eq=False)
class Scales:
    """The scales of one slot, float32 on the CPU: [1] for all kv heads, or [K].

    Raises BadScales for other tensors, and for scales outside of LEAST_SCALE to MOST_SCALE.
    """

    values: torch.Tensor

    def __post_init__(self) -> None:
        values = self.values
        if values.dim() != 1 or not values.numel() or values.dtype != torch.float32 or values.device.type != "cpu":
            found = f"{values.dtype} {tuple(values.shape)} on {values.device}"
            raise BadScales(expected="float32 scales [1] or [kv heads] on the CPU", found=found, todo="pass one scale, or one a head")
        if not bool(((values >= LEAST_SCALE) & (values <= MOST_SCALE)).all()):
            expected = f"finite scales above zero, from {LEAST_SCALE:.1e} to {MOST_SCALE:.1e}"
            raise BadScales(expected=expected, found=values.tolist()[:8], todo="calibrate again, or leave the layer dense")

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the contents, 16 hex digits."""
        return hashlib.sha256(repr(self.values.shape).encode() + self.values.contiguous().numpy().tobytes()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scales) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def extent(self) -> ScaleExtent:
        """The extent of each scale: the whole slot, or one kv head of it."""
        return ScaleExtent.TENSOR if self.values.numel() == 1 else ScaleExtent.HEAD

    def fits(self, heads: int) -> bool:
        """Return whether the scales suit a slot with ``heads`` kv heads: one for all of them, or one for each."""
        return self.values.numel() in {1, heads}


@dataclass(frozen=True)
class SiteScales:
    """The scales of one attention's keys and values."""

    key: Scales
    value: Scales

    def for_role(self, role: Role) -> Scales:
        """Return the scales of a slot of this role."""
        return self.key if role is Role.KEY else self.value


@dataclass(frozen=True, eq=False)
class ModelScales:
    """The scales of a model's attentions by their module paths.

    ``fingerprint``: the fingerprint of the model on which the scales were measured, or whose checkpoint holds them.
    """

    sites: Mapping[str, SiteScales]
    fingerprint: str

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the contents, 16 hex digits."""
        digests = [(path, site.key.digest, site.value.digest) for path, site in sorted(self.sites.items())]
        return hashlib.sha256(repr((digests, self.fingerprint)).encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelScales) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def for_module(self, path: str) -> SiteScales:
        """Return the scales of the attention at a module path (``site_paths``). Raises ScalesMissing if it has none."""
        entry = entry_of(path, self.sites)
        if entry is None:
            raise ScalesMissing(path=path or "(unknown)", known=shown(self.sites))
        return self.sites[entry]
