"""Capacity: bytes of a request, the largest batch and the longest context that fit a device's memory under each scheme."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcompile.tools.planner.activations import Activations
from kvcompile.tools.planner.stores import Stores

MOST_ROWS, MOST_TOKENS = 1 << 20, 1 << 26
"""Limits of the searches for rows and for tokens."""


@dataclass(frozen=True)
class Demand:
    """The memory of a device and what it must hold: bytes of weights and overhead, and ``batch`` rows of ``context`` tokens each.

    ``activations``: the activations of a prompt. ``prefill``: number of a row's tokens that one call prefills, None for all.
    ``prefill_rows``: number of rows in that call.
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
        """Return the bytes of everything except the cache, for prompts of up to ``tokens`` tokens."""
        prompt = tokens if self.prefill is None else min(self.prefill, tokens)
        return self.weights + self.overhead + self.activations.nbytes(prompt, self.prefill_rows)

    def needed(self, stores: Stores, batch: int, tokens: int) -> int:
        """Return all bytes on the device for ``batch`` rows of ``tokens`` tokens."""
        return self.beside(tokens) + stores.device_bytes(batch, tokens) + stores.growing_bytes(batch, tokens)

    def fits(self, stores: Stores, batch: int, tokens: int) -> bool:
        """Return whether ``batch`` rows of ``tokens`` tokens fit in the memory, with weights, activations and overhead."""
        return self.needed(stores, batch, tokens) <= self.memory

    def largest_batch(self, stores: Stores) -> int:
        """Return the most rows of ``context`` tokens that fit, 0 for none; at most ``MOST_ROWS``."""
        return _most(lambda rows: self.fits(stores, rows, self.context), MOST_ROWS)

    def longest_context(self, stores: Stores) -> int:
        """Return the most tokens per row that fit for ``batch`` rows, 0 for none; at most ``MOST_TOKENS``."""
        return _most(lambda tokens: self.fits(stores, self.batch, tokens), MOST_TOKENS)


def _most(holds: Callable[[int], bool], end: int) -> int:
    """Return the largest number up to ``end`` for which the monotone predicate ``holds``, 0 if it fails for 1."""
    low, high = 0, 1
    while high <= end and holds(high):
        low, high = high, high * 2
    if low == 0:
        return 0
    high = min(high, end + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
