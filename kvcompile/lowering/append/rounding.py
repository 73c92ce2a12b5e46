"""Rounding as in the eager bodies, for kernels that encode: neighbours in a stored dtype, and exact quotients.

Quotients: Triton's ``/`` is within two units of the last place, and a code depends on the rounding of quotients at ties, so only
``div_rn`` equals eager. If the divisor has float16's 11 significant bits, three instructions give
the same float32. q = n * r, with r a reciprocal within two units, errs by less than 2^-21 of itself; the remainder
q * s - n is exact in a fused instruction; q - remainder * r then errs by less than 2^-42 before its own rounding. That
rounding is the right one, since no quotient is that close to a midpoint m between two float32: m has 25 bits and its
last one is set, so m * s has from 25 to 36 bits and n, which has 24, differs from it by at least 2^-36 of itself.
Nothing underflows unless the quotient itself is below the resolution of any code, given the least float16, 2^-24.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803 - kernels: operands are blocks, constants are in capitals.

from __future__ import annotations

import triton
import triton.language as tl

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: float32 has no fraction bits at this size, so adding it rounds to the nearest integer, ties to even."""


@triton.jit
def lesser(a, b):
    """Return the smaller of two numbers, or NaN if either is NaN; for ``tl.reduce``, since ``tl.min`` ignores NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def greater(a, b):
    """Return the larger of two numbers, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quads_of_words(codes, BITS: tl.constexpr, PARTS: tl.constexpr):
    """Return codes int32 [n, D] packed to bytes as by ``schemes.asymmetric.pack``, four neighbouring bytes in an int32: [n, D / PARTS / 4].

    Neighbours are in one thread; a word's parts are not, so they move between threads four words at a time.
    """
    four: tl.constexpr = codes.shape[1] // PARTS // 4
    neighbors = tl.reshape(codes, [codes.shape[0], PARTS, four, 4]) << (8 * tl.arange(0, 4))[None, None, None, :]
    return tl.sum(tl.sum(neighbors, 3) << (BITS * tl.arange(0, PARTS))[None, :, None], 1)


@triton.jit
def rounded_down(x, DTYPE: tl.constexpr):
    """Return the largest number of a 16-bit dtype that is not above x, as ``schemes.asymmetric.rounded_down``."""
    near = x.to(DTYPE)
    wide = near.to(tl.float32)
    raw = near.to(tl.int16, bitcast=True)
    step = tl.where(raw < 0, raw + 1, raw - 1)
    below = tl.where((raw & 32767) == 0, -32767, step).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.where((wide > x) & (tl.abs(wide) < float("inf")), below, near)


@triton.jit
def rounded_up(x, ULP: tl.constexpr, TINY: tl.constexpr, DTYPE: tl.constexpr):
    """Return x >= 0 rounded up to DTYPE, at most one unit above, NaN if x is not finite; as ``schemes.symmetric.rounded_up``.

    ULP, TINY: SCALE_ULP and TINY of DTYPE (``schemes.symmetric``). Float32 stays as it is.
    """
    x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    if tl.constexpr(DTYPE.primitive_bitwidth == 32):
        return x
    return tl.maximum(x * (1 + ULP / 2), x + TINY / 2, propagate_nan=tl.PropagateNan.ALL).to(DTYPE)


@triton.jit
def quotient(n, scale):
    """Return n / scale, correctly rounded; n float32, scale as stored, broadcast to n, not zero. Undefined if scale is NaN."""
    s = scale.to(tl.float32)
    if scale.dtype == tl.float16:
        # An infinite scale gives zero with the numerator's sign. Signs are flipped by products, since 0 - 0 loses them.
        finite = tl.abs(s) < float("inf")
        r = tl.broadcast_to(tl.where(finite, 1.0 / s, 0.0), n.shape)
        q = n * r
        return tl.fma(tl.fma(q, tl.broadcast_to(tl.where(finite, s, 0.0), n.shape), n * -1.0), r * -1.0, q)
    return tl.math.div_rn(n, tl.broadcast_to(s, n.shape))


@triton.jit
def stored_range(x, STEPS: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr, DTYPE: tl.constexpr):
    """Return the scale and the zero point of each group, the last axis of float32 ``x`` [n, groups, channels], in DTYPE.

    As ``schemes.asymmetric.stored_range``; STEPS: the largest code; ULP, TINY: see ``rounded_up``.
    """
    # tl.min and tl.max ignore NaN.
    nans = tl.max((x != x).to(tl.int32), 2, keep_dims=True) != 0
    low = tl.where(nans, float("nan"), tl.min(x, 2, keep_dims=True))
    high = tl.where(nans, float("nan"), tl.max(x, 2, keep_dims=True))
    zero = low if DTYPE == tl.float32 else rounded_down(low, DTYPE)  # noqa: SIM300 - a constant is asked for
    spread = high - zero.to(tl.float32)
    scale = rounded_up(spread * (1 / STEPS), ULP, TINY, DTYPE)
    return tl.where(spread == 0, 0.0, scale).to(DTYPE), zero


@triton.jit
def in_scales(x, scale, zero):
    """Return (x - zero) / scale in float32, 0 where scale is 0; as ``schemes.asymmetric.in_scales``."""
    return quotient(x - zero.to(tl.float32), tl.where(scale == 0, 1.0, scale).to(scale.dtype))
