"""Reallocation: what a layer keeps of its tokens' importance becomes new widths, and new buckets.

Planes of keys that are read and written here, by position (pages of 64 rows, one for all heads):

    importance  float32 [N, B, 1, page, 3]  plain, head-weighted, plain at the last allocation; above 0 where some query saw the token
    decided     float32 [N, B, 1, page, 1]  0: its width was never decided; else 1 + checks in a row away from its rank + that rank

What nobody ever saw (left padding) is stored at the least widths and counts neither as important nor in any mean or rank. It is stored
nevertheless: a mask may show it later.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcompile.schemes.adaptive import Churn, Reallocated
from kvcompile.schemes.base import Planes
from kvcompile.schemes.smartkv import buckets, clock
from kvcompile.schemes.smartkv.allocation import Widths, allocate
from kvcompile.schemes.smartkv.buckets import ENTERING, Buckets
from kvcompile.schemes.smartkv.hysteresis import Decided, decide
from kvcompile.schemes.smartkv.importance import blended, recent
from kvcompile.types import PAGE, SlotSpec, pages_for

if TYPE_CHECKING:
    from kvcompile.schemes.smartkv.scheme import Smartkv


TOGETHER = 1 << 23
"""Widenings that are decided side by side: tokens of all rows and layers times the steps of each, some 60 bytes of scratch each."""


def by_position(plane: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` rows of a plane [N, B, 1, page, width], as [B, T, width]."""
    return plane[:, :, 0].transpose(0, 1).flatten(1, 2)[:, :count]


def put(plane: torch.Tensor, rows_BTw: torch.Tensor) -> torch.Tensor:
    """A new plane with as many pages as ``rows`` [B, T, width] need."""
    pages = pages_for(rows_BTw.shape[1])
    padded = torch.nn.functional.pad(rows_BTw, (0, 0, 0, pages * PAGE - rows_BTw.shape[1]))
    made = padded.unflatten(1, (pages, PAGE)).transpose(0, 1).unsqueeze(2)
    return made.to(plane.dtype).clone(memory_format=torch.contiguous_format)


def forgotten(plane: torch.Tensor, count: int) -> torch.Tensor:
    """A new plane without what it says of positions from ``count`` on."""
    return put(plane, by_position(plane, min(count, plane.shape[0] * PAGE)))


def drifted(scheme: Smartkv, importance: torch.Tensor, count: int) -> torch.Tensor:
    """Whether any row's importance has drifted since the last allocation, one bool."""
    now, _, before = by_position(importance, count).unbind(-1)
    common = (now > 0) & (before > 0)
    return clock.drifted(now, before, common, tau=scheme.tau, moved=scheme.moved, share=scheme.drift).any()


@functools.lru_cache(maxsize=1024)
def interval(scheme: Smartkv, slot: SlotSpec, rows: int, count: int, layer: int) -> int:
    """Steps from an allocation of ``count`` tokens to the next one: the clock's, or fewer where their pages would exceed the budget."""
    steps = clock.interval(layer, count, scheme.interval)
    while steps > PAGE and spendable(scheme, slot, rows, count, layer, steps) < _needed(scheme, slot, count):
        steps = (steps - 1) // PAGE * PAGE
    return steps


def can_be_met(scheme: Smartkv, slot: SlotSpec, rows: int, count: int, layer: int) -> bool:
    """Whether the least widths of ``count`` tokens, and the page that the next ones take, are within the budget."""
    steps = min(PAGE, clock.interval(layer, count, scheme.interval))
    return spendable(scheme, slot, rows, count, layer, steps) >= _needed(scheme, slot, count)


def _needed(scheme: Smartkv, slot: SlotSpec, count: int) -> int:
    """The least bytes of a row's settled tokens."""
    cost, halves = scheme.cost(slot), scheme.halves
    widest, least = cost.token(halves.keys[-1], halves.values[-1]), cost.token(halves.keys[0], halves.values[0])
    return count * least + min(count, scheme.protect_first + scheme.protect_last) * (widest - least)


def spendable(scheme: Smartkv, slot: SlotSpec, rows: int, count: int, layer: int, last: int) -> int:
    """Bytes that a row's settled tokens may take, so that the budget holds at each of ``last`` steps up to the next allocation.

    Until then new tokens take whole pages, and everything that is kept by position grows with them.
    """
    steps = torch.arange(last + 1)
    cost, widths = scheme.cost(slot), scheme.halves
    phases = torch.tensor([scheme.layer_share(tokens, slot, layer) for tokens in (count, count + int(steps[-1]))], dtype=torch.float64)
    allowed = phases.min() * cost.dense * rows * (count + steps).to(torch.float64)
    pages = (steps + PAGE - 1) // PAGE
    fixed = 2 * 8 + rows * 4 * (len(widths.keys) + len(widths.values)) + rows * slot.heads * 4
    other = pages * PAGE * rows * 2 * cost.half(ENTERING) + (count + steps + PAGE - 1) // PAGE * PAGE * rows * scheme.for_good + fixed
    return max(0, int((allowed - other).min() / rows))


@dataclass(frozen=True)
class Layer:
    """A layer's buckets of keys, the planes importance, heads and decided, its buckets of values, its number and ``buckets.first``."""

    keys: Buckets
    kept: Planes
    values: Buckets
    number: int
    first: int

    @property
    def halves(self) -> tuple[Buckets, Buckets]:
        """Buckets of keys and of values."""
        return self.keys, self.values


