"""The store: the mutable planes of one slot plus its length. The only mutable type, and no numerics inside.

Planes are [N, B, K, rows, width]: growing appends pages on the first axis, so no stride ever changes and
what is compiled for one size runs for all. Fresh pages are zero, which every scheme decodes to zero:
what was never written reads as an untouched dense buffer would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvcompile.lowering.ops import append_body, append_window_body, decodable
from kvcompile.schemes import Scheme
from kvcompile.types import Extent, Layout, PlaneSpec, SlotSpec, pages_for

ADOPT_TOKENS = 4096
"""Tokens encoded at a time when a filled cache is adopted; bounds the float32 scratch of ``encode``."""


@dataclass(frozen=True)
class StoreSpec:
    """What a store holds: the slot, its scheme and layout. Two equal specs can share compiled code."""

    slot: SlotSpec
    scheme: Scheme
    layout: Layout


@contextlib.contextmanager
def _ordinary() -> Iterator[None]:
    """Where planes are made: a cache filled in inference mode may be used outside, so no plane is an inference tensor."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Store:
    """The planes of one slot for one cache."""

    __slots__ = ("batch", "device", "pages", "planes", "spec")

    def __init__(self, spec: StoreSpec, batch: int, device: torch.device, pages: int) -> None:
        self.spec, self.batch, self.device = spec, batch, device
        self.pages = 0
        with _ordinary():
            self.planes: list[torch.Tensor] = [
                torch.zeros(plane.shape(0, batch, spec.slot.heads), dtype=plane.dtype, device=device) for plane in spec.layout.planes
            ]
        self.reserve(pages)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, all planes."""
        return sum(plane.untyped_storage().nbytes() for plane in self.planes)

    def reserve(self, pages: int) -> None:
        """Have room for ``pages`` pages; one plane at a time is held twice while it is copied."""
        if pages <= self.pages:
            return
        for index, (plane, spec) in enumerate(zip(self.planes, self.spec.layout.planes, strict=True)):
            if spec.extent is not Extent.TOKENS:
                continue
            with _ordinary():
                grown = torch.zeros(spec.shape(pages, self.batch, self.spec.slot.heads), dtype=spec.dtype, device=self.device)
            if self.pages:
                grown[: self.pages].copy_(plane[: self.pages])
            self.planes[index] = grown
            del plane
        self.pages = pages

    def adopt(self, x_BKTD: torch.Tensor) -> None:
        """Encode a filled dense slot, from its first token, in bounded steps."""
        tokens = x_BKTD.shape[2]
        spelled = self.spec.scheme.spell()
        for start in range(0, tokens, ADOPT_TOKENS):
            part = x_BKTD[:, :, start : start + ADOPT_TOKENS]
            pos = torch.arange(start, start + part.shape[2], device=self.device).unsqueeze(0)
            (append_window_body if self.window is not None else append_body)(part, self.planes, pos, spelled)

    @property
    def window(self) -> torch.Tensor | None:
        """The newest tokens in full precision, [B, K, W, D], token t in slot t % W; None where the scheme keeps none."""
        found = [plane for plane, spec in self._described() if spec.name == "window"]
        return found[0][0] if found else None

    def decode(self, tokens: int, length: int) -> torch.Tensor:
        """The first ``tokens`` of the ``length`` tokens written, as dense [B, K, T, D] in the model's dtype."""
        pages = min(pages_for(tokens), self.pages)
        grown = [plane[:pages] if spec.extent is Extent.TOKENS else plane for plane, spec in self._described()]
        planes = decodable(self.spec.scheme, grown, self.spec.slot, slice(None))
        values = self.spec.scheme.decode(planes, self.spec.slot)[:, :, :tokens]
        values = values.to(self.spec.slot.dtype)
        if (window := self.window) is not None:
            newest = torch.arange(max(0, length - window.shape[2]), min(tokens, length), device=self.device)
            values[:, :, newest] = window[:, :, newest % window.shape[2]]
        return values

    def _described(self) -> Iterator[tuple[torch.Tensor, PlaneSpec]]:
        return zip(self.planes, self.spec.layout.planes, strict=True)

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self.pages = 0
        with _ordinary():
            for index, spec in enumerate(self.spec.layout.planes):
                self.planes[index] = torch.zeros(spec.shape(0, self.batch, self.spec.slot.heads), dtype=spec.dtype, device=self.device)

    @staticmethod
    def holding(spec: StoreSpec, planes: list[torch.Tensor]) -> Store:
        """A store around planes that exist, [N, B, K, rows, width] each."""
        store = Store.__new__(Store)
        store.spec, store.planes = spec, planes
        store.pages, store.batch = planes[0].shape[:2]
        store.device = planes[0].device
        return store

    def select_rows(self, rows: torch.Tensor) -> Store:
        """A new store with the given batch rows: codes are copied, never re-encoded."""
        with _ordinary():
            return Store.holding(self.spec, [
                plane.clone() if spec.extent is Extent.BATCH else plane.index_select(1, rows.to(plane.device))
                for plane, spec in self._described()
            ])

    def clone(self) -> Store:
        """A new store with the same content."""
        with _ordinary():
            return Store.holding(self.spec, [plane.clone() for plane in self.planes])
