"""Tile sizes to choose from for one attention, and splits of its tokens.

Found on an H200 (benchmarks/NOTES.md). With few rows (decode) the tokens are the tall side of the MMA. Four
warps share a tile if value chunks are tall enough to give each its own rows; narrow chunks (scales for
small groups) are repeated by every warp, so one warp a program wins. With many rows (prefill, drafts)
the rows are the tall side. Without autotuning, the first tile is used.
"""

from __future__ import annotations

import dataclasses

from kvcompile.lowering.codegen.prmt_key_lookup import RUN
from kvcompile.lowering.codegen.shared_tables import plane_bytes
from kvcompile.lowering.codegen.smem_value_lookup import pair_bytes
from kvcompile.lowering.decode.config import AttendConfig, Bias, Tile

DECODE_ROWS = 32
"""Most rows for which the tokens are the tall side."""

PROGRAMS_PER_MULTIPROCESSOR = {4: 4, 2: 8, 1: 8}
"""Programs to aim for on each multiprocessor, by warps a program."""

SHIFTED_PROGRAMS = 12
"""Programs per multiprocessor for SHIFTED values, whose tiles of 32 tokens take 168 registers a thread."""

PICKED = 1
"""Scales of a token, of four, whose 4-bit values are looked up in registers: this keeps loads and integer units equally busy."""

LOOKUP_ROWS = 16
"""Most rows of a tile that looks up levels: with more, sums and queries spill to local memory."""

UNASKED = 48 << 10
"""Shared memory in bytes that a launch gets without opting in for more; Triton's opt-in does not count memory that assembly declares."""

LATENT = 256
"""Channels above which keys are a latent and not a head; tiles are then chosen by shared memory alone (compiled, never timed)."""

ONE_PASS = 64
"""Splits that Inductor merges in one pass over registers."""

SHORT = 8192
"""Tokens up to which more splits than ONE_PASS do not pay."""

RAGGED = 8
"""A row up to this many times as long as the average is cut into splits of average length; a longer row's splits are longer."""

MAX_SPLITS = {4: ONE_PASS, 2: ONE_PASS, 1: 2 * ONE_PASS}
"""Most splits, by warps a program: a single warp hides less latency, so more programs pay for their merge."""


def choose_tiles(base: AttendConfig, rows: int, page_rows: int | None, tuned: bool, shared_memory: int) -> list[AttendConfig]:
    """Return ``base`` with each tile to try for ``rows`` rows that fits ``shared_memory`` bytes; only the first unless ``tuned``.

    If none is known to fit, the one with the fewest tokens.
    """
    # Kernels that look up levels take few rows; more rows take several tiles.
    tiles = _lookup_tiles(base, min(rows, LOOKUP_ROWS)) if looks_up(base) else []
    tiles = [tile for tile in tiles if declared(base, tile) + needed(base, tile) <= UNASKED]
    if not tiles:
        base = dataclasses.replace(base, key_generic=True, value_generic=True) if looks_up(base) else base
        tiles = _decode_tiles(base, rows) if rows <= DECODE_ROWS else _extend_tiles(base, rows)
    block = base.fold_block
    if block:
        # A fold serves one block of tokens.
        tiles = [dataclasses.replace(tile, block_t=min(tile.block_t, block)) if tile.tokens_first else tile for tile in tiles]
        tiles = list(dict.fromkeys(tiles))
    fitting = [tile for tile in tiles if page_rows is None or not (page_rows % tile.block_t and tile.block_t % page_rows)]
    # The last tile has the fewest tokens: try it even if the estimate exceeds the limit.
    fitting = [tile for tile in fitting if needed(base, tile) <= shared_memory] or fitting[-1:]
    return [dataclasses.replace(base, tile=tile) for tile in (fitting if tuned else fitting[:1])]


def looks_up(base: AttendConfig) -> bool:
    """Return whether keys or values are looked up by assembly, and not by a load from global memory for each element."""
    plain = max(base.key_dim, base.value_dim) > LATENT or base.dtype.itemsize > 2
    return not plain and any(plan.picked or plan.paired for plan in dataclasses.replace(base, tile=Tile(16, 8, True)).plans)


