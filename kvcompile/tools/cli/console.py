"""The console of all commands."""

from __future__ import annotations

import os
import sys

from rich.console import Console

PIPED_WIDTH = 120


def console() -> Console:
    """Return a console: rich on a terminal, ``PIPED_WIDTH`` columns without colour otherwise."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return Console()
    return Console(width=PIPED_WIDTH)
