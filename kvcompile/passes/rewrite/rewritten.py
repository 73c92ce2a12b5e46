"""Rewritten: the result of a rewrite. Values only, no logic."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from torch import fx

from kvcompile.passes.plan.plan import SlotPlan


class Variant(enum.Enum):
    """The state of the stores at the call: filled (PAST) or empty (FRESH)."""

    PAST = "past"
    FRESH = "fresh"


@dataclass(frozen=True)
class Binding:
    """A slot of the rewritten graph: its plan, the argument and the outputs that are its cache, and the index of its first plane.

    ``argument``: None if the graph creates the cache.
    """

    plan: SlotPlan
    argument: int | None
    outputs: tuple[int, ...]
    first_plane: int

    @property
    def part(self) -> tuple[tuple[int, int], ...]:
        """The selected indices of the cache tensor, as (dim, index); () for the whole."""
        return self.plan.slot.axes.select


@dataclass(frozen=True)
class Rewritten:
    """The rewritten graph of a variant, the indices of the arguments that it still takes (``kept``), and its slots in plane order.

    ``dropped_outputs``: indices of the outputs that are caches, which the rewritten graph does not return. ``results``: the number of
    outputs of the graph before its rewrite.
    """

    module: fx.GraphModule
    variant: Variant
    kept: tuple[int, ...]
    bindings: tuple[Binding, ...]
    dropped_outputs: tuple[int, ...]
    results: int
    cursors: tuple[int, ...] = ()
    """Slots of the sliding caches with a cursor input; cursors follow the planes."""
    sizes: tuple[Any, ...] = ()
    """Symbols with a size input, behind the cursors: sizes that only cache tensors had."""
