"""Kernels over all stored tokens of a slot: write their levels, decode them by position, re-encode them.

A program has TILE indices of a batch row, or TILE entering tokens, of one kv head. The tokens of a program may have different widths, so
widths are run-time values, not constants, and a kernel compiles once: neither sizes nor the alignment of a layer's part of a tensor
specialise it.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc,var-annotated"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RUF005, RUF059 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.extensions.smartkv.kernels.hadamard8 import across, of_run
from kvcompile.extensions.smartkv.kernels.tokens import PAGE, ROW, bits_of, end_of, entered
from kvcompile.lowering.append.rounding import MAGIC, quotient, rounded_up


@triton.jit
def _bucket(ENDS, level, b, first, LEVELS: tl.constexpr, BITS: tl.constexpr):
    """Return (first index in batch row ``b``, number of tokens, first row of the pool, bits) of the bucket of each token's ``level``.

    ``first``: settled tokens of a batch row. For level LEVELS, of entering tokens: 0, 0, 0 and 8.
    """
    start, held, row, bits = level * 0, level * 0, level * 0, level * 0 + 8
    before = first * 0
    for each in tl.static_range(LEVELS):
        end = end_of(ENDS, b, first, each, LEVELS)
        here = level == each
        start, held = tl.where(here, before, start), tl.where(here, end - before, held)
        row = tl.where(here, tl.load(ENDS + b * (2 * LEVELS) + LEVELS + each), row)
        bits = tl.where(here, bits_of(BITS, each), bits)
        before = end
    return start, held, row.to(tl.int64), bits


@triton.jit
def _level(ENDS, place, b, first, LEVELS: tl.constexpr):
    """Return the level of the settled token at each index ``place`` of batch row ``b``, which has ``first`` settled tokens."""
    level = place * 0
    for each in tl.static_range(LEVELS - 1):
        level += (place >= end_of(ENDS, b, first, each, LEVELS)).to(tl.int32)
    return level


@triton.jit
def _found(
    CODES, SCALES, ENDS, SETTLED_SCALES, WHERE, POOL, first, pages, b, k, rows, K: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    BITS: tl.constexpr, TILE: tl.constexpr,
):
    """Return (at, high, bits, scale, position, level, ok) of a program's tokens, an entry for each of TILE tokens.

    ``at``, ``high``: pointers to a token's codes and to the high part of 3-bit codes; ``bits``: its width; ``level``: LEVELS for entering
    tokens. ``ok`` masks lanes without a token. ``first``: settled tokens of a batch row; ``pages``: number of pages of entering tokens;
    ``b``, ``k``: batch row and kv head; ``rows``: batch rows. CODES, SCALES: planes of entering tokens. BITS: see ``bits_of``; C: channels
    of a run.
    """
    of_settled = tl.cdiv(first, TILE)
    if tl.program_id(0) < of_settled:
        place = tl.program_id(0) * TILE + tl.arange(0, TILE)
        ok = place < first
        level = _level(ENDS, place, b, first, LEVELS)
        start, held, row, bits = _bucket(ENDS, level, b, first, LEVELS, BITS)
        number = k * held.to(tl.int64) + place - start
        low = tl.where(bits == 3, 2, bits) * C
        at = POOL + row * ROW + number * low
        high = POOL + row * ROW + held.to(tl.int64) * (K * 2 * C) + number * C
        scale = tl.load(SETTLED_SCALES + (b * first + start).to(tl.int64) * K + number, mask=ok, other=0.0)
        position = tl.load(WHERE + b * first + place, mask=ok, other=0)
    else:
        place = (tl.program_id(0) - of_settled) * TILE + tl.arange(0, TILE)
        ok = place < pages * PAGE
        level, bits = place * 0 + LEVELS, place * 0 + 8
        number = entered(place, b, k, rows, K)
        at = CODES + number * (8 * C)
        high = at
        scale = tl.load(SCALES + number, mask=ok, other=0.0)
        position = first + place
    return at, high, bits, scale, position, level, ok


@triton.jit
def _codes(at, high, bits, ok, C: tl.constexpr, COLUMNS: tl.constexpr):
    """Return signed codes of eight runs, int32 [tokens, COLUMNS] each, 0 from column C on, of tokens with bytes at ``at`` and ``high``.

    ``bits``: each token's width; ``high``: the rest of 3-bit codes; 0 for tokens that are not ``ok``.
    """
    j = tl.arange(0, COLUMNS)
    there = ok[:, None] & (j < C)[None, :]
    three = (bits == 3)[:, None]
    above = tl.load(high[:, None] + (2 * (j % (C // 2)) + j // (C // 2))[None, :], mask=there & three, other=0).to(tl.int32)
    low = tl.load(at[:, None] + 2 * j[None, :], mask=there & three, other=0).to(tl.int32)
    whole = low | (tl.load(at[:, None] + 2 * j[None, :] + 1, mask=there & three, other=0).to(tl.int32) << 8)
    half = 1 << (bits - 1)
    codes = ()
    for run in tl.static_range(8):
        byte = tl.where(bits == 8, (run // 2) * 2 * C + run % 2, tl.where(bits == 4, (run // 4) * 2 * C + run % 4 // 2, run // 4))
        shift = tl.where(bits == 8, 0, tl.where(bits == 4, 4 * (run % 2), 2 * (run % 4)))
        word = tl.load((at + byte)[:, None] + 2 * j[None, :], mask=there, other=0).to(tl.int32)
        code = (word >> shift[:, None]) & (2 * half - 1)[:, None]
        # In three bits, five runs are in a word, two in a byte, and the last one in both.
        if run < 5:
            code = tl.where(three, (whole >> (3 * run)) & 7, code)
        elif run < 7:
            code = tl.where(three, (above >> (3 * (run - 5))) & 7, code)
        else:
            code = tl.where(three, (above >> 6) | ((whole >> 15) << 2), code)
        # Eight bits are stored in two's complement, narrower codes with half of their range added.
        code = tl.where((bits == 8)[:, None], code ^ 128, code) - half[:, None]
        codes = codes + (tl.where(there, code, 0),)
    return codes


@triton.jit
def _turned(x, C: tl.constexpr, COLUMNS: tl.constexpr):
    """Return values in eight runs [tokens, COLUMNS] rotated, into or out of the frame of narrow keys: the rotation is its own inverse."""
    matrix = of_run(C, COLUMNS).to(tl.float32)
    within = ()
    for run in tl.static_range(8):
        within = within + (tl.dot(x[run], matrix, input_precision="ieee"),)
    return across(within, (8 * (C & -C)) ** -0.5)


@triton.jit
def _mean(MEAN, b, k, run: tl.constexpr, K: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr):
    """Load the mean of narrow keys of batch row ``b`` and kv head ``k`` in the channels of run number ``run``, [1, COLUMNS]."""
    j = tl.arange(0, COLUMNS)
    at = MEAN + (b * K + k) * (8 * C) + 2 * C * (run // 2) + 2 * j + run % 2
    return tl.load(at, mask=j < C, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["count"])
def say_levels(ENDS, WHERE, FIRST, OUT, count, LEVELS: tl.constexpr, TILE: tl.constexpr):
    """Write OUT int8 [B, count]: the levels of settled tokens at positions below ``count``; other entries stay. Grid: tiles, batch rows."""
    b = tl.program_id(1)
    first = tl.load(FIRST).to(tl.int32)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ok = place < first
    position = tl.load(WHERE + b * first + place, mask=ok, other=0)
    tl.store(OUT + b * count + position, _level(ENDS, place, b, first, LEVELS).to(tl.int8), mask=ok & (position < count))


@triton.jit(do_not_specialize=["pages", "rows", "count", "from_head"])
def decode_tokens(
    CODES, SCALES, FIRST, ENDS, SETTLED_SCALES, WHERE, POOL, MEAN, OUT, pages, rows, count, from_head, K: tl.constexpr, C: tl.constexpr,
    COLUMNS: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, TURNED: tl.constexpr, TILE: tl.constexpr,
):
    """Write OUT [B, heads, count, D]: decoded tokens at positions below ``count``, of the kv heads from ``from_head`` on.

    ``pages``: number of pages of entering tokens; ``rows``: number of batch rows; BITS: see ``bits_of``; TURNED: narrow tokens are rotated
    keys. Grid: tiles of settled and of entering tokens, heads, batch rows.
    """
    k, b = from_head + tl.program_id(1), tl.program_id(2)
    first = tl.load(FIRST).to(tl.int32)
    at, high, bits, scale, position, _level_, ok = _found(
        CODES, SCALES, ENDS, SETTLED_SCALES, WHERE, POOL, first, pages, b, k, rows, K, C, LEVELS, BITS, TILE,
    )
    ok &= position < count
    codes = _codes(at, high, bits, ok, C, COLUMNS)
    x = ()
    for run in tl.static_range(8):
        x = x + (codes[run].to(tl.float32) * scale.to(tl.float32)[:, None],)
    if TURNED:
        plain = _turned(x, C, COLUMNS)
    j = tl.arange(0, COLUMNS)
    out = OUT + (((b * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * count + position) * (8 * C))[:, None]
    for run in tl.static_range(8):
        value = x[run]
        if TURNED:
            value = tl.where((bits < 8)[:, None], plain[run] + _mean(MEAN, b, k, run, K, C, COLUMNS), value)
        channel = 2 * C * (run // 2) + 2 * j + run % 2
        tl.store(out + channel[None, :], value.to(OUT.dtype.element_ty), mask=ok[:, None] & (j < C)[None, :])


@triton.jit
def _put(WORDS, HIGH, mine, codes, C: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """Pack signed codes of BITS bits, in eight runs, and write them to WORDS for the tokens in the mask ``mine``.

    WORDS, HIGH: a pointer for each token. Of 3-bit codes, WORDS gets runs 0 to 4 and the high bit of run 7, HIGH the rest.
    """
    j = tl.arange(0, COLUMNS)
    there = mine[:, None] & (j < C)[None, :]
    at, half = WORDS[:, None] + 2 * j[None, :], 2 ** (BITS - 1)
    if BITS == 8:
        for run in tl.static_range(8):
            tl.store(at + ((run // 2) * 2 * C + run % 2), codes[run].to(tl.uint8), mask=there)
    elif BITS == 4:
        for two in tl.static_range(4):
            byte = (codes[2 * two] + half) | ((codes[2 * two + 1] + half) << 4)
            tl.store(at + ((two // 2) * 2 * C + two % 2), byte.to(tl.uint8), mask=there)
    elif BITS == 2:
        for four in tl.static_range(2):
            byte = codes[0] * 0
            for run in tl.static_range(4):
                byte |= (codes[4 * four + run] + half) << (2 * run)
            tl.store(at + four, byte.to(tl.uint8), mask=there)
    else:
        word = ((codes[7] + half) >> 2) << 15
        for run in tl.static_range(5):
            word |= (codes[run] + half) << (3 * run)
        tl.store(at, (word & 255).to(tl.uint8), mask=there)
        tl.store(at + 1, (word >> 8).to(tl.uint8), mask=there)
        byte = (codes[5] + half) | ((codes[6] + half) << 3) | (((codes[7] + half) & 3) << 6)
        tl.store(HIGH[:, None] + (2 * (j % (C // 2)) + j // (C // 2))[None, :], byte.to(tl.uint8), mask=there)


@triton.jit(do_not_specialize=["pages", "rows", "count", "LEVEL", "PLACE", "TO_ENDS"])
def move_tokens(
    CODES, SCALES, FIRST, ENDS, SETTLED_SCALES, WHERE, POOL, MEAN, LEVEL, PLACE, TO_ENDS, TO_SCALES, TO_WHERE, TO_POOL, pages,
    rows, count, K: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr,
    TURNED: tl.constexpr, SIGNED: tl.constexpr, TILE: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr,
):
    """Write the tokens at positions below ``count`` in new widths, into the planes TO_SCALES, TO_WHERE (positions) and TO_POOL (codes).

    LEVEL int8 and PLACE int32 [B, count]: each token's new level and index; TO_ENDS, which is only read, has the new buckets. SIGNED:
    scales of narrow codes have a sign. ULP, TINY: see ``rounded_up``. The other operands are as in ``decode_tokens``. The result is that of
    ``moves.EagerMoves``. Grid: tiles of settled and of entering tokens, kv heads, batch rows.
    """
    k, b = tl.program_id(1), tl.program_id(2)
    first = tl.load(FIRST).to(tl.int32)
    at, high, bits, held, position, _level_, ok = _found(
        CODES, SCALES, ENDS, SETTLED_SCALES, WHERE, POOL, first, pages, b, k, rows, K, C, LEVELS, BITS, TILE,
    )
    ok &= position < count
    level = tl.load(LEVEL + b * count + position, mask=ok, other=0).to(tl.int32)
    place = tl.load(PLACE + b * count + position, mask=ok, other=0)
    start, whole, row, wanted = _bucket(TO_ENDS, level, b, count, LEVELS, BITS)
    codes = _codes(at, high, bits, ok, C, COLUMNS)
    x = ()
    for run in tl.static_range(8):
        x = x + (codes[run].to(tl.float32) * held.to(tl.float32)[:, None],)
    # Keys of eight bits that become narrow change their frame.
    plain = (bits == 8) & (wanted < 8)
    if TURNED:
        less = ()
        for run in tl.static_range(8):
            less = less + (x[run] - _mean(MEAN, b, k, run, K, C, COLUMNS),)
        turned = _turned(less, C, COLUMNS)
        framed = ()
        for run in tl.static_range(8):
            framed = framed + (tl.where(plain[:, None], turned[run], x[run]),)
        x = framed
    largest, least = tl.max(x[0], 1), tl.min(x[0], 1)
    # Not x - x: a compiler may fuse the product before it, and the difference is then its rounding error.
    bad = tl.max((tl.abs(x[0]) < float("inf")).to(tl.int32) ^ 1, 1)
    for run in tl.static_range(1, 8):
        largest, least = tl.maximum(largest, tl.max(x[run], 1)), tl.minimum(least, tl.min(x[run], 1))
        bad |= tl.max((tl.abs(x[run]) < float("inf")).to(tl.int32) ^ 1, 1)
    # Columns from C on are zero, and no channels.
    top = tl.where(bad != 0, float("nan"), tl.maximum(largest, -least))
    half = (1 << (wanted - 1)).to(tl.float32)
    narrow = tl.where(wanted == 4, 1 / 8 if SIGNED else 1 / 7, tl.where(wanted == 3, 1 / 4 if SIGNED else 1 / 3, 0.5 if SIGNED else 1.0))
    reciprocal = tl.where(wanted == 8, 1 / 127, narrow)
    exact = rounded_up(top * reciprocal, ULP, TINY, TO_SCALES.dtype.element_ty).to(tl.float32)
    exact = tl.where(exact < TINY, TINY, exact)
    if SIGNED:
        exact = tl.where((wanted < 8) & (largest >= -least), -exact, exact)
    same = wanted == bits
    scale = tl.where(same, held, exact.to(TO_SCALES.dtype.element_ty))
    found = ()
    for run in tl.static_range(8):
        # The low bits of the sum with MAGIC are the rounded integer.
        code = (quotient(x[run], scale[:, None]) + MAGIC).to(tl.int32, bitcast=True) - 0x4B400000
        code = tl.minimum(tl.maximum(code, -half.to(tl.int32)[:, None]), half.to(tl.int32)[:, None] - 1)
        found = found + (tl.where(same[:, None], codes[run], tl.where((scale == scale)[:, None], code, 0)),)
    number = k * whole.to(tl.int64) + place - b * count - start
    words = TO_POOL + row * ROW + number * (tl.where(wanted == 3, 2, wanted) * C)
    above = TO_POOL + row * ROW + whole.to(tl.int64) * (K * 2 * C) + number * C
    _put(words, above, ok & (wanted == 8), found, C, COLUMNS, 8)
    _put(words, above, ok & (wanted == 4), found, C, COLUMNS, 4)
    _put(words, above, ok & (wanted == 3), found, C, COLUMNS, 3)
    _put(words, above, ok & (wanted == 2), found, C, COLUMNS, 2)
    tl.store(TO_SCALES + (b * count + start).to(tl.int64) * K + number, scale, mask=ok)
    tl.store(TO_WHERE + place, position, mask=ok & (k == 0))
