"""Texts and pickles of squat that versions before 0.2 wrote, in the options of this version.

Those versions had an option ``normalise`` in place of ``unit``, no guard, and other defaults. Every text that their ``Scheme.spec`` wrote,
and every pickle, has ``normalise``, which identifies it. It keeps all values that it had, the former defaults included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MARK = "normalise"
"""The option that only former texts and pickles have."""

DEFAULTS: dict[str, Any] = {"rank": 20, "subblock": 32, "rotate": "none", "queries": "pre", "guard": False}
"""Options whose default has changed, with the default before 0.2; enums as their texts."""


def respelled(options: Mapping[str, object]) -> Mapping[str, object]:
    """Return the options of a text or pickle by this version's names; options with ``normalise`` get ``unit`` and the former defaults."""
    if MARK not in options:
        return options
    kept = {name: value for name, value in options.items() if name != MARK}
    unit = "queries" if options[MARK] in (True, "True") else "none"
    return {**DEFAULTS, "unit": unit, **kept}
