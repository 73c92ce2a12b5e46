"""What a rewrite gives: the graph, its variant, and where each slot's cache comes in, goes out and has its planes. Values only."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import fx

from kvcompile.passes.plan import SlotPlan
from kvcompile.passes.sites import SlotKind

BORN = {SlotKind.BORN_BUFFER, SlotKind.BORN_CONCAT}


class Variant(enum.Enum):
    """What the stores hold when the graph runs."""

    PAST = "past"
    FRESH = "fresh"


@dataclass(frozen=True)
class Binding:
    """One slot of the rewritten graph: where its cache comes in and goes out, and where its planes are."""

    plan: SlotPlan
    argument: int | None
    outputs: tuple[int, ...]
    first_plane: int

    @property
    def part(self) -> tuple[tuple[int, int], ...]:
        """Which part of the cache tensor the slot is; () for the whole."""
        return self.plan.slot.axes.select


@dataclass(frozen=True)
class Rewritten:
    """The rewritten graph, which of the caller's arguments it still takes, and its slots in plane order."""

    module: fx.GraphModule
    variant: Variant
    kept: tuple[int, ...]
    bindings: tuple[Binding, ...]
    dropped_outputs: tuple[int, ...]
    results: int
