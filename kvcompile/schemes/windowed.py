"""The option ``window`` of schemes that encode every token by itself: the newest tokens in full precision beside the codes of all.

A token is encoded when it arrives, from its original, and is read from the window until ``window`` newer ones have come. So leaving the
window writes nothing, and a cache that went back refills the window from codes: no length is lost, as there is no block to complete.
"""

from __future__ import annotations

import dataclasses

from kvcompile.schemes.base import QUIET, Scheme, require

MOST_WINDOW = 1024
"""Largest window: one program of an append reads all of it."""


@dataclasses.dataclass(frozen=True)
class Windowed(Scheme):
    """A scheme with the newest ``window`` tokens of each row in full precision; with 0 there is no window, and the layout is that without
    one.
    """

    window: int = dataclasses.field(default=0, kw_only=True, metadata=QUIET)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            type(self.window) is int and 0 <= self.window <= MOST_WINDOW, self.name, "window",
            f"a whole number of tokens up to {MOST_WINDOW}", self.window,
            "32 is usual, 0 keeps none; kernels append to windows of a power of two",
        )
