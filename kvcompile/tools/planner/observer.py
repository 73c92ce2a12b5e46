"""Observer: a Dynamo backend that captures and matches a model's graphs and computes nothing.

Graphs are captured and matched as the backend does it; they return phantoms, so a model of any size can be traced. A slot is identified by
its cache tensor, as a store is at run time: two attentions over one cache tensor share one slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from kvcompile.explain import observe
from kvcompile.lowering.attention_plugins import plugins
from kvcompile.passes.capture.attributes import lifted
from kvcompile.passes.capture.capture import Captured, capture
from kvcompile.passes.capture.nested import inlined
from kvcompile.passes.graph.dynamo import many_versions
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.match.match import Matched, match
from kvcompile.passes.match.sites import Refusal, Slot
from kvcompile.tools.planner.phantom import phantom_result

MOST_GRAPHS = 256
"""Versions of one frame that are traced: enough for a model with this many kinds of layers compiled separately."""


@dataclass(frozen=True)
class SlotKey:
    """The identity of a slot: its cache tensor, and the heads and channels of it that the slot covers."""

    tensor: int
    select: tuple[tuple[int, int], ...]
    counts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Seen:
    """One captured and matched graph, with the arguments of its call (``given``) and the phantoms that it returned."""

    captured: Captured
    matched: Matched
    given: tuple[Any, ...] = field(repr=False)
    returned: tuple[Any, ...] = field(repr=False)

    def tensor(self, slot: Slot) -> Any:
        """Return a slot's cache tensor: an argument of the call, or a result if the graph creates the cache."""
        if slot.placeholder is None:
            return self.returned[slot.outputs[0]]
        return self.given[next(entry.index for entry in self.captured.inputs if entry.node is slot.placeholder)]

    def place(self, slot: Slot) -> SlotKey:
        """Return the identity of a slot of this graph."""
        return SlotKey(id(self.tensor(slot)), slot.axes.select, slot.axes.counts)


@dataclass(frozen=True)
class Observation:
    """All graphs of a prompt and the step after it, in order, and the cache object that the model returned, None if none."""

    graphs: tuple[Seen, ...]
    cache: Any = field(repr=False)

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Attentions that the matcher refused, without repeats."""
        return tuple({(item.path, item.reason): item for seen in self.graphs for item in seen.matched.refusals}.values())

    @property
    def uncached(self) -> int:
        """Largest number of attentions without a cache in one graph."""
        return max((seen.matched.uncached for seen in self.graphs), default=0)


class Observer:
    """The Dynamo backend; ``graphs`` holds the graphs that it was called with."""

    def __init__(self) -> None:
        self.graphs: list[Seen] = []
        self.__name__ = "kvcompile_planner"

    def __deepcopy__(self, memo: dict[int, Any]) -> Observer:
        return self

    def __call__(self, gm: fx.GraphModule, examples: list[Any], **options: Any) -> Callable[..., Any]:
        del options
        graph = lifted(inlined(gm))
        examples = [*examples, *graph.tensors]
        captured = self._filled(capture(graph.module, examples, attributes=len(graph.tensors)), examples)
        results = captured.graph.output_node().args[0]
        listed = results if isinstance(results, (list, tuple)) else (results,)
        returned = tuple(phantom_result(value_of(item) if isinstance(item, fx.Node) else item) for item in listed)
        self.graphs.append(Seen(captured, match(captured), tuple(examples), returned))
        return lambda *args: list(returned)

    def _filled(self, captured: Captured, given: list[Any]) -> Captured:
        """Return the graph with each cache that an earlier graph created or wrote marked as compressed, as it would be at run time."""
        held = {id(seen.tensor(slot)) for seen in self.graphs for site in seen.matched.sites for slot in site.slots}
        found = (replace(item, compressed=item.compressed or id(given[item.index]) in held) for item in captured.inputs)
        return replace(captured, inputs=tuple(found))


def observed(model: Any, inputs: Any) -> Observation:
    """Trace ``model`` on ``inputs`` (a mapping, a sequence or one tensor), and on one more token if it returns a cache; return the graphs.

    Raises the exceptions of the model or its capture.
    """
    plugins()
    owner = Observer()
    torch.compiler.reset()
    with many_versions(MOST_GRAPHS):
        result = observe(model, inputs, owner)
    return Observation(tuple(owner.graphs), getattr(result, "past_key_values", None))
