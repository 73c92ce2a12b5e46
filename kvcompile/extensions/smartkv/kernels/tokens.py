"""Addresses of tokens: settled ones in buckets, and entering ones in pages (``smartkv.buckets``)."""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, RET505 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile import types
from kvcompile.extensions.smartkv import buckets

PAGE = tl.constexpr(types.PAGE)
ROW = tl.constexpr(buckets.ROW)


@triton.jit
def bits_of(BITS: tl.constexpr, LEVEL: tl.constexpr):
    """Return the bits of level LEVEL, from the constant BITS, which holds four bits for each level (``bits_of_levels``)."""
    return (BITS >> (4 * LEVEL)) & 15


@triton.jit
def end_of(ENDS, b, first, LEVEL: tl.constexpr, LEVELS: tl.constexpr):
    """Return the index where the bucket of LEVEL ends, counted within batch row ``b`` of ``first`` settled tokens; 0 for level -1."""
    if LEVEL < 0:
        return first * 0
    else:
        return tl.load(ENDS + b * (2 * LEVELS) + LEVEL) - b * first


@triton.jit
def pool_of(ENDS, POOL, b, LEVEL: tl.constexpr, LEVELS: tl.constexpr):
    """Return a pointer to the first byte of the codes of batch row b's bucket of LEVEL in POOL."""
    return POOL + tl.load(ENDS + b * (2 * LEVELS) + LEVELS + LEVEL).to(tl.int64) * ROW


@triton.jit
def entered(place, b, k, rows, K: tl.constexpr):
    """Return the indices of entering tokens of batch row ``b`` and kv head ``k`` in their planes, int64.

    ``place``: position minus that of the first entering token; ``rows``: the number of batch rows.
    """
    return (((place // PAGE) * rows + b) * K + k).to(tl.int64) * PAGE + place % PAGE
