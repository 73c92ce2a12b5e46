"""Coverage: how often each pair of values was seen, of all pairs that can occur together in one program."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.fuzz.choices import drawn, pairs
from benchmarks.fuzz.features import FEATURES, INDEX, NAMES, SPANS
from benchmarks.fuzz.trial import Found

LEAST = 20
"""How often each pair is to be seen."""
Counts = npt.NDArray[np.int64]


def counted(seeds: Mapping[int, Found] | range, of: Callable[[Found], bool] = lambda found: found is not Found.OUTSIDE) -> Counts:
    """Return how often each two values [V, V] stood in one program, of seeds, or of the outcomes that ``of`` takes."""
    made: Counts = np.zeros((len(NAMES), len(NAMES)), dtype=np.int64)
    taken = [seed for seed in seeds if isinstance(seeds, range) or of(seeds[seed])]
    for start in range(0, len(taken), 4096):
        rows = np.array([[INDEX[item] for item in drawn(seed).items()] for seed in taken[start : start + 4096]])
        flags = np.zeros((len(rows), len(NAMES)), dtype=np.float32)
        np.put_along_axis(flags, rows, 1.0, axis=1)
        made += (flags.T @ flags).astype(np.int64)
    return made


def least(counts: Counts) -> npt.NDArray[np.int64]:
    """Return the counts [P] of ``pairs``."""
    every = pairs()
    return counts[every[:, 0], every[:, 1]]


def table(counts: Counts) -> list[tuple[str, str, int, int, int]]:
    """Return for each two features: their names, pairs that can occur, the smallest count, how many are under LEAST."""
    every, found = pairs(), []
    names = list(FEATURES)
    place = np.array([names.index(feature) for feature, _ in NAMES])
    per_pair = counts[every[:, 0], every[:, 1]]
    first, second = place[every[:, 0]], place[every[:, 1]]
    for a in range(len(SPANS)):
        for b in range(a + 1, len(SPANS)):
            some = per_pair[(first == a) & (second == b)]
            if some.size:
                found.append((names[a], names[b], len(some), int(some.min()), int((some < LEAST).sum())))
    return found


def write(path: Path, seen: Counts, rewritten: Counts) -> None:
    """Write a CSV with one line a pair: two features with values, how often it was seen, how often in a rewritten program."""
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(("feature", "value", "other feature", "other value", "seen", "rewritten and right"))
        for a, b in sorted(pairs().tolist()):
            out.writerow((*NAMES[a], *NAMES[b], int(seen[a, b]), int(rewritten[a, b])))
