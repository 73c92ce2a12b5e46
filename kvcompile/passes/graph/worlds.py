"""Worlds: values for a graph's symbolic sizes that its guards admit; a fact about the graph must hold in more than one world.

A size that Dynamo left symbolic has no number. Code that reads sampled coordinates needs numbers, so it runs twice: in the world of the
capture, and in a world with another value for every symbol that the guards let change. Where the runs disagree, the result is a
fact about one call, not about the graph. ::

    captured at s0 = 9, s1 = 4     limit 9 in both worlds: a constant;     9, then 14: a size mistaken for a constant, refused
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
"""Offsets to add to a symbol, in the order of trying; multiples of powers of two are among them, as guards require divisibility by them."""

TRIED = 1500
"""Largest number of candidate worlds that are tried for one symbol."""

COUNTED = 1 << 12
"""Largest number of values, and of ranges, that are examined to prove that the guards fix a symbol."""

_current: ContextVar[Mapping[Any, int] | None] = ContextVar("world", default=None)


class SizeRead(TypeError):
    """Raised when a symbolic size is read as a number outside of a world: the result would hold for one call only."""

    def __init__(self, size: object) -> None:
        super().__init__(f"expected a size that is a number, found the symbolic size {size}, whose value is another one in other calls")


def as_number(size: torch.SymInt) -> int:
    """Return a symbolic size as an int, in the current world. Raises SizeRead outside of one."""
    expr, world = size.node.expr, _current.get()
    if expr.is_number:
        return int(expr)
    if world is None or not expr.free_symbols <= world.keys():
        raise SizeRead(expr)
    return int(expr.xreplace(world))


@contextmanager
def inside(world: Mapping[Any, int]) -> Iterator[None]:
    """Make ``as_number`` read symbolic sizes from ``world`` inside of the context."""
    token = _current.set(world)
    try:
        yield
    finally:
        _current.reset(token)


class Guards:
    """Guards on a graph's symbols: ranges and conditions.

    ``resize``: maps an int in a guard to the int to use in its place, or to None to keep it. ``demands``: pairs of sizes that are equal in
    every call that succeeds, since an operator raises otherwise, though no guard states it.
    """

    def __init__(self, env: Any, resize: Callable[[int], int] | None = None, demands: Iterable[tuple[Any, Any]] = ()) -> None:
        self.env, self.resize = env, resize
        self.ranges = dict(env.var_to_range) if env is not None else {}
        asked = [guard.expr for guard in env.guards] if env is not None else []
        asked += [sympy.Eq(_expr(one), _expr(other)) for one, other in demands]
        found = [self._expression(guard) for guard in asked]
        self.asked = [(guard, guard.free_symbols) for guard in found if guard.free_symbols]

    def tied(self, symbol: Any) -> list[Any]:
        """Return the symbols that share a guard with ``symbol``, sorted by name."""
        return sorted(set().union(*(symbols for _, symbols in self.asked if symbol in symbols)) - {symbol}, key=str)

    def admit(self, values: Values, changed: Iterable[Any] | None = None) -> bool:
        """Return whether ``values`` satisfy all guards, or all guards on ``changed`` symbols; guards on unknown symbols are skipped."""
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
        """Return the smallest value of the range ``bounds``, mapped by ``resize`` if given; 0 if the range has no finite lower end."""
        if not bounds.lower.is_Integer:
            return 0
        return int(bounds.lower) if self.resize is None else self.resize(int(bounds.lower))

    def most(self, bounds: Any) -> Any:
        """Return the largest value of the range ``bounds``, mapped by ``resize`` if given; infinite if the range has no upper end."""
        return self.resize(int(bounds.upper)) if self.resize is not None and bounds.upper.is_Integer else bounds.upper

    def single(self, symbols: Iterable[Any]) -> set[Any]:
        """Return the symbols with provably one value; each proof narrows the ranges for the next ones."""
        open_, found = set(symbols), set()
        while new := {symbol for symbol in open_ if self.fixed(symbol)}:
            found |= new
            open_ -= new
        return found

    def fixed(self, symbol: Any) -> bool:
        """Return whether a symbol provably has one value: any other breaks a guard, for all values of the other symbols.

        False if that cannot be proved. If so, the range of the symbol becomes that value.
        """
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
        """Return whether the guards may hold for some value of ``symbol`` from ``low`` to ``high``, given the other symbols' ranges."""
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
    """Return whether a guard is not false for ``values``; a division by zero counts as false."""
    try:
        return bool(guard.xreplace(values) != sympy.false)
    except ZeroDivisionError:
        return False


def value_in_capture(env: Any, symbol: Any) -> int | None:
    """Return the value of a symbol at capture; None for a symbol that depends on data."""
    known = getattr(env, "backed_var_to_val", None) or env.var_to_val
    return int(known[symbol]) if symbol in known else None


def empty_when_captured(size: torch.SymInt) -> bool:
    """Return whether a symbolic int is 0 in the captured call; other calls may differ."""
    return bool(size.node.hint == 0)


def known_symbols(env: Any) -> tuple[Any, ...]:
    """Return all symbols of a shape environment with a value at capture, replaced ones included; () without an environment."""
    if env is None:
        return ()
    # torch 2.11 names it var_to_val.
    return tuple(env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val)


def symbols_of(values: Iterable[Any]) -> list[Any]:
    """Return all symbols in fake values (SymInts, or sizes and strides of tensors), sorted by name."""
    found = set()
    for value in values:
        sizes = [value] if isinstance(value, torch.SymInt) else (*value.shape, *value.stride()) if _dense(value) else ()
        found |= {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}
    return sorted(found, key=str)


def _dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def neighbors(guards: Guards, values: Values, symbol: Any) -> Iterator[tuple[Values, set[Any]]]:
    """Yield (values with ``symbol`` moved, the moved symbols): first alone, then together with others, by equal or opposite steps."""
    tied = [other for other in guards.tied(symbol) if other in values]
    others = [other for other in dict.fromkeys((*tied, *values)) if other is not symbol]
    alike = [other for other in others if values[other] == values[symbol]]
    groups: list[dict[Any, int]] = [{}, dict.fromkeys(tied, 1), dict.fromkeys(alike, 1), *({other: 1} for other in others)]
    groups += [dict.fromkeys(others, 1), *({other: -1} for other in others)]
    groups += [dict.fromkeys(pair, 1) for pair in itertools.combinations(others, 2)]
    unique = [dict(group) for group in dict.fromkeys(frozenset(group.items()) for group in groups)]
    # Try every group with two offsets first: few of the ways to move one symbol may give a program that runs.
    for steps, group in itertools.product((SIZE_OFFSETS[:2], SIZE_OFFSETS[2:]), unique):
        for step in steps:
            changed = {symbol: 1, **group}
            yield {**values, **{item: values[item] + sign * step for item, sign in changed.items()}}, set(changed)


def moved(guards: Guards, start: Values, avoid: frozenset[int] = frozenset()) -> Values:
    """Return values, admitted by the guards, in which every symbol of ``start`` has another value, as far as it can be moved.

    Prefers values that differ from those of other symbols, of ``start`` and of ``avoid``: sizes that are equal by chance look alike.
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
