"""The pass of certified attention over original keys: see ``certified``.

    exact_scores  reads one block of one row's list: runs the consistency check, overwrites logits with exact ones, sums them again
    dense_scores  reads all blocks of the rows that fall back, few or none: every program finds those rows and takes a share of their blocks

Latency determines the time of ``exact_scores``: a program has one block, and loads all of it before it uses any. Two rows that promote the
same block both check it, the second from the cache. In ``dense_scores`` blocks are loaded while those before are multiplied.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.extensions.certified.kernels.bounds import consistent
from kvcompile.extensions.certified.kernels.certified import (
    BLOCK,
    FLAGS,
    above,
    doubtful,
    exp_of,
    fallen,
    finite_or_infinite,
    norm_above,
    pop_pending,
    sight,
    weighed,
)
from kvcompile.extensions.certified.kernels.stage_blocks import rows_of_slot

PART = tl.constexpr(4)
"""Tokens of a block that ``exact_scores`` processes at a time: a quarter of the registers allows twice the warps."""


@triton.jit
def exact_scores(
    Q, CODES, STEPS, ZEROS, ORIGINALS, LIST, LISTED, AT, NOTES, DELTA, OWN, LOGITS, PEAK, WEIGHT, TOP, DAMAGED,
    SCRATCH, FOUND_AT, q_b, q_h, q_s, codes_n, codes_b, codes_h, steps_n, steps_b, steps_h, from_n, from_b, from_h, from_t,
    scratch_b, scratch_h, blocks, sets,
    SCALE: tl.constexpr, GUARD: tl.constexpr, D: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr,
    PER_PAGE: tl.constexpr, STAGED: tl.constexpr,
):
    """Score the first LISTED [rows] blocks of a row's LIST [rows, N] by original keys, and check them against their codes and notes.

    Overwrites the LOGITS, PEAK and WEIGHT of these blocks and raises TOP [rows] to their largest logit. DAMAGED of the kv head becomes 1 if
    a logit is further from that by codes than DELTA, OWN and GUARD allow, or a norm exceeds its note: compared in float64, but only for
    tokens that float32 does not decide, mostly the two that determined the notes. Grid: programs that share a row's list; rows. STAGED:
    blocks that ``stage_blocks`` found in the SCRATCH of ``sets`` sets, or copied there, are read from there.
    """
    r = tl.program_id(1)
    pair = r // (G * S)
    b = (pair // K).to(tl.int64)
    h = (pair % K).to(tl.int64)
    blocks_at = r.to(tl.int64) * blocks
    listed = tl.load(LISTED + r)
    # Loaded before it is known to be valid; any content is safe then.
    n = tl.load(LIST + blocks_at + tl.program_id(0))
    at = AT + b * (2 * S + 1)
    start, last, base = sight(at, S, S2)
    high = tl.load(at + r % S)
    low = tl.load(at + S + r % S)
    top = tl.load(TOP + r)
    c = tl.arange(0, D)
    q = tl.load(Q + b * q_b + (h * G + r % (G * S) // S) * q_h + (r % S) * q_s + c[None, :]).to(tl.float32)
    for entry in range(tl.program_id(0), listed, tl.num_programs(0)):
        page, row = (n // PER_PAGE).to(tl.int64), n % PER_PAGE
        first = n * BLOCK
        originals = ORIGINALS + page * from_n + b * from_b + h * from_h + row * BLOCK * from_t
        apart_t = from_t
        if STAGED:
            slot = tl.load(FOUND_AT + pair.to(tl.int64) * blocks + n)
            held = rows_of_slot(SCRATCH + b * scratch_b + h * scratch_h, n, sets, tl.maximum(slot, 0), D)
            originals = tl.where(slot >= 0, held, originals)
            apart_t = tl.where(slot >= 0, D, from_t)
        codes = CODES + page * codes_n + b * codes_b + h * codes_h + row * (BLOCK * D)
        scales = page * steps_n + b * steps_b + h * steps_h + row * D
        step = tl.load(STEPS + scales + c[None, :])
        zero = tl.load(ZEROS + scales + c[None, :])
        place = blocks_at + n
        note = NOTES + (pair.to(tl.int64) * blocks + n) * 4
        kappa = tl.load(note)
        mu = tl.load(note + 1)
        delta = tl.load(DELTA + place).to(tl.float64)
        rounded = tl.load(OWN + place).to(tl.float64)
        following = entry + tl.num_programs(0)
        n = tl.load(LIST + blocks_at + following, mask=following < listed, other=0)
        moved = tl.zeros([], tl.float32)
        damaged = listed < 0
        for part in range(BLOCK // PART):
            i = part * PART + tl.arange(0, PART)
            t = first + i
            coded = t < base
            k = tl.load(originals + i[:, None] * apart_t + c[None, :], mask=coded[:, None], other=0.0).to(tl.float32)
            old = tl.load(LOGITS + place * BLOCK + i)
            # Loaded last, so that Triton gives the computation this load's layout, in which fewer threads share a token.
            decoded = tl.load(codes + i[:, None] * D + c[None, :]).to(tl.float32) * step + zero
            found = tl.sum(k * q, 1) * SCALE
            away = k - decoded
            # Tokens that no query sees may differ from what was encoded.
            doubts = coded & (t >= start) & (t <= last) & (doubtful(tl.sum(k * k, 1), mu) | doubtful(tl.sum(away * away, 1), kappa))
            seen = (t >= low) & (t <= high)
            apart = tl.abs(found - old)
            moved = tl.maximum(moved, tl.max(tl.where(seen & coded, tl.where(apart == apart, apart, float("inf")), 0.0), 0))
            # All threads must have read the old logits before any is overwritten: the barriers of the sums do not ensure it.
            tl.debug_barrier()
            tl.store(LOGITS + place * BLOCK + i, tl.where(seen, tl.where(coded, found, old), float("-inf")))
            pending = doubts.to(tl.int32)
            for _turn in range(tl.sum(pending, 0)):
                which, pending = pop_pending(pending, i, BLOCK)
                k64 = tl.load(originals + which * apart_t + c).to(tl.float64)
                one = tl.load(codes + which * D + c).to(tl.float32) * tl.load(STEPS + scales + c) + tl.load(ZEROS + scales + c)
                away64 = k64 - one.to(tl.float64)
                damaged = damaged | above(tl.sum(k64 * k64, 0), mu) | above(tl.sum(away64 * away64, 0), kappa)
        # Written by some threads of this program, read by others.
        tl.debug_barrier()
        peak, weight = weighed(tl.load(LOGITS + place * BLOCK + tl.arange(0, BLOCK)))
        tl.store(PEAK + place, peak)
        tl.store(WEIGHT + place, weight)
        # Exact logits may exceed all those by codes; the maximum does not depend on the order of programs.
        if peak > top:
            tl.atomic_max(TOP + r, peak, sem="relaxed")
        # Keys with NaN or Inf, marked by a NaN note, have no logit to compare.
        if damaged | ((kappa == kappa) & ((moved.to(tl.float64) <= consistent(delta, GUARD, rounded)) == 0)):
            tl.store(DAMAGED + pair, 1)


@triton.jit
def largest_newest(PEAK, first, stop):
    """Return the largest logit of a row's blocks from ``first`` up to ``stop`` - 1, by PEAK of the row; minus infinity without any."""
    most = tl.full([], float("-inf"), tl.float32)
    for n in range(first, stop, BLOCK):
        block = n + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.max(tl.load(PEAK + block, mask=block < stop, other=float("-inf")), 0))
    return most


