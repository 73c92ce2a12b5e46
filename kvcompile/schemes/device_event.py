"""Events of a CUDA device, with the types that torch leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """Methods of ``torch.cuda.Event`` that are used, with their types."""

    def record(self) -> None:
        """Mark what the current stream was asked for until now."""

    def query(self) -> bool:
        """Whether the device has done what was marked."""

    def synchronize(self) -> None:
        """Wait until the device has done what was marked."""


def new_event() -> Event:
    """Return an event that nothing is marked by yet."""
    made: Callable[[], Event] = torch.cuda.Event
    return made()
