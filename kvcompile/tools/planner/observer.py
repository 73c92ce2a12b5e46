"""Observer: a Dynamo backend that reads a model's graphs with the package's own matcher and computes nothing.

Each graph is captured and matched as the backend would do it; what it returns are phantoms, so a model of any size goes through. Slots
are told apart by the tensors that they live in, as the runtime tells stores apart: two attentions over one cache tensor hold one slot.
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
"""Versions of one frame that are traced: a model with as many kinds of layers compiled apart is traced whole."""


@dataclass(frozen=True)
class Place:
    """The identity of a slot: the tensor that it lives in, and which of its heads and channels it is."""

    tensor: int
    select: tuple[tuple[int, int], ...]
    counts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Seen:
    """One graph that was captured and matched, with the tensors that came in and the phantoms that went out."""

    captured: Captured
    matched: Matched
    given: tuple[Any, ...] = field(repr=False)
    returned: tuple[Any, ...] = field(repr=False)

    def tensor(self, slot: Slot) -> Any:
        """The tensor that a slot lives in: an argument of the call, or a result where the graph makes the cache."""
        if slot.placeholder is None:
            return self.returned[slot.outputs[0]]
        return self.given[next(entry.index for entry in self.captured.inputs if entry.node is slot.placeholder)]

    def place(self, slot: Slot) -> Place:
        """The identity of a slot of this graph."""
        return Place(id(self.tensor(slot)), slot.axes.select, slot.axes.counts)


@dataclass(frozen=True)
class Observed:
    """All graphs of a prompt and a step behind it, in order, and the cache object that the model returned, if it did."""

    graphs: tuple[Seen, ...]
    cache: Any = field(repr=False)

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The attentions that no graph's match could read, each once."""
        return tuple({(item.path, item.reason): item for seen in self.graphs for item in seen.matched.refusals}.values())

    @property
    def uncached(self) -> int:
        """Attentions without a cache in the graph that has most."""
        return max((seen.matched.uncached for seen in self.graphs), default=0)


class Observer:
    """The backend itself; ``graphs`` is what it saw."""

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
        """The graph with the caches that an earlier one made or wrote said to be compressed ones, as they would be."""
        held = {id(seen.tensor(slot)) for seen in self.graphs for site in seen.matched.sites for slot in site.slots}
        found = (replace(item, compressed=item.compressed or id(given[item.index]) in held) for item in captured.inputs)
        return replace(captured, inputs=tuple(found))


def observed(model: Any, inputs: Any) -> Observed:
    """Trace ``model`` on ``inputs`` (a mapping, a sequence or one tensor), and one token more where a cache comes back.

    Raises whatever the model or its capture raises.
    """
    plugins()
    owner = Observer()
    torch.compiler.reset()
    with many_versions(MOST_GRAPHS):
        result = observe(model, inputs, owner)
    return Observed(tuple(owner.graphs), getattr(result, "past_key_values", None))
