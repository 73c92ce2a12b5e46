"""Choices: the choice of a seed. Every fourth seed is odd on one to five features; the others walk through all pairs of values."""

from __future__ import annotations

import functools
import random

import numpy as np
import numpy.typing as npt

from benchmarks.fuzz.features import FEATURES, INDEX, NAMES, SELDOM, SPANS, Choice, completed, together

MOST, MOST_SELDOM, TRIES = 9, 16, 20
"""Odd features of a step of each walk, and how many pairs are looked at for it."""
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


def _walked(step: int, seldom: bool) -> Choice:
    """The choice of a step of a walk through odd pairs; on every round they come in another order."""
    every, chosen = _odd_pairs(seldom), dict[str, str]()
    most = MOST_SELDOM if seldom else MOST
    # The first pair is the step's own. Of the others, which any step may have, those are taken that go with it.
    turn, place = divmod(step, len(every))
    source = random.Random(step)
    for number in range(TRIES):
        at = place * _coprime(7919 + 2 * turn, len(every)) % len(every) if not number else source.randrange(len(every))
        more = {NAMES[item][0]: NAMES[item][1] for item in every[at]}
        if len(chosen.keys() | more.keys()) > most or any(chosen.get(feature, value) != value for feature, value in more.items()):
            continue
        if completed({**chosen, **more}) is not None:
            chosen |= more
    made = completed(chosen)
    assert made is not None
    return made


def _coprime(least: int, number: int) -> int:
    while np.gcd(least, number) != 1:
        least += 1
    return least


def drawn(seed: int) -> Choice:
    """Return the choice of a seed."""
    if seed % 4:
        return _walked(seed // 4, seldom=True) if seed % 4 == 3 else _walked(seed // 4 * 2 + seed % 4 - 1, seldom=False)
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
