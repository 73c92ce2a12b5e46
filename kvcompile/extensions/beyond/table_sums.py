"""Sums of weighted values by level, and on both sides of every threshold, on CUDA: one pass over values and weights.

Tables are learned from these sums (``learning.quantizer``). Inductor would compile the sums of 4 bits to thirty split reductions with
intermediate values in memory: 135 bytes per element. Here a program has blocks of tokens of one group of channels of one kv
head, keeps a block's numbers in registers, and stores its sums; the programs' sums are added afterwards.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcompile.lowering.append.rounding import in_scales, stored_range
from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.schemes.symmetric import SCALE_ULP, TINY

TILE = 1024
"""Elements of a block: 32 for each thread of the one warp that a program has, so that sums need no barrier."""

PROGRAMS = 64
"""Largest number of programs of a group, and so of its partial sums."""

STORED = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
"""Triton's types of the dtypes that scales and zero points are stored in."""


@triton.jit
def sum_by_bins(
    X, WEIGHTS, THRESHOLDS, OUT, x_b, x_h, x_s, weights_b, weights_h, weights_s, tokens, count, window, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr, STORED: tl.constexpr, ROWS: tl.constexpr,
):
    """Write to OUT the partial sums of weight times scale of one group of channels of one kv head, over a program's blocks of tokens.

    OUT, float32 [programs, HEADS, GROUPS, 3, 2^BITS]: sums by level, sums within ``window`` scales left of each threshold, and right of it
    (the last entry of both is 0). THRESHOLDS: [HEADS, GROUPS, 2^BITS - 1], in units of scales. WEIGHTS: float [B, HEADS, S, D], by which
    the scales are multiplied. GROUP: channels of a group; STORED: the dtype of scales. Grid: programs; kv heads times groups. ``count``
    tokens in all, ``tokens`` per batch row.
    """
    group = tl.program_id(1)
    h, g = (group // GROUPS).to(tl.int64), group % GROUPS
    LEVELS: tl.constexpr = 2**BITS
    i, k_i = tl.arange(0, GROUP), tl.arange(0, LEVELS)
    by_level = tl.zeros([LEVELS], tl.float32)
    left = tl.zeros([LEVELS], tl.float32)
    right = tl.zeros([LEVELS], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        there = (row < count)[:, None]
        b, s = (row // tokens).to(tl.int64), (row % tokens).to(tl.int64)
        channel = (g * GROUP + i)[None, :]
        x = tl.load(X + (b * x_b + h * x_h + s * x_s)[:, None] + channel, mask=there, other=0.0).to(tl.float32)
        weight = tl.load(WEIGHTS + (b * weights_b + h * weights_h + s * weights_s)[:, None] + channel, mask=there, other=0.0)
        cut = tl.reshape(x, [ROWS, 1, GROUP])
        scale, zero = stored_range(cut, LEVELS - 1, ULP, TINY, STORED)
        place = tl.reshape(in_scales(cut, scale, zero), [ROWS, GROUP])
        weight = weight.to(tl.float32) * tl.reshape(scale.to(tl.float32), [ROWS, 1])
        code = tl.zeros([ROWS, GROUP], tl.int32)
        for k in tl.static_range(LEVELS - 1):
            threshold = tl.load(THRESHOLDS + group * (LEVELS - 1) + k)
            code += (place >= threshold).to(tl.int32)
            distance = place - threshold
            below = tl.sum(tl.where((distance >= -window) & (distance < 0), weight, 0.0))
            above = tl.sum(tl.where((distance >= 0) & (distance < window), weight, 0.0))
            left += tl.where(k_i == k, below, 0.0)
            right += tl.where(k_i == k, above, 0.0)
        for k in tl.static_range(LEVELS):
            by_level += tl.where(k_i == k, tl.sum(tl.where(code == k, weight, 0.0)), 0.0)
    to = OUT + (tl.program_id(0) * tl.num_programs(1) + group).to(tl.int64) * (3 * LEVELS) + k_i
    tl.store(to, by_level)
    tl.store(to + LEVELS, left)
    tl.store(to + 2 * LEVELS, right)


def known(x: torch.Tensor, groups: int) -> bool:
    """Return whether the kernel supports tokens [B, K, S, D] with this number of groups per head: groups of a power of two."""
    group = x.shape[3] // groups
    return x.dtype in STORED and group & (group - 1) == 0 and group <= TILE


def sums(
    weights: torch.Tensor, x: torch.Tensor, thresholds: torch.Tensor, bits: int, scale_dtype: torch.dtype, window: float,
    launcher: Launcher | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return sums of weight times scale over values [B, K, S, D]: by level [K, G, n], and left and right of thresholds [K, G, n - 1].

    ``window``: the distance from a threshold within which values count, in scales. ``launcher`` None runs the kernel immediately.
    """
    launcher = launcher or Direct(x.device.type == "cuda")
    x, weights = (each if each.stride(3) == 1 else each.contiguous() for each in (x, weights))
    (B, K, S, D), groups, levels = x.shape, thresholds.shape[1], 2**bits
    rows = max(1, TILE // (D // groups))
    programs = max(1, min(PROGRAMS, -(-B * S // rows)))
    out = torch.empty((programs, K, groups, 3, levels), dtype=torch.float32, device=x.device)
    launcher.kernel(
        sum_by_bins, (programs, K * groups), x, weights, thresholds.contiguous(), out, *x.stride()[:3], *weights.stride()[:3], S, B * S,
        window, warps=1, GROUPS=groups, GROUP=D // groups, BITS=bits, ULP=SCALE_ULP[scale_dtype], TINY=TINY[scale_dtype],
        STORED=STORED[scale_dtype], ROWS=rows,
    )
    by_level, left, right = out.sum(0).unbind(2)
    # Compiled graphs rely on the strides of the meta function.
    return by_level.contiguous(), left[..., :-1].contiguous(), right[..., :-1].contiguous()
