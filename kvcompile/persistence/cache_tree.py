"""Cache tree: a cache object as JSON, with names in place of its tensors, and the object made from the JSON.

A cache may consist of tensors, lists, tuples, dicts, numbers and texts, and of objects of the classes in ``files.pickled.FOREIGN``, which
are saved by their attributes. Loading runs no code of the file: a class is looked up in that list, and an object is made without a call of
its ``__init__``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcompile.errors import CacheUnfit, FileUnfit
from kvcompile.files.declared import as_declared
from kvcompile.files.pickled import FOREIGN
from kvcompile.runtime.handle.tensor import CompressedCache, is_handle, refresh
from kvcompile.runtime.handle.views import is_view

TENSORS = "give the tensors of the cache and its counters as lists, tuples or dicts, and put those that load_cache returns where these were"


@dataclass
class CacheTensors:
    """The tensors found in a cache, by name, compressed and dense; and the packages of the classes found in it."""

    compressed: dict[str, CompressedCache] = field(default_factory=dict)
    dense: dict[str, torch.Tensor] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)
    names: dict[int, str] = field(default_factory=dict)

    def tree(self, value: Any, name: str = "", within: tuple[int, ...] = ()) -> Any:
        """Return a value as JSON and record its tensors, with names that begin with ``name``.

        Raises CacheUnfit for a value of another type.

        ``within``: the identities of the objects that contain the value, to detect one that contains itself.
        """
        if value is None or type(value) in {bool, int, float, str}:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if id(value) in within:
            raise _unfit(value, name, "one that holds itself")
        within = (*within, id(value))

        def inner(items: Any) -> list[Any]:
            return [self.tree(item, f"{name}.{index}".strip("."), within) for index, item in enumerate(items)]

        if type(value) in {list, tuple, torch.Size}:
            return {"list" if type(value) is list else "tuple": inner(value)}
        if type(value) is dict:
            if not all(type(key) in {bool, int, str} for key in value):
                raise _unfit(value, name, "a dict with other keys than numbers and texts")
            return {"dict": [[key, self.tree(item, f"{name}.{key}".strip("."), within)] for key, item in value.items()]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        kind = value if isinstance(value, type) else type(value)
        if kind.__qualname__ not in FOREIGN.get(kind.__module__, ()):
            raise _unfit(value, name, f"{kind.__module__}.{kind.__qualname__}")
        self.packages.add(kind.__module__.partition(".")[0])
        place = f"{kind.__module__}:{kind.__qualname__}"
        if kind is value:
            return {"class": place}
        attributes = {key: self.tree(item, f"{name}.{key}".strip("."), within) for key, item in vars(value).items()}
        return {"object": place, "attributes": attributes}

    def _tensor(self, value: torch.Tensor, name: str) -> dict[str, str]:
        name = name or "cache"
        refresh(value)
        if is_view(value):
            raise _unfit(value, name, "a decoded view of a compressed cache")
        if (known := self.names.get(id(value))) is None:
            while name in self.compressed or name in self.dense:
                name += "'"
            known = self.names[id(value)] = name
            if is_handle(value):
                self.compressed[name] = value
            else:
                self.dense[name] = value.detach()
        return {"tensor": known}


def _unfit(value: Any, name: str, found: str) -> CacheUnfit:
    if isinstance(value, torch.nn.Module):
        found = f"a module ({type(value).__name__}), whose counters may be anywhere in it"
    return CacheUnfit(
        expected="a cache of transformers, or tuples, lists and dicts of tensors and numbers",
        found=f"{found} at {name or 'its top'}", todo=TENSORS,
    )


def planted(tree: Any, tensors: Mapping[str, torch.Tensor], device: torch.device | None, where: str = "tree") -> Any:
    """Return the value that the JSON ``tree`` describes, with ``tensors`` by name.

    Raises FileUnfit for JSON that ``CacheTensors.tree`` cannot make.

    ``device``: the device that replaces every device in the tree; None to keep them. ``where``: the place in the tree, for messages.
    """

    def inner(node: Any, name: object) -> Any:
        return planted(node, tensors, device, f"{where}.{name}")

    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case {"tensor": str(name)} if name in tensors:
            return tensors[name]
        case {"list": [*items]}:
            return [inner(item, index) for index, item in enumerate(items)]
        case {"tuple": [*items]}:
            return tuple(inner(item, index) for index, item in enumerate(items))
        case {"dict": [*items]}:
            pairs = as_declared(list[tuple[bool | int | str, Any]], items, where)
            return {key: inner(item, key) for key, item in pairs}
        case {"dtype": name}:
            return as_declared(torch.dtype, name, where)
        case {"device": str(name)}:
            return device or torch.device(name)
        case {"class": str(place)}:
            return _class_at(place, where)
        case {"object": str(place), "attributes": dict() as attributes}:
            kind = _class_at(place, where)
            made = kind.__new__(kind)
            vars(made).update({str(key): inner(item, key) for key, item in attributes.items()})
            return made
    raise FileUnfit(where=where, expected="a value that save_cache writes", found=tree)


def _class_at(place: str, where: str) -> Any:
    """Return the class at ``module:Name``. Raises FileUnfit if ``FOREIGN`` does not list it or its package is not installed."""
    module, _, name = place.partition(":")
    if name not in FOREIGN.get(module, ()):
        raise FileUnfit(where=where, expected=f"a class of {', '.join(FOREIGN)}", found=place)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise FileUnfit(where=where, expected=f"{place}, from an installed package", found=f"{type(error).__name__}: {error}") from error
