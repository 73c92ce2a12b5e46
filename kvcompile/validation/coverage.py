"""Coverage: the values that a program's symbolic sizes took in the calls that were compared.

A rewrite that mistook a symbolic size for a number equals its program in every call with that size. So a verdict is EQUAL only if every
symbol took two values. Exceptions are symbols with a single value that the guards admit, and symbols whose other values the runtime
refuses, as a full window does: such a call raises, and has no wrong result.
"""

from __future__ import annotations

from typing import Any

from kvcompile.passes.graph.worlds import Values
from kvcompile.validation.sizes import named, symbols
from kvcompile.validation.subgraph import Subgraph

REFUSED = 4
"""How many other values of a symbol the runtime must refuse before one compared value is enough."""


class Coverage:
    """The values that each symbol of a program took in compared calls, and those that the runtime refused."""

    def __init__(self, part: Subgraph) -> None:
        self.part = part
        self.refused: dict[Any, set[int]] = {symbol: set() for symbol in symbols(part)}
        single = part.guards.single(symbols(part))
        self.seen: dict[Any, set[int]] = {symbol: set() for symbol in symbols(part) if symbol not in single}

    def add(self, values: Values) -> None:
        """Record the sizes of a call that was compared."""
        for symbol, taken in self.seen.items():
            taken.add(values[symbol])

    def refuse(self, base: Values, values: Values) -> None:
        """Record the sizes of a call that the runtime refused, if exactly one symbol differs from ``base``; otherwise record nothing."""
        changed = [symbol for symbol, value in values.items() if value != base[symbol]]
        if len(changed) == 1 and changed[0] in self.refused:
            self.refused[changed[0]].add(values[changed[0]])

    def wanted(self) -> set[Any]:
        """Return the symbols that took fewer than two values, except those of which the runtime refused enough other values."""
        return {symbol for symbol, taken in self.seen.items() if len(taken) < (1 if len(self.refused[symbol]) >= REFUSED else 2)}

    def missing(self) -> str:
        """Return the symbols that took too few values, as a sentence."""
        missing = [f"{named(self.part, symbol)} = {next(iter(self.seen[symbol]), 'none')}" for symbol in sorted(self.wanted(), key=str)]
        return f"no call was found in which these sizes are others than in the first one compared: {', '.join(missing)}"
