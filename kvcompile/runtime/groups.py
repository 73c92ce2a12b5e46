"""Groups: the slots of a graph by the cache tensor that they live in, and the sizes of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.shapes import source_line, value_of
from kvcompile.passes.match.sites import Limit, Ring, Site, SlotKind
from kvcompile.passes.rewrite.rewritten import Binding


class SizeReader:
    """Evaluates the captured graph's symbolic sizes from the arguments of a call."""

    def __init__(self, captured: Captured) -> None:
        self.where: dict[Any, tuple[int, int | None]] = {}
        for index, fake in enumerate(captured.fakes):
            if isinstance(fake, torch.SymInt):
                self.where.setdefault(fake.node.expr, (index, None))
            elif isinstance(fake, torch.Tensor):
                for dim, size in enumerate(fake.shape):
                    if isinstance(size, torch.SymInt):
                        self.where.setdefault(size.node.expr, (index, dim))

    def read(self, size: Any, args: tuple[Any, ...]) -> int:
        """A size as a plain int for this call."""
        return size if isinstance(size, int) else self.value(size.node.expr, args)

    def value(self, expr: Any, args: tuple[Any, ...]) -> int:
        """The value of an expression over the graph's symbols for this call."""
        values = {}
        for symbol in expr.free_symbols:
            index, dim = self.where[symbol]
            values[symbol] = int(args[index]) if dim is None else args[index].shape[dim]
        return int(expr.xreplace(values))


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
    site: Site = field(repr=False, kw_only=True)
    """Any of the attentions that read it."""

    @property
    def first(self) -> Binding:
        """Any of the slots: they share tokens and batch rows."""
        return self.bindings[0]

    @property
    def token_dim(self) -> int:
        """The dim of the cache tensor that tokens run along."""
        return self.first.plan.slot.axes.token_dim

    @property
    def ring(self) -> Ring | None:
        """The sliding cache's description, None where the cache keeps all its tokens."""
        return self.first.plan.slot.ring

    @property
    def grows(self) -> bool:
        """Whether a step returns a longer cache, every place of which is a token."""
        return self.kind in {SlotKind.CONCAT, SlotKind.BORN_CONCAT}

    @property
    def pool(self) -> bool:
        """Whether it is read through a gather: any place may have been written, so all of them are held."""
        return self.first.plan.slot.table is not None

    @property
    def goes_on(self) -> bool:
        """Whether a ring's tokens follow the last one in every call: all that its buffer shows is lined up with them."""
        ring = self.ring
        if ring is None or ring.refilled or not isinstance(ring.end, int):
            return False
        return bool(ring.end == value_of(self.root).shape[self.token_dim])


def group_bindings(
    bindings: tuple[Binding, ...], sites: Sequence[Site], reach: Sequence[Any], limits: Sequence[tuple[Limit, ...]]
) -> tuple[Group, ...]:
    """Bindings grouped by the cache tensor that they live in; ``reach`` and ``limits`` of each binding's site."""
    by_root: dict[fx.Node, list[int]] = {}
    for index, item in enumerate(bindings):
        by_root.setdefault(item.plan.slot.root, []).append(index)
    groups = []
    for root, members in by_root.items():
        slot = bindings[members[0]].plan.slot
        groups.append(Group(
            slot.kind, bindings[members[0]].argument, bindings[members[0]].outputs, tuple(bindings[index] for index in members), root,
            source_line(slot.write.node), tuple(reach[index] for index in members),
            tuple(limit for index in members for limit in limits[index]), site=sites[members[0]],
        ))
    return tuple(groups)
