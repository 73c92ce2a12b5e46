"""Positions on the host: a call's write positions and mask limits, evaluated by the graph's own arithmetic.

Evaluated at most once a call, and only when needed: when a filled cache is adopted, when an empty one is first written, and, on a CPU
where it does not wait, to follow callers that jump or step back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.capture.position_graph import extract
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.shapes import size_along
from kvcompile.passes.match.mask.masks import shown_by
from kvcompile.passes.match.sites import Limit, LimitKind, Position, Site
from kvcompile.passes.plan.plan import Plan
from kvcompile.passes.rewrite.left_padding import padding


@dataclass(frozen=True)
class TokenPositions:
    """The positions of one call's tokens: write positions and mask limits by node, each int64 [1 or B, 1 or S].

    ``masks``: values of the masks that define padding, by node. ``counts``: expected numbers of positions, by node.
    """

    values: dict[fx.Node, torch.Tensor]
    masks: dict[fx.Node, torch.Tensor] = field(default_factory=dict)
    counts: dict[fx.Node, Any] = field(default_factory=dict)

    def left_padding(self, site: Site) -> torch.Tensor | None:
        """Return the first visible position of each row in a site's masks, int64 [B]; None if masks do not differ by row."""
        found = None
        for term in padding(site.bounds):
            seen = by_row(shown_by(term, self.masks[term.node]), term.roles, site.key.batch)
            first = (seen.cumsum(1) == 0).sum(1)
            found = first if found is None else torch.maximum(found, first)
        return found

    def ordered(self, read: Callable[[Any], int]) -> bool:
        """Return whether all positions are 0, 1, 2, ... in every row, one for each token; ``read`` evaluates a symbolic size."""
        return all(
            value.shape[-1] == read(self.counts[node]) and bool((value == torch.arange(value.shape[-1], device=value.device)).all())
            for node, value in self.values.items()
        )

    def rows(self, node: fx.Node) -> tuple[torch.Tensor, bool]:
        """Return a write's first position in each row, int64 [1 or B], and whether all rows' other positions follow consecutively."""
        value = self.values[node]
        first = value[:, :1]
        return first[:, 0], bool((value == first + torch.arange(value.shape[1], device=value.device)).all())

    def first_written(self, node: fx.Node) -> tuple[int, int, int]:
        """Return (first position of the row that is furthest, smallest position, largest position) of a write."""
        value = self.values[node]
        least, most = (int(item) for item in torch.aminmax(value))
        return int(value.amin(-1).max()), least, most

    def visible(self, limits: tuple[Limit, ...]) -> int:
        """Return the number of tokens that the furthest query may see by these limits; 0 if they have no positions."""
        return max((int(self.values[limit.node].max()) + limit.offset + 1 for limit in limits if limit.node in self.values), default=0)


def by_row(seen: torch.Tensor, roles: tuple[str, ...], batch: Any) -> torch.Tensor:
    """Return which tokens a mask with dims of ``roles`` shows to some query of each of ``batch`` rows, bool [1 or B, T]."""
    token, rows = roles.index("T"), next((dim for dim, role in enumerate(roles) if "B" in role), None)
    if rows is None:
        return seen.movedim(token, -1).flatten(0, -2).any(0)[None] if seen.dim() > 1 else seen[None]
    rest = [dim for dim in range(seen.dim()) if dim not in {rows, token}]
    seen = seen.permute(rows, token, *rest).flatten(2).any(-1) if rest else seen.permute(rows, token)
    if len(roles[rows]) > 1:
        outer = roles[rows][0] == "B"
        seen = torch.unflatten(seen, 0, (batch, -1) if outer else (-1, batch)).any(1 if outer else 0)
    return seen


