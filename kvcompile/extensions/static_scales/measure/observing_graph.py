"""The backend of calibration: Dynamo's cache-less graph, which also returns the keys and values that a cache would hold.

::

    k = rope(k_proj(x));  out = sdpa(q, repeat(k), repeat(v), is_causal=True);  return out
    after:
    ...;  return out, k, v            as [B, K, S, D]

The attentions are found by the recognisers that learning uses (``passes/match/uncached.py``): any architecture, keys after RoPE, kv
heads before they are repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvcompile.passes.capture.attributes import lifted
from kvcompile.passes.capture.capture import Captured, capture
from kvcompile.passes.capture.nested import inlined
from kvcompile.passes.graph.emit import Emitter
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.match.sites import Refusal, Slot
from kvcompile.passes.match.uncached import find
from kvcompile.passes.plan.plan import SlotPlan
from kvcompile.passes.rewrite.new_tokens import new_tokens
from kvcompile.passes.rewrite.symbols import Symbols
from kvcompile.schemes import Dense
from kvcompile.types import Role, SlotSpec


@dataclass(frozen=True)
class SlotIdentity:
    """The identity of one slot: the module path of its attention, and its role."""

    path: str
    role: Role


Observe = Callable[[SlotIdentity, torch.Tensor], None]
"""Called for every slot of every call with its identity and its tokens [B, K, S, D]."""


class ObservingBackend:
    """A Dynamo backend that runs graphs unchanged, eagerly, and passes the tokens of every slot to ``observe``."""

    def __init__(self, observe: Observe) -> None:
        self.observe = observe
        self.refusals: list[Refusal] = []
        self.__name__ = "kvcompile_calibration"

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graph = lifted(inlined(gm))
        captured = capture(graph.module, [*example_inputs, *graph.tensors], attributes=len(graph.tensors))
        module, slots = self.observed(captured)

        def run(*args: Any) -> Any:
            results = module.forward(*args, *graph.tensors)
            count = len(results) - len(slots)
            for slot, tokens in zip(slots, results[count:], strict=True):
                self.observe(slot, tokens)
            return results[:count]

        return run

    def observed(self, captured: Captured) -> tuple[fx.GraphModule, list[SlotIdentity]]:
        """Return the graph with the tokens of its slots as its last results, and the slots' identities in the same order.

        Adds the refusals of the graph's attentions to ``refusals``.
        """
        found = find(captured)
        self.refusals += found.refusals
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        results = graph.graph_copy(captured.graph, copies)
        for old, new in copies.items():
            new.meta = dict(old.meta)
        symbols = Symbols(captured, graph, copies, set())
        end = graph.output(tuple(results) if isinstance(results, (list, tuple)) else (results,))
        slots: dict[Any, SlotIdentity] = {}
        tokens: list[fx.Node] = []
        for site in found.sites:
            for slot, role in ((site.key, Role.KEY), (site.value, Role.VALUE)):
                # Two attentions over what would be one cache are observed once.
                if slot.part not in slots:
                    # A cache holds the tokens as they are when the attention runs, without later writes.
                    first = min((copies[node] for node in site.attention.nodes), key=list(graph.nodes).index)
                    tokens.append(_tokens(Emitter(graph, first, symbols.of, copies), slot, role))
                    slots[slot.part] = SlotIdentity(site.path, role)
        end.args = ((*end.args[0], *tokens),)  # type: ignore[misc]
        graph.lint()
        return fx.GraphModule(captured.module, graph), list(slots.values())


def _tokens(emit: Emitter, slot: Slot, role: Role) -> fx.Node:
    """Emit the call's new tokens [B, K, S, D] of a slot, as a dense cache would store them."""
    spec, dense = SlotSpec(slot.heads, slot.head_dim, value_of(slot.root).dtype, role), Dense()
    return new_tokens(emit, SlotPlan(slot, role, dense, spec, dense.layout(spec)))
