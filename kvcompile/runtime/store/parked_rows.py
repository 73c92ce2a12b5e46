"""Parked rows: the rows of a cache that a call does not bring, kept beside those that it does.

A cache made for a largest batch is a tensor of B rows, of which a call writes and reads the first b. The stores of its state hold these b
rows alone, so compiled code sees planes of b rows, and rows that no request has used cost nothing. A call that brings fewer rows than the
one before parks the others: a state of their own, with a length of its own, that no call looks at. One that brings more joins them again,
behind them rows that nobody has written yet. Codes are copied as they are, by such a call only.

Rows that are joined may hold different numbers of tokens. A store without a window does not mind: what was never written is zero. A window
takes tokens in their order, so its rows are joined only where the call begins in all of them at a token that they hold (``TokenOrder``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from kvcompile.runtime.store.adaptive_store import AdaptiveStore, store_class
from kvcompile.runtime.store.state import CacheState, Part
from kvcompile.runtime.store.store import Store, ordinary
from kvcompile.types import Extent


class Counts(NamedTuple):
    """Numbers that a state counts of some rows: how many rows, and its ``length``, ``behind``, ``top`` and ``held``."""

    rows: int
    length: int
    behind: int
    top: int
    held: int


NEVER_WRITTEN = Counts(0, 0, 0, 0, 0)
"""The counts of rows that no call has brought yet, but for their number."""


def counts_of(state: CacheState) -> Counts:
    """Return what a state counts of its own rows."""
    return Counts(state.rows, state.length, state.behind, state.top, state.held)


def taking_part(state: CacheState, rows: int) -> Iterator[Counts]:
    """Give the counts of the groups of rows that a call with ``rows`` rows takes: the state's own first, those never written last."""
    left = rows
    for part in (state, *state.parked):
        if left <= 0:
            return
        yield counts_of(part)._replace(rows=min(part.rows, left))
        left -= part.rows
    if left > 0:
        yield NEVER_WRITTEN._replace(rows=left)


def in_all(groups: Sequence[Counts]) -> Counts:
    """Return the counts of several groups of rows as those of one: the most that any of them holds."""
    rows, *numbers = zip(*groups, strict=True)
    return Counts(sum(rows), *[max(each) for each in numbers])


def ends_of(state: CacheState, rows: int) -> torch.Tensor | int:
    """Return ``CacheState.row_ends`` of the first ``rows`` rows, parked ones and those never written among them."""
    if rows == state.rows or not isinstance(state.row_ends(), torch.Tensor):
        return state.row_ends()
    return _of_rows(state, rows, CacheState.row_ends)


def tops_of(state: CacheState, rows: int) -> torch.Tensor:
    """Return ``CacheState.tops`` of the first ``rows`` rows, int64 [rows]; where a row never went back it is the row's end."""
    return _of_rows(state, rows, lambda part: part.row_ends() if part.tops is None else part.tops)


def _of_rows(state: CacheState, rows: int, ask: Callable[[CacheState], torch.Tensor | int]) -> torch.Tensor:
    """Return a number of each of the first ``rows`` rows, int64 [rows], from what each group of them is asked; 0 where never written."""
    found = [torch.as_tensor(ask(part), device=state.device).expand(part.rows) for part in state.groups]
    found.append(torch.zeros(rows, dtype=torch.int64, device=state.device))
    return torch.cat(found)[:rows]


def apart(state: CacheState, rows: int) -> str:
    """Say why a state's rows cannot be joined to ``rows`` rows, "" where they can. May wait for the device."""
    if rows <= state.rows:
        return ""
    if state.adaptive:
        return "a call brings more rows than the one before, and the widths of an adaptive scheme are chosen for all rows together"
    written = [part for part in (state, *state.parked) if part.length or part.held]
    for part, store in state.stores.items():
        shared = [index for index, spec in enumerate(store.spec.layout.planes) if spec.extent is Extent.BATCH and not spec.constant]
        for index in shared:
            one, *others = [item.stores[part].planes[index] for item in written] or [store.planes[index]]
            if not all(torch.equal(one, other) for other in others):
                return "the rows that a call joins were encoded by what queries of different calls gave"
    return ""


def take_rows(state: CacheState, rows: int) -> Callable[[], None] | None:
    """Let a state's stores hold its first ``rows`` rows; return what parts rows again that were joined, where they differed in a window."""
    if rows < state.rows:
        _park(state, rows)
    elif rows > state.rows:
        joined = _join(state, rows)
        if state.windowed and len({counts.behind for counts in joined}) > 1:
            return lambda: _part(state, joined)
    return None


def in_one(state: CacheState, shape: Sequence[int]) -> bool:
    """Let a state's stores hold all rows of its cache tensor, of ``shape``; return False where they differ too much to be joined."""
    dim = next(iter(state.axes.values())).batch_dim
    if dim is None or state.rows == shape[dim]:
        return True
    uneven = state.windowed and len({counts.behind for counts in taking_part(state, shape[dim])}) > 1
    if uneven or apart(state, shape[dim]):
        return False
    take_rows(state, shape[dim])
    return True


