"""Sessions: the calls of a program that are tried, one after another over one cache, and the sizes that each of them has.

An int among a program's arguments that is no tensor's size may count tokens, and then moves with them, or be a length of its own, as that
of a window, and stays where it is. Which of them count is a reading like any other: the likeliest is tried first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.graph.worlds import Values
from kvcompile.validation.arguments import Arguments, Moment
from kvcompile.validation.coverage import Coverage
from kvcompile.validation.sizes import allowed, hints, loose, others, past, pasts, read
from kvcompile.validation.subgraph import Subgraph

MIDDLE = 128
"""Places of a cache from which on calls start in its middle too, where a coarse dtype holds no position exactly."""
LARGE = 37.0
"""The spread of what lies in places that nobody wrote yet."""

Tried = tuple[list[Moment], float]
"""Calls one after another, and what lies in places that nobody wrote yet."""


def countings(part: Subgraph, arguments: Arguments) -> list[frozenset[Any]]:
    """Return which of a program's ints count tokens, the likeliest reading first.

    Where the sizes of the capture say how many tokens came before its call, a counter says the same.
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
    """Make the calls with which a trial compares a program, given the symbols (``counters``) that count tokens."""

    part: Subgraph
    arguments: Arguments
    counters: frozenset[Any]

    def all(self, sizes: Values) -> Iterator[Tried]:
        """Give the sessions that are tried at some sizes."""
        # In float32 scores so large say nothing.
        hostile = all(value_of(node).dtype is torch.float64 for node in self.arguments.queries)
        slidings = bool(self.counters) and self._sliding()
        for values in pasts(self.part, sizes):
            starts, room = self._starts(values)
            count = self.arguments.tokens(Moment(values, 0))
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
        """Give sessions of one call at other sizes, as long as some symbol wants them."""
        for other in others(self.part, values, covered.wanted):
            starts, room = self._starts(other)
            count = self.arguments.tokens(Moment(other, 0))
            for start in starts[-2:]:
                if session := self._session(other, start, count, 1, room):
                    yield session, 0.0

    def _sliding(self) -> bool:
        return any(slot.sliding is not None for site in self.part.sites for slot in site.slots)

    def _starts(self, values: Values) -> tuple[list[int], int | None]:
        """(positions at which the first token of a call may lie, the room of the cache, None without an end)."""
        part, arguments = self.part, self.arguments
        buffers = [slot for site in part.sites for slot in site.slots if slot.kind.facts.filled]
        counted = [values[symbol] for symbol in self.counters]
        if counted and self._sliding():
            # Places are written over again: there is no last position, and what a cache holds does not tell where its tokens are.
            return sorted({0, *counted}), None
        fixed = [offset if isinstance(offset, int) else read(value_of(offset), values) for offset in arguments.offsets]
        count = arguments.tokens(Moment(values, 0))
        if arguments.pooled:
            room = arguments.keys(Moment(values, 0))
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

    def _session(self, values: Values, start: int, count: int, calls: int, room: int | None) -> list[Moment]:
        """Up to ``calls`` calls of ``count`` tokens one after another, as far as the room and the guards let them."""
        session: list[Moment] = []
        for at in range(start, start + count * calls, count):
            now = self._at(values, at, at - start)
            if now is None or (room is not None and at + count > room):
                break
            session.append(Moment(now, at, padded=1))
        return session

    def _at(self, values: Values, at: int, moved: int) -> Values | None:
        """The sizes of a call ``moved`` tokens after the first, where Python's counters say ``at``; None where the guards allow none."""
        for grown in dict.fromkeys((0, moved)):
            now = {symbol: at if symbol in self.counters else value + grown for symbol, value in values.items()}
            if allowed(self.part, now):
                return now
        return None
