"""The store: the mutable planes of one slot plus its length. The only mutable type, and no numerics inside.

Planes are [N, B, K, rows, width]: growing appends pages on the first axis, so no stride ever changes and
what is compiled for one size runs for all. Fresh pages are zero, which every scheme decodes to zero:
what was never written reads as an untouched dense buffer would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvcompile.errors import AnglesUnknown, WindowPassed
from kvcompile.lowering.ops.operations import append_body, append_window_body, as_tokens, decodable, write_rows
from kvcompile.lowering.ops.sliding import taken
from kvcompile.runtime.pinned import host_plane
from kvcompile.runtime.rope import Rope
from kvcompile.schemes import Scheme
from kvcompile.schemes.certificate.telemetry import REFILLED, TELEMETRY_PLANE
from kvcompile.types import PAGE, Extent, Layout, PlaneSpec, SlotSpec, pages_for

ADOPT_TOKENS = 4096
"""Tokens encoded at a time when a filled cache is adopted; bounds the float32 scratch of ``encode``."""


@dataclass(frozen=True)
class StoreSpec:
    """The description of a store: the slot, its scheme and layout. Two equal specs can share compiled code."""

    slot: SlotSpec
    scheme: Scheme
    layout: Layout


@contextlib.contextmanager
def _ordinary() -> Iterator[None]:
    """Where planes are made: a cache filled in inference mode may be used outside, so no plane is an inference tensor."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Telling(NamedTuple):
    """A telemetry plane, and what it held when its store was made from another one, None for nothing."""

    plane: torch.Tensor
    before: torch.Tensor | None


