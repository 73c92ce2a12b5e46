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
"""The CUDA capability of the devices that it was measured on."""

LEAST_CAPABILITY = (8, 0)
"""The first capability with its instructions."""

MOST_HEADS = 8
"""Query heads of a kv head: columns of one product."""


@dataclass(frozen=True)
class GluonSettings:
    """Settings of a compilation: of the kernel, and whether steps are replayed as CUDA graphs."""

    setting: Gluon = Gluon.MEASURED
    replayed: bool = False

    @property
    def open(self) -> bool:
        """True where the kernel is asked at all: its launch by Python costs more than it gains unless a step waits for the device."""
        return self.setting is Gluon.ALWAYS or (self.setting is Gluon.MEASURED and self.replayed)


_chosen: ContextVar[GluonSettings] = ContextVar("kvcompile_gluon")


@contextlib.contextmanager
def choosing(choice: GluonSettings) -> Iterator[None]:
    """Let lowerings and descriptions within go by ``choice``."""
    token = _chosen.set(choice)
    try:
        yield
    finally:
        _chosen.reset(token)


@dataclass(frozen=True)
class SingleTokenFacts:
    """Attention of one new token: query heads of a kv head, softcap, the device's capability, and whether it must be a measured one."""

    group: int
    softcap: float
    capability: tuple[int, int] | None
    measured: bool

    def gap(self) -> str | None:
        """Why the kernel does not know it, None where it does."""
        if not available():
            return "this Triton has none"
        if self.capability is None or self.capability < LEAST_CAPABILITY or (self.measured and self.capability != MEASURED_ON):
            found = "none" if self.capability is None else ".".join(map(str, self.capability))
            return f"not measured on CUDA capability {found}"
        if self.group > MOST_HEADS:
            return f"{self.group} query heads a kv head"
        return "a softcap" if self.softcap > 0 else None


def single_token_facts(group: int, softcap: float) -> SingleTokenFacts | None:
    """Describe an attention of one new token to the kernel, None where the compilation at hand does not ask it."""
    choice = _chosen.get(GluonSettings())
    if not choice.open or torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return SingleTokenFacts(group, float(softcap), capability, choice.setting is Gluon.MEASURED)


def available() -> bool:
    """Look for Gluon in the Triton at hand."""
    try:
        return importlib.util.find_spec("triton.experimental.gluon") is not None
    except ImportError:
        return False
