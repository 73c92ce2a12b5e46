"""The last kernels of certified attention: each row's certificate, checks and result, and the step's telemetry. See ``certified``.

    certify   one row each: combines the sums of ``bound_sums`` and ``weighted_values`` into the result and its certificate, and decides
              whether the row falls back
    finalize  one kv head each: the same for its rows that fell back, after the second run; then adds all its rows to the telemetry

Everything but figures, counters and results is float64 and follows the printed bounds.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RET505, SIM300 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.extensions.certified.kernels import bound_sums
from kvcompile.extensions.certified.kernels.bounds import accumulation, center_norm, key, output_rounding, value
from kvcompile.extensions.certified.kernels.certified import fallen, pop_pending, row_max_or_zero, up32
from kvcompile.lowering.certificate import head_bounds
from kvcompile.schemes.certificate import telemetry
from kvcompile.schemes.certificate.policy import Cause, Count, Figure, Rung
from kvcompile.schemes.certificate.telemetry import BINNED, COLUMNS, COUNTED


def _place(name: str) -> tl.constexpr:
    """Return the index of the column ``name`` in ``bound_sums.COLUMNS``."""
    return tl.constexpr(bound_sums.COLUMNS.index(name))


def _left(name: str) -> tl.constexpr:
    """Return the index of the column ``name`` in ``bound_sums.VALUE_COLUMNS``."""
    return tl.constexpr(bound_sums.VALUE_COLUMNS.index(name))


MASS, TOTAL, LEAST, SHIFT, KEY = (_place(name) for name in ("mass", "total", "least", "shift", "key"))
BLOCKS, KEYS = _place("blocks"), _place("keys")
DELTA, VMAX, DELTA_CODES, UPPER = (_place(name) for name in ("delta", "vmax", "delta_codes", "upper"))
BY_CODES, BY_EXACT = _place("by_codes"), _place("by_exact")
FIRST_BY_CODES, FIRST_BY_EXACT = _place("first_by_codes"), _place("first_by_exact")
WIDTH = tl.constexpr(len(bound_sums.COLUMNS))
VALUE_SUM, OWN_VALUES, ALL_VALUES, VALUES, MOST_VALUE = (_left(name) for name in bound_sums.VALUE_COLUMNS)
LEFT_WIDTH = tl.constexpr(len(bound_sums.VALUE_COLUMNS))

FIGURES, COUNTS = tl.constexpr(len(Figure)), tl.constexpr(len(Count))
CANDIDATES = tl.constexpr(int(Figure.CANDIDATE_KEY))
"""The first of three consecutive bounds of the candidate result; those of the returned result are consecutive too."""
RETURNED, DELTA_FIGURE, TAIL_FIGURE = (tl.constexpr(int(each)) for each in (Figure.KEY, Figure.DELTA, Figure.TAIL))
BLOCK_COUNT, KEY_COUNT, VALUE_COUNT, EXPLORED_COUNT, WIDENED_COUNT, RUNG_COUNT, CAUSES_COUNT = (
    tl.constexpr(int(each)) for each in Count
)
RANK, BOUNDARY, BUDGET, NOT_FINITE, DAMAGE = (tl.constexpr(int(each)) for each in Cause)
PLAIN, WIDENED, BY_VALUES, HEAD, LAYER = (tl.constexpr(int(each)) for each in Rung)

SUMS_AT, MOST_AT = tl.constexpr(COLUMNS.index("sum_candidate_key")), tl.constexpr(COLUMNS.index("most_candidate_key"))
COUNTED_AT, RUNGS_AT = tl.constexpr(COLUMNS.index("blocks")), tl.constexpr(COLUMNS.index("rung_plain"))
CAUSES_AT, ADDED_COUNTS = tl.constexpr(COLUMNS.index("cause_rank")), tl.constexpr(len(COUNTED))
RUNGS, CAUSES = tl.constexpr(len(Rung)), tl.constexpr(len(Cause))
KEY_BYTES_AT, VALUE_BYTES_AT = tl.constexpr(COLUMNS.index("key_bytes")), tl.constexpr(COLUMNS.index("value_bytes"))

BINS, FIRST_BITS = tl.constexpr(telemetry.BINS), tl.constexpr(telemetry.FIRST_BITS)
HISTOGRAMS_AT, LAST_AT = tl.constexpr(telemetry.HISTOGRAMS_AT), tl.constexpr(telemetry.LAST_AT)
LAST_HEADS, LAST_WIDTH = tl.constexpr(telemetry.LAST_HEADS), tl.constexpr(telemetry.LAST_WIDTH)

assert BINNED == (Figure.CANDIDATE_KEY, Figure.CANDIDATE_VALUE, Figure.KEY, Figure.VALUE, Count.KEYS, Count.VALUES), "as below"
OF_FIGURES = tl.constexpr(4)
"""Number of histograms of figures, which come first."""

LEAST_NORMAL, OUTWARD = tl.constexpr(head_bounds.LEAST_NORMAL), tl.constexpr(head_bounds.OUTWARD)
LARGEST_NUMBER = tl.constexpr(1.7976931348623157e308)
AT_ONCE = tl.constexpr(64)
"""Programs of ``bound_sums`` whose sums are loaded at a time."""


@triton.jit
def as_dtype(x, DTYPE: tl.constexpr):
    """Return float32 ``x`` rounded to DTYPE, ties to even; bfloat16 by hand, since Triton's interpreter would truncate."""
    if DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 32767 + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, bits, 32704).to(tl.int16).to(DTYPE, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def safe_divisor(x):
    """Return max(x, LEAST_NORMAL): a divisor that is never zero; NaN passes through."""
    return tl.where(x < LEAST_NORMAL, LEAST_NORMAL, x)


@triton.jit
def column(columns, place: tl.constexpr):
    """Return the entry of the vector ``columns`` at ``place``."""
    return tl.sum(tl.where(tl.arange(0, columns.shape[0]) == place, columns, 0.0), 0)


@triton.jit
def load_partials(SUMS, r, first, count, OF: tl.constexpr, WIDE: tl.constexpr):
    """Load the partial sums of AT_ONCE programs, from number ``first`` on, of row ``r``: [AT_ONCE, WIDE], from SUMS [rows, count, OF].

    WIDE: the power of two from OF on. Zero for programs from ``count`` on and columns from OF on.
    """
    program = first + tl.arange(0, AT_ONCE)[:, None]
    column = tl.arange(0, WIDE)[None, :]
    at = SUMS + (r.to(tl.int64) * count + program) * OF + column
    return tl.load(at, mask=(program < count) & (column < OF), other=0.0)


@triton.jit
def sum_and_max(found, SUMS, r, count, OF: tl.constexpr, WIDE: tl.constexpr):
    """Return the sums and the maxima of the columns of SUMS [rows, count, OF] over all programs of row ``r``, float64 [WIDE] each.

    The maximum is NaN if any entry is, and so is the sum. ``count``: programs of a row; ``found``: the columns of the first AT_ONCE of
    them, already loaded. WIDE: the power of two from OF on.
    """
    column = tl.arange(0, WIDE)[None, :]
    added = tl.zeros([WIDE], tl.float64)
    most = tl.full([WIDE], float("-inf"), tl.float64)
    broken = tl.zeros([WIDE], tl.int32)
    for first in range(0, count, AT_ONCE):
        program = first + tl.arange(0, AT_ONCE)[:, None]
        inside = (program < count) & (column < OF)
        added += tl.sum(found, 0)
        broken += tl.sum((found != found).to(tl.int32), 0)
        most = tl.maximum(most, tl.max(tl.where(inside & (found == found), found, float("-inf")), 0))
        found = load_partials(SUMS, r, first + AT_ONCE, count, OF, WIDE)
    return added, tl.where(broken == 0, most, float("nan"))


@triton.jit
def some_parts(PARTS, r, rows, first, count, DV: tl.constexpr, SPAN: tl.constexpr):
    """Load SPAN partial results of row ``r``, from number ``first`` on: [SPAN, DV], from PARTS [count, rows, DV].

    Zero from number ``count`` on.
    """
    part = first + tl.arange(0, SPAN)[:, None]
    return tl.load(PARTS + (part.to(tl.int64) * rows + r) * DV + tl.arange(0, DV)[None, :], mask=part < count, other=0.0)


@triton.jit
def result_of(parts, PARTS, r, rows, count, mass, DV: tl.constexpr, SPAN: tl.constexpr):
    """Return row r's output, float64 [DV]: the sum of its ``count`` partial results in PARTS [count, rows, DV], divided by ``mass``.

    ``parts``: the first SPAN of them, already loaded.
    """
    added = tl.zeros([SPAN, DV], tl.float64)
    for first in range(0, count, SPAN):
        added += parts.to(tl.float64)
        parts = some_parts(PARTS, r, rows, first + SPAN, count, DV, SPAN)
    return tl.sum(added, 0) / safe_divisor(mass)


@triton.jit
def certificate_of(sums, most, left, left_most, sink, output, OUT_UNIT: tl.constexpr, OUT_TINY: tl.constexpr):
    """Return a head's three error bounds, of keys, of values and of arithmetic, from its reduced sums; as ``head_bounds.certificate``.

    ``sums``, ``most``: sums and maxima by ``bound_sums.COLUMNS``; ``left``, ``left_most``: those by ``VALUE_COLUMNS``. ``sink``: the mass
    of the row's sink; ``output``: the result, float64 [DV]. OUT_UNIT, OUT_TINY: the relative and the absolute rounding error of the
    output's dtype. Terms are linear in the center and in the largest norm, which are known only after all blocks are summed.
    """
    least_sink = sink * (1.0 - 2.0**-20)
    total = safe_divisor(column(sums, TOTAL) + least_sink)
    least = safe_divisor(column(sums, LEAST) + least_sink)
    by_values = value(total, column(left, VALUE_SUM))
    added = accumulation(total, (column(left, OWN_VALUES) + column(left_most, MOST_VALUE) * column(left, ALL_VALUES)) * OUTWARD)
    size = tl.sqrt(tl.sum(output * output, 0)) * (1.0 + 2.0**-40)
    vmax = column(most, VMAX)
    center = center_norm(size, by_values + added, vmax)
    shift = column(sums, SHIFT)
    by_keys = key(center, column(most, DELTA), (column(sums, KEY) + center * shift) * OUTWARD, least, shift, total, vmax)
    return by_keys, by_values, added + output_rounding(size, OUT_TINY, OUT_UNIT)


@triton.jit
def found_of(
    SUMS, LEFT, PARTS, SINKS, TOP, r, rows, chunks, programs, parts, OUT_UNIT: tl.constexpr, OUT_TINY: tl.constexpr, DV: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Load row r's partial sums; return (sums, maxima, sums of values, output [DV], bounds of keys, of values, of arithmetic).

    SUMS has ``chunks`` and LEFT ``programs`` partial sums of each row, with columns ``bound_sums.COLUMNS`` and ``VALUE_COLUMNS``; PARTS
    [parts, rows, DV] holds the partial results. SINKS, TOP: the logit of the row's sink, and the row's largest logit. The bounds are those
    of the distance from full-precision attention. All results are float64. SPAN: partial results loaded at a time; OUT_UNIT, OUT_TINY: see
    ``certificate_of``.
    """
    # The first load of every kind is in flight before any is used.
    first_sums = load_partials(SUMS, r, 0, chunks, WIDTH, 16)
    first_left = load_partials(LEFT, r, 0, programs, LEFT_WIDTH, 8)
    first_parts = some_parts(PARTS, r, rows, 0, parts, DV, SPAN)
    sink = tl.exp(tl.load(SINKS + r).to(tl.float64) - row_max_or_zero(TOP + r).to(tl.float64))
    sums, most = sum_and_max(first_sums, SUMS, r, chunks, WIDTH, 16)
    left, left_most = sum_and_max(first_left, LEFT, r, programs, LEFT_WIDTH, 8)
    output = result_of(first_parts, PARTS, r, rows, parts, column(sums, MASS) + sink, DV, SPAN)
    by_keys, by_values, arithmetic = certificate_of(sums, most, left, left_most, sink, output, OUT_UNIT, OUT_TINY)
    return sums, most, left, output, by_keys, by_values, arithmetic


@triton.jit
def bounded(arithmetic, stored):
    """Return ``arithmetic``, a bound; infinity if ``stored``, the result in the output's dtype, overflowed."""
    beyond = tl.max((tl.abs(stored.to(tl.float32)) == float("inf")).to(tl.int32), 0)
    return tl.where(beyond != 0, float("inf"), arithmetic)


@triton.jit
def first_of(SUMS, r, chunks, most, MASS: tl.constexpr, FIRST: tl.constexpr):
    """Return, as float64, the lowest index of a block of row r whose log-mass equals the maximum ``most``; infinity if there is none.

    In SUMS [rows, chunks, WIDTH], column MASS holds each chunk's largest log-mass, and column FIRST the index of its first block with it.
    """
    found = tl.full([], float("inf"), tl.float64)
    for first in range(0, chunks, AT_ONCE):
        chunk = first + tl.arange(0, AT_ONCE)
        inside = chunk < chunks
        sums = SUMS + (r.to(tl.int64) * chunks + chunk) * WIDTH
        here = inside & (tl.load(sums + MASS, mask=inside, other=0.0) == most)
        found = tl.minimum(found, tl.min(tl.load(sums + FIRST, mask=here, other=float("inf")), 0))
    return found


@triton.jit
def ranks_fail(SUMS, OWN, r, most, blocks, chunks, AGREE: tl.constexpr):
    """Return the failures that ``certified.checks.rank_fails`` finds for one leading block of row ``r``, as bits of ``Cause``.

    SUMS: by ``bound_sums``, ``chunks`` of each row; ``most``: the row's maxima of its columns. OWN [rows, blocks]: deviations of logits
    from originals. AGREE: codes must order the blocks in the same way.
    """
    by_exact = column(most, BY_EXACT)
    first_by_exact = first_of(SUMS, r, chunks, by_exact, BY_EXACT, FIRST_BY_EXACT)
    standing = first_by_exact < blocks
    own = tl.load(OWN + r.to(tl.int64) * blocks + tl.where(standing, first_by_exact, 0.0).to(tl.int64), mask=standing, other=0.0)
    own = own.to(tl.float64)
    highest = column(most, UPPER)
    entering = (highest <= by_exact - own) == 0
    found = tl.where(entering, BOUNDARY, 0)
    if AGREE:
        same = first_of(SUMS, r, chunks, column(most, BY_CODES), BY_CODES, FIRST_BY_CODES) == first_by_exact
        found = found | tl.where(same, 0, RANK)
    # Without a block of codes in the tail the result does not depend on the order.
    return tl.where(highest == float("-inf"), 0, found)


@triton.jit
def certify(
    SUMS, LEFT, PARTS, SINKS, TOP, OWN, STATS, DAMAGED, GIVEN, RESULT, FOUND, COUNTED_OUT, FALLS, EXACT_TOP, blocks, chunks, programs,
    parts, KEY_BUDGET: tl.constexpr, VALUE_BUDGET: tl.constexpr, RANKED: tl.constexpr, AGREE: tl.constexpr, DENSE: tl.constexpr,
    OUT_UNIT: tl.constexpr, OUT_TINY: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Write RESULT [rows, DV], FOUND [rows, figures] and COUNTED_OUT [rows, counts] of one row, and whether it falls back, to FALLS [rows].

    A row falls back if a check fails (never unless DENSE); ``finalize`` then overwrites its result and bound. Also written: EXACT_TOP
    [rows], the row's sink, from which the maximum of ``dense_scores`` starts. RANKED above one: GIVEN has the causes of ranks. STATS [rows,
    3]: see ``select_blocks``.

    ``chunks``, ``programs``, ``parts``: numbers of a row's sums in SUMS, sums in LEFT and results in PARTS (``found_of``). OWN [rows,
    blocks] is read if RANKED is one. DAMAGED: flags of kv heads; one damaged head makes all rows of its batch row fall back. KEY_BUDGET,
    VALUE_BUDGET: the largest bounds that pass. ROWS: rows of a kv head.
    """
    r = tl.program_id(0)
    sums, most, left, output, by_keys, by_values, arithmetic = found_of(
        SUMS, LEFT, PARTS, SINKS, TOP, r, tl.num_programs(0), chunks, programs, parts, OUT_UNIT, OUT_TINY, DV, SPAN,
    )
    stored = as_dtype(output.to(tl.float32), RESULT.dtype.element_ty)
    arithmetic = bounded(arithmetic, stored)
    finite = tl.abs(by_keys + by_values + arithmetic) <= LARGEST_NUMBER
    within = (by_keys <= KEY_BUDGET) & (by_values <= VALUE_BUDGET)
    causes = tl.where(finite, tl.where(within, 0, BUDGET), NOT_FINITE)
    if RANKED == 1:
        causes = causes | ranks_fail(SUMS, OWN, r, most, blocks, chunks, AGREE)
    elif RANKED > 1:
        causes = causes | tl.load(GIVEN + r)
    head = tl.arange(0, K2)
    damaged = tl.max(tl.load(DAMAGED + r // (ROWS * K) * K + head, mask=head < K, other=0).to(tl.int32), 0)
    causes = causes | tl.where(damaged != 0, DAMAGE, 0)
    falls = causes != causes
    if DENSE:
        falls = causes != 0
    tl.store(FALLS + r, falls.to(tl.int8))
    # A sink's logit is the first that ``dense_scores`` compares.
    tl.store(EXACT_TOP + r, tl.load(SINKS + r))
    tl.store(RESULT + r.to(tl.int64) * DV + tl.arange(0, DV), stored)

    figures = FOUND + r * FIGURES
    tl.store(figures + CANDIDATES, up32(by_keys))
    tl.store(figures + CANDIDATES + 1, up32(by_values))
    tl.store(figures + CANDIDATES + 2, up32(arithmetic))
    tl.store(figures + RETURNED, tl.where(falls, 0.0, up32(by_keys)))
    tl.store(figures + RETURNED + 1, tl.where(falls, 0.0, up32(by_values)))
    tl.store(figures + RETURNED + 2, up32(arithmetic))
    tl.store(figures + DELTA_FIGURE, up32(column(most, DELTA_CODES)))
    tl.store(figures + TAIL_FIGURE, up32(tl.load(STATS + r * 3 + 1)))

    explored = tl.load(STATS + r * 3 + 2)
    values = column(left, VALUES)
    widened = tl.load(STATS + r * 3) != 0
    rung = tl.where(widened, WIDENED, PLAIN)
    rung = tl.where(values > 0, BY_VALUES, rung)
    rung = tl.where(falls, tl.where(damaged != 0, LAYER, HEAD), rung)
    counts = COUNTED_OUT + r * COUNTS
    tl.store(counts + BLOCK_COUNT, column(sums, BLOCKS).to(tl.int32))
    tl.store(counts + KEY_COUNT, (column(sums, KEYS) - explored).to(tl.int32))
    tl.store(counts + VALUE_COUNT, values.to(tl.int32))
    tl.store(counts + EXPLORED_COUNT, explored.to(tl.int32))
    tl.store(counts + WIDENED_COUNT, widened.to(tl.int32))
    tl.store(counts + RUNG_COUNT, rung)
    tl.store(counts + CAUSES_COUNT, causes)


@triton.jit
def finalize(
    SUMS, LEFT, PARTS, SINKS, TOP, FALLS, RESULT, FOUND, COUNTED_OUT, TELEMETRY, telemetry_b, telemetry_h, chunks, parts,
    OUT_UNIT: tl.constexpr, OUT_TINY: tl.constexpr, K: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, ROWS2: tl.constexpr,
    DV: tl.constexpr, SPAN: tl.constexpr, DENSE: tl.constexpr, COUNTS_STEPS: tl.constexpr, KEY_BYTES: tl.constexpr,
    VALUE_BYTES: tl.constexpr, KEYS_STAGED: tl.constexpr, VALUES_STAGED: tl.constexpr,
):
    """Overwrite RESULT and its bound in FOUND for one kv head's rows that fall back (DENSE); add all its rows to TELEMETRY (COUNTS_STEPS).

    The latter is ``certificate.telemetry.accumulate``. KEY_BYTES and VALUE_BYTES: bytes of a block's originals in host memory, else zero;
    if they are staged, ``stage_blocks`` counts promoted blocks. ``chunks``, ``parts``: numbers of a row's sums in SUMS and LEFT, and of its
    results in PARTS.
    """
    pair = tl.program_id(0)
    if DENSE:
        flag = tl.arange(0, ROWS2)
        pending = fallen(FALLS + pair * ROWS, 0, ROWS, flag)
        for _turn in range(tl.sum(pending, 0)):
            which, pending = pop_pending(pending, flag, ROWS2)
            r = pair * ROWS + which
            _sums, _most, _left, output, by_keys, _by_values, arithmetic = found_of(
                SUMS, LEFT, PARTS, SINKS, TOP, r, tl.num_programs(0) * ROWS, chunks, chunks, parts, OUT_UNIT, OUT_TINY, DV, SPAN,
            )
            stored = as_dtype(output.to(tl.float32), RESULT.dtype.element_ty)
            tl.store(FOUND + r * FIGURES + RETURNED + 2, up32(bounded(by_keys + arithmetic, stored)))
            tl.store(RESULT + r.to(tl.int64) * DV + tl.arange(0, DV), stored)
    if COUNTS_STEPS:
        # Written by some threads of this program, read by others.
        tl.debug_barrier()
        held = TELEMETRY + (pair // K).to(tl.int64) * telemetry_b + (pair % K) * telemetry_h
        row = tl.arange(0, ROWS2)
        mine = row < ROWS
        column = tl.arange(0, 8)
        figures = tl.load(
            FOUND + (pair * ROWS + row)[:, None] * FIGURES + column[None, :], mask=mine[:, None] & (column < FIGURES)[None, :], other=0.0
        )
        counted = tl.load(
            COUNTED_OUT + (pair * ROWS + row)[:, None] * COUNTS + column[None, :], mask=mine[:, None] & (column < COUNTS)[None, :],
            other=0,
        )
        count_histograms(held, figures, counted, mine, column)
        figures = figures.to(tl.float64)
        figures = tl.where(figures == figures, figures, float("inf"))
        keep_last(held, figures, counted, row, mine, column, S, ROWS)
        rung = of_column(counted, column, RUNG_COUNT)
        causes = of_column(counted, column, CAUSES_COUNT)
        rungs = (mine[:, None] & (rung[:, None] == column[None, :])).to(tl.int32)
        bits = (causes[:, None] >> column[None, :]) & 1
        # All columns are loaded before any is stored: no load waits for another.
        steps_held = tl.load(held)
        rows_held = tl.load(held + 1)
        sums_held = held_of(held + SUMS_AT, column, FIGURES)
        most_held = held_of(held + MOST_AT, column, FIGURES)
        counted_held = held_of(held + COUNTED_AT, column, ADDED_COUNTS)
        rungs_held = held_of(held + RUNGS_AT, column, RUNGS)
        causes_held = held_of(held + CAUSES_AT, column, CAUSES)
        tl.store(held, steps_held + 1.0)
        tl.store(held + 1, rows_held + ROWS)
        tl.store(held + SUMS_AT + column, sums_held + tl.sum(figures, 0), mask=column < FIGURES)
        tl.store(held + MOST_AT + column, tl.maximum(most_held, tl.max(figures, 0)), mask=column < FIGURES)
        tl.store(held + COUNTED_AT + column, counted_held + tl.sum(counted, 0), mask=column < ADDED_COUNTS)
        tl.store(held + RUNGS_AT + column, rungs_held + tl.sum(rungs, 0), mask=column < RUNGS)
        tl.store(held + CAUSES_AT + column, causes_held + tl.sum(bits, 0), mask=column < CAUSES)
        # Each row that falls back reads all encoded blocks that it sees.
        again = tl.where(rung >= HEAD, of_column(counted, column, BLOCK_COUNT), 0)
        explored = of_column(counted, column, EXPLORED_COUNT)
        keys = again if KEYS_STAGED else again + explored + of_column(counted, column, KEY_COUNT)
        values = again if VALUES_STAGED else again + explored + of_column(counted, column, VALUE_COUNT)
        if KEY_BYTES > 0:
            add_to(held + KEY_BYTES_AT, tl.sum(keys, 0).to(tl.float64) * KEY_BYTES)
        if VALUE_BYTES > 0:
            add_to(held + VALUE_BYTES_AT, tl.sum(values, 0).to(tl.float64) * VALUE_BYTES)


@triton.jit
def add_to(HELD, amount):
    """Add ``amount`` to the number in memory at the pointer HELD; not atomic."""
    tl.store(HELD, tl.load(HELD) + amount)


@triton.jit
def of_column(counted, column, place: tl.constexpr):
    """Return the counter at column ``place`` of each row of ``counted`` [rows, columns], int32 [rows]; ``column``: the columns' indices."""
    return tl.sum(tl.where((column == place)[None, :], counted, 0), 1)


@triton.jit
def bin_of(x):
    """Return the histogram bin of a nonnegative float32 number, a quarter of an octave wide; the last bin for NaN."""
    index = (x.to(tl.int32, bitcast=True) >> 21) - FIRST_BITS
    return tl.where(x == x, tl.minimum(tl.maximum(index, 0), BINS - 1), BINS - 1)


@triton.jit
def count_histograms(HELD, figures, counted, mine, column):
    """Add one to a bin of each histogram at HELD for each of ``mine`` rows: those of its binned figures and counters.

    ``figures``, ``counted``: [rows, columns] by Figure and by Count; ``column``: the columns' indices. Rows may share a bin.
    """
    returned = tl.where(column == RETURNED, 2, tl.where(column == RETURNED + 1, 3, -1))
    add_rows(HELD, tl.where(column == CANDIDATES, 0, tl.where(column == CANDIDATES + 1, 1, returned)), bin_of(figures), mine)
    which = tl.where(column == KEY_COUNT, OF_FIGURES, tl.where(column == VALUE_COUNT, OF_FIGURES + 1, -1))
    add_rows(HELD, which, bin_of(counted.to(tl.float32)), mine)


@triton.jit
def add_rows(HELD, which, bins, mine):
    """Add one at HELD in the bin ``bins`` [rows, columns] of each of ``mine`` rows and each column with a histogram.

    ``which``: the column's histogram, -1 for none.
    """
    counts = mine[:, None] & (which >= 0)[None, :]
    tl.atomic_add(HELD + HISTOGRAMS_AT + which[None, :] * BINS + bins, tl.full(bins.shape, 1.0, tl.float64), mask=counts, sem="relaxed")


@triton.jit
def keep_last(HELD, figures, counted, row, mine, column, S: tl.constexpr, ROWS: tl.constexpr):
    """Store at HELD, as the last step's, the number of query heads, and the figures and counters of each head's newest query.

    Only the first LAST_HEADS heads are kept. ``row``, ``column``: indices of ``figures`` and ``counted``; ROWS: rows of the kv head.
    """
    head = row // S
    kept = (mine & (row % S == S - 1) & (head < LAST_HEADS))[:, None]
    tl.store(HELD + LAST_AT, tl.full([], ROWS // S, tl.float64))
    at = HELD + LAST_AT + 1 + head[:, None] * LAST_WIDTH + column[None, :]
    tl.store(at, figures, mask=kept & (column < FIGURES)[None, :])
    tl.store(at + FIGURES, counted.to(tl.float64), mask=kept & (column < COUNTS)[None, :])


@triton.jit
def held_of(HELD, column, OF: tl.constexpr):
    """Load telemetry columns ``column`` of HELD, 0.0 for those from OF on."""
    return tl.load(HELD + column, mask=column < OF, other=0.0)
