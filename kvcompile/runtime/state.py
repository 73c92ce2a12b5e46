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

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvcompile.errors import CacheStale
from kvcompile.passes.match.sites import Axes
from kvcompile.runtime.codec import decode
from kvcompile.runtime.exact_window import rewind
from kvcompile.runtime.growth import Growth
from kvcompile.runtime.store import Store
from kvcompile.runtime.telemetry import Telling
from kvcompile.types import PAGE

Part = tuple[tuple[int, int], ...]


@dataclass(eq=False)
class CacheState:
    """Stores by part of the cache tensor (keys and values of a combined tensor are two parts)."""

    axes: dict[Part, Axes]
    stores: dict[Part, Store]
    length: int = 0
    epoch: int = 0
    ring: int | None = None
    """The number of slots that tokens go around in; None where every token has its own."""
    growth: Growth = field(default_factory=Growth)
    """How much room tokens get that are written outside of compiled code."""
    grown: bool = False
    """Whether every place of its tensors is a token, as where a step returns a longer one: zeros written there count."""

    def __post_init__(self) -> None:
        self.rollbacks: list[tuple[int, int]] = []
        # The position behind the last token that was ever written: in a ring it says which older ones are gone.
        self.top = self.behind = self.length
        self.windowed = any(store.window is not None for store in self.stores.values())
        # Places from the first on that were encoded when the cache was adopted, whether a token was written there or not.
        self.held = 0
        # The memory of its handles.
        self.stub: torch.Tensor | None = None
        # The graphs whose checks this state has passed; see ``steady``.
        self.settled: set[object] = set()

    def resume(self, length: int, epoch: int, shown: int = 0) -> None:
        """Continue from a tensor of ``length`` tokens that shows the last ``shown``, seen at ``epoch``; CacheStale if overwritten."""
        if self.ring is not None and length - shown < self.top - self.ring:
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
        for store in self.stores.values():
            rewind(store, wanted)

    def make_room(self, tokens: int, capacity: int | None = None) -> None:
        """Have pages for ``tokens`` tokens in all stores, at most those of ``capacity``."""
        for store in self.stores.values():
            store.reserve(self.growth.pages(tokens, capacity))

    def clear(self) -> None:
        """Forget all tokens."""
        self.advance(0, 0)
        self.top = self.held = 0
        for store in self.stores.values():
            store.clear()

    def told(self) -> list[Telling]:
        """The telemetry of its stores."""
        return [told for store in self.stores.values() if (told := store.told) is not None]

    @property
    def device(self) -> torch.device:
        """Where the stores are."""
        return next(iter(self.stores.values())).device

    @property
    def pages(self) -> int:
        """Pages of each store."""
        return next(iter(self.stores.values())).pages

    @property
    def room(self) -> int:
        """Tokens that the stores have pages for."""
        return self.pages * PAGE

    @property
    def nbytes(self) -> int:
        """Bytes allocated, all stores."""
        return sum(store.nbytes for store in self.stores.values())

    @property
    def by_token(self) -> bool:
        """Whether every token's codes stand alone, so that some of them can be taken."""
        return all(store.spec.scheme.alone for store in self.stores.values())

    @property
    def in_order(self) -> bool:
        """Whether no token was ever written over an older one: then its slot is its position, ring or not."""
        return self.ring is None or self.top <= self.ring

    def dense(self, shape: tuple[int, ...], length: int) -> torch.Tensor:
        """The decoded cache tensor of ``shape``; what was never written is zero."""
        first = next(iter(self.stores.values()))
        shown = min(length, next(iter(self.axes.values())).room(shape))
        if length > shown or not self.in_order:
            return self.moved(length - shown, shown, None).dense(shape, shown)
        result = torch.zeros(shape, dtype=first.spec.slot.dtype, device=first.device)
        for part, store in self.stores.items():
            tokens = min(max(length, self.held), self.axes[part].room(shape))
            if tokens:
                place(decode(store, min(tokens, store.pages * PAGE)), result, self.axes[part])
        return result

    def mapped(self, change: Callable[[Store], Store]) -> CacheState:
        """A new state whose stores are ``change(store)``."""
        stores = {part: change(store) for part, store in self.stores.items()}
        made = CacheState(self.axes, stores, self.length, ring=self.ring, growth=self.growth, grown=self.grown)
        made.top, made.behind, made.held = self.top, self.behind, self.held
        return made

    def moved(self, first: int, count: int, slots: int | None) -> CacheState:
        """A new state, a ring of ``slots`` or none, whose first tokens are the ``count`` from position ``first`` on: codes as they are."""
        stores = {part: store.gathered(first, count, self.ring) for part, store in self.stores.items()}
        return CacheState(self.axes, stores, count, ring=slots, growth=self.growth, grown=self.grown)


def bring(dense: torch.Tensor, axes: Axes, heads: int, head_dim: int) -> torch.Tensor:
    """One part of a cache tensor as [B, K, T, D]; a view, but for a pool whose places do not lie side by side."""
    view, roles = _selected(dense, axes)
    for dim in range(len(roles) - 1, -1, -1):
        if len(roles[dim]) == 2:
            inner = head_dim if roles[dim][1] == "D" else heads
            view = view.unflatten(dim, (-1, inner))
    flat = [role for label in roles for role in label]
    view = view.permute(_order(flat))
    first = sum(role in flat for role in ("B", "K"))
    view = view.flatten(first, first + flat.count("T") - 1)
    for dim, role in enumerate(("B", "K", "T", "D")):
        if role not in flat:
            view = view.unsqueeze(dim)
    return view


def place(x_BKTD: torch.Tensor, dense: torch.Tensor, axes: Axes) -> None:
    """Write [B, K, T, D] into the first T tokens of its part of a dense cache tensor; all of them, where it is a pool."""
    view, roles = _selected(dense, axes)
    token_dims = [dim for dim, label in enumerate(roles) if label == ("T",)]
    x = x_BKTD
    if len(token_dims) == 1:
        view = view.narrow(token_dims[0], 0, x.shape[2])
    else:
        x = x.unflatten(2, [view.shape[dim] for dim in token_dims])
    flat = [role for label in roles for role in label]
    given = ["B", "K", *["T"] * len(token_dims), "D"]
    for dim in range(len(given) - 1, -1, -1):
        if given[dim] not in flat:
            x = x.squeeze(dim)
    # The inverse of the order that ``bring`` gives the dims.
    x = x.permute(sorted(range(len(flat)), key=_order(flat).__getitem__))
    view.copy_(x.reshape(view.shape))


def _order(flat: list[str]) -> list[int]:
    """The dims of a cache tensor in the order B, K, T (all of them), D."""
    return [dim for role in ("B", "K", "T", "D") for dim, found in enumerate(flat) if found == role]


def _selected(dense: torch.Tensor, axes: Axes) -> tuple[torch.Tensor, list[tuple[str, ...]]]:
    fixed, counts = dict(axes.select), dict(axes.counts)
    view = dense
    roles: list[tuple[str, ...]] = []
    for dim in range(len(axes.labels) - 1, -1, -1):
        if axes.labels[dim]:
            roles.insert(0, axes.labels[dim])
            view = view.narrow(dim, fixed[dim], counts[dim]) if dim in counts else view
        else:
            view = view.select(dim, fixed.get(dim, 0))
    return view, roles
