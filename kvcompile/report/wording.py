"""Wording: schemes, sizes, counts and paths as a user reads them in a report."""

from __future__ import annotations

import re

from kvcompile.passes.plan.policy import Pair, pair_of
from kvcompile.schemes import Scheme


def short_scheme(scheme: Scheme) -> str:
    """Return a scheme as a user writes it: its name, and only the options that differ from their defaults."""
    changed = {option.name: getattr(scheme, option.name) for option in scheme.options() if getattr(scheme, option.name) != option.default}
    for option in scheme.options():
        # The scheme may have chosen this value itself, from its other options.
        others = {name: value for name, value in changed.items() if name != option.name}
        if option.default is None and option.name in changed and type(scheme)(**others) == scheme:
            changed = others
    written = [f"{name}={str(getattr(value, 'value', value)).removeprefix('torch.')}" for name, value in changed.items()]
    return f"{scheme.name}({','.join(written)})" if written else scheme.name


def short_pair(pair: Pair) -> str:
    """Return a pair as a user writes it: one scheme if keys and values have the same."""
    return short_scheme(pair.k) if pair.k == pair.v else f"k={short_scheme(pair.k)},v={short_scheme(pair.v)}"


def short_text(text: str) -> str:
    """Return the text of a scheme or a pair with only the options that differ from their defaults. Raises a SchemeError for other text."""
    return short_pair(pair_of(text))


def size_text(count: float) -> str:
    """Return a number of bytes as text in binary units, with three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    raise AssertionError


def short_paths(text: str) -> str:
    """Return ``text`` with every path into ``site-packages`` shortened to begin at the package."""
    return re.sub(r"\S*/(?:site|dist)-packages/", "", text)


def count_text(count: int, what: str) -> str:
    """Return a count with its noun, in the plural unless the count is 1."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
