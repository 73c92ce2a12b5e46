"""Codes: symmetric integers of 2, 3, 4 or 8 bits, one scale a token and head (section 2.1).

scale = amax / (2^(b-1) - 1), code = clamp(rne(x / scale), -2^(b-1), 2^(b-1) - 1). With that scale no code is below -(2^(b-1) - 1): at
2 bits a value is one of three. As in ``symmetric``: the stored scale is rounded up and codes are made from what is stored, the floor of
a scale is the smallest positive number of its dtype (the source's 1e-8 is less than float16 holds), and NaN or Inf make the scale NaN.
Bytes of narrow codes hold code + 2^(b-1); those of 8 bits two's complement, as the kernels of symmetric schemes write it.
"""

from __future__ import annotations

import torch

from kvcompile.schemes.asymmetric import PARTS, SEGMENTS, UNPACK, pack
from kvcompile.schemes.base import unpacked
from kvcompile.schemes.symmetric import stored_scale
from kvcompile.types import KernelFormat

WIDTHS = (2, 3, 4, 8)
"""Bits that a channel may have."""

Coded = tuple[torch.Tensor, torch.Tensor]
"""Bytes [..., D * bits / 8] uint8 and scales [..., 1]."""


def largest_code(bits: int) -> int:
    """The largest code of a width, 2^(bits-1) - 1."""
    return (1 << (bits - 1)) - 1


def format_of(bits: int, head_dim: int) -> KernelFormat:
    """Return how the words of a width are read: as ``kivi``'s, with one scale for a head; their values are half of the range too large."""
    return KernelFormat(torch.uint8, PARTS[bits], head_dim, True, UNPACK[bits], segments=SEGMENTS[bits])


def encode(x: torch.Tensor, bits: int, scale_dtype: torch.dtype = torch.float16) -> Coded:
    """Codes and scales of tokens [..., D], each by its own largest magnitude; 8 must divide D."""
    x = x.to(torch.float32)
    scale = stored_scale(x.abs().amax(-1, keepdim=True), largest_code(bits), scale_dtype)
    codes = torch.round(x / scale.to(torch.float32)).clamp(-largest_code(bits) - 1, largest_code(bits)).nan_to_num()
    return _flipped(pack(codes.to(torch.int32) + (1 << (bits - 1)), bits), bits), scale


def decode(coded: Coded, bits: int) -> torch.Tensor:
    """Values float32 [..., D] of what ``encode`` returned."""
    codes, scale = coded
    raised = unpacked(_flipped(codes, bits), format_of(bits, 8 * codes.shape[-1] // bits))
    return (raised - (1 << (bits - 1))) * scale.to(torch.float32)


def _flipped(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes with two's complement of 8 bits in place of code + 128, or the other way round; narrower ones as they are."""
    return words ^ 128 if bits == 8 else words


def narrower(coded: Coded, bits: int, to: int) -> Coded:
    """Codes of ``to`` bits from codes of ``bits`` bits, which must be more: from codes no precision can be gained."""
    if to >= bits:
        raise ValueError(f"codes of {bits} bits cannot become codes of {to}: a promotion reads the original, not the codes")
    return encode(decode(coded, bits), to, coded[1].dtype)
