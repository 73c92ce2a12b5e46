"""Options of all low-bit schemes: rotated channels, and a row's first tokens in full precision."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvcompile.schemes.base import QUIET, Scheme, require
from kvcompile.schemes.rotation import ORDERS, Rotate, Rotation, order_of
from kvcompile.types import Role, SlotSpec

MOST_SINKS = 1024
"""Largest number of first tokens in full precision: one program of a kernel reads all of them."""


@dataclasses.dataclass(frozen=True)
class LowBit(Scheme):
    """Base of schemes with options for rotated channels and exact first tokens.

    ``rotate``: the slots that are stored rotated. ``order``: number of channels per block of the rotation, 0 for the largest that divides
    the head dim. ``sinks``: number of first tokens of a row, not counting padding, that stay in full precision, since attention gives them
    weight for every query.
    """

    rotate: Rotate = dataclasses.field(default=Rotate.NONE, kw_only=True, metadata=QUIET)
    order: int = dataclasses.field(default=0, kw_only=True, metadata=QUIET)
    sinks: int = dataclasses.field(default=0, kw_only=True, metadata=QUIET)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.rotate, Rotate), self.name, "rotate", "none, k or kv", self.rotate, "k is the usual choice")
        require(
            type(self.order) is int and self.order in (0, *ORDERS), self.name, "order", "0 or " + ", ".join(map(str, ORDERS)), self.order,
            "0 takes the largest that divides the head dim",
        )
        require(
            type(self.sinks) is int and 0 <= self.sinks <= MOST_SINKS, self.name, "sinks", f"a whole number of tokens up to {MOST_SINKS}",
            self.sinks, "4 to 64 are usual, 0 keeps none",
        )

    @property
    def beside(self) -> dict[str, Any]:
        """The options ``rotate``, ``order`` and ``sinks`` as keyword arguments, for a scheme of the other slot (keys or values)."""
        return {"rotate": self.rotate, "order": self.order, "sinks": self.sinks}

    def rotation(self, slot: SlotSpec) -> Rotation | None:
        if self.rotate is Rotate.NONE or (slot.role is Role.VALUE and self.rotate is Rotate.K):
            return None
        return Rotation(order_of(slot.head_dim, self.order, self.name))

    def check(self, slot: SlotSpec) -> None:
        self.rotation(slot)

    def check_pair(self, keys: Scheme, values: Scheme, latent: bool, path: str) -> None:
        super().check_pair(keys, values, latent, path)
        require(
            not latent or self.rotate is not Rotate.K, self.name, "rotate", f"kv or none for {path!r}, where one latent is keys and values",
            "k", "pass rotate=kv, which takes results back as well",
        )
