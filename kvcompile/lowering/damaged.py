"""Damaged entries of Inductor's cache on disk: a shared object or a module that a full disk left half written.

Inductor names both by the hash of their source and takes what lies there, so that a damaged one fails every start. The loader's error names
a shared object. A module is named by the error, or by the frames that it ran, and is damaged where its text has another hash than its name.
Once the file is gone, Inductor writes it again.
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
"""A shared object in the text of an error."""
MODULE = re.compile(r"(/[^\s:'\"]+\.py)\b")
"""A file of Python in the text of an error."""
KEY = re.compile(r"\bcompile_tasks\.(\w+)")
"""The key of a module of Inductor's in the text of an error, which names its file."""


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
    """The modules that an error names, and those of Inductor's that it was raised in."""
    yield from map(Path, MODULE.findall(text))
    yield from (folder / key[1:3] / f"{key}.py" for key in KEY.findall(text))
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if (path := Path(frame.f_code.co_filename)).is_relative_to(folder):
            yield path


def _differs(path: Path) -> bool:
    """Whether a module's text has another hash than its name says."""
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
