"""Texts and pickles of squat from versions before 0.2, converted to the options of this version.

Those versions had an option ``normalise`` in place of ``unit``, no guard, and other defaults. Every text and every pickle that they wrote
has ``normalise``, which identifies it. Its options keep their values, former defaults included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MARK = "normalise"
"""The option that only former texts and pickles have."""

DEFAULTS: dict[str, Any] = {"rank": 20, "subblock": 32, "rotate": "none", "queries": "pre", "guard": False}
"""Options whose default has changed, with the default before 0.2; enums as their texts."""


def respelled(options: Mapping[str, object]) -> Mapping[str, object]:
    """Return the options of a text or pickle under this version's names; with ``normalise``, ``unit`` and former defaults are set."""
    if MARK not in options:
        return options
    kept = {name: value for name, value in options.items() if name != MARK}
    unit = "queries" if options[MARK] in (True, "True") else "none"
    return {**DEFAULTS, "unit": unit, **kept}
