"""Agreement: recognise in more than one world (``graph.worlds``: values of the symbolic sizes), and keep the results that are equal in all.

Recognition works on sampled coordinates, which are numbers. If it takes a symbolic size for a number, that number differs in another world,
and so do the results. A result that consists of nodes, symbolic sizes and the program's own constants is equal in every world.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import sympy
import torch
from torch import fx

from kvcompile.passes.graph.shapes import op_name, operand, same, value_of
from kvcompile.passes.graph.worlds import Guards, Values, inside, moved, symbols_of, value_in_capture
from kvcompile.passes.match.sites import Attention, Miss

T = TypeVar("T")


class Found(Protocol):
    """A site of an attention, over a cache or without one."""

    @property
    def attention(self) -> Attention:
        """The attention of the site."""


S = TypeVar("S", bound=Found)

LEFT = {"index", "others", "line", "path"}
"""Fields of records that do not state what is computed: numbering, readings that were not taken, names."""

DISAGREED = "what was read of it holds only where the sizes of the graph are those of the call that it was captured with"
ADVICE = "please report this module: the matcher took a symbolic size for a number"

_made: WeakKeyDictionary[fx.Graph, tuple[int, tuple[Values, ...]]] = WeakKeyDictionary()


def worlds(graph: fx.Graph) -> tuple[Values, ...]:
    """Return one or two worlds of a graph: the symbols' values in the capture, and other values that the guards admit, if there are any.

    In the second world every symbol that the guards let move has another value. Returns ``({},)`` if no size is symbolic.
    """
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
    """Return pairs of sizes that are equal in every call, from the operands of each ``scaled_dot_product_attention`` node.

    They are the tokens, rows and heads of keys and values, and the channels of queries and keys; pairs without a symbolic size are left
    out.
    """
    found = []
    for node in graph.nodes:
        if op_name(node) != "scaled_dot_product_attention":
            continue
        q, k, v = (value_of(operand(node, at)).shape for at in range(3))
        found += [(k[-2], v[-2]), (q[-1], k[-1])]
        found += [(a, b) for a, b in zip(k[:-2], v[:-2], strict=True)]
    # A dim of size one broadcasts, so its pair need not be equal.
    return [pair for pair in found if any(isinstance(size, torch.SymInt) for size in pair) and not any(same(size, 1) for size in pair)]


def _env(graph: fx.Graph) -> Any:
    """Return the shape environment of a graph's symbols; None where no size is symbolic."""
    for node in graph.nodes:
        value = value_of(node)
        for size in (value,) if isinstance(value, torch.SymInt) else value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def _numbers(graph: fx.Graph) -> frozenset[int]:
    """Return the tensor sizes of a graph that are plain ints."""
    shapes = [value.shape for node in graph.nodes if isinstance(value := value_of(node), torch.Tensor)]
    return frozenset(size for shape in shapes for size in shape if isinstance(size, int))


def in_every_world(graph: fx.Graph, find: Callable[[], T]) -> list[T]:
    """Return the result of ``find`` in each world of a graph, in the captured world first."""
    found = []
    # ``find`` may add guards, and then the second world is another one: ask for each when its turn comes.
    for place in range(2):
        there = worlds(graph)
        if place < len(there):
            with inside(there[place]):
                found.append(find())
    return found


def agreed(graph: fx.Graph, find: Callable[[], T], node: fx.Node) -> T:
    """Return the result of ``find`` in the capture's world; raises Miss at ``node`` where another world's differs."""
    first, *others = in_every_world(graph, find)
    env = _env(graph)
    if any(facts(other, env) != facts(first, env) for other in others):
        raise Miss(DISAGREED, node, advice=ADVICE)
    return first


def disagreed(graph: fx.Graph, first: Sequence[S], others: Sequence[Sequence[S]]) -> list[S]:
    """Return the sites of ``first``, found in the captured world, that one of ``others``, found in other worlds, lacks or has different."""
    env = _env(graph)
    elsewhere = [{site.attention.output: facts(site, env) for site in sites} for sites in others]
    return [site for site in first if any(there.get(site.attention.output) != facts(site, env) for there in elsewhere)]


def facts(value: Any, env: Any) -> Any:
    """Return a record as nested tuples that are equal if two records state the same; the fields in ``LEFT`` are omitted.

    Symbolic sizes are compared by expression, in terms of the symbols that ``env``, the shape environment, has now: guards that were added
    after a record was made may have merged two symbols.
    """
    if isinstance(value, (fx.Node, enum.Enum)):
        return value
    if isinstance(value, torch.SymInt):
        return value.node.expr
    if isinstance(value, sympy.Basic):
        return value if env is None else env.replace(value)
    if isinstance(value, (tuple, list)):
        return tuple(facts(item, env) for item in value)
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    kept = [field.name for field in dataclasses.fields(value) if field.name not in LEFT]
    return type(value), tuple(facts(getattr(value, name), env) for name in kept)
