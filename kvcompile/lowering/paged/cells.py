"""Append of tokens whose scheme encodes by constant edges between levels (``Scheme.cells``): scale, code and packing in one pass.

A program encodes ROWS new tokens of one kv head: it computes each group's scale, counts for each channel the edges below the quotient of
value and scale, and packs the counts. The result equals the eager body's bit for bit, except for float32 tokens: the rounding of their
float64 sum of squares depends on the order of the sum.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvcompile.lowering.append.absmax import absmax_scale
from kvcompile.lowering.append.rounding import quotient, rounded_up
from kvcompile.lowering.append.rows import row_places, tokens_of, written
from kvcompile.lowering.host.launches import Launcher
from kvcompile.schemes.symmetric import SCALE_ULP, TINY
from kvcompile.types import Cells

TILE = 2048
"""Elements of a program: 16 for each of 128 threads, each with its code."""


@triton.jit
def tokens_of_program(SLOTS, count, blocks, HEADS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr):
    """Return (kv head, tokens, whether each token is written, block, row in the block) for the calling program.

    Grid: blocks of ROWS tokens times kv heads, the heads first. ``count``: number of tokens, whose slots are in SLOTS; ``blocks``: number
    of blocks of the pool, of PAGE tokens each. Do not call it in kernels that torch traces: torch would count SLOTS as written
    (``append.rows.row_places``).
    """
    program = tl.program_id(0)
    h = (program % HEADS).to(tl.int64)
    s = (program // HEADS) * ROWS + tl.arange(0, ROWS)
    there = s < count
    given = tl.load(SLOTS + s, mask=there, other=0)
    _, block, row = row_places(given, blocks, PAGE)
    return h, s, written(there, given, blocks, PAGE, 1), block, row


@triton.jit
def half_root_mean_square(x, ULP: tl.constexpr, TINY: tl.constexpr, stored: tl.constexpr):
    """Return half the root mean square of each group, the last axis of ``x``, rounded up to dtype ``stored``; as ``schemes.norms``.

    0 for a group of zeros, NaN for a group with NaN or Inf. ULP, TINY: see ``rounded_up``.
    """
    wide = x.to(tl.float64)
    size = (tl.sqrt(tl.sum(wide * wide, 2) / x.shape[2]) * 0.5).to(tl.float32)
    scale = rounded_up(size, ULP, TINY, stored).to(tl.float32)
    return tl.where(size == 0.0, 0.0, tl.where(scale < TINY, TINY, scale)).to(stored)


@triton.jit
def append_cells(
    X, CODES, SCALES, SLOTS, x_s, x_h, x_d, count, blocks, codes_n, codes_h, scales_n, scales_h, HEADS: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr, SEGMENTS: tl.constexpr, GROUP: tl.constexpr, EDGES: tl.constexpr,
    COUNT: tl.constexpr, QMAX: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr, ROWS: tl.constexpr,
):
    """Encode ROWS tokens of one kv head; write CODES and SCALES at their slots.

    Grid: blocks of ROWS tokens times kv heads, the heads first.

    ``count``: number of tokens; ``blocks``: number of blocks of the pool. EDGES: the COUNT constants between levels, in units of scales.
    QMAX: the largest level, or 0 if a scale is half the root mean square of its group. BITS, PARTS, SEGMENTS: a word of SEGMENTS bytes has
    PARTS codes of BITS bits.
    """
    h, s, there, block, row = tokens_of_program(SLOTS, count, blocks, HEADS, PAGE, ROWS)
    GROUPS: tl.constexpr = D // GROUP
    stored: tl.constexpr = SCALES.dtype.element_ty
    group, i = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    channel = group[:, None] * GROUP + i[None, :]
    x = tl.load(X + h * x_h + (s.to(tl.int64) * x_s)[:, None, None] + (channel * x_d)[None, :, :], mask=there[:, None, None], other=0.0)
    x = x.to(tl.float32)
    if QMAX == 0:
        scale = half_root_mean_square(x, ULP, TINY, stored)
    else:
        # Magnitudes compare as integers, with infinity and NaN above all numbers.
        scale = absmax_scale(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2), QMAX, ULP, TINY, stored)
    size = scale.to(tl.float32)
    ratio = quotient(x, tl.where(size == 0.0, 1.0, size).to(stored)[:, :, None])
    codes = tl.zeros([ROWS, GROUPS, GROUP], tl.int32)
    for k in tl.static_range(COUNT):
        codes += (ratio > EDGES[k]).to(tl.int32)
    codes = tl.where((size == size)[:, :, None], codes, 0)

    WIDTH: tl.constexpr = D // PARTS
    words = tl.sum(tl.reshape(codes, [ROWS, PARTS, WIDTH]) << (BITS * tl.arange(0, PARTS))[None, :, None], 1)
    to = CODES + h * codes_h + block * codes_n + row * (SEGMENTS * WIDTH)
    w = tl.arange(0, WIDTH)
    for byte in tl.static_range(SEGMENTS):
        tl.store(to[:, None] + byte * WIDTH + w[None, :], ((words >> (8 * byte)) & 255).to(tl.uint8), mask=there[:, None])
    tl.store(SCALES + (h * scales_h + block * scales_n + row * GROUPS)[:, None] + group[None, :], scale, mask=there[:, None])


def fits(rule: Cells | None, x: torch.Tensor, planes: Sequence[torch.Tensor]) -> bool:
    """Return whether the kernel supports tokens [T, K, D] and ``rule``: sizes that are powers of two, words of at most four bytes.

    False if ``rule`` is None.
    """
    if rule is None or len(planes) != 2 or rule.segments > 4:
        return False
    dim = x.shape[2]
    whole = not dim & (dim - 1) and not rule.group & (rule.group - 1) and dim % rule.group == 0 and dim % rule.parts == 0
    return whole and dim <= TILE and x.dtype in {torch.float16, torch.bfloat16, torch.float32}


def launch(rule: Cells, x: torch.Tensor, planes: Sequence[torch.Tensor], slots: torch.Tensor, launcher: Launcher) -> None:
    """Start the kernel that encodes tokens [T, K, D] by ``rule`` and writes them at ``slots`` [T] into planes [blocks, K, page, width].

    Tokens with negative slots are skipped.
    """
    (count, heads, dim), (codes, scales) = x.shape, planes
    many = tokens_of(x.transpose(0, 1).unsqueeze(0), dim, TILE)
    launcher.kernel(
        append_cells, (-(-count // many) * heads,), x, codes, scales, slots, x.stride(0), x.stride(1), x.stride(2), count, codes.shape[0],
        codes.stride(0), codes.stride(1), scales.stride(0), scales.stride(1), warps=1 if many == 1 else 4, HEADS=heads,
        PAGE=codes.shape[2], D=dim, BITS=rule.bits, PARTS=rule.parts, SEGMENTS=rule.segments, GROUP=rule.group, EDGES=rule.edges,
        COUNT=len(rule.edges), QMAX=rule.largest or 0, ULP=SCALE_ULP[scales.dtype], TINY=TINY[scales.dtype], ROWS=many,
    )