class Store:
    """The planes of one slot for one cache."""

    __slots__ = ("batch", "before", "device", "pages", "planes", "rope", "spec")

    def __init__(self, spec: StoreSpec, batch: int, device: torch.device, pages: int, rope: Rope | None = None) -> None:
        self.spec, self.batch, self.device, self.rope = spec, batch, device, rope
        self.pages = 0
        self.before: torch.Tensor | None = None
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
        """Count the bytes in pinned host memory."""
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
            if self.rope is not None:
                part = self.rope.unrotated(part, pos if origin is None else pos - origin[:, None])
            if self.window is None:
                append_body(part, planes, pos, spelled, origin if self.spec.scheme.keeps_padding_out else None)
            else:
                append_window_body(part, planes, pos, origin, spelled)

    @property
    def window(self) -> torch.Tensor | None:
        """The newest tokens in full precision, [B, K, W, D], token t in slot t % W; None where the scheme keeps none."""
        found = self._plane("window")
        return None if found is None else found[0]

    @property
    def untaught(self) -> bool:
        """Whether its scheme learns from queries and these planes never saw any. Waits for the device."""
        learned = [plane for plane, spec in self._described() if spec.name in self.spec.scheme.learned]
        return bool(learned) and not any(bool(plane.any()) for plane in learned)

    def decode(self, tokens: int) -> torch.Tensor:
        """The first ``tokens`` tokens as dense [B, K, T, D] in the model's dtype; what is behind the newest one of a window is zero."""
        pages = min(pages_for(tokens), self.pages)
        values = self._values(0, pages)[:, :, :tokens].to(self.spec.slot.dtype)
        values = values if self.window is None else self._in_place(values)
        return self._turned(values) if self.spec.scheme.pre_rope else values

    def _values(self, first: int, last: int) -> torch.Tensor:
        """Tokens of pages [first, last) as [B, K, T, D], from the originals where the store has them."""
        originals = [plane[first:last] for plane, spec in self._described() if spec.originals]
        if originals:
            return as_tokens(originals[0])
        grown = [plane[first:last] if spec.extent is Extent.TOKENS else plane for plane, spec in self._described()]
        return self.spec.scheme.decode(decodable(self.spec.scheme, grown, self.spec.slot, slice(None)), self.spec.slot)

    def _turned(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys that are stored before RoPE as the model's."""
        if self.rope is None:
            raise AnglesUnknown(length=keys.shape[2])
        place = torch.arange(keys.shape[2], device=self.device).unsqueeze(0)
        return self.rope.rotated(keys, place if self.origin is None else place - self.origin[:, None])

    def _in_place(self, values: torch.Tensor) -> torch.Tensor:
        """Decoded tokens with the window's laid over them, each at its position of the caller's numbering; padding is zero."""
        window, clock = self.window, self._plane("clock")
        assert window is not None
        assert clock is not None
        held, origin = clock[0, :, 0, 0].unbind(-1)
        t = torch.arange(values.shape[2], device=self.device) - origin[:, None]
        rows = (-1, values.shape[1], -1, values.shape[3])
        behind = values.gather(2, t.clamp(min=0)[:, None, :, None].expand(rows))
        newest = window.gather(2, (t % window.shape[2])[:, None, :, None].expand(rows))
        exact = (t >= held[:, None] - window.shape[2])[:, None, :, None]
        return torch.where(((t >= 0) & (t < held[:, None]))[:, None, :, None], torch.where(exact, newest, behind), 0)

    def unwritable(self, at: torch.Tensor, rows_BKn: torch.Tensor, length: int) -> str:
        """Why ``rows`` of the tokens ``at`` [n], ascending, cannot be encoded into a store of ``length`` tokens; "" where they can.

        Waits for the device.
        """
        if self.spec.scheme.pre_rope and self.rope is None:
            return "no compiled call has said by which angles its keys are turned"
        if not length and (self.window is not None or self.spec.scheme.keeps_padding_out):
            return "its scheme must know the padding of the first tokens"
        if self.window is None or not len(at):
            return ""
        first, last, size = int(at[0]), int(at[-1]), self.window.shape[2]
        if length - first > size or bool(self._lost(first).any()):
            return f"it writes over tokens that are only codes by now: {self.spec.scheme.spell()} keeps {size} of {length} tokens"
        behind = at >= length
        if int(behind.sum()) != max(last + 1 - length, 0) or not rows_BKn[:, :, behind].all():
            return f"{self.spec.scheme.spell()} takes tokens in their order, all heads of all rows"
        return ""

    def write(self, x_BKnD: torch.Tensor, rows_BKn: torch.Tensor, at: torch.Tensor, length: int) -> None:
        """Encode ``rows`` of the tokens ``at`` [n], ascending, of a store of ``length`` tokens with room for them; see ``unwritable``."""
        if not len(at):
            return
        if self.window is None:
            self._write_codes(x_BKnD, rows_BKn, at)
            return
        first, last = int(at[0]), int(at[-1])
        held = x_BKnD.new_zeros(*x_BKnD.shape[:2], max(length, last + 1) - first, x_BKnD.shape[3])
        if first < length:
            # All of these are in the window, so nothing is encoded from what codes decode to.
            held[:, :, : length - first] = self.decode(length)[:, :, first:]
            self.rewind(first)
        held[:, :, at - first] = torch.where(rows_BKn[..., None], x_BKnD, held[:, :, at - first])
        self.adopt(held, self.origin, first)

    def _write_codes(self, x_BKnD: torch.Tensor, rows_BKn: torch.Tensor, at: torch.Tensor) -> None:
        """Write the codes of some rows of tokens of a scheme without a window; those of the others stay as they are."""
        for start in range(0, len(at), ADOPT_TOKENS):
            some, rows = at[start : start + ADOPT_TOKENS], rows_BKn[:, :, start : start + ADOPT_TOKENS, None]
            x = torch.where(rows, x_BKnD[:, :, start : start + ADOPT_TOKENS], 0)
            x = x if self.rope is None else self.rope.unrotated(x, some.unsqueeze(0))
            for plane, codes in zip(self.planes, self.spec.scheme.encode(x), strict=False):
                write_rows(plane, torch.where(rows, codes.to(plane.dtype), taken(plane, some)), some.unsqueeze(0))

    def _lost(self, wanted: int | torch.Tensor) -> torch.Tensor:
        """Which rows would end, at ``wanted`` tokens, inside a block whose originals have left the window; bool [B]."""
        window, clock = self.window, self.clock
        assert window is not None
        size, block = window.shape[2], self.spec.scheme.block
        held, origin = clock[0, :, 0, 0].unbind(-1)
        now = torch.minimum((wanted - origin).clamp(min=0), held)
        return (now % block != 0) & (held - now > size - now % block)

    def rewind(self, wanted: int | torch.Tensor) -> None:
        """Go on from ``wanted`` tokens, of all rows or [B]: the window is refilled with what came before, from the codes.

        A row that holds fewer stays as it is. Raises WindowPassed where a row ends inside a block whose originals have left the
        window. The plane ``refilled``, where there is one, then says up to which token the window holds what codes stand for. Waits for
        the device.
        """
        window, clock = self.window, self._plane("clock")
        if window is None or clock is None:
            return
        size, block = window.shape[2], self.spec.scheme.block
        held, origin = clock[0, :, 0, 0].unbind(-1)
        now = torch.minimum((wanted - origin).clamp(min=0), held)
        if not (now < held).any():
            return
        if (lost := self._lost(wanted)).any():
            raise WindowPassed(
                scheme=self.spec.scheme.spell(), window=size, length=int((held + origin)[lost].max()),
                wanted=int((now + origin)[lost].max()), block=block, most=size - block + 1,
            )
        slot = torch.arange(size, device=self.device)
        newest = (held[:, None] - 1) - (held[:, None] - 1 - slot) % size
        older = (now[:, None] - 1) - (now[:, None] - 1 - slot) % size
        first, pages = max(0, int(older.min())) // PAGE, pages_for(int(now.max()))
        if pages > first:
            values = self._values(first, pages)
            at = (older - first * PAGE).clamp(0, values.shape[2] - 1)[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3])
            refill = ((newest >= now[:, None]) & (older >= 0))[:, None, :, None]
            window.copy_(torch.where(refill, values.gather(2, at).to(window.dtype), window))
        if (refilled := self._plane(REFILLED)) is not None:
            first_exact = torch.minimum(torch.maximum(refilled[0, :, 0, 0, 0], held - size), now)
            refilled.copy_(first_exact[None, :, None, None, None].expand_as(refilled))
        clock[0, :, :, 0, 0] = now[:, None]

    @property
    def clock(self) -> torch.Tensor:
        """The tokens of each row and its first position, int64 [1, B, 1, 1, 2], of a store with a window."""
        found = self._plane("clock")
        assert found is not None
        return found

    @property
    def origin(self) -> torch.Tensor | None:
        """The first position of each row that is no padding, int64 [B]; None without a window."""
        found = self._plane("clock")
        return None if found is None else found[0, :, 0, 0, 1]

    @property
    def grown(self) -> list[torch.Tensor]:
        """The planes that new tokens are encoded into."""
        return self.planes[: self.spec.layout.encoded]

    @property
    def kept(self) -> list[torch.Tensor]:
        """The planes that a rollback changes: the window, its clock, and what it says of itself."""
        return [plane for plane, spec in self._described() if spec.name in {"window", "clock", REFILLED}]

    def _plane(self, name: str) -> torch.Tensor | None:
        """The plane of this name, None where the layout has none."""
        return next((plane for plane, spec in self._described() if spec.name == name), None)

    def _described(self) -> Iterator[tuple[torch.Tensor, PlaneSpec]]:
        return zip(self.planes, self.spec.layout.planes, strict=True)

    def clear(self) -> None:
        """Forget everything but telemetry and give the memory back."""
        self.pages = 0
        with _ordinary():
            for index, spec in enumerate(self.spec.layout.planes):
                if spec.name == TELEMETRY_PLANE.name:
                    continue
                self.planes[index] = torch.zeros(spec.shape(0, self.batch, self.spec.slot.heads), dtype=spec.dtype, device=self.device)

    @staticmethod
    def holding(spec: StoreSpec, planes: list[torch.Tensor], rope: Rope | None = None) -> Store:
        """A store around planes that exist, [N, B, K, rows, width] each."""
        store = Store.__new__(Store)
        store.spec, store.planes, store.rope = spec, planes, rope
        store.pages, store.batch = planes[0].shape[:2]
        store.device = planes[0].device
        store._begin()
        return store

    def _begin(self) -> None:
        """Remember what telemetry holds already: it was counted where it came from."""
        plane = self._plane(TELEMETRY_PLANE.name)
        self.before = None if plane is None else plane.clone()

    @property
    def told(self) -> Telling | None:
        """Return the telemetry of attention over the store; None where it says nothing."""
        plane = self._plane(TELEMETRY_PLANE.name)
        return None if plane is None else Telling(plane, self.before)

    def select_rows(self, rows: torch.Tensor) -> Store:
        """A new store with the given batch rows: codes are copied, never re-encoded."""
        with _ordinary():
            return Store.holding(self.spec, [
                plane.clone() if spec.extent is Extent.BATCH else plane.index_select(1, rows.to(plane.device))
                for plane, spec in self._described()
            ], self.rope)

    def gathered(self, first: int, count: int, slots: int | None) -> Store:
        """A new store whose first ``count`` tokens are those from position ``first`` on, in this one's ring of ``slots`` or none."""
        made = Store(self.spec, self.batch, self.device, pages_for(count), self.rope)
        if not count:
            return made
        self.reserve(pages_for(first + count if slots is None else min(first + count, slots)))
        at, place = torch.arange(first, first + count, device=self.device), torch.arange(count, device=self.device).unsqueeze(0)
        with _ordinary():
            for (plane, spec), target in zip(self._described(), made.planes, strict=True):
                if spec.placed:
                    # Blocks are elsewhere now, and copies of them nowhere.
                    continue
                if spec.extent is not Extent.TOKENS:
                    target.copy_(plane)
                    continue
                write_rows(target, taken(plane, at if slots is None else at % slots), place)
            made._begin()
        return made

    def clone(self) -> Store:
        """A new store with the same content."""
        with _ordinary():
            return Store.holding(self.spec, [plane.clone() for plane in self.planes], self.rope)
