"""How one attention is cut into programs: tiles to choose from, and splits of the tokens.

Found on an H200 (benchmarks/NOTES.md). With few rows (decode) the tokens lie on the tall side of the MMA. Four
warps share a tile where value chunks are tall enough to give each its own rows; narrow chunks (scales for
small groups) are repeated by every warp, so there one warp a program wins. With many rows (prefill, drafts)
the rows lie on the tall side. The first tile is what is used without autotuning.
"""

from __future__ import annotations

import dataclasses

from kvcompile.lowering.codegen.prmt_key_lookup import RUN
from kvcompile.lowering.codegen.shared_tables import plane_bytes
from kvcompile.lowering.codegen.smem_value_lookup import pair_bytes
from kvcompile.lowering.decode.config import AttendConfig, Bias, Tile

DECODE_ROWS = 32
"""Up to this many rows the tokens lie on the tall side."""

PROGRAMS_PER_MULTIPROCESSOR = {4: 4, 2: 8, 1: 8}
"""Programs to aim for on each multiprocessor, by warps a program."""

SHIFTED_PROGRAMS = 12
"""The same where values are decoded by one multiply-add: tiles of 32 tokens hold 168 registers a thread."""

PICKED = 1
"""Scales of a token whose 4-bit values are picked in registers, out of four: by count, what keeps loads and integer units equally busy."""

LOOKUP_ROWS = 16
"""Rows of a tile that looks levels up: with more, sums and queries are in local memory."""

UNASKED = 48 << 10
"""Bytes of shared memory that a launch may have without asking for more, and who asks counts none that assembly declares."""

LATENT = 256
"""Channels above which a tile of tokens is no head's but a latent's, and shared memory decides alone (compiled, never timed)."""

ONE_PASS = 64
"""Splits that Inductor merges in one pass over registers."""

SHORT = 8192
"""Tokens up to which more splits than one pass merges do not pay."""

RAGGED = 8
"""How many times as long as the average a row may be and still be cut into pieces of the same length as every other row."""

MAX_SPLITS = {4: ONE_PASS, 2: ONE_PASS, 1: 2 * ONE_PASS}
"""By warps a program: a single warp hides less latency, so more programs pay for their merge."""


def choose_tiles(base: AttendConfig, rows: int, page_rows: int | None, tuned: bool, shared_memory: int) -> list[AttendConfig]:
    """``base`` with each tile worth trying for ``rows`` rows that fits ``shared_memory`` bytes; only the first unless ``tuned``."""
    # What looks levels up is made for few rows: many take turns.
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
    # The last one holds the fewest tokens: if the estimate is too high for it, the compiler has the last word.
    fitting = [tile for tile in fitting if needed(base, tile) <= shared_memory] or fitting[-1:]
    return [dataclasses.replace(base, tile=tile) for tile in (fitting if tuned else fitting[:1])]


def looks_up(base: AttendConfig) -> bool:
    """Whether keys or values are looked up in tables by more than a load from memory for each."""
    plain = max(base.key_dim, base.value_dim) > LATENT or base.dtype.itemsize > 2
    return not plain and any(plan.picked or plan.paired for plan in dataclasses.replace(base, tile=Tile(16, 8, True)).plans)


def needed(base: AttendConfig, tile: Tile) -> int:
    """Bytes of shared memory of one program at most: words in flight, the wider tile decoded, queries, scores, and reductions."""
    itemsize, row = base.dtype.itemsize, max(base.key_dim, base.value_dim)
    words = base.key_dim * base.key_word.itemsize + base.value_dim * base.value_word.itemsize
    if base.beside.tail:
        words = max(words, (base.key_dim + base.value_dim) * itemsize)
    scores = 2 * tile.block_t * tile.block_r * 4
    return tile.block_t * (max(1, tile.num_stages - 1) * words + row * itemsize) + tile.block_r * base.key_dim * itemsize + scores


