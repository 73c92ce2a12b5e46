"""The merge kernel: adds up each query's partial sums over the items of its request, and writes results and log-sums.

Grid: queries, query heads, blocks of COLUMNS channels. As in the eager body, a query that belongs to no request gets zeros and -inf, and
the queries of a request beyond the first MAX_QUERIES get NaN.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.decode.template import LOG2E
from kvcompile.lowering.paged.splits import WIDTH, items_of, tiles_of, tiles_of_an_item

LOG_2E = tl.constexpr(LOG2E)


@triton.jit
def request_of_query(query, QUERY_START, requests):
    """Return the index of the request that a query belongs to; ``requests`` for a query behind the last request."""
    row = 0
    for at in tl.range(0, requests, WIDTH, num_stages=1):
        rows = at + tl.arange(0, WIDTH)
        row += tl.sum((tl.load(QUERY_START + rows + 1, mask=rows < requests, other=2147483647) <= query).to(tl.int32), 0)
    return row


@triton.jit(do_not_specialize=["MAX_QUERIES", "TARGET", "requests", "pages"])
def merge_items(
    PARTS, SINKS, LENGTHS, QUERY_START, OUT, LSE, MAX_QUERIES, TARGET, requests, pages, HEADS: tl.constexpr, DIM: tl.constexpr,
    COLUMNS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_T: tl.constexpr, PAGE_ROWS: tl.constexpr, HAS_SINKS: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Merge PARTS [rows, H, Dv + 2] (sums, maximum and total, base 2) into OUT [T, H, Dv] and LSE [T, H].

    ``requests``: number of requests; ``pages``: blocks of a row of the block table; TARGET: see ``splits``; MAX_QUERIES: the most queries
    of a request; ITEMS: items read at a time.
    """
    query, head = tl.program_id(0), tl.program_id(1)
    capacity = pages * PAGE_ROWS
    request = request_of_query(query, QUERY_START, requests)
    there = (request < requests) & (query >= tl.load(QUERY_START))
    at = query - tl.load(QUERY_START + request, mask=there, other=0).to(tl.int32)
    beyond = there & (at >= MAX_QUERIES)
    first = request * 0
    own = tl.minimum(tl.sum(tiles_of(request + tl.arange(0, 1), LENGTHS, QUERY_START, requests, capacity, WINDOW, BLOCK_T), 0), 1)
    if TARGET > 1:
        share = tiles_of_an_item(LENGTHS, QUERY_START, requests, capacity, TARGET, WINDOW, BLOCK_T)
        first, own = items_of(request, share, LENGTHS, QUERY_START, requests, capacity, WINDOW, BLOCK_T)
    own = tl.where(there & (at < MAX_QUERIES), own, 0)
    row = tl.where(TARGET == 1, query.to(tl.int64), first.to(tl.int64) * MAX_QUERIES + at)
    step = tl.where(TARGET == 1, 0, MAX_QUERIES).to(tl.int64) * (HEADS * (DIM + 2))
    parts = PARTS + row * (HEADS * (DIM + 2)) + head * (DIM + 2)

    i = tl.arange(0, ITEMS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    best, whole = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    if HAS_SINKS:
        # A sink is a sum of one with the sink as its maximum.
        best = tl.load(SINKS + head).to(tl.float32) * LOG_2E
        whole = tl.where(there & (best > float("-inf")), 1.0, 0.0)
    sums = tl.zeros([COLUMNS], tl.float32)
    for begin in tl.range(0, own, ITEMS, num_stages=1):
        known = begin + i < own
        part = parts + (begin + i) * step
        top = tl.load(part + DIM, mask=known, other=float("-inf"))
        total = tl.load(part + DIM + 1, mask=known, other=0.0)
        held = tl.load(part[:, None] + column[None, :], mask=known[:, None] & (column < DIM)[None, :], other=0.0)
        above = tl.maximum(best, tl.max(top, 0))
        safe = tl.where(above == float("-inf"), 0.0, above)
        weight, shrink = tl.exp2(top - safe), tl.exp2(best - safe)
        whole = whole * shrink + tl.sum(total * weight, 0)
        sums = sums * shrink + tl.sum(held * weight[:, None], 0)
        best = above
    # A NaN in the total stays: only a query without visible tokens becomes zero.
    result = tl.where(whole == 0.0, 0.0, sums / whole)
    log = tl.where(whole == 0.0, float("-inf"), (best + tl.log2(whole)) / LOG_2E)
    place = query.to(tl.int64) * HEADS + head
    tl.store(OUT + place * DIM + column, tl.where(beyond, float("nan"), result).to(OUT.dtype.element_ty), mask=column < DIM)
    tl.store(LSE + place, tl.where(beyond, float("nan"), log), mask=tl.program_id(2) == 0)
