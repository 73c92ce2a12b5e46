"""Stores of a model under a policy: the matched slots, planned by ``passes.plan``, and their bytes.

A slot is compressed if its scheme can hold it in every graph that attends over it; otherwise its tensor stays dense. Bytes come from
``Layout.nbytes`` with as many pages as the runtime's ``Growth`` reserves, so planned bytes equal allocated bytes; for a scheme with a
budget they are the budget.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import sympy

from kvcompile.passes.graph.shapes import estimate, value_of
from kvcompile.passes.match.sites import Refusal, Site, Stage
from kvcompile.passes.plan.plan import BATCH, TOKENS, SlotPlan, plan, rolls
from kvcompile.passes.plan.policy import Pair, Policy
from kvcompile.runtime.store.growth import Growth
from kvcompile.runtime.store.token_slots import LEAST_PAGES
from kvcompile.schemes import Adaptive, Dense, Scheme
from kvcompile.tools.planner.observer import Observation, SlotKey
from kvcompile.types import Extent, Layout, PlaneSpec, SlotSpec, pages_for

GROWTH = Growth()
DENSE = Policy((("*", Pair(Dense(), Dense())),))


class StoragePurpose(enum.Enum):
    """The purpose of stored bytes."""

    CODES = "codes"
    SCALES = "scales"
    WINDOW = "window"
    TABLES = "tables"
    OWN = "attention's own"
    TIER2 = "tier 2"
    LEFT = "left as it was"


def _share(plane: PlaneSpec, first: bool) -> StoragePurpose:
    """Return the purpose of one plane, from its spec; ``first``: whether it is the first that ``encode`` returns."""
    if plane.originals:
        return StoragePurpose.TIER2
    if plane.tally or plane.placed:
        return StoragePurpose.OWN
    if plane.extent is Extent.ROW:
        return StoragePurpose.WINDOW
    if plane.extent is Extent.BATCH:
        return StoragePurpose.TABLES
    return StoragePurpose.CODES if first else StoragePurpose.SCALES


@dataclass(frozen=True)
class StoredSlot:
    """One slot in numbers: its scheme and layout; ``scheme`` None: it stays dense.

    ``end``: the most tokens that it holds, None for all of the sequence.
    ``exact``: whether a cache without an end is allocated for the sequence's length (a static one), so that no room is reserved after it.
    ``pooled``: a pool of ``end`` slots that is stored whole, whatever the batch.
    ``forgets``: whether it keeps only its newest ``end`` tokens, as a sliding window does.
    ``once``: tokens of a cache that is written once, such as that of cross-attention, as traced; None for other caches.
    ``still``: whether no room is reserved after its tokens.
    """

    path: str
    slot: SlotSpec
    scheme: Scheme | None
    layout: Layout
    end: int | None
    exact: bool = False
    pooled: bool = False
    forgets: bool = False
    once: int | None = None
    still: bool = False

    @staticmethod
    def of(item: SlotPlan, site: Site, kept: bool, capacity: int | None, written: SlotPlan | None) -> StoredSlot:
        """Return the ``StoredSlot`` of a planned slot: its sizes, its scheme and how its store grows.

        ``kept``: whether the slot stays dense. ``capacity``: the traced capacity of caches that are allocated as long as the sequence.
        ``written``: the slot's plan in the graph that writes it, for a cache that is written once; else None.
        """
        scheme = None if kept else item.scheme
        if written is not None:
            count = estimate(written.slot.write.count)
            # The runtime sees that a concatenated cache is written once by its count, which differs from the prompt's (``plan._still``).
            # Equal counts in the traced call are a coincidence, so they are not compared here.
            still = written.slot.kind.facts.grows
            return StoredSlot(site.path, item.spec, scheme, item.layout, written.end, once=count, still=still)
        pooled = item.slot.block_table is not None
        end = int(item.slot.axes.room(value_of(item.slot.root).shape)) if pooled else item.end
        exact = end is not None and end == capacity
        forgets = item.slot.sliding is not None or rolls(site) is not None
        return StoredSlot(site.path, item.spec, scheme, item.layout, None if exact else end, exact, pooled, forgets)

    def tokens(self, tokens: int) -> int:
        """Return how many of a sequence's ``tokens`` tokens are stored."""
        if self.once is not None:
            return self.once
        if self.pooled:
            return self.end or 0
        return tokens if self.end is None else min(tokens, self.end)

    def pages(self, tokens: int) -> int:
        """Return the number of pages that the runtime reserves for a sequence of ``tokens`` tokens."""
        if self.pooled:
            return pages_for(self.end or 0)
        if self.still:
            return max(LEAST_PAGES, pages_for(self.tokens(tokens)))
        return max(LEAST_PAGES, GROWTH.pages(self.tokens(tokens), tokens if self.exact else self.end))

    def bytes_per_token(self, tokens: int) -> float:
        """Return the bytes that one more token of a row takes at ``tokens`` tokens: 0 in a full window or a cache written once."""
        if self.pooled or self.once is not None or (self.end is not None and tokens >= self.end):
            return 0.0
        values = self.slot.heads * self.slot.head_dim
        if self.scheme is None:
            return values * self.slot.dtype.itemsize
        if isinstance(self.scheme, Adaptive):
            return 2 * values * self.scheme.announced + self.slot.heads * self.scheme.original_bytes(self.slot)
        return self.layout.bytes_per_token(self.slot.heads)

    def dense(self, batch: int, tokens: int) -> int:
        """Return the bytes of a dense cache of ``batch`` rows of ``tokens`` tokens."""
        rows = 1 if self.pooled else batch
        return rows * self.tokens(tokens) * self.slot.heads * self.slot.head_dim * self.slot.dtype.itemsize

    def shares(self, batch: int, tokens: int) -> Iterable[tuple[StoragePurpose, bool, int]]:
        """Yield (purpose, whether in pinned host memory on a GPU, bytes)."""
        if self.scheme is None:
            yield StoragePurpose.LEFT, False, self.dense(batch, tokens)
        elif isinstance(self.scheme, Adaptive):
            count = batch * tokens if self.once is None else batch * self.once
            yield StoragePurpose.CODES, False, math.ceil(self.scheme.announced * 2 * count * self.slot.heads * self.slot.head_dim)
            if kept := self.scheme.original_bytes(self.slot):
                yield StoragePurpose.TIER2, any(plane.host for plane in self.layout.planes), count * self.slot.heads * kept
        else:
            rows, pages = 1 if self.pooled else batch, self.pages(tokens)
            for index, plane in enumerate(self.layout.planes):
                yield _share(plane, index == 0), plane.host, Layout((plane,)).nbytes(pages, rows, self.slot.heads)

    def nbytes(self, batch: int, tokens: int) -> int:
        """Return the bytes of all planes for ``batch`` rows of ``tokens`` tokens, on the device and the host."""
        return sum(count for _, _, count in self.shares(batch, tokens))

    def formula(self, pages: sympy.Expr) -> sympy.Expr:
        """Return the bytes as an expression in ``BATCH``, ``pages`` and, for slots without pages, ``TOKENS``."""
        if self.once is not None:
            fixed = self.scheme is None or isinstance(self.scheme, Adaptive)
            return self.nbytes(1, 0) * BATCH if fixed else self.layout.nbytes(sympy.Integer(self.pages(0)), BATCH, self.slot.heads)
        rows = sympy.Integer(1) if self.pooled else BATCH
        values = rows * self.slot.heads * self.slot.head_dim
        if self.scheme is None:
            tokens = TOKENS if self.end is None else sympy.Min(TOKENS, self.end)
            return values * (sympy.Integer(self.end or 0) if self.pooled else tokens) * self.slot.dtype.itemsize
        if isinstance(self.scheme, Adaptive):
            return sympy.ceiling(self.scheme.announced * 2 * values * TOKENS) + rows * self.slot.heads * TOKENS * (
                self.scheme.original_bytes(self.slot)
            )
        return self.layout.nbytes(pages, rows, self.slot.heads)


