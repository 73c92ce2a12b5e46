"""Damaged entries of Inductor's cache on disk: a shared object that a killed compiler left half written.

Inductor names a shared object by its source's hash and takes what lies there, so that a damaged one fails every start. The loader's error
names the file. Once that file is gone, Inductor compiles it again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvcompile.errors import DamagedCache
from kvcompile.lowering.host.inductor_api import cache_dir

log = logging.getLogger(__name__)

LIBRARY = re.compile(r"(/[^\s:'\"]+\.so)\b")
"""A shared object in the text of an error."""


def rebuilding(build: Callable[[], Any]) -> Any:
    """Return ``build()``, again each time that it named a damaged entry, which is removed; raises DamagedCache where one stays."""
    removed: set[Path] = set()
    while True:
        try:
            return build()
        except Exception as error:
            path = damaged_entry(error)
            if path is None:
                raise
            if path in removed:
                raise DamagedCache(path=path, error=error) from error
            try:
                path.unlink()
            except OSError as kept:
                raise DamagedCache(path=path, error=kept) from error
            removed.add(path)
            log.warning("an entry of Inductor's cache is damaged, was removed and is compiled again: %s (%s)", path, error)


def damaged_entry(error: BaseException) -> Path | None:
    """Return the shared object in Inductor's cache that ``error`` or one of its causes could not load; None for other errors."""
    folder = Path(cache_dir()).resolve()
    for item in _chain(error):
        # Inductor wraps the loader's error into one of its own.
        text = str(item)
        if not isinstance(item, (ImportError, OSError)) and not re.search(r"\b(ImportError|OSError)\b", text):
            continue
        for name in LIBRARY.findall(text):
            path = Path(name).resolve()
            if path.is_relative_to(folder) and path.is_file():
                return path
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
