"""Calibration: which caches have planes that are computed from queries, and a warning where a cache is filled without them."""

from __future__ import annotations

import logging

from kvcompile.runtime.groups import Group

log = logging.getLogger(__name__)


def calibrated(group: Group) -> tuple[str, ...]:
    """Return the names of a group's schemes that calibrate planes with the queries of the call that fills an empty cache."""
    return tuple(sorted({item.plan.scheme.name for item in group.bindings if item.plan.scheme.learns(item.plan.spec)}))


class Calibration:
    """Warns once for a graph that a cache is filled without calibrated planes."""

    def __init__(self) -> None:
        self.warned = False

    def missed(self, group: Group, why: str) -> None:
        """Warn where the schemes of a group would have calibrated planes; ``why`` says how the cache was filled without."""
        names = calibrated(group)
        if not names or self.warned:
            return
        self.warned = True
        log.warning(
            "%s learns from the queries of the compiled call that fills an empty cache; the cache at %s %s: its keys are encoded with "
            "lam=0, as kivi would", ", ".join(names), group.where, why,
        )
