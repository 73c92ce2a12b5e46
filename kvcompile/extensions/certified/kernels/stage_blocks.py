"""The scratch of certified attention: a cache in device memory of recently requested originals from host memory.

    stage_blocks  once for keys, after ``select_blocks``, and once for values: copies requested blocks that are not cached, and writes
    where ``exact_scores`` or ``weighted_originals`` finds each block

A scratch has sets of 16 slots, and block n belongs to set n modulo their number, so neighbouring blocks are in different sets. One
program has one set of one kv head, and no other program writes its slots or its blocks' entries of ``places``, so no synchronisation is
needed. A block is in slot s of its set if its entry is s + 1. A cached copy always equals tier 2: an entry is set only here, with the copy;
it is cleared here, when the slot is given to another block; and an append that writes a block's originals writes zero to its entry
(``certified.scheme``). Slots go to promoted blocks, never to explored ones, which are drawn anew at every step; free slots first, then the
least recently used. A block without a slot is read from host memory.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RUF005 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.extensions.certified import scheme as certified
from kvcompile.extensions.certified.kernels.certified import BLOCK

SET = tl.constexpr(certified.SET)
AT_ONCE = tl.constexpr(4)
"""Block copies that a program keeps in flight."""

CHUNK = tl.constexpr(64)
"""Blocks of a set that are processed at a time."""


@triton.jit
def rows_of_slot(SCRATCH, n, sets, slot, D: tl.constexpr):
    """Return a pointer to slot ``slot`` of block n's set, one of ``sets``, in the scratch of one kv head of one batch row."""
    return SCRATCH + ((n % sets) * SET + slot).to(tl.int64) * (BLOCK * D)


@triton.jit
def asked_for(READ, EXPLORED, pair, n, blocks, ROWS: tl.constexpr, ROWS2: tl.constexpr, EXPLORE: tl.constexpr):
    """Return how many rows of a kv head request each block n, and whether any of these rows promotes it (not only explores it).

    READ, EXPLORED: flags [rows, blocks]; ``pair``: the kv head over all batch rows; ROWS: its rows. EXPLORE: whether EXPLORED is read.
    """
    r = tl.arange(0, ROWS2)
    inside = (n < blocks)[None, :] & (r < ROWS)[:, None]
    flags = (pair * ROWS + r).to(tl.int64)[:, None] * blocks + n[None, :]
    read = tl.load(READ + flags, mask=inside, other=0) != 0
    wanted = read
    if EXPLORE:
        wanted = read & (tl.load(EXPLORED + flags, mask=inside, other=0) == 0)
    return tl.sum(read.to(tl.int32), 0), tl.max(wanted.to(tl.int32), 0) > 0


@triton.jit
def turns(last, kept):
    """Return for each slot of a set its rank in the order of eviction, and whether it may be evicted (not ``kept``).

    The least recently used slot comes first, slots that are ``kept`` last. ``last``: the step of each slot's last use.
    """
    slot = tl.arange(0, SET)
    # Distinct for all slots: the step of last use, then the slot's index.
    order = tl.where(kept == 0, last.to(tl.int64) * SET + slot, 2**62)
    return tl.sum((order[None, :] < order[:, None]).to(tl.int32), 1), kept == 0


@triton.jit
def given(holds, place, misses, before, turn, free, count):
    """Assign slots to a chunk's missing blocks; return (each block's slot + 1, 0 for none; the block to copy into each slot, -1 for none).

    ``place``: each block's slot + 1 before; ``misses``: blocks to be given a slot; ``holds``: [blocks, slots], whether a slot holds it;
    ``turn``, ``free``: the results of ``turns``. ``before``: number of missing blocks of the set in earlier chunks; ``count``: number of
    missing blocks of the set in all. A block to copy in is an index in the chunk.
    """
    i = tl.arange(0, CHUNK)
    slot = tl.arange(0, SET)
    one = misses.to(tl.int32)
    fills = misses[:, None] & free[None, :] & ((before + tl.cumsum(one, 0) - one)[:, None] == turn[None, :])
    index = tl.max(tl.where(fills, i[:, None], -1), 0)
    new = tl.max(tl.where(fills, slot[None, :] + 1, 0), 1)
    gone = tl.max((holds & (free & (turn < count))[None, :]).to(tl.int32), 1) != 0
    return tl.where(new > 0, new, tl.where(gone, 0, place)), index


