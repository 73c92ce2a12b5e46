"""Cache records: the facts of a compressed cache tensor that a file holds besides its planes, and the tensor made from facts and planes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kvcompile.errors import CacheUnfit, FileUnfit, SchemeError
from kvcompile.files.tensor_file import Entry
from kvcompile.passes.match.sites import Axes
from kvcompile.passes.plan.policy import Policy
from kvcompile.runtime.handle.operations import FORMAT, rebuild
from kvcompile.runtime.handle.tensor import CompressedCache, resume
from kvcompile.runtime.store.parked_rows import in_one
from kvcompile.runtime.store.state import Part
from kvcompile.runtime.store.store import Store, StoreSpec
from kvcompile.schemes import BY_NAME, Scheme, parse
from kvcompile.types import Extent, Layout, SlotSpec


@dataclass(frozen=True)
class StoredPart:
    """A saved store without its planes: its part of the cache tensor, axes, slot, number of batch rows, scheme and layout.

    ``scheme``: the scheme's text, as ``parse`` reads it. ``name``: its display name, which also tells apart schemes of one text with other
    tables or static scales. ``padded``: whether the file has further planes, with the tokens before each row's origin (``Store.padding``).
    """

    part: Part
    axes: Axes
    slot: SlotSpec
    rows: int
    scheme: str
    name: str
    layout: Layout
    padded: bool

    def entries(self, name: str) -> Iterator[tuple[str, Entry]]:
        """Yield (name in the file, declared shape and dtype) for each plane of this store; names are ``name``/plane."""
        for plane in self.layout.planes:
            shape: tuple[int | None, ...] = plane.shape_of(None, self.rows, self.slot.heads)
            if plane.extent not in {Extent.TOKENS, Extent.STORE}:
                shape = (1, *shape[1:])
            yield f"{name}/{plane.name}", Entry((None,) * 5 if plane.extent is Extent.STORE else shape, plane.dtype, any_bits=True)


@dataclass(frozen=True)
class StoredCache:
    """The facts of one compressed cache tensor: those that ``handle.operations.rebuild`` takes, and the module path of its attention."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    length: int
    slots: int | None
    top: int
    grown: bool
    held: int
    path: str
    parts: tuple[StoredPart, ...]

    @staticmethod
    def of(handle: CompressedCache, name: str) -> StoredCache:
        """Return the facts of a compressed cache tensor called ``name``. Raises CacheUnfit for a tensor that a file cannot hold."""
        resume(handle)
        state = handle._kv
        if not in_one(state, handle.shape):
            raise CacheUnfit(
                expected="a cache whose rows were all in its last call", found=f"{name}, some of whose rows were not",
                todo="save the rows of one request by themselves, or call the model with all rows once before",
            )
        parts = []
        for part, store in state.stores.items():
            scheme = store.spec.scheme
            if BY_NAME.get(scheme.name) is not type(scheme):
                raise CacheUnfit(
                    expected="a scheme that another process finds by its name",
                    found=f"{scheme.display_name()} at {name}, whose class {type(scheme).__name__} is not registered",
                    todo="decorate the class with @kvcompile.register",
                )
            named = scheme.spec(), scheme.display_name()
            parts.append(
                StoredPart(part, state.axes[part], store.spec.slot, store.batch, *named, store.spec.layout, store.padding is not None)
            )
        facts = state.slots, state.top, state.grown, state.held, state.path
        return StoredCache(tuple(handle.shape), handle.dtype, str(handle.device), handle._length, *facts, tuple(parts))

    @property
    def rows(self) -> int:
        """Number of batch rows."""
        return self.parts[0].rows

    def places(self, name: str) -> Iterator[tuple[str, StoredPart]]:
        """Yield (prefix of the planes' names in the file, part) for each part's planes and, if it has them, its planes of padding."""
        for index, item in enumerate(self.parts):
            yield f"{name}/{index}", item
            if item.padded:
                yield f"{name}/{index}/padding", item

    def entries(self, name: str) -> dict[str, Entry]:
        """Return the declared shape and dtype of each tensor that a file holds for this cache, by name."""
        return {key: entry for place, item in self.places(name) for key, entry in item.entries(place)}

    def tensor(
        self, name: str, planes: Mapping[str, torch.Tensor], policy: Policy | None, device: torch.device | None, file: Path
    ) -> CompressedCache:
        """Return the cache tensor made from its ``planes``. Raises CacheUnfit if a scheme differs, FileUnfit if the planes do not fit.

        ``policy``: the policy with the schemes; None to make the schemes from their texts. ``device``: the device to load to; None for the
        device that the tensor was saved from. ``file``: the file's path, for messages.
        """
        target = device or torch.device(self.device)
        stores, padding = {}, {}
        for index, item in enumerate(self.parts):
            scheme = _scheme(item, self.path, policy, f"{name} in {file}")
            _check_layout(item, scheme, name)
            spec = StoreSpec(item.slot, scheme, item.layout)
            stores[item.part] = spec, _planes(item, f"{name}/{index}", planes, target)
            if item.padded:
                padding[item.part] = _planes(item, f"{name}/{index}/padding", planes, target)
        axes = {item.part: item.axes for item in self.parts}
        rest = self.length, self.slots, self.top, self.grown, FORMAT, self.held, padding
        made = rebuild(axes, stores, self.shape, self.dtype, str(target), *rest)
        needed = self.length if self.slots is None else min(self.length, self.slots)
        if made._kv.room < needed:
            raise FileUnfit(where=name, expected=f"planes of {needed} tokens", found=f"planes of {made._kv.room}")
        made._kv.path = self.path
        return made