def rows_of(state: CacheState, part: Part, first: int, count: int) -> Store | None:
    """Return a store of ``count`` rows from row ``first`` on, parked ones and those never written among them; None where they are apart."""
    if not first and count == state.rows:
        return state.stores[part]
    if apart(state, first + count):
        return None
    stores, at = [], 0
    for group in state.groups:
        low, high = max(first - at, 0), min(first + count - at, group.rows)
        if low < high:
            stores.append(_some(group.stores[part], torch.arange(low, high, device=state.device)))
        at += group.rows
    empty = count - sum(store.batch for store in stores)
    if not stores or (len(stores) == 1 and not empty):
        return stores[0] if stores else None
    return _joined(stores, empty, next((group.stores[part] for group in state.groups if group.length), stores[0]))


def _park(state: CacheState, rows: int) -> None:
    """Keep the rows behind the first ``rows`` apart."""
    others, device = range(rows, state.rows), state.device
    rest = state.mapped(lambda store: _some(store, torch.arange(others.start, others.stop, device=device)))
    if state.tops is not None and len(state.tops) > 1:
        state.tops, rest.tops = state.tops[:rows], state.tops[rows:]
    written = rest.length or rest.held or rest.top
    state.stores = {part: _some(store, torch.arange(rows, device=device)) for part, store in state.stores.items()}
    if written or state.parked:
        state.parked.insert(0, rest)
    _regrouped(state)


def _join(state: CacheState, rows: int) -> list[Counts]:
    """Let the stores hold parked rows too, then rows that nobody has written; return what was counted of each of them before."""
    if any(part.tops is not None for part in state.groups):
        state.tops = tops_of(state, rows)
    parts, left = [state], rows - state.rows
    while left and state.parked:
        part = state.parked.pop(0)
        if part.rows > left:
            _park(part, left)
            state.parked, part.parked = [*part.parked, *state.parked], []
        parts.append(part)
        left -= part.rows
    counted = [counts_of(part) for part in parts] + ([NEVER_WRITTEN._replace(rows=left)] if left else [])
    state.stores = {
        key: _joined([part.stores[key] for part in parts], left, next((part.stores[key] for part in parts if part.length), store))
        for key, store in state.stores.items()
    }
    state.length, state.behind, state.top, state.held = (max(counts) for counts in list(zip(*counted, strict=True))[1:])
    _regrouped(state)
    return counted


def _part(state: CacheState, counted: Sequence[Counts]) -> None:
    """Park rows again that were joined, each with what was counted of it."""
    first, *others = counted
    for counts in reversed(others):
        _park(state, state.rows - counts.rows)
        if state.parked:
            _, *numbers = counts
            state.parked[0].length, state.parked[0].behind, state.parked[0].top, state.parked[0].held = numbers
    _, state.length, state.behind, state.top, state.held = first
    _regrouped(state)


def _some(store: Store, rows: torch.Tensor) -> Store:
    """Return a store of some rows, whose telemetry goes on where it was."""
    made = store.select_rows(rows)
    made.before = None if store.before is None else store.before.index_select(1, rows)
    return made


def _joined(stores: Sequence[Store], empty: int, written: Store) -> Store:
    """Return a store of all rows of several, then ``empty`` rows; what all rows share is that of a store which holds tokens."""
    first = stores[0]
    batch = sum(store.batch for store in stores) + empty
    made = store_class(first.spec)(first.spec, batch, first.device, max(store.pages for store in stores), first.rope)
    assert not isinstance(made, AdaptiveStore)
    with ordinary():
        for index, (target, spec) in enumerate(made.described()):
            if spec.extent is Extent.BATCH:
                target.copy_(written.planes[index])
                continue
            _put_rows(target, [store.planes[index] for store in stores])
        if (telemetry := made.telemetry) is not None:
            made.before = torch.zeros_like(telemetry.plane)
            telemetry_planes = [each for store in stores if (each := store.telemetry) is not None]
            _put_rows(made.before, [torch.zeros_like(each.plane) if each.before is None else each.before for each in telemetry_planes])
    if padding := [store.padding for store in stores if store.padding is not None]:
        every = [store.padding or Store(store.spec, store.batch, store.device, 0, store.rope) for store in stores]
        made.padding = _joined(every, empty, padding[0])
    return made


def _put_rows(target: torch.Tensor, planes: Sequence[torch.Tensor]) -> None:
    """Write the rows of planes into the first pages of a larger one, one after another."""
    at = 0
    for plane in planes:
        target[: plane.shape[0], at : at + plane.shape[1]].copy_(plane)
        at += plane.shape[1]


def _regrouped(state: CacheState) -> None:
    """Note that a state has other stores: no graph knows them, no call wrote all of them, and its telemetry is in other planes."""
    state.checked_for.clear()
    state.moment = None
    state.telemetry_planes[:] = state.telemetry()
