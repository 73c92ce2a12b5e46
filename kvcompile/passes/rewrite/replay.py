"""Replay: rewritten graphs that may be recorded as CUDA graphs, and their inputs with static addresses.

The next replay overwrites a CUDA graph's results. That is fine for logits, and wrong for state that is carried between calls: counters,
and caches that a prompt creates and the next step reads.
"""

from __future__ import annotations

import torch

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.rewrite.rewritten import Rewritten, Variant


def gap(rewritten: Rewritten, captured: Captured) -> str | None:
    """Return the reason why a rewritten graph is not recorded as a CUDA graph; None if the graph may be recorded."""
    if rewritten.variant is Variant.FRESH or any(binding.plan.slot.kind.facts.created for binding in rewritten.bindings):
        return "it fills empty caches: that happens once a conversation, and what it makes must outlive the next call"
    sizes = rewritten.sizes or any(isinstance(captured.fakes[index], torch.SymInt) for index in rewritten.kept)
    if sizes and any(binding.plan.slot.kind.facts.extended for binding in rewritten.bindings):
        return "it takes the length of its caches as a number, and would be recorded anew at every step"
    return None


def steady_inputs(captured: Captured, effects: Effects) -> frozenset[int]:
    """Return the indices of CUDA arguments that a graph writes in place: the caller's counters and states, with fixed addresses.

    A CUDA graph must write them in place. Inductor assumes that arguments move unless marked, and then records no graph that writes
    to one; if a marked address does change, the graph is recorded again.
    """
    return frozenset(
        entry.index for entry in captured.inputs
        if isinstance(value_of(entry.node), torch.Tensor) and value_of(entry.node).device.type == "cuda" and effects.writes.get(entry.node)
    )
