"""Sessions: the calls of a program that are tried, one after another over one cache, with the sizes of each.

An int argument that is the size of no tensor may count tokens, and then grows from call to call; or it is a fixed length, such as a
window's. Which ints count is guessed, the likeliest guess first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.graph.worlds import Values
from kvcompile.validation.arguments import Arguments
from kvcompile.validation.candidates import TrialCall
from kvcompile.validation.coverage import Coverage
from kvcompile.validation.sizes import allowed, hints, loose, others, past, pasts, read
from kvcompile.validation.subgraph import Subgraph

MIDDLE = 128
"""The cache length from which calls also start in the middle, at positions that a coarse dtype does not hold exactly."""
LARGE = 37.0
"""The spread of random values in slots that are not written yet."""

Tried = tuple[list[TrialCall], float]
"""Calls one after another, and the spread of random values in slots that are not written yet."""


def countings(part: Subgraph, arguments: Arguments) -> list[frozenset[Any]]:
    """Return guesses at which of a program's ints count tokens, the likeliest first.

    If the captured sizes show how many tokens preceded the captured call, the likely counters are the ints with that value.
    """
    ints = frozenset(loose(part))
    known = hints(part)
    starts = {read(offset if isinstance(offset, int) else value_of(offset), known) for offset in arguments.offsets}
    grown = [slot for site in part.sites for slot in site.slots if slot.kind.facts.extended and slot.sliding is None]
    starts |= {read(past(slot), known) for slot in grown} if not starts else set()
    likely = frozenset(symbol for symbol in ints if known[symbol] in starts) if len(starts) == 1 else ints
    return list(dict.fromkeys((likely, ints, frozenset())))


@dataclass(frozen=True)
class Sessions:
    """Generates the sessions that trials run, each of up to three successive calls over one cache.

    ``counters``: the program's symbols that are taken to count the tokens of the cache.
    """

    part: Subgraph
    arguments: Arguments
    counters: frozenset[Any]

    def all(self, sizes: Values) -> Iterator[Tried]:
        """Yield the sessions to try at ``sizes``, each with the scale of random numbers in unwritten slots (0: zeros)."""
        # In float32 such large scores are too inexact to compare.
        hostile = all(value_of(node).dtype is torch.float64 for node in self.arguments.queries)
        slidings = bool(self.counters) and self._sliding()
        for values in pasts(self.part, sizes):
            starts, room = self._starts(values)
            count = self.arguments.tokens(TrialCall(values, 0))
            for start in starts:
                once = (room is None and not slidings) or bool(self.arguments.offsets and not self.counters)
                session = self._session(values, start, count, 1 if once else 3, room)
                if session:
                    yield session, 0.0
                if session and start:
                    yield session[:1], LARGE
                if session and hostile:
                    yield [dataclasses.replace(session[0], hostile=True)], LARGE if start else 0.0
                if session and (self.arguments.limiting or (self.arguments.open and self.arguments.free)):
                    yield [dataclasses.replace(moment, ahead=True) for moment in session], 0.0

    def elsewhere(self, values: Values, covered: Coverage) -> Iterator[Tried]:
        """Yield sessions of one call at other sizes, until every symbol took as many values as ``covered`` requires."""
        for other in others(self.part, values, covered.wanted):
            starts, room = self._starts(other)
            count = self.arguments.tokens(TrialCall(other, 0))
            for start in starts[-2:]:
                if session := self._session(other, start, count, 1, room):
                    yield session, 0.0

    def _sliding(self) -> bool:
        return any(slot.sliding is not None for site in self.part.sites for slot in site.slots)

    def _starts(self, values: Values) -> tuple[list[int], int | None]:
        """Return the positions at which a call's first token may be, and the room of the cache in tokens, None without an end."""
        part, arguments = self.part, self.arguments
        buffers = [slot for site in part.sites for slot in site.slots if slot.kind.facts.filled]
        counted = [values[symbol] for symbol in self.counters]
        if counted and self._sliding():
            # Slots are overwritten: there is no last position, and a cache's contents do not show its tokens' positions.
            return sorted({0, *counted}), None
        fixed = [offset if isinstance(offset, int) else read(value_of(offset), values) for offset in arguments.offsets]
        count = arguments.tokens(TrialCall(values, 0))
        if arguments.pooled:
            room = arguments.keys(TrialCall(values, 0))
            return sorted({start for start in (0, min(6, room // 3), room - count) if 0 <= start <= room - count}), room
        if not buffers:
            before = [read(past(slot), values) for site in part.sites for slot in site.slots if slot.kind.facts.extended]
            start = fixed[0] if fixed else before[0] if before else 0
            # A cache that was cut to a window holds fewer tokens than Python counted.
            return [start] if not counted or self._at(values, start, 0) else counted, None
        room = min(read(slot.axes.room(value_of(slot.root).shape), values) for slot in buffers)
        if fixed and not counted:
            return [fixed[0]], room
        middle = (room // 2 + 1,) if room >= MIDDLE else ()
        return sorted({start for start in (0, min(6, room // 3), *middle, room - count, *counted) if 0 <= start <= room - count}), room

    def _session(self, values: Values, start: int, count: int, calls: int, room: int | None) -> list[TrialCall]:
        """Return up to ``calls`` successive calls of ``count`` tokens from position ``start`` on.

        There are fewer if the cache's room or the guards end them.
        """
        session: list[TrialCall] = []
        for at in range(start, start + count * calls, count):
            now = self._at(values, at, at - start)
            if now is None or (room is not None and at + count > room):
                break
            session.append(TrialCall(now, at, padded=1))
        return session

    def _at(self, values: Values, at: int, moved: int) -> Values | None:
        """Return the sizes of a call ``moved`` tokens after the first, with counters at ``at``; None where the guards admit none.

        Other sizes stay, or grow by ``moved``.
        """
        for grown in dict.fromkeys((0, moved)):
            now = {symbol: at if symbol in self.counters else value + grown for symbol, value in values.items()}
            if allowed(self.part, now):
                return now
        return None
