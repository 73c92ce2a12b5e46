"""Ladder: the levels that a token may have, each a width of its keys and a width of its values, in ascending order.

Keys and values of a token share one importance, so the widenings of all tokens come in the same order: by utility per bit and unit of
importance (section 5.1). A token climbs in that order. One number, its level, therefore describes a token, and keys and values of one level
are stored in the same order. The paper's heap may widen a token's keys after a step of its values did not fit, or the reverse; here the
token stops at its level. The loss is below the utility of one step of one token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kvcompile.extensions.smartkv.budget import Cost, KeyValueWidths


@dataclass(frozen=True)
class LevelPreference:
    """Parameters of the worth of raising a token by one level.

    ``alpha``: the exponent of the utility U(bits) = bits^alpha; ``floor``: the least importance that counts; ``keys``, ``values``: their
    weights (section 10.6 of the paper).
    """

    alpha: float = 0.5
    floor: float = 1e-6
    keys: float = 1.0
    values: float = 1.0


@dataclass(frozen=True)
class Ladder:
    """The widths of keys and values at each level, and the worth of each step to the next level, which never increases."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    worths: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def top(self) -> int:
        """The index of the highest level, whose keys and values have the largest widths; levels count from 0."""
        return len(self) - 1

    def costs(self, cost: Cost) -> tuple[int, ...]:
        """Return the stored bytes of a token at each level."""
        return tuple(cost.token(keys, values) for keys, values in zip(self.keys, self.values, strict=True))


def ladder(widths: KeyValueWidths, preference: LevelPreference) -> Ladder:
    """Return the levels of the given widths. A step from b to b' bits is worth weight * (U(b') - U(b)) / (b' - b), with U(b) = b^alpha.

    Of steps worth the same, the one earlier in the ascending widths of keys, or of values, comes first; then the one of keys.
    """
    steps = []
    for which, (chain, weight) in enumerate(zip(widths, (preference.keys, preference.values), strict=True)):
        worth = float("inf")
        for number, (b, wider) in enumerate(itertools.pairwise(chain)):
            # Never above the step before, whatever the rounding: the steps of keys, and those of values, keep their order.
            worth = min(worth, weight * (wider**preference.alpha - b**preference.alpha) / (wider - b))
            steps.append((-worth, number, which, wider))
    now = [widths.keys[0], widths.values[0]]
    levels = [tuple(now)]
    for _, _, which, wider in sorted(steps):
        now[which] = wider
        levels.append(tuple(now))
    keys, values = zip(*levels, strict=True)
    return Ladder(keys, values, tuple(-step[0] for step in sorted(steps)))
