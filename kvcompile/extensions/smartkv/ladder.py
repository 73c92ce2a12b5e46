"""Ladder: the levels that a token may have, each a width of its keys and one of its values, from the least to the largest.

Both halves of a token weigh its one importance, so the widenings of all tokens have the same order: by what they are worth per bit and unit
of importance (section 5.1). A token climbs in that order, which leaves it one number, its level, and keys and values of one level lie
in the same order in memory. The source's heap may widen one half where the other one's step before did not fit; here the token stays
where it is. What that loses is less than one step of one token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kvcompile.extensions.smartkv.budget import Cost, KeyValueWidths


@dataclass(frozen=True)
class LevelPreference:
    """Weights of a step's worth: the exponent of U, the least importance, and how much keys and values matter (10.6)."""

    alpha: float = 0.5
    floor: float = 1e-6
    keys: float = 1.0
    values: float = 1.0


@dataclass(frozen=True)
class Ladder:
    """Widths of keys and of values at each level, and what each step to the next one is worth, which never grows."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    worths: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def top(self) -> int:
        """The largest level."""
        return len(self) - 1

    def costs(self, cost: Cost) -> tuple[int, ...]:
        """Stored bytes of a token at each level."""
        return tuple(cost.token(keys, values) for keys, values in zip(self.keys, self.values, strict=True))


def ladder(widths: KeyValueWidths, preference: LevelPreference) -> Ladder:
    """The levels of some widths: a step is worth weight * (U(b') - U(b)) / (b' - b), with U(b) = b^alpha.

    Equal steps: the earlier one of its half first, then that of keys.
    """
    steps = []
    for which, (chain, weight) in enumerate(zip(widths, (preference.keys, preference.values), strict=True)):
        worth = float("inf")
        for number, (b, wider) in enumerate(itertools.pairwise(chain)):
            # Never above the step before, whatever the rounding: the steps of a half keep their order.
            worth = min(worth, weight * (wider**preference.alpha - b**preference.alpha) / (wider - b))
            steps.append((-worth, number, which, wider))
    now = [widths.keys[0], widths.values[0]]
    levels = [tuple(now)]
    for _, _, which, wider in sorted(steps):
        now[which] = wider
        levels.append(tuple(now))
    keys, values = zip(*levels, strict=True)
    return Ladder(keys, values, tuple(-step[0] for step in sorted(steps)))
