"""Kernel templates in files: several are concatenated to one template."""

from __future__ import annotations

from pathlib import Path


def joined(module: str, *names: str) -> str:
    """Return the concatenated text of the ``.jinja`` files ``names`` in the folder of ``module``, a ``__file__``.

    A file sees the macros of those before it; Inductor's jinja environment has no loader for includes.
    """
    beside = Path(module).parent
    return "".join((beside / f"{name}.jinja").read_text(encoding="utf-8") for name in names)