@dataclass(frozen=True)
class Remainder:
    """The cache tensors that belong to no slot: bytes per row that do not depend on the length, and bytes per token of a row."""

    fixed: int = 0
    per_token: int = 0

    def nbytes(self, batch: int, tokens: int) -> int:
        """Return the bytes of ``batch`` rows of ``tokens`` tokens."""
        return batch * (self.fixed + self.per_token * tokens)


@dataclass(frozen=True)
class Stores:
    """All stores of a model under one policy, the dense remainder, and the refusals."""

    stored: tuple[StoredSlot, ...]
    remainder: Remainder = Remainder()
    refusals: tuple[Refusal, ...] = ()

    def shares(self, batch: int, tokens: int) -> dict[tuple[StoragePurpose, bool], int]:
        """Return bytes by (purpose, whether in pinned host memory)."""
        found: Counter[tuple[StoragePurpose, bool]] = Counter()
        for item in self.stored:
            for share, host, count in item.shares(batch, tokens):
                found[share, host] += count
        found[StoragePurpose.LEFT, False] += self.remainder.nbytes(batch, tokens)
        return dict(found)

    def bytes_per_token(self, tokens: int) -> float:
        """Return the bytes that one more token of a row takes, on the device and the host."""
        return sum(item.bytes_per_token(tokens) for item in self.stored) + self.remainder.per_token

    def device_bytes(self, batch: int, tokens: int) -> int:
        """Return the device bytes of caches of ``batch`` rows of ``tokens`` tokens."""
        return sum(count for (_, host), count in self.shares(batch, tokens).items() if not host)

    def host_bytes(self, batch: int, tokens: int) -> int:
        """Return the bytes in pinned host memory for ``batch`` rows of ``tokens`` tokens."""
        return sum(count for (_, host), count in self.shares(batch, tokens).items() if host)

    def dense_bytes(self, batch: int, tokens: int) -> int:
        """Return the bytes of a dense cache of ``batch`` rows of ``tokens`` tokens."""
        return sum(item.dense(batch, tokens) for item in self.stored) + self.remainder.nbytes(batch, tokens)

    def growing_bytes(self, batch: int, tokens: int) -> int:
        """Return the bytes of the largest plane on the device that grows: while a store grows, one plane exists twice."""
        planes = (
            Layout((plane,)).nbytes(item.pages(tokens), batch, item.slot.heads) for item in self.stored
            if item.scheme is not None and not isinstance(item.scheme, Adaptive) and item.once is None
            for plane in item.layout.planes if plane.extent is Extent.TOKENS and not plane.host
        )
        return max(planes, default=0)

    @property
    def formula(self) -> sympy.Expr:
        """All bytes, device and host, as an expression in ``BATCH``, ``TOKENS`` and the pages of stores by end (``page_symbol``)."""
        total = sum((item.formula(page_symbol(item.end)) for item in self.stored), sympy.Integer(0))
        return sympy.expand(total + BATCH * (self.remainder.fixed + self.remainder.per_token * TOKENS))

    @property
    def ends(self) -> tuple[int | None, ...]:
        """The distinct capacities up to which stores grow, in order; None, for unbounded growth, comes first."""
        return tuple(sorted({item.end for item in self.stored if item.once is None}, key=lambda end: -1 if end is None else end))


