"""Replay: which rewritten graphs may be recorded as CUDA graphs, and which of their inputs keep their addresses.

A CUDA graph's results lie in memory that the next replay writes over. That is fine for logits, and wrong for whatever is
carried from call to call: counters, states and caches that a prompt makes and the next step takes up.
"""

from __future__ import annotations

import torch

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.rewrite.rewritten import Rewritten, Variant


def gap(rewritten: Rewritten, captured: Captured) -> str | None:
    """Why a rewritten graph is not recorded as a CUDA graph; None where it may be."""
    if rewritten.variant is Variant.FRESH or any(binding.plan.slot.kind.facts.created for binding in rewritten.bindings):
        return "it fills empty caches: that happens once a conversation, and what it makes must outlive the next call"
    sizes = rewritten.sizes or any(isinstance(captured.fakes[index], torch.SymInt) for index in rewritten.kept)
    if sizes and any(binding.plan.slot.kind.facts.extended for binding in rewritten.bindings):
        return "it takes the length of its caches as a number, and would be recorded anew at every step"
    return None


def steady_inputs(captured: Captured, effects: Effects) -> frozenset[int]:
    """The arguments that a graph writes in place: counters and states of the caller's, whose addresses do not change from call to call.

    A CUDA graph must write them where they are. Inductor takes an argument for movable unless it is told otherwise, and then
    records nothing at all of a graph that writes to it; where an address does change, the graph is recorded again.
    """
    return frozenset(
        entry.index for entry in captured.inputs
        if isinstance(value_of(entry.node), torch.Tensor) and value_of(entry.node).device.type == "cuda" and effects.writes.get(entry.node)
    )
