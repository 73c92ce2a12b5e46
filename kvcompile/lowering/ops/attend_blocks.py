"""``attend_blocks``: attention of one new token per row over tokens in the blocks of a pool's store, which a block table lists.

Its definition is ``gather`` of the rows' codes, then ``attend``. Where a kernel reads the codes in place (``lowering.blocks``), nothing is
gathered.

Operands
    q        queries [B, H, 1, D]
    keys     planes of the key store, [N, 1, K, R, width]; first the planes that grow, then the constant ones
    values   planes of the value store, in the same order
    table    int64 [B, E]: tokens e * ``every`` and following of row b are in slots table[b, e] * ``every`` and following. An entry that is
             not a block of the store makes its tokens NaN
    every    number of tokens in a block; a divisor of R
    hi       int64 [B or 1, 1]: the last position that the query attends to, -1 for none; it may be after the last token of the table
    window   number of tokens up to ``hi`` that the query sees; 0 for all
    sinks, key_scheme, value_scheme, scale, softcap, value_dim  as in ``attend``
    result   [B, H, 1, Dv] in q's dtype
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch

from kvcompile import schemes
from kvcompile.lowering.ops.gather import gather_body
from kvcompile.lowering.ops.operands import AttendOperands, T
from kvcompile.types import Role, SlotSpec


@dataclass(frozen=True)
class BlockOperands(Generic[T]):
    """Operands of ``kvcompile::attend_blocks``, in schema order; T: tensors, fake tensors or graph nodes."""

    q: T
    keys: Sequence[T]
    values: Sequence[T]
    table: T
    every: int
    hi: T
    window: int
    sinks: T | None
    key_scheme: str
    value_scheme: str
    scale: float
    softcap: float
    value_dim: Any

    def over(self, keys: Sequence[T], values: Sequence[T], hi: T, lo: T | None) -> AttendOperands[T]:
        """Return the operands of ``attend`` over ``keys`` and ``values``, planes of gathered tokens, with the limits ``hi`` and ``lo``."""
        return AttendOperands(
            self.q, keys, values, hi, lo, None, None, self.sinks, self.key_scheme, self.value_scheme, self.scale, self.softcap,
            self.value_dim,
        )


def grown_and_constant(
    planes: Sequence[torch.Tensor], scheme: str, dim: int, role: Role
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return (planes that grow with tokens, constant planes) of a store; ``dim``: channels of a head."""
    made, slot = schemes.parse(scheme), SlotSpec(planes[0].shape[2], dim, planes[0].dtype, role)
    constant = sum(spec.constant for spec in made.layout(slot).planes[: len(planes)])
    return planes[: len(planes) - constant], planes[len(planes) - constant :]


def attend_blocks_body(*arguments: Any) -> torch.Tensor:
    """Return the result of ``attend_blocks``, [B, H, S, Dv]: the blocks of the table are gathered, and ``attend`` reads the copy.

    This is the definition of the operation; a traced graph keeps its ``attend`` as one operation.
    """
    given: BlockOperands[torch.Tensor] = BlockOperands(*arguments)
    offsets = torch.arange(given.every, device=given.table.device)
    places = (given.table.unsqueeze(2) * given.every + offsets).flatten(1)
    keys, values = (
        [*gather_body(list(grown), places, dim, scheme), *constant]
        for planes, scheme, dim, role in (
            (given.keys, given.key_scheme, given.q.shape[3], Role.KEY), (given.values, given.value_scheme, given.value_dim, Role.VALUE),
        )
        for grown, constant in [grown_and_constant(planes, scheme, dim, role)]
    )
    lo = (given.hi - (given.window - 1)).clamp(min=0) if given.window else None
    # Kernels read tokens up to the limit, and the gathered planes end with the table.
    hi = given.hi.clamp(max=places.shape[1] - 1)
    found: torch.Tensor = torch.ops.kvcompile.attend.default(*given.over(keys, values, hi, lo).arguments())
    return found


def attend_blocks_meta(*arguments: Any) -> torch.Tensor:
    """Return an empty tensor [B, H, S, Dv] of the queries' dtype and device, for fake tensors."""
    given: BlockOperands[torch.Tensor] = BlockOperands(*arguments)
    return given.q.new_empty(*given.q.shape[:3], given.value_dim)
