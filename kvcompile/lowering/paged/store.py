"""The blocks of a pool that a compiled graph keeps in a store, as views that the kernels over blocks can read in place.

A store's planes are [N, 1, K, R, width], pages of R tokens of all heads. A block is ``every`` consecutive slots, and a kernel finds a block
of one head at a multiple of one stride. So a plane is viewed as blocks of ``every`` rows that follow each other through all heads, of which
every R / ``every`` belong to one head:

    page 0, head 0: 0 1 2 3    page 0, head 1: 4 5 6 7    page 1, head 0: 8 9 10 11    ...    (K = 2, R = 4 * every)

In this view block b of head 0 is number ``first_of(b)``, and each further head's block is R rows later.

``kvcompile::attend_blocks_triton``  is ``attend_blocks`` over such a view, on CUDA: ``first`` int32 [B, E] has the blocks' numbers
(``first_of``, -1 for none); ``lengths`` and ``starts`` are ``lengths`` and ``query_start`` of ``PagedAttend``, with one query a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.lowering.decode.site import Machine
from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.lowering.ops.attend_blocks import BlockOperands, grown_and_constant
from kvcompile.lowering.ops.operations import LIBRARY
from kvcompile.lowering.paged.config import PagedAttend, machine_of
from kvcompile.types import Role

LIBRARY.define(
    "attend_blocks_triton(Tensor q, Tensor[] keys, Tensor[] values, Tensor first, int every, Tensor lengths, Tensor starts, int window,"
    " Tensor? sinks, str key_scheme, str value_scheme, float scale, float softcap, int value_dim) -> Tensor"
)
FARTHEST = 1 << 30
"""A number of tokens that is beyond the end of any table."""


def viewed(plane: torch.Tensor, every: int) -> torch.Tensor:
    """Return a store's plane [N, 1, K, R, width] as overlapping blocks [blocks in the view, K, every, width]."""
    pages, _, heads, rows, width = plane.shape
    of_a_head = rows // every
    places = (pages - 1) * heads * of_a_head + of_a_head
    return plane.as_strided((places, heads, every, width), (every * width, rows * width, width, 1))


def first_of(table: torch.Tensor, plane: torch.Tensor, every: int) -> torch.Tensor:
    """Return the number in the planes of ``viewed`` of each block that ``table`` names, int32 in the table's shape; -1 if there is none.

    ``every``: tokens of a block.
    """
    pages, _, heads, rows, _ = plane.shape
    of_a_head = rows // every
    inside = (table >= 0) & (table < pages * of_a_head)
    place = torch.div(table, of_a_head, rounding_mode="floor") * (heads * of_a_head) + torch.remainder(table, of_a_head)
    return torch.where(inside, place, -1).to(torch.int32)


@dataclass(frozen=True)
class CallRows:
    """The batch rows of a call for the kernels: block numbers int32 [B, E], lengths int32 [B], starts of queries int32 [B + 1]."""

    first: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor


def rows_of(given: BlockOperands[torch.Tensor]) -> CallRows:
    """Return the batch rows of a call of ``attend_blocks``; these tensor operations are part of the compiled graph, which fuses them."""
    batch = given.q.shape[0]
    lengths = (given.hi.select(1, 0).clamp(-1, FARTHEST) + 1).to(torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=given.q.device)
    first = first_of(given.table, given.keys[0], given.every)
    if given.window:
        # Kernels look at whole tiles of tokens: a block that the window has left behind may be given up, and is hidden whatever it is.
        behind = torch.arange(1, first.shape[1] + 1, device=first.device) * given.every
        first = torch.where(behind <= (lengths - given.window).unsqueeze(1), 0, first)
    return CallRows(first.contiguous(), lengths.expand(batch).contiguous(), starts)


def attend_of(given: BlockOperands[torch.Tensor], rows: CallRows) -> PagedAttend:
    """Return the operands of ``paged_attend`` for a call of ``attend_blocks``, with planes as ``viewed``."""
    grown, constant = [], []
    for planes, scheme, dim, role in (
        (given.keys, given.key_scheme, given.q.shape[3], Role.KEY), (given.values, given.value_scheme, given.value_dim, Role.VALUE),
    ):
        growing, tables = grown_and_constant(planes, scheme, dim, role)
        grown.append([viewed(plane, given.every) for plane in growing])
        constant.append(tables)
    return PagedAttend(
        given.q.select(2, 0).contiguous(), grown[0], constant[0], grown[1], constant[1], rows.first, rows.lengths, rows.starts, 1,
        given.key_scheme, given.value_scheme, given.value_dim, given.scale, given.softcap, given.window, given.sinks,
    )


def attended(given: BlockOperands[torch.Tensor], rows: CallRows, machine: Machine, launcher: Launcher) -> torch.Tensor:
    """Return the result of ``attend_blocks`` by kernels, [B, H, 1, Dv], for at least one batch row."""
    from kvcompile.lowering.paged.attend import attend_by_kernels

    out, _ = attend_by_kernels(attend_of(given, rows), machine, launcher)
    return out.unsqueeze(2)


def _given(*arguments: Any) -> tuple[BlockOperands[torch.Tensor], CallRows]:
    """Return the operands of a call of ``attend_blocks_triton``, and its rows; ``table`` and ``hi`` hold the results of ``rows_of``."""
    q, keys, values, first, every, lengths, starts, *rest = arguments
    return BlockOperands(q, _in_order(keys), _in_order(values), first, every, lengths, *rest), CallRows(first, lengths, starts)


def _in_order(planes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the planes, each copied unless it is contiguous and begins at a multiple of 16 bytes, as the kernels' loads require."""
    return [
        plane if plane.is_contiguous() and not plane.data_ptr() % 16 else plane.clone(memory_format=torch.contiguous_format)
        for plane in planes
    ]


def _attend_blocks_triton(*arguments: Any) -> torch.Tensor:
    given, rows = _given(*arguments)
    if not given.q.shape[0]:
        return _attend_blocks_triton_meta(*arguments)
    with torch.cuda.device(given.q.device):
        return attended(given, rows, machine_of(given.q.device), Direct(True))


def _attend_blocks_triton_meta(*arguments: Any) -> torch.Tensor:
    q: torch.Tensor = arguments[0]
    return q.new_empty(*q.shape[:3], arguments[-1])


LIBRARY.impl("attend_blocks_triton", _attend_blocks_triton, "CUDA")
LIBRARY.impl("attend_blocks_triton", _attend_blocks_triton_meta, "Meta")

attend_blocks_triton = torch.ops.kvcompile.attend_blocks_triton.default
