"""Symmetric codes in kernels: scales from largest magnitudes, and codes of quotients, bit for bit as ``schemes.symmetric``.

Device functions of ``rows``, which takes the magnitudes of one part of a word at a time, and of the kernels for windows.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are blocks, constants are in capitals.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcompile.lowering.append.rounding import MAGIC, quotient, rounded_up


@triton.jit
def e4m3_codes(x):
    """Return the e4m3 bytes, int32, of float32 x with |x| <= 448, rounded to nearest even, by integer instructions alone."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    # Below 2^-6 values are multiples of 2^-9, which is the last bit of float32 at 2^14.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 255
    return tl.where(magnitude < (121 << 23), small, normal) | ((bits >> 24) & 128)


@triton.jit
def absmax_scale(top, QMAX: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr, stored: tl.constexpr):
    """Return scales in dtype ``stored`` of largest magnitudes, given as float32 bits.

    ``top``: the bits; those of infinity and NaN are above all numbers'. QMAX: the largest code. ULP, TINY: see ``rounded_up``. A scale is
    at least TINY.
    """
    scale = rounded_up(top.to(tl.float32, bitcast=True) * (1 / QMAX), ULP, TINY, stored)
    # Exact, since float32 holds every scale dtype.
    return tl.where(scale.to(tl.float32) < TINY, TINY, scale.to(tl.float32)).to(stored)


@triton.jit
def symmetric_codes(x, scale, BITS: tl.constexpr, PARTS: tl.constexpr, E4M3: tl.constexpr):
    """Return codes, int32 in BITS bits, of float32 x by scales that broadcast to it; code 0, or e4m3's NaN, where the scale is NaN.

    PARTS: codes of a word; with several, 2^(BITS - 1) is added to integers. E4M3: 0 for integers, 1 for e4m3 in integer instructions, 2 by
    the device's conversion.
    """
    # No clamp: the scale is rounded up, so a quotient exceeds the largest code by rounding alone, and rounds to it.
    scaled = quotient(x, scale)
    coded = tl.where(scale == scale, 2**BITS - 1, 0)
    if E4M3 == 0:
        # The low bits of the sum are those of the integer.
        code = (scaled + (MAGIC + (2 ** (BITS - 1) if PARTS > 1 else 0))).to(tl.int32, bitcast=True) & coded
    elif E4M3 == 1:
        code = (e4m3_codes(scaled) & coded) | (127 & ~coded)
    else:
        code = (scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) & coded) | (127 & ~coded)
    return code


def e4m3_kind(e4m3: bool, device: torch.device) -> int:
    """Return the constant E4M3 of ``symmetric_codes``: 0 for integer codes, for e4m3 codes 2 if the device converts to e4m3, else 1."""
    if not e4m3:
        return 0
    return 2 if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9) else 1
