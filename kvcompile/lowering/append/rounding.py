"""Rounding as the eager bodies do it, for kernels that encode: neighbors of a stored dtype, and exact quotients.

Quotients: Triton's ``/`` is within two units of the last place, and codes are made where quotients meet ties, so
``div_rn`` is what equals eager. Where the divisor has the 11 significant bits of float16 three instructions give
the same float32. q = n * r, with r a reciprocal within two units, errs by less than 2^-21 of itself; the remainder
q * s - n is exact in a fused instruction; q - remainder * r then errs by less than 2^-42 before its own rounding. That
rounding is the right one, since no quotient lies as close to a midpoint m between two float32: m has 25 bits and its
last one is set, so m * s has from 25 to 36 bits and n, which has 24, differs from it by at least 2^-36 of itself.
Nothing underflows where the quotient is not itself below what any code resolves, given the least float16, 2^-24.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803 - kernels: operands are blocks, constants are in capitals.

from __future__ import annotations

import triton
import triton.language as tl

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: float32 has no bits below one there, so adding it rounds to the nearest integer, ties to even."""


@triton.jit
def lesser(a, b):
    """The smaller of two numbers, NaN where one is; ``tl.min`` passes over NaN, and to look for it costs three instructions an element."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def greater(a, b):
    """The larger of two numbers, NaN where one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quads_of_words(codes, BITS: tl.constexpr, PARTS: tl.constexpr):
    """Codes int32 [n, D] as words of a byte, four neighbors in an int32: [n, D / PARTS / 4]. ``schemes.asymmetric.pack``.

    Neighbors are one thread's, so the parts of a word, which are not, move between threads four words at a time.
    """
    four: tl.constexpr = codes.shape[1] // PARTS // 4
    neighbors = tl.reshape(codes, [codes.shape[0], PARTS, four, 4]) << (8 * tl.arange(0, 4))[None, None, None, :]
    return tl.sum(tl.sum(neighbors, 3) << (BITS * tl.arange(0, PARTS))[None, :, None], 1)


@triton.jit
def rounded_down(x, DTYPE: tl.constexpr):
    """The largest number of a 16-bit dtype that is not above x; ``schemes.asymmetric.rounded_down``."""
    near = x.to(DTYPE)
    wide = near.to(tl.float32)
    raw = near.to(tl.int16, bitcast=True)
    step = tl.where(raw < 0, raw + 1, raw - 1)
    below = tl.where((raw & 32767) == 0, -32767, step).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.where((wide > x) & (tl.abs(wide) < float("inf")), below, near)


@triton.jit
def rounded_up(x, ULP: tl.constexpr, TINY: tl.constexpr, DTYPE: tl.constexpr):
    """``schemes.symmetric.rounded_up``: not below a nonnegative x, at most one unit above; NaN where x is not finite."""
    x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    if tl.constexpr(DTYPE.primitive_bitwidth == 32):
        return x
    return tl.maximum(x * (1 + ULP / 2), x + TINY / 2, propagate_nan=tl.PropagateNan.ALL).to(DTYPE)


@triton.jit
def quotient(n, scale):
    """n / scale, correctly rounded, n float32 and scale as stored, broadcast to n, not zero; anything where scale is NaN."""
    s = scale.to(tl.float32)
    if scale.dtype == tl.float16:
        # An infinite scale: zero, of the numerator's sign. Signs are turned by products, since 0 - 0 has the sign of neither.
        finite = tl.abs(s) < float("inf")
        r = tl.broadcast_to(tl.where(finite, 1.0 / s, 0.0), n.shape)
        q = n * r
        return tl.fma(tl.fma(q, tl.broadcast_to(tl.where(finite, s, 0.0), n.shape), n * -1.0), r * -1.0, q)
    return tl.math.div_rn(n, tl.broadcast_to(s, n.shape))


@triton.jit
def stored_range(x, STEPS: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr, DTYPE: tl.constexpr):
    """Scale and zero point of groups along the last axis of a float32 block, as stored; ``schemes.asymmetric.stored_range``."""
    # Minimum and maximum pass over NaN.
    nans = tl.max((x != x).to(tl.int32), 2, keep_dims=True) != 0
    low = tl.where(nans, float("nan"), tl.min(x, 2, keep_dims=True))
    high = tl.where(nans, float("nan"), tl.max(x, 2, keep_dims=True))
    zero = low if DTYPE == tl.float32 else rounded_down(low, DTYPE)  # noqa: SIM300 - a constant is asked for
    spread = high - zero.to(tl.float32)
    scale = rounded_up(spread * (1 / STEPS), ULP, TINY, DTYPE)
    return tl.where(spread == 0, 0.0, scale).to(DTYPE), zero


@triton.jit
def in_scales(x, scale, zero):
    """(x - zero) / scale in float32, 0 where the scale is; ``schemes.asymmetric.in_scales``."""
    return quotient(x - zero.to(tl.float32), tl.where(scale == 0, 1.0, scale).to(scale.dtype))
