"""Classes in pickles: what ``torch.load`` must admit to read a compressed cache, found from the annotations of dataclasses."""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Iterator
from typing import Any

import torch


def admit(*roots: Any) -> None:
    """Let ``torch.load`` with its default ``weights_only=True`` make these classes and functions, and all classes in their fields.

    They hold data and no code of the file's: an unpickler that admits them can run nothing else.
    """
    torch.serialization.add_safe_globals([item for root in roots for item in (classes(root) if isinstance(root, type) else [root])])


def classes(root: type) -> list[type]:
    """Return a dataclass or an enum, and every such class that the fields of it are annotated with, of fields of fields too."""
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
    """Yield every dataclass and enum that a type annotation names."""
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, enum.Enum)):
        yield hint
    for inner in typing.get_args(hint):
        yield from _parts(inner)
