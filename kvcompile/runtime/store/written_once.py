"""Written once: a cache that was turned dense for a while gets its old codes back for all tokens that did not change.

A scale is rounded up when it is stored, and the largest decoded value follows that scale: encoding it again raises the scale by one unit
in its last place (1/8 of a step at the largest 8-bit code), and again each time. So a tensor that is turned back into a dense one
(``handle.tensor.to_dense``) remembers its state as long as it lives. When it is encoded again, each block of unchanged tokens gets its old
codes. Values are compared, never assumed unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kvcompile.runtime.store.codec import decode, encode, keep_padding
from kvcompile.runtime.store.parked_rows import rows_of
from kvcompile.runtime.store.store import Store
from kvcompile.types import PAGE, Extent

if TYPE_CHECKING:
    from kvcompile.runtime.store.state import CacheState, Part

_EARLIER: Any = WeakIdKeyDictionary()
"""By dense tensor: the state and length that it was compressed to, and the state's row that is its first one."""


def remember(tensor: torch.Tensor, state: CacheState, length: int) -> None:
    """Remember ``state`` as the codes of a tensor that became dense; they use memory until it is encoded again, forgotten or freed.

    Does nothing for a state without tokens.
    """
    if length:
        _EARLIER[tensor] = state, length, 0


def remember_rows(tensor: torch.Tensor, rows: torch.Tensor, first: int) -> None:
    """Let ``rows``, a view of a dense tensor's rows from row ``first`` on, be encoded with the tensor's remembered codes too."""
    if (earlier := _EARLIER.get(tensor)) is not None:
        _EARLIER[rows] = *earlier[:2], first


def forget(tensor: torch.Tensor) -> None:
    """Forget a tensor's earlier state: it stays dense, or was encoded again."""
    _EARLIER.pop(tensor, None)


class Earlier:
    """The codes and scales that one part of a cache tensor had before it became dense, for reuse in that part's new store ``store``.

    There are none, so that ``encode`` encodes all tokens anew, unless the earlier store is remembered, has the spec and RoPE of ``store``,
    is neither adaptive nor of a sliding window, and ``store`` keeps no full-precision copies. If there are codes, making an Earlier copies
    the earlier store's calibrated planes into ``store``.
    """

    def __init__(self, tensor: torch.Tensor, part: Part, store: Store) -> None:
        state, self.length, first = _EARLIER.get(tensor, (None, 0, 0))
        known = state is not None and state.slots is None and part in state.stores
        held = rows_of(state, part, first, store.batch) if known else None
        # Adaptive stores have no fixed slot for each position.
        alike = type(held) is Store and held.spec == store.spec
        self.before: Any = held if alike and (not store.spec.scheme.pre_rope or held.rope is store.rope) else None  # type: ignore[union-attr]
        # Full-precision copies are exact, so re-encoding them loses nothing.
        self.held: Any = None if store.keeps_originals else self.before
        # Rows of one state may hold different numbers of tokens.
        self.length = min(self.length, self.before.pages * PAGE) if self.before is not None else 0
        for name in store.spec.scheme.calibrated if self.held is not None else frozenset():
            ours, theirs = store.plane(name), self.held.plane(name)  # type: ignore[union-attr]
            if ours is not None and theirs is not None:
                ours.copy_(theirs)

    def encode(self, store: Store, x_BKTD: torch.Tensor, left_padding: torch.Tensor | None = None, first: int = 0) -> None:
        """Encode dense tokens at positions from ``first`` on; unchanged ones get their earlier codes and scales.

        Tokens that ``left_padding`` [B] excludes from a window are kept in ``store.padding``.
        """
        self._encode(store, x_BKTD, left_padding, first)
        if left_padding is not None and not first:
            keep_padding(store, x_BKTD)

    def _encode(self, store: Store, x_BKTD: torch.Tensor, left_padding: torch.Tensor | None, first: int) -> None:
        count = min(self.length - first, x_BKTD.shape[2])
        if self.before is None or count <= 0:
            encode(store, x_BKTD, left_padding, first)
            return
        unchanged = (decode(self.before, first + count)[:, :, first:] == x_BKTD[:, :, :count]).all(-1)
        if left_padding is not None and (before := self.before.left_padding) is not None:
            # A step's mask hides tokens that left a sliding window in the same way as padding.
            goes_on = (unchanged & (x_BKTD[:, :, :count] != 0).any(-1)).any(2).all(1)
            left_padding = torch.where(goes_on, torch.minimum(left_padding, before), left_padding)
        encode(store, x_BKTD, left_padding, first)
        if self.held is None:
            return
        same = torch.zeros(*x_BKTD.shape[:2], store.pages * PAGE, dtype=torch.bool, device=store.device)
        same[:, :, first : first + count] = unchanged
        if (padding := store.left_padding) is not None:
            if not padding.equal(self.held.left_padding):
                return
            # Planes count a row's tokens from the first that is no padding.
            own = torch.arange(same.shape[2], device=store.device) + padding[:, None]
            same = same.gather(2, own.clamp(max=same.shape[2] - 1)[:, None].expand_as(same)) & (own < same.shape[2])[:, None]
        self._take(store, same)

    def _take(self, store: Store, same_BKT: torch.Tensor) -> None:
        """Copy the earlier codes and scales of every block whose tokens are all unchanged into ``store``.

        ``same_BKT``: the unchanged tokens, bool.
        """
        pages = min(store.pages, self.held.pages)
        block = store.spec.scheme.block
        whole = torch.unflatten(same_BKT[:, :, : pages * PAGE], 2, (-1, block)).all(-1)
        for index in range(store.spec.layout.encoded):
            spec, ours, theirs = store.spec.layout.planes[index], store.planes[index], self.held.planes[index]
            if spec.extent is not Extent.TOKENS:
                continue
            rows = whole.repeat_interleave(max(block * spec.rows // PAGE, 1), 2)
            # [B, K, N * rows] -> [N, B, K, rows, 1]
            chosen = torch.unflatten(rows, 2, (pages, spec.rows)).permute(2, 0, 1, 3).unsqueeze(-1)
            ours[:pages] = torch.where(chosen, theirs[:pages], ours[:pages])
