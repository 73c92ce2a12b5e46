"""Spans of tokens: the tokens along one dim of a tensor, as spans of consecutive tokens of the tensors that they come from.

A sliding window is spelled with cat and slice, with roll and a write at the end, with a copy back into the buffer; each spelling is a
sequence of spans: some tokens of the past, then the new ones. Writes into views have no data edge to a later read, so spans are asked for
at a time: the order of the node that reads them.

Sizes stay symbolic where the graph's are, and decisions about them hold for all sizes that the guards admit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.casts import holds
from kvcompile.passes.graph.constants import constant
from kvcompile.passes.graph.effects import Effects, same_memory, written_arguments
from kvcompile.passes.graph.operators import CONCATENATIONS, COPIES
from kvcompile.passes.graph.shapes import at_most, bind, hint, is_tensor, negative, op_name, plain, same, sizes, value_of

LIMIT = 64
"""The most nodes between a cache and the tokens that are kept of it; a longer chain is no window."""


@dataclass(frozen=True)
class TokenSpan:
    """A span: ``count`` consecutive tokens of ``source`` from index ``start`` on.

    ``base``: the span's start before the front of its sequence was cut off, if symbolic sizes do not show whether the cut falls into this
    span; such a span may be empty. None for all other spans.
    """

    source: fx.Node
    start: Any
    count: Any
    base: Any = None

    @property
    def end(self) -> Any:
        """The index after the last token."""
        return self.start + self.count


class Unknown(Exception):
    """Raised where the tokens of a tensor cannot be traced to spans."""


@dataclass
class SpanTracer:
    """A tracer of the spans of tensors along ``dim``.

    Every method that goes through nodes adds them to ``chain``, and the token counts n of slices ``[-n:]`` to ``caps``.
    """

    effects: Effects
    dim: int
    sources: frozenset[fx.Node] = frozenset()
    """Nodes that are spans themselves, whatever computed them."""
    chain: set[fx.Node] = field(default_factory=set)
    caps: set[int] = field(default_factory=set)
    """Token counts n of the slices ``[-n:]`` on the way."""

    def __post_init__(self) -> None:
        self.writes = [
            (write, target) for write in {item for items in self.effects.writes.values() for item in items}
            for target in written_arguments(write)
        ]

    def of(self, node: fx.Node, time: int) -> tuple[TokenSpan, ...]:
        """Return the spans of a tensor as the node at index ``time`` of the graph reads it; raises Unknown where they cannot be traced."""
        return _joined(self._of(node, time))

    def _of(self, node: fx.Node, time: int) -> list[TokenSpan]:
        """Return the spans of a tensor as the node at index ``time`` of the graph reads it, not merged with their neighbours.

        Raises Unknown where they cannot be traced.
        """
        if len(self.chain) > LIMIT or not is_tensor(node) or value_of(node).dim() <= self.dim:
            raise Unknown
        if node in self.sources:
            return [self._all(node)]
        if written_arguments(node):
            self.chain.add(node)
            return self._of(written_arguments(node)[0], time)
        name = op_name(node)
        if name in {"slice", "narrow"} and is_tensor(node.args[0]):
            return self._sliced(node, time)
        if name in COPIES - {"dropout"} and is_tensor(node.args[0]) and value_of(node).dtype == value_of(node.args[0]).dtype:
            self.chain.add(node)
            if same_memory(node, node.args[0]):
                return self._of(node.args[0], time)
            return self._written(node, self._of(node.args[0], self.effects.order[node]), time)
        if name in CONCATENATIONS:
            return self._written(node, self._cat(node), time)
        if name == "roll":
            return self._written(node, self._rolled(node), time)
        return self._written(node, [self._all(node)], time)

    def _size(self, node: fx.Node) -> Any:
        return value_of(node).shape[self.dim]

    def _all(self, node: fx.Node) -> TokenSpan:
        return TokenSpan(node, 0, self._size(node))

    def _cat(self, node: fx.Node) -> list[TokenSpan]:
        """Return the spans of a concatenation along ``dim``; for one along another dim, a single span with the result as its source."""
        arguments = bind(node)
        if int(arguments["dim"]) % len(sizes(node)) != self.dim:
            return [self._all(node)]
        self.chain.add(node)
        parts = [part for part in arguments["tensors"] if 0 not in sizes(part)]
        return [run for part in parts for run in self._of(part, self.effects.order[node])]

    def _rolled(self, node: fx.Node) -> list[TokenSpan]:
        """Return the spans of a tensor rolled along ``dim`` alone; for any other roll, a single span with the result as its source."""
        arguments = bind(node)
        shifts, dims = list(arguments["shifts"]), list(arguments["dims"] or [])
        if len(shifts) != 1 or len(dims) != 1 or int(dims[0]) % len(sizes(node)) != self.dim:
            return [self._all(node)]
        self.chain.add(node)
        line = self._of(node.args[0], self.effects.order[node])  # type: ignore[arg-type]
        size = self._size(node)
        left = -_number(shifts[0])
        if at_most(left, 0):
            left = left + size
        return _between(line, left, size) + _between(line, 0, left)

    def _sliced(self, node: fx.Node, time: int) -> list[TokenSpan]:
        """Return the spans of ``node``, a slice, as the node at index ``time`` of the graph reads it."""
        parent = node.args[0]
        dim = int(bind(node)["dim"]) % len(sizes(node))
        if dim != self.dim and sizes(node)[dim] != sizes(parent)[dim]:  # type: ignore[arg-type]
            return self._written(node, [self._all(node)], time)
        line = self._of(parent, time)  # type: ignore[arg-type]
        self.chain.add(node)
        found = self._range(node)
        if found is None:
            return line
        start, count = found
        total = self._size(parent)  # type: ignore[arg-type]
        given = bind(node).get("start")
        if isinstance(given, int) and given < 0 and same(start + count, total):
            self.caps.add(-given)
        return _between(line, start, start + count)

    def _range(self, node: fx.Node) -> tuple[Any, Any] | None:
        """Return (start, count) of a slice along the dim, None for one that takes all of another dim; raises Unknown for other slices."""
        arguments, parent = bind(node), node.args[0]
        dim = int(arguments["dim"]) % len(sizes(node))
        if arguments.get("step") not in {1, None}:
            raise Unknown
        if dim != self.dim:
            if sizes(node)[dim] != sizes(parent)[dim]:  # type: ignore[arg-type]
                raise Unknown
            return None
        total, count = self._size(parent), self._size(node)  # type: ignore[arg-type]
        start = _number(arguments.get("start") or 0)
        if same(count, total):
            return 0, count
        if negative(start):
            start = start + total
        return plain(start), count

    def _written(self, node: fx.Node, line: list[TokenSpan], time: int) -> list[TokenSpan]:
        """Return the spans of a tensor that is not a view, updated by the writes into it that come before index ``time`` of the graph."""
        order = self.effects.order
        later = [(order[write], write, target) for write, target in self.writes if same_memory(target, node)]
        for at, write, target in sorted(later, key=lambda item: item[0]):
            if order[node] < at < time:
                line = self._apply(write, target, node, line, at)
        return line

    def _apply(self, write: fx.Node, target: fx.Node, node: fx.Node, line: list[TokenSpan], at: int) -> list[TokenSpan]:
        """Return the spans of ``node`` after one write to ``target``, a view of it; raises Unknown unless the write replaces a range."""
        start, count = self._place(target, node)
        name, arguments = op_name(write), bind(write)
        if name == "copy_":
            source = arguments["src"]
        elif name == "index_copy_" and int(arguments["dim"]) % len(sizes(target)) == self.dim:
            source = arguments["source"]
            start, count = self._indexed(arguments["index"], start, count)
        elif name in {"index_put_", "_index_put_impl_"} and not arguments.get("accumulate"):
            indices = [*arguments["indices"], *([None] * (len(sizes(target)) - len(arguments["indices"])))]
            if [dim for dim, index in enumerate(indices) if index is not None] != [self.dim]:
                raise Unknown
            source = arguments["values"]
            start, count = self._indexed(indices[self.dim], start, count)
        else:
            raise Unknown
        if not is_tensor(source) or value_of(source).dtype != value_of(target).dtype:
            raise Unknown
        wanted = [hint(count) if dim == self.dim else size for dim, size in enumerate(sizes(target))]
        # An assignment drops leading dims of size one.
        missing = len(wanted) - len(sizes(source))
        if not 0 <= missing <= self.dim or [1] * missing + list(sizes(source)) != wanted:
            raise Unknown
        self.chain.add(write)
        written = self._of(source, at) if not missing else [TokenSpan(source, 0, value_of(source).shape[self.dim - missing])]
        return _between(line, 0, start) + written + _between(line, start + count, self._size(node))

    def _place(self, target: fx.Node, node: fx.Node) -> tuple[Any, Any]:
        """Return (start, count), the range of the tokens of ``node`` that its view ``target`` covers; raises Unknown for no range.

        The nodes on the way from ``target`` to ``node`` are added to ``chain``.
        """
        if value_of(target).dim() <= self.dim:
            raise Unknown
        start, count = 0, self._size(target)
        while target is not node:
            name = op_name(target)
            self.chain.add(target)
            if name in {"slice", "narrow"}:
                found = self._range(target)
                start = start + (found[0] if found is not None else 0)
            elif name not in COPIES and not written_arguments(target):
                raise Unknown
            target = target.args[0]  # type: ignore[assignment]
            if not is_tensor(target):
                raise Unknown
        return start, count

    def _indexed(self, index: fx.Node, start: Any, count: Any) -> tuple[Any, Any]:
        """Return (start, count) of the tokens that an index of consecutive constants picks from the range (start, count).

        Raises Unknown for any other index.
        """
        if not is_tensor(index) or value_of(index).dim() != 1 or value_of(index).dtype == torch.bool:
            raise Unknown
        length = value_of(index).shape[0]
        first = _first(index)
        if first is None:
            raise Unknown
        return start + (first + count if negative(first) else first), length


def _first(index: fx.Node) -> Any:
    """Return the first of the consecutive integers in an index tensor; None where it holds others."""
    name = op_name(index)
    if name == "arange":
        arguments = bind(index)
        step = arguments.get("step")
        return _number(arguments.get("start") or 0) if step in {1, None} else None
    if name in COPIES and is_tensor(index.args[0]) and holds(value_of(index.args[0]).dtype, value_of(index).dtype):
        return _first(index.args[0])
    if sizes(index) != (1,):
        return None
    if name in {"new_full", "full_like"}:
        value = constant(bind(index)["fill_value"])
    else:
        value = constant(index)
    return int(value) if value is not None and value == int(value) else None


def _number(item: Any) -> Any:
    """Return an argument as a plain or symbolic int; raises Unknown for others."""
    if isinstance(item, fx.Node):
        item = value_of(item)
    if not isinstance(item, (int, torch.SymInt)) or isinstance(item, bool):
        raise Unknown
    return item


def _between(line: list[TokenSpan], start: Any, end: Any) -> list[TokenSpan]:
    """Return the spans from index ``start`` to ``end`` of a sequence.

    Raises Unknown if symbolic sizes do not show which spans these are.
    """
    found: list[TokenSpan] = []
    at: Any = 0
    if len(line) == 2 and not at_most(start, line[0].count) and not at_most(line[0].count, start):
        return _last_of_two(line, start, end)
    for run in line:
        behind = at + run.count
        if not (at_most(behind, start) or at_most(end, at)):
            first = 0 if at_most(start, at) else start - at
            last = run.count if at_most(behind, end) else end - at
            if not (at_most(0, first) and at_most(first, last) and at_most(last, run.count)):
                raise Unknown
            found.append(TokenSpan(run.source, run.start + first, last - first))
        at = behind
    return found


def _last_of_two(line: list[TokenSpan], start: Any, end: Any) -> list[TokenSpan]:
    """Return the tokens from ``start`` to ``end`` of two consecutive spans, where symbolic sizes do not show which span ``start`` is in.

    The result is two spans, of which the first may be empty. Raises Unknown unless ``end`` is the end of the second.
    """
    first, second = line
    if not (same(end, first.count + second.count) and at_most(0, start) and at_most(start, end)):
        raise Unknown
    least: Callable[[Any, Any], Any] = torch.sym_min
    most: Callable[[Any, Any], Any] = torch.sym_max
    less, more = least(start, first.count), most(start - first.count, 0)
    return [
        TokenSpan(first.source, first.start + less, first.count - less, first.start),
        TokenSpan(second.source, second.start + more, second.count - more, second.start),
    ]


def _joined(line: list[TokenSpan]) -> tuple[TokenSpan, ...]:
    """Return the spans with adjacent ones merged where the second continues the first in the same source."""
    found: list[TokenSpan] = []
    for run in line:
        if found and found[-1].source is run.source and same(found[-1].end, run.start):
            found[-1] = TokenSpan(run.source, found[-1].start, found[-1].count + run.count)
        else:
            found.append(run)
    return tuple(found)
