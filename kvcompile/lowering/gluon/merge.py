"""Partial sums of splits in memory, and the kernel that merges them by log-sum-exp.

    SUMS  float32 [batch rows and kv heads, slots, heads of a group, dim]: sums of values
    TOPS  float32 [batch rows and kv heads, slots, 2, 8]: the number subtracted from scores, in base 2, and the weights' totals

Each warp of each split writes one slot.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: E741, N803, N806, RET505, RUF005, SIM102 - kernels: operands are capitals, tuples grow by sums, compile-time branches.

from __future__ import annotations

from kvcompile.lowering.gluon.extent import extent, visible
from kvcompile.lowering.gluon.layouts import of_columns, several
from kvcompile.lowering.gluon.tiles import exp2
from kvcompile.lowering.host.gluon_api import gl, gluon

LOWEST = gl.constexpr(-1.0e30)
"""Initial number to subtract from scores: far below every score, and finite, so that differences are not NaN."""

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def let_next_begin():
    """Let the stream's next launch, if made with programmatic dependent launch, start once all programs of this one called this or ended.

    Called early in a kernel; the next launch then waits by ``wait_for_last`` before it reads what this one writes.
    """
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_last():
    """Wait until the launch that this one may overlap has ended and all its writes are visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def write_channels(SUMS, here, halves, each: gl.constexpr, VALUE: gl.constexpr, C: gl.constexpr):
    """Write eight runs of neighbouring channels, ``VALUE.written[each]``, of all columns' sums, to slots ``here`` [WARPS] of SUMS.

    ``halves``: the sums, in groups of eight rows of products, [WARPS, 8, 8] each. A thread has a whole run, so one store writes it.
    """
    rows: gl.constexpr = VALUE.written[each][0]
    low: gl.constexpr = VALUE.written[each][1]
    high: gl.constexpr = VALUE.written[each][2]
    layout: gl.constexpr = several(C.warps, VALUE.word)
    shape: gl.constexpr = [C.warps, 8, 8, VALUE.word]
    if VALUE.word == 4:
        x = gl.join(gl.join(halves[rows[0]], halves[rows[2]]), gl.join(halves[rows[1]], halves[rows[3]])).reshape(shape)
    else:
        x = gl.join(halves[rows[0]], halves[rows[1]])
    x = gl.convert_layout(x, layout, assert_trivial=True)
    run = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))[None, :, None, None]
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))[None, None, :, None]
    channel = gl.arange(0, VALUE.word, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, None, None, :]
    at = here.to(gl.int64)[:, None, None, None] * (C.kept * C.dim) + (column % C.rows * C.dim + low + column // 4 * (high - low))
    # With two halves, duplicated columns hold other channels and are written too; else only the first copy is written.
    inside = column % C.rows < C.kept if VALUE.halves == 2 else column < C.kept
    gl.store(SUMS + at + run * VALUE.word + channel, x, mask=inside.broadcast_to(shape))


@gluon.jit
def write_slot(TOPS, slot, m, l, C: gl.constexpr):
    """Write to TOPS ``m``, the numbers subtracted from scores, and the sums of the weights ``l``: warp w to slot ``slot`` + w."""
    columns: gl.constexpr = of_columns(C.warps)
    warp = gl.arange(0, C.warps, layout=gl.SliceLayout(1, columns))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, columns))
    at = (slot + warp).to(gl.int64)[:, None] * 16 + column[None, :]
    gl.store(TOPS + at, m)
    gl.store(TOPS + at + 8, gl.convert_layout(gl.sum(l, 1), columns, assert_trivial=True))


@gluon.jit(do_not_specialize=["hi_batch", "lo_batch", "base_batch", "batch", "pages", "keep_tokens", "slots", "shares"])
def merge(
    HI, LO, SINKS, BASE, SUMS, TOPS, OUT, hi_batch, lo_batch, base_batch, batch, pages, keep_tokens, slots, shares, C: gl.constexpr,
    M: gl.constexpr,
):
    """Write M.channels channels of OUT for one batch row and kv head: the attention result, merged from the slots of SUMS and TOPS.

    Grid: parts of the channels; batch rows and kv heads. ``C``: the constants of ``attend``, ``M``: a ``Merge``. A query that sees no token
    gets zeros.
    """
    pair = gl.program_id(1)
    batch_row, head = pair // C.kv_heads, pair % C.kv_heads
    capacity = pages * C.page_rows
    if C.keep:
        capacity = gl.minimum(capacity, keep_tokens)
    start, stop = visible(HI, LO, batch_row, hi_batch, lo_batch, capacity, C)
    splits = slots // C.warps - C.exact_newest
    _, _, _, _, active = extent(
        HI, LO, BASE, batch_row, start, stop, batch, hi_batch, lo_batch, base_batch, capacity, splits, shares, M.warps, C
    )
    count = (active + C.exact_newest) * C.warps

    if C.overlap:
        wait_for_last()
    across: gl.constexpr = min(32, M.channels // 4)
    rows: gl.constexpr = min(C.kept, 32 // across)
    down: gl.constexpr = min(M.warps, C.kept // rows)
    deep: gl.constexpr = 32 // (across * rows)
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [deep, rows, across], [M.warps // down, down, 1], [2, 1, 0])
    of_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, layout))
    z = gl.arange(0, M.slots, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None]
    r = gl.arange(0, C.kept, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :]
    c = gl.program_id(0) * M.channels + gl.arange(0, M.channels, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    top = gl.full([C.kept], LOWEST, gl.float32, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    total = gl.full([C.kept], 0.0, gl.float32, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    sums = gl.full([C.kept, M.channels], 0.0, gl.float32, layout=gl.SliceLayout(0, layout))
    for begin in range(0, count, M.slots):
        there = begin + z < count
        at = (pair * slots + begin + z).to(gl.int64)
        each = gl.load(TOPS + at * 16 + r, mask=there, other=LOWEST)
        totals = gl.load(TOPS + at * 16 + 8 + r, mask=there, other=0.0)
        parts = gl.load(SUMS + (at * (C.kept * C.dim) + r * C.dim)[:, :, None] + c[None, None, :], mask=there[:, :, None], other=0.0)
        raised = gl.maximum(top, gl.max(each, 0))
        weight = exp2(each - raised[None, :])
        lowered = exp2(top - raised)
        total = total * lowered + gl.sum(totals * weight, 0)
        sums = sums * gl.convert_layout(lowered, of_row)[:, None] + gl.sum(parts * weight[:, :, None], 0)
        top = raised
    row = gl.arange(0, C.kept, layout=of_row)
    inside = row < C.group
    row = gl.minimum(row, C.group - 1)
    if C.sinks:
        sink = gl.load(SINKS + head * C.group + row).to(gl.float32) * LOG2E
        sink = gl.convert_layout(sink, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        raised = gl.maximum(top, sink)
        total = total * exp2(top - raised) + exp2(sink - raised)
        sums = sums * gl.convert_layout(exp2(top - raised), of_row)[:, None]
    total = gl.convert_layout(total, of_row)[:, None]
    # A NaN total stays NaN; only a query that sees no token gets zeros.
    result = gl.where(total == 0.0, 0.0, sums / gl.where(total == 0.0, 1.0, total))
    c = gl.program_id(0) * M.channels + gl.arange(0, M.channels, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    at = (pair * C.group + row).to(gl.int64) * C.dim
    gl.store(OUT + at[:, None] + c[None, :], result.to(OUT.dtype.element_ty), mask=inside[:, None])
