"""Processes that compile side by side take turns on the device while they are timed, by a lock on a file."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(path: Path | None) -> Iterator[None]:
    """Nobody else who waits for the same file runs meanwhile; without a file nobody waits."""
    if path is None:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
