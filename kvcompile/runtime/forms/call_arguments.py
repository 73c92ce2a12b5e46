"""Call arguments: one call of a captured graph, with the sizes and token positions read from its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcompile.passes.capture.capture import Captured
from kvcompile.runtime.forms.positions import TokenPositions


class SizeReader:
    """Evaluates the captured graph's symbolic sizes from the arguments of a call."""

    def __init__(self, captured: Captured) -> None:
        self.where: dict[Any, tuple[int, int | None]] = {}
        for index, fake in enumerate(captured.fakes):
            if isinstance(fake, torch.SymInt):
                self.where.setdefault(fake.node.expr, (index, None))
            elif isinstance(fake, torch.Tensor):
                for dim, size in enumerate(fake.shape):
                    if isinstance(size, torch.SymInt):
                        self.where.setdefault(size.node.expr, (index, dim))

    def value(self, expr: Any, args: tuple[Any, ...]) -> int:
        """Return the value of an expression over the graph's symbols for the arguments of a call."""
        values = {}
        for symbol in expr.free_symbols:
            index, dim = self.where[symbol]
            values[symbol] = int(args[index]) if dim is None else args[index].shape[dim]
        return int(expr.xreplace(values))


@dataclass(frozen=True)
class Call:
    """The arguments of one call; ``positions`` evaluates its token positions on first use.

    ``ends``, ``row_ends``: results of ``MaskExtent`` so far, the end of the visible tokens by cache tensor, and of each row's by mask.
    ``counters``: arguments that determine positions and that the graph itself advances (see ``store.counters``).
    """

    args: tuple[Any, ...]
    sizes: SizeReader
    positions: Callable[[], TokenPositions]
    ends: dict[Any, int] = field(default_factory=dict)
    row_ends: dict[Any, torch.Tensor | None] = field(default_factory=dict)
    counters: tuple[torch.Tensor, ...] = ()

    def read(self, size: Any) -> int:
        """Return an int or SymInt as an int."""
        return size if isinstance(size, int) else self.sizes.value(size.node.expr, self.args)
