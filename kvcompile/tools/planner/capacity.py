"""Capacity: what of a model fits into a device's memory under each scheme: bytes of a request, the largest batch, the longest context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcompile.tools.planner.activations import Activations
from kvcompile.tools.planner.stores import Stores

MOST_ROWS, MOST_TOKENS = 1 << 20, 1 << 26
"""Limits of the searches for rows and for tokens."""


@dataclass(frozen=True)
class Demand:
    """Demand on one device: bytes of memory, of weights and of anything else; rows, tokens a row; and prompts that run at once.

    ``activations``: those of prompts. ``prefill``: tokens of a row that one call takes, None for all. ``prefill_rows``: rows of
    that call. All bytes are of one device.
    """

    memory: int
    weights: int
    overhead: int
    batch: int
    context: int
    activations: Activations = field(default_factory=Activations)
    prefill: int | None = None
    prefill_rows: int = 1

    def beside(self, tokens: int) -> int:
        """Bytes of everything but the cache, for prompts of up to ``tokens`` tokens."""
        prompt = tokens if self.prefill is None else min(self.prefill, tokens)
        return self.weights + self.overhead + self.activations.nbytes(prompt, self.prefill_rows)

    def needed(self, stores: Stores, batch: int, tokens: int) -> int:
        """Bytes on the device of ``batch`` rows of ``tokens`` tokens, everything included."""
        return self.beside(tokens) + stores.device_bytes(batch, tokens) + stores.growing_bytes(batch, tokens)

    def fits(self, stores: Stores, batch: int, tokens: int) -> bool:
        """Whether so many rows and tokens fit."""
        return self.needed(stores, batch, tokens) <= self.memory

    def largest_batch(self, stores: Stores) -> int:
        """The most rows of ``context`` tokens that fit, 0 for none."""
        return _most(lambda rows: self.fits(stores, rows, self.context), MOST_ROWS)

    def longest_context(self, stores: Stores) -> int:
        """The most tokens of each of ``batch`` rows that fit, 0 for none; up to ``MOST_TOKENS``."""
        return _most(lambda tokens: self.fits(stores, self.batch, tokens), MOST_TOKENS)


def _most(holds: Callable[[int], bool], end: int) -> int:
    """The largest number up to ``end`` that ``holds``, 0 where 1 does not; what holds for a number holds for all below it."""
    low, high = 0, 1
    while high < end and holds(high):
        low, high = high, high * 2
    if low == 0:
        return 0
    high = min(high, end + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