@triton.jit
def stage_blocks(
    READ, EXPLORED, ORIGINALS, SCRATCH, PLACES, HELD, FOUND_AT, from_n, from_b, from_h, from_t, scratch_b, scratch_h, places_n,
    places_b, places_h, held_b, held_h, blocks, sets,
    D: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, ROWS2: tl.constexpr, PER_PAGE: tl.constexpr, EXPLORE: tl.constexpr,
    COUNTS_STEPS: tl.constexpr, FOUND: tl.constexpr, FETCHED: tl.constexpr, BYTES: tl.constexpr,
):
    """Copy requested blocks of one set of one kv head from ORIGINALS to SCRATCH; write each requested block's slot to FOUND_AT.

    A program has one set of one kv head of one batch row: the 16 slots in SCRATCH that blocks n with equal n modulo ``sets`` share. READ
    [rows, N] flags the blocks that a row requests; EXPLORED flags those that it only explores, which get no slot by that alone. FOUND_AT,
    int32 [B, K, N]: a slot of the set, -1 if the block is to be read from ORIGINALS; not written for blocks that no row requests. PLACES
    (``certified.scheme``): also updated, each block's slot + 1 or 0, and the step of its last use. HELD[0]: the step's number.
    COUNTS_STEPS: HELD is the telemetry, to whose columns FOUND, FETCHED and BYTES the head's counts are added. PER_PAGE: blocks of a page.
    """
    group = tl.program_id(0)
    pair = tl.program_id(1)
    b = (pair // K).to(tl.int64)
    h = (pair % K).to(tl.int64)
    i = tl.arange(0, CHUNK)
    slot = tl.arange(0, SET)
    own_places = PLACES + b * places_b + h * places_h
    found_at = FOUND_AT + pair.to(tl.int64) * blocks
    last = tl.full([SET], -1, tl.int32)
    kept = tl.zeros([SET], tl.int32)
    count = group * 0
    wanted_by = group * 0
    for first in range(group, blocks, sets * CHUNK):
        n = first + i * sets
        times, promoted = asked_for(READ, EXPLORED, pair, n, blocks, ROWS, ROWS2, EXPLORE)
        places = own_places + (n // PER_PAGE).to(tl.int64) * places_n + n % PER_PAGE * 2
        place = tl.load(places, mask=n < blocks, other=0)
        used = tl.load(places + 1, mask=n < blocks, other=0)
        holds = place[:, None] == slot[None, :] + 1
        last = tl.maximum(last, tl.max(tl.where(holds, used[:, None], -1), 0))
        kept = kept | tl.max((holds & (times > 0)[:, None]).to(tl.int32), 0)
        count += tl.sum((promoted & (place == 0)).to(tl.int32), 0)
        wanted_by += tl.sum(times, 0)
    if wanted_by > 0:
        step = (tl.load(HELD).to(tl.int64) & 0x7FFFFFFF).to(tl.int32)
        turn, free = turns(last, kept)
        source = tl.full([SET], -1, tl.int32)
        before = group * 0
        there = group * 0
        fetched = group * 0
        for first in range(group, blocks, sets * CHUNK):
            n = first + i * sets
            times, promoted = asked_for(READ, EXPLORED, pair, n, blocks, ROWS, ROWS2, EXPLORE)
            places = own_places + (n // PER_PAGE).to(tl.int64) * places_n + n % PER_PAGE * 2
            place = tl.load(places, mask=n < blocks, other=0)
            holds = place[:, None] == slot[None, :] + 1
            asked = times > 0
            misses = promoted & (place == 0)
            then, index = given(holds, place, misses, before, turn, free, count)
            source = tl.where(index >= 0, first + index * sets, source)
            before += tl.sum(misses.to(tl.int32), 0)
            there += tl.sum((asked & (place > 0)).to(tl.int32), 0)
            # A block that is not in the scratch is read by every row that requests it.
            fetched += tl.sum(tl.where(asked & (then == 0), times, 0), 0) + tl.sum((misses & (then > 0)).to(tl.int32), 0)
            # All threads must have read the entries before any of them is changed.
            tl.debug_barrier()
            tl.store(places, then, mask=(n < blocks) & (then != place))
            tl.store(places + 1, step + i * 0, mask=asked & (then > 0))
            tl.store(found_at + n, then - 1, mask=asked)
        j = tl.arange(0, BLOCK)[:, None]
        c = tl.arange(0, D)[None, :]
        originals = ORIGINALS + b * from_b + h * from_h
        to = SCRATCH + b * scratch_b + h * scratch_h + group.to(tl.int64) * (SET * BLOCK * D)
        for some in tl.static_range(0, SET, AT_ONCE):
            copies = ()
            for ahead in tl.static_range(AT_ONCE):
                one = tl.max(tl.where(slot == some + ahead, source, -1), 0)
                n = tl.maximum(one, 0)
                here = originals + (n // PER_PAGE).to(tl.int64) * from_n + (n % PER_PAGE * BLOCK + j) * from_t + c
                copies = copies + (tl.load(here, mask=(one >= 0) & (j >= 0) & (c >= 0)),)
            for ahead in tl.static_range(AT_ONCE):
                one = tl.max(tl.where(slot == some + ahead, source, -1), 0)
                tl.store(to + (some + ahead) * (BLOCK * D) + j * D + c, copies[ahead], mask=(one >= 0) & (j >= 0) & (c >= 0))
        if COUNTS_STEPS:
            held = HELD + b * held_b + h * held_h
            if there > 0:
                tl.atomic_add(held + FOUND, there.to(tl.float64), sem="relaxed")
            if fetched > 0:
                tl.atomic_add(held + FETCHED, fetched.to(tl.float64), sem="relaxed")
                size: tl.constexpr = BLOCK * D * ORIGINALS.dtype.element_ty.primitive_bitwidth // 8
                tl.atomic_add(held + BYTES, (fetched * size).to(tl.float64), sem="relaxed")
