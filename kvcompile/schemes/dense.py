"""dense: keys and values as the model computed them, in the common template. The baseline and the reference.

Same rewrite, same kernel, no quantization: unlike stock attention it reads the tokens in use once, without repeated heads and without a
mask in memory. ``pre_rope`` stores keys before RoPE, for comparison with schemes that do.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import sympy
import torch

from kvcompile.schemes.base import Planes, Scheme, require
from kvcompile.types import KernelFormat, Layout, PlaneSpec, Role, SlotSpec


def _as_float(words: torch.Tensor, part: int) -> torch.Tensor:
    del part
    return words.to(torch.float32)


@dataclasses.dataclass(frozen=True)
class Dense(Scheme):
    """No compression: one plane in the model's dtype, [N, B, K, page, D]."""

    pre_rope: bool = False

    name: ClassVar[str] = "dense"
    exact: ClassVar[bool] = True
    source: ClassVar[str] = "the uncompressed cache"

    def __post_init__(self) -> None:
        require(isinstance(self.pre_rope, bool), self.name, "pre_rope", "True or False", self.pre_rope, "False is the usual choice")

    def for_role(self, role: Role) -> Dense:
        return self if role is Role.KEY else Dense()

    def layout(self, slot: SlotSpec) -> Layout:
        return Layout((PlaneSpec("values", slot.dtype, slot.head_dim),))

    def format(self, slot: SlotSpec) -> KernelFormat:
        return KernelFormat(slot.dtype, 1, slot.head_dim, False, _as_float)

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        del fixed
        return (x_BKSD,)

    def decode(self, planes: Planes, slot: SlotSpec) -> torch.Tensor:
        """Return the stored values in float32, or in float64 for a float64 model."""
        return planes[0] if planes[0].dtype == torch.float64 else super().decode(planes, slot)

    def radius(self, slot: SlotSpec) -> sympy.Expr:
        return sympy.Integer(0)

    def bound(self, slot: SlotSpec) -> sympy.Expr:
        return sympy.Integer(0)
