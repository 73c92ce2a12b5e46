"""Places of a pool, a cache that is read through a gather: which of them are read or written, as a sum of indices."""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from typing import Any

from torch import fx


@dataclass(frozen=True)
class Picked:
    """An index tensor whose values choose places: each counts ``weight`` times, and indexes a dim of ``size``.

    ``roles`` of its dims, '' for one of size one: B and T, N where it has one entry for every ``every`` tokens, O where
    its entries repeat with the token's place among these; in a write the letters of the dims that are written along.
    """

    node: fx.Node
    roles: tuple[str, ...]
    weight: int
    size: int
    wraps: bool
    """Whether negative values count from the end, as they do where a tensor is indexed."""
    every: int = 1


@dataclass(frozen=True)
class Running:
    """A dim of the pool whose index runs along with batch rows, tokens or what is written: ``weight`` * (index % ``size``)."""

    role: str
    weight: int
    size: int


@dataclass(frozen=True)
class Places:
    """Which places of a pool are read or written: ``first`` plus what every index tensor and every running dim adds."""

    picked: tuple[Picked, ...]
    running: tuple[Running, ...]
    first: int = 0
    dims: tuple[str, ...] = ()
    """Of a write: the role of every dim of what is written; K, D, KD, DK, '' for size one, a letter for what places run along."""
    select: tuple[tuple[int, int], ...] = ()
    """Of a write: dims of what is written of which this slot is one index."""
    shape: tuple[Any, ...] = field(default=(), compare=False)
    """Of a write: the sizes of what is written."""

    @property
    def along(self) -> tuple[str, ...]:
        """Return the letters of the dims that a write's places run along, in order."""
        return tuple(role for role in self.dims if role in set(string.ascii_lowercase))


@dataclass(frozen=True)
class BlockTable:
    """A cache that is read through a gather: its places lie in one row, in the order of its dims without heads and channels."""

    gather: fx.Node
    places: Places
    tokens: Any = field(compare=False)
    """How many tokens are gathered for every batch row, an int or a SymInt."""
