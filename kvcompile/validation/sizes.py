"""Sizes: small values for the symbols of a cut program that its guards admit, and smaller numbers in place of its large constants.

A program over a cache of 131,072 tokens is the same program over one of 23, if every 131,072 in it (and 131,071) is replaced alike. Which
numbers to replace is found by trying: a replacement with which the program does not run is dropped.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import sympy
import torch

from kvcompile.passes.graph.casts import holds, integers
from kvcompile.passes.graph.operators import COPIES
from kvcompile.passes.graph.shapes import is_tensor, op_name, value_of
from kvcompile.passes.graph.worlds import Values, moved, neighbors, value_in_capture
from kvcompile.passes.match.sites import Slot
from kvcompile.validation.subgraph import NotApart, Number, Subgraph

SMALL = 48
"""The largest size that keeps its captured value."""
MOST_ELEMENTS = 1 << 22
"""The most elements that a program's largest tensor may have for the program to be tried."""
LONG = 64
"""The least length in tokens that is made smaller where a program is too large."""
LEAST_SIZE = 4
"""Replacements of large numbers are larger than this, and than all lengths that stay."""
LARGEST = 1 << 12
"""A dtype that holds all integers up to this is not tried at positions that it rounds."""
NEAR = 8
"""The largest distance of two numbers that their replacements keep."""
UNBACKED = 7
"""The value of a symbol that had none in the capture."""
WAYS = 12
"""The most ways to move a symbol with which calls are tried."""
LOOKED_AT = 600
"""The most ways to move a symbol that are checked against the guards."""
TRIED = (5, 7, 11, 2, 3, 16, 24, 1, 64)

def symbols(part: Subgraph) -> list[Any]:
    """Return all symbols of the program's arguments, sorted by name."""
    found = set()
    for fake in part.captured.fakes:
        sizes = [fake] if isinstance(fake, torch.SymInt) else fake.shape if isinstance(fake, torch.Tensor) else ()
        found |= {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}
    return sorted(found, key=str)


def read(size: Any, values: Values) -> int:
    """Return an int or symbolic size as an int, with ``values`` for the symbols."""
    return size if isinstance(size, int) else int(size.node.expr.xreplace(values))


def allowed(part: Subgraph, values: Values) -> bool:
    """Return whether the captured graph's guards admit ``values`` for the program's symbols.

    Guards that name other symbols do not count.
    """
    return part.guards.admit(values)


def hints(part: Subgraph) -> Values:
    """Return the value that each symbol of the program had in the capture; ``UNBACKED`` for a symbol that had none."""
    env = part.captured.fake_mode.shape_env
    found = {symbol: value_in_capture(env, symbol) for symbol in symbols(part)}
    return {symbol: UNBACKED if value is None else value for symbol, value in found.items()}


def captured_values(part: Subgraph) -> Values:
    """Return small values for all symbols: those of the capture where these are small, or where the guards admit no smaller ones.

    A guard may tie a large size to small ones (a mask's length to those of a cache and a prompt), make two sizes equal, or keep a past at
    the end of its window. Raises NotApart where the guards admit no small values and the captured ones are too large.
    """
    known = hints(part)
    large = [symbol for symbol, value in known.items() if value > SMALL]
    chosen = (_chosen(part, known, group) for group in ([[each] for each in large], _alike(known, large), _alike(known, list(known))))
    for values in chosen:
        if values is not None:
            return values
    if allowed(part, known) and elements(part, known) <= MOST_ELEMENTS:
        return known
    raise NotApart("no small sizes fit its guards")


def _alike(known: Values, symbols: list[Any]) -> list[list[Any]]:
    """Return the symbols in groups whose members had equal values in the capture."""
    return [[symbol for symbol in symbols if known[symbol] == value] for value in dict.fromkeys(known[symbol] for symbol in symbols)]