@triton.jit
def exact_block_scores(here, q, LOGITS, PEAK, WEIGHT, SIZE, t, low, high, start, last, base, PARTLY: tl.constexpr, SCALE: tl.constexpr):
    """Overwrite the LOGITS, PEAK and WEIGHT of one block for one row by its original keys; return the block's largest logit.

    Also written: SIZE, a float32 upper bound on the largest norm of its keys that any query sees. ``here``: pointers to the keys [16, D];
    ``q``: the row's query, float32 [1, D]; ``t``: the positions of the block's tokens. The row sees positions ``low`` to ``high``, some
    query of the batch row ``start`` to ``last``; others get minus infinity. PARTLY: the block is encoded in part only; logits of tokens
    from ``base`` on, the window's first position, stay.
    """
    k = tl.load(here).to(tl.float32)
    found = tl.sum(k * q, 1) * SCALE
    if PARTLY:
        # No thread writes these logits, so reading and writing needs no barrier.
        old = tl.load(LOGITS + tl.arange(0, BLOCK), mask=t >= base, other=float("-inf"))
        new = tl.where((t >= low) & (t <= high) & (t < base), found, old)
        tl.store(LOGITS + tl.arange(0, BLOCK), new, mask=t < base)
    else:
        new = tl.where((t >= low) & (t <= high), found, float("-inf"))
        tl.store(LOGITS + tl.arange(0, BLOCK), new)
    # As ``weighed``, but stored at once: keeping the peak until both are known costs a fifth more registers (sm_90: 154 instead of 128).
    peak = tl.max(new, 0)
    tl.store(PEAK, peak)
    tl.store(WEIGHT, tl.sum(exp_of(new - tl.where(peak == float("-inf"), 0.0, peak)), 0))
    own = (t >= start) & (t <= last)
    if PARTLY:
        own = own & (t < base)
    tl.store(SIZE, norm_above(tl.max(tl.where(own, finite_or_infinite(tl.sum(k * k, 1)), 0.0), 0)))
    return peak


