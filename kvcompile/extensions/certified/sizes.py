"""Sizes of the kernels of certified attention, the calls they support, and the constants of a key channel's radius."""

from __future__ import annotations

import sympy
import torch

from kvcompile.extensions.certified.scheme import BLOCK, Certified, ValueStorage
from kvcompile.lowering.certificate.bound_printer import slack
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.schemes.certificate import bounds

CHUNK = 4096
"""Blocks that ``select_blocks`` processes at a time, four per thread; ``spend_value_budget``, which holds more per block, takes half of
them."""

TALLY, TALLY_WARPS = 128, 1
"""Blocks and warps of a program of ``bound_sums``; ``certify`` adds up the sums of 64 programs at a time."""

SPANS, SCORERS = (8, 32), 1000
"""Least and most blocks of a program of ``key_scores``, and its target number of programs (benchmarks/extensions/certified/CERTIFIED.md).
"""

STAGES = 3
"""Blocks of ``key_scores``, ``dense_scores`` and ``dense_values`` whose loads are in flight."""

ROW_TILE = 4
"""Rows of a program of ``weighted_values``."""

OWN_PROGRAMS, OWN_WARPS = 16, 4
"""Programs per row that look for promoted values, and their warps: mostly one of them finds a block, and all wait for it."""

KEY_PROGRAMS, VALUE_PROGRAMS = 1024, 256
"""Programs of ``dense_scores`` and of ``dense_values``, which share the rows that fall back; ``finalize`` adds up one part per program."""

VALUE_WARPS = 4
"""Warps of a program of ``dense_values``."""

MOST_LISTED = 256
"""Largest number of programs for a row's list in ``exact_scores``: one block each, if ``k_max`` is not larger."""

EXACT_WARPS = 1
"""Warps of a program of ``exact_scores`` and ``dense_scores``."""

MOST_ROWS = 16
"""Largest number of rows of a kv head that the kernels support: they are unrolled."""

ANY_NUMBER = 2**30
"""Stands for an unlimited number of blocks."""

SPLITS = 256
"""Largest number of programs that share the values of one head, for few rows and heads."""

LARGEST = 1e308
"""Stands for infinity in constants of kernels."""

INSIDE = 1 - 2.0**-40
"""Factor on budgets, so that they also hold for sums added in another order."""

PROGRAMS = 2048
"""Programs of ``weighted_values`` to aim for: 16 warps on each multiprocessor of a large device."""

ADDED_AT_ONCE = 16384
"""Numbers of partial results that ``certify`` and ``finalize`` load at a time: 32 per thread."""


def kernel_gap(operands: AttendOperands[torch.Tensor], scheme: Certified) -> str | None:
    """Return the reason why the kernels do not support an attention, None if they support it; takes real tensors and fake ones."""
    q, keys, values, value_dim, group = operands.q, operands.keys, operands.values, operands.value_dim, scheme.group
    D, rows, page = q.shape[-1], q.shape[1] // keys[0].shape[2] * q.shape[2], keys[0].shape[3]
    if operands.keep is not None or operands.bias is not None or operands.softcap:
        return "a mask that is not one range of positions, a bias or a softcap"
    if not operands.exact_newest:
        return "no newest tokens in full precision"
    if not isinstance(rows, int) or rows > MOST_ROWS:
        return f"{rows} rows of queries a kv head, above {MOST_ROWS}"
    if D & (D - 1) or value_dim & (value_dim - 1) or D < 2 * BLOCK or value_dim < 2 * group:
        known = f"powers of two, from {2 * BLOCK} and from two groups of {group} on, are known"
        return f"{D} key channels and {value_dim} value channels: {known}"
    if not isinstance(page, int) or page % (4 * BLOCK) or any(plane.shape[3] != page for plane in values[:-1]):
        return f"pages of {page} rows that are not four whole blocks of codes and values alike, or eight, or more"
    if any(plane.stride(-1) != 1 or plane.stride(-2) != plane.shape[-1] for plane in (*keys[:4], *values[:4])):
        return "planes whose rows are not contiguous"
    if scheme.values is ValueStorage.FULL and values[0].dtype not in {torch.bfloat16, torch.float16}:
        return f"values of {values[0].dtype} that are no codes, which tensor cores do not multiply exactly"
    return None


def _linear() -> tuple[float, float, float]:
    """Return (a, b, c) such that a key channel's decoding error, in kernels, is at most a * step + b * |zero point| + c.

    They are the coefficients of ``bounds.RADIUS``, raised by the rounding error of evaluating it.
    """
    expression, outward = sympy.expand(bounds.RADIUS.expression), 1 + slack(bounds.RADIUS)
    parts = [expression.coeff(bounds.STEP), expression.coeff(bounds.ZERO), expression.subs({bounds.STEP: 0, bounds.ZERO: 0})]
    assert sympy.expand(expression - parts[0] * bounds.STEP - parts[1] * bounds.ZERO - parts[2]) == 0
    # As constants of a float32 kernel they are rounded once more.
    step, zero, one = (float(part) * outward * (1 + 2.0**-22) for part in parts)
    return step, zero, one


RADIUS = _linear()


def scorers(blocks: int, heads: int) -> tuple[int, int]:
    """Return (programs of ``key_scores`` for a kv head, blocks per program); ``blocks`` may be symbolic, so nothing branches on it."""
    (least, most), programs = SPANS, max(1, SCORERS // heads)
    found = torch.sym_max(-(-blocks // most), torch.sym_min(-(-blocks // least), programs))
    return found, torch.sym_min(most, torch.sym_max(least, -(-blocks // programs)))
