"""Codes: integers of 2, 3, 4 or 8 bits, one scale per token and head (section 2.1).

Eight bits, for entering tokens: scale = amax / 127, code = clamp(rne(x / scale), -128, 127), two's complement, channel after channel. As in
``symmetric``: the stored scale is rounded up and codes are computed with the stored scale, the least scale is the smallest positive number
of its dtype (the paper's 1e-8 underflows float16), and NaN or Inf make the scale NaN.

Narrow codes differ from the paper's in their scale, unless ``Frame.SOURCE`` selects it: there it is amax / (2^(b-1) - 1), so the
code -2^(b-1) is never used, and 2 bits have only three levels. Here the scale has the sign that maps the channel of largest
magnitude to -2^(b-1), and all levels are used; on the other side a channel may be clipped by at most one step.

Narrow keys are also encoded in another frame: the mean of the first tokens is subtracted, and the rest is rotated by a Hadamard matrix.
The softmax does not change: subtracting one vector from all keys shifts all scores of a query by one number, which is added back, and an
orthogonal matrix preserves the products of keys and queries. But a channel that is far from zero in every token no longer takes up range.

Channels are stored as eight runs of c = D / 8 channels (``runs``): decoding needs no shuffles, and a run's codes are one field of 16-bit
words::

    8 bits   word (h, j) of 4 x c   channel j of runs 2h and 2h + 1, which are neighbours: channel after channel
    4        word (g, j) of 2 x c   channel j of runs 4g to 4g + 3, from the lowest bits up
    2        word j of c            channel j of all runs
    3        two parts: word j of c holds runs 0 to 4, and in its top bit the high bit of run 7; then bytes with runs 5, 6 and the low
             bits of 7, channels j and j + c / 2 in word j of c / 2

Narrow words hold code + 2^(b-1).
"""

from __future__ import annotations

import enum

import torch

from kvcompile.schemes.symmetric import TINY, as_stored, rounded_up, stored_scale

WIDTHS = (2, 3, 4, 8)
"""Bits that a channel may have."""

ENTERING = 8
"""Bits per channel of a newly appended token."""

RUNS = 8
"""Number of runs that a head's channels are split into."""

Coded = tuple[torch.Tensor, torch.Tensor]
"""Codes [..., D * bits / 8] uint8 and scales [..., 1]."""


class Frame(enum.Enum):
    """The coordinates in which codes narrower than 8 bits are made.

    TURNED: the keys' mean is subtracted, the rest is rotated, and scales have a sign. SOURCE: keys are encoded unchanged, with positive
    scales, as in the paper.
    """

    TURNED = "turned"
    SOURCE = "source"


def largest_code(bits: int) -> int:
    """Return the largest code of a width, 2^(bits-1) - 1."""
    return (1 << (bits - 1)) - 1


