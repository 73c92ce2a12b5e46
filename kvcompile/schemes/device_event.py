"""CUDA events with type annotations, which torch's own class lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """The methods of ``torch.cuda.Event`` that we use."""

    def record(self) -> None:
        """Record the event after the work queued on the current stream so far."""

    def query(self) -> bool:
        """Return whether the work before the event is done."""

    def synchronize(self) -> None:
        """Wait until the work before the event is done."""


def new_event() -> Event:
    """Return a new event, not recorded yet."""
    made: Callable[[], Event] = torch.cuda.Event
    return made()
