"""Reallocation: what a layer keeps of its tokens' importance becomes new widths, and then new buckets.

Widths are decided for several layers side by side, as on a device the number of operations takes time, and without a wait for it
(``decide``); each layer is then moved, when its caller likes (``moved``).

Planes of keys that are read and written here, by position (pages of 64 rows, one for all heads):

    importance  float32 [N, B, 1, page, 3]  plain, head-weighted, plain at the last allocation; above 0 where some query saw the token
    decided     float32 [N, B, 1, page, 1]  0: its width was never decided; else 1 + checks in a row away from its rank + that rank

What nobody ever saw (left padding) is stored at the least widths and counts neither as important nor in any mean or rank. It is stored
nevertheless: a mask may show it later.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcompile.schemes.adaptive import Churn, Look, Reallocated, on_device
from kvcompile.schemes.base import Planes
from kvcompile.schemes.smartkv import buckets, clock, moves
from kvcompile.schemes.smartkv.allocation import Widths, allocate, by_worth
from kvcompile.schemes.smartkv.buckets import ENTERING, Buckets, Room
from kvcompile.schemes.smartkv.hysteresis import Decided, decide
from kvcompile.schemes.smartkv.importance import blended, recent
from kvcompile.schemes.smartkv.moves import SLACK, Order
from kvcompile.types import PAGE, SlotSpec, pages_for

if TYPE_CHECKING:
    from kvcompile.schemes.smartkv.scheme import Smartkv


TOGETHER = 1 << 22
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


def drifted(scheme: Smartkv, importance_LBTw: torch.Tensor) -> torch.Tensor:
    """Whether any row's importance has drifted since the last allocation, bool [L], from rows [L, B, T, 3] of planes ``importance``."""
    now, _, before = importance_LBTw.flatten(0, 1).unbind(-1)
    common = (now > 0) & (before > 0)
    found = clock.drifted(now, before, common, tau=scheme.tau, moved=scheme.moved, share=scheme.drift)
    return found.view(importance_LBTw.shape[:2]).any(1)


