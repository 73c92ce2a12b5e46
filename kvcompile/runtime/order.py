"""Order: whether the tokens of a call follow those that a window of exact tokens holds.

A window keeps its newest tokens exact and encodes a block once all of it is there. So it has no place for a token that leaves others
unwritten before it, and a write in the middle of a buffer loses what lies behind it. Neither matters to a store without a window. A call
that does the one, or attends to what the other lost (a sliding window that is written by hand as ``position % slots``, say), is served by
the dense cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import fx

from kvcompile.errors import Unsupported
from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.capture.position_graph import dataflow, extract
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.shapes import size_along, value_of
from kvcompile.passes.match.attention.steps import VERY_NEGATIVE
from kvcompile.passes.match.mask.masks import hiding
from kvcompile.passes.match.sites import LimitKind, MaskKind, MaskTerm, Site
from kvcompile.passes.plan.plan import Plan
from kvcompile.runtime.call import Call
from kvcompile.runtime.forms.form import CacheForm
from kvcompile.runtime.groups import Group
from kvcompile.runtime.state import CacheState


@dataclass(frozen=True)
class Broken:
    """The group whose window cannot serve a call, why, and whether tokens that attention sees would be lost: then no later call can."""

    group: Group
    why: str
    lost: bool


class TokenOrder:
    """Finds the cache whose window cannot take a call's tokens, by how far the graph's attentions see. May wait for the device."""

    def __init__(self, captured: Captured, planned: Plan, effects: Effects) -> None:
        self.captured, self.effects = captured, effects
        self.sites = [item.site for item in planned.sites]
        self.shown: dict[MaskTerm, tuple[fx.GraphModule, tuple[int, ...]] | None] = {}

    def broken(
        self, forms: Sequence[CacheForm], states: Sequence[CacheState], starts: Sequence[int], counts: Sequence[int], call: Call
    ) -> Broken | None:
        """Return the first group whose window cannot take a call's tokens, None where all can; raises Unsupported where some are missed."""
        for form, state, start, count in zip(forms, states, starts, counts, strict=True):
            if not (state.windowed and form.ordered):
                continue
            group, length = form.group, form.length(state, call)
            if start > length:
                why = f"tokens are written at position {start} of a cache that holds {length}, and a window takes tokens in their order"
                if state.top > length:
                    raise Unsupported(
                        expected="tokens in their order", found=f"{why}; those between are forgotten since a call went back behind them",
                        where=group.where, todo="write them again, or use a scheme without a window for this layer",
                    )
                return Broken(group, why, False)
            if start >= state.behind:
                continue
            end = self.end(group, call)
            if end > start + count:
                return Broken(
                    group, f"attention sees {end} tokens after a write at positions {start} to {start + count - 1}, and a window forgets "
                    "what lies behind the tokens that were written last", True,
                )
        return None

    def end(self, group: Group, call: Call) -> int:
        """Return the end of the tokens that any query of a call may see of a group's cache."""
        sites = [site for site in self.sites if any(slot.root is group.root for slot in site.slots)]
        return max(self._site(site, call) for site in sites)

    def _site(self, site: Site, call: Call) -> int:
        attention = site.attention
        total = call.read(value_of(attention.k).shape[attention.k_roles.index("T")])
        most = min(total, self._limit(site, call))
        return min([most, *[end for term in hiding(site.bounds) if (end := self._last(term, call.args)) is not None]])

    def _limit(self, site: Site, call: Call) -> int:
        """Return the end of the tokens that a site's upper limit allows."""
        hi, attention = site.bounds.hi, site.attention
        if hi.kind is LimitKind.ALL:
            return call.read(value_of(attention.k).shape[attention.k_roles.index("T")])
        offset = hi.offset + sum(coefficient * call.read(value_of(node)) for node, coefficient in hi.symbols)
        if hi.kind is LimitKind.NODE:
            assert hi.node is not None
            return int(call.positions().values[hi.node].max()) + offset + 1
        own = call.read(size_along(attention.q, attention.q_roles, "S", attention.folded)) - 1 if hi.kind is LimitKind.OWN else 0
        return own + offset + 1

    def _last(self, term: MaskTerm, args: tuple[Any, ...]) -> int | None:
        """Return the end of the tokens that a mask shows to any query; None where the mask is made from a cache."""
        if term not in self.shown:
            caches = {slot.placeholder for site in self.sites for slot in site.slots}
            behind = nx.ancestors(dataflow(self.captured, self.effects), term.node)
            self.shown[term] = None if behind & caches else extract(self.captured, (term.node,), self.effects)[:2]
        made = self.shown[term]
        if made is None:
            return None
        module, taken = made
        with torch.no_grad():
            (mask,) = module(*[item.clone() if isinstance(item, torch.Tensor) else item for item in (args[index] for index in taken)])
        seen = mask > VERY_NEGATIVE if term.kind is MaskKind.ADD else mask != 0
        seen = ~seen if term.kind is MaskKind.FILL else seen
        tokens = seen.movedim(term.roles.index("T"), -1).flatten(0, -2).any(0).nonzero()
        return int(tokens.max()) + 1 if len(tokens) else 0
