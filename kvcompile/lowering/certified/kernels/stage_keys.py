"""The scratch of certified attention: original keys in host memory that were asked for lately, in device memory.

    stage_keys  between ``select_blocks`` and ``exact_scores``: copies what is asked for and not there, and says where ``exact_scores``
    finds each block

A set is 16 blocks, four pages, and has SLOTS slots of the scratch in those pages. One program has one set of one kv head, and no other
ever writes its slots or its places, so there is nothing to wait for. A block is in slot s if its place says s + 1. That it is there as it
is in tier 2: a place is set only here, with a copy; it is cleared here, when the slot is given to another block; and whoever writes a
block's originals writes zero to its place (``schemes.certified``). Slots go to blocks that are promoted, never to those explored, which
are drawn anew at every step; first the free ones, then those asked for longest ago. What finds none is read where it is.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RUF005 - kernels: operands are pointers and constants in capitals, tuples grow in loops.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.certificate.telemetry import COLUMNS
from kvcompile.lowering.certified.kernels.certified import BLOCK
from kvcompile.schemes import certified

SET = tl.constexpr(certified.SET)
SCRATCH_AT, FETCHED_AT = tl.constexpr(COLUMNS.index("scratch")), tl.constexpr(COLUMNS.index("fetched"))
AT_ONCE = tl.constexpr(4)
"""Blocks that are on their way to a program at once."""


@triton.jit
def rows_of_slot(SCRATCH, group, slot, scratch_n, D: tl.constexpr, SLOTS: tl.constexpr, PER_PAGE: tl.constexpr):
    """Where a slot of a set of one kv head of one batch row begins."""
    PAGES: tl.constexpr = SET // PER_PAGE
    IN_PAGE: tl.constexpr = SLOTS // PAGES
    return SCRATCH + (group * PAGES + slot // IN_PAGE).to(tl.int64) * scratch_n + slot % IN_PAGE * (BLOCK * D)


@triton.jit
def given(place, used, asked, misses, exists, SLOTS: tl.constexpr):
    """Places of the blocks [16] from now on, and which of them each slot [SLOTS] is to be filled with, -1 for none."""
    i = tl.arange(0, SET)
    slot = tl.arange(0, SLOTS)
    holds = place[:, None] == slot[None, :] + 1
    last = tl.max(tl.where(holds, used[:, None], -1), 0)
    free = exists & (tl.max((holds & asked[:, None]).to(tl.int32), 0) == 0)
    # No two are the same: a step's number, and then the slot's.
    order = tl.where(free, last.to(tl.int64) * SLOTS + slot, 2**62)
    turn = tl.sum((order[None, :] < order[:, None]).to(tl.int32), 1)
    one = misses.to(tl.int32)
    fills = misses[:, None] & free[None, :] & ((tl.cumsum(one, 0) - one)[:, None] == turn[None, :])
    block = tl.max(tl.where(fills, i[:, None], -1), 0)
    new = tl.max(tl.where(fills, slot[None, :] + 1, 0), 1)
    gone = tl.max((holds & (block >= 0)[None, :]).to(tl.int32), 1) != 0
    return tl.where(new > 0, new, tl.where(gone, 0, place)), block


@triton.jit
def stage_keys(
    READ, EXPLORED, ORIGINALS, SCRATCH, PLACES, HELD, FOUND_AT, from_n, from_b, from_h, from_t, scratch_n, scratch_b, scratch_h, places_n,
    places_b, places_h, held_b, held_h, blocks,
    D: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, ROWS2: tl.constexpr, SLOTS: tl.constexpr, PER_PAGE: tl.constexpr,
    EXPLORE: tl.constexpr, COUNTS_STEPS: tl.constexpr,
):
    """One set of one kv head. READ [rows, N] asks for blocks, EXPLORED for some of them; HELD: its first element is the step's number.

    FOUND_AT, int32 [B, K, N]: the slot of each block that is asked for, -1 where it is read from ORIGINALS. PLACES: see
    ``schemes.certified``. COUNTS_STEPS: HELD is the telemetry.
    """
    group = tl.program_id(0)
    pair = tl.program_id(1)
    b = (pair // K).to(tl.int64)
    h = (pair % K).to(tl.int64)
    i = tl.arange(0, SET)
    n = group * SET + i
    r = tl.arange(0, ROWS2)
    inside = (n < blocks)[None, :] & (r < ROWS)[:, None]
    flags = (pair * ROWS + r).to(tl.int64)[:, None] * blocks + n[None, :]
    read = tl.load(READ + flags, mask=inside, other=0) != 0
    wanted = read
    if EXPLORE:
        wanted = read & (tl.load(EXPLORED + flags, mask=inside, other=0) == 0)
    places = PLACES + b * places_b + h * places_h + (n // PER_PAGE).to(tl.int64) * places_n + n % PER_PAGE * 2
    place = tl.load(places, mask=n < blocks, other=0)
    used = tl.load(places + 1, mask=n < blocks, other=0)
    step = tl.load(HELD).to(tl.int64) & 0x7FFFFFFF
    times = tl.sum(read.to(tl.int32), 0)
    asked = times > 0
    if tl.sum(times, 0) > 0:
        misses = (tl.max(wanted.to(tl.int32), 0) > 0) & (place == 0)
        slot = tl.arange(0, SLOTS)
        exists = (group * SET + slot // (SLOTS * PER_PAGE // SET) * PER_PAGE) < blocks
        then, block = given(place, used, asked, misses, exists, SLOTS)
        j = tl.arange(0, BLOCK)[:, None]
        c = tl.arange(0, D)[None, :]
        originals = ORIGINALS + b * from_b + h * from_h
        scratch = SCRATCH + b * scratch_b + h * scratch_h
        for first in tl.static_range(0, SLOTS, AT_ONCE):
            copies = ()
            for ahead in tl.static_range(AT_ONCE):
                one = tl.max(tl.where(slot == first + ahead, block, -1), 0)
                source = group * SET + tl.maximum(one, 0)
                here = originals + (source // PER_PAGE).to(tl.int64) * from_n + (source % PER_PAGE * BLOCK + j) * from_t + c
                copies = copies + (tl.load(here, mask=(one >= 0) & (j >= 0) & (c >= 0)),)
            for ahead in tl.static_range(AT_ONCE):
                one = tl.max(tl.where(slot == first + ahead, block, -1), 0)
                to = rows_of_slot(scratch, group, first + ahead + one * 0, scratch_n, D, SLOTS, PER_PAGE)
                tl.store(to + j * D + c, copies[ahead], mask=(one >= 0) & (j >= 0) & (c >= 0))
        tl.store(places, then, mask=(n < blocks) & (then != place))
        tl.store(places + 1, step.to(tl.int32) + i * 0, mask=asked & (then > 0))
        tl.store(FOUND_AT + pair.to(tl.int64) * blocks + n, then - 1, mask=asked)
        if COUNTS_STEPS:
            held = HELD + b * held_b + h * held_h
            there = tl.sum((asked & (place > 0)).to(tl.int32), 0)
            # What is not in the scratch is read by every row that asks for it.
            fetched = tl.sum(tl.where(asked & (then == 0), times, 0), 0) + tl.sum((misses & (then > 0)).to(tl.int32), 0)
            if there > 0:
                tl.atomic_add(held + SCRATCH_AT, there.to(tl.float64), sem="relaxed")
            if fetched > 0:
                tl.atomic_add(held + FETCHED_AT, fetched.to(tl.float64), sem="relaxed")
