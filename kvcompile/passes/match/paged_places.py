"""The slots of a pool (a paged cache, read through a gather) that a graph reads or writes, as a sum over indices."""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from typing import Any

from torch import fx


@dataclass(frozen=True)
class Picked:
    """An index tensor whose values, times ``weight``, are a summand of slot numbers; it indexes a dim of ``size``.

    ``roles`` of its dims, '' for size one: B rows, T tokens, N blocks (one entry for every ``every`` tokens), O offsets (entry t %
    ``every`` for token t). In a write they are the letters of the written dims.
    """

    node: fx.Node
    roles: tuple[str, ...]
    weight: int
    size: int
    wraps: bool
    """Whether negative values count from the end, as when a tensor is indexed with brackets."""
    every: int = 1


@dataclass(frozen=True)
class Running:
    """A dim of the pool that runs along with batch rows, tokens or a written dim (``role``).

    It adds ``weight`` * (index % ``size``) to slot numbers.
    """

    role: str
    weight: int
    size: int


@dataclass(frozen=True)
class Places:
    """The slots of a pool that are read or written: ``first`` plus a summand of every index tensor and every running dim."""

    picked: tuple[Picked, ...]
    running: tuple[Running, ...]
    first: int = 0
    dims: tuple[str, ...] = ()
    """Roles of a write's dims: K, D, KD, DK, '' for size one or a selected index, a lowercase letter for a dim that slots vary along."""
    select: tuple[tuple[int, int], ...] = ()
    """(dim, index) of a write's dims in which this cache slot is a single index."""
    shape: tuple[Any, ...] = field(default=(), compare=False)
    """Sizes of the written part."""

    @property
    def along(self) -> tuple[str, ...]:
        """Letters of a write's dims that slots vary along, in order."""
        return tuple(role for role in self.dims if role in set(string.ascii_lowercase))


@dataclass(frozen=True)
class BlockTable:
    """The read of a paged cache by a ``gather``; slots are numbered along the pool's dims other than heads and channels, in order."""

    gather: fx.Node
    places: Places
    tokens: Any = field(compare=False)
    """Tokens that are gathered for each batch row, an int or a SymInt."""
