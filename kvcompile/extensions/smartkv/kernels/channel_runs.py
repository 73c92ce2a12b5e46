"""Queries and sums of smartkv's attention as eight runs of channels, in the order of the words of codes (``bit_fields``)."""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, RET505, RUF005 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.extensions.smartkv.kernels.bit_fields import POWERS_2, POWERS_3, POWERS_4, POWERS_8
from kvcompile.extensions.smartkv.kernels.hadamard8 import across, of_run


@triton.jit
def channels_of(C: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the channel of each column of each run, [COLUMNS, 1, 8], and whether it exists; runs are the last axis, as in ``apart``."""
    run, column = tl.arange(0, 8)[None, None, :], tl.arange(0, COLUMNS)[:, None, None]
    return 2 * C * (run // 2) + 2 * column + run % 2, (column < C) & (run >= 0)


@triton.jit
def apart(x):
    """Return the eight runs of a block [COLUMNS, rows, 8] as a tuple of blocks [COLUMNS, rows]."""
    odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2, 2]))
    two, three = tl.split(odd[0]), tl.split(odd[1])
    a, b, c, d = tl.split(two[0]), tl.split(two[1]), tl.split(three[0]), tl.split(three[1])
    return (a[0], c[0], b[0], d[0], a[1], c[1], b[1], d[1])


@triton.jit
def together(runs):
    """Return eight runs [COLUMNS, rows] as one block [COLUMNS, rows, 8]."""
    even = tl.join(tl.join(runs[0], runs[4]), tl.join(runs[2], runs[6]))
    odd = tl.join(tl.join(runs[1], runs[5]), tl.join(runs[3], runs[7]))
    return tl.reshape(tl.join(even, odd), [runs[0].shape[0], runs[0].shape[1], 8])


@triton.jit
def queries_of(Q, at, there, C: tl.constexpr, COLUMNS: tl.constexpr):
    """Load each row's query, from Q + ``at`` on, in eight runs: float32 [COLUMNS, rows, 8]; zero for rows that are not ``there``."""
    channel, inside = channels_of(C, COLUMNS)
    return tl.load(Q + at[None, :, None] + channel, mask=there[None, :, None] & inside, other=0.0).to(tl.float32)


@triton.jit
def turned(runs, C: tl.constexpr, COLUMNS: tl.constexpr, DOT: tl.constexpr):
    """Return queries, in eight ``runs``, rotated into the frame of narrow keys; they must be exact in DOT."""
    matrix = of_run(C, COLUMNS).to(DOT)
    within = ()
    for run in tl.static_range(8):
        within = within + (tl.dot(matrix, runs[run].to(DOT), input_precision="ieee"),)
    return across(within, (8 * (C & -C)) ** -0.5)


@triton.jit
def operands_of(runs, BITS: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr):
    """Return queries as operands for codes of BITS, in DOT, and each row's excess: the part of its products due to raised codes.

    PACKED codes are raised by 2^(BITS - 1). The excess is computed by a product so that the operands have a use outside of the loop: Triton
    sinks values that are used only inside a loop into it, and would convert the queries for every tile.
    """
    POWERS: tl.constexpr = POWERS_8 if BITS == 8 else POWERS_4 if BITS == 4 else POWERS_3 if BITS == 3 else POWERS_2
    found = ()
    excess = tl.zeros([16, runs[0].shape[1]], tl.float32)
    for run in tl.static_range(8):
        if PACKED:
            q = (runs[run] * 2.0 ** -((POWERS >> (4 * run)) & 15)).to(DOT)
            ones = tl.full([16, q.shape[0]], 2.0 ** (BITS - 25 + ((POWERS >> (4 * run)) & 15)), DOT)
            excess = tl.dot(ones, q, excess)
        else:
            q = runs[run].to(DOT)
        found = found + (q,)
    return found, tl.max(excess, 0)


@triton.jit
def rescaled(sums, BITS: tl.constexpr, BACK: tl.constexpr, PACKED: tl.constexpr):
    """Return the eight ``sums`` times the power of two by which stored bit fields of BITS exceed codes; with BACK, divided by it.

    Without PACKED, fields equal codes, and the sums are returned unchanged.
    """
    POWERS: tl.constexpr = POWERS_8 if BITS == 8 else POWERS_4 if BITS == 4 else POWERS_3 if BITS == 3 else POWERS_2
    if not PACKED:
        return sums
    else:
        found = ()
        for run in tl.static_range(8):
            found = found + (sums[run] * 2.0 ** (-((POWERS >> (4 * run)) & 15) if BACK else (POWERS >> (4 * run)) & 15),)
        return found
