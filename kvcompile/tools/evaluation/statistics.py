"""Statistics: intervals of shares and means, and tests whether two models differ on the same questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 10_000
LARGEST = 4_000_000
"""Numbers drawn at a time."""


def wilson(hits: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's interval of a share, 95% by default; (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    p = hits / trials
    middle = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Proportion:
    """Hits out of trials, with Wilson's 95% interval."""

    hits: int
    trials: int

    @property
    def value(self) -> float:
        """The share; NaN without trials."""
        return self.hits / self.trials if self.trials else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """(Lower, upper) end of Wilson's 95% interval of the share."""
        return wilson(self.hits, self.trials)

    def plain(self) -> dict[str, Any]:
        """Return the share as plain data, for JSON."""
        return {"hits": self.hits, "trials": self.trials, "low": self.interval[0], "high": self.interval[1]}

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.1%}\n[dim]{low:.0%} to {high:.0%}[/]"


@dataclass(frozen=True)
class Mean:
    """A mean with its 95% bootstrap interval."""

    value: float
    low: float
    high: float

    def plain(self) -> dict[str, float]:
        """Return the mean as plain data, for JSON."""
        return {"value": self.value, "low": self.low, "high": self.high}


def bootstrap(values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> Mean:
    """Return the mean of ``values`` with its 95% percentile interval over ``resamples`` drawn with replacement.

    For a paired comparison pass the differences of pairs.
    """
    held = np.asarray(values, dtype=np.float64)
    if not held.size:
        return Mean(math.nan, math.nan, math.nan)
    random = np.random.default_rng(seed)
    step = max(1, LARGEST // held.size)
    drawn = np.concatenate([
        held[random.integers(held.size, size=(min(step, resamples - at), held.size))].mean(1) for at in range(0, resamples, step)
    ])
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Mean(float(held.mean()), float(low), float(high))


def mcnemar(lost: int, won: int) -> float:
    """Return the two-sided p of McNemar's exact test on ``lost + won`` discordant pairs."""
    pairs, fewer = lost + won, min(lost, won)
    tail = sum(math.comb(pairs, count) for count in range(fewer + 1))
    # Integers are divided because 2.0 ** -pairs underflows to zero from 1,075 pairs on.
    return min(1.0, 2 * tail / 2**pairs)


@dataclass(frozen=True)
class Paired:
    """Outcomes of two models on the same questions: both right, dense alone (lost), the scheme alone (won), neither."""

    both: int
    lost: int
    won: int
    neither: int
    difference: Mean

    @classmethod
    def of(cls, dense: Sequence[bool], scheme: Sequence[bool], seed: int = 0) -> Paired:
        """Return the counts of two lists of outcomes in the same order; ``difference``: the scheme's accuracy minus that of dense."""
        pairs = list(zip(dense, scheme, strict=True))
        more = bootstrap([float(ours) - float(theirs) for theirs, ours in pairs], seed)
        return cls(
            pairs.count((True, True)), pairs.count((True, False)), pairs.count((False, True)), pairs.count((False, False)), more,
        )

    @property
    def trials(self) -> int:
        """Number of questions."""
        return self.both + self.lost + self.won + self.neither

    @property
    def p(self) -> float:
        """The two-sided p of McNemar's exact test, from the questions that exactly one model answered right."""
        return mcnemar(self.lost, self.won)

    def plain(self) -> dict[str, Any]:
        """Return the counts as plain data, for JSON."""
        return {
            "trials": self.trials, "both": self.both, "lost": self.lost, "won": self.won, "neither": self.neither, "p": self.p,
            "difference": self.difference.plain(),
        }
