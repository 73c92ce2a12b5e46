"""Calibration: caches with planes computed from queries, and a warning if a cache is filled without them."""

from __future__ import annotations

import logging

from kvcompile.runtime.forms.slot_groups import Group
from kvcompile.schemes import Scheme

log = logging.getLogger(__name__)


def calibrated(group: Group) -> set[Scheme]:
    """Return the schemes of a group that compute planes from the queries of the call that fills an empty cache."""
    return {item.plan.scheme for item in group.bindings if item.plan.scheme.calibrates(item.plan.spec)}


class UncalibratedWarner:
    """Warns, once for each graph, about a cache that is filled without calibrated planes."""

    def __init__(self) -> None:
        self.warned = False

    def missed(self, group: Group, why: str) -> None:
        """Warn if schemes of a group would have calibrated planes; ``why``: how the cache was filled without calibration."""
        schemes = calibrated(group)
        if not schemes or self.warned:
            return
        self.warned = True
        log.warning(
            "%s is calibrated by the queries of the compiled call that fills an empty cache; the cache at %s %s: its keys are encoded %s",
            ", ".join(sorted({scheme.name for scheme in schemes})), group.where, why,
            ", ".join(sorted({scheme.uncalibrated for scheme in schemes})),
        )
