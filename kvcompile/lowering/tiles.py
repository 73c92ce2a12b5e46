"""How one attention is cut into programs: tiles to choose from, and splits of the tokens.

Found on an H200 (see benchmarks/NOTES.md): with few rows, one warp a program and many programs win, since
nothing is exchanged between warps; with many rows, rows lie on the tall side of the MMA and four warps share
a tile. The first tile is what is used without autotuning.
"""

from __future__ import annotations

import dataclasses

from kvcompile.lowering.attend_config import AttendConfig, Tile

DECODE_ROWS = 32
"""Up to this many rows the tokens lie on the tall side."""

PROGRAMS_PER_MULTIPROCESSOR = 8
MAX_SPLITS = 128


def choose_tiles(base: AttendConfig, rows: int, page_rows: int | None, tuned: bool) -> list[AttendConfig]:
    """``base`` with each tile worth trying for ``rows`` rows; only the first unless ``tuned``."""
    tiles = _decode_tiles(base, rows) if rows <= DECODE_ROWS else _extend_tiles(base)
    tiles = [tile for tile in tiles if page_rows is None or not (page_rows % tile.block_t and tile.block_t % page_rows)]
    return [dataclasses.replace(base, tile=tile) for tile in (tiles if tuned else tiles[:1])]


def _decode_tiles(base: AttendConfig, rows: int) -> list[Tile]:
    block_r = max(8, 1 << (rows - 1).bit_length())
    return [
        Tile(64, block_r, True, warps, stages) for warps, stages in ((1, 2), (1, 3), (2, 2), (4, 3))
    ] + [Tile(128, block_r, True, warps, stages) for warps, stages in ((1, 2), (2, 2), (4, 2))]


def _extend_tiles(base: AttendConfig) -> list[Tile]:
    if base.key_dim > 128 or base.value_dim > 128 or base.dtype.itemsize > 2:
        return [Tile(32, 64, False, 4, 2), Tile(64, 32, False, 4, 2)]
    return [Tile(64, 64, False, 4, 2), Tile(64, 128, False, 8, 2), Tile(64, 128, False, 4, 2), Tile(64, 64, False, 4, 3)]


def splits_for(config: AttendConfig, rows: int, pairs: int, multiprocessors: int) -> int:
    """Into how many programs the tokens of one tile of rows are split.

    ``pairs`` is batch times kv heads. Fixed when compiled, since the length is known on the device only; a
    split without tokens costs its launch and a row of neutral numbers.
    """
    tiles = -(-rows // config.tile.block_r)
    if tiles * pairs >= multiprocessors:
        resident = PROGRAMS_PER_MULTIPROCESSOR if rows <= DECODE_ROWS else 1
    else:
        resident = PROGRAMS_PER_MULTIPROCESSOR
    return max(1, min(MAX_SPLITS, multiprocessors * resident // config.tile.num_warps // (tiles * pairs)))