@dataclass(frozen=True)
class _Decision:
    """Widths of a layer's keys and values, int8 [B, T]; how they were decided, as the plane ``decided`` has it, [B, T]; what changes."""

    widths: tuple[torch.Tensor, torch.Tensor]
    told: torch.Tensor
    churn: Churn


def across(planes: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """The mean over layers of plain and head-weighted importance, float32 [B, T, 2] (3.3), from each layer's plane ``importance``."""
    return torch.stack([by_position(plane, count)[..., :2] for plane in planes]).mean(0)


def reallocated(
    scheme: Smartkv, layers: list[Layer], slot: SlotSpec, count: int, given: torch.Tensor | None = None
) -> Iterator[Reallocated]:
    """Decide the widths of the tokens of some layers anew, several layers at a time, and move them, one layer at a time.

    ``layers`` are taken out of the list as they are moved. ``given``: importance of all layers, in place of each one's own.
    """
    steps = len(scheme.halves.keys) + len(scheme.halves.values)
    together = max(1, TOGETHER // (layers[0].keys.rows * count * steps))
    while layers:
        some = layers[:together]
        del layers[:together]
        decisions = _decisions(scheme, some, slot, count, given)
        while some:
            # Nothing here holds a layer's old planes once its new ones have been taken.
            layer, decision = some.pop(0), decisions.pop(0)
            importance, heads, decided = layer.kept
            plain, weighted, _ = by_position(importance, count).unbind(-1)
            planes = put(importance, torch.stack([plain, weighted, plain], dim=-1)), heads.clone(), put(decided, decision.told[..., None])
            keys, values = (
                buckets.settled(half, widths, layer.first) for half, widths in zip(layer.halves, decision.widths, strict=True)
            )
            yield Reallocated((*keys.planes, *planes), values.planes, decision.churn)


def _decisions(
    scheme: Smartkv, layers: Sequence[Layer], slot: SlotSpec, count: int, given: torch.Tensor | None
) -> list[_Decision]:
    """The decisions of layers of one batch; their rows are decided side by side, as on a device the number of operations takes time."""
    cost, halves, rows = scheme.cost(slot), scheme.halves, layers[0].keys.rows
    own = [by_position(layer.kept[0], count)[..., :2] for layer in layers] if given is None else [given] * len(layers)
    plain, weighted = torch.cat(own).unbind(-1)
    there = plain > 0
    # Nobody has looked at anything yet: all count alike.
    there = there | ~there.any(-1, keepdim=True)
    value = blended(plain, weighted, scheme.head_share, there)
    places = torch.arange(count, device=value.device)
    if scheme.recency:
        value = recent(value, (count - 1 - places).expand_as(value), scheme.recency)
    now = [torch.cat([buckets.widths(layer.halves[half], count) for layer in layers]) for half in range(2)]
    most = [each.clamp(max=widths[-1]) for each, widths in zip(now, halves, strict=True)]
    before = Widths(most[0], most[1], torch.zeros(0))
    protected = there & ((there.cumsum(-1) <= scheme.protect_first) | (places >= count - scheme.protect_last))
    hidden = (~there).sum(-1) * cost.token(halves.keys[0], halves.values[0])
    budgets = [
        spendable(scheme, slot, rows, count, layer.number, interval(scheme, slot, rows, count, layer.number)) for layer in layers
    ]
    spend = torch.tensor(budgets, device=value.device).repeat_interleave(rows) - hidden
    found, after = decide(
        value, spend, cost, halves, before, _decided(torch.cat([by_position(layer.kept[2], count) for layer in layers])[..., 0]),
        taste=scheme.taste, sticking=scheme.sticking, keep_RT=there, protected_RT=protected, most=before,
    )
    wanted = allocate(value, spend, cost, halves, scheme.taste, keep_RT=there, protected_RT=protected)
    new = [torch.where(there, each, widths[0]).to(torch.int8) for each, widths in zip((found.keys, found.values), halves, strict=True)]
    new = [torch.minimum(each, limit) for each, limit in zip(new, most, strict=True)]
    old = torch.cat([(places < layer.first).expand(rows, -1) for layer in layers])
    moved = torch.stack([((each != was) & old).sum(-1) for each, was in zip(new, now, strict=True)]).sum(0)
    refused = torch.stack([(each > limit).sum(-1) for each, limit in zip((wanted.keys, wanted.values), most, strict=True)]).sum(0)
    counts = torch.stack([moved, refused]).view(2, len(layers), rows).sum(-1).T.tolist()
    told = torch.where(after.rank.isnan(), 0.0, 1.0 + after.rank + after.away)
    return [
        _Decision((keys, values), how, Churn(1, *numbers))
        for keys, values, how, numbers in zip(new[0].split(rows), new[1].split(rows), told.split(rows), counts, strict=True)
    ]


def _decided(stored_RT: torch.Tensor) -> Decided:
    """The decisions that rows [B, T] of the plane ``decided`` stand for."""
    away = (stored_RT - 1).floor().clamp(min=0)
    return Decided(torch.where(stored_RT == 0, float("nan"), stored_RT - 1 - away), away.to(torch.int8))
