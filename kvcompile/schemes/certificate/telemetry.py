"""Planes that certificates write: sums, histograms and the last step of each kv head; where a window's originals begin.

A telemetry plane [1, B, K, 1, TELEMETRY] of float64 has three parts for each kv head of each batch row:

    COLUMNS     steps, head-steps, of every ``Figure`` the sum and the largest, how often every ``Count``, ``Rung`` and ``Cause`` was, what
                became of the scratch, bytes over the bus
    histograms  of each of ``BINNED`` how many head-steps had which magnitude, in BINS bins, four to a factor of two
    last step   of its newest query: how many query heads there are, and for each of the first LAST_HEADS the figures and counters
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
"""The accumulators, in order; ``sum_`` and the counters add up, ``most_`` is the largest. The last six are about originals in host memory:
blocks of a kv head that were asked for and lay in the scratch, or were read over the bus, and the bytes that went over it."""

BINNED: tuple[Figure | Count, ...] = (
    Figure.CANDIDATE_KEY, Figure.CANDIDATE_VALUE, Figure.KEY, Figure.VALUE, Count.KEYS, Count.VALUES,
)
"""The figures and counters that have a histogram, in order."""

BINS, PER_OCTAVE, LEAST_POWER = 128, 4, -16
"""Bins of a histogram, bins to a factor of two, and the power of two that the second bin begins with; the first has what is below, the last
what is above, infinite or no number."""

FIRST_BITS = ((127 + LEAST_POWER) << 2) - 1
"""What is subtracted from a float32 number's bits without its last 21 for its bin: exponent and two bits behind it are left."""

LAST_HEADS = 16
"""Query heads of a kv head whose last certificates are kept: as many as kernels know."""

LAST_WIDTH = len(FIGURES) + len(COUNTS)

HISTOGRAMS_AT = len(COLUMNS)
LAST_AT = HISTOGRAMS_AT + len(BINNED) * BINS
TELEMETRY = LAST_AT + 1 + LAST_HEADS * LAST_WIDTH
"""Numbers of each kv head and row."""


class Kind(enum.IntEnum):
    """The rule by which numbers of several planes are joined: they add up, the largest stays, or none of them does."""

    SUM = 0
    MOST = 1
    LAST = 2


KINDS: tuple[Kind, ...] = (
    *(Kind.MOST if name.startswith("most_") else Kind.SUM for name in COLUMNS), *(Kind.SUM,) * (len(BINNED) * BINS),
    *(Kind.LAST,) * (1 + LAST_HEADS * LAST_WIDTH),
)
"""The kind of each number."""


def name_of(binned: Figure | Count) -> str:
    """The name of a figure or counter as columns spell it."""
    return binned.name.lower()


def edge(index: int) -> float:
    """Where a bin begins; zero for the first one. Bins between two powers of two are equally wide."""
    power, part = divmod(index - 1, PER_OCTAVE)
    return 2.0 ** (LEAST_POWER + power) * (1 + part / PER_OCTAVE) if index else 0.0


TELEMETRY_PLANE = PlaneSpec("telemetry", torch.float64, TELEMETRY, 1, Extent.ROW)
"""The plane of these numbers, of a key store that grows with its attention."""

REFILLED = "refilled"
"""The name of the plane with the first token from which on a window holds originals: a rollback puts those before back from codes."""

REFILLED_PLANE = PlaneSpec(REFILLED, torch.int64, 1, 1, Extent.ROW, tally=True)
"""The plane of that token, int64 and counted from the row's origin as the clock counts, of a store whose attention reports its error."""