def _chosen(part: Subgraph, known: Values, groups: list[list[Any]]) -> Values | None:
    """Return values that the guards admit, a different one for each group of symbols, others as captured; None where none was found."""
    env = part.captured.fake_mode.shape_env
    tried = []
    for group in groups:
        ranges = [env.var_to_range.get(symbol) for symbol in group] if env is not None else [None]
        least = max(part.guards.least(bounds) if bounds is not None else 2 for bounds in ranges)
        tried.append(dict.fromkeys((*TRIED, least, least + 5)))
    for choice in itertools.islice(itertools.product(*tried), 2000):
        values = {**known, **{symbol: value for group, value in zip(groups, choice, strict=True) for symbol in group}}
        if len(set(choice)) == len(choice) and allowed(part, values):
            return values
    return None


def loose(part: Subgraph) -> set[Any]:
    """Return the symbols of int arguments that are not the size of a tensor, such as positions that the model counts in Python."""
    ints = {symbol for fake in part.captured.fakes if isinstance(fake, torch.SymInt) for symbol in fake.node.expr.free_symbols}
    values: tuple[Any, ...] = (*(value_of(node) for node in part.captured.graph.nodes), *part.captured.fakes)
    shapes: list[Any] = [value.shape for value in values if isinstance(value, torch.Tensor)]
    return ints - {symbol for shape in shapes for size in shape if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}


def past(slot: Slot) -> Any:
    """Return how many tokens a cache that grows by concatenation holds before a call, an int or a SymInt."""
    before = slot.placeholder if slot.write.position.past is None else slot.write.position.past
    return value_of(slot.root if before is None else before).shape[slot.axes.token_dim]


def pasts(part: Subgraph, values: Values) -> Iterator[Values]:
    """Yield ``values``, and then the same values with other lengths of the past for caches that grow by concatenation."""
    yield values
    grown = {
        symbol for site in part.sites for slot in site.slots if slot.kind.facts.extended
        for size in [past(slot)] if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
    }
    # A sliding cache may have been captured before it was full; with a longer past it is another program.
    slidings = any(slot.sliding is not None for site in part.sites for slot in site.slots)
    for length in (2, 19):
        changed = {**values, **dict.fromkeys(grown, length)}
        if grown and allowed(part, changed) and not (slidings and any(length > values[symbol] for symbol in grown)):
            yield changed


def others(part: Subgraph, values: Values, wanted: Callable[[], set[Any]]) -> Iterator[Values]:
    """Yield values that the guards admit, with other values for the symbols that ``wanted()`` returns, small ones first.

    First all of these symbols change together, then each alone, then with the symbols that may be tied to it: sizes may depend on one
    another in ways that no guard shows. ``wanted`` is called again each time.
    """
    if not wanted():
        return
    together = moved(part.guards, values)
    if together != values and _small(part, together, values):
        yield together
    for symbol in sorted(wanted(), key=str):
        if symbol not in values:
            continue
        tried = 0
        for way, changed in itertools.islice(neighbors(part.guards, values, symbol), LOOKED_AT):
            if symbol not in wanted() or tried == WAYS:
                break
            if min(way[item] for item in changed) >= 0 and allowed(part, way) and _small(part, way, values):
                tried += 1
                yield way


def _small(part: Subgraph, values: Values, base: Values) -> bool:
    """Return whether all sizes are small or at most twice those of ``base``, and no tensor of the program is too large to try."""
    return all(value <= max(4 * SMALL, 2 * base[symbol]) for symbol, value in values.items()) and elements(part, values) <= MOST_ELEMENTS


