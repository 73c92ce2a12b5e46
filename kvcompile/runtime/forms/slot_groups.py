"""Groups: the slots of a graph by the cache tensor that they live in."""

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
    """The slots that live in one cache tensor: an argument of the call, or a result that this graph makes."""

    kind: SlotKind
    argument: int | None
    outputs: tuple[int, ...]
    bindings: tuple[Binding, ...]
    root: fx.Node = field(repr=False)
    where: str
    reach: tuple[Any, ...]
    """Numbers of tokens, int or symbolic, that its attentions read whatever was written."""
    limits: tuple[Limit, ...] = ()
    unbounded: bool = False
    """Whether masks may show its attentions places that no token was written to yet."""
    site: Site = field(repr=False, kw_only=True)
    """Any of the attentions that read it."""

    @property
    def any_binding(self) -> Binding:
        """Any of the slots: they share tokens and batch rows."""
        return self.bindings[0]


def group_bindings(
    bindings: tuple[Binding, ...], sites: Sequence[Site], reach: Sequence[Any], limits: Sequence[tuple[Limit, ...]]
) -> tuple[Group, ...]:
    """Group bindings by the cache tensor that they live in; ``reach`` and ``limits`` are those of each binding's site."""
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
