"""Range of tokens that a batch row attends to, and its division into splits. Device functions of Gluon.

Only the device knows positions, so each program computes its own share of the tokens, and a program without tokens returns at once.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: E741, N803, N806, RET505, RUF005, SIM102 - kernels: operands are capitals, tuples grow by sums, compile-time branches.

from __future__ import annotations

from kvcompile.lowering.host.gluon_api import gl, gluon
from kvcompile.lowering.ops import kept_tokens

RUN = gl.constexpr(kept_tokens.RUN)

NOWHERE = gl.constexpr(1073741824)
"""A position behind every token."""

LOWEST_BASE = gl.constexpr(-1073741824)
"""Lower limit of ``base``, so that positions fit 32 bits; any negative base has the same effect."""


@gluon.jit
def visible(HI, LO, batch_row, hi_batch, lo_batch, capacity, C: gl.constexpr):
    """Return (first, end), the range of tokens that a batch row attends to, by HI and LO, within ``capacity``; int32."""
    stop = gl.minimum(gl.load(HI + batch_row * hi_batch), capacity - 1).to(gl.int32) + 1
    if C.lo:
        return gl.minimum(gl.maximum(gl.load(LO + batch_row * lo_batch), 0), capacity).to(gl.int32), stop
    else:
        return 0, stop


@gluon.jit
def tiles_of_batch(HI, LO, BASE, batch, hi_batch, lo_batch, base_batch, capacity, WARPS: gl.constexpr, C: gl.constexpr):
    """Return the number of tiles of encoded tokens over all rows of the batch; WARPS: number of warps of the calling program."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    count = 0
    for begin in range(0, batch, 32 * WARPS):
        other = begin + gl.arange(0, 32 * WARPS, layout=lanes)
        there = other < batch
        until = gl.minimum(gl.load(HI + other * hi_batch, mask=there, other=-1), capacity - 1) + 1
        since = gl.full([32 * WARPS], 0, gl.int64, layout=lanes)
        if C.lo:
            since = gl.minimum(gl.maximum(gl.load(LO + other * lo_batch, mask=there, other=0), 0), capacity)
        if C.exact_newest:
            until = gl.minimum(until, gl.load(BASE + other * base_batch, mask=there, other=0))
        length = gl.where(there, gl.maximum(until - since, 0), 0).to(gl.int32)
        count += gl.sum(gl.cdiv(length, C.warps * C.tokens), 0)
    return count


@gluon.jit
def kept_extent(KEPT, first, stop, WARPS: gl.constexpr):
    """Return (start of the first run with a kept token, end of the last whole run with a hidden token), as positions.

    Runs from the one that holds ``first`` to the one that holds ``stop`` - 1 count. KEPT: a row's numbers of kept tokens by run
    (``ops.kept_tokens``). The start is NOWHERE if no run keeps a token, the end 0 if none hides one. A run that is cut at ``stop`` does not
    count as hiding, since its tile is masked anyway.
    """
    SIZE: gl.constexpr = 128 * WARPS
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    lowest = gl.full([SIZE], NOWHERE, gl.int32, layout=layout)
    last = gl.full([SIZE], -1, gl.int32, layout=layout)
    until = gl.cdiv(stop, RUN)
    for begin in range(first // RUN, until, SIZE):
        run = begin + gl.arange(0, SIZE, layout=layout)
        kept = gl.load(KEPT + run, mask=run < until, other=0)
        lowest = gl.minimum(lowest, gl.where(kept > 0, run * RUN, NOWHERE))
        last = gl.maximum(last, gl.where((kept < RUN) & (run < stop // RUN), run * RUN + RUN - 1, -1))
    return gl.min(lowest, 0), gl.max(last, 0) + 1


@gluon.jit
def extent(
    HI, LO, BASE, batch_row, start, stop, batch, hi_batch, lo_batch, base_batch, capacity, splits, shares, WARPS: gl.constexpr,
    C: gl.constexpr,
):
    """Return a batch row's encoded tokens: first, end, position of the first newest token, number of tiles, and number of splits in use.

    If rows may differ in length (``ragged``), a split takes as many tiles as a row of average length gives to each of ``shares`` splits,
    or more if this row would need more than ``splits``.
    """
    first = start // C.tokens * C.tokens
    base = stop
    if C.exact_newest:
        base = gl.maximum(gl.load(BASE + batch_row * base_batch), LOWEST_BASE).to(gl.int32)
    until = gl.maximum(gl.minimum(stop, base), first)
    tiles = gl.cdiv(until - first, C.warps * C.tokens)
    active = gl.minimum(tiles, splits)
    if C.ragged:
        share = gl.cdiv(tiles_of_batch(HI, LO, BASE, batch, hi_batch, lo_batch, base_batch, capacity, WARPS, C), shares * batch)
        active = gl.minimum(active, gl.cdiv(tiles, gl.maximum(share, 1)))
    if not C.exact_newest:
        # At least one split must write its slots, even without tokens.
        active = gl.maximum(active, 1)
    return first, until, base, tiles, active
