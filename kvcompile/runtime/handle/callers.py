"""Callers: the line of the user's program that called an operation on a cache, for warnings."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

OURS = tuple(str(Path(file).resolve().parent) for file in (torch.__file__, Path(__file__).parents[1]))
"""Folders of frames that are not the user's: torch and this package."""


def user_line() -> str:
    """Return "file:line in function" of the innermost frame outside of torch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(OURS) and not name.startswith("<"):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"
