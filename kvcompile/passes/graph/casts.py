"""Casts: exactly representable numbers, conversions and ranges of dtypes."""

from __future__ import annotations

import math

import torch

LONGEST = 1 << 24
"""Upper bound on positions: float32 represents every smaller integer exactly."""


def lowest(dtype: torch.dtype) -> float:
    """Return the largest number that hides a token when added to its score: the dtype's least finite number, or -inf for an integer dtype.

    For float32 and float64 it is bfloat16's least number: a bfloat16 model makes its masks in bfloat16 and adds them to float32 scores, and
    no sum of products comes within a hundredth of it without overflowing.
    """
    return max(torch.finfo(dtype).min, torch.finfo(torch.bfloat16).min) if dtype.is_floating_point else -math.inf


def integers(dtype: torch.dtype) -> int:
    """Return the number up to which a dtype represents every integer: 256 for bfloat16, 2048 for float16, 127 for int8."""
    if dtype is torch.bool:
        return 1
    return int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def holds(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a cast from ``source`` to ``target`` keeps every value; of integers, every value up to ``LONGEST``."""
    if source in {target, torch.bool}:
        return True
    if target is torch.bool or source.is_complex or target.is_complex:
        return False
    if source.is_floating_point:
        return target.is_floating_point and no_coarser(target, source)
    signed = target.is_signed or not source.is_signed
    return signed and min(torch.iinfo(source).max, LONGEST) <= integers(target)


def no_coarser(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether the floating point dtype ``dtype`` has steps no coarser than those of ``other``, and no smaller range."""
    mine, theirs = torch.finfo(dtype), torch.finfo(other)
    return mine.eps <= theirs.eps and mine.max >= theirs.max


def cast(number: float, dtype: torch.dtype) -> float:
    """Return ``number`` as a tensor of ``dtype`` would hold it, but not rounded to the precision of a floating point dtype.

    Integers: truncated. Bool: 0.0 or 1.0. Floats: unchanged within the dtype's range; beyond it, infinite from half a step above the
    largest number on, else the largest number. NaN and infinity stay, except for bool.
    """
    if not math.isfinite(number):
        return float(number != 0) if dtype is torch.bool else number
    if dtype is torch.bool:
        return float(number != 0)
    if not dtype.is_floating_point:
        return float(int(number))
    limits = torch.finfo(dtype)
    if abs(number) <= limits.max:
        return number
    # A number up to half a step above the largest one is rounded down to it.
    nearest = limits.max if abs(number) < limits.max * (1 + limits.eps / (4 - 2 * limits.eps)) else math.inf
    return math.copysign(nearest, number)
