"""The kernel after smartkv's attention: merges the splits into the result, and updates the importance of tokens and the averages of heads.

The first programs of a batch row merge ELEMENTS entries of a kv head's result each; the others update the importance of CHUNK tokens each,
settled ones by index, then entering ones.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RUF005, RUF059 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.extensions.smartkv.kernels.attend import LIFT, LOG2E, STEP, share_of
from kvcompile.extensions.smartkv.kernels.tokens import PAGE

CHUNK = tl.constexpr(512)
"""Tokens of a program."""
ELEMENTS = tl.constexpr(32)
"""Entries of the result that a program merges."""


@triton.jit
def _whole(STATS, SINKS, at, there, head, R: tl.constexpr, SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Return (each split's factor [SPLITS, rows], total, largest score, base) of the rows whose statistics begin at STATS + ``at``.

    The last three are per row. The total includes, if HAS_SINKS, the sink of the row's query head ``head``; the largest score is over all
    splits. Factors and totals are in units of exp2(base - LIFT). ``there`` masks the rows that exist; R: rows of STATS for a kv head.
    """
    at = at[None, :] + tl.arange(0, SPLITS)[:, None]
    tops = tl.load(STATS + at + R * SPLITS, mask=there[None, :], other=float("-inf"))
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    factor = tl.exp2(tops - base[None, :])
    total = tl.sum(tl.load(STATS + at + 2 * R * SPLITS, mask=there[None, :], other=0.0) * factor, 0)
    if HAS_SINKS:
        sink = tl.load(SINKS + head, mask=there, other=0.0).to(tl.float32)
        total += tl.where(there, tl.exp2(sink * LOG2E - (base - LIFT)), 0.0)
    return factor, total, tl.max(tl.load(STATS + at, mask=there[None, :], other=float("-inf")), 0), base


@triton.jit
def _largest(total, peak, base):
    """Return the largest softmax weight of each row; 0 if the row sees nothing or the weight is not finite.

    ``total``, ``peak`` (the largest score), ``base``: results of ``_whole``.
    """
    found = tl.where((peak == float("-inf")) | (total == 0), 0.0, tl.exp2(peak - (base - LIFT)) / total)
    return tl.where((found == found) & (found < float("inf")), found, 0.0)


