"""The bounds of blocks and heads as Triton functions, printed from ``schemes.certificate.bounds`` at import; float64 throughout."""

from __future__ import annotations

from typing import Any

from kvcompile.lowering.certificate.bound_printer import triton_source
from kvcompile.lowering.decode.offline import load_module
from kvcompile.schemes.certificate import bounds

PRINTED = (
    bounds.ROUNDING, bounds.CODED, bounds.KEY_TERM, bounds.LEAST_TERM, bounds.SHIFT_TERM, bounds.TOTAL_TERM, bounds.VALUE_TERM,
    bounds.ACCUMULATION_TERM, bounds.VALUE, bounds.LARGEST_LOG_MASS, bounds.CONSISTENT, bounds.KEY, bounds.CENTER_NORM,
    bounds.ACCUMULATION, bounds.OUTPUT_ROUNDING,
)

HEADER = '''"""Bounds printed for kernels; see kvcompile/extensions/certified/kernels/bounds.py."""

import triton
import triton.language as tl


@triton.jit
def rise(x):
    """1 - exp(-x) for x >= 0 without cancellation: its series up to a half, whose first missing term is below 2^-64 of it."""
    term = 1.0 - x * (1.0 / 16.0)
    for step in tl.static_range(14):
        term = 1.0 - x * (1.0 / (15.0 - step)) * term
    return tl.where(x < 0.5, x * term, 1.0 - tl.exp(-x))


@triton.jit
def tanh(x):
    """Of x >= 0, without cancellation: by 1 - exp(-2 x), whose error counts once for small x, and twice where it is smaller."""
    rise_of_both = rise(2.0 * x)
    return rise_of_both / (2.0 - rise_of_both)
'''

_module: Any = load_module("\n\n".join((HEADER, *map(triton_source, PRINTED))), "bounds")

rounding, coded, consistent = _module.rounding, _module.coded, _module.consistent
key_term, least_term, shift_term, total_term = _module.key_term, _module.least_term, _module.shift_term, _module.total_term
value_term, accumulation_term, value = _module.value_term, _module.accumulation_term, _module.value
largest_log_mass, key, center_norm = _module.largest_log_mass, _module.key, _module.center_norm
accumulation, output_rounding = _module.accumulation, _module.output_rounding
rise, tanh = _module.rise, _module.tanh
