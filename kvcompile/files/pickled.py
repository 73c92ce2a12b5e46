"""Classes in pickles of compressed caches: registers their names with ``torch.load`` without importing any of them.

A pickle names the module of every class in it. ``STORED`` lists all names of ours that a cache may contain, and their former modules. Each
is registered as a stand-in, which imports the real class when a file needs it. So importing this module is enough to load a cache of any
scheme, of this version or an earlier one, and costs no import of schemes that the file does not use.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

import torch

STORED: dict[str, tuple[tuple[str, ...], str | None]] = {
    "kvcompile.runtime.handle.operations": (("rebuild",), "kvcompile.runtime.operations"),
    "kvcompile.runtime.store.store": (("StoreSpec",), "kvcompile.runtime.store"),
    "kvcompile.passes.match.sites": (("Axes",), None),
    "kvcompile.types": (("Extent", "Granularity", "KeyOrValue", "Layout", "PlaneSpec", "Role", "SlotSpec"), None),
    "kvcompile.schemes.asymmetric": (("Axis", "Kivi"), None),
    "kvcompile.schemes.base": (("Scheme",), None),
    "kvcompile.schemes.rotation": (("Rotate",), "kvcompile.schemes.basis"),
    "kvcompile.schemes.dense": (("Dense",), None),
    "kvcompile.schemes.nf4": (("Nf4",), None),
    "kvcompile.schemes.gauss": (("Gauss",), None),
    "kvcompile.schemes.symmetric": (("Fp8", "Int4", "Int8"), None),
    "kvcompile.extensions.beyond.scheme": (("Beyond",), "kvcompile.schemes.beyond.scheme"),
    "kvcompile.extensions.beyond.tables": (("ModelTables", "SiteTables", "Table"), "kvcompile.schemes.beyond.tables"),
    "kvcompile.extensions.certified.scheme": (("Certified", "Tier2", "ValueStorage"), "kvcompile.schemes.certified"),
    "kvcompile.extensions.smartkv.codes": (("Frame",), "kvcompile.schemes.smartkv.codes"),
    "kvcompile.extensions.smartkv.importance": (("Measure",), "kvcompile.schemes.smartkv.importance"),
    "kvcompile.extensions.smartkv.scheme": (("OptionalTier2", "Scope", "Smartkv"), "kvcompile.schemes.smartkv.scheme"),
    "kvcompile.extensions.squat.normed": (("Normed", "Turn"), "kvcompile.schemes.normed"),
    "kvcompile.extensions.squat.scheme": (("Queries", "Squat", "Subspace", "Unit"), "kvcompile.schemes.squat"),
    "kvcompile.extensions.static_scales.scales": (("ModelScales", "Scales", "SiteScales"), "kvcompile.schemes.calibrated.scales"),
    "kvcompile.extensions.static_scales.scheme": (("StaticFp8", "StaticInt8"), "kvcompile.schemes.calibrated.scheme"),
}
"""By module: its classes and functions that pickles of caches name, and the module that had them up to version 0.1."""

FOREIGN: dict[str, tuple[str, ...]] = {
    "transformers.cache_utils": (
        "DummyLayer", "DynamicCache", "DynamicIndexedLayer", "DynamicLayer", "DynamicSlidingWindowLayer", "EncoderDecoderCache",
        "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer",
        "LinearAttentionAndStaticFullAttentionLayer", "LinearAttentionAndStaticSlidingWindowAttentionLayer", "LinearAttentionLayer",
        "StaticCache", "StaticIndexedLayer", "StaticLayer", "StaticSlidingWindowLayer",
    ),
}
"""By module of another package: classes of caches, whose objects hold tensors and numbers, and no code that loading would run."""

RENAMED: dict[str, dict[str, str]] = {
    "kvcompile.types": {"Half": "KeyOrValue"},
    "kvcompile.extensions.certified.scheme": {"Values": "ValueStorage"},
    "kvcompile.extensions.smartkv.scheme": {"Tier2": "OptionalTier2"},
}
"""By module: former name of each class of ``STORED`` renamed since version 0.1, with its present name. The modules keep the former as an
alias."""


class _Resolved(type):
    """Metaclass of the stand-ins for classes in pickles: calling a stand-in imports the class that it stands for, and calls that."""

    place: tuple[str, str]

    def real(cls) -> Any:
        """Import the real class, add it to torch's safe globals, and return it: ``torch.load`` checks the class of each object it made."""
        module, name = cls.place
        found = getattr(importlib.import_module(module), name)
        torch.serialization.add_safe_globals([(found, f"{module}.{name} as it is")])
        return found

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.real()(*args, **kwargs)


def _stand_in(module: str, name: str) -> type:
    """Return a stand-in for class ``name`` of ``module``; an unpickler that calls it imports the real class and makes an object of that."""

    def make(cls: Any, *args: Any) -> Any:
        real = cls.real()
        return real.__new__(real, *args)

    return _Resolved(name, (), {"__new__": make, "place": (module, name)})


class _Former(types.ModuleType):
    """A replacement, in ``sys.modules``, for a module of an earlier version; pickles that name its classes load the present ones."""

    names: tuple[str, ...]
    place: str

    def __getattr__(self, name: str) -> Any:
        if name in self.names:
            return getattr(importlib.import_module(self.place), name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def install() -> None:
    """Let ``torch.load`` with its default ``weights_only=True``, and ``pickle``, read caches of this version and of earlier ones.

    The registered classes hold data only: an unpickler that admits them cannot run code of the file.
    """
    for module, (names, former) in STORED.items():
        renamed = RENAMED.get(module, {})
        stand_ins = {name: _stand_in(module, renamed.get(name, name)) for name in (*names, *renamed)}
        for place in filter(None, (module, former)):
            torch.serialization.add_safe_globals([(made, f"{place}.{name}") for name, made in stand_ins.items()])
        # A former module whose path is a package today needs no entry of its own.
        if former is not None and not module.startswith(former + "."):
            gone = _Former(former)
            gone.names, gone.place = (*names, *renamed), module
            sys.modules.setdefault(former, gone)
    for module, names in FOREIGN.items():
        torch.serialization.add_safe_globals([(_stand_in(module, name), f"{module}.{name}") for name in names])


def admit(*roots: type) -> None:
    """Let ``torch.load`` make objects of the classes ``roots``, of other packages, and of the dataclasses and enums in their fields."""
    found = [item for root in roots for item in classes(root)]
    torch.serialization.add_safe_globals([item for item in found if item.__qualname__ not in STORED.get(item.__module__, ((), None))[0]])


def classes(root: type) -> list[type]:
    """Return a dataclass or enum, and every such class in the annotations of its fields, recursively."""
    found: dict[type, None] = {}
    queue = [root]
    while queue:
        item = queue.pop()
        if item in found:
            continue
        found[item] = None
        if dataclasses.is_dataclass(item):
            queue += [part for hint in typing.get_type_hints(item).values() for part in _parts(hint)]
    return list(found)


def _parts(hint: Any) -> Iterator[type]:
    """Yield each dataclass and enum in a type annotation, including arguments of unions and generics."""
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, enum.Enum)):
        yield hint
    for inner in typing.get_args(hint):
        yield from _parts(inner)


install()
