"""Store: the mutable planes of one slot. It is the only mutable memory of a cache, and contains no numerics.

Planes are [N, B, K, rows, width]: growth adds pages on the first axis, so strides never change and code compiled for one size runs for
all. New pages are zero, which every scheme decodes to zero: unwritten tokens read like an untouched dense buffer.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvcompile.lowering.ops.operations import as_tokens, decodable, write_rows
from kvcompile.lowering.ops.sliding import taken
from kvcompile.runtime.store import telemetry
from kvcompile.runtime.store.pinned import host_plane
from kvcompile.runtime.store.rope import Rope
from kvcompile.runtime.store.telemetry import TelemetryPlane
from kvcompile.schemes import Scheme
from kvcompile.schemes.certificate.telemetry import REFILLED
from kvcompile.schemes.rotation import Rotation, rotate, unrotate
from kvcompile.types import PAGE, Extent, Layout, PlaneSpec, SlotSpec, pages_for


@dataclass(frozen=True)
class StoreSpec:
    """The description of a store: its slot, scheme and layout. Stores with equal specs can share compiled code."""

    slot: SlotSpec
    scheme: Scheme
    layout: Layout


@contextlib.contextmanager
def ordinary() -> Iterator[None]:
    """Disable inference mode and gradients inside of the context, so that new planes can be used in any mode later."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Store:
    """The planes of one slot of one cache.

    ``padding``: for a windowed store made from a dense cache, a store with the tokens before each row's origin, counted from 0; else None.
    The mask of one step hides these tokens, which does not prove that they are padding, so the cache returns them when it is read outside
    of compiled code. Compiled calls ignore them.
    ``family``: the stores that may hold the same plane tensors (``shared_planes``), itself included; None if no other store does.
    """

    __slots__ = ("__weakref__", "batch", "before", "device", "family", "padding", "pages", "planes", "rope", "spec")

    def __init__(self, spec: StoreSpec, batch: int, device: torch.device, pages: int, rope: Rope | None = None) -> None:
        self.spec, self.batch, self.device, self.rope = spec, batch, device, rope
        self.pages = 0
        self.before: torch.Tensor | None = None
        self.padding: Store | None = None
        self.family: weakref.WeakSet[Store] | None = None
        self.planes: list[torch.Tensor] = [self._zeros(plane, 0) for plane in spec.layout.planes]
        self.reserve(pages)

    @staticmethod
    def holding(spec: StoreSpec, planes: list[torch.Tensor], rope: Rope | None = None) -> Store:
        """Return a store around existing planes [N, B, K, rows, width]."""
        store = Store.__new__(Store)
        store.spec, store.planes, store.rope, store.padding, store.family = spec, planes, rope, None, None
        store.pages, store.batch = planes[0].shape[:2]
        store.device = planes[0].device
        store._begin()
        return store

    # --- memory ----------------------------------------------------------------------------------

    def _zeros(self, plane: PlaneSpec, pages: int) -> torch.Tensor:
        """Return a new plane as the scheme makes it empty, or of zeros in pinned host memory if its spec says so; raises HostMemoryFull."""
        with ordinary():
            if plane.host and self.device.type == "cuda":
                shape = plane.shape(pages, self.batch, self.spec.slot.heads)
                return host_plane(shape, plane.dtype, self.device)
            return self.spec.scheme.empty(plane, self.spec.slot, pages, self.batch, self.device)

    def _where_they_belong(self, planes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return planes with those that belong in pinned host memory moved there."""
        if self.device.type != "cuda":
            return list(planes)
        return [
            self._pinned(plane) if spec.host else plane for plane, spec in zip(planes, self.spec.layout.planes, strict=True)
        ]

    def _pinned(self, plane: torch.Tensor) -> torch.Tensor:
        """Return a copy of a plane in pinned host memory. Raises HostMemoryFull if the memory cannot be had."""
        return host_plane(tuple(plane.shape), plane.dtype, self.device).copy_(plane)

    def pin(self) -> None:
        """Move planes that belong in pinned host memory there, such as those of a store that was read from a file."""
        with ordinary():
            self.planes = self._where_they_belong(self.planes)

    @property
    def nbytes(self) -> int:
        """Allocated bytes of all planes."""
        return sum(plane.untyped_storage().nbytes() for plane in self.planes) + (self.padding.nbytes if self.padding else 0)

    @property
    def host_nbytes(self) -> int:
        """Bytes in pinned host memory."""
        own = sum(plane.untyped_storage().nbytes() for plane, spec in self.described() if spec.host and self.device.type == "cuda")
        return own + (self.padding.host_nbytes if self.padding else 0)

    @property
    def first(self) -> int:
        """Position of the first token in the planes that grow."""
        return 0

    @property
    def room(self) -> int:
        """Number of tokens that fit the allocated pages."""
        return self.pages * PAGE

    @property
    def in_order(self) -> bool:
        """Whether tokens must be written in order, and a write forgets all later tokens."""
        return self.window is not None or self.spec.scheme.in_order

    def announced(self, tokens: int) -> int:
        """Return the bytes that a report announces for ``tokens`` tokens: here, of all allocated pages."""
        del tokens
        found: int = self.spec.layout.nbytes(self.pages, self.batch, self.spec.slot.heads)
        return found

    def reserve(self, pages: int, tokens: int | None = None) -> None:
        """Grow the planes to ``pages`` pages, one plane at a time, so that only one exists twice; do nothing if they have as many.

        ``tokens``: the number of tokens that the next call needs, for stores that allocate by tokens. Raises HostMemoryFull.
        """
        del tokens
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

    def clear(self) -> None:
        """Forget everything but telemetry and free the memory."""
        self.pages, self.padding = 0, None
        with ordinary():
            for index, spec in enumerate(self.spec.layout.planes):
                if spec.name == telemetry.PLANE:
                    continue
                self.planes[index] = self._zeros(spec, 0)

    # --- planes ----------------------------------------------------------------------------------

    def described(self) -> Iterator[tuple[torch.Tensor, PlaneSpec]]:
        """Return an iterator of (plane, its spec), in the order of the layout."""
        return zip(self.planes, self.spec.layout.planes, strict=True)

    def plane(self, name: str) -> torch.Tensor | None:
        """Return the plane with this name; None if the layout has none."""
        return next((plane for plane, spec in self.described() if spec.name == name), None)

    @property
    def window(self) -> torch.Tensor | None:
        """The newest tokens in full precision, [B, K, W, D], token t in slot t % W; None without a window."""
        found = self.plane("window")
        return None if found is None else found[0]

    @property
    def keeps_originals(self) -> bool:
        """Whether every token is also kept in full precision."""
        return any(plane.originals for plane in self.spec.layout.planes)

    @property
    def lengths(self) -> torch.Tensor:
        """Token count and left padding of each row, int64 [1, B, K, 1, 2], equal for all heads, of a store with a window."""
        found = self.plane("clock")
        assert found is not None
        return found

    @property
    def left_padding(self) -> torch.Tensor | None:
        """First position of each row that is not padding, int64 [B]; None without a window."""
        found = self.plane("clock")
        return None if found is None else found[0, :, 0, 0, 1]

    @property
    def exact_first(self) -> list[torch.Tensor]:
        """Planes of the sinks in full precision, and of their first position if there is no clock; [] without sinks."""
        return [plane for plane, spec in self.described() if spec.exact_first]

    @property
    def origins(self) -> torch.Tensor | None:
        """Position of each row's first token that is not padding, int64 [B]; None without sinks or a window."""
        found = self.plane("origin")
        return self.left_padding if found is None else found[0, :, 0, 0, 0]

    def rotated(self, x_BKTD: torch.Tensor) -> torch.Tensor:
        """Return tokens [B, K, T, D] with their channels rotated like the stored ones, in their dtype."""
        rotation = self.spec.scheme.rotation(self.spec.slot)
        return x_BKTD if rotation is None else rotate(x_BKTD, rotation.order, self._rotation_plane(rotation))

    def unrotated(self, x_BKTD: torch.Tensor) -> torch.Tensor:
        """Return stored tokens [B, K, T, D] with their channels rotated back, in their dtype."""
        rotation = self.spec.scheme.rotation(self.spec.slot)
        return x_BKTD if rotation is None else unrotate(x_BKTD, rotation.order, self._rotation_plane(rotation))

    def _rotation_plane(self, rotation: Rotation) -> torch.Tensor | None:
        plane = None if rotation.plane is None else self.plane(rotation.plane)
        return None if plane is None else plane[0]

    @property
    def encoded(self) -> list[torch.Tensor]:
        """Planes that new tokens are encoded into."""
        return self.planes[: self.spec.layout.encoded]

    @property
    def tables(self) -> list[torch.Tensor]:
        """Constant planes that encoding reads."""
        return [plane for plane, spec in self.described() if spec.encoding]

    @property
    def rolled_back(self) -> list[torch.Tensor]:
        """Planes that a rollback and the following step change: exact tokens, clock, and the record of refilled tokens."""
        return [plane for plane, spec in self.described() if spec.name in {"window", "clock", REFILLED} or spec.exact_first]

    @property
    def never_calibrated(self) -> bool:
        """Whether the scheme calibrates planes with queries, and these planes still have their initial zeros. Waits for the device.

        A calibration that results in zeros writes negative zeros.
        """
        calibrated = [plane for plane, spec in self.described() if spec.name in self.spec.scheme.calibrated]
        return bool(calibrated) and not any(bool(plane.any() | plane.signbit().any()) for plane in calibrated)

    @property
    def telemetry(self) -> TelemetryPlane | None:
        """Telemetry of attention over the store; None if its layout has none."""
        plane = self.plane(telemetry.PLANE)
        return None if plane is None else TelemetryPlane(plane, self.before)

    def _begin(self) -> None:
        """Record the telemetry counts that the planes hold now as inherited: they belong to the store that the planes were copied from."""
        plane = self.plane(telemetry.PLANE)
        self.before = None if plane is None else plane.clone()

    def values(self, first: int, last: int) -> torch.Tensor:
        """Return the tokens of pages [first, last) as [B, K, T, D], in full precision if kept, else decoded."""
        originals = [plane[first:last] for plane, spec in self.described() if spec.originals]
        if originals:
            return as_tokens(originals[0])
        grown = [plane[first:last] if spec.extent is Extent.TOKENS else plane for plane, spec in self.described()]
        return self.spec.scheme.decode(decodable(self.spec.scheme, grown, self.spec.slot, slice(None)), self.spec.slot)

    def restore(self, planes: list[torch.Tensor]) -> None:
        """Restore planes from before a failed call; only adaptive stores, which replace planes, need it."""
        del planes

    # --- copies ----------------------------------------------------------------------------------

    def clone(self) -> Store:
        """Return a copy of the store."""
        with ordinary():
            made = self.alike([self.copied(index) for index in range(len(self.planes))])
        made.padding = self.padding.clone() if self.padding else None
        return made

    def copied(self, index: int) -> torch.Tensor:
        """Return a copy of plane number ``index``, in pinned host memory if the plane belongs there."""
        plane, spec = self.planes[index], self.spec.layout.planes[index]
        return plane.clone() if not spec.host or self.device.type != "cuda" else self._pinned(plane)

    def alike(self, planes: list[torch.Tensor]) -> Store:
        """Return a store with this one's spec and RoPE around other ``planes``."""
        return Store.holding(self.spec, planes, self.rope)

    def select_rows(self, rows: torch.Tensor) -> Store:
        """Return a new store of the given batch rows; codes are copied, never re-encoded."""
        with ordinary():
            chosen = [
                plane.clone() if spec.extent is Extent.BATCH else plane.index_select(1, rows.to(plane.device))
                for plane, spec in self.described()
            ]
            made = Store.holding(self.spec, self._where_they_belong(chosen), self.rope)
        made.padding = self.padding.select_rows(rows) if self.padding else None
        return made

    def gathered(self, first: int, count: int, slots: int | None) -> Store:
        """Return a new linear store of ``count`` tokens from position ``first`` on.

        ``slots``: the number of slots of this store if it slides, else None.
        """
        made = Store(self.spec, self.batch, self.device, pages_for(count), self.rope)
        if not count:
            return made
        self.reserve(pages_for(first + count if slots is None else min(first + count, slots)))
        at, place = torch.arange(first, first + count, device=self.device), torch.arange(count, device=self.device).unsqueeze(0)
        with ordinary():
            for (plane, spec), target in zip(self.described(), made.planes, strict=True):
                if spec.placed:
                    # The blocks have moved, so cached copies of them are dropped.
                    continue
                if spec.extent is not Extent.TOKENS:
                    # The sinks keep their distance to these tokens.
                    target.copy_(plane - first if spec.name == "origin" else plane)
                    continue
                write_rows(target, taken(plane, at if slots is None else at % slots), place)
            made._begin()
        made.padding = self.padding.clone() if self.padding and not first else None
        return made
