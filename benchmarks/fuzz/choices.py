"""Choices: the choice of a seed.

Every fourth seed is odd on one to five features. The others are a covering design: each block of seeds holds every pair of values that can
occur together. A block is designed as a whole, which takes some seconds.
"""

from __future__ import annotations

import functools
import random

import numpy as np
import numpy.typing as npt

from benchmarks.fuzz.features import FEATURES, INDEX, NAMES, SELDOM, SPANS, Choice, completed, together

BLOCK = 5000
"""Seeds that together hold every pair: a multiple of 4."""
MOST, MOST_SELDOM, TRIES = 10, 18, 30
"""Odd features of a program of each walk, and how many pairs are looked at for it."""
Pairs = npt.NDArray[np.int32]


@functools.cache
def pairs() -> Pairs:
    """Return all pairs [P, 2] of values, by index, that can occur in a program, in a random order that is always the same."""
    matrix = together()
    upper = np.argwhere(np.triu(matrix, 1))
    kept = [pair for pair in upper.tolist() if completed({NAMES[at][0]: NAMES[at][1] for at in pair}) is not None]
    made = np.array(kept, dtype=np.int32)
    return made[np.random.default_rng(0).permutation(len(made))]


@functools.cache
def _odd_pairs(seldom: bool) -> Pairs:
    """The pairs without a plain value, which comes by itself: those with a value that is ``seldom`` rewritten, or the others."""
    plain = {INDEX[feature, values[0]] for feature, values in FEATURES.items()}
    hard = {INDEX[feature, value] for feature, values in SELDOM.items() for value in values}
    every = pairs()
    return every[[not plain & set(pair) and bool(hard & set(pair)) == seldom for pair in every.tolist()]]


@functools.lru_cache(4)
def _designed(block: int, seldom: bool) -> list[Choice]:
    """The choices of the walk in a block of seeds: together they hold each odd pair that the walk is of."""
    every, source, matrix = _odd_pairs(seldom), np.random.default_rng((block, seldom)), together()
    steps, most = (BLOCK // 4, MOST_SELDOM) if seldom else (BLOCK // 2, MOST)
    order = every[source.permutation(len(every))]
    open_ = np.ones(len(order), dtype=np.bool_)
    made = []
    for _ in range(steps):
        left = np.flatnonzero(open_)
        # The first pair that no program has yet; then others, where they go with it.
        rest = left if left.size else np.arange(len(order))
        tries = order[[rest[0], *rest[source.integers(len(rest), size=TRIES)]]]
        chosen: Choice = {}
        at: list[int] = []
        for pair in tries.tolist():
            new = [item for item in pair if item not in at]
            if len(at) + len(new) > most or not matrix[np.ix_(new, [*at, *new])].all():
                continue
            if completed({NAMES[item][0]: NAMES[item][1] for item in (*at, *new)}) is not None:
                at += new
        chosen = completed({NAMES[item][0]: NAMES[item][1] for item in at}) or {}
        flags = np.zeros(len(NAMES), dtype=np.bool_)
        flags[[INDEX[item] for item in chosen.items()]] = True
        open_ &= ~flags[order].all(1)
        made.append(chosen)
    return made


def drawn(seed: int) -> Choice:
    """Return the choice of a seed."""
    block, place = divmod(seed, BLOCK)
    if place % 4:
        return _designed(block, True)[place // 4] if place % 4 == 3 else _designed(block, False)[place // 4 * 2 + place % 4 - 1]
    source, chosen = random.Random(seed), dict[str, str]()
    matrix = together()
    for feature in source.sample(list(FEATURES), source.randint(1, 5)):
        open_ = matrix[[INDEX[item] for item in chosen.items()]].all(0)[SPANS[feature]] if chosen else np.ones(len(FEATURES[feature]), bool)
        values = [value for value, may in zip(FEATURES[feature], open_, strict=True) if may]
        if values and completed(more := {**chosen, feature: source.choice(values)}) is not None:
            chosen = more
    made = completed(chosen)
    assert made is not None
    return made
