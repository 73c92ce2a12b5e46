"""Device functions that divide the tokens of requests into items: each program finds its request and its share of the tokens.

A launch has a fixed number of items, so that a recorded CUDA graph can be replayed at any lengths. All items have the same number of tiles
of tokens, the share. If items could cross requests, ``TARGET`` items would hold all tiles; since an item has tokens of one request only,
each request adds at most one. So TARGET + requests items are enough, and items without tokens end at once.

The device runs about TARGET items of each kv head at a time. One more would start only when others end, and double the time; so the share
is raised until at most TARGET items have tokens.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers, blocks and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

WIDTH = tl.constexpr(128)
"""Number of requests that a program reads at a time."""
TRIES = tl.constexpr(3)
"""How often a share is raised at most; each time there are fewer items too many."""


@triton.jit
def first_tile(length, count, WINDOW: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return the first tile of tokens that the ``count`` queries of a request of ``length`` tokens see."""
    return tl.maximum(length - count - (WINDOW - 1), 0) // BLOCK_T if WINDOW else length * 0


@triton.jit
def tiles_of(requests, LENGTHS, QUERY_START, total, capacity, WINDOW: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return the number of tiles of tokens of each of ``requests``; 0 for a request without queries, and for indices from ``total`` on."""
    there = requests < total
    count = (tl.load(QUERY_START + requests + 1, mask=there, other=0) - tl.load(QUERY_START + requests, mask=there, other=0)).to(tl.int32)
    length = tl.load(LENGTHS + requests, mask=there, other=0).to(tl.int32)
    tiles = tl.cdiv(tl.minimum(length, capacity), BLOCK_T) - first_tile(length, count, WINDOW, BLOCK_T)
    return tl.where(count > 0, tl.maximum(tiles, 0), 0)


@triton.jit
def tiles_of_an_item(LENGTHS, QUERY_START, total, capacity, TARGET, WINDOW: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return the number of tiles of an item, such that at most TARGET items have tokens.

    If three tries find no such number, at most TARGET + requests items have tokens. If at least TARGET requests have tokens, there are more
    items than TARGET in any case, and the first number tried is returned.
    """
    tiles = 0
    rows = 0
    for at in tl.range(0, total, WIDTH, num_stages=1):
        found = tiles_of(at + tl.arange(0, WIDTH), LENGTHS, QUERY_START, total, capacity, WINDOW, BLOCK_T)
        tiles += tl.sum(found, 0)
        rows += tl.sum((found > 0).to(tl.int32), 0)
    share = tl.maximum(tl.cdiv(tiles, TARGET), 1)
    grows = rows < TARGET
    for _ in tl.static_range(TRIES):
        items = 0
        for at in tl.range(0, total, WIDTH, num_stages=1):
            found = tiles_of(at + tl.arange(0, WIDTH), LENGTHS, QUERY_START, total, capacity, WINDOW, BLOCK_T)
            items += tl.sum(tl.cdiv(found, share), 0)
        share = tl.where(grows & (items > TARGET), tl.cdiv(share * items, TARGET), share)
    return share


@triton.jit
def request_of(item, share, LENGTHS, QUERY_START, total, capacity, WINDOW: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return (the request of an item, the item's index among that request's items, the number of tiles of each of these items).

    The request is ``total`` or more for an item without tokens. The items of a request are equally long, except for the last one; none is
    longer than ``share`` tiles.
    """
    request = 0
    before = 0
    seen = 0
    for at in tl.range(0, total, WIDTH, num_stages=1):
        requests = at + tl.arange(0, WIDTH)
        items = tl.cdiv(tiles_of(requests, LENGTHS, QUERY_START, total, capacity, WINDOW, BLOCK_T), share)
        until = tl.cumsum(items, 0) + seen
        done = until <= item
        request += tl.sum((done & (requests < total)).to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(done, until, 0), 0))
        seen += tl.sum(items, 0)
    tiles = tl.sum(tiles_of(request + tl.arange(0, 1), LENGTHS, QUERY_START, total, capacity, WINDOW, BLOCK_T), 0)
    return request, item - before, tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, share), 1))


@triton.jit
def tile_of_queries(place, QUERY_START, total, MAX_QUERIES, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return (request, index of the tile among the request's tiles of query rows) of tile number ``place`` of all requests.

    The request is ``total`` or more behind the last tile. A tile has ROWS query rows of a kv head, GROUP for each query. There are at most
    (queries * GROUP) // ROWS + total tiles.
    """
    request = 0
    before = 0
    seen = 0
    for at in tl.range(0, total, WIDTH, num_stages=1):
        requests = at + tl.arange(0, WIDTH)
        there = requests < total
        count = tl.load(QUERY_START + requests + 1, mask=there, other=0) - tl.load(QUERY_START + requests, mask=there, other=0)
        tiles = tl.cdiv(tl.maximum(tl.minimum(count.to(tl.int32), MAX_QUERIES), 0) * GROUP, ROWS)
        until = tl.cumsum(tiles, 0) + seen
        done = until <= place
        request += tl.sum((done & there).to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(done, until, 0), 0))
        seen += tl.sum(tiles, 0)
    return request, place - before


@triton.jit
def items_of(request, share, LENGTHS, QUERY_START, total, capacity, WINDOW: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return (the index of a request's first item, the number of its items)."""
    first = 0
    own = 0
    for at in tl.range(0, total, WIDTH, num_stages=1):
        requests = at + tl.arange(0, WIDTH)
        items = tl.cdiv(tiles_of(requests, LENGTHS, QUERY_START, total, capacity, WINDOW, BLOCK_T), share)
        first += tl.sum(tl.where(requests < request, items, 0), 0)
        own += tl.sum(tl.where(requests == request, items, 0), 0)
    return first, own