def needed(base: AttendConfig, tile: Tile) -> int:
    """Return a bound on a program's bytes of shared memory: words in flight, a decoded tile, queries, scores, reductions."""
    itemsize, row = base.dtype.itemsize, max(base.key_dim, base.value_dim)
    words = base.key_dim * base.key_word.itemsize + base.value_dim * base.value_word.itemsize
    if base.beside.tail:
        words = max(words, (base.key_dim + base.value_dim) * itemsize)
    scores = 2 * tile.block_t * tile.block_r * 4
    return tile.block_t * (max(1, tile.num_stages - 1) * words + row * itemsize) + tile.block_r * base.key_dim * itemsize + scores


def _lookup_tiles(base: AttendConfig, rows: int) -> list[Tile]:
    """Return tiles, best first, for a kernel that looks up levels: one warp, since every warp would look up the same levels.

    A tile has as many tokens as registers allow. ``rows``: query rows of a kv head.
    """
    block_r = max(8, 1 << (rows - 1).bit_length())
    key, value = dataclasses.replace(base, tile=Tile(16, block_r, True)).plans
    block_t = 32 if max(base.key_dim, base.value_dim) <= 128 else 16
    # Triton mistakes probabilities computed from joined columns and a byte mask for 4-bit numbers: it then lays out an operand of 16
    # tokens as one of 32, and half of the tokens count twice, the others never.
    cut_wide = block_t < 32 and (base.masks.keep or base.masks.bias in {Bias.BOOLEAN, Bias.REPLACING})
    copies = 2 if key.picked and 2 * rows <= block_r and not cut_wide else 1
    tile = Tile(block_t, block_r, True, 1, 3, copies)
    few = [tile, dataclasses.replace(tile, num_stages=2)]
    return [dataclasses.replace(tile, picked=PICKED), *few] if value.paired and value.bits == 4 else few


def declared(base: AttendConfig, tile: Tile) -> int:
    """Return an upper bound on the bytes of shared memory that inline assembly declares, for tables and for queries as integers.

    Triton does not count these bytes.
    """
    key, value = dataclasses.replace(base, tile=tile).plans
    size = 0
    if key.picked:
        statistics = max(RUN, 2 * (1 + key.zeros) * key.scales)
        size += key.scales * plane_bytes(key.bits) + 2 * tile.rows * (len(key.pieces) * RUN + statistics) + 2 * RUN
    if value.paired:
        size += value.scales * max(plane_bytes(value.bits), pair_bytes(value.bits))
    return size


def _decode_tiles(base: AttendConfig, rows: int) -> list[Tile]:
    block_r = max(8, 1 << (rows - 1).bit_length())
    # Plans depend on the tile: one that is taller than a block of tokens cannot fold the block's scales.
    key, value = dataclasses.replace(base, tile=Tile(min(base.fold_block or 64, 64), block_r, True)).plans
    wide, tall = Tile(128, block_r, True, 4, 2), Tile(64, block_r, True, 4, 3)
    single = [Tile(64, block_r, True, 1, 3), Tile(64, block_r, True, 1, 2)]
    if max(base.key_dim, base.value_dim) > LATENT:
        return [Tile(32 if base.dtype.itemsize == 2 else 16, block_r, True, 4, 2)]
    if base.dtype.itemsize > 2 or max(base.key_dim, base.value_dim) > 128:
        # Float32 or large heads: limited by shared memory.
        return [Tile(64, block_r, True, 4, 2), Tile(32, block_r, True, 4, 2), Tile(32, block_r, True, 2, 2), Tile(16, block_r, True, 4, 2)]
    if key.elements or value.elements:
        # Decoded in float32: limited by registers.
        return [Tile(32, block_r, True, 4, 2), Tile(32, block_r, True, 2, 2), Tile(64, block_r, True, 4, 2)]
    if key.folded or value.shifted:
        return [Tile(32, block_r, True, 1, 3), Tile(32, block_r, True, 1, 2), Tile(32, block_r, True, 1, 4)]
    if not key.coded and not value.coded:
        return [wide, tall, Tile(64, block_r, True, 2, 3), *single]
    if min(piece.block for piece in value.pieces) >= 64:
        return [tall, *single, Tile(64, block_r, True, 2, 3)]
    return [Tile(32, block_r, True, 1, 3), *single, Tile(64, block_r, True, 2, 3), Tile(128, block_r, True, 2, 3)]


