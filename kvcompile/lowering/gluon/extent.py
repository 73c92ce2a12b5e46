"""Tokens that a batch row attends to, and their division into splits. Device functions of Gluon.

Only the device knows positions, so programs find out for themselves what there is to do, and those with nothing end at once.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: E741, N803, N806, RET505, RUF005, SIM102 - kernels: operands are capitals, tuples grow by sums, compile-time branches.

from __future__ import annotations

from kvcompile.lowering.host.gluon_api import gl, gluon

LOWEST_BASE = gl.constexpr(-1073741824)
"""Positions fit 32 bits; a base far below zero is as good as one just below it."""


@gluon.jit
def visible(HI, LO, batch_row, hi_batch, lo_batch, capacity, C: gl.constexpr):
    """The first token that a batch row attends to, and the one behind the last."""
    stop = gl.minimum(gl.load(HI + batch_row * hi_batch), capacity - 1).to(gl.int32) + 1
    if C.lo:
        return gl.minimum(gl.maximum(gl.load(LO + batch_row * lo_batch), 0), capacity).to(gl.int32), stop
    else:
        return 0, stop


@gluon.jit
def tiles_of_batch(HI, LO, BASE, batch, hi_batch, lo_batch, base_batch, capacity, WARPS: gl.constexpr, C: gl.constexpr):
    """Count the tiles of encoded tokens of all rows of the batch; WARPS: those of the program that asks."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    count = 0
    for begin in range(0, batch, 32 * WARPS):
        other = begin + gl.arange(0, 32 * WARPS, layout=lanes)
        there = other < batch
        until = gl.minimum(gl.load(HI + other * hi_batch, mask=there, other=-1), capacity - 1) + 1
        since = gl.full([32 * WARPS], 0, gl.int64, layout=lanes)
        if C.lo:
            since = gl.minimum(gl.maximum(gl.load(LO + other * lo_batch, mask=there, other=0), 0), capacity)
        if C.recent:
            until = gl.minimum(until, gl.load(BASE + other * base_batch, mask=there, other=0))
        length = gl.where(there, gl.maximum(until - since, 0), 0).to(gl.int32)
        count += gl.sum(gl.cdiv(length, C.warps * C.tokens), 0)
    return count


@gluon.jit
def behind_hidden(KEEP, first, stop, WARPS: gl.constexpr):
    """The token behind the last one of ``first`` to ``stop`` - 1 that a row's mask KEEP hides; 0 where it hides none."""
    SIZE: gl.constexpr = 512 * WARPS
    layout: gl.constexpr = gl.BlockedLayout([16], [32], [WARPS], [0])
    last = gl.full([SIZE], -1, gl.int32, layout=layout)
    for begin in range(first, stop, SIZE):
        token = begin + gl.arange(0, SIZE, layout=layout)
        kept = gl.load(KEEP + token, mask=token < stop, other=1) != 0
        last = gl.maximum(last, gl.where(kept, -1, token))
    return gl.max(last, 0) + 1


@gluon.jit
def extent(
    HI, LO, BASE, batch_row, start, stop, batch, hi_batch, lo_batch, base_batch, capacity, splits, shares, WARPS: gl.constexpr,
    C: gl.constexpr,
):
    """The encoded tokens of a batch row: the first, where they stop, where newest tokens begin, how many tiles, and in how many splits.

    Where rows may differ in length (``ragged``) a split gets what a row of average length gives each of ``shares`` splits, unless this
    row has too few splits for that.
    """
    first = start // C.tokens * C.tokens
    base = stop
    if C.recent:
        base = gl.maximum(gl.load(BASE + batch_row * base_batch), LOWEST_BASE).to(gl.int32)
    until = gl.maximum(gl.minimum(stop, base), first)
    tiles = gl.cdiv(until - first, C.warps * C.tokens)
    active = gl.minimum(tiles, splits)
    if C.ragged:
        share = gl.cdiv(tiles_of_batch(HI, LO, BASE, batch, hi_batch, lo_batch, base_batch, capacity, WARPS, C), shares * batch)
        active = gl.minimum(active, gl.cdiv(tiles, gl.maximum(share, 1)))
    if not C.recent:
        # Somebody has to write that there is nothing.
        active = gl.maximum(active, 1)
    return first, until, base, tiles, active
