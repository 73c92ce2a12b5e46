"""One Gluon decode kernel as data: constants of a site, tile sizes, splits, and the merge."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Tile sizes: ``warps`` a program, ``tokens`` a warp; ``stages`` of the shared-memory ring; ``programs`` a multiprocessor."""

    warps: int
    tokens: int
    stages: int
    programs: int

    @property
    def tile(self) -> int:
        """Number of tokens in a tile."""
        return self.warps * self.tokens


@dataclasses.dataclass(frozen=True)
class Merge:
    """Sizes of the merge of splits: ``warps`` of a program, the ``channels`` that it merges, the ``slots`` that it merges at a time.

    ``overlap``: its programs start while the last splits still run, and wait for them (CUDA capability 9.0 and later).
    """

    warps: int
    channels: int
    slots: int
    overlap: bool


@dataclasses.dataclass(frozen=True)
class GluonConfig:
    """The kernel's compile-time constants, its ``C``.

    ``rows``: product columns with different query heads, 4 or 8; ``kept``: number of them that are written. ``lo``, ``keep``, ``sinks``,
    ``exact_newest``: whether this optional operand is given. ``ragged``: batch rows may differ in length. ``overlap``: see ``Merge``.
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
"""Fewest tokens of a split: shorter ones cost more in the merge than they gain."""

FEWEST_SPLITS = 16
"""Splits of short caches, whatever TOKENS_A_SPLIT: 1,024 tokens took 6.6 us in 16 splits, 7.8 us in 8."""

NUMBERS = 64
"""Partial sums that a thread of the merge holds in registers."""

RAGGED = 8
"""A row up to this many times as long as the average is cut into splits of average length; a longer row's splits are longer."""

MOST_SPLITS = 256
"""Most splits of a row on any device."""


def splits_for(cut: TileConfig, pairs: int, multiprocessors: int, capacity: int) -> int:
    """Return the number of splits for one batch row and kv head; ``pairs``: number of (batch row, kv head); ``capacity``: tokens."""
    wanted = multiprocessors * cut.programs // pairs
    enough = max(-(-capacity // TOKENS_A_SPLIT), FEWEST_SPLITS)
    return max(1, min(wanted, enough, -(-capacity // cut.tile), MOST_SPLITS))


def ragged_splits(splits: int, batch: int) -> int:
    """Return the largest number of splits of one batch row, if rows differ in length and a row of average length takes ``splits``."""
    return min(splits * min(batch, RAGGED), max(splits, MOST_SPLITS))


def merge_for(cut: TileConfig, config: GluonConfig, pairs: int, multiprocessors: int, most: int) -> Merge:
    """Return the sizes of the merge; ``pairs``: number of (batch row, kv head); ``most``: most splits at any capacity.

    For few pairs, many programs merge few channels each, with all slots in flight at once. Nothing here depends on the capacity, so a
    store that grows compiles nothing again.
    """
    channels = next((each for each in (32, 16) if pairs * config.dim // each >= multiprocessors // 2), 8)
    warps = 8 if channels == 8 else 4
    slots = 1 << (max(most * cut.warps, 16) - 1).bit_length()
    return Merge(warps, channels, min(slots, 256, NUMBERS * 32 * warps // (config.kept * channels)), config.overlap)
