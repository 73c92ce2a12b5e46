"""Decoding a chunk of tokens of one slot of table indices: every level is loaded from the table in memory.

Sixteen levels are within one line of the L1 cache and in as many banks, so a load for each element costs less than the store.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from kvcompile import schemes
from kvcompile.lowering.codegen.expressions import TRITON_TYPES, triton_expression
from kvcompile.lowering.prefill.slot import TileSlot, tile_slot
from kvcompile.types import KernelFormat, Role, SlotSpec


@dataclasses.dataclass(frozen=True)
class TableSlot:
    """One slot of indices, in words of ``fmt.segments`` bytes, as ``decode_chunk`` reads it."""

    dim: int
    fmt: KernelFormat

    @property
    def zeros(self) -> bool:
        """Whether there is a plane of zero points."""
        return self.fmt.zeros

    @property
    def row(self) -> int:
        """Number of words per token."""
        return self.dim // self.fmt.parts

    def words(self, name: str, plane: str) -> list[str]:
        """Return statements that load ``{name}_words``, whole words [tokens, row], at ``page`` and ``at``."""
        place = f"b * {plane}_b + h * {plane}_h + (page * {plane}_n + at * {plane}_r)[:, None]"
        start = f"{plane} + {place} + tl.arange(0, {self.row})[None, :]"
        if self.fmt.segments == 1:
            return [f"{name}_words = tl.load({start})"]
        whole = TRITON_TYPES[self.fmt.whole_dtype]
        segments = (f"(tl.load({start} + {byte * self.row}).to({whole}) << {8 * byte})" for byte in range(self.fmt.segments))
        return [f"{name}_words = {' | '.join(segments)}"]

    def levels(self, name: str, table: str, part: int, cut: str, groups: int) -> str:
        """Return an expression for the levels of one part of every word, in shape ``cut``; axis 2 is ``groups`` runs of one scale."""
        first = part * self.row // self.fmt.group
        index = f"{triton_expression(self.fmt, part, f'{name}_words')}.to(tl.int32).reshape{cut}"
        return f"tl.load({table} + h * {table}_h + ({first} + tl.arange(0, {groups}))[None, None, :, None] * {table}_r + {index})"


@functools.lru_cache(maxsize=256)
def table_slot(scheme: str, role: Role, dim: int, word_dtype: torch.dtype, query: torch.dtype) -> TableSlot | None:
    """Return the plan of a slot of table indices; None if its scheme has no table, or chunks do not support its shape or query dtype."""
    fmt = schemes.parse(scheme).for_role(role).format(SlotSpec(1, dim, word_dtype, role))
    row = dim // fmt.parts
    if not fmt.levels or not fmt.scaled or fmt.norms or fmt.block > 1 or fmt.word_dtype.itemsize != 1:
        return None
    if query not in {torch.float16, torch.bfloat16} or dim & (dim - 1) or not 32 <= dim <= 256:
        return None
    even = row % fmt.group == 0 or fmt.group % row == 0
    return TableSlot(dim, fmt) if even else None


def chunk_slot(
    scheme: str, role: Role, dim: int, word_dtype: torch.dtype, query: torch.dtype, packed: bool = True
) -> TileSlot | TableSlot | None:
    """Return the plan for decoding a chunk of a slot, by unpacking codes or by a table; None if neither applies, as for dense tokens."""
    coded = tile_slot(scheme, role, dim, word_dtype, query, packed)
    return coded if coded is not None and coded.scaled else table_slot(scheme, role, dim, word_dtype, query)
