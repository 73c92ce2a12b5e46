"""Dependence: which attentions' results change with their queries in a trial call.

A query that sees one token gives that token's value, whatever its scores are: such a call hides every error in scores. Whether a call is of
that kind follows from values of masks and positions, so it is measured: the program runs again with other queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcompile.validation.arguments import Arguments

FACTOR = -0.5
"""What queries are multiplied by in the second run."""
MOVED = 1e-3
"""The least change, relative to the largest result, that counts: ten times what rounding may make."""


class Dependence:
    """The results of a program, by index, that changed with its queries in some compared call."""

    def __init__(self, arguments: Arguments, outputs: int) -> None:
        inputs = arguments.part.captured.inputs
        self.queries = [entry.index for entry in inputs if entry.node in arguments.queries]
        self.outputs, self.seen = outputs, set[int]()

    @property
    def whole(self) -> bool:
        """Whether every result changed; True if no queries are arguments, so that nothing can be measured."""
        return not self.queries or len(self.seen) == self.outputs

    def other(self, args: Sequence[Any]) -> list[Any]:
        """Return copies of a call's arguments with other queries."""
        made = [item.clone() if isinstance(item, torch.Tensor) else item for item in args]
        return [item * FACTOR if index in self.queries else item for index, item in enumerate(made)]

    def add(self, expected: Sequence[Any], found: Sequence[Any]) -> None:
        """Record which results of a call, ``expected``, differ from those of its ``other`` arguments."""
        self.seen |= {index for index in range(self.outputs) if index not in self.seen and _moved(expected[index], found[index])}


def _moved(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Return whether two results differ by more than rounding, where both are finite."""
    both = expected.isfinite() & found.isfinite()
    before, after = (item.double().masked_fill(~both, 0) for item in (expected, found))
    return bool(((before - after).abs() > MOVED * before.abs().amax().clamp(min=MOVED)).any()) if both.numel() else False
