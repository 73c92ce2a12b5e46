"""Late guards: what a compilation asks of sizes after Dynamo has made a frame's guards.

A variant is compiled by the first call that needs it, mostly when the frame is long compiled. Dynamo's guards are made then: a shape
environment ignores what is asked of it later, but believes it. So a size that an operation reads as a number is that number in all
code that is made from then on, and nothing keeps that code from a call of another size.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kvcompile.passes.graph.worlds import known_symbols


@dataclass(frozen=True)
class Beliefs:
    """A copy of the replacements and ranges that a shape environment holds for its symbols."""

    env: Any
    replacements: dict[Any, Any]
    ranges: dict[Any, Any]

    @staticmethod
    def of(env: Any) -> Beliefs:
        """Note what an environment believes now; None has no symbols."""
        return Beliefs(env, {}, {}) if env is None else Beliefs(env, dict(env.replacements), dict(env.var_to_range))

    def take_back(self, ours: Collection[Any] = ()) -> dict[Any, Any]:
        """Return replacements made since, by symbol: those of ``ours``, and of the frame's symbols once the environment is frozen.

        Where there are any the environment is restored, so that no later code is made for these numbers.
        """
        if self.env is None:
            return {}
        asked = {*ours, *(known_symbols(self.env) if self.env.frozen else ())}
        now = self.env.replacements
        fixed = {symbol: now[symbol] for symbol in now if symbol in asked and now[symbol] != self.replacements.get(symbol)}
        if fixed:
            self._restore()
        return fixed

    def _restore(self) -> None:
        self.env.replacements.clear()
        self.env.replacements.update(self.replacements)
        self.env.var_to_range.update(self.ranges)
        # Answers are kept by how many beliefs there were, and some for good.
        for name in ("_replacements_version_counter", "_version_counter"):
            if hasattr(self.env, name):
                setattr(self.env, name, getattr(self.env, name) + 1)
        for answers in vars(type(self.env)).values():
            if hasattr(answers, "cache_clear"):
                answers.cache_clear()
