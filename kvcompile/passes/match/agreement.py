"""Agreement: what is read of a graph, read in more than one world (``graph.worlds``), and kept where it is the same in all.

Recognition works on samples of coordinates, which are numbers. A number that it took from a symbolic size is another one where that size
is; a record that holds only nodes, symbolic sizes and numbers of the program's own is the same in every world.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import fx

from kvcompile.passes.graph.shapes import op_name, operand, same, value_of
from kvcompile.passes.graph.worlds import Guards, Values, inside, moved, symbols_of, value_in_capture
from kvcompile.passes.match.sites import Miss

T = TypeVar("T")

LEFT = {"index", "others", "line", "path"}
"""Fields of records that say nothing of what is computed: numbering, readings that were not taken, names."""

DISAGREED = "what was read of it holds only where the sizes of the graph are those of the call that it was captured with"
ADVICE = "please report this module: the matcher took a symbolic size for a number"

_made: WeakKeyDictionary[fx.Graph, tuple[int, tuple[Values, ...]]] = WeakKeyDictionary()


def worlds(graph: fx.Graph) -> tuple[Values, ...]:
    """The world of the capture, and one in which every symbol is another one, as far as the guards let it; one where none is symbolic."""
    env = _env(graph)
    if env is None:
        return ({},)
    if graph not in _made or _made[graph][0] != len(env.guards):
        symbols = symbols_of(value_of(node) for node in graph.nodes)
        known = {symbol: value for symbol in symbols if (value := value_in_capture(env, symbol)) is not None}
        other = moved(Guards(env, demands=demands(graph)), known, _numbers(graph))
        _made[graph] = len(env.guards), (known,) if other == known else (known, other)
    return _made[graph][1]


def demands(graph: fx.Graph) -> list[tuple[Any, Any]]:
    """Pairs of sizes that are equal in every call of a graph that runs: the tokens, rows and channels of an attention's operands."""
    found = []
    for node in graph.nodes:
        if op_name(node) != "scaled_dot_product_attention":
            continue
        q, k, v = (value_of(operand(node, at)).shape for at in range(3))
        found += [(k[-2], v[-2]), (q[-1], k[-1])]
        found += [(a, b) for a, b in zip(k[:-2], v[:-2], strict=True)]
    # A dim of size one is repeated.
    return [pair for pair in found if any(isinstance(size, torch.SymInt) for size in pair) and not any(same(size, 1) for size in pair)]


def _env(graph: fx.Graph) -> Any:
    """The shape environment of a graph's symbols, None where no size is symbolic."""
    for node in graph.nodes:
        value = value_of(node)
        for size in (value,) if isinstance(value, torch.SymInt) else value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def _numbers(graph: fx.Graph) -> frozenset[int]:
    """The sizes of a graph that are plain numbers."""
    shapes = [value.shape for node in graph.nodes if isinstance(value := value_of(node), torch.Tensor)]
    return frozenset(size for shape in shapes for size in shape if isinstance(size, int))


def in_every_world(graph: fx.Graph, find: Callable[[], T]) -> list[T]:
    """Return what ``find`` returns in each world, that of the capture first."""
    found = []
    # A look that adds a guard makes the other worlds anew: they are asked for one by one.
    for place in range(2):
        there = worlds(graph)
        if place < len(there):
            with inside(there[place]):
                found.append(find())
    return found


def agreed(graph: fx.Graph, find: Callable[[], T], node: fx.Node) -> T:
    """Return what ``find`` returns in every world; raises Miss at ``node`` where that differs, and what ``find`` raises."""
    first, *others = in_every_world(graph, find)
    if any(facts(other) != facts(first) for other in others):
        raise Miss(DISAGREED, node, advice=ADVICE)
    return first


def facts(value: Any) -> Any:
    """A record as nested tuples that are equal where the records say the same, symbolic sizes by their expressions."""
    if isinstance(value, (fx.Node, enum.Enum)):
        return value
    if isinstance(value, torch.SymInt):
        return value.node.expr
    if isinstance(value, (tuple, list)):
        return tuple(facts(item) for item in value)
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    kept = [field.name for field in dataclasses.fields(value) if field.name not in LEFT]
    return type(value), tuple(facts(getattr(value, name)) for name in kept)
