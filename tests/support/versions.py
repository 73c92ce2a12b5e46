"""Flags of the oldest supported library versions, for tests of what those cannot do themselves."""

from __future__ import annotations

from importlib.metadata import version


def _before(library: str, release: tuple[int, int]) -> bool:
    major, minor = version(library).split(".")[:2]
    return (int(major), int(minor)) < release


OLD_TRANSFORMERS = _before("transformers", (5, 23))
OLD_TORCH = _before("torch", (2, 12))
