"""Head tiles: attention with fewer value heads than key heads, split into one attention for each tile of key heads.

::

    attention(q, k, v.repeat(1, 2, 1, 1))  ->  cat([attend(q[:, :h], k_planes[:, :, :n], v_planes),
                                                    attend(q[:, h:], k_planes[:, :, n:], v_planes)], 1)

as in differential attention. Planes of keys are read through views.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.plan.plan import SitePlan

Q, KEYS, BIAS, SINKS = 0, 1, 6, 7
"""Indices of the operands of ``attend`` that have a dim of heads."""


@dataclass(frozen=True)
class HeadTile:
    """The operands for one tile of a site's heads: tile ``number`` out of ``of``."""

    emit: Emitter
    item: SitePlan
    number: int
    of: int
    shared: frozenset[fx.Node]
    """Key planes without a dim per head."""

    def operands(self, whole: list[Any]) -> list[Any]:
        """Return the operands that every attention takes, cut to this tile's heads."""
        found, site = list(whole), self.item.site
        found[Q] = self._part(whole[Q], 1, site.heads)
        found[KEYS] = [self.plane(plane) for plane in whole[KEYS]]
        if whole[BIAS] is not None and any(set(role) & set("HKG") for term in site.bounds.carried for role in term.roles):
            found[BIAS] = self._part(whole[BIAS], 1, site.heads)
        if whole[SINKS] is not None:
            found[SINKS] = self._part(whole[SINKS], 0, site.heads)
        return found

    def optional(self, whole: list[Any]) -> list[Any]:
        """Return the optional operands, with the newest keys cut to this tile's heads."""
        if not whole or whole[0] is None:
            return whole
        keys, values = whole[0]
        return [[self._part(keys, 1, self.item.key.spec.heads), values], *whole[1:]]

    def exact_first(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Return the operands for sinks, with keys cut to this tile's heads."""
        if not whole:
            return whole
        keys, values = whole["exact_first"]
        return {**whole, "exact_first": [self.plane(keys), values]}

    def plane(self, plane: fx.Node) -> fx.Node:
        """Return a plane [N, B, K, rows, width] cut to this tile's heads; unchanged if all heads share it."""
        return plane if plane in self.shared else self._part(plane, 2, self.item.key.spec.heads)

    def _part(self, node: fx.Node, dim: int, heads: int) -> fx.Node:
        count = heads // self.of
        return self.emit.call(aten.slice.Tensor, node, dim, self.number * count, (self.number + 1) * count)