def _extend_tiles(base: AttendConfig, rows: int) -> list[Tile]:
    if max(base.key_dim, base.value_dim) > LATENT:
        return [Tile(32 if base.dtype.itemsize == 2 else 16, 32, False, 4, 2)]
    if base.dtype.itemsize > 2 or max(base.key_dim, base.value_dim) > 128:
        return [Tile(32, 64, False, 4, 2), Tile(64, 32, False, 4, 2), Tile(16, 32, False, 4, 2)]
    key, value = base.plans
    square, turned = Tile(64, 64, False, 4, 3), Tile(64, 64, True, 4, 3)
    if not key.coded and not value.coded:
        return [square, Tile(64, 128, False, 8, 3), Tile(32, 128, False, 4, 3)]
    # Each tile of rows unpacks again, so tiles have many rows; with tokens first, codes stay in registers.
    narrow = min(piece.block for piece in (*key.pieces, *value.pieces)) < 64
    many = [Tile(32, 128, narrow, 4, 3), Tile(32, 128, not narrow, 4, 3)]
    return [turned, square, *many] if rows <= 64 else [*many, turned, square]


def writes_directly(config: AttendConfig, splits: int) -> bool:
    """Return whether the kernel writes the result itself: one split, and values in one block."""
    return splits == 1 and len(config.plans[1].pieces) == 1


def splits_for(config: AttendConfig, rows: int, pairs: int, multiprocessors: int, tokens: int) -> int:
    """Return the number of splits of the tokens for one tile of rows.

    ``pairs``: batch times kv heads. Fixed when compiled, since only the device knows the length; a
    split without tokens costs its launch and a row of neutral numbers, so a cache that was short when compiled
    (``tokens``, a hint) gets fewer: 10% faster there, 8% slower once it has grown to 128K.
    """
    programs = -(-rows // config.tile.rows) * pairs
    # Full-precision tokens are a split of their own.
    own = int(config.beside.tail)
    if rows > DECODE_ROWS and programs >= multiprocessors:
        return 1 + own
    resident = PROGRAMS_PER_MULTIPROCESSOR.get(config.tile.num_warps, 2)
    if config.tile.num_warps == 1 and config.plans[1].shifted:
        resident = SHIFTED_PROGRAMS
    wanted = multiprocessors * resident // programs
    most = ONE_PASS if tokens <= SHORT else MAX_SPLITS.get(config.tile.num_warps, ONE_PASS)
    splits = max(1 + own, min(most, wanted + own))
    return foldable(splits)


def folds(splits: int) -> int:
    """Return into how many equal parts of at most ``ONE_PASS`` splits the merge divides the splits; parts are added elementwise."""
    return -(-splits // ONE_PASS)


def foldable(splits: int) -> int:
    """Return the largest number of splits, at most ``splits``, that the merge can divide into ``folds(splits)`` equal parts.

    A prime number, for example, could only be divided into parts of one split.
    """
    return splits - splits % folds(splits)


def ragged_splits(config: AttendConfig, splits: int, batch: int) -> tuple[int, int]:
    """Return (splits, ``shares``) for batch rows that may differ in length; ``splits``: those for rows of equal length.

    Long rows then have more splits than a row of average length, which uses ``shares``. A split that a row does not use writes neutral
    numbers immediately. If rows need no further splits, ``splits`` is returned with 0 shares: with few splits per row the device has more
    programs than it can hold anyway, and starts the next one when one ends.
    """
    own = int(config.beside.tail)
    mean = splits - own
    masks = config.masks
    if not config.one_query or mean < 2 or batch < 2 or not (masks.hi_per_batch or (masks.lo_per_batch and masks.lo)):
        return splits, 0
    most = ONE_PASS if 2 * mean <= ONE_PASS else 2 * ONE_PASS
    wanted = foldable(min(mean * min(batch, RAGGED) + own, most))
    return (wanted, mean) if wanted > splits else (splits, 0)
