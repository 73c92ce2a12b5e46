"""Coverage: which values the symbols of a program took in the calls that were compared.

A rewrite that took a symbolic size for a number is equal to its program in every call in which the size is that number. So a verdict is
EQUAL only where every symbol took two values at least, but for those that the guards leave a single one.
"""

from __future__ import annotations

from typing import Any

from kvcompile.passes.graph.worlds import Values
from kvcompile.validation.cut import Cut
from kvcompile.validation.sizes import named, symbols


class Coverage:
    """Counts the values that each symbol of a program took."""

    def __init__(self, part: Cut) -> None:
        self.part = part
        self.seen: dict[Any, set[int]] = {symbol: set() for symbol in symbols(part) if not part.guards.fixed(symbol)}

    def add(self, values: Values) -> None:
        """Count a call that was compared."""
        for symbol, taken in self.seen.items():
            taken.add(values[symbol])

    def wanted(self) -> set[Any]:
        """The symbols that took fewer than two values."""
        return {symbol for symbol, taken in self.seen.items() if len(taken) < 2}

    def missing(self) -> str:
        """Which symbols took one value in all calls, as a sentence."""
        told = [f"{named(self.part, symbol)} = {next(iter(self.seen[symbol]), 'none')}" for symbol in sorted(self.wanted(), key=str)]
        return f"no call was found in which these sizes are others than in the first one compared: {', '.join(told)}"
