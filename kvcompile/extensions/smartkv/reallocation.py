"""Reallocation: a layer's importance becomes new levels, and then new buckets.

Levels are decided for several layers together, since on a device the number of operations costs time, and without waiting for the device
(``decided``); each layer is then moved whenever its caller chooses (``moved``).

Planes of keys that are read and written here, by position (pages of 64 rows, one for all heads):

    importance  float32 [N, B, 1, page, 2]   plain, head-weighted; the plain one is above 0 if some query saw the token
    before      bfloat16 [N, B, 1, page, 1]  the plain one at the last allocation
    decided     int16 [N, B, 1, page, 1]     0: no decision yet; else 1 + 4096 * (checks in a row away from its rank) + 4095 * its rank

Tokens that no query ever saw (left padding) are stored at the least level and count neither as important nor in any mean or rank. They are
stored nevertheless: a later mask may show them.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcompile.extensions.smartkv import buckets, clock, moves, originals
from kvcompile.extensions.smartkv.allocation import allocate
from kvcompile.extensions.smartkv.buckets import Buckets, PlaneLengths
from kvcompile.extensions.smartkv.codes import ENTERING
from kvcompile.extensions.smartkv.hysteresis import Decided, LevelBounds, decide
from kvcompile.extensions.smartkv.importance import blended, weighted_by_recency
from kvcompile.extensions.smartkv.moves import SLACK, TokenMove
from kvcompile.extensions.smartkv.originals import Again
from kvcompile.extensions.smartkv.rules import Rules
from kvcompile.schemes.adaptive import Churn, PendingNumbers, Reallocated, on_device
from kvcompile.schemes.base import Planes
from kvcompile.types import PAGE, SlotSpec, pages_for

TOGETHER = 1 << 20
"""Tokens, over all rows and layers, whose levels are decided together: some 120 bytes of scratch each."""

RANKS = 4096
"""Distinct ranks that the plane ``decided`` can store."""


def by_position(plane: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first ``count`` rows of a plane [N, B, 1, page, width], as [B, T, width]."""
    return plane[:, :, 0].transpose(0, 1).flatten(1, 2)[:, :count]


def put(plane: torch.Tensor, rows_BTw: torch.Tensor) -> torch.Tensor:
    """Return a new plane [N, B, 1, page, width] with the rows [B, T, width], in the fewest pages that hold them."""
    pages = pages_for(rows_BTw.shape[1])
    padded = torch.nn.functional.pad(rows_BTw, (0, 0, 0, pages * PAGE - rows_BTw.shape[1]))
    made = padded.unflatten(1, (pages, PAGE)).transpose(0, 1).unsqueeze(2)
    return made.to(plane.dtype).clone(memory_format=torch.contiguous_format)


def forgotten(plane: torch.Tensor, count: int) -> torch.Tensor:
    """Return a copy of ``plane``, indexed by position, with its first ``count`` positions alone: [N, B, 1, page, width] in fewer pages."""
    return put(plane, by_position(plane, min(count, plane.shape[0] * PAGE)))


def drifted(scheme: Rules, importance_LBTw: torch.Tensor) -> torch.Tensor:
    """Return whether any row's importance has drifted since the last allocation, bool [L], from the result of ``of_layers``."""
    now, _, before = importance_LBTw.flatten(0, 1).unbind(-1)
    common = (now > 0) & (before > 0)
    found = clock.drifted(now, before, common, tau=scheme.tau, moved=scheme.moved, share=scheme.drift)
    return found.view(importance_LBTw.shape[:2]).any(1)


