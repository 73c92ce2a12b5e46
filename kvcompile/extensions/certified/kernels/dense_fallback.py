"""The values' pass of certified attention for rows that fall back: see ``certified``.

All programs share each such row: a program has every num_programs-th tile of T tokens, whose originals are loaded while the tile
before is multiplied. It adds tiles elementwise, so that sums move between threads only at a row's end.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import math

import triton
import triton.language as tl

from kvcompile.extensions.certified.kernels.certified import (
    BLOCK,
    FLAGS,
    exp_of,
    fallen,
    finite_or_infinite,
    norm_above,
    pop_pending,
    row_max_or_zero,
    sight,
)

TILE_VALUES = 64 * 128
"""Values that a program takes at a time, tokens of a tile times channels: 64 sums in each of 128 threads."""


def tile_of(page: int, width: int) -> int:
    """Return the tokens of a tile, a power of two, for pages of ``page`` rows and values of ``width`` channels: no tile spans two pages."""
    return math.gcd(page, max(BLOCK.value, min(64, TILE_VALUES // width)))


@triton.jit
def dense_values(
    ORIGINALS, RECENT_V, FALLS, AT, LOGITS, EXACT_TOP, OUT, SIZE, from_n, from_b, from_h, from_t, rv_b, rv_h, rv_t, rows, blocks, newest,
    DV: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, PAGE: tl.constexpr, T: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write OUT [programs, rows, DV] of the rows flagged in FALLS: sums over a program's tokens of exp(logit - EXACT_TOP) v from originals.

    Also written: SIZE [B, K, N], float32 upper bounds on the largest norm of a value in each block; several rows of a kv head write the
    same. The last program also adds the newest tokens, RECENT_V. Other rows are neither written nor read.

    ``newest``: tokens of RECENT_V. T: tokens of a tile, within a page of PAGE.
    """
    flag = tl.arange(0, FLAGS)
    j = tl.arange(0, T)
    c = tl.arange(0, DV)
    for first in range(0, rows, FLAGS):
        pending = fallen(FALLS, first, rows, flag)
        for _row in range(tl.sum(pending, 0)):
            which, pending = pop_pending(pending, flag, FLAGS)
            r = first + which
            pair = r // (G * S)
            b = (pair // K).to(tl.int64)
            h = (pair % K).to(tl.int64)
            start, last, base = sight(AT + b * (2 * S + 1), S, S2)
            top = row_max_or_zero(EXACT_TOP + r)
            logits = LOGITS + r.to(tl.int64) * blocks * BLOCK
            originals = ORIGINALS + b * from_b + h * from_h
            sums = tl.zeros([T, DV], tl.float32)
            stop = tl.minimum(last + 1, base)
            tile = start // T + tl.program_id(0)
            tiles = tl.maximum((stop + T - 1) // T - tile, 0)
            for turn in tl.range(0, tl.cdiv(tiles, tl.num_programs(0)), num_stages=STAGES):
                t0 = (tile + turn * tl.num_programs(0)) * T
                t = t0 + j
                seen = (t >= start) & (t < stop)
                here = originals + (t0 // PAGE).to(tl.int64) * from_n + (t0 % PAGE + j)[:, None] * from_t
                v = tl.load(here + c[None, :], mask=seen[:, None], other=0.0).to(tl.float32)
                # Tokens that this row does not see have a logit of -inf.
                logit = tl.load(logits + t, mask=seen, other=float("-inf"))
                sums += v * exp_of(logit - top)[:, None]
                n = t0 // BLOCK + tl.arange(0, T // BLOCK)
                square = tl.reshape(finite_or_infinite(tl.sum(v * v, 1)), [T // BLOCK, BLOCK])
                tl.store(SIZE + pair.to(tl.int64) * blocks + n, norm_above(tl.max(square, 1)))
            if tl.program_id(0) == tl.num_programs(0) - 1:
                for before in range(0, newest, T):
                    row = before + j
                    t = base + row
                    seen = (t >= start) & (t <= last) & (row < newest)
                    here = RECENT_V + b * rv_b + h * rv_h + row[:, None] * rv_t
                    v = tl.load(here + c[None, :], mask=seen[:, None], other=0.0).to(tl.float32)
                    logit = tl.load(logits + t, mask=seen, other=float("-inf"))
                    sums += v * exp_of(logit - top)[:, None]
            tl.store(OUT + (tl.program_id(0).to(tl.int64) * rows + r) * DV + c, tl.sum(sums, 0))
