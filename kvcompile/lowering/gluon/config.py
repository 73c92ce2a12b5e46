"""One Gluon decode kernel as data: what a site fixes, how its work is cut, and the cuts that were measured."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How work is cut: ``warps`` of a program, each with ``tokens`` of a tile; ``stages`` of its ring; ``programs`` a multiprocessor."""

    warps: int
    tokens: int
    stages: int
    programs: int

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        return self.warps * self.tokens


@dataclasses.dataclass(frozen=True)
class Merge:
    """How splits are merged: ``warps`` of a program, the ``channels`` that it merges, of ``slots`` at a time.

    ``overlap``: its programs begin while the last splits still run, and wait for them (CUDA capability 9.0 and later).
    """

    warps: int
    channels: int
    slots: int
    overlap: bool


@dataclasses.dataclass(frozen=True)
class GluonConfig:
    """The kernel's constants, its ``C``.

    ``rows``: columns of a product that are different query heads, 4 or 8, of which ``kept`` are written. ``lo``, ``keep``, ``sinks``,
    ``exact_newest``: which optional operands are there. ``ragged``: rows of the batch may differ in length. ``overlap``: see ``Merge``.
    """

    dim: int
    kv_heads: int
    group: int
    rows: int
    kept: int
    warps: int
    tokens: int
    stages: int
    page_rows: int
    lo: bool = False
    keep: bool = False
    sinks: bool = False
    exact_newest: bool = False
    ragged: bool = False
    overlap: bool = False


TOKENS_A_SPLIT = 256
"""Fewer tokens a split do not pay for its part of the merge."""

FEWEST_SPLITS = 16
"""Splits of short caches all the same: 1,024 tokens in 16 took 6.6 us, in 8 7.8."""

NUMBERS = 64
"""Partial sums that a thread of the merge holds at once."""

RAGGED = 8
"""How many times as long as the average a row may be and still be cut into pieces of the length that every other row's have."""

MOST_SPLITS = 256
"""Splits of a row, whatever the device."""


def splits_for(cut: TileConfig, pairs: int, multiprocessors: int, capacity: int) -> int:
    """Into how many programs the tokens of one batch row and kv head are cut; ``pairs``: how many of these there are."""
    wanted = multiprocessors * cut.programs // pairs
    enough = max(-(-capacity // TOKENS_A_SPLIT), FEWEST_SPLITS)
    return max(1, min(wanted, enough, -(-capacity // cut.tile), MOST_SPLITS))


def ragged_splits(splits: int, batch: int) -> int:
    """Splits of a batch whose rows may differ in length; a row of average length takes ``splits`` of them."""
    return min(splits * min(batch, RAGGED), max(splits, MOST_SPLITS))


def merge_for(cut: TileConfig, config: GluonConfig, pairs: int, multiprocessors: int, most: int) -> Merge:
    """How the slots of each pair of a batch row and kv head are merged; ``most``: what its splits can be, whatever the capacity.

    Few pairs are merged by many programs of few channels, each of which has all slots in flight at once. Nothing here depends on the
    capacity, so a store that grows compiles nothing anew.
    """
    channels = next((each for each in (32, 16) if pairs * config.dim // each >= multiprocessors // 2), 8)
    warps = 8 if channels == 8 else 4
    slots = 1 << (max(most * cut.warps, 16) - 1).bit_length()
    return Merge(warps, channels, min(slots, 256, NUMBERS * 32 * warps // (config.kept * channels)), config.overlap)
