"""Moves of smartkv's tokens by kernels, on CUDA: no operation of a step or of a move waits for the device."""

from __future__ import annotations

import torch
import triton

from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.lowering.smartkv.kernels import shape_of
from kvcompile.lowering.smartkv.kernels.moves import decode_tokens, move_tokens, say_widths
from kvcompile.schemes.smartkv import moves
from kvcompile.schemes.smartkv.buckets import ENTERING, Buckets
from kvcompile.schemes.smartkv.moves import Order
from kvcompile.schemes.symmetric import SCALE_ULP, TINY
from kvcompile.types import PAGE

TILE, WIDE = 32, 1024
"""Places of a program that moves or decodes, and of one that reads positions alone."""


class Kernels:
    """Reads and moves the tokens of a half as ``moves.Definition`` does, by kernels that ``launcher`` starts."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher

    def widths(self, half: Buckets, count: int) -> torch.Tensor:
        found = torch.full((half.rows, count), ENTERING, dtype=torch.int8, device=half.ends.device)
        tiles = triton.cdiv(half.where.shape[0], WIDE)
        if tiles:
            self.launcher.kernel(
                say_widths, (tiles, 1, len(half.widths)), half.ends, half.where, found, half.rows, count, **shape_of(half), TILE=WIDE,
                warps=4,
            )
        return found

    def move(self, half: Buckets, order: Order, first: int, into: Buckets) -> None:
        del first
        dtype = half.scales.dtype
        self.launcher.kernel(
            move_tokens, _grid(half, half.heads), *half.planes, order.widths, order.place, *into.planes[3:], half.entering[0].shape[0],
            half.rows, order.widths.shape[1], **shape_of(half), RUN=triton.next_power_of_2(half.head_dim // 8), TILE=TILE,
            ULP=SCALE_ULP[dtype], TINY=TINY[dtype], warps=4,
        )

    def values(self, half: Buckets, count: int, head: int) -> torch.Tensor:
        """The values at positions 0 to ``count`` - 1 of one kv head, float32 [B, 1, T, D]; zero where no token is."""
        out = torch.zeros(half.rows, 1, count, half.head_dim, device=half.ends.device)
        self.launcher.kernel(
            decode_tokens, _grid(half, 1), *half.planes, out, half.entering[0].shape[0], half.rows, count, head, 1, **shape_of(half),
            RUN=triton.next_power_of_2(half.head_dim // 8), TILE=TILE, warps=4,
        )
        return out


def _grid(half: Buckets, heads: int) -> tuple[int, int, int]:
    """Tiles of the longest bucket there may be, or of all entering tokens; kv heads; buckets and one."""
    longest = max(half.where.shape[0], half.entering[0].shape[0] * PAGE * half.rows)
    return max(1, triton.cdiv(longest, TILE)), heads, len(half.widths) + 1


BY_KERNELS = Kernels(Direct(cuda=True))
moves.MOVEMENTS["cuda"] = BY_KERNELS
