"""JSON text and files, converted to a declared type; any fault raises ``FileUnfit``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from kvcompile.errors import FileUnfit
from kvcompile.files.declared import as_declared

T = TypeVar("T")


def parsed(text: str | bytes, kind: type[T] | Any = Any, where: str = "the file") -> Any:
    """Return JSON text converted to ``kind`` (``declared.as_declared``). Raises FileUnfit, also for a name given twice in one mapping."""
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, TypeError) as error:
        raise FileUnfit(where=where, expected="JSON", found=f"{type(error).__name__}: {error}") from error
    except RecursionError as error:
        raise FileUnfit(where=where, expected="JSON", found="lists or mappings nested hundreds of levels deep") from error
    return as_declared(kind, value, where)


def read_json(path: Path, kind: type[T] | Any = Any) -> Any:
    """Return a file's JSON converted to ``kind``. Raises FileUnfit if it cannot be read or is not of this type."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileUnfit(where=path.name, expected="a file", found=f"{type(error).__name__}: {error}") from error
    return parsed(content, kind, path.name)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return (name, value) pairs as a dict. Raises ValueError for a repeated name; JSON readers would silently take the last value."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} twice in one mapping")
    return found
