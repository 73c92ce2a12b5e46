"""Context: what the steps of a rewrite share, the captured graph with its plan and the graph that is being rewritten."""

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
"""What ``Slot.part`` gives."""


def device_of(item: SitePlan) -> torch.device:
    """The device that a site computes on."""
    return value_of(item.site.attention.q).device


@dataclass(frozen=True)
class Context:
    """One rewrite: the captured graph, its plan and variant, the graph that is rewritten, and the copy of each captured node in it."""

    captured: Captured
    plan: Plan
    variant: Variant
    effects: Effects
    graph: fx.Graph
    copies: dict[fx.Node, fx.Node]
    symbols: Symbols

    def emit_before(self, node: fx.Node) -> Emitter:
        """An emitter that inserts ahead of the copy of a captured node."""
        return Emitter(self.graph, self.copies[node], self.symbols.of, self.copies)

    def slots(self) -> list[SlotPlan]:
        """The planned slots of all sites, with those of one store once for each site."""
        return [part for item in self.plan.sites for part in item.parts]

    def site_of(self, slot: SlotPlan) -> SitePlan:
        """The first site that reads a slot."""
        return next(item for item in self.plan.sites for part in item.parts if part is slot)

    def is_fresh(self, slot: SlotPlan) -> bool:
        """Whether attention over a slot reads the tokens of this call alone."""
        facts, sliding = slot.slot.kind.facts, slot.slot.sliding
        if slot.slot.block_table is not None or not facts.written:
            return False
        return self.variant is Variant.FRESH or facts.created or (sliding is not None and sliding.refilled)

    def is_calibrated(self, slot: SlotPlan) -> bool:
        """Whether this call computes planes of the slot from its queries."""
        return self.is_fresh(slot) and slot.scheme.calibrates(slot.spec)
