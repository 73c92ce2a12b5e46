"""Worlds: values for a graph's symbolic sizes, all of which its guards admit; what is read of a graph must hold in more than one.

A size that Dynamo left symbolic has no number. Code that reads coordinates off samples needs numbers all the same, so it runs more than
once: in the world of the capture, and in another where every symbol that the guards let move has another value. What the runs disagree
on was no fact about the graph but about one call. ::

    captured at s0 = 9, s1 = 4     limit 9 in both worlds: a constant;     9, then 14: a size that was taken for one, refused
    moved to    s0 = 14, s1 = 11   limit s0 in both worlds: symbolic
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import sympy
import torch

from kvcompile.passes.graph.dynamo import ValueRanges, bound_sympy

Values = dict[Any, int]
"""A number for each symbol."""

SIZE_OFFSETS = (3, 5, 7, 11, 13, -1, -2, -3, 1, 2, 4, 8, 16, 32, 64, 128, -4, -5, -7, -8, -16, -32, -64)
"""By how much a symbol is moved, in the order of trying; multiples of powers of two, since guards ask for divisibility by those."""

TRIED = 1500
"""Ways to move a symbol that are tried."""

COUNTED = 1 << 12
"""Values of a symbol, and ranges of them, that are looked at to prove that its guards leave a single one."""

_current: ContextVar[Mapping[Any, int] | None] = ContextVar("world", default=None)


class SizeRead(TypeError):
    """Raised where a symbolic size is read as a number outside of a world: whatever comes of it would hold for one call only."""

    def __init__(self, size: object) -> None:
        super().__init__(f"expected a size that is a number, found the symbolic size {size}, whose value is another one in other calls")


def as_number(size: torch.SymInt) -> int:
    """A symbolic size in the current world; raises SizeRead outside of one."""
    expr, world = size.node.expr, _current.get()
    if expr.is_number:
        return int(expr)
    if world is None or not expr.free_symbols <= world.keys():
        raise SizeRead(expr)
    return int(expr.xreplace(world))


@contextmanager
def inside(world: Mapping[Any, int]) -> Iterator[None]:
    """Read symbolic sizes as they are in ``world``."""
    token = _current.set(world)
    try:
        yield
    finally:
        _current.reset(token)


class Guards:
    """The guards on a graph's symbols: their ranges, and what was asked of them.

    ``resize``: what each int in a guard is taken for. ``demands``: pairs of sizes that are equal in every call that runs at all, since an
    operator raises where they are not, though no guard says so.
    """

    def __init__(self, env: Any, resize: Callable[[int], int] | None = None, demands: Iterable[tuple[Any, Any]] = ()) -> None:
        self.env, self.resize = env, resize
        self.ranges = dict(env.var_to_range) if env is not None else {}
        asked = [guard.expr for guard in env.guards] if env is not None else []
        asked += [sympy.Eq(_expr(one), _expr(other)) for one, other in demands]
        found = [self._expression(guard) for guard in asked]
        self.asked = [(guard, guard.free_symbols) for guard in found if guard.free_symbols]

    def tied(self, symbol: Any) -> list[Any]:
        """The symbols that some guard names together with ``symbol``, in order of their names."""
        return sorted(set().union(*(symbols for _, symbols in self.asked if symbol in symbols)) - {symbol}, key=str)

    def admit(self, values: Values, changed: Iterable[Any] | None = None) -> bool:
        """Whether all guards hold, or those on ``changed`` symbols, as far as they name no symbol without a value."""
        if self.env is None:
            return True
        asked = set(values if changed is None else changed)
        for symbol in asked:
            bounds = self.env.var_to_range.get(symbol)
            if bounds is not None and not self.least(bounds) <= values[symbol] <= self.most(bounds):
                return False
        return all(
            holds(guard, values) for guard, symbols in self.asked
            if symbols <= values.keys() and (changed is None or not symbols.isdisjoint(asked))
        )

    def least(self, bounds: Any) -> int:
        """The smallest value of a range."""
        if not bounds.lower.is_Integer:
            return 0
        return int(bounds.lower) if self.resize is None else self.resize(int(bounds.lower))

    def most(self, bounds: Any) -> Any:
        """The largest value of a range, without end where it has none."""
        return self.resize(int(bounds.upper)) if self.resize is not None and bounds.upper.is_Integer else bounds.upper

    def single(self, symbols: Iterable[Any]) -> set[Any]:
        """The symbols of which it can be proved that they have one value; what is known of one is used for the others."""
        open_, found = set(symbols), set()
        while new := {symbol for symbol in open_ if self.fixed(symbol)}:
            found |= new
            open_ -= new
        return found

    def fixed(self, symbol: Any) -> bool:
        """Whether it can be proved that a symbol has one value: every other breaks a guard, whatever the other symbols are."""
        bounds = self.env.var_to_range.get(symbol) if self.env is not None else None
        if bounds is None or not bounds.lower.is_Integer:
            return False
        first, possible = int(bounds.lower), 0
        last = min(bounds.upper, first + COUNTED)
        if last < bounds.upper and self._possible(symbol, last + 1, bounds.upper):
            return False
        waiting, value = [(first, int(last))], first
        for _ in range(COUNTED):
            if not waiting:
                self.ranges[symbol] = ValueRanges(value, value)
                return True
            low, high = waiting.pop()
            if not self._possible(symbol, low, high):
                continue
            if low == high:
                possible, value = possible + 1, low
            if possible > 1:
                return False
            if low < high:
                middle = (low + high) // 2
                waiting += [(middle + 1, high), (low, middle)]
        return False

    def _possible(self, symbol: Any, low: Any, high: Any) -> bool:
        """Whether the guards may hold for a range of values of a symbol and all that the ranges of the others allow."""
        ranges = {**self.ranges, symbol: ValueRanges(low, high)}
        return all(bound_sympy(guard, ranges).upper != sympy.false for guard, symbols in self.asked if symbol in symbols)

    def _expression(self, guard: Any) -> Any:
        guard = self.env.replace(guard)
        if self.resize is None:
            return guard
        return guard.xreplace({item: sympy.Integer(self.resize(int(item))) for item in guard.atoms(sympy.Integer)})


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def holds(guard: Any, values: Values) -> bool:
    """Whether a guard is not false for some values; one that divides by zero there was made for others."""
    try:
        return bool(guard.xreplace(values) != sympy.false)
    except ZeroDivisionError:
        return False


def value_in_capture(env: Any, symbol: Any) -> int | None:
    """The value that a symbol had when the graph was captured; None for one whose value only the data gives."""
    known = getattr(env, "backed_var_to_val", None) or env.var_to_val
    return int(known[symbol]) if symbol in known else None


def empty_when_captured(size: torch.SymInt) -> bool:
    """Whether a symbolic int is 0 in the captured call, which is one of its values and no fact about it."""
    return bool(size.node.hint == 0)


def known_symbols(env: Any) -> tuple[Any, ...]:
    """The symbols of a shape environment that have a value in the capture, whatever became of them since; () without an environment."""
    if env is None:
        return ()
    # torch 2.11 has the other name.
    return tuple(env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val)


def symbols_of(values: Iterable[Any]) -> list[Any]:
    """All symbols of some fake values, themselves sizes or tensors of them, in order of their names."""
    found = set()
    for value in values:
        sizes = [value] if isinstance(value, torch.SymInt) else (*value.shape, *value.stride()) if _dense(value) else ()
        found |= {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}
    return sorted(found, key=str)


def _dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def neighbors(guards: Guards, values: Values, symbol: Any) -> Iterator[tuple[Values, set[Any]]]:
    """The values with ``symbol`` moved, and what moved: by itself first, then with others that may be tied to it, as far or against it."""
    tied = [other for other in guards.tied(symbol) if other in values]
    others = [*tied, *(other for other in values if other is not symbol and other not in tied)]
    alike = [other for other in others if values[other] == values[symbol]]
    groups: list[dict[Any, int]] = [{}, dict.fromkeys(tied, 1), dict.fromkeys(alike, 1), *({other: 1} for other in others)]
    groups += [dict.fromkeys(others, 1), *({other: -1} for other in others)]
    groups += [dict.fromkeys(pair, 1) for pair in itertools.combinations(others, 2)]
    unique = [dict(group) for group in dict.fromkeys(frozenset(group.items()) for group in groups)]
    # Every group by a step or two first: a program may run with none of the ways in which one symbol moves.
    for steps, group in itertools.product((SIZE_OFFSETS[:2], SIZE_OFFSETS[2:]), unique):
        for step in steps:
            changed = {symbol: 1, **group}
            yield {**values, **{item: values[item] + sign * step for item, sign in changed.items()}}, set(changed)


def moved(guards: Guards, start: Values, avoid: frozenset[int] = frozenset()) -> Values:
    """Values that the guards admit in which every symbol of ``start`` is another one, as far as a way was found.

    No value is that of another symbol, nor in ``avoid``, where that can be helped: sizes that are equal by chance look alike.
    """
    current = dict(start)
    for symbol in start:
        if current[symbol] != start[symbol]:
            continue
        found: Values | None = None
        for way, changed in itertools.islice(neighbors(guards, current, symbol), TRIED):
            if way[symbol] == start[symbol] or min(way[item] for item in changed) < 2 or not guards.admit(way, changed):
                continue
            found = found or way
            rest = {value for item, value in way.items() if item is not symbol}
            if way[symbol] not in rest | avoid | set(start.values()):
                found = way
                break
        current = found or current
    return current
