"""Adaptive store: the store of an adaptive scheme, whose planes are replaced as tokens change their widths.

The scheme alone knows where tokens are in the planes, so it computes sizes, decoded values, rollbacks and row selections. The host keeps
the position of the first token in the growing planes, so that no decode step reads it from the device, and counts of re-encoded tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.errors import NotServed
from kvcompile.runtime.store.pinned import host_plane
from kvcompile.runtime.store.rope import Rope
from kvcompile.runtime.store.store import Store, StoreSpec, ordinary
from kvcompile.schemes import Adaptive, Churn, Due, StoredTokens
from kvcompile.schemes.adaptive import EARLY
from kvcompile.types import PAGE, Extent, PlaneSpec, pages_for

PAGES_BEHIND = 16
"""Planes with full-precision tokens get 1/16 more pages than needed when they are allocated."""


@dataclass(frozen=True)
class Pending:
    """One layer's share of a drift check or decision that was started for several layers: the result, and the layer's index in it."""

    asked: Any
    number: int


class AdaptiveStore(Store):
    """The planes of one slot of a cache, for an adaptive scheme."""

    __slots__ = ("_first", "churn", "decision", "look")

    def __init__(self, spec: StoreSpec, batch: int, device: torch.device, pages: int, rope: Rope | None = None) -> None:
        self._first, self.churn = 0, Churn()
        self.decision: Pending | None = None
        self.look: Pending | None = None
        super().__init__(spec, batch, device, pages, rope)

    @staticmethod
    def holding(spec: StoreSpec, planes: list[torch.Tensor], rope: Rope | None = None) -> AdaptiveStore:
        """Return a store around existing planes. Waits for the device."""
        store = AdaptiveStore.__new__(AdaptiveStore)
        store.spec, store.rope, store.churn, store.before, store.padding, store.family = spec, rope, Churn(), None, None, None
        store.batch = planes[0].shape[1]
        store.device = planes[0].device
        store._take(planes)
        return store

    @property
    def scheme(self) -> Adaptive:
        """The adaptive scheme of the store, which decides the widths of its tokens."""
        scheme = self.spec.scheme
        assert isinstance(scheme, Adaptive)
        return scheme

    @property
    def first(self) -> int:
        return self._first

    @property
    def room(self) -> int:
        return self.scheme.room(tuple(self.planes), self._first)

    def announced(self, tokens: int) -> int:
        """Return the bytes of the scheme's budget for ``tokens`` tokens, and of their full-precision copies."""
        slot = self.spec.slot
        of_budget = int(self.scheme.share(tokens) * tokens * self.batch * slot.heads * slot.head_dim * 2)
        return of_budget + tokens * self.batch * slot.heads * self.scheme.original_bytes(slot)

    @property
    def original_nbytes(self) -> int:
        """Bytes of full-precision tokens, which do not count towards the scheme's budget."""
        return sum(plane.untyped_storage().nbytes() for plane, spec in self.described() if spec.originals)

    def keep(self, tokens: int) -> None:
        """Grow the planes that hold full-precision copies to at least ``tokens`` encoded tokens, if the scheme keeps such copies."""
        for index, (plane, spec) in enumerate(self.described()):
            pages, held = pages_for(tokens), plane.shape[0]
            if not spec.originals or spec.extent is not Extent.STORE or pages <= held:
                continue
            grown = self._made(spec, pages + pages // PAGES_BEHIND)
            grown[:held].copy_(plane)
            self.planes[index] = grown

    def _made(self, spec: PlaneSpec, pages: int) -> torch.Tensor:
        """Return a new plane of zeros with ``pages`` pages, in pinned host memory if its spec says so; raises HostMemoryFull."""
        shape = spec.shape_of(pages, self.batch, self.spec.slot.heads)
        with ordinary():
            if spec.host and self.device.type == "cuda":
                return host_plane(shape, spec.dtype, self.device)
            return torch.zeros(shape, dtype=spec.dtype, device=self.device)

    def histogram(self, tokens: int) -> dict[int, int]:
        """Return the number of tokens by width in bits, over ``tokens`` tokens of each row. Waits for the device."""
        return self.scheme.histogram(tuple(self.planes), self.spec.slot, self._first, tokens)

    def tokens(self, count: int, path: str) -> StoredTokens:
        """Return a view of the first ``count`` tokens of each row, valid until the next step; ``path``: a module path that reads them."""
        return StoredTokens(self.scheme, tuple(self.planes), self.spec.slot, self._first, count, path, self.churn)

    def reserve(self, pages: int, tokens: int | None = None) -> None:
        with ordinary():
            self.planes = list(self.scheme.with_room(tuple(self.planes), self._first, pages * PAGE if tokens is None else tokens))
        self.pages = pages_for(self.room)

    def clear(self) -> None:
        with ordinary():
            self.planes = [self._zeros(spec, 0) for spec in self.spec.layout.planes]
        self._first, self.decision, self.look = 0, None, None
        self.pages = 0

    def values(self, first: int, last: int) -> torch.Tensor:
        return self.scheme.tokens(tuple(self.planes), self.spec.slot, last * PAGE)[:, :, first * PAGE :]

    def due(self, tokens: int, layer: int, early: int = EARLY) -> Due:
        """Return when widths must be decided again with ``tokens`` tokens. Called once a step, unless the step is ``quiet``."""
        return self.scheme.due(tuple(self.planes), self.spec.slot, self._first, tokens, layer, early)

    def looks(self, tokens: int, layer: int) -> bool:
        """Return whether drift is checked after this step."""
        return self.scheme.looks(tuple(self.planes), self.spec.slot, self._first, tokens, layer)

    def quiet(self, tokens: int) -> bool:
        """Return whether neither a decision nor a drift check is due."""
        return self.scheme.quiet(self._first, tokens)

    def exchange(self, planes: tuple[torch.Tensor, ...], tokens: int, churn: Churn | None = None) -> None:
        """Replace the planes by ``planes``, the result of a reallocation of ``tokens`` tokens.

        ``churn`` is added to the store's counts of re-encoded tokens.
        """
        self._take(list(planes), tokens)
        self.churn = self.churn + (churn or Churn())

    def cut(self, wanted: int | torch.Tensor) -> None:
        """Forget all tokens from position ``wanted`` on. Waits for the device. Raises NotServed for one length per row."""
        if isinstance(wanted, torch.Tensor):
            raise NotServed(
                expected="one length for all rows", found="one for each", where="a cache that goes back", todo="use another scheme for it",
            )
        with ordinary():
            self._take(list(self.scheme.cut(tuple(self.planes), self.spec.slot, wanted)))

    def restore(self, planes: list[torch.Tensor]) -> None:
        self._take(planes)

    def select_rows(self, rows: torch.Tensor) -> AdaptiveStore:
        with ordinary():
            planes = self.scheme.of_rows(tuple(self.planes), self.spec.slot, rows.to(self.device))
            fixed = {index for index, spec in enumerate(self.spec.layout.planes) if spec.first}
            return self._copied(self._where_they_belong([plane.clone() if index in fixed else plane for index, plane in enumerate(planes)]))

    def gathered(self, first: int, count: int, slots: int | None) -> Store:
        raise NotServed(
            expected="a cache that is read from its first token on", found=f"one that begins at token {first}", where="a cache operation",
            todo="use another scheme for caches that are cut at their beginning",
        )

    def alike(self, planes: list[torch.Tensor]) -> AdaptiveStore:
        made = self._copied(planes)
        # A pending decision is valid for both.
        made.decision, made.look = self.decision, self.look
        return made

    def _copied(self, planes: list[torch.Tensor]) -> AdaptiveStore:
        made = AdaptiveStore.holding(self.spec, planes, self.rope)
        made.churn = self.churn
        return made

    def _take(self, planes: list[torch.Tensor], first: int | None = None) -> None:
        """Use ``planes``; ``first``: the first position of the growing planes, None to read it from the device (waits)."""
        self.planes, self.decision, self.look = planes, None, None
        place = self.spec.layout.first
        assert place is not None
        self._first = int(planes[place]) if first is None else first
        self.pages = pages_for(self.room)


def store_class(spec: StoreSpec) -> type[Store]:
    """Return the class of store that a scheme needs."""
    return AdaptiveStore if isinstance(spec.scheme, Adaptive) else Store
