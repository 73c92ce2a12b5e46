"""Planes that certified attention writes: telemetry of each kv head, and the first exact token of a refilled window.

A telemetry plane [1, B, K, 1, TELEMETRY] of float64 has three parts for each kv head of each batch row:

    COLUMNS     steps; head-steps; sum and maximum of every ``Figure``; how often every ``Count``, ``Rung`` and ``Cause`` occurred;
                hits and misses of the scratch; bytes over the bus
    histograms  for each of ``BINNED``, head-steps by magnitude, in BINS bins, four to a factor of two
    last step   for its newest query: number of query heads, and for each of the first LAST_HEADS the figures and counters
"""

from __future__ import annotations

import enum

import torch

from kvcompile.schemes.certificate.policy import Cause, Count, Figure, Rung
from kvcompile.types import Extent, PlaneSpec

FIGURES, COUNTS = tuple(Figure), tuple(Count)
"""The order of their columns; Dynamo of torch 2.11 cannot iterate over an enum."""

COUNTED = (Count.BLOCKS, Count.KEYS, Count.VALUES, Count.EXPLORED, Count.WIDENED)

COLUMNS: tuple[str, ...] = (
    "steps", "head_steps", *(f"sum_{figure.name.lower()}" for figure in Figure), *(f"most_{figure.name.lower()}" for figure in Figure),
    *(f"{count.name.lower()}" for count in COUNTED), *(f"rung_{rung.name.lower()}" for rung in Rung),
    *(f"cause_{cause.name.lower()}" for cause in Cause if cause.name),
    "key_found", "key_fetched", "value_found", "value_fetched", "key_bytes", "value_bytes",
)
"""The accumulators, in order: ``most_`` columns keep the maximum, all others add up. The last six count full-precision tokens in host
memory: blocks of a kv head that were found in the scratch, blocks that were read over the bus, and bytes over it."""

BINNED: tuple[Figure | Count, ...] = (
    Figure.CANDIDATE_KEY, Figure.CANDIDATE_VALUE, Figure.KEY, Figure.VALUE, Count.KEYS, Count.VALUES,
)
"""Figures and counters that have a histogram, in order."""

BINS, PER_OCTAVE, LEAST_POWER = 128, 4, -16
"""Bins of a histogram; bins to a factor of two; power of two at which the second bin begins. The first bin takes smaller numbers, the last
larger ones, infinity and NaN."""

FIRST_BITS = ((127 + LEAST_POWER) << 2) - 1
"""Subtracted from a float32 number's bits, shifted right by 21, to get its bin: the exponent and two bits of the mantissa remain."""

LAST_HEADS = 16
"""Query heads of a kv head whose last certificates are kept: as many as kernels support."""

LAST_WIDTH = len(FIGURES) + len(COUNTS)

HISTOGRAMS_AT = len(COLUMNS)
LAST_AT = HISTOGRAMS_AT + len(BINNED) * BINS
TELEMETRY = LAST_AT + 1 + LAST_HEADS * LAST_WIDTH
"""Columns of the plane."""


class JoinRule(enum.IntEnum):
    """The rule by which the values of one column are combined over several planes: summed, maximum, or not combined."""

    SUM = 0
    MOST = 1
    LAST = 2


KINDS: tuple[JoinRule, ...] = (
    *(JoinRule.MOST if name.startswith("most_") else JoinRule.SUM for name in COLUMNS), *(JoinRule.SUM,) * (len(BINNED) * BINS),
    *(JoinRule.LAST,) * (1 + LAST_HEADS * LAST_WIDTH),
)
"""The kind of each column."""


def name_of(binned: Figure | Count) -> str:
    """Return the column name of a figure or counter."""
    return binned.name.lower()


def edge(index: int) -> float:
    """Return the lower edge of a bin, zero for the first. Bins between two powers of two are equally wide."""
    power, part = divmod(index - 1, PER_OCTAVE)
    return 2.0 ** (LEAST_POWER + power) * (1 + part / PER_OCTAVE) if index else 0.0


TELEMETRY_PLANE = PlaneSpec("telemetry", torch.float64, TELEMETRY, 1, Extent.ROW)
"""Spec of the telemetry plane of a key store."""

REFILLED = "refilled"
"""Name of the plane with the first token from which on a window holds exact tokens: a rollback refills earlier ones from codes."""

REFILLED_PLANE = PlaneSpec(REFILLED, torch.int64, 1, 1, Extent.ROW, tally=True)
"""Spec of that plane, int64, counted from the row's origin like the clock; for a store whose attention reports its error."""