def runs(x: torch.Tensor) -> torch.Tensor:
    """Return channels [..., D] as eight runs [..., 8, c]: run 2h + f has channels 2 c h + f, 2 c h + f + 2 and so on."""
    return x.unflatten(-1, (RUNS // 2, -1, 2)).transpose(-1, -2).flatten(-3, -2)


def channels(x: torch.Tensor) -> torch.Tensor:
    """Return the channels [..., D] of eight runs [..., 8, c]; the inverse of ``runs``."""
    return x.unflatten(-2, (RUNS // 2, 2)).transpose(-1, -2).flatten(-3)


def parts_of(bits: int, head_dim: int) -> tuple[int, ...]:
    """Return the bytes per token and head of each separately stored part of codes of ``bits`` bits: one part, or two for 3 bits."""
    run = head_dim // RUNS
    return (2 * run, run) if bits == 3 else (bits * run,)


def encode(x: torch.Tensor, bits: int, scale_dtype: torch.dtype = torch.float16, frame: Frame = Frame.TURNED) -> Coded:
    """Return (packed codes, each token's scale) of tokens ``x`` [..., D] at ``bits`` bits per channel; 8 must divide D.

    ``frame``: the frame of codes narrower than 8 bits; ``scale_dtype``: the dtype of scales. A scale follows from the token's largest
    magnitude. Codes of fewer than 8 bits in Frame.TURNED have a scale with a sign (``_signed_scale``), all others a positive one.
    """
    x = x.to(torch.float32)
    half = 1 << (bits - 1)
    if bits == ENTERING or frame is Frame.SOURCE:
        scale = stored_scale(x.abs().amax(-1, keepdim=True), half - 1, scale_dtype)
    else:
        scale = _signed_scale(x, half, scale_dtype)
    codes = torch.round(x / scale.to(torch.float32)).clamp(-half, half - 1).nan_to_num().to(torch.int32)
    return (codes & 255).to(torch.uint8) if bits == ENTERING else _packed(runs(codes + half), bits), scale


def decode(coded: Coded, bits: int) -> torch.Tensor:
    """Return the values, float32 [..., D], of codes and scales as ``encode`` returns them."""
    words, scale = coded
    if bits == ENTERING:
        codes = (words ^ 128).to(torch.int32) - 128
    else:
        codes = channels(_unpacked(words.to(torch.int32), bits)) - (1 << (bits - 1))
    return codes.to(torch.float32) * scale.to(torch.float32)


def narrower(coded: Coded, bits: int, to: int, frame: Frame = Frame.TURNED) -> Coded:
    """Return ``coded``, codes and scales of ``bits`` bits, encoded anew at ``to`` bits in ``frame``.

    Raises ValueError unless ``to`` is smaller.
    """
    if to >= bits:
        raise ValueError(f"codes of {bits} bits cannot become codes of {to}: more bits need the full-precision values, not the codes")
    return encode(decode(coded, bits), to, coded[1].dtype, frame)


def _signed_scale(x: torch.Tensor, half: int, dtype: torch.dtype) -> torch.Tensor:
    """Return each token's scale [..., 1], with the sign that maps its channel of largest magnitude to the code -``half``.

    If two channels of that magnitude differ in sign the positive one decides.
    """
    high, low = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
    top = torch.maximum(high, -low)
    exact = torch.where(torch.isfinite(top), top * (1 / half), torch.full_like(top, float("nan")))
    size = rounded_up(exact, dtype).clamp(min=TINY[dtype])
    return as_stored(torch.where(high >= -low, -1.0, 1.0) * size.to(torch.float32), dtype)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return ``codes`` packed into uint8 [..., c * bits].

    ``codes``: int32 [..., 8, c], eight runs of c channels, each code plus 2^(bits-1), so that none is negative. ``bits``: the width of a
    code.
    """
    if bits == 3:
        run = codes.unbind(-2)
        words = run[0] | (run[1] << 3) | (run[2] << 6) | (run[3] << 9) | (run[4] << 12) | ((run[7] >> 2) << 15)
        rest = run[5] | (run[6] << 3) | ((run[7] & 3) << 6)
        return torch.cat([_bytes(words.unsqueeze(-2)), rest.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2).to(torch.uint8)], -1)
    per = 16 // bits
    fields = codes.unflatten(-2, (RUNS // per, per))
    return _bytes(sum((fields[..., at, :] << (bits * at) for at in range(per)), torch.zeros_like(fields[..., 0, :])))


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """Return the bytes [..., 2 n c] of 16-bit words [..., n, c], the low byte first."""
    return torch.stack([words & 255, words >> 8], -1).flatten(-3).to(torch.uint8)


def _words(some: torch.Tensor, number: int) -> torch.Tensor:
    """Return 16-bit words, int32 [..., number, c], from bytes ``some``; the inverse of ``_bytes``."""
    pairs = some.unflatten(-1, (number, -1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 8)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes that are raised by 2^(b-1), int32 [..., 8, c], from bytes, int32 [..., c * bits]; the inverse of ``_packed``."""
    if bits == 3:
        size = 2 * (words.shape[-1] // 3)
        whole = _words(words[..., :size], 1)[..., 0, :]
        byte = words[..., size:].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        last = (byte >> 6) | ((whole >> 15) << 2)
        return torch.stack([*((whole >> (3 * run)) & 7 for run in range(5)), byte & 7, (byte >> 3) & 7, last], -2)
    per = 16 // bits
    whole = _words(words, RUNS // per)
    return torch.stack([(whole >> (bits * at)) & ((1 << bits) - 1) for at in range(per)], -2).flatten(-3, -2)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Return tokens [..., D] rotated: times a symmetric orthogonal matrix, so a second call rotates back.

    The matrix is a Hadamard matrix over the eight runs, times one over blocks of each run. A block's size is the largest power of two that
    divides a run. Computed as sums of two elements each, so that a token's rounding does not depend on the other tokens of the tensor.
    """
    y = runs(x.to(torch.float32))
    order = y.shape[-1] & -y.shape[-1]
    y = _hadamard(y.unflatten(-1, (-1, order)), -1)
    return channels(_hadamard(y, -3).flatten(-2)) * (RUNS * order) ** -0.5


def _hadamard(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return ``x`` multiplied along ``dim`` by the Hadamard matrix whose entry (i, j) is -1 if i & j has an odd number of set bits, else 1.

    The size of ``dim`` must be a power of two.
    """
    size, step = x.shape[dim], 1
    x = x.movedim(dim, -1)
    while step < size:
        pairs = x.unflatten(-1, (-1, 2, step))
        x = torch.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).flatten(-3)
        step *= 2
    return x.movedim(-1, dim)
