"""Rewritten: what a rewrite produces. Values only, no logic."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from torch import fx

from kvcompile.passes.plan.plan import SlotPlan


class Variant(enum.Enum):
    """The state of the stores when the graph runs."""

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
    cursors: tuple[int, ...] = ()
    """The numbers of slots whose cursors come behind the planes."""
    sizes: tuple[Any, ...] = ()
    """The symbols whose values come behind the cursors: sizes that only cache tensors had."""
