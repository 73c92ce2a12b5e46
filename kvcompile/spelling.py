"""Spelling: the known words that are most like an unknown word, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return up to ``count`` of the known words that are like ``word``, the most alike first; upper and lower case are equal."""
    by_lower: dict[str, str] = {}
    for item in known:
        by_lower.setdefault(item.lower(), item)
    return [by_lower[item] for item in difflib.get_close_matches(word.lower(), list(by_lower), n=count)]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'int4'?`` if ``word`` is like a known word, else ""."""
    near = nearest(word, known)
    return f"; did you mean {near[0]!r}?" if near else ""