class PositionReader:
    """Evaluates the part of a captured graph that computes positions and masks, from the arguments of a call."""

    def __init__(
        self, run: Callable[..., tuple[Any, ...]], nodes: dict[fx.Node, tuple[str, ...]], masks: tuple[fx.Node, ...],
        counts: dict[fx.Node, Any], counters: tuple[int, ...], counted: bool,
    ) -> None:
        self.run, self.nodes, self.masks, self.counts = run, nodes, masks, counts
        self.counters = counters
        """Indices of the arguments that determine positions and that the graph itself advances."""
        self.counted = counted
        """Whether positions depend on nothing else: then they continue in order unless other code moves a counter (``store.counters``)."""

    def of_call(self, args: tuple[Any, ...]) -> Callable[[], TokenPositions]:
        """Return a function without arguments that returns the positions of the call with ``args``; it computes them when first called."""
        made: list[TokenPositions] = []

        def found() -> TokenPositions:
            if not made:
                values = self.run(*args)
                count = len(self.nodes)
                made.append(TokenPositions(
                    {node: _rows(value, roles) for (node, roles), value in zip(self.nodes.items(), values[:count], strict=True)},
                    dict(zip(self.masks, values[count:], strict=True)), self.counts,
                ))
            return made[0]

        return found


def _rows(value: torch.Tensor, roles: tuple[str, ...]) -> torch.Tensor:
    """Return a tensor with dims of ``roles`` ('' of size 1) as [1 or B, 1 or S]."""
    for dim in range(len(roles) - 1, -1, -1):
        if not roles[dim]:
            value = value.select(dim, 0)
    present = [role for role in roles if role]
    if present == ["S", "B"]:
        value = value.t()
    if "B" not in present:
        value = value.unsqueeze(0)
    return value if "S" in present else value.unsqueeze(-1)


def _write_roles(position: Position) -> tuple[str, ...]:
    if position.roles:
        return position.roles
    rank = position.index.meta["val"].dim()  # type: ignore[union-attr]
    return ("B", "S")[:rank] if position.rows else ("S",)[:rank]


def _queries(site: Site) -> Any:
    """Return the number of a site's queries, an int or a SymInt."""
    return size_along(site.attention.q, site.attention.q_roles, "S", site.attention.folded)


def limits_of(site: Site) -> tuple[Limit, ...]:
    """Return the upper limits of a site's queries that are position tensors; empty if they are none."""
    hi = site.bounds.hi
    return (hi,) if hi.kind is LimitKind.NODE and hi.amount is None else ()


def positions_of(captured: Captured, planned: Plan, effects: Effects) -> PositionReader | None:
    """Return the reader of a planned graph's positions and padding masks; None if none of them is a tensor."""
    nodes: dict[fx.Node, tuple[str, ...]] = {}
    counts: dict[fx.Node, Any] = {}
    for item in planned.sites:
        for part in item.parts:
            position = part.slot.write.position
            if position.index is not None:
                nodes.setdefault(position.index, _write_roles(position))
                counts.setdefault(position.index, part.slot.write.count)
        facts = item.site.key.kind.facts
        if (facts.fixed or facts.created) and item.site.key.block_table is None:
            for limit in (item.site.bounds.hi, item.site.bounds.lo):
                if limit is not None and limit.kind is LimitKind.NODE:
                    nodes.setdefault(limit.node, limit.roles)  # type: ignore[arg-type]
                    counts.setdefault(limit.node, _queries(item.site))  # type: ignore[arg-type]
    # Rows' padding must be known when a filled cache is adopted into blocks, or tokens share scales.
    asking = [item.site for item in planned.sites if any(part.knows_padding for part in item.parts)]
    masks = tuple(dict.fromkeys(term.node for site in asking for term in padding(site.bounds)))
    if not nodes and not masks:
        return None
    module, taken, writes = extract(captured, (*nodes, *masks), effects)

    def run(*args: Any) -> tuple[torch.Tensor, ...]:
        given = [args[index] for index in taken]
        if writes:
            given = [value.clone() if isinstance(value, torch.Tensor) else value for value in given]
        with torch.no_grad():
            values: tuple[torch.Tensor, ...] = module(*given)
        return values

    tensors = [entry for entry in captured.inputs if entry.index in taken and isinstance(entry.node.meta["val"], torch.Tensor)]
    counters = tuple(entry.index for entry in tensors if effects.writes.get(entry.node))
    return PositionReader(run, nodes, masks, counts, counters, 0 < len(counters) == len(tensors))
