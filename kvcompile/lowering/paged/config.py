"""One attention over the blocks of a pool as data: its operands, and the kernel chosen for them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from kvcompile import schemes
from kvcompile.lowering.decode.config import AttendConfig, Tile, plane_names
from kvcompile.lowering.decode.site import Machine, config_of
from kvcompile.lowering.decode.tiles import DECODE_ROWS, PROGRAMS_PER_MULTIPROCESSOR, choose_tiles
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.sizes import TensorSizes
from kvcompile.types import Role, SlotSpec

MOST_ITEMS = 256
"""The most items into which the tiles of all requests are divided, for each kv head: merging more would take longer than they save."""
WAVES = 3
"""How many times over the items are to fill the device, if one item for each request would fill more than half of it."""
MOST_PARTS = 1 << 28
"""The most bytes of partial sums; if items would need more, each request is one item, and its sums are in the rows of its queries."""
MOST_ROWS = 128
"""Number of query rows of a kv head from which on all calls get the same kernel."""


@dataclasses.dataclass(frozen=True)
class PagedAttend:
    """Operands of ``kvcompile::paged_attend``: the pool as planes [blocks, K, page, width], and the schemes' constant planes.

    ``q`` [T, H, D] is rotated if the pool stores rotated keys; ``block_table`` [R, N], ``lengths`` [R] and ``query_start`` [R + 1] are
    contiguous. ``max_length``: most tokens of a row; 0 for as many as the blocks of a row of ``block_table`` hold.
    """

    q: torch.Tensor
    keys: Sequence[torch.Tensor]
    key_tables: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    value_tables: Sequence[torch.Tensor]
    block_table: torch.Tensor
    lengths: torch.Tensor
    query_start: torch.Tensor
    max_queries: int
    key_scheme: str
    value_scheme: str
    value_dim: int
    scale: float
    softcap: float
    window: int
    sinks: torch.Tensor | None
    max_length: int = 0

    @property
    def kv_heads(self) -> int:
        """Number of kv heads."""
        return self.keys[0].shape[1]

    @property
    def page(self) -> int:
        """Number of tokens in a block."""
        return self.keys[0].shape[2]

    @functools.cached_property
    def planes(self) -> dict[str, torch.Tensor]:
        """The planes by the template's names, [blocks, 1, K, page, width] each; the second axis stands for the batch rows."""
        found: dict[str, torch.Tensor] = {}
        for letter, text, grown, constant, dim, role in (
            ("K", self.key_scheme, self.keys, self.key_tables, self.q.shape[2], Role.KEY),
            ("V", self.value_scheme, self.values, self.value_tables, self.value_dim, Role.VALUE),
        ):
            fmt = schemes.parse(text).format(SlotSpec(self.kv_heads, dim, grown[0].dtype, role))
            found |= plane_names(letter, [*(plane.unsqueeze(1) for plane in grown), *constant], fmt)
        return found