def _lookup_tiles(base: AttendConfig, rows: int) -> list[Tile]:
    """One warp, since each would look up the same values; as many tokens as its registers hold."""
    block_r = max(8, 1 << (rows - 1).bit_length())
    key, value = dataclasses.replace(base, tile=Tile(16, block_r, True)).plans
    block_t = 32 if max(base.key_dim, base.value_dim) <= 128 else 16
    # Triton takes probabilities that come of joined columns and of bytes of a mask for numbers of 4 bits: an operand of 16 tokens is
    # then cut as one of 32, and half of the tokens count twice, the others never.
    cut_wide = block_t < 32 and (base.masks.keep or base.masks.bias in {Bias.BOOLEAN, Bias.REPLACING})
    copies = 2 if key.picked and 2 * rows <= block_r and not cut_wide else 1
    tile = Tile(block_t, block_r, True, 1, 3, copies)
    few = [tile, dataclasses.replace(tile, num_stages=2)]
    return [dataclasses.replace(tile, picked=PICKED), *few] if value.paired and value.bits == 4 else few


def declared(base: AttendConfig, tile: Tile) -> int:
    """Bytes of shared memory that assembly declares for tables and integer queries at most, which Triton does not count."""
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
    # What is cheap depends on the tile: one that is taller than a block of tokens cannot fold the block's scales.
    key, value = dataclasses.replace(base, tile=Tile(min(base.fold_block or 64, 64), block_r, True)).plans
    wide, tall = Tile(128, block_r, True, 4, 2), Tile(64, block_r, True, 4, 3)
    single = [Tile(64, block_r, True, 1, 3), Tile(64, block_r, True, 1, 2)]
    if max(base.key_dim, base.value_dim) > LATENT:
        return [Tile(32 if base.dtype.itemsize == 2 else 16, block_r, True, 4, 2)]
    if base.dtype.itemsize > 2 or max(base.key_dim, base.value_dim) > 128:
        # Float32 or large heads: shared memory is what runs out.
        return [Tile(64, block_r, True, 4, 2), Tile(32, block_r, True, 4, 2), Tile(32, block_r, True, 2, 2), Tile(16, block_r, True, 4, 2)]
    if key.elements or value.elements:
        # Decoded in float32: registers are what runs out.
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
    # Unpacking is paid once a tile of rows, so rows are many; codes stay in registers where tokens come first.
    narrow = min(piece.block for piece in (*key.pieces, *value.pieces)) < 64
    many = [Tile(32, 128, narrow, 4, 3), Tile(32, 128, not narrow, 4, 3)]
    return [turned, square, *many] if rows <= 64 else [*many, turned, square]


def writes_directly(config: AttendConfig, splits: int) -> bool:
    """Whether the kernel writes the result itself: nothing to merge, and values in one block."""
    return splits == 1 and len(config.plans[1].pieces) == 1


def splits_for(config: AttendConfig, rows: int, pairs: int, multiprocessors: int, tokens: int) -> int:
    """Into how many programs the tokens of one tile of rows are split.

    ``pairs`` is batch times kv heads. Fixed when compiled, since the length is known on the device only; a
    split without tokens costs its launch and a row of neutral numbers, so a cache that was short when compiled
    (``tokens``, a hint) gets fewer: 10% faster there, 8% slower once it has grown to 128K.
    """
    programs = -(-rows // config.tile.rows) * pairs
    # Tokens that are not encoded are a split of their own.
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
    """How many parts of equal length, of at most ``ONE_PASS`` splits each, the merge folds onto each other."""
    return -(-splits // ONE_PASS)


def foldable(splits: int) -> int:
    """The most splits, of at most ``splits``, that fold: the merge has a term for each part, and a prime number a part for each split."""
    return splits - splits % folds(splits)


def ragged_splits(config: AttendConfig, splits: int, batch: int) -> tuple[int, int]:
    """Splits and ``shares`` where rows may differ in length: more splits than a row of average length takes, for those that are longer.

    A split that a row does not take writes a row of neutral numbers, at once. Where every row has one program there is nothing to
    share out: then the device has more programs than it can hold, and takes the next one when one ends.
    """
    own = int(config.beside.tail)
    mean = splits - own
    masks = config.masks
    if not config.one_query or mean < 2 or batch < 2 or not (masks.hi_per_batch or (masks.lo_per_batch and masks.lo)):
        return splits, 0
    most = ONE_PASS if 2 * mean <= ONE_PASS else 2 * ONE_PASS
    wanted = foldable(min(mean * min(batch, RAGGED) + own, most))
    return (wanted, mean) if wanted > splits else (splits, 0)
