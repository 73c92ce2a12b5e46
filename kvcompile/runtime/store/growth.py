"""Growth: how many pages a store allocates for a number of tokens; a function of the number alone, so it can be announced.

Room is a multiple of a granule that grows with the length: never more than a sixteenth above what is
in use beyond the first granules, and few reallocations (each copies one slot at a time).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcompile.types import pages_for


@dataclass(frozen=True)
class Growth:
    """How stores grow: the smallest granule in tokens, and the largest slack as a fraction of the length."""

    least: int = 256
    slack: int = 16

    def pages(self, tokens: int, capacity: int | None = None) -> int:
        """Return the pages to hold for ``tokens`` tokens, never more than ``capacity`` tokens need."""
        granule = self.least
        while granule * 2 * self.slack <= tokens:
            granule *= 2
        room = -(-max(tokens, 1) // granule) * granule
        if capacity is not None:
            room = min(room, max(capacity, tokens))
        return max(pages_for(room), 1)
