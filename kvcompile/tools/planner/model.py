"""A traced model to plan for: its matched graphs, weights, activations, and cache tensors that belong to no slot."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcompile.errors import NotPlanned
from kvcompile.passes.graph.shapes import estimate, size_along
from kvcompile.passes.plan.policy import Policy
from kvcompile.tools.planner.activations import Activations, activations
from kvcompile.tools.planner.observer import Observation, observed
from kvcompile.tools.planner.stores import Remainder, Stores, planned
from kvcompile.tools.planner.weights import ModelWeights, counted


@dataclass(frozen=True)
class Model:
    """A traced model.

    ``capacity``: slots of the static cache that it was traced with, None for a module with caches of its own. ``activations``: the most
    bytes of intermediate values live at once, over all graphs of the prompt. ``longest``: positions that the model supports, None if it
    does not say.
    """

    name: str
    observed: Observation = field(repr=False)
    weights: ModelWeights
    remainder: Remainder
    activations: Activations
    capacity: int | None = None
    longest: int | None = None

    def stores(self, policy: Policy, tokens: int | None = None) -> Stores:
        """Return the model's stores under a policy. Raises NotPlanned if its own caches are shorter than ``tokens`` tokens."""
        made = planned(self.observed, policy, self.remainder, self.capacity)
        ends = [item.end for item in made.stored if item.end is not None and not (item.forgets or item.pooled or item.once)]
        if tokens is not None and ends and min(ends) < tokens:
            found = f"one of {min(ends)} tokens"
            raise NotPlanned(expected=f"caches with room for {tokens} tokens", found=found, name=self.name)
        return made


def traced(name: str, model: torch.nn.Module, inputs: Any, capacity: int | None = None, longest: int | None = None) -> Model:
    """Return a model traced on a prompt's inputs and one step after it. Raises NotPlanned if it fails or no cache can be read.

    ``capacity``, ``longest``: see Model. If the model returns its cache, every tensor in it is counted: one that belongs to no slot counts
    as dense. A module that keeps its caches elsewhere is planned only if the matcher read every attention over a cache.
    """
    try:
        seen = observed(model, inputs)
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        first = next(iter(str(inner).strip().splitlines()), "no message")
        found = f"{type(inner).__name__}: {first}"
        raise NotPlanned(expected="a model that Dynamo and the matcher can trace", found=found, name=name) from error
    if not any(item.matched.sites for item in seen.graphs):
        why = str(seen.refusals[0]) if seen.refusals else "none in any graph"
        raise NotPlanned(expected="attention over a cache of keys and values", found=why, name=name)
    tensors = list(_tensors(seen.cache))
    if seen.refusals and not tensors:
        raise NotPlanned(
            expected="every attention over a cache to be one that the matcher reads, or a cache that the model returns",
            found=f"{len(seen.refusals)} refused, the first: {seen.refusals[0]}", name=name,
        )
    prompts = [item for item in seen.graphs if any(estimate(site.tokens) != 1 for site in item.matched.sites)] or list(seen.graphs)
    live = functools.reduce(operator.or_, (activations(item) for item in prompts if item.matched.sites))
    return Model(name, seen, counted(model), _remainder(seen, tensors, capacity), live, capacity, longest)


def _remainder(seen: Observation, tensors: list[torch.Tensor], capacity: int | None) -> Remainder:
    """Return the bytes per batch row of the cache tensors that belong to no slot.

    A tensor with a dim of ``capacity`` counts per token. A tensor whose first dim is the traced batch is divided by it; others are held
    once for each row. Tensors without dims are counters and left out.
    """
    owned = {id(item.tensor(slot)) for item in seen.graphs for site in item.matched.sites for slot in site.slots}
    # A concatenated cache becomes a new tensor in the call: the result that the slot's graph returned.
    owned |= {
        id(item.returned[index]) for item in seen.graphs for site in item.matched.sites for slot in site.slots for index in slot.outputs
    }
    attention = next(site.attention for item in seen.graphs for site in item.matched.sites)
    rows = estimate(size_along(attention.q, attention.q_roles, "B", attention.folded))
    fixed = per_token = 0
    for tensor in tensors:
        if id(tensor) in owned or not tensor.dim():
            # A tensor without dims is a counter.
            continue
        count = math.prod(tensor.shape) * tensor.dtype.itemsize // (rows if tensor.shape[0] == rows else 1)
        if capacity is not None and capacity in tensor.shape:
            per_token += count // capacity
        else:
            fixed += count
    return Remainder(fixed, per_token)


def _tensors(value: Any, depth: int = 0, known: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield every tensor in a cache object once: from attributes, sequences and mappings, up to six levels deep."""
    known = set() if known is None else known
    if id(value) in known or depth > 6:
        return
    known.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    inner: Any = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    if inner is None:
        inner = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    for item in inner:
        yield from _tensors(item, depth + 1, known)
