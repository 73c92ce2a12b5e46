"""Slot groups: the slots of a graph grouped by cache tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from kvcompile.passes.graph.shapes import source_line
from kvcompile.passes.match.mask.reach import unbounded
from kvcompile.passes.match.sites import Limit, Site
from kvcompile.passes.match.slot_kinds import SlotKind
from kvcompile.passes.rewrite.rewritten import Binding


@dataclass(frozen=True)
class Group:
    """The slots in one cache tensor: an argument of the call, or a result that this graph creates (``argument`` is None)."""

    kind: SlotKind
    argument: int | None
    outputs: tuple[int, ...]
    bindings: tuple[Binding, ...]
    root: fx.Node = field(repr=False)
    where: str
    reach: tuple[Any, ...]
    """Numbers of tokens (int or SymInt) that its attentions read, whatever was written."""
    limits: tuple[Limit, ...] = ()
    unbounded: bool = False
    """Whether masks may show its attentions slots that were not written yet."""
    site: Site = field(repr=False, kw_only=True)
    """One of the attentions that read it."""

    @property
    def any_binding(self) -> Binding:
        """One of the slots: all share tokens and batch rows."""
        return self.bindings[0]


def group_bindings(
    bindings: tuple[Binding, ...], sites: Sequence[Site], reach: Sequence[Any], limits: Sequence[tuple[Limit, ...]]
) -> tuple[Group, ...]:
    """Return the bindings grouped by cache tensor; ``sites``, ``reach`` and ``limits`` have one entry for each binding."""
    by_root: dict[fx.Node, list[int]] = {}
    for index, item in enumerate(bindings):
        by_root.setdefault(item.plan.slot.root, []).append(index)
    groups = []
    for root, members in by_root.items():
        slot = bindings[members[0]].plan.slot
        groups.append(Group(
            slot.kind, bindings[members[0]].argument, bindings[members[0]].outputs, tuple(bindings[index] for index in members), root,
            source_line(slot.write.node), tuple(reach[index] for index in members),
            tuple(limit for index in members for limit in limits[index]), any(unbounded(sites[index]) for index in members),
            site=sites[members[0]],
        ))
    return tuple(groups)
