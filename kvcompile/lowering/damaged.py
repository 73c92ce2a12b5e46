"""Damaged entries of Inductor's cache on disk: a shared object or a module that was written in part, for example on a full disk.

Inductor names both by the hash of their source and loads an existing file without a check, so a damaged one fails every start. The loader's
error names a shared object. A module is named by the error, or by the frames of its traceback, and is damaged if its text has another hash
than its name. Once the file is deleted, Inductor writes it again.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvcompile.errors import DamagedCache
from kvcompile.lowering.host.inductor_entry import cache_dir, forget_module, module_key

log = logging.getLogger(__name__)

LIBRARY = re.compile(r"(/[^\s:'\"]+\.so)\b")
"""Pattern of a shared object's path in the text of an error."""
MODULE = re.compile(r"(/[^\s:'\"]+\.py)\b")
"""Pattern of a Python file's path in the text of an error."""
KEY = re.compile(r"\bcompile_tasks\.(\w+)")
"""Pattern of an Inductor module's key in the text of an error; the key is its file's name."""


def rebuilding(build: Callable[[], Any]) -> Any:
    """Return ``build()``; if it fails on a damaged cache entry, remove the entry, log a warning and try again.

    Raises DamagedCache if the entry stays.
    """
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
            forget_module(path)
            removed.add(path)
            log.warning("an entry of Inductor's cache is damaged, was removed and is compiled again: %s (%s)", path, error)


def damaged_entry(error: BaseException) -> Path | None:
    """Return the file in Inductor's cache that ``error`` or one of its causes could not load; None for other errors."""
    folder = Path(cache_dir()).resolve()
    for item in _chain(error):
        # Inductor wraps the loader's error into one of its own.
        text = str(item)
        loading = isinstance(item, (ImportError, OSError)) or re.search(r"\b(ImportError|OSError)\b", text)
        libraries = map(Path, LIBRARY.findall(text)) if loading else ()
        for path in [*libraries, *filter(_differs, _modules(item, text, folder))]:
            if path.resolve().is_relative_to(folder) and path.is_file():
                return path.resolve()
    return None


def _modules(error: BaseException, text: str, folder: Path) -> Iterator[Path]:
    """Yield the Python files that an error names, and Inductor's modules in its traceback."""
    yield from map(Path, MODULE.findall(text))
    yield from (folder / key[1:3] / f"{key}.py" for key in KEY.findall(text))
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if (path := Path(frame.f_code.co_filename)).is_relative_to(folder):
            yield path


def _differs(path: Path) -> bool:
    """Return whether a module's text has another hash than its file name, or cannot be read."""
    try:
        return path.is_file() and module_key(path.read_text(encoding="utf-8", errors="replace")) != path.stem
    except OSError:
        return True


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
