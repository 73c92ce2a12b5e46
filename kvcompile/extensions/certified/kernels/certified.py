"""The Triton kernels of certified attention; ``certified.device_step`` puts them together and says what each step needs.

Codes are multiplied on tensor cores, whose rounding is part of the certificate: keys as they stand with two limbs of query times step
(``key_scores``), values decoded to float16 with two limbs of a weight (``weighted_values``). Originals are float32 multiply-adds.

    key_scores       int8 keys once: every row's logits; of each block the largest, the sum of exp relative to it, the
                     deviation; the notes, also of the window's blocks
    stage_keys       original keys that are asked for from host memory into device memory, where they are not there yet
    exact_scores     original keys of the blocks that a row asks for: their logits over the old ones, and the same sums;
                     what the consistency check compares; ``dense_scores``: the same for all blocks of a row
    weighted_values  int4 values once, with weights from the logits as they stand then; ``weighted_originals``: originals where
                     flags ask for them; ``dense_values`` (``dense_fallback``): the originals of all blocks of a row
    select_blocks    which blocks stand first in descending order of an amount until the rest fits a budget
    bound_sums       what a certificate is made of, and which values are promoted
    certify          (``finish``) a row's result and certificate, whether it falls; ``finalize``: what it returns then, telemetry

Logits stay in memory between ``key_scores`` and ``weighted_values``: 4 bytes a token and row, an eighth of tier 1 at four rows. In return
nothing is ever subtracted: a correction (exact minus coded) of promoted blocks would cancel, and its rounding would have to be certified as
well. A logit is overwritten where its block is promoted, and the weights of all tokens are made from one maximum, so splits add up.

Blocks are flagged: programs look at the flags of their blocks and end where none is set. Only keys that are read are listed as well, since
there a program for each is what hides latency.
AT, int32 [B, 2 S + 1]: of each batch row the last position that each query sees, the first one, and the first that the window has, all
within the planes. Rows r = g * S + s of a kv head. All block arrays [B, K, rows, N] are contiguous; what nobody sees is never written.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RET505, RUF005 - kernels: operands are pointers and constants in capitals, tuples grow in loops.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.certificate.bound_printer import UP32

BLOCK = tl.constexpr(16)
LOG2E = tl.constexpr(1.4426950216293335)
LOG2E_REST = tl.constexpr(1.9259629911266175e-08)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-30000.0)

UP32_FACTOR, UP32_ADDEND = tl.constexpr(UP32[0]), tl.constexpr(UP32[1])

FLAGS = tl.constexpr(128)
"""Rows that ``dense_scores`` and ``dense_values`` look at at once."""


@triton.jit
def exp_of(x):
    """exp of x <= 0 within a few units in the last place, whatever x: the rounding of x * log2 e is given back. NaN stays."""
    x = tl.maximum(x, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    high = x * LOG2E
    rest = tl.fma(x, LOG2E, -high) + x * LOG2E_REST
    return tl.exp2(high) * (1.0 + rest * LN2)


@triton.jit
def sight(AT, S: tl.constexpr, S2: tl.constexpr):
    """The first and the last position that any query of a batch row sees, and the first one that the window has. AT: see the module."""
    s = tl.arange(0, S2)
    last = tl.max(tl.load(AT + s, mask=s < S, other=-1), 0)
    first = tl.min(tl.load(AT + S + s, mask=s < S, other=2147483647), 0)
    return first, last, tl.load(AT + 2 * S)


@triton.jit
def weighed(logits):
    """Return the largest of a block's logits [16, rows], or [16] of one row, and the sum of exp relative to it."""
    peak = tl.max(logits, 0)
    return peak, tl.sum(exp_of(logits - tl.where(peak == float("-inf"), 0.0, peak)), 0)


@triton.jit
def norm_above(square):
    """The root of a float32 sum of squares, not below the exact one: of up to 1024 terms, some of which may have been flushed."""
    return tl.sqrt(square) * (1.0 + 2.0**-14) + 2.0**-57


@triton.jit
def up32(x):
    """``bound_printer.up32``."""
    return (x * UP32_FACTOR + UP32_ADDEND).to(tl.float32)


@triton.jit
def finite_or_infinite(square):
    """Replace NaN by infinity, which a maximum keeps."""
    return tl.where(square == square, square, float("inf"))


@triton.jit
def doubtful(square, note):
    """Which tokens' norms may be above what a note says, by their float32 squares: what is above, close to it or no number."""
    return (norm_above(square) <= note) == 0


@triton.jit
def above(square, note):
    """Whether a norm, by its float64 square, is above what a note says, whose square is exact, or no number; a note of NaN says nothing."""
    note = note.to(tl.float64)
    return (tl.where(note == note, square, 0.0) * (1.0 + 2.0**-39) <= tl.where(note == note, note * note, 0.0)) == 0


@triton.jit
def row_max_or_zero(TOP):
    """The logit that a row's weights are relative to: its largest, zero where it sees nothing."""
    top = tl.load(TOP)
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def pop_pending(pending, places, OF: tl.constexpr):
    """The first of what is ``pending``, of ``places`` from 0 to OF, and the rest of it."""
    which = tl.min(tl.where(pending != 0, places, OF), 0)
    return which, tl.where(places == which, 0, pending)


@triton.jit
def fallen(FALLS, first, rows, flag):
    """Which of the rows from ``first`` on fall, as numbers."""
    return (tl.load(FALLS + first + flag, mask=first + flag < rows, other=0) != 0).to(tl.int32)
