"""Readings of an attention operand's dims: its batch rows and kv heads, from heads that are repeated, tiled or flattened."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import fx

from kvcompile.passes.graph.pullback import Trail

Columns = dict[str, tuple[np.ndarray, int]]
"""For each role, the sampled coordinates along it and its size."""


@dataclass(frozen=True)
class Read:
    """An attention operand to be read: its node, with a role and a size for every dim."""

    operand: fx.Node
    roles: tuple[str, ...]
    shape: tuple[int, ...]


def columns_of(trail: Trail, roles: tuple[str, ...], shape: tuple[int, ...]) -> Columns:
    """Return the sampled coordinates and the size of each role of an operand; a flattened BH stays one role."""
    return {role: (trail.here[:, dim], shape[dim]) for dim, role in enumerate(roles) if role}


@dataclass(frozen=True)
class Reading:
    """A reading of an operand's dims: coordinates and size of B, K, T and D, and whether kv heads are ``tiled`` rather than repeated.

    ``tiles``: how often the heads are tiled as a whole, after any repeats (``v.repeat(1, tiles, 1, 1)``).
    """

    columns: Columns
    tiled: bool = False
    tiles: int = 1


def candidates(columns: Columns, base: tuple[int, ...]) -> list[Reading]:
    """Return every reading of batch rows and kv heads, in the order of trying: H over all divisors, BH over all batch sizes.

    Empty for a flattened dim other than BH and BK. ``base``: the sizes of the cache tensor, one of which may be the batch.
    """
    rest = {role: value for role, value in columns.items() if role in {"T", "D", "B", "K"}}
    zero = np.zeros(len(next(iter(columns.values()))[0]), dtype=np.int64)
    flat = next((role for role in columns if len(role) > 1), None)
    if flat not in {None, "BH", "BK"}:
        return []
    if flat is not None:
        column, size = columns[flat]
        found = []
        # A flattened BK is read as the batch alone first.
        for batch in sorted({n for n in (*base, 1) if size % n == 0}, reverse=flat == "BK"):
            heads = size // batch
            outer = {**rest, "B": (column // heads, batch)}
            if flat == "BK":
                found.append(Reading({**outer, "K": (column % heads, heads)}))
            else:
                found += _grouped(outer, column % heads, heads)
        return found
    if "H" in columns:
        column, heads = columns["H"]
        return _grouped({"B": (zero, 1), **rest}, column, heads)
    given = Reading({"B": (zero, 1), "K": (zero, 1), **rest})
    column, heads = given.columns["K"]
    fewer = [kv for kv in range(heads - 1, 0, -1) if heads % kv == 0]
    return [given, *(Reading({**given.columns, "K": (column % kv, kv)}, tiles=heads // kv) for kv in fewer)]


def _grouped(rest: Columns, head: np.ndarray, heads: int) -> list[Reading]:
    """Return the readings of query heads as kv heads, over all divisors: repeated (h // G), then tiled (h % K), then repeated and tiled."""
    counts = [kv for kv in range(heads, 0, -1) if heads % kv == 0]
    repeated = [Reading({**rest, "K": (head // (heads // kv), kv)}) for kv in counts]
    tiled = [Reading({**rest, "K": (head % kv, kv)}, tiled=True) for kv in counts if 1 < kv < heads]
    both = [(kv, heads // kv // tiles, tiles) for kv in counts for tiles in counts if kv > 1 and tiles > 1 and heads // kv % tiles == 0]
    return repeated + tiled + [
        Reading({**rest, "K": (head // groups % kv, kv)}, tiles=tiles) for kv, groups, tiles in both if groups > 1
    ]
