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

from kvcompile.errors import AnglesUnknown, WindowPassed
from kvcompile.lowering.ops import append_body, append_window_body, as_tokens, decodable, write_rows
from kvcompile.lowering.rings import taken
from kvcompile.runtime.pinned import host_plane
from kvcompile.runtime.rotary import Rotary
from kvcompile.schemes import Scheme
from kvcompile.schemes.certified import ORIGINALS, PLACES, SCRATCH
from kvcompile.types import PAGE, Extent, Layout, PlaneSpec, SlotSpec, pages_for

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

    __slots__ = ("batch", "device", "pages", "planes", "rotary", "spec")

    def __init__(self, spec: StoreSpec, batch: int, device: torch.device, pages: int, rotary: Rotary | None = None) -> None:
        self.spec, self.batch, self.device, self.rotary = spec, batch, device, rotary
        self.pages = 0
        self.planes: list[torch.Tensor] = [self._zeros(plane, 0) for plane in spec.layout.planes]
        self.reserve(pages)

    def _zeros(self, plane: PlaneSpec, pages: int) -> torch.Tensor:
        """An empty plane where it belongs."""
        shape = plane.shape(pages, self.batch, self.spec.slot.heads)
        with _ordinary():
            if plane.host and self.device.type == "cuda":
                return host_plane(shape, plane.dtype, self.device)
            return torch.zeros(shape, dtype=plane.dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, all planes."""
        return sum(plane.untyped_storage().nbytes() for plane in self.planes)

    @property
    def host_nbytes(self) -> int:
        """Of these, bytes in pinned host memory."""
        return sum(plane.untyped_storage().nbytes() for plane, spec in self._described() if spec.host and self.device.type == "cuda")

    def reserve(self, pages: int) -> None:
        """Have room for ``pages`` pages; one plane at a time is held twice while it is copied."""
        if pages <= self.pages:
            return
        for index, (plane, spec) in enumerate(zip(self.planes, self.spec.layout.planes, strict=True)):
            if spec.extent is not Extent.TOKENS:
                continue
            grown = self._zeros(spec, pages)
            if self.pages:
                grown[: self.pages].copy_(plane[: self.pages])
            self.planes[index] = grown
            del plane
        self.pages = pages

    def adopt(self, x_BKTD: torch.Tensor, origin: torch.Tensor | None = None, first: int = 0) -> None:
        """Encode a filled dense slot, from token ``first`` on, in bounded steps; ``origin`` [B]: first tokens that are no padding."""
        tokens = x_BKTD.shape[2]
        spelled, planes = self.spec.scheme.spell(), self.planes[: self.spec.layout.written]
        for start in range(0, tokens, ADOPT_TOKENS):
            part = x_BKTD[:, :, start : start + ADOPT_TOKENS]
            pos = torch.arange(first + start, first + start + part.shape[2], device=self.device).unsqueeze(0)
            if self.rotary is not None:
                part = self.rotary.turned_back(part, pos if origin is None else pos - origin[:, None])
            if self.window is None:
                append_body(part, planes, pos, spelled)
            else:
                append_window_body(part, planes, pos, origin, spelled)

    @property
    def window(self) -> torch.Tensor | None:
        """The newest tokens in full precision, [B, K, W, D], token t in slot t % W; None where the scheme keeps none."""
        found = [plane for plane, spec in self._described() if spec.name == "window"]
        return found[0][0] if found else None

    @property
    def untaught(self) -> bool:
        """Whether its scheme learns from queries and these planes never saw any. Waits for the device."""
        learned = [plane for plane, spec in self._described() if spec.name in self.spec.scheme.learned]
        return bool(learned) and not any(bool(plane.any()) for plane in learned)

    def decode(self, tokens: int, length: int) -> torch.Tensor:
        """The first ``tokens`` of the ``length`` tokens written, as dense [B, K, T, D] in the model's dtype."""
        pages = min(pages_for(tokens), self.pages)
        values = self._values(0, pages)[:, :, :tokens].to(self.spec.slot.dtype)
        values = values if self.window is None else self._in_place(values, length)
        return self._turned(values) if self.spec.scheme.pre_rope else values

    def _values(self, first: int, last: int) -> torch.Tensor:
        """Tokens of pages [first, last) as [B, K, T, D], from the originals where the store has them."""
        originals = [plane[first:last] for plane, spec in self._described() if spec.name == ORIGINALS]
        if originals:
            return as_tokens(originals[0])
        grown = [plane[first:last] if spec.extent is Extent.TOKENS else plane for plane, spec in self._described()]
        return self.spec.scheme.decode(decodable(self.spec.scheme, grown, self.spec.slot, slice(None)), self.spec.slot)

    def _turned(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys that are stored before RoPE as the model's."""
        if self.rotary is None:
            raise AnglesUnknown(length=keys.shape[2])
        place = torch.arange(keys.shape[2], device=self.device).unsqueeze(0)
        return self.rotary.turned(keys, place if self.origin is None else place - self.origin[:, None])

    def _in_place(self, values: torch.Tensor, length: int) -> torch.Tensor:
        """Decoded tokens with the window's laid over them, each at its position of the caller's numbering; padding is zero."""
        window, origin = self.window, self.origin
        assert window is not None
        assert origin is not None
        t = torch.arange(values.shape[2], device=self.device) - origin[:, None]
        rows = (-1, values.shape[1], -1, values.shape[3])
        behind = values.gather(2, t.clamp(min=0)[:, None, :, None].expand(rows))
        newest = window.gather(2, (t % window.shape[2])[:, None, :, None].expand(rows))
        exact = (t >= (length - origin)[:, None] - window.shape[2])[:, None, :, None]
        return torch.where((t >= 0)[:, None, :, None], torch.where(exact, newest, behind), 0)

    def rewind(self, length: int, wanted: int) -> None:
        """Go on from ``wanted`` of the ``length`` tokens: the window is refilled with what came before, from the codes.

        Raises WindowPassed where that ends inside a block whose originals have left the window. Waits for the device.
        """
        window, origin = self.window, self.origin
        if window is None or origin is None or wanted >= length:
            return
        size, block = window.shape[2], self.spec.scheme.block
        now, before = (wanted - origin).clamp(min=0), length - origin
        if ((now % block != 0) & (before - now > size - now % block)).any():
            raise WindowPassed(
                scheme=self.spec.scheme.spell(), window=size, length=length, wanted=wanted, block=block, most=size - block + 1
            )
        slot = torch.arange(size, device=self.device)
        newest = (before[:, None] - 1) - (before[:, None] - 1 - slot) % size
        older = (now[:, None] - 1) - (now[:, None] - 1 - slot) % size
        first, pages = max(0, int(older.min())) // PAGE, pages_for(int(now.max()))
        if pages > first:
            values = self._values(first, pages)
            at = (older - first * PAGE).clamp(0, values.shape[2] - 1)[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3])
            refill = ((newest >= now[:, None]) & (older >= 0))[:, None, :, None]
            window.copy_(torch.where(refill, values.gather(2, at).to(window.dtype), window))
        clock = next(plane for plane, spec in self._described() if spec.name == "clock")
        clock[0, :, :, 0, 0] = (wanted - origin)[:, None]

    @property
    def origin(self) -> torch.Tensor | None:
        """The first position of each row that is no padding, int64 [B]; None without a window."""
        found = [plane for plane, spec in self._described() if spec.name == "clock"]
        return found[0][0, :, 0, 0, 1] if found else None

    def _described(self) -> Iterator[tuple[torch.Tensor, PlaneSpec]]:
        return zip(self.planes, self.spec.layout.planes, strict=True)

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self.pages = 0
        with _ordinary():
            for index, spec in enumerate(self.spec.layout.planes):
                self.planes[index] = torch.zeros(spec.shape(0, self.batch, self.spec.slot.heads), dtype=spec.dtype, device=self.device)

    @staticmethod
    def holding(spec: StoreSpec, planes: list[torch.Tensor], rotary: Rotary | None = None) -> Store:
        """A store around planes that exist, [N, B, K, rows, width] each."""
        store = Store.__new__(Store)
        store.spec, store.planes, store.rotary = spec, planes, rotary
        store.pages, store.batch = planes[0].shape[:2]
        store.device = planes[0].device
        return store

    def select_rows(self, rows: torch.Tensor) -> Store:
        """A new store with the given batch rows: codes are copied, never re-encoded."""
        with _ordinary():
            return Store.holding(self.spec, [
                plane.clone() if spec.extent is Extent.BATCH else plane.index_select(1, rows.to(plane.device))
                for plane, spec in self._described()
            ], self.rotary)

    def gathered(self, first: int, count: int, slots: int | None) -> Store:
        """A new store whose first ``count`` tokens are those from position ``first`` on, in this one's ring of ``slots`` or none."""
        made = Store(self.spec, self.batch, self.device, pages_for(count), self.rotary)
        if not count:
            return made
        self.reserve(pages_for(first + count if slots is None else min(first + count, slots)))
        at, place = torch.arange(first, first + count, device=self.device), torch.arange(count, device=self.device).unsqueeze(0)
        with _ordinary():
            for (plane, spec), target in zip(self._described(), made.planes, strict=True):
                if spec.name in {PLACES, SCRATCH}:
                    # Blocks are elsewhere now, and copies of them nowhere.
                    continue
                if spec.extent is not Extent.TOKENS:
                    target.copy_(plane)
                    continue
                write_rows(target, taken(plane, at if slots is None else at % slots), place)
        return made

    def clone(self) -> Store:
        """A new store with the same content."""
        with _ordinary():
            return Store.holding(self.spec, [plane.clone() for plane in self.planes], self.rotary)
