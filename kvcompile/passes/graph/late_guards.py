"""Late guards: detect sizes that a compilation specialises after Dynamo has finished a frame's guards.

A variant is compiled by the first call that needs it, usually long after the frame. By then Dynamo's guards are fixed: the shape
environment records a new specialisation but adds no guard for it. All code compiled from then on would use that number, and nothing
would keep that code from a call of another size.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kvcompile.passes.graph.worlds import known_symbols


@dataclass(frozen=True)
class Beliefs:
    """A copy of the replacements and ranges of a shape environment's symbols."""

    env: Any
    replacements: dict[Any, Any]
    ranges: dict[Any, Any]

    @staticmethod
    def of(env: Any) -> Beliefs:
        """Return a copy of the current replacements and ranges of ``env``; an empty one for None."""
        return Beliefs(env, {}, {}) if env is None else Beliefs(env, dict(env.replacements), dict(env.var_to_range))

    def take_back(self, ours: Collection[Any] = ()) -> dict[Any, Any]:
        """Undo replacements in the ShapeEnv since this copy was made; return them as {symbol: replacement}, empty if there are none.

        Only replacements of the symbols in ``ours`` and, once the ShapeEnv is frozen, of all its symbols count; if there is one, all
        replacements and ranges are restored. If they stayed, code compiled later would be specialised for their numbers.
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
        # torch caches answers, some keyed by these version counters and some without a key.
        for name in ("_replacements_version_counter", "_version_counter"):
            if hasattr(self.env, name):
                setattr(self.env, name, getattr(self.env, name) + 1)
        for answers in vars(type(self.env)).values():
            if hasattr(answers, "cache_clear"):
                answers.cache_clear()
