"""What a certificate is made of, summed over the blocks of one row; promotion of values. See ``triton_certified``.

Everything here is float64 and evaluates the printed bounds; what they need per head is put together in ``certificate.from_sums``.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RUF005 - kernels: operands are pointers and constants in capitals, tuples grow in loops.


from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.triton_bounds import (
    accumulation_term,
    key_term,
    largest_log_mass,
    least_term,
    rounding,
    shift_term,
    total_term,
    value,
    value_term,
)
from kvcompile.lowering.triton_choose import gap_of, mark, standing

COLUMNS = (
    "mass", "total", "least", "shift", "key", "delta", "vmax", "value", "own_values", "all_values", "largest", "blocks", "keys", "values",
    "delta_codes", "disagree", "entering",
)
"""What SUMS has of each row; ``key`` is the sum of the key bound's terms around a center of zero, ``own_values`` and ``all_values`` those of
the accumulation, which times the ``largest`` of nu + eta must be added; the last two are theorem 7's flags."""

WIDTH = len(COLUMNS)


@triton.jit
def tally(
    PEAK, WEIGHT, EXACT_PEAK, EXACT_WEIGHT, READ, EXPLORED, DELTA, OWN, NOTES, KEY_SIZE, VALUE_SIZE, QUERY_NORM, SINKS, AT, ORDER, TERM,
    VALUES, TOP, SUMS, blocks,
    V_TOL: tl.constexpr, BUDGET: tl.constexpr, SPEND: tl.constexpr, EXPLORE: tl.constexpr, RANK: tl.constexpr, CHAIN, SCALE: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr,
):
    """One row. READ [rows, N]: blocks whose sums are those of EXACT (ALL: READ [rows], all of codes, or there is nothing to do).

    VALUES, flags: blocks that may add more than V_TOL, and (SPEND) the largest others until the rest is within BUDGET; those explored.
    """
    r = tl.program_id(0)
    row = r.to(tl.int64) * blocks
    rows: tl.constexpr = G * S
    at = AT + r // (rows * K) * (2 * S + 1)
    pair = r // rows
    base = tl.load(at + 2 * S)
    high = tl.load(at + r % S)
    low = tl.load(at + S + r % S)
    i = tl.arange(0, CHUNK)
    sink = tl.load(SINKS + r)
    stop = blocks
    if ALL:
        stop = tl.where(tl.load(READ + r) != 0, blocks, 0)

    # What counts for each block is put together once, in place of what the row would have by codes alone.
    top = sink
    for first in range(0, stop, CHUNK):
        n = first + i
        live = (n < blocks) & (n * 16 <= high) & (n * 16 + 16 > low)
        coded = live & (n * 16 < base)
        if ALL:
            exact = coded
        else:
            exact = coded & (tl.load(READ + row + n, mask=coded, other=0) != 0)
        peak = tl.load(PEAK + row + n, mask=live & (exact == 0), other=float("-inf"))
        peak = tl.where(exact, tl.load(EXACT_PEAK + row + n, mask=exact, other=float("-inf")), peak)
        top = tl.maximum(top, tl.max(peak, 0))
    top = tl.where(top == float("-inf"), 0.0, top)
    if not ALL:
        tl.store(TOP + r, top)
    sink_mass = tl.exp(sink.to(tl.float64) - top.to(tl.float64))
    zero = sink_mass * 0.0
    mass = sink_mass
    total = sink_mass * (1.0 - 2.0**-20)
    least = total
    shift = zero
    key = zero
    largest_delta = zero
    delta_codes = zero
    vmax = zero
    held = 0
    keys = 0
    by_codes = zero + float("-inf")
    by_exact = zero + float("-inf")
    first_by_codes = blocks
    first_by_exact = blocks
    upper = zero + float("-inf")
    for first in range(0, stop, CHUNK):
        n = first + i
        live = (n < blocks) & (n * 16 <= high) & (n * 16 + 16 > low)
        coded = live & (n * 16 < base)
        if ALL:
            exact = coded
        else:
            exact = coded & (tl.load(READ + row + n, mask=coded, other=0) != 0)
        peak = tl.load(PEAK + row + n, mask=live, other=0.0)
        weight = tl.load(WEIGHT + row + n, mask=live, other=0.0)
        old_peak = peak
        old_weight = weight
        peak = tl.where(exact, tl.load(EXACT_PEAK + row + n, mask=exact, other=0.0), peak)
        weight = tl.where(exact, tl.load(EXACT_WEIGHT + row + n, mask=exact, other=0.0), weight).to(tl.float64)
        if ALL:
            mu = tl.sqrt(tl.load(KEY_SIZE + pair * blocks + n, mask=coded, other=0.0)) * (1.0 + 2.0**-40)
            mu = tl.where(coded, mu, tl.load(NOTES + (pair * blocks + n) * 4 + 1, mask=live, other=0.0).to(tl.float64))
            delta = tl.where(live, rounding(0.0, 0.0, mu, 0.0, tl.load(QUERY_NORM + r), SCALE, D + 4.0), 0.0)
            nu = tl.sqrt(tl.load(VALUE_SIZE + pair * blocks + n, mask=coded, other=0.0)) * (1.0 + 2.0**-40)
            nu = tl.where(coded, nu, tl.load(NOTES + (pair * blocks + n) * 4 + 3, mask=live, other=0.0).to(tl.float64))
        else:
            of_codes = tl.load(DELTA + row + n, mask=live, other=0.0)
            delta = tl.where(exact, tl.load(OWN + row + n, mask=live, other=0.0), of_codes)
            nu = tl.load(NOTES + (pair * blocks + n) * 4 + 3, mask=live, other=0.0).to(tl.float64)
            delta_codes = tl.maximum(delta_codes, tl.max(tl.where(coded, of_codes, 0.0), 0))
            held += tl.sum(coded.to(tl.int32), 0)
            keys += tl.sum(exact.to(tl.int32), 0)
        gap = gap_of(peak, top, live)
        mass += tl.sum(weight * tl.exp(gap), 0)
        total += tl.sum(total_term(gap, weight), 0)
        least += tl.sum(least_term(delta, gap, weight), 0)
        shift += tl.sum(shift_term(delta, gap, weight), 0)
        key += tl.sum(key_term(0.0, delta, gap, nu, weight), 0)
        largest_delta = tl.maximum(largest_delta, tl.max(delta, 0))
        vmax = tl.maximum(vmax, tl.max(nu, 0))
        if RANK:
            known = live & (exact | (coded == 0))
            one = old_peak.to(tl.float64) + tl.log(old_weight.to(tl.float64))
            other = peak.to(tl.float64) + tl.log(weight)
            one = tl.where(known, tl.where(one == one, one, float("inf")), float("-inf"))
            other = tl.where(known, tl.where(other == other, other, float("inf")), float("-inf"))
            most = tl.max(one, 0)
            first_by_codes = tl.where(most > by_codes, tl.min(tl.where(one == most, n, blocks), 0), first_by_codes)
            by_codes = tl.maximum(by_codes, most)
            most = tl.max(other, 0)
            first_by_exact = tl.where(most > by_exact, tl.min(tl.where(other == most, n, blocks), 0), first_by_exact)
            by_exact = tl.maximum(by_exact, most)
            bound = largest_log_mass(delta, peak.to(tl.float64) + tl.log(weight))
            bound = tl.where(coded & (exact == 0), tl.where(bound == bound, bound, float("inf")), float("-inf"))
            upper = tl.maximum(upper, tl.max(bound, 0))
    total = tl.where(total < 1e-300, 1e-300, total)
    disagree = (first_by_codes != first_by_exact).to(tl.float64)
    of_first = tl.load(OWN + row + first_by_exact, mask=first_by_exact < blocks, other=0.0)
    entering = ((upper <= by_exact - of_first) == 0).to(tl.float64)

    # Values: who is promoted, then the sums of what is left.
    if not ALL:
        for first in range(0, stop, CHUNK):
            n = first + i
            live = (n < blocks) & (n * 16 <= high) & (n * 16 + 16 > low)
            coded = live & (n * 16 < base)
            exact = coded & (tl.load(READ + row + n, mask=coded, other=0) != 0)
            peak = tl.load(PEAK + row + n, mask=live, other=0.0)
            peak = tl.where(exact, tl.load(EXACT_PEAK + row + n, mask=exact, other=0.0), peak)
            weight = tl.load(WEIGHT + row + n, mask=live, other=0.0)
            weight = tl.where(exact, tl.load(EXACT_WEIGHT + row + n, mask=exact, other=0.0), weight).to(tl.float64)
            eta = tl.load(NOTES + (pair * blocks + n) * 4 + 2, mask=coded, other=0.0).to(tl.float64)
            if EXPLORE:
                eta = tl.where(tl.load(EXPLORED + row + n, mask=coded, other=0) != 0, 0.0, eta)
            term = value(total, value_term(eta, gap_of(peak, top, live), weight))
            local = (term <= V_TOL) == 0
            if SPEND:
                rest = tl.where(local, 0.0, term)
                # Below zero: taken already. No candidate, so nobody adds it up.
                tl.store(TERM + row + n, tl.where(local, -1.0, term), mask=n < blocks)
                # What is less than the least float32 number must not look like what adds nothing.
                tl.store(ORDER + row + n, tl.where(rest > 0, rest + 2.0**-126, -1.0).to(tl.float32), mask=n < blocks)
            else:
                tl.store(VALUES + row + n, local.to(tl.int8), mask=n < blocks)
        tl.debug_barrier()
        if SPEND:
            digit = tl.arange(0, 16)
            mark(ORDER, VALUES, row, blocks, standing(ORDER, TERM, row, blocks, BUDGET, digit, i, CHUNK), digit, i, CHUNK)
            tl.debug_barrier()
    value_sum = zero
    own_values = zero
    all_values = zero
    largest = zero
    values = 0
    for first in range(0, stop, CHUNK):
        n = first + i
        live = (n < blocks) & (n * 16 <= high) & (n * 16 + 16 > low)
        coded = live & (n * 16 < base)
        if ALL:
            exact = coded
            nu = tl.sqrt(tl.load(VALUE_SIZE + pair * blocks + n, mask=coded, other=0.0)) * (1.0 + 2.0**-40)
            nu = tl.where(coded, nu, tl.load(NOTES + (pair * blocks + n) * 4 + 3, mask=live, other=0.0).to(tl.float64))
        else:
            exact = coded & (tl.load(READ + row + n, mask=coded, other=0) != 0)
            nu = tl.load(NOTES + (pair * blocks + n) * 4 + 3, mask=live, other=0.0).to(tl.float64)
        peak = tl.load(PEAK + row + n, mask=live, other=0.0)
        peak = tl.where(exact, tl.load(EXACT_PEAK + row + n, mask=exact, other=0.0), peak)
        weight = tl.load(WEIGHT + row + n, mask=live, other=0.0)
        weight = tl.where(exact, tl.load(EXACT_WEIGHT + row + n, mask=exact, other=0.0), weight).to(tl.float64)
        gap = gap_of(peak, top, live)
        eta = tl.zeros([CHUNK], tl.float64)
        if not ALL:
            eta = tl.load(NOTES + (pair * blocks + n) * 4 + 2, mask=coded, other=0.0).to(tl.float64)
            used = tl.load(VALUES + row + n, mask=n < blocks, other=0) != 0
            if SPEND:
                used = used | (tl.load(TERM + row + n, mask=n < blocks, other=0.0) < 0)
            if EXPLORE:
                explored = tl.load(EXPLORED + row + n, mask=coded, other=0) != 0
                used = used & (explored == 0)
                values += tl.sum((used & coded).to(tl.int32), 0)
                used = used | explored
            else:
                values += tl.sum((used & coded).to(tl.int32), 0)
            tl.store(VALUES + row + n, used.to(tl.int8), mask=n < blocks)
            eta = tl.where(used, 0.0, eta)
        value_sum += tl.sum(value_term(eta, gap, weight), 0)
        own_values += tl.sum(accumulation_term(CHAIN, eta, gap, nu, 0.0, weight), 0)
        all_values += tl.sum(accumulation_term(CHAIN, 0.0, gap, 0.0, 1.0, weight), 0)
        largest = tl.maximum(largest, tl.max(nu + eta, 0))

    out = SUMS + r * WIDTH
    tl.store(out, mass)
    tl.store(out + 1, total)
    tl.store(out + 2, tl.where(least < 1e-300, 1e-300, least))
    tl.store(out + 3, shift)
    tl.store(out + 4, key)
    tl.store(out + 5, largest_delta)
    tl.store(out + 6, vmax)
    tl.store(out + 7, value_sum)
    tl.store(out + 8, own_values)
    tl.store(out + 9, all_values)
    tl.store(out + 10, largest)
    tl.store(out + 11, held.to(tl.float64))
    tl.store(out + 12, keys.to(tl.float64))
    tl.store(out + 13, values.to(tl.float64))
    tl.store(out + 14, delta_codes)
    tl.store(out + 15, disagree)
    tl.store(out + 16, entering)
