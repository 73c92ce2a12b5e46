"""The Triton kernels of certified attention; ``certified.device_step`` launches them and lists the stages of a step.

Codes are multiplied on tensor cores, whose rounding is part of the certificate: keys' codes as stored with two limbs of query times step
(``key_scores``), values decoded to float16 with two limbs of a weight (``weighted_values``). Originals are float32 multiply-adds.

    key_scores       reads int8 keys once: every row's logits; each block's largest logit, the sum of exp relative to it, and its
                     deviation; the notes, also of blocks in the window
    stage_blocks     copies requested originals from host memory into device memory, unless they are there already
    exact_scores     reads original keys of a row's promoted blocks: overwrites their logits, and sums them again;
                     runs the consistency check. ``dense_scores``: the same for all blocks of a row
    weighted_values  reads int4 values once, with weights from the logits as they are by then; ``weighted_originals``: originals of
                     flagged blocks; ``dense_values`` (``dense_fallback``): originals of all blocks of a row
    select_blocks    promotes the first blocks in descending order of an amount, until the rest fits a budget
    bound_sums       adds up the terms of a certificate; ``spend_value_budget`` promotes further values
    certify          (``finish``) a row's result and certificate, and whether it falls back; ``finalize``: its result then, telemetry

Logits stay in memory between ``key_scores`` and ``weighted_values``: 4 bytes per token and row, an eighth of tier 1 at four rows. In return
nothing is ever subtracted: a correction (exact minus coded) of promoted blocks would cancel, and its rounding would have to be certified as
well. A logit is overwritten if its block is promoted, and the weights of all tokens use one maximum, so splits add up.

Blocks have flags: programs load the flags of their blocks and end if none is set. Only keys to read are listed as well, since
one program per block hides the latency there.
AT, int32 [B, 2 S + 1]: for each batch row the last position that each query sees, the first one, and the first in the window, all
within the planes. Rows r = g * S + s of a kv head, counted over all batch rows and kv heads: ((b * K + h) * G + g) * S + s.
All block arrays [B, K, rows, N] are contiguous; hidden blocks are never written.

Scalars that most helpers take: ``r``: a row; ``n``: indices of blocks; ``blocks``: N, the blocks of a row in block arrays; ``rows``: all
rows; ``t``: positions of tokens; ``low``, ``high``: the first and the last position that the row sees; ``start``, ``last``: those that any
query of the batch row sees; ``base``: the position of the window's first token, so tokens before it are encoded; ``newest``: the number of
tokens in the window. Flags of blocks: ``live``, the row sees one of its tokens; ``coded``, that, and it has tokens before the window. K, G,
S: kv heads, query heads of a kv head, queries; S2, K2, ROWS2: powers of two from these on.

Operands: CODES, STEPS, ZEROS, planes of encoded tokens; ORIGINALS, a plane of tier 2; RECENT_K, RECENT_V, the window's tokens. Block
arrays: PEAK and WEIGHT, each block's largest logit and the sum of exp(logit - PEAK), EXACT_PEAK and EXACT_WEIGHT by originals; DELTA and
OWN, bounds on the error of its logits by codes and by originals; READ, EXPLORED, VALUES, flags. NOTES [B, K, N, 4]: see
``key_scores.note``. By row: TOP, the largest logit; SINKS, the sink's logit. SCRATCH, FOUND_AT: see ``stage_blocks``. Constants: D, DV,
channels of keys and values; SCALE, the factor of scores; CHUNK, blocks taken at a time; PAGE, PER_PAGE, tokens and blocks of a page; GROUP,
channels that share a scale; STAGES, of a loop's pipeline; PACKED, whether PTX handles two words at a time (not in the interpreter).
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
"""Rows whose flags ``dense_scores`` and ``dense_values`` load at a time."""


@triton.jit
def exp_of(x):
    """Return exp(x) for x <= 0 within a few units in the last place: the rounding of x * log2 e is compensated. NaN stays."""
    x = tl.maximum(x, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    high = x * LOG2E
    rest = tl.fma(x, LOG2E, -high) + x * LOG2E_REST
    return tl.exp2(high) * (1.0 + rest * LN2)


@triton.jit
def sight(AT, S: tl.constexpr, S2: tl.constexpr):
    """Return the first and the last position that any query of a batch row sees, and the first in the window.

    AT: the batch row's entries, see the module; S2: the power of two from S on.
    """
    s = tl.arange(0, S2)
    last = tl.max(tl.load(AT + s, mask=s < S, other=-1), 0)
    first = tl.min(tl.load(AT + S + s, mask=s < S, other=2147483647), 0)
    return first, last, tl.load(AT + 2 * S)


@triton.jit
def weighed(logits):
    """Return (largest logit, sum of exp(logit - largest)) over the 16 tokens of a block; ``logits``: [16, rows] or [16]."""
    peak = tl.max(logits, 0)
    return peak, tl.sum(exp_of(logits - tl.where(peak == float("-inf"), 0.0, peak)), 0)


@triton.jit
def norm_above(square):
    """Return an upper bound on a norm from its float32 sum of squares, of up to 1024 terms that may have been flushed to zero."""
    return tl.sqrt(square) * (1.0 + 2.0**-14) + 2.0**-57


@triton.jit
def up32(x):
    """Return float64 x rounded up to float32, as ``bound_printer.up32`` does."""
    return (x * UP32_FACTOR + UP32_ADDEND).to(tl.float32)


@triton.jit
def finite_or_infinite(square):
    """Return ``square`` with NaN replaced by infinity, since a maximum over it would drop NaN."""
    return tl.where(square == square, square, float("inf"))


@triton.jit
def doubtful(square, note):
    """Return whether each token's norm may exceed ``note``, the stored norm; ``square``: the squared norm, computed in float32.

    True also for a norm just below ``note``, within float32's rounding, and for NaN.
    """
    return (norm_above(square) <= note) == 0


@triton.jit
def above(square, note):
    """Return whether a norm, given squared in float64, exceeds the stored norm ``note`` or is NaN; false for a NaN ``note``.

    True also for norms up to a factor of 1 - 2^-40 below ``note``: rounding of the square must not hide a larger norm. The square of
    ``note`` is exact.
    """
    note = note.to(tl.float64)
    return (tl.where(note == note, square, 0.0) * (1.0 + 2.0**-39) <= tl.where(note == note, note * note, 0.0)) == 0


@triton.jit
def row_max_or_zero(TOP):
    """Load from TOP the logit that a row's weights are relative to: its largest logit, or zero if the row sees nothing."""
    top = tl.load(TOP)
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def pop_pending(pending, places, OF: tl.constexpr):
    """Return the index of the first pending block, and the mask without it; ``places``: the indices 0 to OF - 1."""
    which = tl.min(tl.where(pending != 0, places, OF), 0)
    return which, tl.where(places == which, 0, pending)


@triton.jit
def fallen(FALLS, first, rows, flag):
    """Return 1 (int32) for each of the FLAGS rows from ``first`` on that is flagged at FALLS as falling back, else 0.

    ``flag``: the offsets 0, 1, ... of the rows; ``rows``: the number of rows in all.
    """
    return (tl.load(FALLS + first + flag, mask=first + flag < rows, other=0) != 0).to(tl.int32)