def named(part: Subgraph, symbol: Any) -> str:
    """Return a symbol's name in messages: the argument or the argument's size (``x.shape[0]``) that it is; else the symbol as text."""
    for entry, fake in zip(part.captured.inputs, part.captured.fakes, strict=True):
        if isinstance(fake, torch.SymInt) and fake.node.expr == symbol:
            return entry.source
        for dim, size in enumerate(fake.shape if isinstance(fake, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                return f"{entry.source}.shape[{dim}]"
    return str(symbol)


def elements(part: Subgraph, values: Values) -> int:
    """Return the number of elements of the program's largest tensor, for symbols of these values; a size with other symbols counts as 1."""
    shapes = [value_of(node).shape for node in part.captured.graph.nodes if isinstance(value_of(node), torch.Tensor)]
    return max(math.prod(read(size, values) if _known(size, values) else 1 for size in shape) for shape in shapes)


def _known(size: Any, values: Values) -> bool:
    return isinstance(size, int) or size.node.expr.free_symbols <= set(values)


def _numbers(value: Any) -> Iterator[int]:
    """Yield the absolute values of all ints in a record of the matcher, or in the operands of a node."""
    if type(value) is int:
        yield abs(value)
    elif isinstance(value, (list, tuple, frozenset)):
        for item in value:
            yield from _numbers(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from _numbers(getattr(value, item.name))


def _lengths(part: Subgraph) -> set[int]:
    """Return the lengths in tokens that are plain numbers in a program: of its caches, its calls and its windows."""
    found: set[int] = set()
    for site in part.sites:
        for slot in site.slots:
            found |= set(_numbers([value_of(slot.root).shape[dim] for dim in slot.axes.token_dims]))
            found |= set(_numbers([slot.write.count, slot.sliding, slot.capacity, slot.write.position.offset]))
        found |= set(_numbers([site.tokens, site.bounds.hi, site.bounds.lo]))
        found |= set(_numbers(list(value_of(site.attention.k).shape)[site.attention.k_roles.index("T")]))
    return found


def _asked(part: Subgraph) -> set[int]:
    """Return the ends of the ranges of the program's symbols, and the ints in those guards that name no other symbols."""
    env, found = part.captured.fake_mode.shape_env, set[int]()
    for symbol in symbols(part):
        bounds = env.var_to_range.get(symbol) if env is not None else None
        found |= {int(end) for end in (bounds.lower, bounds.upper) if end.is_Integer} if bounds is not None else set()
    for guard, names in part.guards.asked:
        if names <= set(symbols(part)):
            found |= {abs(int(item)) for item in guard.atoms(sympy.Integer)}
    return found


def _coarse(part: Subgraph) -> int:
    """Return a cache length at which some positions cannot be represented in a dtype that the program casts integers to.

    It is twice the number up to which such a dtype holds all integers: 512 for bfloat16. 0 without such a cast.
    """
    casts = [
        value_of(node).dtype for node in part.captured.graph.nodes if op_name(node) in COPIES and is_tensor(node.args[0])
        and not holds(value_of(node.args[0]).dtype, value_of(node).dtype) and not value_of(node.args[0]).dtype.is_floating_point
    ]
    return max((2 * integers(dtype) for dtype in casts if 1 < integers(dtype) < LARGEST), default=0)


def reductions(part: Subgraph) -> Iterator[Number]:
    """Yield maps that make a program's large ints smaller, the most thorough first."""
    known = _lengths(part)
    lengths, least = {number for number in known if number >= LONG}, max((number for number in known if number < LONG), default=0)
    literal = {number for node in part.captured.graph.nodes for number in _numbers([*node.args, *node.kwargs.values()])}
    near = {number for number in literal | _asked(part) if any(abs(number - length) <= NEAR for length in lengths)}
    large = {number for number in literal | lengths if 3 * LONG <= number < 1 << 31}
    least = max(least, _coarse(part))
    for chosen in dict.fromkeys((frozenset(large | lengths | near), frozenset(lengths | near))):
        yield _smaller(chosen, max(least, LEAST_SIZE))


def _smaller(numbers: Iterable[int], least: int = LEAST_SIZE) -> Number:
    """Return a map of these numbers to small ones above ``least``: in order, with distances up to NEAR kept, other numbers unchanged."""
    resized: dict[int, int] = {}
    last = None
    small = least
    for number in sorted(numbers):
        small = small + number - last if last is not None and number - last <= NEAR else small + 2 * NEAR - 1
        resized[number], last = small, number
    return lambda number: resized.get(number, number) if number >= 0 else -resized.get(-number, -number)