@triton.jit
def dense_scores(
    Q, ORIGINALS, FALLS, AT, CODED_PEAK, LOGITS, PEAK, WEIGHT, EXACT_TOP, SIZE, q_b, q_h, q_s, from_n, from_b, from_h, from_t, rows, blocks,
    SCALE: tl.constexpr, D: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, S2: tl.constexpr,
    PER_PAGE: tl.constexpr, STAGES: tl.constexpr,
):
    """Score every num_programs-th block of each row flagged in FALLS by original keys: overwrite its LOGITS, PEAK and WEIGHT.

    Also written: SIZE [B, K, N], float32 upper bounds on the largest norm of a key in each block; several rows of a kv head write the same.
    EXACT_TOP [rows] is raised to a row's largest logit. The last program has the block that is encoded in part, and takes the newest
    tokens' logits into account, by CODED_PEAK. A NaN logit is never the largest, but makes its block's weight NaN.
    """
    flag = tl.arange(0, FLAGS)
    j = tl.arange(0, BLOCK)
    c = tl.arange(0, D)[None, :]
    place = j[:, None] * from_t + c
    for first in range(0, rows, FLAGS):
        pending = fallen(FALLS, first, rows, flag)
        for _row in range(tl.sum(pending, 0)):
            which, pending = pop_pending(pending, flag, FLAGS)
            r = first + which
            pair = r // (G * S)
            b = (pair // K).to(tl.int64)
            h = (pair % K).to(tl.int64)
            at = AT + b * (2 * S + 1)
            start, last, base = sight(at, S, S2)
            high = tl.load(at + r % S)
            low = tl.load(at + S + r % S)
            # Loaded twice, as two rows, so that a thread has the same channels of queries and keys, and a row's channels are in as few
            # threads as possible.
            twice = Q + b * q_b + (h * G + r % (G * S) // S) * q_h + (r % S) * q_s + tl.arange(0, 2)[:, None] * 0
            q = tl.max(tl.load(twice + c).to(tl.float32), 0)[None, :]
            of_row = r.to(tl.int64) * blocks
            of_pair = SIZE + pair.to(tl.int64) * blocks
            originals = ORIGINALS + b * from_b + h * from_h
            # Every block that any query of the batch row sees, so that ``bound_sums`` need not check which of them were scored for its row.
            stop = tl.maximum(tl.minimum(last + 1, base), 0)
            whole = tl.maximum(tl.minimum(last // BLOCK + 1, base // BLOCK), 0)
            n_first = start // BLOCK + tl.program_id(0)
            most = tl.full([], float("-inf"), tl.float32)
            for turn in tl.range(0, tl.cdiv(tl.maximum(whole - n_first, 0), tl.num_programs(0)), num_stages=STAGES):
                n = n_first + turn * tl.num_programs(0)
                here = originals + (n // PER_PAGE).to(tl.int64) * from_n + n % PER_PAGE * BLOCK * from_t + place
                m = of_row + n
                peak = exact_block_scores(
                    here, q, LOGITS + m * BLOCK, PEAK + m, WEIGHT + m, of_pair + n, n * BLOCK + j, low, high, start, last, base, False,
                    SCALE,
                )
                most = tl.maximum(most, peak)
            if tl.program_id(0) == tl.num_programs(0) - 1:
                n = tl.maximum(whole, start // BLOCK)
                if n * BLOCK < stop:
                    here = originals + (n // PER_PAGE).to(tl.int64) * from_n + n % PER_PAGE * BLOCK * from_t + place
                    m = of_row + n
                    peak = exact_block_scores(
                        here, q, LOGITS + m * BLOCK, PEAK + m, WEIGHT + m, of_pair + n, n * BLOCK + j, low, high, start, last, base, True,
                        SCALE,
                    )
                    most = tl.maximum(most, peak)
                newest = (tl.maximum(base, 0) + BLOCK - 1) // BLOCK
                most = tl.maximum(most, largest_newest(CODED_PEAK + of_row, newest, high // BLOCK + 1))
            if most > float("-inf"):
                tl.atomic_max(EXACT_TOP + r, most, sem="relaxed")
