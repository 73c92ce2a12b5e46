"""Mask extent: the end of the tokens that a call's queries may see, of all rows or of each, evaluated from the graph's own masks."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import networkx as nx
import torch
from torch import fx

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.capture.position_graph import dataflow, extract
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.shapes import size_along, value_of
from kvcompile.passes.match.mask.masks import hiding, shown_by
from kvcompile.passes.match.sites import LimitKind, MaskTerm, Site
from kvcompile.passes.plan.plan import Plan
from kvcompile.runtime.forms.call_arguments import Call
from kvcompile.runtime.forms.positions import by_row
from kvcompile.runtime.forms.slot_groups import Group


class MaskExtent:
    """Evaluates where the tokens end that the attentions of a planned graph may see, from the arguments of a call.

    The end is the last visible position plus one, from masks and limits on positions. May wait for the device.
    """

    def __init__(self, captured: Captured, planned: Plan, effects: Effects) -> None:
        self.captured, self.effects = captured, effects
        self.sites = [item.site for item in planned.sites]
        self.shown: dict[MaskTerm, tuple[fx.GraphModule, tuple[int, ...], bool] | None] = {}

    def end(self, root: fx.Node, call: Call) -> int:
        """Return the last position in the cache tensor ``root`` that any query of a call may see, plus one."""
        sites = [site for site in self.sites if any(slot.root is root for slot in site.slots)]
        return max(self._site(site, call) for site in sites)

    def row_ends(self, root: fx.Node, call: Call) -> torch.Tensor:
        """Return the last position in the cache tensor ``root`` that any query of each row may see, plus one, int64 [1 or B] on the CPU."""
        found = [self._rows(site, call) for site in self.sites if any(slot.root is root for slot in site.slots)]
        return functools.reduce(torch.maximum, found)

    def comes_from(self, group: Group, counters: Collection[int]) -> bool:
        """Return whether the extent of a group's attentions depends on no arguments but ``counters``, or follows from positions."""
        if not group.unbounded:
            return True
        flow = dataflow(self.captured, self.effects)
        sites = [site for site in self.sites if any(slot.root is group.root for slot in site.slots)]
        masks = {term.node for site in sites for term in hiding(site.bounds)}
        behind = masks.union(*(nx.ancestors(flow, node) for node in masks))
        tensors = [entry for entry in self.captured.inputs if entry.node in behind and isinstance(value_of(entry.node), torch.Tensor)]
        return all(entry.index in counters for entry in tensors)

    def _site(self, site: Site, call: Call) -> int:
        return min([self._total(site, call), int(self._limit(site, call).max()), *[int(ends.max()) for ends in self._masks(site, call)]])

    def _rows(self, site: Site, call: Call) -> torch.Tensor:
        """Return where the tokens end that a site shows to each row, int64 [1 or B] on the CPU."""
        masks = [ends.cpu() for ends in self._masks(site, call)]
        return functools.reduce(torch.minimum, masks, self._limit(site, call).cpu().clamp(max=self._total(site, call)))

    def _masks(self, site: Site, call: Call) -> list[torch.Tensor]:
        """Return where the tokens end that each mask of a site shows to each row, without masks that come from a cache."""
        return [ends for term in hiding(site.bounds) if (ends := self._ends_of(term, site, call)) is not None]

    def _total(self, site: Site, call: Call) -> int:
        attention = site.attention
        return call.read(value_of(attention.k).shape[attention.k_roles.index("T")])

    def _limit(self, site: Site, call: Call) -> torch.Tensor:
        """Return the last position that a site's upper limit allows each row, plus one, int64 [1 or B]."""
        hi, attention = site.bounds.hi, site.attention
        if hi.kind is LimitKind.ALL:
            return torch.tensor([self._total(site, call)], device="cpu")
        offset = call.read(hi.shift)
        if hi.kind is LimitKind.NODE:
            assert hi.node is not None
            return call.positions().values[hi.node].amax(-1).to(torch.int64) + offset + 1
        own = call.read(size_along(attention.q, attention.q_roles, "S", attention.folded)) - 1 if hi.kind is LimitKind.OWN else 0
        return torch.tensor([own + offset + 1], device="cpu")

    def _ends_of(self, term: MaskTerm, site: Site, call: Call) -> torch.Tensor | None:
        """Return the last position that a mask shows to any query of each row, plus one, int64 [1 or B]; None if it comes from a cache.

        Cached by call.
        """
        if term not in call.row_ends:
            call.row_ends[term] = self._ends(term, site.key.batch, call.args)
        return call.row_ends[term]

    def _ends(self, term: MaskTerm, batch: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
        if term not in self.shown:
            caches = {slot.placeholder for site in self.sites for slot in site.slots}
            behind = nx.ancestors(dataflow(self.captured, self.effects), term.node)
            self.shown[term] = None if behind & caches else extract(self.captured, (term.node,), self.effects)
        made = self.shown[term]
        if made is None:
            return None
        module, taken, writes = made
        given = [args[index] for index in taken]
        with torch.no_grad():
            (mask,) = module(*[item.clone() if writes and isinstance(item, torch.Tensor) else item for item in given])
        seen = by_row(shown_by(term, mask), term.roles, batch)
        return torch.where(seen, torch.arange(1, seen.shape[1] + 1, device=seen.device), 0).amax(1)
