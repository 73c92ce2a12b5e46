"""Reallocation: what a layer keeps of its tokens' importance becomes new widths, and new buckets.

Planes of keys that are read and written here, by position (pages of 64 rows, one for all heads):

    importance  float32 [N, B, 1, page, 3]  plain, head-weighted, plain at the last allocation; above 0 where some query saw the token
    decided     float32 [N, B, 1, page, 1]  0: its width was never decided; else 1 + checks in a row away from its rank + that rank

What nobody ever saw (left padding) is stored at the least widths and counts neither as important nor in any mean or rank. It is stored
nevertheless: a mask may show it later.
"""

from __future__ import annotations

import functools
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


def reallocated(
    scheme: Smartkv, keys: Buckets, values: Buckets, kept: Planes, slot: SlotSpec, count: int, layer: int
) -> Reallocated:
    """Decide the widths of a layer's tokens anew and move them; ``kept``: the planes importance, heads and decided."""
    importance, heads, decided = kept
    cost, halves = scheme.cost(slot), scheme.halves
    plain, weighted, _ = by_position(importance, count).unbind(-1)
    there = plain > 0
    # Nobody has looked at anything yet: all count alike.
    there = there | ~there.any(-1, keepdim=True)
    value = blended(plain, weighted, scheme.head_share, there)
    if scheme.recency:
        value = recent(value, count - 1 - torch.arange(count, device=value.device).expand_as(value), scheme.recency)
    now = [buckets.widths(half, count) for half in (keys, values)]
    most = [each.clamp(max=own[-1]) for each, own in zip(now, halves, strict=True)]
    before = Widths(most[0], most[1], torch.zeros(0))
    newest = torch.arange(count, device=value.device) >= count - scheme.protect_last
    protected = there & ((there.cumsum(-1) <= scheme.protect_first) | newest)
    hidden = (~there).sum(-1) * cost.token(halves.keys[0], halves.values[0])
    last = interval(scheme, slot, keys.rows, count, layer)
    spend = spendable(scheme, slot, keys.rows, count, layer, last) - hidden
    found, after = decide(
        value, spend, cost, halves, before, _decided(by_position(decided, count)[..., 0]), taste=scheme.taste, sticking=scheme.sticking,
        keep_RT=there, protected_RT=protected, most=before,
    )
    wanted = allocate(value, spend, cost, halves, scheme.taste, keep_RT=there, protected_RT=protected)
    new = [torch.where(there, each, own[0]).to(torch.int8) for each, own in zip((found.keys, found.values), halves, strict=True)]
    new = [torch.minimum(each, limit) for each, limit in zip(new, most, strict=True)]
    old = torch.arange(count, device=value.device) < int(keys.first)
    moved = sum(int(((each != was) & old).sum()) for each, was in zip(new, now, strict=True))
    refused = sum(int((each > limit).sum()) for each, limit in zip((wanted.keys, wanted.values), most, strict=True))
    rank = torch.where(after.rank.isnan(), 0.0, 1.0 + after.rank + after.away)
    told = torch.stack([plain, weighted, plain], dim=-1)
    planes = put(importance, told), heads.clone(), put(decided, rank.unsqueeze(-1))
    settled = [buckets.settled(half, each) for half, each in zip((keys, values), new, strict=True)]
    return Reallocated((*settled[0].planes, *planes), settled[1].planes, Churn(1, moved, refused))


def _decided(stored_RT: torch.Tensor) -> Decided:
    """The decisions that rows [B, T] of the plane ``decided`` stand for."""
    away = (stored_RT - 1).floor().clamp(min=0)
    return Decided(torch.where(stored_RT == 0, float("nan"), stored_RT - 1 - away), away.to(torch.int8))
