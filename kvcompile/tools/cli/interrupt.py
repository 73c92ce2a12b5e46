"""Ctrl-C in commands that start processes: only the command itself reacts to it, and ends the processes."""

from __future__ import annotations

import multiprocessing
import signal

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells give it to a command that SIGINT ended."""


def ignore_interrupts() -> None:
    """Ignore Ctrl-C in this process, a child: a terminal sends it to parent and child, and the child would print a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def kill_children() -> None:
    """End the processes that this one started through multiprocessing."""
    for child in multiprocessing.active_children():
        child.kill()
