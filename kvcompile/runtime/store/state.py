"""State: the stores behind one cache tensor, its length, and the validity of older tensors of the same cache.

A dynamic cache is a new tensor every step, so many tensors can refer to one state. Codes are written once, but a rolled-back cache
(speculative decoding, branching) overwrites positions: an epoch counts writes, and a tensor is valid as long as no later write
started below its length.

A state has two lengths. ``length`` is the number of readable tokens. ``behind`` is the position after the token that was written last:
where a caller that writes in order continues, and where a window's exact tokens end. They differ in a buffer without a window that is
written in its middle: later tokens are still there, as in a dense buffer. With a window they are not, since the window holds the newest
tokens of the last write, so both step back. The host knows a call's first position without waiting from positions on a CPU, from
sizes, and from a cache that grows; on a GPU the next call of a buffer is assumed to begin at ``behind`` until the buffer would be full.
A caller that starts again at 0 there is still served, as the window's own lengths on the device follow the positions; so a rollback
reads those lengths, not ``length`` (``exact_window.rewind``).
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
from kvcompile.runtime.store.shared_planes import forked, own
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
    """Number of slots of a sliding window; None if every position has its own slot."""
    growth: Growth = field(default_factory=Growth)
    """The growth rule for writes outside of compiled code."""
    places: int = 0
    """Token slots of the caller's cache tensor, for the report's bytes of the caller; 0 for a cache that grows with its tokens."""
    grown: bool = False
    """Whether every slot of its tensors is a token, as in caches that each step returns longer: zeros written there count."""
    path: str = ""
    """Module path of an attention that reads it; "" if unknown."""
    where: str = ""
    """The user's source line of the last compiled call that wrote it; "" if there was none."""

    def __post_init__(self) -> None:
        self.rollbacks: list[tuple[int, int]] = []
        # Position after the last token ever written: in a sliding window it tells which older tokens are gone.
        self.top = self.behind = self.length
        self.windowed = any(store.in_order for store in self.stores.values())
        self.adaptive = any(isinstance(store, AdaptiveStore) for store in self.stores.values())
        # Number of leading slots that may hold more than the counted tokens: all that were encoded when the cache was adopted, or all slots
        # if the host does not read write positions.
        self.held = 0
        # The memory of its handles.
        self.stub: torch.Tensor | None = None
        # The graphs whose checks this state has passed, each with the index of its cache tensor there; see ``fast_path``.
        self.checked_for: set[object] = set()
        # Position after the last token that each row ever had, int64 [B], for a windowed state that went back; else None.
        self.tops: torch.Tensor | None = None
        # The counters of the compiled call that last wrote it; None if other code wrote it since.
        self.moment: CounterSnapshot | None = None
        # States of further rows, in order, that the last call did not bring; see ``parked_rows``.
        self.parked: list[CacheState] = []
        # The telemetry of all its stores, which ``LiveCaches`` keeps when the state is collected.
        self.telemetry_planes: list[TelemetryPlane] = []

    def resume(self, length: int, epoch: int, shown: int = 0) -> None:
        """Check that a tensor of ``length`` tokens, last valid at ``epoch``, can be read; raises CacheStale if it was overwritten.

        ``shown``: the number of its newest tokens that it shows.
        """
        if self.slots is not None and length - shown < self.top - self.slots:
            raise CacheStale(length=length)
        if epoch != self.epoch and any(at > epoch and start < length for at, start in self.rollbacks):
            raise CacheStale(length=length)

    def advance(self, start: int, tokens: int) -> None:
        """Record a write of ``tokens`` tokens from position ``start`` on, the last ones of the cache."""
        self.epoch += 1
        if start < self.length:
            while self.rollbacks and self.rollbacks[-1][1] >= start:
                self.rollbacks.pop()
            self.rollbacks.append((self.epoch, start))
        self.length = self.behind = start + tokens
        self.top = max(self.top, self.length)

    def overwrite(self, end: int) -> None:
        """Record a write into a buffer that ends before position ``end``."""
        self.epoch += 1
        self.behind = end
        if self.windowed or end > self.length:
            self.length = end
        self.top = max(self.top, self.length)

    def rewind(self, wanted: int | torch.Tensor) -> None:
        """Roll the stores back to ``wanted`` tokens (an int, or [B]), before other tokens are written after them.

        Its planes must be its own. Raises WindowPassed if a row would end in a block whose full-precision tokens are gone.
        """
        if isinstance(ends := self.row_ends(), torch.Tensor):
            self.tops = ends if self.tops is None else torch.maximum(self.tops, ends)
        for store in self.stores.values():
            if isinstance(wanted, int) and not wanted:
                # The new sequence has no tokens in common with it.
                store.padding = None
            if isinstance(store, AdaptiveStore):
                store.cut(wanted)
            else:
                rewind(store, wanted)

    def followed_by(self, counters: Sequence[torch.Tensor]) -> bool:
        """Return whether a call with these counters continues where the last one ended: counters and cache are unchanged since."""
        return self.moment is not None and self.moment.holds(counters)

    def row_ends(self) -> torch.Tensor | int:
        """Return the position after each row's last token: int64 [B] from a window's clock, else one int for all rows."""
        for store in self.stores.values():
            if store.window is not None:
                # A row with tokens out of order can only start again.
                return store.lengths[0, :, 0, 0].sum(-1).clamp(0, self.behind)
        return self.behind

    def disorder(self, where: str = "") -> list[TokensOutOfOrder]:
        """Return an error for each row with tokens out of order, parked rows included, one for each row. Waits for the device."""
        found: dict[int, TokensOutOfOrder] = {}
        first = 0
        for group in self.groups:
            for store in group.stores.values():
                for error in disorder(store, where or self.where or self.path or "a cache", first):
                    found.setdefault(int(str(error.facts["row"])), error)
            first += group.rows
        return [found[row] for row in sorted(found)]

    def make_room(self, tokens: int, capacity: int | None = None) -> None:
        """Allocate pages for ``tokens`` tokens in all stores, at most for ``capacity`` tokens (None: unbounded)."""
        for store in self.stores.values():
            store.reserve(self.growth.pages(tokens, capacity), tokens)
        self.own()

    def own(self, written: bool = True) -> None:
        """Copy the planes that its stores share with those of other states (``forked``), before a call.

        ``written``: whether the call writes tokens; attention writes its own planes in any case.
        """
        copied = [own(store, written) for store in self.stores.values()]
        if any(copied):
            self.telemetry_planes[:] = self.telemetry()

    def clear(self) -> None:
        """Forget all tokens."""
        self.advance(0, 0)
        self.moment = self.tops = None
        self.top = self.held = 0
        self.parked.clear()
        for store in self.stores.values():
            store.clear()

    def telemetry(self) -> list[TelemetryPlane]:
        """Return the telemetry of its stores, including those of parked rows."""
        return [plane for part in self.groups for store in part.stores.values() if (plane := store.telemetry) is not None]

    @property
    def groups(self) -> list[CacheState]:
        """The state and its parked states, in row order."""
        return [self, *self.parked]

    @property
    def rows(self) -> int:
        """Number of batch rows in each store."""
        return next(iter(self.stores.values())).batch

    @property
    def longest(self) -> int:
        """Number of readable tokens in the longest row, parked rows included."""
        return max([self.length, *[part.length for part in self.parked]]) if self.parked else self.length

    @property
    def device(self) -> torch.device:
        """Device of the stores."""
        return next(iter(self.stores.values())).device

    @property
    def pages(self) -> int:
        """Number of pages of each store."""
        return next(iter(self.stores.values())).pages

    @property
    def room(self) -> int:
        """Number of tokens for which all stores have pages."""
        return min(store.room for store in self.stores.values())

    @property
    def nbytes(self) -> int:
        """Allocated bytes of all stores."""
        return sum(store.nbytes for part in self.groups for store in part.stores.values())

    def dense_nbytes(self, tokens: int) -> int:
        """Return the bytes of dense tensors of ``tokens`` tokens of its own rows, parked rows not included."""
        slots = [(store.batch, store.spec.slot) for store in self.stores.values()]
        return sum(tokens * batch * slot.heads * slot.head_dim * slot.dtype.itemsize for batch, slot in slots)

    @property
    def by_token(self) -> bool:
        """Whether each token's codes are independent, so that a range of tokens can be copied."""
        return all(store.spec.scheme.position_independent for store in self.stores.values())

    @property
    def in_order(self) -> bool:
        """Whether every token is in the slot of its position: no token has overwritten an older one, as a full sliding window does."""
        return self.slots is None or self.top <= self.slots

    def dense(self, shape: tuple[int, ...], length: int) -> torch.Tensor:
        """Return the decoded cache tensor of ``shape``; unwritten tokens are zero. Raises TokensOutOfOrder after an append out of order."""
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
        """Return a new state with the stores ``change(store)``."""
        stores = {part: change(store) for part, store in self.stores.items()}
        made = self._with(stores, self.length, self.slots)
        made.top, made.behind, made.held, made.moment = self.top, self.behind, self.held, self.moment
        if self.tops is not None:
            # The rows may be different ones now.
            made.tops = self.tops.max(0, keepdim=True).values
        return made

    def copied(self, length: int) -> CacheState:
        """Return a copy of the state, for a tensor of ``length`` tokens."""
        return self._again(length, lambda store: store.clone())

    def forked(self, length: int) -> CacheState:
        """Return a state for a tensor of ``length`` tokens that shares planes with this one until one of the two is written."""
        # Steps of the fast path write without a look at who holds the planes.
        for group in self.groups:
            group.checked_for.clear()
        return self._again(length, forked)

    def _again(self, length: int, again: Callable[[Store], Store]) -> CacheState:
        made, *parked = [group.mapped(again) for group in self.groups]
        for group in (made, *parked):
            group.length = min(group.length, length)
        made.parked = parked
        return made

    def moved(self, first: int, count: int, slots: int | None) -> CacheState:
        """Return a new state with only the ``count`` tokens from position ``first`` on, their codes unchanged.

        ``slots``: number of slots of its sliding window; None for one slot per position.
        """
        stores = {part: store.gathered(first, count, self.slots) for part, store in self.stores.items()}
        return self._with(stores, count, slots)

    def _with(self, stores: dict[Part, Store], length: int, slots: int | None) -> CacheState:
        """Return a state with other stores for the same cache."""
        return CacheState(
            self.axes, stores, length, slots=slots, growth=self.growth, places=self.places, grown=self.grown, path=self.path,
            where=self.where,
        )
