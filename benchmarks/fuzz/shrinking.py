"""Shrinking: the same failure with as many plain features as it still fails with, and which failures are of one kind."""

from __future__ import annotations

import re
from collections.abc import Iterable

from benchmarks.fuzz.features import FEATURES, Choice, completed, odd
from benchmarks.fuzz.trial import Result, Way, tried


def shrunk(result: Result, way: Way) -> Result:
    """Return the same failure, made plain in one feature after the other while it still fails; a feature that needs another keeps it."""
    kept = odd(result.choice)
    for feature in reversed(list(FEATURES)):
        if feature not in kept:
            continue
        fewer = {name: value for name, value in kept.items() if name != feature}
        choice = completed(fewer)
        if choice is None or len(odd(choice)) >= len(odd(result.choice)):
            continue
        made = tried(result.seed, choice, way)
        if made.found is result.found:
            result, kept = made, fewer if odd(choice) == fewer else odd(choice)
    return result


def kind_of(result: Result) -> str:
    """Return what failures of one kind share: for exceptions the class and the message without numbers, else the outcome."""
    return result.found.name + (" " + re.sub(r"<fuzz \d+>|[-+.\d]+", "#", result.said)[:80] if result.found.name == "FAULT" else "")


def explains(small: Result, choice: Choice, kind: str) -> bool:
    """Whether a shrunk failure is part of another one of the same kind."""
    return kind_of(small) == kind and all(choice.get(feature) == value for feature, value in odd(small.choice).items())


def kinds(bad: Iterable[Result], way: Way, most: int) -> list[tuple[Result, list[int]]]:
    """Return at most ``most`` shrunk failures, each with the seeds of all that it explains; the rest stay as they are."""
    found: list[tuple[Result, list[int]]] = []
    for result in bad:
        choice = completed(odd(result.choice)) or result.choice
        known = next((seeds for small, seeds in found if explains(small, choice, kind_of(result))), None)
        if known is not None:
            known.append(result.seed)
        elif len(found) < most:
            found.append((shrunk(result, way), [result.seed]))
        else:
            found.append((result, [result.seed]))
    return found