@functools.lru_cache(maxsize=1024)
def interval(scheme: Rules, slot: SlotSpec, rows: int, count: int, layer: int) -> int:
    """Return the number of steps between two allocations, from ``count`` tokens on: the clock's, or fewer to stay within the budget."""
    steps = clock.interval(layer, count, scheme.interval)
    needed = _needed(scheme, slot, count)
    if steps <= PAGE or spendable(scheme, slot, rows, count, layer, steps) >= needed:
        return steps
    # More steps leave fewer bytes to spend: bisect for the most whole pages that fit, at least one.
    pages = range((steps - 1) // PAGE, 1, -1)
    met = bisect.bisect_left(pages, True, key=lambda each: spendable(scheme, slot, rows, count, layer, each * PAGE) >= needed)
    return (pages[met] if met < len(pages) else 1) * PAGE


def can_be_met(scheme: Rules, slot: SlotSpec, rows: int, count: int, layer: int) -> bool:
    """Return whether the budget of a layer is met with ``count`` tokens of the least widths and the page for the next tokens."""
    steps = min(PAGE, clock.interval(layer, count, scheme.interval))
    return spendable(scheme, slot, rows, count, layer, steps) >= _needed(scheme, slot, count)


def _needed(scheme: Rules, slot: SlotSpec, count: int) -> int:
    """Return the least bytes of a row with ``count`` settled tokens: the largest widths for protected tokens, the least for all others."""
    cost, widths = scheme.cost(slot), scheme.key_value_widths
    widest, least = cost.token(widths.keys[-1], widths.values[-1]), cost.token(widths.keys[0], widths.values[0])
    return count * least + min(count, scheme.protect_first + scheme.protect_last) * (widest - least)


def spendable(scheme: Rules, slot: SlotSpec, rows: int, count: int, layer: int, last: int) -> int:
    """Return the bytes that the settled tokens of one of ``rows`` batch rows may take so that the budget holds for ``last`` more steps.

    It is a row's share of ``settled_bytes`` of layer number ``layer`` with ``count`` tokens, less the bytes that rounding to rows of the
    pool and the slack of new planes (``SLACK``) may add; at least 0.
    """
    rounding = (buckets.ROW - 1) * 2 * len(scheme.levels) * rows
    return max(0, int((settled_bytes(scheme, slot, rows, count, layer, last) - rounding) / (1 + 1 / SLACK) / rows))


def settled_bytes(scheme: Rules, slot: SlotSpec, rows: int, count: int, layer: int, last: int) -> int:
    """Return the bytes that a layer's planes of settled tokens, of all rows, may take so that the budget holds for ``last`` more steps.

    The result is negative if other planes exceed the budget. ``count``: tokens of a row now; ``layer``: the layer's number. In those steps
    new tokens take whole pages, and all planes that are indexed by position grow with them.
    """
    cost = scheme.cost(slot)
    share = min(scheme.layer_share(tokens, slot, layer) for tokens in (count, count + last))
    fixed = 2 * 8 + rows * (2 * 4 * 2 * len(scheme.levels) + slot.heads * (4 + scheme.mean_bytes(slot)))
    page = PAGE * rows * 2 * cost.key_or_value(ENTERING)

    def left(steps: int) -> float:
        kept = buckets.pages_by_position(pages_for(count + steps)) * PAGE * rows * scheme.for_good
        return share * cost.dense * rows * (count + steps) - pages_entering(steps) * page - kept - fixed

    # The rest grows with the steps except where pages are added: pages of entering tokens, and pages by position, which take less than 64
    # tokens add.
    grow = [0, *(1 + (PAGE << number) for number in range(pages_entering(last).bit_length()))]
    return int(min(left(steps) for steps in (*grow, *(steps + -(count + steps - 1) % PAGE for steps in grow)) if steps <= last))


def pages_entering(tokens: int) -> int:
    """Return the number of pages held for tokens that entered one by one: at least one, doubled whenever they are full."""
    return 1 << (max(1, pages_for(tokens)) - 1).bit_length()


@dataclass(frozen=True)
class KeyStatistics:
    """The planes of importance and decisions, stored with the buckets of keys."""

    importance: torch.Tensor
    before: torch.Tensor
    heads: torch.Tensor
    decided: torch.Tensor

    @property
    def planes(self) -> Planes:
        """The planes in the order of the layout."""
        return self.importance, self.before, self.heads, self.decided


@dataclass(frozen=True)
class LayerBuckets:
    """A layer's buckets of keys and values, the keys' statistics, the layer's number, and the position of its first entering token."""

    keys: Buckets
    statistics: KeyStatistics
    values: Buckets
    number: int
    first: int

    @property
    def slots(self) -> tuple[Buckets, Buckets]:
        """The buckets of keys and of values."""
        return self.keys, self.values


def of_layers(layers: Sequence[KeyStatistics], count: int) -> torch.Tensor:
    """Return copies of the first ``count`` rows of the layers' planes ``importance`` and ``before``, float32 [L, B, T, 3]."""
    return torch.stack([
        torch.cat([by_position(kept.importance, count), by_position(kept.before, count).to(torch.float32)], -1) for kept in layers
    ])


@dataclass(frozen=True)
class _BatchDecision:
    """The new widths of the tokens of L layers, decided together, and what moving the tokens needs.

    ``levels``, ``before``: new and present level of every token, int8 [L, B, T]. ``place``: the token's new index in the buckets, int32 [L,
    B, T]. ``ends``: the new planes ``ends`` of keys and of values. ``plain``, ``decided``: the tokens' new entries of the planes ``before``
    and ``decided``, [L, B, T]. ``there``: bool [L, B, T], True for tokens that some query has seen, or for all tokens of a row in which
    none was seen.
    ``numbers`` [L, n]: settled tokens that change, tokens that become wider, refused promotions, and the indices where buckets end, row by
    row; with tier 2 also the re-encoded tokens of keys and of values, by row and level.
    """

    levels: torch.Tensor
    before: torch.Tensor
    place: torch.Tensor
    ends: tuple[torch.Tensor, torch.Tensor]
    plain: torch.Tensor
    decided: torch.Tensor
    there: torch.Tensor
    numbers: PendingNumbers


@dataclass(frozen=True)
class Decision:
    """The new levels of the first ``count`` tokens of several layers, decided in batches of ``together`` layers each.

    ``some``: the decision of each batch, in the order of the layers.
    """

    count: int
    together: int
    some: tuple[_BatchDecision, ...]


def decided(scheme: Rules, layers: Sequence[LayerBuckets], slot: SlotSpec, importance_LBTw: torch.Tensor) -> Decision:
    """Return the new levels of the tokens of ``layers``, decided from their importance, float32 [L, B, T, 3] (``of_layers``).

    Does not wait for the device.
    """
    rows, count = importance_LBTw.shape[1:3]
    together = max(1, TOGETHER // (rows * count))
    return Decision(count, together, tuple(
        _decide_batch(scheme, layers[at : at + together], slot, importance_LBTw[at : at + together])
        for at in range(0, len(layers), together)
    ))


def _decide_batch(scheme: Rules, layers: Sequence[LayerBuckets], slot: SlotSpec, importance_LBTw: torch.Tensor) -> _BatchDecision:
    """Return the new levels of the tokens of ``layers``, decided in one batch from their importance, float32 [L, B, T, 3]."""
    terms, levels, rows, count = scheme.terms(slot), scheme.levels, *importance_LBTw.shape[1:3]
    plain, weighted, _ = importance_LBTw.flatten(0, 1).unbind(-1)
    device, top = plain.device, levels.top
    there = plain > 0
    # If no token has received attention yet, all count as present and equal.
    there = there | ~there.any(-1, keepdim=True)
    value = blended(plain, weighted, scheme.head_share, there)
    places = torch.arange(count, device=device)
    if scheme.recency:
        value = weighted_by_recency(value, (count - 1 - places).expand_as(value), scheme.recency)
    reader = moves.movement(device)
    now = torch.cat([reader.levels(layer.keys, count) for layer in layers])
    before = now.clamp(max=top)
    protected = there & ((there.cumsum(-1) <= scheme.protect_first) | (places >= count - scheme.protect_last))
    full = torch.where(there, top, -1).to(torch.int8)
    high = full if scheme.keeps_originals else torch.where(there, before, -1)
    low = torch.where(protected, high, torch.where(there, 0, -1).to(torch.int8))
    hidden = (~there).sum(-1) * terms.costs[0]
    budgets = [
        spendable(scheme, slot, rows, count, layer.number, interval(scheme, slot, rows, count, layer.number)) for layer in layers
    ]
    spend = on_device([each for each in budgets for _ in range(rows)], device) - hidden
    decided = _decided_from(torch.cat([by_position(layer.statistics.decided, count) for layer in layers])[..., 0])
    found, after = decide(value, spend, terms, levels, scheme.preference, before, decided, LevelBounds(low, high), scheme.hysteresis)
    old = places < on_device([layer.first for layer in layers for _ in range(rows)], device).unsqueeze(-1)
    new = found.clamp(min=0)
    changed, promoted = (((new != before) & old).sum(-1), (new > before).sum(-1))
    # Count promotions that are refused because no full-precision copy is kept.
    refused = torch.zeros_like(changed)
    if not scheme.keeps_originals:
        refused = (allocate(value, spend, terms, torch.where(protected, full, low), full) > high).sum(-1)
    shape = (len(layers), rows, count)
    place, ends = moves.placed(new.view(shape), len(levels))
    told_of = [torch.stack([changed, promoted, refused], -1).view(*shape[:2], 3).sum(1), ends.flatten(1)]
    told_of += [
        originals.counted(originals.changed(widths, now, new), new, len(levels)).view(len(layers), -1)
        for widths in ((levels.keys, levels.values) if scheme.keeps_originals else ())
    ]
    numbers = torch.cat(told_of, -1)
    stored = torch.where(after.rank.isnan(), 0, 1 + RANKS * after.away + ((RANKS - 1) * after.rank.nan_to_num()).to(torch.int16))
    planes = [
        buckets.with_pool_rows(ends, slot_buckets.widths, slot_buckets.heads, slot_buckets.head_dim) for slot_buckets in layers[0].slots
    ]
    return _BatchDecision(
        new.view(shape), now.view(shape), place, (planes[0], planes[1]), plain.view(shape), stored.to(torch.int16).view(shape),
        there.view(shape), PendingNumbers(numbers),
    )


def moved(scheme: Rules, layer: LayerBuckets, slot: SlotSpec, decision: Decision, number: int, held: int) -> Reallocated:
    """Return a layer's planes, rebuilt for the levels that ``decision`` chose, and the numbers of changed, refused and promoted tokens.

    ``number``: the layer's index among the layers of ``decision``; ``held``: tokens stored by now. Reuses planes that are large enough and
    within the budget. The layer's statistics and, at its first reallocation, the keys' mean are written in place. Waits for the decision.
    """
    some, at = decision.some[number // decision.together], number % decision.together
    changed, promoted, refused, *rest = some.numbers.numbers[at]
    width = len(scheme.levels)
    counts = moves.counts_of(rest[: layer.keys.rows * width], width)
    orders = [
        TokenMove(some.levels[at], some.place[at], plane[at], counts, _again(some, at, rest, slot_buckets, number))
        for number, (plane, slot_buckets) in enumerate(zip(some.ends, layer.slots, strict=True), 1)
    ]
    rows, count = layer.keys.rows, decision.count
    rooms = _rooms(
        layer, [PlaneLengths.of(counts, slot_buckets) for slot_buckets in layer.slots],
        settled_bytes(scheme, slot, rows, count, layer.number, interval(scheme, slot, rows, count, layer.number)),
    )
    if not layer.first and layer.keys.mean is not None:
        layer.keys.mean.copy_(moves.mean_of(layer.keys, 0, count, some.there[at]))
    keys, values = (
        moves.moved(slot_buckets, order, layer.first, held, room) for slot_buckets, order,
        room in zip(layer.slots, orders, rooms, strict=True)
    )
    _write(layer.statistics.before, some.plain[at])
    _write(layer.statistics.decided, some.decided[at])
    return Reallocated((*keys.planes, *layer.statistics.planes), values.planes, Churn(1, changed, refused, promoted))


def _again(some: _BatchDecision, at: int, numbers: Sequence[int], slot_buckets: Buckets, number: int) -> Again | None:
    """Return the tokens of one slot that a move encodes from full-precision copies; None without tier 2.

    ``at``: the layer's index in the decision. ``numbers``: the layer's row of the decision's ``numbers`` without its first three, so that
    the buckets' ends come first. ``number``: 1 for keys, 2 for values.
    """
    if slot_buckets.originals is None:
        return None
    size, width = slot_buckets.rows * len(slot_buckets.widths), len(slot_buckets.widths)
    own = numbers[number * size : (number + 1) * size]
    counts = tuple(tuple(own[row : row + width]) for row in range(0, size, width))
    return originals.again(slot_buckets.widths, some.before[at], some.levels[at], counts)


def _rooms(layer: LayerBuckets, needs: Sequence[PlaneLengths], most: int) -> Sequence[PlaneLengths | None]:
    """Return the lengths of new planes for keys and for values; None for both if the present planes fit ``needs`` within ``most`` bytes."""
    slots = layer.slots
    if all(moves.fits(slot_buckets, need) for slot_buckets, need in zip(slots, needs, strict=True)) and sum(
        map(moves.held_bytes, slots)
    ) <= most:
        return None, None
    wide = [moves.with_slack(need) for need in needs]
    return wide if sum(moves.held_bytes(slot_buckets, room) for slot_buckets, room in zip(slots, wide, strict=True)) <= most else needs


def _write(plane: torch.Tensor, rows_BT: torch.Tensor) -> None:
    """Write rows [B, T] to the first T positions of a plane [N, B, 1, page, 1]."""
    full, rest = divmod(rows_BT.shape[1], PAGE)
    of_pages = plane[:, :, 0, :, 0]
    of_pages[:full] = rows_BT[:, : full * PAGE].unflatten(1, (full, PAGE)).transpose(0, 1)
    if rest:
        of_pages[full, :, :rest] = rows_BT[:, full * PAGE :]


def _decided_from(stored_RT: torch.Tensor) -> Decided:
    """Return the ranks and numbers of checks that rows [B, T] of the plane ``decided`` store; rank NaN where nothing was decided yet."""
    number = stored_RT.to(torch.int32) - 1
    rank = (number % RANKS).to(torch.float32) / (RANKS - 1)
    return Decided(torch.where(stored_RT == 0, float("nan"), rank), torch.where(stored_RT == 0, 0, number // RANKS).to(torch.int8))
