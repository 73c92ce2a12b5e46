"""Sizes of the kernels of certified attention, what of it they know, and the constants of a key channel's radius."""

from __future__ import annotations

import sympy
import torch

from kvcompile.extensions.certified.scheme import BLOCK, Certified, ValueStorage
from kvcompile.lowering.certificate.bound_printer import slack
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.schemes.certificate import bounds

CHUNK = 4096
"""Blocks that ``select_blocks`` looks at at once, four a thread; ``spend_value_budget``, which has more of each: half of them."""

TALLY, TALLY_WARPS = 128, 1
"""Blocks and warps of a program of ``bound_sums``: ``certify`` adds up 64 programs' sums at once."""

SPANS, SCORERS = (8, 32), 1000
"""Blocks of a program of ``key_scores``, the least and the most, and how many programs there should be
(benchmarks/extensions/certified/CERTIFIED.md)."""

STAGES = 3
"""Blocks of ``key_scores``, ``dense_scores`` and ``dense_values`` whose loads are under way."""

ROW_TILE = 4
"""Rows of a program of ``weighted_values``."""

OWN_PROGRAMS, OWN_WARPS = 16, 4
"""Programs of a row that look for original values, and their warps: mostly one of them finds a block, and that is what all wait for."""

KEY_PROGRAMS, VALUE_PROGRAMS = 1024, 256
"""Programs of ``dense_scores`` and ``dense_values``, which share the rows that fall: so many parts has ``finalize`` to add up."""

VALUE_WARPS = 4
"""Warps of a program of ``dense_values``."""

MOST_LISTED = 256
"""Programs of a row's list in ``exact_scores`` at most: up to there a block each, as far as ``k_max`` lets expect."""

EXACT_WARPS = 1
"""Warps of a program of ``exact_scores`` and ``dense_scores``."""

MOST_ROWS = 16
"""Rows of a kv head up to which kernels are used: they are unrolled."""

ANY_NUMBER = 2**30
"""Stands for any number of blocks."""

SPLITS = 256
"""Programs that share the values of a head of few rows and heads."""

LARGEST = 1e308
"""Stands for infinity in constants of kernels."""

INSIDE = 1 - 2.0**-40
"""Budgets are kept by this much, so that the same sum in another order keeps them too."""

PROGRAMS = 2048
"""Programs of ``weighted_values`` to aim for: 16 warps on each multiprocessor of a large device."""

ADDED_AT_ONCE = 16384
"""Numbers of partial results that ``certify`` and ``finalize`` read at once: 32 a thread."""


def kernel_gap(operands: AttendOperands[torch.Tensor], scheme: Certified) -> str | None:
    """Why the kernels do not know this attention, None where they do; for real tensors and fake ones."""
    q, keys, values, value_dim, group = operands.q, operands.keys, operands.values, operands.value_dim, scheme.group
    D, rows, page = q.shape[-1], q.shape[1] // keys[0].shape[2] * q.shape[2], keys[0].shape[3]
    if operands.keep is not None or operands.bias is not None or operands.softcap:
        return "a mask other than from a first to a last position, a bias or a softcap"
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
        return "planes whose rows do not lie one after the other"
    if scheme.values is ValueStorage.FULL and values[0].dtype not in {torch.bfloat16, torch.float16}:
        return f"values of {values[0].dtype} that are no codes, which tensor cores do not multiply exactly"
    return None


def _linear() -> tuple[float, float, float]:
    """The printed radius of a key channel as what multiplies its step, the magnitude of its zero point, and one."""
    expression, outward = sympy.expand(bounds.RADIUS.expression), 1 + slack(bounds.RADIUS)
    parts = [expression.coeff(bounds.STEP), expression.coeff(bounds.ZERO), expression.subs({bounds.STEP: 0, bounds.ZERO: 0})]
    assert sympy.expand(expression - parts[0] * bounds.STEP - parts[1] * bounds.ZERO - parts[2]) == 0
    # As a constant of a float32 kernel each is rounded once more.
    step, zero, one = (float(part) * outward * (1 + 2.0**-22) for part in parts)
    return step, zero, one


RADIUS = _linear()


def scorers(blocks: int, heads: int) -> tuple[int, int]:
    """Programs of ``key_scores`` for a head, and the blocks of each; ``blocks`` may be a symbol that nothing is to be decided by."""
    (least, most), programs = SPANS, max(1, SCORERS // heads)
    found = torch.sym_max(-(-blocks // most), torch.sym_min(-(-blocks // least), programs))
    return found, torch.sym_min(most, torch.sym_max(least, -(-blocks // programs)))
