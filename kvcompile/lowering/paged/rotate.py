"""Rotation of the channels of tokens [T, H, D] by a block Hadamard matrix (``schemes.rotation``), on CUDA.

The matrix is symmetric, so the same kernel rotates back. Its entries are 1 and -1: products are exact, sums are float32, and each sum is
multiplied by one factor.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcompile.lowering.host.launches import Launcher

ROWS = 16
"""Rows of a program: the fewest that tensor cores take."""


@triton.jit
def rotate_rows(
    X, OUT, rows, x_t, x_h, x_d, FACTOR: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ORDER: tl.constexpr, COUNT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rotate ORDER channels of COUNT rows of X into OUT; a row is one head of one token.

    Grid: blocks of COUNT rows; blocks of ORDER channels.
    """
    row = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    at = tl.program_id(1) * ORDER + tl.arange(0, ORDER)
    there = (row < rows)[:, None]
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    x = tl.load(X + (token * x_t + head * x_h)[:, None] + (at * x_d)[None, :], mask=there, other=0.0)
    place = tl.arange(0, ORDER)
    both = place[:, None] & place[None, :]
    both ^= both >> 4
    both ^= both >> 2
    both ^= both >> 1
    signs = (1 - 2 * (both & 1)).to(tl.float32)
    turned = tl.dot(x.to(tl.float32), signs, input_precision=PRECISION) * FACTOR
    tl.store(OUT + (row.to(tl.int64) * D)[:, None] + at[None, :], turned.to(OUT.dtype.element_ty), mask=there)


def rotated(x: torch.Tensor, order: int, launcher: Launcher) -> torch.Tensor:
    """Return tokens [T, H, D] with their channels rotated, contiguous, in the same dtype; a second call rotates them back."""
    count, heads, dim = x.shape
    out = torch.empty(count, heads, dim, dtype=x.dtype, device=x.device)
    if count:
        launcher.kernel(
            rotate_rows, (-(-count * heads // ROWS), dim // order), x, out, count * heads, x.stride(0), x.stride(1), x.stride(2), warps=4,
            FACTOR=order**-0.5, HEADS=heads, D=dim, ORDER=order, COUNT=ROWS,
            # 16 bits hold 11 of a fraction at most, as tf32 does.
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        )
    return out
