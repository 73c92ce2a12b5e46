"""Tile sizes to choose from for attention of many rows, and splits of its tokens.

Found on an H200 (benchmarks/NOTES.md). A decoded tile is shared by as many rows as two warp groups hold
in registers: 256 if there are enough rows, otherwise 128 rows on twice the tokens. One program fills a multiprocessor.
"""

from __future__ import annotations

import dataclasses

from kvcompile.lowering.decode.config import Tile
from kvcompile.lowering.prefill.config import PrefillConfig
from kvcompile.lowering.prefill.decode_chunk import TOKENS as DECODED

FEWEST_ROWS = 65
"""Fewest query rows of a kv head for the prefill template; fewer go to the decode template."""

TALL_ROWS = 4096
"""Fewest rows of a kv head for tiles of 256 rows; with fewer rows, tiles of 128 fill more multiprocessors."""

MOST_SPLITS = 16
"""Most splits: more partial results cost more in the merge than they gain."""

TOKENS_PER_SPLIT = 512
"""Fewest tokens of a split."""


def choose_tiles(base: PrefillConfig, rows: int, shared_memory: int, tuned: bool) -> list[PrefillConfig]:
    """Return ``base`` with each tile that fits ``shared_memory`` bytes, best first; only the best unless ``tuned``."""
    key, value = base.slots
    tall, wide, small = Tile(64, 256, False, 8, 3), Tile(128, 128, False, 8, 3), Tile(64, 64, False, 4, 2)
    square = Tile(64, 128, False, 8, 3)
    rest = [dataclasses.replace(square, num_stages=2), small, dataclasses.replace(small, num_stages=1)]
    if max(base.key_dim, base.value_dim) > 128:
        tiles = [small, rest[-1]]
    elif not key.scaled and not value.scaled:
        tiles = [tall, wide, square, *rest] if rows >= 2 * tall.block_r else [square, wide, *rest]
    elif rows >= TALL_ROWS and not key.by_channel:
        tiles = [tall, wide, square, *rest]
    else:
        tiles = [wide, tall, square, *rest]
    fitting = [dataclasses.replace(base, tile=tile) for tile in tiles if needed(base, tile) <= shared_memory]
    return fitting if tuned else fitting[:1]


FEWEST_CHUNKED_ROWS = 1024
"""Fewest rows of a kv head for which codes are decoded once for all rows, a chunk at a time (``chunked``)."""

SCRATCH = 64 << 20
"""Target size in bytes of a chunk's two scratch buffers."""

CHUNKS = (8192, 32768)
"""Fewest and most tokens of a chunk; partial sums are read and written once for each chunk."""


def choose_cut(
    config: PrefillConfig, rows: int, batch: int, multiprocessors: int, shared_memory: int, capacity: int | None
) -> tuple[int, ...] | None:
    """Return the operand ``cut`` of ``kvcompile::attend_chunks`` for this attention; None if the template alone is to do it."""
    # The template does not support tables: their chunks are always decoded first.
    if rows < (FEWEST_CHUNKED_ROWS if config.fits else FEWEST_ROWS) or config.page_rows % DECODED or not config.chunks:
        return None
    chunk = chunk_for(config, batch, capacity)
    tiled = choose_tiles(dataclasses.replace(config, chunk=chunk).over_scratch(), rows, shared_memory, tuned=True)
    if not tiled:
        return None
    # One wave of programs without splits was faster than half as many with two splits (0.578 ms against 0.606 at 2048 rows).
    square = (each for each in tiled if each.tile.block_t == each.tile.block_r == 128)
    best = next(square, tiled[0]) if rows < TALL_ROWS else tiled[0]
    tile, splits = best.tile, splits_for(best, rows, batch * config.kv_heads, multiprocessors, chunk)
    return chunk, splits, tile.block_t, tile.block_r, tile.num_warps, tile.num_stages


def chunk_for(config: PrefillConfig, batch: int, capacity: int | None = None) -> int:
    """Return the number of tokens that are decoded at a time, so that the scratch has about SCRATCH bytes; within CHUNKS.

    ``capacity``: the store's capacity in tokens, by which the number is limited, rounded up to a whole tile; None if it is no constant.
    """
    each = batch * config.kv_heads * (config.key_dim + config.value_dim) * config.dtype.itemsize
    tokens = min(max(1 << (max(1, SCRATCH // each).bit_length() - 1), CHUNKS[0]), CHUNKS[1])
    return tokens if capacity is None else min(tokens, -(-capacity // DECODED) * DECODED)


def needed(config: PrefillConfig, tile: Tile) -> int:
    """Return the shared memory of one program in bytes: queries, words in flight, decoded tiles."""
    total = tile.block_r * config.key_dim * 2
    for slot in config.slots:
        tokens, decoded = tile.block_t, slot.dim * 2
        if not slot.scaled:
            total += max(1, tile.num_stages - 1) * tokens * decoded
            continue
        row = slot.words * 2 + (1 + slot.zeros) * slot.width * 2 // slot.block
        total += tokens * (decoded + max(1, tile.num_stages - 1) * row)
    return total


def splits_for(config: PrefillConfig, rows: int, pairs: int, multiprocessors: int, tokens: int) -> int:
    """Return into how many splits the tokens are divided, so that the programs of all splits fill the last wave best.

    ``rows``: query rows of a kv head; ``pairs``: batch times kv heads; ``tokens``: a hint, since only the device knows the length.
    """
    programs = -(-rows // config.tile.block_r) * pairs
    resident = multiprocessors * (8 // config.tile.num_warps)
    most = max(1, min(MOST_SPLITS, tokens // TOKENS_PER_SPLIT))
    return min(range(1, most + 1), key=lambda splits: -(-programs * splits // resident) / splits * (1 + 0.02 * (splits - 1)))
