"""The rotation of narrow keys (``smartkv.codes.turned``): a Hadamard matrix over eight runs of channels, and one within each run."""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803 - kernels: operands are blocks, constants are in capitals.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def of_run(C: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the Hadamard matrix within a run of C channels, int32 [COLUMNS, COLUMNS] of -1, 0 and 1.

    It consists of diagonal blocks whose order is the largest power of two that divides C.
    """
    order: tl.constexpr = C & -C
    i, j = tl.arange(0, COLUMNS)[:, None], tl.arange(0, COLUMNS)[None, :]
    odd = (i % order) & (j % order)
    odd ^= odd >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    return tl.where((i // order == j // order) & (i < C) & (j < C), 1 - 2 * (odd & 1), 0)


@triton.jit
def across(x, FACTOR: tl.constexpr):
    """Return FACTOR times the product of eight blocks, ``x``, with an unscaled Hadamard matrix of order 8."""
    a, b, c, d = x[0] + x[1], x[0] - x[1], x[2] + x[3], x[2] - x[3]
    e, f, g, h = x[4] + x[5], x[4] - x[5], x[6] + x[7], x[6] - x[7]
    i, j, k, m = a + c, b + d, a - c, b - d
    n, o, p, q = e + g, f + h, e - g, f - h
    return (
        (i + n) * FACTOR, (j + o) * FACTOR, (k + p) * FACTOR, (m + q) * FACTOR, (i - n) * FACTOR, (j - o) * FACTOR, (k - p) * FACTOR,
        (m - q) * FACTOR,
    )
