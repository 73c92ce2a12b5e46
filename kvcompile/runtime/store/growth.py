"""Growth: the pages that a store allocates for a number of tokens, a function of that number alone, so it can be announced.

Room is a multiple of a granule that grows with the length: beyond the first granules at most 1/16 above the tokens in use, with few
reallocations (each copies one slot at a time).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcompile.types import pages_for


@dataclass(frozen=True)
class Growth:
    """The growth rule of stores: the smallest granule in tokens, and the inverse of the largest slack relative to the length."""

    least: int = 256
    slack: int = 16

    def pages(self, tokens: int, capacity: int | None = None) -> int:
        """Return the number of pages to allocate for ``tokens`` tokens: room up to the next granule, none beyond ``capacity`` tokens."""
        granule = self.least
        while granule * 2 * self.slack <= tokens:
            granule *= 2
        room = -(-max(tokens, 1) // granule) * granule
        if capacity is not None:
            room = min(room, max(capacity, tokens))
        return max(pages_for(room), 1)
