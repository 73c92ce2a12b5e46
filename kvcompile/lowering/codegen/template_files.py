"""Templates that are files: the text of several, one after the other, as one template."""

from __future__ import annotations

from pathlib import Path


def joined(module: str, *names: str) -> str:
    """The text of template files that stand beside a module, whose ``__file__`` is ``module``.

    Macros of one file are seen by those behind it; Inductor's environment has no loader that would include them.
    """
    beside = Path(module).parent
    return "".join((beside / f"{name}.jinja").read_text(encoding="utf-8") for name in names)
