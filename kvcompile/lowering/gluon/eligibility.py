"""Facts that decide whether the Gluon kernel is chosen: a compilation's settings, the device, an attention of one token."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from kvcompile.settings import Gluon

MEASURED_ON = (9, 0)
"""CUDA capability on which the kernel was measured."""

LEAST_CAPABILITY = (8, 0)
"""First CUDA capability with the kernel's instructions."""

MOST_HEADS = 8
"""Most query heads of a kv head: columns of one product."""


@dataclass(frozen=True)
class GluonSettings:
    """Settings of a compilation: use of the Gluon kernel, and whether steps are replayed as CUDA graphs."""

    setting: Gluon = Gluon.MEASURED
    replayed: bool = False

    @property
    def open(self) -> bool:
        """Whether the kernel is considered: without CUDA graphs, its launch from Python costs more than it gains."""
        return self.setting is Gluon.ALWAYS or (self.setting is Gluon.MEASURED and self.replayed)


_chosen: ContextVar[GluonSettings] = ContextVar("kvcompile_gluon")


@contextlib.contextmanager
def choosing(choice: GluonSettings) -> Iterator[None]:
    """Make lowerings and descriptions in the context use ``choice``."""
    token = _chosen.set(choice)
    try:
        yield
    finally:
        _chosen.reset(token)


@dataclass(frozen=True)
class SingleTokenFacts:
    """Facts of an attention of one new token: query heads per kv head, softcap, the device's capability, None without a device.

    ``measured``: whether the device must be one on which the kernel was measured.
    """

    group: int
    softcap: float
    capability: tuple[int, int] | None
    measured: bool

    def gap(self) -> str | None:
        """Return why the kernel does not support this attention; None if the kernel supports it."""
        if not available():
            return "this Triton has none"
        if self.capability is None or self.capability < LEAST_CAPABILITY or (self.measured and self.capability != MEASURED_ON):
            found = "none" if self.capability is None else ".".join(map(str, self.capability))
            return f"not measured on CUDA capability {found}"
        if self.group > MOST_HEADS:
            return f"{self.group} query heads a kv head"
        return "a softcap" if self.softcap > 0 else None


def single_token_facts(group: int, softcap: float) -> SingleTokenFacts | None:
    """Return the facts of an attention of one new token, None if this compilation does not consider the kernel."""
    choice = _chosen.get(GluonSettings())
    if not choice.open or torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return SingleTokenFacts(group, float(softcap), capability, choice.setting is Gluon.MEASURED)


def available() -> bool:
    """Return whether this Triton has Gluon."""
    try:
        return importlib.util.find_spec("triton.experimental.gluon") is not None
    except ImportError:
        return False
