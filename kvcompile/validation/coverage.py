"""Coverage: which values the symbols of a program took in the calls that were compared.

A rewrite that took a symbolic size for a number is equal to its program in every call in which the size is that number. So a verdict is
EQUAL only where every symbol took two values at least, but for those that the guards leave a single one, and those of which the runtime
refuses every other, as a full window does: such a call raises, and gives no number.
"""

from __future__ import annotations

from typing import Any

from kvcompile.passes.graph.worlds import Values
from kvcompile.validation.sizes import named, symbols
from kvcompile.validation.subgraph import Subgraph

REFUSED = 4
"""Other values of a symbol that the runtime must refuse before it counts as one that has a single value."""


class Coverage:
    """Counts the values that each symbol of a program took."""

    def __init__(self, part: Subgraph) -> None:
        self.part = part
        self.refused: dict[Any, set[int]] = {symbol: set() for symbol in symbols(part)}
        single = part.guards.single(symbols(part))
        self.seen: dict[Any, set[int]] = {symbol: set() for symbol in symbols(part) if symbol not in single}

    def add(self, values: Values) -> None:
        """Count a call that was compared."""
        for symbol, taken in self.seen.items():
            taken.add(values[symbol])

    def refuse(self, base: Values, values: Values) -> None:
        """Count a call that the runtime refused; it says something of a symbol that alone was moved from ``base``."""
        changed = [symbol for symbol, value in values.items() if value != base[symbol]]
        if len(changed) == 1 and changed[0] in self.refused:
            self.refused[changed[0]].add(values[changed[0]])

    def wanted(self) -> set[Any]:
        """The symbols that took fewer than two values, and of which others were not refused."""
        return {symbol for symbol, taken in self.seen.items() if len(taken) < (1 if len(self.refused[symbol]) >= REFUSED else 2)}

    def missing(self) -> str:
        """Which symbols took one value in all calls, as a sentence."""
        missing = [f"{named(self.part, symbol)} = {next(iter(self.seen[symbol]), 'none')}" for symbol in sorted(self.wanted(), key=str)]
        return f"no call was found in which these sizes are others than in the first one compared: {', '.join(missing)}"