def planes_of(handle: CompressedCache, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the file, plane) for every plane of a compressed cache tensor called ``name``; names as in ``StoredCache.entries``."""

    def of(store: Store, place: str) -> Iterator[tuple[str, torch.Tensor]]:
        for plane, spec in store.described():
            yield f"{place}/{spec.name}", plane

    for index, store in enumerate(handle._kv.stores.values()):
        yield from of(store, f"{name}/{index}")
        if store.padding is not None:
            yield from of(store.padding, f"{name}/{index}/padding")


def _planes(item: StoredPart, place: str, planes: Mapping[str, torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return copies of a store's planes on ``device``.

    Raises FileUnfit if planes that grow with tokens differ in their numbers of pages.
    """
    found = [planes[f"{place}/{plane.name}"] for plane in item.layout.planes]
    pages = {len(plane) for plane, spec in zip(found, item.layout.planes, strict=True) if spec.extent is Extent.TOKENS}
    if len(pages) > 1:
        raise FileUnfit(where=place, expected="planes of one number of pages", found=sorted(pages))
    # Copies: the tensors of a file are views of its memory.
    return [plane.to(device, copy=True) for plane in found]


def _scheme(item: StoredPart, path: str, policy: Policy | None, where: str) -> Scheme:
    """Return the scheme of a store: from ``policy``, or from its text if that is None. Raises CacheUnfit unless it is the saved scheme."""
    advice = "pass scheme= as the backend that filled the cache had it: a text does not bring learned tables or measured scales"
    if policy is None:
        try:
            made = [parse(item.scheme)]
        except SchemeError as error:
            raise CacheUnfit(expected=f"the scheme {item.name} for {where}", found=str(error), todo=advice) from error
    else:
        pair = policy.of(path)
        made = [] if pair is None else [scheme.for_module(path).for_role(item.slot.role) for scheme in (pair.k, pair.v)]
    names = [scheme.display_name() for scheme in made]
    if item.name not in names:
        found = " and ".join(dict.fromkeys(names)) or "a policy that leaves it dense"
        raise CacheUnfit(expected=f"the scheme {item.name} for {where}", found=found, todo=advice)
    return made[names.index(item.name)]


def _check_layout(item: StoredPart, scheme: Scheme, name: str) -> None:
    """Raise FileUnfit if the scheme's layout differs from the saved one.

    Windows and sinks are not compared: their sizes follow from the larger one of keys and values, not from the scheme alone.
    """
    held = {plane.name: plane for plane in item.layout.planes}
    for plane in scheme.layout(item.slot).planes:
        if held.get(plane.name) != plane and plane.name not in {"window", "clock"} and not plane.exact_first:
            raise FileUnfit(where=name, expected=f"the plane {plane}", found=held.get(plane.name, "none"))
