"""Decisions and moves of smartkv's tokens by kernels, on CUDA: no operation of a step or of a move waits for the device."""

from __future__ import annotations

from typing import Any

import torch
import triton

from kvcompile.extensions.smartkv import allocation, moves
from kvcompile.extensions.smartkv.allocation import Terms
from kvcompile.extensions.smartkv.buckets import Buckets
from kvcompile.extensions.smartkv.codes import Frame
from kvcompile.extensions.smartkv.kernels import bits_of_levels
from kvcompile.extensions.smartkv.kernels.levels import choose_levels
from kvcompile.extensions.smartkv.kernels.reencode import decode_tokens, move_tokens, say_levels
from kvcompile.extensions.smartkv.moves import TokenMove
from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.schemes.adaptive import on_device
from kvcompile.schemes.symmetric import SCALE_ULP, TINY
from kvcompile.types import PAGE

TILE, WIDE, BLOCK = 32, 1024, 2048
"""Places of a program that moves or decodes, and of one that reads positions alone; tokens that levels are decided of at a time."""


class Kernels:
    """Reads and moves the tokens of a half as ``moves.Definition`` does, by kernels that ``launcher`` starts."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher

    def levels(self, half: Buckets, count: int) -> torch.Tensor:
        found = torch.full((half.rows, count), len(half.widths), dtype=torch.int8, device=half.ends.device)
        tiles = triton.cdiv(half.where.shape[0], half.rows * WIDE)
        if tiles:
            self.launcher.kernel(
                say_levels, (tiles, half.rows), half.ends, half.where, half.first, found, count, LEVELS=len(half.widths), TILE=WIDE,
                warps=4,
            )
        return found

    def move(self, half: Buckets, order: TokenMove, first: int, into: Buckets) -> None:
        del first
        dtype = half.scales.dtype
        self.launcher.kernel(
            move_tokens, _grid(half, half.heads), *_planes(half), order.levels, order.place, into.ends, into.scales,
            into.where, into.pool, half.entering[0].shape[0], half.rows, order.levels.shape[1], **_shape(half),
            SIGNED=half.form.frame is Frame.TURNED, TILE=TILE, ULP=SCALE_ULP[dtype], TINY=TINY[dtype], warps=4,
        )

    def values(self, half: Buckets, count: int, head: int) -> torch.Tensor:
        """The values at positions 0 to ``count`` - 1 of one kv head, float32 [B, 1, T, D]; zero where no token is."""
        out = torch.zeros(half.rows, 1, count, half.head_dim, device=half.ends.device)
        self.launcher.kernel(
            decode_tokens, _grid(half, 1), *_planes(half), out, half.entering[0].shape[0], half.rows, count, head, **_shape(half),
            TILE=TILE, warps=4,
        )
        return out


class Choice:
    """Decides levels as ``allocation.by_sorting`` does, by a kernel that ``launcher`` starts."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher

    def __call__(
        self, value_RT: torch.Tensor, spend_R: torch.Tensor, terms: Terms, low_RT: torch.Tensor, high_RT: torch.Tensor
    ) -> torch.Tensor:
        rows, tokens = value_RT.shape
        found = torch.empty_like(low_RT, memory_format=torch.contiguous_format)
        left = spend_R - allocation.spent(low_RT, terms)
        worths, prices = on_device(terms.worths, left.device, torch.float32), on_device(terms.steps, left.device)
        if found.numel():
            self.launcher.kernel(
                choose_levels, (rows,), value_RT.contiguous(), left, low_RT.contiguous(), high_RT.contiguous(), found,
                torch.empty_like(found), worths, prices, tokens, STEPS=len(terms.steps), ROUNDS=len(set(terms.steps)), BLOCK=BLOCK,
                warps=16,
            )
        return found


def _planes(half: Buckets) -> tuple[torch.Tensor, ...]:
    """The planes of a half, with something in place of a mean that is not there."""
    return (*half.entering, half.first, half.ends, half.scales, half.where, half.pool, half.scales if half.mean is None else half.mean)


def _shape(half: Buckets) -> dict[str, Any]:
    """Constants of kernels that go over a half."""
    run = half.head_dim // 8
    return {
        "K": half.heads, "C": run, "COLUMNS": triton.next_power_of_2(max(16, run)), "LEVELS": len(half.widths),
        "BITS": bits_of_levels(half.widths), "TURNED": half.mean is not None,
    }


def _grid(half: Buckets, heads: int) -> tuple[int, int, int]:
    """Tiles of all places of a row that there may be and of all entering tokens; kv heads; batch rows."""
    return triton.cdiv(half.where.shape[0], half.rows * TILE) + half.entering[0].shape[0] * PAGE // TILE + 1, heads, half.rows


BY_KERNELS = Kernels(Direct(cuda=True))
moves.MOVEMENTS["cuda"] = BY_KERNELS
allocation.MEANS["cuda"] = Choice(Direct(cuda=True))
