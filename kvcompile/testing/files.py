"""Scheme classes from a command's argument: a file that defines them, or the name of a registered one."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

from kvcompile.errors import NoScheme
from kvcompile.schemes import BY_NAME, Scheme, register


def schemes_of(text: str) -> tuple[type[Scheme], ...]:
    """Return the scheme classes that a file defines, registered if they are not yet; or the one with the name ``text``.

    Raises NoScheme. The file is imported under its own name, so that other processes find it on ``sys.path`` too.
    """
    if not text.endswith(".py"):
        if text not in BY_NAME:
            raise NoScheme(found=f"{text!r}, which is neither", known=list(BY_NAME))
        return (BY_NAME[text],)
    path = Path(text).resolve()
    if not path.is_file():
        raise NoScheme(found=f"no file {text}", known=list(BY_NAME))
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    if Path(str(module.__file__)).resolve() != path:
        raise NoScheme(found=f"{text}, whose name is that of another module, {module.__file__}", known=list(BY_NAME))
    found = tuple(
        item for item in vars(module).values()
        if inspect.isclass(item) and issubclass(item, Scheme) and item.__module__ == module.__name__ and hasattr(item, "name")
    )
    if not found:
        raise NoScheme(found=f"{text}, which defines none", known=list(BY_NAME))
    for scheme in found:
        if scheme.name not in BY_NAME or BY_NAME[scheme.name] is not scheme:
            register(scheme)
    return found
