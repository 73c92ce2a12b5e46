"""Sums over the blocks of one row for its certificate; promotion of values to keep a budget. See ``certified``.

Everything here is float64 and evaluates the printed bounds; ``finish`` combines the sums per head.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RUF005 - kernels: operands are pointers and constants in capitals, tuples grow in loops.


from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.extensions.certified.kernels.bounds import (
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
from kvcompile.extensions.certified.kernels.certified import row_max_or_zero
from kvcompile.extensions.certified.kernels.select_blocks import gap_of, in_fours
from kvcompile.extensions.certified.kernels.top_k import bits_of, edge_of_tail
from kvcompile.schemes.certificate import bounds

ADDED = ("mass", "total", "least", "shift", "key", "blocks", "keys")
LARGEST = ("delta", "vmax", "delta_codes", "by_codes", "by_exact", "upper")
PLACES = ("first_by_codes", "first_by_exact")
COLUMNS = (*ADDED, *LARGEST, *PLACES)
"""Columns of ``bound_sums``, over a row's blocks, without a sink. ``key``: the key bound's terms around a center of zero.
Of theorem 7: the largest log-masses of blocks with exact keys (``by_codes``, ``by_exact``), the first blocks that have them, and
``upper``, the largest log-mass that a tail block may have."""

HALF_STEP, TENSOR_STEP = tl.constexpr(bounds.HALF_STEP), tl.constexpr(bounds.TENSOR_STEP)
LOST = tl.constexpr(2.0**-44)
"""An upper bound on the loss of the weights of a block's 16 tokens if their second number is subnormal, 2^-50 each (``weighted_values``).
"""

VALUE_COLUMNS = ("value", "own_values", "all_values", "values", "largest")
"""Columns of the values' terms: the value bound's sum; two sums of the accumulation, the second to be multiplied by ``largest``;
the number of blocks whose values are promoted; the largest nu + eta."""


@triton.jit
def sees(n, AT, r, blocks, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr):
    """Return two flags for each block ``n`` of row ``r``: the row sees a token of it; also, the block has tokens before the window.

    AT and ``blocks``: see ``certified``.
    """
    at = AT + r // (G * S * K) * (2 * S + 1)
    live = (n < blocks) & (n * 16 <= tl.load(at + r % S)) & (n * 16 + 16 > tl.load(at + S + r % S))
    return live, live & (n * 16 < tl.load(at + 2 * S))


@triton.jit
def masses(PEAK, WEIGHT, EXACT_PEAK, EXACT_WEIGHT, at, live, exact):
    """Load the softmax masses of blocks; return (peak, weight) by codes, and (peak, weight) to use in the certificate.

    A block's mass is ``weight`` times exp(``peak``). The masses to use are those by original keys for blocks flagged ``exact``, else those
    by codes. ``at``: the blocks' indices in the arrays. ``live``: the blocks of which the row sees a token; both numbers of other blocks
    are 0.
    """
    peak = tl.load(PEAK + at, mask=live, other=0.0)
    weight = tl.load(WEIGHT + at, mask=live, other=0.0)
    own_peak = tl.where(exact, tl.load(EXACT_PEAK + at, mask=exact, other=0.0), peak)
    own_weight = tl.where(exact, tl.load(EXACT_WEIGHT + at, mask=exact, other=0.0), weight)
    return peak, weight, own_peak, own_weight.to(tl.float64)


@triton.jit
def norm_of(SIZE, NOTE, coded, live):
    """Load the largest norm of each block's full-precision tokens: measured, at SIZE, for ``coded`` blocks, else stored, at NOTE.

    SIZE, NOTE: a pointer for each block. 0 for blocks that are not ``live``.
    """
    measured = tl.load(SIZE, mask=coded, other=0.0)
    return tl.where(coded, measured, tl.load(NOTE, mask=live & (coded == 0), other=0.0)).to(tl.float64)


@triton.jit
def chain_of(share, CHAIN: tl.constexpr):
    """Return the number of roundings between an original value and the output, for a program that adds ``share`` blocks and the window.

    CHAIN: see ``DeviceStep.chains``.
    """
    # A share of one is a compile-time constant, which has no ``to``.
    return tl.zeros([], tl.float64) + CHAIN + share + 4


@triton.jit
def coded_chain_of(share, CHAIN: tl.constexpr, T: tl.constexpr, CODES: tl.constexpr):
    """Return the number of roundings between a value that ``weighted_values`` reads and the output.

    T tokens are summed by tensor cores in one chain; ``share``: blocks that a split adds; encoded values (CODES) are first rounded to
    float16. CHAIN: see ``DeviceStep.chains``.
    """
    HALF: tl.constexpr = HALF_STEP if CODES else 0
    return chain_of(share, CHAIN) + (HALF + TENSOR_STEP * (T // 16))


@triton.jit
def value_terms_of(coded, used, explored, gap, weight, nu, eta, chain, coded_chain, FLOOR: tl.constexpr):
    """Return each block's addends to the sums VALUE_COLUMNS, in that order.

    The block's mass is weight * exp(gap); its largest norms are ``nu``, of values, and ``eta``, of their residuals. ``coded``: encoded
    blocks; ``used``: their values were read in full precision; ``explored``: they were read only to be compared with the codes. ``chain``,
    ``coded_chain``: roundings of a value from originals, and from codes. FLOOR is added to the norm of a value from codes, for its
    decoding.
    """
    eta = tl.where(used | explored, 0.0, eta)
    by_codes = coded & (used == 0) & (explored == 0)
    size = tl.where(by_codes, nu + FLOOR, nu)
    own_values = accumulation_term(tl.where(by_codes, coded_chain, chain), eta, gap, size, 0.0, weight)
    own_values += tl.where(by_codes, (size + eta) * LOST, 0.0)
    count = (used & coded & (explored == 0)).to(tl.float64)
    return value_term(eta, gap, weight), own_values, accumulation_term(chain, 0.0, gap, 0.0, 1.0, weight), count, nu + eta


@triton.jit
def store_values(OUT, value_sum, own_values, all_values, count, largest):
    """Store at OUT the columns of VALUE_COLUMNS, reduced over blocks: sums of the first four operands, and the maximum of ``largest``."""
    tl.store(OUT, tl.sum(value_sum, 0))
    tl.store(OUT + 1, tl.sum(own_values, 0))
    tl.store(OUT + 2, tl.sum(all_values, 0))
    tl.store(OUT + 3, tl.sum(count, 0))
    tl.store(OUT + 4, tl.max(largest, 0))


@triton.jit
def flags_of(VALUES, EXPLORED, at, coded, EXPLORE: tl.constexpr):
    """Load two flags for each ``coded`` block: its values are read from originals; its values are read only to be checked (explored).

    ``at``: the blocks' indices in VALUES and EXPLORED. EXPLORE: whether EXPLORED is read; without it no block is explored.
    """
    used = coded & (tl.load(VALUES + at, mask=coded, other=0) != 0)
    explored = coded & (coded == 0)
    if EXPLORE:
        explored = coded & (tl.load(EXPLORED + at, mask=coded, other=0) != 0)
    return used, explored


@triton.jit
def bound_sums(
    PEAK, WEIGHT, EXACT_PEAK, EXACT_WEIGHT, READ, EXPLORED, VALUES, DELTA, OWN, NOTES, KEY_SIZE, VALUE_SIZE, QUERY_NORM, AT, TOP, SUMS,
    OUT, blocks, share, own_share,
    CHAIN: tl.constexpr, T: tl.constexpr, FLOOR: tl.constexpr, CODES: tl.constexpr, RANK: tl.constexpr, AGREE: tl.constexpr,
    SCALE: tl.constexpr, D: tl.constexpr, EXPLORE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr,
    WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, ALL: tl.constexpr, SPEND: tl.constexpr,
):
    """Write the sums of CHUNK blocks of one row: SUMS [rows, chunks, WIDTH] by COLUMNS, and OUT [rows, chunks, OUT_WIDTH] by VALUE_COLUMNS.

    All are float64; grid: chunks, rows. READ [rows, N]: blocks whose masses by keys are those in EXACT_PEAK and EXACT_WEIGHT. VALUES:
    blocks whose values are from originals. EXPLORED: a subset of both. SPEND: OUT is left to ``spend_value_budget``. RANK: the columns of
    theorem 7 are written too, AGREE: also those by codes. ALL: READ is [rows]; for flagged rows every encoded block counts from its
    originals, by their norms KEY_SIZE and VALUE_SIZE (without ``delta_codes``), and nothing is written for other rows.

    ``share``, ``own_share``: blocks that a program of ``weighted_values``, or of ``weighted_originals``, adds up. CHAIN, T, FLOOR, CODES:
    see ``DeviceStep.chains``. SCALE: the magnitude of the attention's factor of scores.
    """
    r = tl.program_id(1)
    blocks = in_fours(blocks)
    row = r.to(tl.int64) * blocks
    pair = r // (G * S)
    wanted = r >= 0
    if ALL:
        wanted = tl.load(READ + r) != 0
    if wanted:
        n = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        live, coded = sees(n, AT, r, blocks, K, G, S)
        if ALL:
            exact = coded
        else:
            exact = coded & (tl.load(READ + row + n, mask=coded, other=0) != 0)
        top = row_max_or_zero(TOP + r)
        old_peak, old_weight, peak, weight = masses(PEAK, WEIGHT, EXACT_PEAK, EXACT_WEIGHT, row + n, live, exact)
        gap = gap_of(peak, top, live)
        note = NOTES + (pair * blocks + n) * 4
        left = OUT + (r.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * OUT_WIDTH
        chain = chain_of(own_share, CHAIN)
        if ALL:
            mu = norm_of(KEY_SIZE + pair * blocks + n, note + 1, coded, live)
            delta = tl.where(live, rounding(0.0, 0.0, mu, 0.0, tl.load(QUERY_NORM + r), SCALE, D + 4.0), 0.0)
            nu = norm_of(VALUE_SIZE + pair * blocks + n, note + 3, coded, live)
            terms = value_terms_of(coded, coded, coded, gap, weight, nu, 0.0, chain, chain, 0.0)
            store_values(left, terms[0], terms[1], terms[2], terms[3], terms[4])
        else:
            of_codes = tl.load(DELTA + row + n, mask=live, other=0.0).to(tl.float64)
            own = tl.load(OWN + row + n, mask=live, other=0.0).to(tl.float64)
            delta = tl.where(exact, own, of_codes)
            nu = tl.load(note + 3, mask=live, other=0.0).to(tl.float64)
            if SPEND == 0:
                eta = tl.load(note + 2, mask=coded, other=0.0).to(tl.float64)
                used, explored = flags_of(VALUES, EXPLORED, row + n, coded, EXPLORE)
                coded_chain = coded_chain_of(share, CHAIN, T, CODES)
                terms = value_terms_of(coded, used, explored, gap, weight, nu, eta, chain, coded_chain, FLOOR)
                store_values(left, terms[0], terms[1], terms[2], terms[3], terms[4])
        out = SUMS + (r.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * WIDTH
        tl.store(out, tl.sum(weight * tl.exp(gap), 0))
        tl.store(out + 1, tl.sum(total_term(gap, weight), 0))
        tl.store(out + 2, tl.sum(least_term(delta, gap, weight), 0))
        tl.store(out + 3, tl.sum(shift_term(delta, gap, weight), 0))
        tl.store(out + 4, tl.sum(key_term(0.0, delta, gap, nu, weight), 0))
        tl.store(out + 5, tl.sum(coded.to(tl.float64), 0))
        tl.store(out + 6, tl.sum(exact.to(tl.float64), 0))
        tl.store(out + 7, tl.max(delta, 0))
        tl.store(out + 8, tl.max(nu, 0))
        if ALL == 0:
            tl.store(out + 9, tl.max(tl.where(coded, of_codes, 0.0), 0))
        if RANK:
            known = live & (exact | (coded == 0))
            log_mass = peak.to(tl.float64) + tl.log(weight)
            other = tl.where(known, tl.where(log_mass == log_mass, log_mass, float("inf")), float("-inf"))
            bound = largest_log_mass(delta, log_mass)
            bound = tl.where(coded & (exact == 0), tl.where(bound == bound, bound, float("inf")), float("-inf"))
            most_by_exact = tl.max(other, 0)
            tl.store(out + 11, most_by_exact)
            tl.store(out + 12, tl.max(bound, 0))
            tl.store(out + 14, tl.min(tl.where(other == most_by_exact, n, blocks), 0).to(tl.float64))
            if AGREE:
                one = old_peak.to(tl.float64) + tl.log(old_weight.to(tl.float64))
                one = tl.where(known, tl.where(one == one, one, float("inf")), float("-inf"))
                most_by_codes = tl.max(one, 0)
                tl.store(out + 10, most_by_codes)
                tl.store(out + 13, tl.min(tl.where(one == most_by_codes, n, blocks), 0).to(tl.float64))


@triton.jit
def spend_value_budget(
    PEAK, WEIGHT, EXACT_PEAK, EXACT_WEIGHT, READ, EXPLORED, NOTES, SINKS, AT, TOP, SUMS, ORDER, TERM, LOCAL, VALUES, OUT, blocks, chunks,
    share, own_share,
    CHAIN: tl.constexpr, T: tl.constexpr, FLOOR: tl.constexpr, CODES: tl.constexpr, BUDGET: tl.constexpr, EXPLORE: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr,
):
    """Choose the blocks of one row whose values are promoted: write their flags to VALUES [rows, N], and OUT [rows, 1, OUT_WIDTH].

    Runs after ``bound_sums``. Chosen are the blocks flagged in LOCAL, then those with the largest terms, until the value bound is at most
    BUDGET; promotion by exact masses, instead of estimates, makes the budget hold. OUT: the row's terms of VALUE_COLUMNS then. TERM
    (float64) and ORDER (float32), [rows, N], are scratch.

    ``chunks``: sums of a row in SUMS. ``share``, ``own_share`` and constants: as in ``bound_sums``.
    """
    r = tl.program_id(0)
    blocks = in_fours(blocks)
    row = r.to(tl.int64) * blocks
    pair = r // (G * S)
    i = tl.arange(0, CHUNK)
    top = tl.load(TOP + r)
    part = tl.arange(0, 64)
    parts = tl.zeros([64], tl.float64)
    for first in range(0, chunks, 64):
        at = SUMS + (r.to(tl.int64) * chunks + first + part) * WIDTH + 1
        parts += tl.load(at, mask=first + part < chunks, other=0.0)
    total = tl.sum(parts, 0) + tl.exp(tl.load(SINKS + r).to(tl.float64) - top.to(tl.float64)) * (1.0 - 2.0**-20)
    total = tl.where(total < 1e-300, 1e-300, total)
    candidates = tl.zeros([CHUNK], tl.int32)
    most = tl.zeros([CHUNK], tl.int32)
    for first in range(0, blocks, CHUNK):
        n = first + i
        live, coded = sees(n, AT, r, blocks, K, G, S)
        exact = coded & (tl.load(READ + row + n, mask=coded, other=0) != 0)
        _peak, _weight, peak, weight = masses(PEAK, WEIGHT, EXACT_PEAK, EXACT_WEIGHT, row + n, live, exact)
        used, explored = flags_of(LOCAL, EXPLORED, row + n, coded, EXPLORE)
        eta = tl.where(used | explored, 0.0, tl.load(NOTES + (pair * blocks + n) * 4 + 2, mask=coded, other=0.0).to(tl.float64))
        term = value(total, value_term(eta, gap_of(peak, top, live), weight))
        # Below zero for promoted blocks: no candidates, so no sum includes them.
        tl.store(TERM + row + n, tl.where(used, -1.0, term), mask=n < blocks)
        # A term below the least float32 number must differ from a term of zero.
        order = tl.where((used == 0) & (term > 0), term + 2.0**-126, -1.0).to(tl.float32)
        tl.store(ORDER + row + n, order, mask=n < blocks)
        bits = order.to(tl.int32, bitcast=True)
        most = tl.maximum(most, bits)
        candidates += (bits >= 0).to(tl.int32)
    # Written by some threads of this program, read by others.
    tl.debug_barrier()
    available = tl.sum(candidates, 0)
    edge, _reach = edge_of_tail(
        ORDER + row, TERM + row, blocks, available * 0, available, tl.minimum(tl.max(most, 0), 2147483646) + 1, available * 0, BUDGET, CHUNK
    )
    chain = chain_of(own_share, CHAIN)
    coded_chain = coded_chain_of(share, CHAIN, T, CODES)
    value_sum = tl.zeros([CHUNK], tl.float64)
    own_values = tl.zeros([CHUNK], tl.float64)
    all_values = tl.zeros([CHUNK], tl.float64)
    largest = tl.zeros([CHUNK], tl.float64)
    count = tl.zeros([CHUNK], tl.float64)
    for first in range(0, blocks, CHUNK):
        n = first + i
        live, coded = sees(n, AT, r, blocks, K, G, S)
        note = NOTES + (pair * blocks + n) * 4
        exact = coded & (tl.load(READ + row + n, mask=coded, other=0) != 0)
        _peak, _weight, peak, weight = masses(PEAK, WEIGHT, EXACT_PEAK, EXACT_WEIGHT, row + n, live, exact)
        local, explored = flags_of(LOCAL, EXPLORED, row + n, coded, EXPLORE)
        used = coded & ((bits_of(ORDER + row, n, blocks) >= edge) | local)
        tl.store(VALUES + row + n, used.to(tl.int8), mask=n < blocks)
        terms = value_terms_of(
            coded, used, explored, gap_of(peak, top, live), weight, tl.load(note + 3, mask=live, other=0.0).to(tl.float64),
            tl.load(note + 2, mask=coded, other=0.0).to(tl.float64), chain, coded_chain, FLOOR,
        )
        value_sum += terms[0]
        own_values += terms[1]
        all_values += terms[2]
        count += terms[3]
        largest = tl.maximum(largest, terms[4], propagate_nan=tl.PropagateNan.ALL)
    store_values(OUT + r.to(tl.int64) * OUT_WIDTH, value_sum, own_values, all_values, count, largest)
