"""Visibility: the tokens that each query attends to, as operands ``hi``, ``lo``, ``keep`` and ``bias`` of ``attend``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Visibility:
    """Mask operands over the tokens that attention reads; None hides nothing.

    ``hi``, ``lo``  last and first visible position, int64 [1 or B, S]
    ``keep``        positions visible to any query, bool [1 or B, T]
    ``bias``        any other mask, bool or float [B or 1, H or 1, S or 1, T]
    """

    hi: fx.Node | None
    lo: fx.Node | None = None
    keep: fx.Node | None = None
    bias: fx.Node | None = None

    @property
    def hides_nothing(self) -> bool:
        """Whether every query attends to every token that is read."""
        return self.hi is self.lo is self.keep is self.bias is None
