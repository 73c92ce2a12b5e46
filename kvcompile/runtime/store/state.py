"""The state behind one cache tensor: its stores, its length, and which older views of it are still valid.

A dynamic cache is a new tensor every step, so many tensors can stand for one state. Codes are written
once, but a rolled-back cache (speculative decoding, branching) writes over positions: an epoch counts
the writes, and a tensor is valid as long as nothing was written below its length after its epoch.

Two numbers say where a state is. ``length`` is how many tokens can be read. ``behind`` is the position behind the token that was
written last: where a caller that writes in order goes on, and where the exact tokens of a window end. They differ in a buffer without
a window that is written in its middle: what lies behind is still there, as in a dense buffer. With a window it is not, since the window
holds the newest tokens of the last write, so that both step back. Where a call begins is known on the host without a wait from
positions on a CPU, from sizes, and from a cache that grows; on a GPU the next call of a buffer is taken to begin at ``behind`` until the
buffer would be full. A caller that starts again at 0 there is served all the same, as the window's own lengths, on the device, count by
the positions; so a rollback asks those lengths and not ``length`` how far it goes (``exact_window.rewind``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvcompile.errors import CacheStale, TokensOutOfOrder
from kvcompile.passes.match.sites import Axes
from kvcompile.runtime.store.adaptive_store import AdaptiveStore
from kvcompile.runtime.store.codec import decode
from kvcompile.runtime.store.counters import CounterSnapshot
from kvcompile.runtime.store.dense_layout import put_tokens
from kvcompile.runtime.store.exact_window import disorder, rewind
from kvcompile.runtime.store.growth import Growth
from kvcompile.runtime.store.store import Store
from kvcompile.runtime.store.telemetry import TelemetryPlane
from kvcompile.types import PAGE

Part = tuple[tuple[int, int], ...]


@dataclass(eq=False)
class CacheState:
    """The state of one cache: its stores by part of the cache tensor (keys and values of a combined tensor are two parts)."""

    axes: dict[Part, Axes]
    stores: dict[Part, Store]
    length: int = 0
    epoch: int = 0
    slots: int | None = None
    """The number of slots that tokens go around in; None where every token has its own."""
    growth: Growth = field(default_factory=Growth)
    """How much room tokens get that are written outside of compiled code."""
    grown: bool = False
    """Whether every place of its tensors is a token, as where a step returns a longer one: zeros written there count."""
    path: str = ""
    """The module path of an attention that reads it, "" where nothing says."""
    where: str = ""
    """The user's line that a compiled call wrote it at last, "" where none did."""

    def __post_init__(self) -> None:
        self.rollbacks: list[tuple[int, int]] = []
        # The position behind the last token that was ever written: in a sliding window it says which older ones are gone.
        self.top = self.behind = self.length
        self.windowed = any(store.in_order for store in self.stores.values())
        self.adaptive = any(isinstance(store, AdaptiveStore) for store in self.stores.values())
        # Places from the first on that may hold more than the tokens counted: all that were encoded when the cache was adopted, or all
        # where nobody looks at the places that calls write.
        self.held = 0
        # The memory of its handles.
        self.stub: torch.Tensor | None = None
        # The graphs whose checks this state has passed, and as which of their cache tensors; see ``fast_path``.
        self.checked_for: set[object] = set()
        # The position behind the last token that each row ever had, int64 [B], of a state with a window that went back; else None.
        self.tops: torch.Tensor | None = None
        # The counters of the compiled call that wrote it last; None where other code wrote it since.
        self.moment: CounterSnapshot | None = None
        # States of the rows behind those of the stores, in order, which the last call did not bring; see ``parked_rows``.
        self.parked: list[CacheState] = []
        # The telemetry of all its stores, as ``LiveCaches`` finds it when the state is gone.
        self.telemetry_planes: list[TelemetryPlane] = []

    def resume(self, length: int, epoch: int, shown: int = 0) -> None:
        """Continue from a tensor of ``length`` tokens that shows the last ``shown``, seen at ``epoch``; CacheStale if overwritten."""
        if self.slots is not None and length - shown < self.top - self.slots:
            raise CacheStale(length=length)
        if epoch != self.epoch and any(at > epoch and start < length for at, start in self.rollbacks):
            raise CacheStale(length=length)

    def advance(self, start: int, tokens: int) -> None:
        """Count a write of ``tokens`` tokens at ``start``."""
        self.epoch += 1
        if start < self.length:
            while self.rollbacks and self.rollbacks[-1][1] >= start:
                self.rollbacks.pop()
            self.rollbacks.append((self.epoch, start))
        self.length = self.behind = start + tokens
        self.top = max(self.top, self.length)

    def overwrite(self, end: int) -> None:
        """Count a write into a buffer, whose last token stands before ``end``."""
        self.epoch += 1
        self.behind = end
        if self.windowed or end > self.length:
            self.length = end
        self.top = max(self.top, self.length)

    def rewind(self, wanted: int | torch.Tensor) -> None:
        """Bring the stores back to ``wanted`` tokens, of all rows or [B], before others are written behind them; raises WindowPassed."""
        if isinstance(ends := self.row_ends(), torch.Tensor):
            self.tops = ends if self.tops is None else torch.maximum(self.tops, ends)
        for store in self.stores.values():
            if isinstance(wanted, int) and not wanted:
                # What comes next has nothing in common with it.
                store.padding = None
            if isinstance(store, AdaptiveStore):
                store.cut(wanted)
            else:
                rewind(store, wanted)

    def followed_by(self, counters: Sequence[torch.Tensor]) -> bool:
        """Whether a call with these counters goes on where the last one ended: nobody moved them or wrote the cache in between."""
        return self.moment is not None and self.moment.holds(counters)

    def row_ends(self) -> torch.Tensor | int:
        """Return where each row goes on, int64 [B] where a window's own lengths say so, else the position behind the last token."""
        for store in self.stores.values():
            if store.window is not None:
                # A row whose tokens came out of order can only begin again.
                return store.lengths[0, :, 0, 0].sum(-1).clamp(0, self.behind)
        return self.behind

    def disorder(self, where: str = "") -> list[TokensOutOfOrder]:
        """Return an error for each row whose tokens came out of order, parked rows too, of one of its stores each. Waits for the device."""
        found: dict[int, TokensOutOfOrder] = {}
        first = 0
        for group in self.groups:
            for store in group.stores.values():
                for error in disorder(store, where or self.where or self.path or "a cache", first):
                    found.setdefault(int(str(error.facts["row"])), error)
            first += group.rows
        return [found[row] for row in sorted(found)]

    def make_room(self, tokens: int, capacity: int | None = None) -> None:
        """Have pages for ``tokens`` tokens in all stores, at most those of ``capacity``."""
        for store in self.stores.values():
            store.reserve(self.growth.pages(tokens, capacity), tokens)

    def clear(self) -> None:
        """Forget all tokens."""
        self.advance(0, 0)
        self.moment = self.tops = None
        self.top = self.held = 0
        self.parked.clear()
        for store in self.stores.values():
            store.clear()

    def telemetry(self) -> list[TelemetryPlane]:
        """Return the telemetry of its stores, those of parked rows too."""
        return [plane for part in self.groups for store in part.stores.values() if (plane := store.telemetry) is not None]

    @property
    def groups(self) -> list[CacheState]:
        """Return the state and those of its parked rows, in the order of the rows."""
        return [self, *self.parked]

    @property
    def rows(self) -> int:
        """Count the batch rows that the stores hold."""
        return next(iter(self.stores.values())).batch

    @property
    def longest(self) -> int:
        """Count the tokens that can be read of the row that has most, parked rows too."""
        return max([self.length, *[part.length for part in self.parked]]) if self.parked else self.length

    @property
    def device(self) -> torch.device:
        """Return the device of the stores."""
        return next(iter(self.stores.values())).device

    @property
    def pages(self) -> int:
        """Count the pages of each store."""
        return next(iter(self.stores.values())).pages

    @property
    def room(self) -> int:
        """Count the tokens that the stores have pages for."""
        return min(store.room for store in self.stores.values())

    @property
    def nbytes(self) -> int:
        """Count the bytes allocated, all stores."""
        return sum(store.nbytes for part in self.groups for store in part.stores.values())

    @property
    def by_token(self) -> bool:
        """Whether every token's codes stand alone, so that some of them can be taken."""
        return all(store.spec.scheme.position_independent for store in self.stores.values())

    @property
    def in_order(self) -> bool:
        """Whether no token was ever written over an older one: then its slot is its position, in a sliding window too."""
        return self.slots is None or self.top <= self.slots

    def dense(self, shape: tuple[int, ...], length: int) -> torch.Tensor:
        """Decode the cache tensor of ``shape``; what was never written is zero. Raises TokensOutOfOrder."""
        for error in self.disorder() if length and self.windowed else ():
            raise error
        first = next(iter(self.stores.values()))
        shown = min(length, next(iter(self.axes.values())).room(shape))
        if length > shown or not self.in_order:
            return self.moved(length - shown, shown, None).dense(shape, shown)
        result, row = torch.zeros(shape, dtype=first.spec.slot.dtype, device=first.device), 0
        for group in self.groups:
            group._decode_into(result, row, length)
            row += group.rows
        return result

    def _decode_into(self, result: torch.Tensor, row: int, length: int) -> None:
        """Write the decoded rows of its own stores into a dense cache tensor, from row ``row`` on."""
        for part, store in self.stores.items():
            axes = self.axes[part]
            tokens = min(max(min(length, self.length), self.held), axes.room(result.shape), store.pages * PAGE)
            if tokens:
                mine = result if axes.batch_dim is None else result.narrow(axes.batch_dim, row, store.batch)
                put_tokens(decode(store, tokens), mine, axes)

    def mapped(self, change: Callable[[Store], Store]) -> CacheState:
        """Make a new state whose stores are ``change(store)``."""
        stores = {part: change(store) for part, store in self.stores.items()}
        made = self._with(stores, self.length, self.slots)
        made.top, made.behind, made.held, made.moment = self.top, self.behind, self.held, self.moment
        if self.tops is not None:
            # The rows may be others now.
            made.tops = self.tops.max(0, keepdim=True).values
        return made

    def copied(self, length: int) -> CacheState:
        """Make a new state with the same content, for a tensor of ``length`` tokens."""
        made, *parked = [group.mapped(lambda store: store.clone()) for group in self.groups]
        for group in (made, *parked):
            group.length = min(group.length, length)
        made.parked = parked
        return made

    def moved(self, first: int, count: int, slots: int | None) -> CacheState:
        """Make a new state in ``slots`` slots, None for one each, of the ``count`` tokens from position ``first`` on: codes as they are."""
        stores = {part: store.gathered(first, count, self.slots) for part, store in self.stores.items()}
        return self._with(stores, count, slots)

    def _with(self, stores: dict[Part, Store], length: int, slots: int | None) -> CacheState:
        """Make a state of other stores for the same cache."""
        return CacheState(
            self.axes, stores, length, slots=slots, growth=self.growth, grown=self.grown, path=self.path, where=self.where,
        )
