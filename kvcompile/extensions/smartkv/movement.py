"""Decisions and moves of smartkv's tokens by kernels on CUDA: no operation of a step or of a move waits for the device."""

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
"""Indices of a program that moves or decodes, and of one that reads positions only; tokens of ``choose_levels`` at a time."""


class Kernels:
    """A ``moves.Movement`` on CUDA: reads and re-encodes the tokens of one slot by kernels that ``launcher`` starts."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher

    def levels(self, slot_buckets: Buckets, count: int) -> torch.Tensor:
        found = torch.full((slot_buckets.rows, count), len(slot_buckets.widths), dtype=torch.int8, device=slot_buckets.ends.device)
        tiles = triton.cdiv(slot_buckets.where.shape[0], slot_buckets.rows * WIDE)
        if tiles:
            self.launcher.kernel(
                say_levels, (tiles, slot_buckets.rows), slot_buckets.ends, slot_buckets.where, slot_buckets.first, found, count,
                LEVELS=len(slot_buckets.widths), TILE=WIDE,
                warps=4,
            )
        return found

    def move(self, slot_buckets: Buckets, order: TokenMove, first: int, into: Buckets) -> None:
        del first
        dtype = slot_buckets.scales.dtype
        self.launcher.kernel(
            move_tokens, _grid(slot_buckets, slot_buckets.heads), *_planes(slot_buckets), order.levels, order.place, into.ends, into.scales,
            into.where, into.pool, slot_buckets.entering[0].shape[0], slot_buckets.rows, order.levels.shape[1], **_shape(slot_buckets),
            SIGNED=slot_buckets.form.frame is Frame.TURNED, TILE=TILE, ULP=SCALE_ULP[dtype], TINY=TINY[dtype], warps=4,
        )

    def values(self, slot_buckets: Buckets, count: int, head: int) -> torch.Tensor:
        """Return the values at positions 0 to ``count`` - 1 of one kv head, float32 [B, 1, T, D]; zero for absent tokens."""
        out = torch.zeros(slot_buckets.rows, 1, count, slot_buckets.head_dim, device=slot_buckets.ends.device)
        self.launcher.kernel(
            decode_tokens, _grid(slot_buckets, 1), *_planes(slot_buckets), out, slot_buckets.entering[0].shape[0], slot_buckets.rows,
            count, head, **_shape(slot_buckets),
            TILE=TILE, warps=4,
        )
        return out


class LevelAllocator:
    """Decides levels on CUDA by a kernel, with the results of ``allocation.by_sorting``; ``launcher`` starts the kernel."""

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


def _planes(slot_buckets: Buckets) -> tuple[torch.Tensor, ...]:
    """Return a slot's planes as the kernels take them; ``scales`` is passed in place of ``mean`` if there is no mean."""
    return (
        *slot_buckets.entering, slot_buckets.first, slot_buckets.ends, slot_buckets.scales, slot_buckets.where, slot_buckets.pool,
        slot_buckets.scales if slot_buckets.mean is None else slot_buckets.mean
    )


def _shape(slot_buckets: Buckets) -> dict[str, Any]:
    """Return the constants of kernels that read one slot's tokens."""
    run = slot_buckets.head_dim // 8
    return {
        "K": slot_buckets.heads, "C": run, "COLUMNS": triton.next_power_of_2(max(16, run)), "LEVELS": len(slot_buckets.widths),
        "BITS": bits_of_levels(slot_buckets.widths), "TURNED": slot_buckets.mean is not None,
    }


def _grid(slot_buckets: Buckets, heads: int) -> tuple[int, int, int]:
    """Return the launch grid: (tiles, kv heads, batch rows).

    Tiles are enough for the largest number of settled tokens that a row may have, and for all entering tokens.
    """
    return triton.cdiv(slot_buckets.where.shape[0], slot_buckets.rows * TILE) + slot_buckets.entering[0].shape[
        0
    ] * PAGE // TILE + 1, heads, slot_buckets.rows


BY_KERNELS = Kernels(Direct(cuda=True))
moves.MOVEMENTS["cuda"] = BY_KERNELS
allocation.MEANS["cuda"] = LevelAllocator(Direct(cuda=True))
