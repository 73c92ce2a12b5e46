"""The option ``window`` of schemes that encode every token by itself: the newest tokens are kept in full precision besides their codes.

A token is encoded when it arrives, from its original, and is read from the window until ``window`` newer ones have come. So nothing is
written when it leaves the window, and a rollback refills the window from codes: it may end at any length, as there are no blocks.
"""

from __future__ import annotations

import dataclasses

from kvcompile.schemes.base import QUIET, Scheme, require

MOST_WINDOW = 1024
"""Largest window: one program of an append reads all of it."""


@dataclasses.dataclass(frozen=True)
class Windowed(Scheme):
    """Base of schemes with the option ``window``: that many newest tokens of each row are also kept in full precision; 0 for no window."""

    window: int = dataclasses.field(default=0, kw_only=True, metadata=QUIET)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            type(self.window) is int and 0 <= self.window <= MOST_WINDOW, self.name, "window",
            f"a whole number of tokens up to {MOST_WINDOW}", self.window,
            "32 is usual, 0 keeps none; kernels append to windows of a power of two",
        )
