"""Records: what the pipeline made of each graph, kept for ``explain`` and ``dump``, a bounded number of them."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TypeVar

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.plan.plan import Plan
from kvcompile.report import GraphReport
from kvcompile.variants import Variants

KEPT = 256
"""Graphs that a backend remembers. Those that are forgotten still run; they can no longer be dumped, nor be met again."""

Value = TypeVar("Value")


class Newest(OrderedDict[str, Value]):
    """A mapping of its newest ``KEPT`` entries."""

    def __setitem__(self, key: str, value: Value) -> None:
        super().__setitem__(key, value)
        while len(self) > KEPT:
            self.popitem(last=False)


@dataclass(frozen=True)
class GraphRecord:
    """One graph of the pipeline: its report, and its stages as far as it came. Holds no argument of a call."""

    report: GraphReport
    captured: Captured | None = None
    planned: Plan | None = None
    variants: Variants | None = None
    """The rewritten graphs, None where no site was rewritten."""


def records() -> deque[GraphRecord]:
    """An empty list of records that drops the oldest one when it is full."""
    return deque(maxlen=KEPT)
