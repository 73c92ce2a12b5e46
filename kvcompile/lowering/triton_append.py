"""``append_window`` of one new token on CUDA: one kernel a slot, where tracing the body gives Inductor a dozen.

A program has one kv head of one batch row. It reads the window once, gives the newest tokens, encodes the block
that the token stands in, and puts the token into the window: what ``windows.append_window_body`` says, for
schemes that quantize by minimum and maximum (``Scheme.minmax``). Rounding is spelled out, bit for bit that of
``schemes.asymmetric``; a test holds the two together. Anything else goes through the traced body.

Compiled graphs do not use it yet (``compile.BODIES`` names the body): it has run in Triton's interpreter and through
the compiler for three architectures, but on no GPU, and nothing unmeasured is switched on.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from kvcompile import schemes
from kvcompile.lowering.windows import _encoded, append_window_body
from kvcompile.schemes.symmetric import SCALE_ULP, TINY


@triton.jit
def _rounded_down(x, DTYPE: tl.constexpr):  # noqa: ANN001, ANN202, N803
    """The largest number of a 16-bit dtype that is not above x."""
    near = x.to(DTYPE)
    wide = near.to(tl.float32)
    raw = near.to(tl.int16, bitcast=True)
    step = tl.where(raw < 0, raw + 1, raw - 1)
    below = tl.where((raw & 32767) == 0, -32767, step).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.where((wide > x) & (tl.abs(wide) < float("inf")), below, near)


@triton.jit
def _rounded_up(x, ULP: tl.constexpr, TINY: tl.constexpr, DTYPE: tl.constexpr):  # noqa: ANN001, ANN202, N803
    """A number that is not below x, at most one unit in the last place above; NaN where x is not finite."""
    x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    return tl.maximum(x * (1 + ULP / 2), x + TINY / 2, propagate_nan=tl.PropagateNan.ALL).to(DTYPE)


@triton.jit
def append_one(  # noqa: PLR0913
    X, RING, CLOCK, CODES, SCALES, ZEROS, POS, ORIGIN, RECENT,  # noqa: ANN001, N803
    x_b, x_h, x_d, ring_b, ring_h, clock_b, clock_h, codes_n, codes_b, codes_h, scales_n, scales_b, scales_h, pages, pos_b,  # noqa: ANN001
    D: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr,  # noqa: N803
    SEGMENTS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, HAS_ORIGIN: tl.constexpr, EXACT: tl.constexpr,  # noqa: N803
    ULP: tl.constexpr, TINY: tl.constexpr,  # noqa: N803
):  # noqa: ANN202
    """One token of one kv head of one batch row: see the module."""
    b = (tl.program_id(0) // HEADS).to(tl.int64)
    h = (tl.program_id(0) % HEADS).to(tl.int64)
    first = tl.load(POS + b * pos_b)
    clock = CLOCK + b * clock_b + h * clock_h
    held = tl.load(clock)
    kept = tl.load(clock + 1)
    if HAS_ORIGIN:
        given = tl.load(ORIGIN + b)
        used = tl.where(first == 0, given, kept)
        fits = given >= used
        remembered = used
    else:
        used = kept * 0
        fits = kept == 0
        remembered = tl.where(first == 0, 0, kept)
    start = first - used
    room = pages * PAGE
    ordered = ((first == 0) | (start == held)) & (start < room) & fits

    d = tl.arange(0, D)
    ring = RING + b * ring_b + h * ring_h
    x = tl.load(X + b * x_b + h * x_h + d * x_d).to(tl.float32)
    x = tl.where(ordered, x, float("nan")).to(X.dtype.element_ty)

    # The newest tokens: row j of W + 1 is token start - W + j.
    j = tl.arange(0, W)
    slots = ((start + j) % W + W) % W
    out = RECENT + (b * HEADS + h) * (W + 1) * D
    tl.store(out + j[:, None] * D + d[None, :], tl.load(ring + slots[:, None] * D + d[None, :]))
    tl.store(out + W * D + d, x)

    # The block of the token, zeros behind it.
    last = tl.minimum(tl.maximum(start, 0), room - 1) // BLOCK
    i = tl.arange(0, BLOCK)
    t = last * BLOCK + i
    before = tl.load(ring + ((t % W + W) % W)[:, None] * D + d[None, :]).to(tl.float32)
    here = t[:, None] == start
    content = tl.where(here, x.to(tl.float32)[None, :], tl.where((t < start)[:, None], before, 0.0))
    # Nothing of the window may be overwritten before all of the program has read it.
    tl.debug_barrier()
    tl.store(ring + ((start % W + W) % W) * D + d, x)
    tl.store(clock, start + 1)
    tl.store(clock + 1, remembered)

    if BLOCK > 1:
        grouped = tl.reshape(content, [1, BLOCK, D])
    else:
        grouped = tl.permute(tl.reshape(content, [D // GROUP, GROUP, 1]), [0, 1, 2])
    # [1, tokens, channels] or [groups, channels of a group, 1]: reduced over the middle.
    nans = tl.max((grouped != grouped).to(tl.int32), 1, keep_dims=True) != 0
    low = tl.min(grouped, 1, keep_dims=True)
    high = tl.max(grouped, 1, keep_dims=True)
    low = tl.where(nans, float("nan"), low)
    high = tl.where(nans, float("nan"), high)
    steps: tl.constexpr = 2**BITS - 1
    if EXACT:
        zero = low
        spread = high - zero
        scale = tl.math.div_rn(spread, spread * 0 + steps)
        scale = tl.where(tl.abs(scale) < float("inf"), scale, float("nan"))
    else:
        zero = _rounded_down(low, ZEROS.dtype.element_ty)
        spread = high - zero.to(tl.float32)
        scale = _rounded_up(tl.math.div_rn(spread, spread * 0 + steps), ULP, TINY, SCALES.dtype.element_ty)
    scale = tl.where(spread == 0, 0.0, scale).to(SCALES.dtype.element_ty)
    step = scale.to(tl.float32)
    ratio = tl.math.div_rn(grouped - zero.to(tl.float32), tl.where(step == 0, 1.0, step) + grouped * 0)
    ratio = tl.where(ratio == ratio, ratio, 0.0)
    ratio = tl.minimum(tl.maximum(ratio, 0.0), steps * 1.0)
    # To nearest, ties to even: float32 has no bits below one at 1.5 * 2^23.
    codes = ((ratio + 12582912.0) - 12582912.0).to(tl.int32)

    planar = tl.reshape(codes, [BLOCK, PARTS, D // PARTS])
    words = tl.sum(planar << (BITS * tl.arange(0, PARTS))[None, :, None], 1)
    row = CODES + (t // PAGE) * codes_n + b * codes_b + h * codes_h + (t % PAGE) * (SEGMENTS * (D // PARTS))
    w = tl.arange(0, D // PARTS)
    for byte in tl.static_range(SEGMENTS):
        tl.store(row[:, None] + byte * (D // PARTS) + w[None, :], ((words >> (8 * byte)) & 255).to(tl.uint8))
    per_row: tl.constexpr = D if BLOCK > 1 else D // GROUP
    rows_a_page: tl.constexpr = PAGE // BLOCK
    at = (last // rows_a_page) * scales_n + b * scales_b + h * scales_h + (last % rows_a_page) * per_row + tl.arange(0, per_row)
    tl.store(SCALES + at, tl.reshape(scale, [per_row]))
    tl.store(ZEROS + at, tl.reshape(zero, [per_row]))


def fits(x: torch.Tensor, planes: list[torch.Tensor], scheme: str) -> bool:
    """Whether the kernel knows this append: one token, min-max codes, sizes that are powers of two."""
    rule = schemes.parse(scheme).minmax
    if rule is None or not isinstance(x.shape[2], int) or x.shape[2] != 1 or x.shape[3] & (x.shape[3] - 1):
        return False
    window = planes[_encoded(planes)].shape[3]
    return not window & (window - 1) and x.dtype in {torch.float16, torch.bfloat16, torch.float32}


def append_window_one(
    x: torch.Tensor, planes: list[torch.Tensor], pos: torch.Tensor, origin: torch.Tensor | None, scheme: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """``append_window_body`` of one token by the kernel, for what ``fits``."""
    rule = schemes.parse(scheme).minmax
    assert rule is not None
    at = _encoded(planes)
    codes, scales, zeros = planes[:3]
    ring, clock = planes[at][0], planes[at + 1][0]
    B, K, _, D = x.shape
    W = ring.shape[2]
    first = pos[:, 0]
    kept = clock[:, 0, 0, 1]
    used = torch.zeros_like(first) if origin is None else torch.where(first == 0, origin, kept)
    recent = x.new_empty(B, K, W + 1, D)
    kernel = wrap_triton(append_one) if x.device.type == "cuda" else append_one
    kernel[(B * K,)](
        x, ring, clock, codes, scales, zeros, first, first if origin is None else origin, recent,
        x.stride(0), x.stride(1), x.stride(3), ring.stride(0), ring.stride(1), clock.stride(0), clock.stride(1), codes.stride(0),
        codes.stride(1), codes.stride(2), scales.stride(0), scales.stride(1), scales.stride(2), codes.shape[0],
        0 if first.shape[0] == 1 else first.stride(0), D=D, W=W, PAGE=codes.shape[3], HEADS=K, BITS=rule.bits, PARTS=rule.parts,
        SEGMENTS=rule.segments, GROUP=rule.group, BLOCK=rule.block, HAS_ORIGIN=origin is not None,
        EXACT=scales.dtype == torch.float32, ULP=SCALE_ULP[scales.dtype], TINY=TINY[scales.dtype],
    )
    return recent, used


def append_window_cuda(
    x: torch.Tensor, planes: list[torch.Tensor], pos: torch.Tensor, origin: torch.Tensor | None, scheme: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a compiled graph on CUDA runs: the kernel where it fits, else the body."""
    return (append_window_one if fits(x, planes, scheme) else append_window_body)(x, planes, pos, origin, scheme)
