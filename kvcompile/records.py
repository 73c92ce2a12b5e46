"""Records: the stages of each compiled graph, kept for ``explain`` and ``dump``, at most ``KEPT`` of them."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TypeVar

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.plan.plan import Plan
from kvcompile.report import GraphReport
from kvcompile.variants import Variants

KEPT = 256
"""Graphs that a backend keeps records of. Older graphs still run, but can no longer be dumped or reused for an equal graph."""

Value = TypeVar("Value")


class Newest(OrderedDict[str, Value]):
    """A dict of at most ``KEPT`` entries: a new key drops the oldest one. Setting a known key again does not make it newer."""

    def __setitem__(self, key: str, value: Value) -> None:
        super().__setitem__(key, value)
        while len(self) > KEPT:
            self.popitem(last=False)


@dataclass(frozen=True)
class GraphRecord:
    """One graph's report and its pipeline stages; None for a stage that was not reached. Holds no argument of a call."""

    report: GraphReport
    captured: Captured | None = None
    planned: Plan | None = None
    variants: Variants | None = None
    """The rewritten graphs; None if no site was rewritten."""


def records() -> deque[GraphRecord]:
    """Return an empty deque that keeps the newest ``KEPT`` records."""
    return deque(maxlen=KEPT)
