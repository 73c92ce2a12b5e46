"""Module paths of attentions: finds a model file's entry for one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable


def entry_of(path: str, known: Iterable[str]) -> str | None:
    """Return the entry of ``known`` for a module path: an equal one, or else the only one that ``matches``; None if there is none."""
    listed = list(known)
    if path in listed:
        return path
    near = [entry for entry in listed if path and entry and matches(entry, path)]
    return near[0] if len(near) == 1 else None


def matches(entry: str, path: str) -> bool:
    """Return whether ``entry`` names a module path by a part of it: one ends with "." and the other, or ``entry`` is a layer ("layers.3").

    False for equal paths, which ``entry_of`` compares first.
    """
    if entry.endswith(f".{path}") or path.endswith(f".{entry}"):
        return True
    return re.fullmatch(r"layers\.\d+", entry) is not None and f".{entry}." in f".{path}."


def shown(paths: Iterable[str]) -> str:
    """Return the first three module paths as text, for a message."""
    listed = list(paths)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "") if listed else "none"