@functools.lru_cache(maxsize=1024)
def interval(scheme: Smartkv, slot: SlotSpec, rows: int, count: int, layer: int) -> int:
    """Steps from an allocation of ``count`` tokens to the next one: the clock's, or fewer where their pages would exceed the budget."""
    steps = clock.interval(layer, count, scheme.interval)
    needed = _needed(scheme, slot, count)
    if steps <= PAGE or spendable(scheme, slot, rows, count, layer, steps) >= needed:
        return steps
    # The more steps the less may be spent: the most whole pages that can be met, one at least.
    pages = range((steps - 1) // PAGE, 1, -1)
    met = bisect.bisect_left(pages, True, key=lambda each: spendable(scheme, slot, rows, count, layer, each * PAGE) >= needed)
    return (pages[met] if met < len(pages) else 1) * PAGE


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
    """Bytes that a row's settled tokens may take where their planes have slack too; see ``settled_bytes``."""
    widths = scheme.halves
    rounding = (buckets.ROW - 1) * (len(widths.keys) + len(widths.values))
    return max(0, int((settled_bytes(scheme, slot, rows, count, layer, last) - rounding) / (1 + 1 / SLACK) / rows))


def settled_bytes(scheme: Smartkv, slot: SlotSpec, rows: int, count: int, layer: int, last: int) -> int:
    """Bytes that planes of a layer's settled tokens may take, so that the budget holds at each of ``last`` steps up to the next allocation.

    Until then new tokens take whole pages, and everything that is kept by position grows with them.
    """
    cost, widths = scheme.cost(slot), scheme.halves
    share = min(scheme.layer_share(tokens, slot, layer) for tokens in (count, count + last))
    fixed = 2 * 8 + rows * 4 * (len(widths.keys) + len(widths.values)) + rows * slot.heads * 4
    page = PAGE * rows * 2 * cost.half(ENTERING)

    def left(steps: int) -> float:
        kept = buckets.pages_by_position(pages_for(count + steps)) * PAGE * rows * scheme.for_good
        return share * cost.dense * rows * (count + steps) - pages_entering(steps) * page - kept - fixed

    # What is left grows with the steps but where pages are added: to those that enter, and by position, which is less than 64 tokens bring.
    grow = [0, *(1 + (PAGE << number) for number in range(pages_entering(last).bit_length()))]
    return int(min(left(steps) for steps in (*grow, *(steps + -(count + steps - 1) % PAGE for steps in grow)) if steps <= last))


def pages_entering(tokens: int) -> int:
    """How many pages there are for tokens that entered one by one: one at least, and twice as many whenever they are full."""
    return 1 << (max(1, pages_for(tokens)) - 1).bit_length()


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


def of_layers(layers: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Copies of the first ``count`` rows of planes ``importance`` of layers, float32 [L, B, T, 3]."""
    return torch.stack([by_position(plane, count) for plane in layers])


@dataclass(frozen=True)
class _Half:
    """New places of some layers' keys, or of their values: widths int8, places int32 [L, B, T], ``ends`` int32 [L, B, widths]."""

    widths: torch.Tensor
    place: torch.Tensor
    ends: torch.Tensor

    def order(self, number: int, counts: Sequence[int]) -> Order:
        """The order of one layer, which has ``counts`` tokens of each width."""
        return Order(self.widths[number], self.place[number], self.ends[number], tuple(counts))


@dataclass(frozen=True)
class _Some:
    """The decision of some layers: new places of keys and values; plain importance and the plane ``decided``, float32 [L, B, T].

    ``numbers`` [L, n]: settled tokens that change, promotions that codes cannot give, tokens of each width of keys, and of values.
    """

    halves: tuple[_Half, _Half]
    plain: torch.Tensor
    told: torch.Tensor
    numbers: Look


@dataclass(frozen=True)
class Decision:
    """New widths of ``count`` tokens of some layers, which were decided ``together`` at a time."""

    count: int
    together: int
    some: tuple[_Some, ...]


def decided(scheme: Smartkv, layers: Sequence[Layer], slot: SlotSpec, importance_LBTw: torch.Tensor) -> Decision:
    """Decide the widths of the tokens of some layers from their importance, float32 [L, B, T, 3]. Waits for nothing."""
    rows, count = importance_LBTw.shape[1:3]
    steps = len(scheme.halves.keys) + len(scheme.halves.values)
    together = max(1, TOGETHER // (rows * count * steps))
    return Decision(count, together, tuple(
        _some(scheme, layers[at : at + together], slot, importance_LBTw[at : at + together]) for at in range(0, len(layers), together)
    ))


def _some(scheme: Smartkv, layers: Sequence[Layer], slot: SlotSpec, importance_LBTw: torch.Tensor) -> _Some:
    """Decide the widths of layers side by side."""
    cost, halves, rows, count = scheme.cost(slot), scheme.halves, *importance_LBTw.shape[1:3]
    plain, weighted, _ = importance_LBTw.flatten(0, 1).unbind(-1)
    device = plain.device
    there = plain > 0
    # Nobody has looked at anything yet: all count alike.
    there = there | ~there.any(-1, keepdim=True)
    value = blended(plain, weighted, scheme.head_share, there)
    places = torch.arange(count, device=device)
    if scheme.recency:
        value = recent(value, (count - 1 - places).expand_as(value), scheme.recency)
    reader = moves.movement(device)
    now = [torch.cat([reader.widths(layer.halves[half], count) for layer in layers]) for half in range(2)]
    most = [each.clamp(max=widths[-1]) for each, widths in zip(now, halves, strict=True)]
    before = Widths(most[0], most[1], torch.zeros(0))
    protected = there & ((there.cumsum(-1) <= scheme.protect_first) | (places >= count - scheme.protect_last))
    hidden = (~there).sum(-1) * cost.token(halves.keys[0], halves.values[0])
    budgets = [
        spendable(scheme, slot, rows, count, layer.number, interval(scheme, slot, rows, count, layer.number)) for layer in layers
    ]
    spend = on_device([each for each in budgets for _ in range(rows)], device) - hidden
    order = by_worth(value, cost, halves, scheme.taste, there)
    found, after = decide(
        value, spend, cost, halves, before, _told(torch.cat([by_position(layer.kept[2], count) for layer in layers])[..., 0]),
        taste=scheme.taste, sticking=scheme.sticking, keep_RT=there, protected_RT=protected, most=before, order=order,
    )
    wanted = allocate(value, spend, cost, halves, scheme.taste, keep_RT=there, protected_RT=protected, order=order)
    new = [torch.where(there, each, widths[0]).to(torch.int8) for each, widths in zip((found.keys, found.values), halves, strict=True)]
    new = [torch.minimum(each, limit) for each, limit in zip(new, most, strict=True)]
    old = places < on_device([layer.first for layer in layers for _ in range(rows)], device).unsqueeze(-1)
    changed = torch.stack([((each != was) & old).sum(-1) for each, was in zip(new, now, strict=True)]).sum(0)
    refused = torch.stack([(each > limit).sum(-1) for each, limit in zip((wanted.keys, wanted.values), most, strict=True)]).sum(0)
    shape = (len(layers), rows, count)
    sides = [
        _Half(each.view(shape), *moves.placed(each.view(shape), widths)) for each, widths in zip(new, halves, strict=True)
    ]
    told = torch.where(after.rank.isnan(), 0.0, 1.0 + after.rank + after.away)
    numbers = [torch.stack([changed, refused], -1).view(*shape[:2], 2).sum(1), *(side.ends[:, -1] for side in sides)]
    return _Some((sides[0], sides[1]), plain.view(shape), told.view(shape), Look(torch.cat(numbers, -1)))


def moved(scheme: Smartkv, layer: Layer, slot: SlotSpec, decision: Decision, number: int, held: int) -> Reallocated:
    """A layer's planes after its move, ``number`` among the layers of the decision; ``held`` tokens are there by now.

    Planes stay where they are as long as they have room and are within the budget. Waits for the decision.
    """
    some, at = decision.some[number // decision.together], number % decision.together
    changed, refused, *counts = some.numbers.numbers[at]
    split = len(scheme.halves.keys)
    orders = [half.order(at, each) for half, each in zip(some.halves, (counts[:split], counts[split:]), strict=True)]
    rows, count = layer.keys.rows, decision.count
    rooms = _rooms(
        layer, [Room.of(order.counts, half) for order, half in zip(orders, layer.halves, strict=True)],
        settled_bytes(scheme, slot, rows, count, layer.number, interval(scheme, slot, rows, count, layer.number)),
    )
    keys, values = (
        moves.moved(half, order, layer.first, held, room) for half, order, room in zip(layer.halves, orders, rooms, strict=True)
    )
    importance, heads, told = layer.kept
    _write(importance, some.plain[at], 2)
    _write(told, some.told[at], 0)
    return Reallocated((*keys.planes, importance, heads, told), values.planes, Churn(1, changed, refused))


def _rooms(layer: Layer, needs: Sequence[Room], most: int) -> Sequence[Room | None]:
    """The room of new planes, None for both halves where theirs have it and take no more than ``most`` bytes."""
    halves = layer.halves
    if all(moves.fits(half, need) for half, need in zip(halves, needs, strict=True)) and sum(map(moves.held_bytes, halves)) <= most:
        return None, None
    wide = [moves.with_slack(need) for need in needs]
    return wide if sum(moves.held_bytes(half, room) for half, room in zip(halves, wide, strict=True)) <= most else needs


def _write(plane: torch.Tensor, rows_BT: torch.Tensor, column: int) -> None:
    """Write one column of a plane [N, B, 1, page, width] for the first T positions."""
    full, rest = divmod(rows_BT.shape[1], PAGE)
    of_pages = plane[:, :, 0, :, column]
    of_pages[:full] = rows_BT[:, : full * PAGE].unflatten(1, (full, PAGE)).transpose(0, 1)
    if rest:
        of_pages[full, :, :rest] = rows_BT[:, full * PAGE :]


def _told(stored_RT: torch.Tensor) -> Decided:
    """The decisions that rows [B, T] of the plane ``decided`` stand for."""
    away = (stored_RT - 1).floor().clamp(min=0)
    return Decided(torch.where(stored_RT == 0, float("nan"), stored_RT - 1 - away), away.to(torch.int8))
