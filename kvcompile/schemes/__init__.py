"""The schemes: those of the core are defined here, others in ``extensions`` or in other packages; ``registry`` finds all by name."""

from __future__ import annotations

from typing import Any

from kvcompile.schemes import registry
from kvcompile.schemes.adaptive import Adaptive, Churn, Due, PendingNumbers, StoredLayer, StoredTokens
from kvcompile.schemes.asymmetric import Kivi
from kvcompile.schemes.base import AMAX, SPREAD, Planes, Prompt, Scheme
from kvcompile.schemes.certificate.policy import Certify
from kvcompile.schemes.dense import Dense
from kvcompile.schemes.nf4 import Nf4
from kvcompile.schemes.registry import BY_NAME, PLACES, loaded, make, parse, register, registered, settings
from kvcompile.schemes.symmetric import Fp8, Int4, Int8

CLASSES = {place.partition(":")[2]: name for name, place in PLACES.items()}
"""Scheme names by class name, so that an extension's class is imported when it is first asked for."""


def __getattr__(name: str) -> Any:
    if name == "SCHEMES":
        return registry.packaged()
    if name in CLASSES:
        return BY_NAME[CLASSES[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AMAX", "BY_NAME", "SPREAD", "Adaptive", "Certify", "Churn", "Dense", "Due", "Fp8", "Int4", "Int8", "Kivi", "Nf4", "PendingNumbers",
    "Planes", "Prompt", "Scheme", "StoredLayer", "StoredTokens", "loaded", "make", "parse", "register", "registered", "settings",
]
