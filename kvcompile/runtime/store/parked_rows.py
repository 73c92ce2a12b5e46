"""Parked rows: rows of a cache that a call does not bring, kept in separate states.

A cache made for a largest batch is a tensor of B rows, of which a call writes and reads the first b. The stores of its state hold these b
rows alone, so compiled code sees planes of b rows, and rows that no request has used cost nothing. A call with fewer rows than the
previous one parks the others: they get their own state and length, which calls ignore. A call with more rows joins them again, followed
by rows that were never written. Only such calls copy codes, without re-encoding.

Joined rows may hold different numbers of tokens. A store without a window allows that: unwritten tokens are zero. A window takes
tokens in order, so its rows are joined only if the call begins in each of them at a token that it holds (``TokenOrder``).
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
    """Numbers of a group of batch rows: how many ``rows``, and the ``CacheState`` fields that hold for each of them.

    ``length``: tokens that count; ``behind``, ``top``: the positions after the last token written and after the last one ever written;
    ``held``: leading slots that may hold more than the counted tokens.
    """

    rows: int
    length: int
    behind: int
    top: int
    held: int


NEVER_WRITTEN = Counts(0, 0, 0, 0, 0)
"""The counts of rows that were never written, except their number."""


def counts_of(state: CacheState) -> Counts:
    """Return the counts of a state's own rows."""
    return Counts(state.rows, state.length, state.behind, state.top, state.held)


def taking_part(state: CacheState, rows: int) -> Iterator[Counts]:
    """Yield the counts of the groups in a call's first ``rows`` rows: the state's own, then parked ones, then never-written ones."""
    left = rows
    for part in (state, *state.parked):
        if left <= 0:
            return
        yield counts_of(part)._replace(rows=min(part.rows, left))
        left -= part.rows
    if left > 0:
        yield NEVER_WRITTEN._replace(rows=left)


def in_all(groups: Sequence[Counts]) -> Counts:
    """Return one ``Counts`` for several groups of rows: the sum of ``rows``, and of each other field the maximum."""
    rows, *numbers = zip(*groups, strict=True)
    return Counts(sum(rows), *[max(each) for each in numbers])


def ends_of(state: CacheState, rows: int) -> torch.Tensor | int:
    """Return the position after the last token of each of the first ``rows`` rows, int64 [rows]: 0 for rows that were never written.

    Without a window it is one int, the end of the state's own rows, whatever parked ones hold (``CacheState.row_ends``).
    """
    if rows == state.rows or not isinstance(state.row_ends(), torch.Tensor):
        return state.row_ends()
    return _of_rows(state, rows, CacheState.row_ends)


def tops_of(state: CacheState, rows: int) -> torch.Tensor:
    """Return ``CacheState.tops`` of the first ``rows`` rows, int64 [rows]; a row that never went back has its end."""
    return _of_rows(state, rows, lambda part: part.row_ends() if part.tops is None else part.tops)


def _of_rows(state: CacheState, rows: int, ask: Callable[[CacheState], torch.Tensor | int]) -> torch.Tensor:
    """Return the numbers that ``ask`` gives for the first ``rows`` rows, int64 [rows], 0 for rows that were never written.

    ``ask`` is called on each state that holds some of the rows, the stored and the parked ones; it returns one number for each or for all.
    """
    found = [torch.as_tensor(ask(part), device=state.device).expand(part.rows) for part in state.groups]
    found.append(torch.zeros(rows, dtype=torch.int64, device=state.device))
    return torch.cat(found)[:rows]


def apart(state: CacheState, rows: int) -> str:
    """Return why a state's rows cannot be joined to ``rows`` rows; "" if they can. May wait for the device."""
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
                return "the rows that a call joins were calibrated by queries of different calls"
    return ""


def take_rows(state: CacheState, rows: int) -> Callable[[], None] | None:
    """Make a state's stores hold its first ``rows`` rows: park the rows behind them, or join parked and never-written rows.

    A parked row keeps its codes in a state of its own (``CacheState.parked``). Returns an action that parks joined rows again if they
    differed in a window; else None.
    """
    if rows < state.rows:
        _park(state, rows)
    elif rows > state.rows:
        joined = _join(state, rows)
        if state.windowed and len({counts.behind for counts in joined}) > 1:
            return lambda: _part(state, joined)
    return None


def in_one(state: CacheState, shape: Sequence[int]) -> bool:
    """Join all rows of a cache tensor of ``shape`` into a state's stores and return True.

    Returns False, and leaves the state unchanged, if they cannot be joined.
    """
    dim = next(iter(state.axes.values())).batch_dim
    if dim is None or state.rows == shape[dim]:
        return True
    uneven = state.windowed and len({counts.behind for counts in taking_part(state, shape[dim])}) > 1
    if uneven or apart(state, shape[dim]):
        return False
    take_rows(state, shape[dim])
    return True


def rows_of(state: CacheState, part: Part, first: int, count: int) -> Store | None:
    """Return a store of ``count`` rows from row ``first`` on, including parked and never-written ones; None if they cannot be joined."""
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
    """Move all rows of a state but the first ``rows`` to a parked state."""
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
    """Join parked rows, then never-written ones, to the stores until the state has ``rows`` rows, in place.

    Returns the token counts that each group of rows (stored, parked, never written) had before it was joined.
    """
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
    """Park rows again that were joined to the state, with their former counts ``counted``, the first of which are the state's own."""
    first, *others = counted
    for counts in reversed(others):
        _park(state, state.rows - counts.rows)
        if state.parked:
            _, *numbers = counts
            state.parked[0].length, state.parked[0].behind, state.parked[0].top, state.parked[0].held = numbers
    _, state.length, state.behind, state.top, state.held = first
    _regrouped(state)


def _some(store: Store, rows: torch.Tensor) -> Store:
    """Return a new store of the batch rows ``rows`` of ``store``; its telemetry counts on from the copied counts."""
    made = store.select_rows(rows)
    made.before = None if store.before is None else store.before.index_select(1, rows)
    return made


def _joined(stores: Sequence[Store], empty: int, written: Store) -> Store:
    """Return one store with the rows of several, then ``empty`` rows; planes shared by all rows come from ``written``."""
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
    """Copy the rows of ``planes`` one after another into the first pages of ``target``."""
    at = 0
    for plane in planes:
        target[: plane.shape[0], at : at + plane.shape[1]].copy_(plane)
        at += plane.shape[1]


def _regrouped(state: CacheState) -> None:
    """Reset the facts that a state recorded about its former stores: passed checks, counters, telemetry planes."""
    state.checked_for.clear()
    state.moment = None
    state.telemetry_planes[:] = state.telemetry()
