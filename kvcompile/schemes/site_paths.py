"""Module paths of attentions: which entry of a model's tables or scales stands for one."""

from __future__ import annotations

import re
from collections.abc import Iterable


def entry_of(path: str, known: Iterable[str]) -> str | None:
    """The entry for the attention at a module path: its own, or the only one that ``matches``; None where there is none."""
    listed = list(known)
    if path in listed:
        return path
    near = [entry for entry in listed if path and entry and matches(entry, path)]
    return near[0] if len(near) == 1 else None


def matches(entry: str, path: str) -> bool:
    """Whether an entry stands for a module path: one of them begins further out, or the entry names a layer by number (``layers.3``)."""
    if entry.endswith(f".{path}") or path.endswith(f".{entry}"):
        return True
    return re.fullmatch(r"layers\.\d+", entry) is not None and f".{entry}." in f".{path}."


def shown(paths: Iterable[str]) -> str:
    """The first of some module paths, for a message."""
    listed = list(paths)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "") if listed else "none"
