"""Tiles of heads: attention whose values have fewer heads than its keys, each of which goes with several of these.

::

    attention(q, k, v.repeat(1, 2, 1, 1))  ->  cat([attend(q[:, :h], k_planes[:, :, :n], v_planes),
                                                    attend(q[:, h:], k_planes[:, :, n:], v_planes)], 1)

as differential attention is written, one attention for each half of the values. Planes of keys are read through views.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.plan.plan import SitePlan

Q, KEYS, BIAS, SINKS = 0, 1, 6, 7
"""Places of the operands of ``attend`` that have heads."""


@dataclass(frozen=True)
class HeadTile:
    """The operands of one tile of a site's heads: tile ``number`` of ``of``."""

    emit: Emitter
    item: SitePlan
    number: int
    of: int
    shared: frozenset[fx.Node]
    """Planes of the keys that all heads share."""

    def operands(self, whole: list[Any]) -> list[Any]:
        """The operands that every attention has, of this tile's heads."""
        found, site = list(whole), self.item.site
        found[Q] = self._part(whole[Q], 1, site.heads)
        found[KEYS] = [self.plane(plane) for plane in whole[KEYS]]
        if whole[BIAS] is not None and any(set(role) & set("HKG") for term in site.bounds.carried for role in term.roles):
            found[BIAS] = self._part(whole[BIAS], 1, site.heads)
        if whole[SINKS] is not None:
            found[SINKS] = self._part(whole[SINKS], 0, site.heads)
        return found

    def optional(self, whole: list[Any]) -> list[Any]:
        """The newest tokens, keys of this tile's heads, and whatever else is optional."""
        if not whole or whole[0] is None:
            return whole
        keys, values = whole[0]
        return [[self._part(keys, 1, self.item.key.spec.heads), values], *whole[1:]]

    def exact_first(self, whole: dict[str, Any]) -> dict[str, Any]:
        """The first tokens, keys of this tile's heads."""
        if not whole:
            return whole
        keys, values = whole["exact_first"]
        return {**whole, "exact_first": [self.plane(keys), values]}

    def plane(self, plane: fx.Node) -> fx.Node:
        """A plane [N, B, K, rows, width] with this tile's heads; one that all heads share as it is."""
        return plane if plane in self.shared else self._part(plane, 2, self.item.key.spec.heads)

    def _part(self, node: fx.Node, dim: int, heads: int) -> fx.Node:
        count = heads // self.of
        return self.emit.call(aten.slice.Tensor, node, dim, self.number * count, (self.number + 1) * count)