@triton.jit
def _merged(
    PARTS, STATS, SINKS, HEADS, OUT, b, unit, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    SPLITS: tl.constexpr, HEAD_DECAY: tl.constexpr, HAS_SINKS: tl.constexpr,
):
    """Write ELEMENTS entries of a kv head's rows of OUT [B, H, S, D]; the head's first program also updates its average in HEADS [B, K].

    ``b``: the batch row; ``unit``: the program's number in it, kv head after kv head. PARTS, STATS: see ``attend_tokens``; HEAD_DECAY: the
    decay of a head's average per query.
    """
    units: tl.constexpr = (D * G * S + ELEMENTS - 1) // ELEMENTS
    k, number = unit // units, unit % units
    pair = b * K + k
    e = number * ELEMENTS + tl.arange(0, ELEMENTS)
    ok, row, channel = e < D * G * S, e % (G * S), e // (G * S)
    factor, total, _p, _b = _whole(STATS, SINKS, (pair * (4 * R) + row) * SPLITS, ok, k * G + row % G, R, SPLITS, HAS_SINKS)
    part = PARTS + (pair.to(tl.int64) * SPLITS + tl.arange(0, SPLITS))[:, None] * (D * G * S) + e[None, :]
    # Splits without tokens have sums and a factor of zero.
    out = tl.sum(tl.load(part, mask=ok[None, :], other=0.0) * factor, 0)
    at = ((b * (K * G) + k * G + row % G) * S + row // G).to(tl.int64) * D + channel
    tl.store(OUT + at, tl.where(total == 0, 0.0, out / total).to(OUT.dtype.element_ty), mask=ok)
    if number == 0:
        r = tl.arange(0, R)
        there = r < G * S
        _f, of_rows, peak, base = _whole(STATS, SINKS, (pair * (4 * R) + r) * SPLITS, there, k * G + r % G, R, SPLITS, HAS_SINKS)
        largest = _largest(of_rows, peak, base)
        head = tl.load(HEADS + pair)
        head = tl.where(head == 0, 1.0, head)
        for query in tl.static_range(S):
            head = HEAD_DECAY * head + (1 - HEAD_DECAY) * tl.sum(tl.where(there & (r // G == query), largest, 0.0), 0) / G
        tl.store(HEADS + pair, head)


@triton.jit
def finish(
    PARTS, STATS, SCORES, WEIGHTS, SINKS, FIRST, WHERE, HI, OUT, HEADS, IMPORTANCE, pages, rows, slots, hi_b, hi_s, K: tl.constexpr,
    G: tl.constexpr, S: tl.constexpr, R: tl.constexpr, D: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
    DECAY: tl.constexpr, HEAD_DECAY: tl.constexpr, LEAST: tl.constexpr, HAS_SINKS: tl.constexpr,
):
    """Write OUT [B, H, S, D], or update IMPORTANCE [N, B, PAGE, 2]; some programs also update the averages HEADS [B, K].

    Grid: programs of a batch row, batch rows. KV, GROUP: K and G rounded up to powers of two. PARTS, STATS, SCORES and WEIGHTS are results
    of ``attend_tokens``; the other operands are as there.

    ``pages``, ``rows``, ``slots``: pages of entering tokens, batch rows, entries of SCORES for each head. DECAY, HEAD_DECAY: the decay of
    the averages of tokens and of heads, per query. LEAST: the importance, at least, of a token that some query sees.
    """
    b = tl.program_id(1)
    merging: tl.constexpr = K * ((D * G * S + ELEMENTS - 1) // ELEMENTS)
    if tl.program_id(0) < merging:
        _merged(PARTS, STATS, SINKS, HEADS, OUT, b, tl.program_id(0), K, G, S, R, D, SPLITS, HEAD_DECAY, HAS_SINKS)
    else:
        chunk = tl.program_id(0) - merging
        first = tl.load(FIRST).to(tl.int32)
        of_settled = tl.cdiv(first, CHUNK)
        settled = chunk < of_settled
        last = tl.load(HI + b * hi_b).to(tl.int32)
        for query in tl.static_range(1, S):
            last = tl.maximum(last, tl.load(HI + b * hi_b + query * hi_s).to(tl.int32))
        count = tl.where(settled, first, tl.minimum(pages * PAGE, tl.minimum(slots, last + 1) - first))
        begin = tl.where(settled, chunk, chunk - of_settled) * CHUNK
        if begin < count:
            k, g = tl.arange(0, KV * GROUP) // GROUP, tl.arange(0, KV * GROUP) % GROUP
            there = (k < K) & (g < G)
            heads = tl.load(WEIGHTS + b * K + k, mask=there, other=1.0)
            heads = tl.where(heads == 0, 1.0, heads)
            rows_at = ((b * K + k) * (4 * R) + g) * SPLITS
            lifts, weights = (), ()
            for query in tl.static_range(S):
                _factor, total, peak, base = _whole(STATS, SINKS, rows_at + query * (G * SPLITS), there, k * G + g, R, SPLITS, HAS_SINKS)
                # Averages of heads move with every query; the measure of a kv head is the mean over its group.
                measure = tl.sum(tl.reshape(tl.where(there, _largest(total, peak, base), 0.0), [KV, GROUP]), 1) / G
                own = tl.reshape(tl.broadcast_to(measure[:, None], [KV, GROUP]), [KV * GROUP])
                heads = HEAD_DECAY * heads + (1 - HEAD_DECAY) * own
                # The exponent added to a score so that exp2 gives its softmax weight; -inf for rows that see nothing or are not finite.
                lift = LIFT - base - tl.log2(total)
                lift = tl.where((total > 0) & (total < float("inf")), lift, float("-inf"))
                lifts, weights = lifts + (lift,), weights + (heads,)
            share = share_of(count, SPLITS)
            for place in range(begin, tl.minimum(begin + CHUNK, count), STEP):
                i = place + tl.arange(0, STEP)
                ok = i < count
                slot = tl.where(settled, i, first + i)
                position = tl.where(settled, tl.load(WHERE + b * first + i, mask=ok & settled, other=0), slot)
                at = IMPORTANCE + (((position // PAGE) * rows + b).to(tl.int64) * PAGE + position % PAGE) * 2
                plain, weighted = tl.load(at, mask=ok, other=0.0), tl.load(at + 1, mask=ok, other=0.0)
                seen = tl.zeros([STEP], tl.float32)
                for query in tl.static_range(S):
                    reference = tl.load(STATS + rows_at + (3 * R + query * G) * SPLITS + place // share, mask=there, other=0.0)
                    lift = tl.where(reference == float("-inf"), 0.0, reference) + lifts[query]
                    x = tl.load(
                        SCORES + (((b * K + k).to(tl.int64) * slots)[None, :] + slot[:, None]) * (G * S) + (query * G + g)[None, :],
                        mask=ok[:, None] & there[None, :], other=float("-inf"),
                    ).to(tl.float32)
                    given = tl.exp2(x + lift[None, :])
                    # NaN is not above 0.
                    given = tl.where(given > 0, given, 0.0)
                    mass = tl.sum(given, 1)
                    seen += mass
                    plain = DECAY * plain + (1 - DECAY) / (K * G) * mass
                    weighted = DECAY * weighted + (1 - DECAY) / (K * G) * tl.sum(given * weights[query][None, :], 1)
                tl.store(at, tl.where(seen > 0, tl.maximum(plain, LEAST), plain), mask=ok)
                tl.store(at + 1, weighted, mask=ok)
