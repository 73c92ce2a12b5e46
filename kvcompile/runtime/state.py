"""The state behind one cache tensor: its stores, its length, and which older views of it are still valid.

A dynamic cache is a new tensor every step, so many tensors can stand for one state. Codes are written
once, but a rolled-back cache (speculative decoding, branching) writes over positions: an epoch counts
the writes, and a tensor is valid as long as nothing was written below its length after its epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcompile.errors import CacheStale
from kvcompile.passes.sites import Axes
from kvcompile.runtime.store import Store
from kvcompile.types import PAGE

Part = tuple[tuple[int, int], ...]


@dataclass(eq=False)
class CacheState:
    """Stores by part of the cache tensor (keys and values of a combined tensor are two parts)."""

    axes: dict[Part, Axes]
    stores: dict[Part, Store]
    length: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        self.rollbacks: list[tuple[int, int]] = []
        # The graphs whose checks this state has passed; see ``steady``.
        self.settled: set[object] = set()

    def resume(self, length: int, epoch: int) -> None:
        """Continue from a tensor of ``length`` tokens seen at ``epoch``; raises CacheStale where it was overwritten."""
        if epoch != self.epoch and any(at > epoch and start < length for at, start in self.rollbacks):
            raise CacheStale(length=length)

    def advance(self, start: int, tokens: int) -> None:
        """Count a write of ``tokens`` tokens at ``start``."""
        self.epoch += 1
        if start < self.length:
            while self.rollbacks and self.rollbacks[-1][1] >= start:
                self.rollbacks.pop()
            self.rollbacks.append((self.epoch, start))
        self.length = start + tokens

    def rewind(self, wanted: int) -> None:
        """Bring the stores back to ``wanted`` tokens before others are written behind them; raises WindowPassed."""
        for store in self.stores.values():
            store.rewind(self.length, wanted)

    def clear(self) -> None:
        """Forget all tokens."""
        self.advance(0, 0)
        for store in self.stores.values():
            store.clear()

    @property
    def room(self) -> int:
        """Tokens that the stores have pages for."""
        return next(iter(self.stores.values())).pages * PAGE

    @property
    def nbytes(self) -> int:
        """Bytes allocated, all stores."""
        return sum(store.nbytes for store in self.stores.values())

    def dense(self, shape: tuple[int, ...], length: int) -> torch.Tensor:
        """The decoded cache tensor of ``shape``; what was never written is zero."""
        first = next(iter(self.stores.values()))
        result = torch.zeros(shape, dtype=first.spec.slot.dtype, device=first.device)
        for part, store in self.stores.items():
            tokens = min(length, shape[self.axes[part].token_dim])
            if tokens:
                place(store.decode(min(tokens, store.pages * PAGE), self.length), result, self.axes[part])
        return result

    def mapped(self, change: object) -> CacheState:
        """A new state whose stores are ``change(store)``."""
        stores = {part: change(store) for part, store in self.stores.items()}  # type: ignore[operator]
        return CacheState(self.axes, stores, self.length)


def bring(dense: torch.Tensor, axes: Axes, heads: int, head_dim: int) -> torch.Tensor:
    """One part of a cache tensor as a [B, K, T, D] view."""
    view, roles = _selected(dense, axes)
    for dim in range(len(roles) - 1, -1, -1):
        if len(roles[dim]) == 2:
            inner = head_dim if roles[dim][1] == "D" else heads
            view = view.unflatten(dim, (-1, inner))
    flat = [role for label in roles for role in label]
    view = view.permute([flat.index(role) for role in ("B", "K", "T", "D") if role in flat])
    for dim, role in enumerate(("B", "K", "T", "D")):
        if role not in flat:
            view = view.unsqueeze(dim)
    return view


def place(x_BKTD: torch.Tensor, dense: torch.Tensor, axes: Axes) -> None:
    """Write [B, K, T, D] into the first T tokens of its part of a dense cache tensor."""
    view, roles = _selected(dense, axes)
    token_dim = roles.index(("T",))
    view = view.narrow(token_dim, 0, x_BKTD.shape[2])
    flat = [role for label in roles for role in label]
    x = x_BKTD
    for dim, role in reversed(list(enumerate(("B", "K", "T", "D")))):
        if role not in flat:
            x = x.squeeze(dim)
    present: list[str] = [role for role in ("B", "K", "T", "D") if role in flat]
    x = x.permute([present.index(role) for role in flat])
    view.copy_(x.reshape(view.shape))


def _selected(dense: torch.Tensor, axes: Axes) -> tuple[torch.Tensor, list[tuple[str, ...]]]:
    fixed = dict(axes.select)
    view = dense
    roles: list[tuple[str, ...]] = []
    for dim in range(len(axes.labels) - 1, -1, -1):
        if axes.labels[dim]:
            roles.insert(0, axes.labels[dim])
        else:
            view = view.select(dim, fixed.get(dim, 0))
    return view, roles
