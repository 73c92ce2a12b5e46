"""Visibility: which tokens each query attends to, as the operands ``hi``, ``lo``, ``keep`` and ``bias`` of ``attend``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Visibility:
    """Operands over the tokens that attention reads, None for what hides nothing.

    ``hi``, ``lo``  last and first position, int64 [1 or B, S]
    ``keep``        positions that may be attended at all, bool [1 or B, T]
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
