"""Context: state shared by the steps of a rewrite."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.emit import Emitter
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.plan.plan import Plan, SitePlan, SlotPlan
from kvcompile.passes.rewrite.rewritten import Variant
from kvcompile.passes.rewrite.symbols import Symbols

Part = tuple[fx.Node, tuple[tuple[int, int], ...]]
"""Type of ``Slot.part``."""


def device_of(item: SitePlan) -> torch.device:
    """Return the device of a site."""
    device: torch.device = value_of(item.site.attention.q).device
    return device


@dataclass(frozen=True)
class Context:
    """One rewrite: the captured graph, its plan, variant and effects, the new graph, the copies of captured nodes in it, and its sizes."""

    captured: Captured
    plan: Plan
    variant: Variant
    effects: Effects
    graph: fx.Graph
    copies: dict[fx.Node, fx.Node]
    symbols: Symbols

    def emit_before(self, node: fx.Node) -> Emitter:
        """Return an emitter that inserts before the copy of a captured node."""
        return Emitter(self.graph, self.copies[node], self.symbols.of, self.copies)

    def slots(self) -> list[SlotPlan]:
        """Return the planned slots of all sites; a store that several sites read is listed once for each."""
        return [part for item in self.plan.sites for part in item.parts]

    def site_of(self, slot: SlotPlan) -> SitePlan:
        """Return the first site that reads a slot."""
        return next(item for item in self.plan.sites for part in item.parts if part is slot)

    def is_fresh(self, slot: SlotPlan) -> bool:
        """Return whether attention over a slot reads only this call's tokens."""
        facts, sliding = slot.slot.kind.facts, slot.slot.sliding
        if slot.slot.block_table is not None or not facts.written:
            return False
        return self.variant is Variant.FRESH or facts.created or (sliding is not None and sliding.refilled)

    def is_calibrated(self, slot: SlotPlan) -> bool:
        """Return whether this call computes planes of the slot from its queries."""
        return self.is_fresh(slot) and slot.scheme.calibrates(slot.spec)