@dataclasses.dataclass(frozen=True)
class PagedConfig(AttendConfig):
    """A kernel over rows of blocks; ``window``: number of tokens that a query sees, 0 for all.

    ``splits`` is 1, since the device divides the tokens of each request into items.
    """

    window: int = 0

    def options(self) -> dict[str, object]:
        """Return the template's constants."""
        alone = self.tile.num_warps == 1
        return {
            **super().options(), "BY_TABLE": 1, "WINDOW": self.window, "OUT_ROW": self.kv_heads * self.group * (self.value_dim + 2),
            # A page is even, so two tokens of a pair are in one block.
            "NORM_PAIRS": int(self.norm_pairs), "KEY_SCALE_PAIRS": int(self.key_scale_pairs and alone),
            "VALUE_SCALE_PAIRS": int(self.value_scale_pairs and alone),
        }

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the tensors that the paged template with this configuration reads, in the order in which it takes them."""
        beside = {"HI": ("LENGTHS", "QUERY_START", "BLOCK_TABLE"), "LO": ()}
        return tuple(name for given in super().operands for name in beside.get(given, (given,)))


@dataclasses.dataclass(frozen=True)
class Cut:
    """The size of a launch: number of tiles of query rows, and number of items that the tokens of all requests are to fill (``target``)."""

    tiles: int
    target: int


@functools.lru_cache(maxsize=16)
def machine_of(device: torch.device) -> Machine:
    """Return the sizes of a CUDA device; cached, since every step asks for them."""
    return Machine.of(device)


def paged_config(given: PagedAttend, machine: Machine, packed: bool) -> PagedConfig:
    """Return the configuration of the kernel for the operands; ``packed``: the kernel may use inline PTX."""
    q = given.q.transpose(0, 1).unsqueeze(0)
    lo = given.lengths.unsqueeze(1) if given.window else None
    keys, values = ([plane.unsqueeze(1) for plane in planes] for planes in (given.keys, given.values))
    operands = AttendOperands(
        q, [*keys, *given.key_tables], [*values, *given.value_tables], given.lengths.unsqueeze(1), lo, None, None, None, given.key_scheme,
        given.value_scheme, given.scale, given.softcap, given.value_dim,
    )
    nodes = {"Q": q, **given.planes}
    found = config_of(operands, nodes, TensorSizes())
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    base = PagedConfig(**fields | {
        "one_query": given.max_queries == 1, "packed": packed and found.packed, "window": given.window, "paged": True,
        "page_rows": given.page,
    })
    (made, *_) = choose_tiles(base, query_rows(given, base.group), None, False, machine.shared_memory)
    assert isinstance(made, PagedConfig)
    tile = for_one_query(made) if made.one_query else for_several_queries(made)
    return dataclasses.replace(made, tile=fitted(tile, given.page))


def query_rows(given: PagedAttend, group: int) -> int:
    """Return the number of query rows per kv head for which the kernel is chosen.

    It is ``group`` if each request has one query; for more queries it is rounded up to a power of two, at most ``MOST_ROWS``, so that few
    kernels serve all calls.
    """
    return group if given.max_queries == 1 else min(MOST_ROWS, 1 << (given.max_queries * group - 1).bit_length())


def for_one_query(config: PagedConfig) -> Tile:
    """Return the tile for one query a request: the kernel's own tile or, if every code takes a byte, a tile of a single warp.

    On an H200 the single warp is 6 to 21% faster over 16 rows of 32K tokens or 64 rows of mixed lengths, and up to 5% slower over one row
    of 128K.
    """
    tile, (key, value) = config.tile, config.plans
    bytes_alone = key.coded and value.coded and min(piece.block for piece in (*key.pieces, *value.pieces)) >= 64
    if not bytes_alone or tile.block_r > 8 or tile.num_warps == 1 or config.dtype.itemsize > 2:
        return tile
    return Tile(32, tile.block_r, True, 1, 3) if key.static and value.static else Tile(64, tile.block_r, True, 1, 2)


def for_several_queries(config: PagedConfig) -> Tile:
    """Return the tile for several queries a request: the kernel's own tile, or a smaller one if its rows would not fit the registers.

    The choice was made from kernels that were compiled for sm_90 with heads of 128 channels, and was never timed.
    """
    tile, (key, value) = config.tile, config.plans
    if key.picked or value.paired:
        return tile if tile.block_r <= 8 else dataclasses.replace(tile, block_r=8, copies=1, picked=0, num_stages=2)
    if not (key.coded or value.coded) or tile.block_r < 32 or tile.block_t < 32 or config.dtype.itemsize > 2:
        return tile
    if min(piece.block for piece in (*key.pieces, *value.pieces)) < 64:
        return Tile(32, 32, True, 2, 3) if tile.block_r == 32 else Tile(32, 64, False, 4, 3)
    return Tile(64, 64, False, 4, 3) if tile.block_r > 64 else tile


def fitted(tile: Tile, page: int) -> Tile:
    """Return the tile with a number of tokens that divides a page, or is a multiple of pages."""
    if page % tile.block_t and tile.block_t % page:
        return dataclasses.replace(tile, block_t=page & -page)
    return tile


def cut_for(config: PagedConfig, given: PagedAttend, machine: Machine, resident: int | None = None) -> Cut:
    """Return the size of a launch; it follows from shapes alone, so nothing is read from the device.

    ``resident``: number of programs that run on a multiprocessor at a time; None to estimate it, where there is no device.
    """
    rows = given.max_queries * config.group
    tiles = -(-rows // config.tile.rows)
    programs = tiles * config.kv_heads
    resident = resident or PROGRAMS_PER_MULTIPROCESSOR.get(config.tile.num_warps, 2)
    target = max(1, min(MOST_ITEMS, machine.multiprocessors * resident // programs))
    if 2 * given.block_table.shape[0] > target:
        # Requests alone fill the device more than once: finer items end at about the same time.
        target = min(MOST_ITEMS, WAVES * target)
    if rows > DECODE_ROWS and programs >= machine.multiprocessors:
        target = 1
    parts = (target + given.block_table.shape[0]) * given.max_queries * config.kv_heads * config.group * (config.value_dim + 2) * 4
    return Cut(tiles, target if parts <= MOST_PARTS else 1)


def refusal(given: PagedAttend) -> str | None:
    """Return why the kernels cannot attend with these operands, so that the eager body must; None if they can."""
    if given.page % 16:
        return f"a page of {given.page} tokens is not a multiple of 16"
    if any(plane.data_ptr() % 16 for plane in (*given.keys, *given.values)):
        return "the pool does not begin at a multiple of 16 bytes"
    if not given.q.shape[0] or not given.block_table.numel() or given.max_queries < 1:
        return "there is no query, no row or no block"
    return None