def page_symbol(end: int | None) -> sympy.Symbol:
    """Return the symbol for the pages that stores with this end reserve."""
    return sympy.Symbol("N" if end is None else f"N_{end}", integer=True, positive=True)


def planned(observed: Observation, policy: Policy, remainder: Remainder = Remainder(), capacity: int | None = None) -> Stores:
    """Return the stores of a model under a policy, with the refusals; a slot whose scheme is refused stays dense.

    ``remainder``: the bytes of cache tensors that belong to no slot. ``capacity``: the capacity of the traced static cache, None without
    one; a cache tensor of this capacity is counted with the sequence's length instead.
    """
    found: dict[SlotKey, tuple[SlotPlan, Site]] = {}
    known: dict[SlotKey, tuple[SlotPlan, Site]] = {}
    kept: set[SlotKey] = set()
    refusals: dict[tuple[str, str], Refusal] = {}
    # The step's graphs first: a prompt's graph may say less about a slot, such as the size of a window that is not full.
    for seen in reversed(observed.graphs):
        made = plan(seen.matched, policy)
        refusals |= {(item.path, item.reason): item for item in made.refusals if item.stage is Stage.PLAN}
        parts = {seen.place(part.slot): (part, item.site) for item in made.sites for part in item.parts}
        every = {
            seen.place(part.slot): (part, item.site) for item in plan(seen.matched, DENSE).sites for part in item.parts
        }
        kept |= every.keys() - parts.keys()
        found = parts | found
        known = every | known
    once = _written_once(observed)
    stored = tuple(
        StoredSlot.of(*(known[place] if place in kept else found[place]), place in kept, capacity, once.get(place)) for place in known
    )
    return Stores(stored, remainder, tuple(refusals.values()))


def _written_once(observed: Observation) -> dict[SlotKey, SlotPlan]:
    """Return the slots that calls of one length write and calls of another length only read, each with the first plan that writes it.

    Calls are compared, not graphs: after a graph break one graph may write what the next graph of the same call reads.
    """
    found: dict[SlotKey, dict[int, list[SlotPlan]]] = {}
    for seen in observed.graphs:
        for item in plan(seen.matched, DENSE).sites:
            for part in item.parts:
                found.setdefault(seen.place(part.slot), {}).setdefault(estimate(item.site.tokens), []).append(part)
    written = {
        place: [[part for part in parts if part.slot.kind.facts.written] for parts in calls.values()] for place, calls in found.items()
    }
    return {place: next(filter(None, calls))[0] for place, calls in written.items() if any(calls) and not all(calls)}
