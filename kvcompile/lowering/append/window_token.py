"""``append_window`` of one new token on CUDA, keys and values in one launch; the traced body gives a dozen Inductor kernels.

A program has one kv head of one batch row. It reads the window once, writes the newest tokens, encodes the block
of the new token, and stores the token in the window: ``ops.append_window.append_window_body`` for schemes that
quantize by minimum and maximum (``Scheme.minmax``) or by the largest magnitude (``Scheme.absmax``). Rounding equals that of
``schemes.asymmetric`` and ``schemes.symmetric`` bit for bit (``rounding``, ``absmax``); a test compares them. Any other append uses the
traced body.

OWN is the scheme's own plane, and SUB its kind. Above 0: the errors of SUB channels at a time are fed back to later channels
(``MinMax.subblock``), and a block is encoded once, by the token that completes it, as no reader needs its codes earlier. The products equal
the body's but for the order of their sums, so a code may be one off. NORMED: a plane of norms (``MinMax.norms``), with the codes' layout.
QMAX: the largest code of symmetric codes, which have no zero points; 0 for codes by minimum and maximum.

The other names are as in ``rows``. RING, CLOCK: the planes of the window and of the clock; ORIGIN: the first position that the call's mask
shows in each row, given if HAS_ORIGIN; RECENT: the newest tokens, which the kernel writes; BLOCK: tokens that share scales if above 1; W:
tokens of the window; E4M3: see ``absmax.symmetric_codes``.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvcompile import schemes
from kvcompile.lowering.append.absmax import absmax_scale, e4m3_kind, symmetric_codes
from kvcompile.lowering.append.rounding import MAGIC, greater, lesser, quotient, rounded_down, rounded_up
from kvcompile.lowering.append.slot_kernels import SlotLaunch, slot_kernels
from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.lowering.ops import append_window
from kvcompile.lowering.ops.append_window import _encoded, one_token
from kvcompile.schemes.symmetric import SCALE_ULP, TINY
from kvcompile.types import LEAST_HELD, AbsMax, MinMax

NORMED = tl.constexpr(-1)
"""Value of SUB if tokens are divided by their norms."""

BROKEN = tl.constexpr(append_window.BROKEN)
LEAST = tl.constexpr(LEAST_HELD)
MOST_PLACE = tl.constexpr(append_window.MOST_PLACE)
SHOWN = tl.constexpr(append_window.SHOWN)

MOST_ABSMAX = 1 << 15
"""Most elements of a window whose tokens are encoded by their largest magnitude: a program holds the window in registers."""


@triton.jit
def minmax_codes(grouped, stored: tl.constexpr, BITS: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr):
    """Return codes int32 of ``grouped``, float32 [n, group, m], and scales and zero points [n, 1, m] in dtype ``stored``.

    As ``schemes.asymmetric``. BITS: the width of a code; ULP, TINY: see ``rounded_up``.
    """
    low = tl.reduce(grouped, 1, lesser, keep_dims=True)
    high = tl.reduce(grouped, 1, greater, keep_dims=True)
    zero = low if stored == tl.float32 else rounded_down(low, stored)
    spread = high - zero.to(tl.float32)
    scale = rounded_up(spread * (1 / (2**BITS - 1)), ULP, TINY, stored)
    scale = tl.where(spread == 0, 0.0, scale).to(stored)
    ratio = quotient(grouped - zero.to(tl.float32), tl.where(scale == 0, 1.0, scale).to(stored))
    if stored == tl.float32:
        ratio = tl.minimum(ratio, (2**BITS - 1) * 1.0)
    # No clamp in 16 bits: the zero point is rounded down and the scale up, so a ratio leaves the range by rounding alone.
    codes = (ratio + MAGIC).to(tl.int32, bitcast=True) & tl.where(scale == scale, 2**BITS - 1, 0)
    return codes, scale, zero


@triton.jit
def block_codes(
    grouped, stored: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr, QMAX: tl.constexpr, E4M3: tl.constexpr, ULP: tl.constexpr,
    TINY: tl.constexpr,
):
    """Return (codes int32 [n, group, m], scales [n, 1, m], zero points [n, 1, m]) of ``grouped``, float32 [n, group, m].

    Symmetric codes have no zero points: their scales are returned in both places. QMAX: the largest symmetric code, 0 for codes by minimum
    and maximum; BITS, PARTS, E4M3: see ``symmetric_codes``; ULP, TINY: see ``rounded_up``.
    """
    if QMAX > 0:
        # Magnitudes compare as integers, with infinity and NaN above all numbers.
        top = tl.max(grouped.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)
        scale = absmax_scale(top, QMAX, ULP, TINY, stored)
        codes = symmetric_codes(grouped, scale, BITS, PARTS, E4M3)
        return codes, scale, scale
    else:  # noqa: RET505 - a constant decides, and Triton compiles one branch
        return minmax_codes(grouped, stored, BITS, ULP, TINY)


@triton.jit
def corrected(
    content, MOVES, stored: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr, BITS: tl.constexpr, ULP: tl.constexpr,
    TINY: tl.constexpr,
):
    """Return tokens ``content`` [n, D], float32, whole blocks of BLOCK tokens, with error feedback applied to their channels.

    SUB channels at a time are quantized, and their errors times MOVES [D, D] are added to later channels. MOVES is zero for the sub-block
    itself and all channels before it, so a channel that was quantized does not change again.

    One loop, not unrolled, and it quantizes a panel of channels at a time: instructions and compile time do not depend on D // SUB. A panel
    has at least 16 channels, the least that tensor cores sum over; the errors of those outside of the sub-block are zero.

    ``stored``, BITS, ULP, TINY: see ``minmax_codes``.
    """
    N: tl.constexpr = content.shape[0]
    D: tl.constexpr = content.shape[1]
    PANEL: tl.constexpr = SUB if SUB > 16 else 16  # noqa: FURB136 - of tensors, to Triton
    panel = tl.arange(0, PANEL)
    within = tl.arange(0, D // PANEL)
    # One stage: copies ahead of the dot would take shared memory for rows that the reductions hide anyway.
    for part in tl.range(0, D // SUB - 1, num_stages=1, loop_unroll_factor=1):
        at = part * SUB // PANEL
        # The sum extracts panel ``at``: others are set to zero, not multiplied by it, as their content may be NaN.
        parts = tl.where((within == at)[None, :, None], tl.reshape(content, [N, D // PANEL, PANEL]), 0.0)
        own = tl.reshape(tl.sum(parts, 1), [N // BLOCK, BLOCK, PANEL])
        codes, scale, zero = minmax_codes(own, stored, BITS, ULP, TINY)
        error = tl.reshape(codes.to(tl.float32) * scale.to(tl.float32) + zero.to(tl.float32) - own, [N, PANEL])
        channel = at * PANEL + panel
        error = tl.where((channel // SUB == part)[None, :] & (tl.abs(error) < float("inf")), error, 0.0)
        moves = tl.load(MOVES + channel[:, None] * D + tl.arange(0, D)[None, :])
        content = content + tl.dot(error, moves, input_precision="tf32x3")
    return content


@triton.jit
def normed(content, stored: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr):
    """Return tokens ``content`` [n, D] divided by their norms, and these norms [n, 1] in dtype ``stored``; as ``schemes.norms``."""
    wide = content.to(tl.float64)
    size = (tl.sqrt(tl.sum(wide * wide, 1, keep_dims=True) / content.shape[1]) * 0.5).to(tl.float32)
    up = rounded_up(size, ULP, TINY, stored)
    up = tl.where(up.to(tl.float32) < TINY, TINY, up.to(tl.float32)).to(stored)
    norm = tl.where(size == 0, 0.0, up.to(tl.float32)).to(stored)
    divided = quotient(content, tl.where(norm == 0, 1.0, norm.to(tl.float32)).to(stored))
    return tl.where(norm == norm, divided, float("nan")), norm


@triton.jit
def origin_of(first, kept, given, HAS_ORIGIN: tl.constexpr):
    """Return a row's origin to use, the origin to store, and whether this call's mask is consistent with it.

    ``first``: the call's first position; ``kept``: the stored origin; ``given``: the mask's origin, only with HAS_ORIGIN. The rule is
    ``ops.append_window.begins``. Takes loaded values, not pointers: torch counts a pointer argument as written if the helper's result is
    used in an address.
    """
    if HAS_ORIGIN:
        used = tl.where((first == 0) | ((kept >= first) & (given >= first)), given, kept)
        fits = given >= used
        remembered = used
    else:
        used = kept * 0
        fits = (first == 0) | (kept == 0)
        remembered = tl.where(first == 0, 0, kept)
    return used, remembered, fits


@triton.jit
def held_behind(end, room, follows, fits, expected, found, held, kept, given, HAS_ORIGIN: tl.constexpr):
    """Return a row's number of tokens after a call that ends at ``end``, or the mark of a broken row; as ``ops.append_window``.

    ``follows``: the first token is at the row's next position. ``expected``, ``found``: due and given position of the first token out of
    order, equal if all are in order. ``fits``: the mask, which shows positions from ``given`` on, shows none before the origin. ``held``,
    ``kept``: the stored count and origin; ``room``: tokens that the planes hold. All are loaded or computed int64 values.
    """
    unfit = follows & (fits == 0)
    whole = expected == found
    wanted = tl.where(follows, tl.where(whole, room, expected), held + kept)
    wanted = tl.where(unfit, kept, wanted)
    found = tl.where(unfit, given if HAS_ORIGIN else kept * 0, tl.where(follows & whole, room, found))
    lost = BROKEN + (tl.minimum(tl.maximum(wanted, 0), MOST_PLACE) << 32) + tl.minimum(tl.maximum(found, -1), MOST_PLACE) + 1
    lost += tl.where(unfit, SHOWN, 0)
    lost = tl.where((follows == 0) & (held < LEAST), held, lost)
    return tl.where(follows & fits & whole & (end <= room), end, lost)


@triton.jit
def _encode_block(
    content, t, last, CODES, SCALES, ZEROS, OWN, codes_n, scales_n, D: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr,
    PARTS: tl.constexpr, SEGMENTS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr, QMAX: tl.constexpr,
    E4M3: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr,
):
    """Encode block ``last``, its tokens ``t`` [BLOCK] with ``content`` float32 [BLOCK, D], of one kv head of one batch row.

    Written: its entries of CODES, SCALES, ZEROS (only without QMAX) and, if SUB is NORMED, of OWN: the norms. The pointers are to the head.
    ``codes_n``, ``scales_n``: strides of pages. SEGMENTS: bytes of a word; BLOCK: tokens that share scales, GROUP: channels that do if
    BLOCK is 1; the other constants are as in ``block_codes``.
    """
    if SUB > 0:
        content = corrected(content, OWN, SCALES.dtype.element_ty, BLOCK, SUB, BITS, ULP, TINY)
    if SUB == NORMED:
        content, norm = normed(content, SCALES.dtype.element_ty, ULP, TINY)
        tl.store(OWN + (t // PAGE) * (codes_n // (SEGMENTS * (D // PARTS))) + t % PAGE, tl.reshape(norm, [BLOCK]))
    # [1, tokens, channels] or [groups, channels of a group, 1]; reduced over the middle axis.
    if BLOCK > 1:
        grouped = tl.reshape(content, [1, BLOCK, D])
    else:
        grouped = tl.reshape(content, [D // GROUP, GROUP, 1])
    codes, scale, zero = block_codes(grouped, SCALES.dtype.element_ty, BITS, PARTS, QMAX, E4M3, ULP, TINY)

    planar = tl.reshape(codes, [BLOCK, PARTS, D // PARTS])
    words = tl.sum(planar << (BITS * tl.arange(0, PARTS))[None, :, None], 1)
    row = CODES + (t // PAGE) * codes_n + (t % PAGE) * (SEGMENTS * (D // PARTS))
    w = tl.arange(0, D // PARTS)
    for byte in tl.static_range(SEGMENTS):
        tl.store(row[:, None] + byte * (D // PARTS) + w[None, :], ((words >> (8 * byte)) & 255).to(CODES.dtype.element_ty))
    per_row: tl.constexpr = D if BLOCK > 1 else D // GROUP
    rows_a_page: tl.constexpr = PAGE // BLOCK
    at = (last // rows_a_page) * scales_n + (last % rows_a_page) * per_row + tl.arange(0, per_row)
    tl.store(SCALES + at, tl.reshape(scale, [per_row]))
    if QMAX == 0:
        tl.store(ZEROS + at, tl.reshape(zero, [per_row]))


@triton.jit
def _append_token(
    program, X, RING, CLOCK, CODES, SCALES, ZEROS, OWN, POS, ORIGIN, RECENT, x_b, x_h, x_d, pages, codes_n, scales_n, pos_b, codes_b,
    codes_h, scales_b, scales_h, own_b, own_h, D: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr,
    BITS: tl.constexpr, PARTS: tl.constexpr, SEGMENTS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr,
    QMAX: tl.constexpr, E4M3: tl.constexpr, HAS_ORIGIN: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr,
):
    """Append one token of one kv head of one batch row: write RECENT, the newest tokens, put the token into RING, and update CLOCK.

    Its block is encoded by ``_encode_block``, with error feedback (SUB > 0) only when complete. A token out of order becomes NaN. RING, the
    window, and CLOCK must be contiguous. ``program``: batch row and kv head, heads first; ``pages``: number of pages of the planes; W:
    tokens of the window. Constants: see ``_encode_block``.
    """
    b = (program // HEADS).to(tl.int64)
    h = (program % HEADS).to(tl.int64)
    d = tl.arange(0, D)
    j = tl.arange(0, W)
    # All loads that do not depend on the position are started at once: latency dominates, not bandwidth.
    clock = CLOCK + (b * HEADS + h) * 2
    ring = RING + (b * HEADS + h) * (W * D)
    first = tl.load(POS + b * pos_b)
    held = tl.load(clock)
    kept = tl.load(clock + 1)
    given = tl.load(ORIGIN + b) if HAS_ORIGIN else kept
    whole = tl.load(ring + j[:, None] * D + d[None, :])
    x = tl.load(X + b * x_b + h * x_h + d * x_d).to(tl.float32)

    used, remembered, fits = origin_of(first, kept, given, HAS_ORIGIN)
    start = first - used
    room = pages * PAGE
    follows = (first == 0) | (first == held + kept)
    ordered = follows & (start < room) & fits
    x = tl.where(ordered, x, float("nan")).to(X.dtype.element_ty)

    # The newest tokens: row j of W + 1 is token start - W + j, from window slot (start + j) % W.
    slot = (start & (W - 1)).to(tl.int32)
    out = RECENT + (b * HEADS + h) * (W + 1) * D
    tl.store(out + ((j - slot) & (W - 1))[:, None] * D + d[None, :], whole)
    tl.store(out + W * D + d, x)

    # The new token's block, with zeros behind the token.
    last = tl.minimum(tl.maximum(start, 0), room - 1) // BLOCK
    i = tl.arange(0, BLOCK)
    t = last * BLOCK + i
    if BLOCK == W:
        before = whole.to(tl.float32)
    else:
        before = tl.load(ring + (t & (W - 1))[:, None] * D + d[None, :]).to(tl.float32)
    content = tl.where((t == start)[:, None], x.to(tl.float32)[None, :], tl.where((t < start)[:, None], before, 0.0))
    # The window may be overwritten only after all threads of the program have read it.
    tl.debug_barrier()
    tl.store(ring + slot * D + d, x)
    tl.store(clock, held_behind(start + 1, room, follows, fits, first, first, held, kept, given, HAS_ORIGIN))
    tl.store(clock + 1, remembered)

    # With error feedback, a block is encoded only when complete.
    if ((start + 1) % BLOCK == 0) | (SUB <= 0):
        _encode_block(
            content, t, last, CODES + b * codes_b + h * codes_h, SCALES + b * scales_b + h * scales_h, ZEROS + b * scales_b + h * scales_h,
            OWN + b * own_b + h * own_h, codes_n, scales_n, D, PAGE, BITS, PARTS, SEGMENTS, GROUP, BLOCK, SUB, QMAX, E4M3, ULP,
            TINY,
        )


APPEND_TOKEN = slot_kernels(_append_token)


class WindowSlot(NamedTuple):
    """The operands of ``append_window`` for one slot; its members give the planes by name, and the kernels' arguments and constants."""

    x: torch.Tensor
    planes: list[torch.Tensor]
    pos: torch.Tensor
    origin: torch.Tensor | None
    scheme: str

    @property
    def window(self) -> torch.Tensor:
        """The window plane, [1, B, K, W, D], just before the clock."""
        return self.planes[_encoded(self.planes)]

    @property
    def clock(self) -> torch.Tensor:
        """The clock plane, [1, B, K, 1, 2]."""
        return self.planes[_encoded(self.planes) + 1]

    @property
    def rule(self) -> MinMax | AbsMax | None:
        """The rule by which kernels encode the scheme's tokens; None if no kernel does."""
        scheme, width = schemes.parse(self.scheme), self.x.shape[3]
        return scheme.minmax(width) or scheme.absmax(width)

    @property
    def coded(self) -> list[torch.Tensor]:
        """The planes of codes, scales and zero points; symmetric codes have no zero points, so their scales take that place."""
        codes, scales, *zeros = self.planes[: min(_encoded(self.planes), 3)]
        return [codes, scales, *(zeros or [scales])]

    @property
    def corrects(self) -> bool:
        """Whether code errors are fed back to other channels, by a plane of the scheme."""
        return isinstance(self.rule, MinMax) and bool(self.rule.subblock)

    @property
    def divides(self) -> bool:
        """Whether tokens are divided by their norms before they are encoded; the plane of norms follows that of zero points."""
        return isinstance(self.rule, MinMax) and self.rule.norms

    @property
    def own(self) -> tuple[torch.Tensor, int, int]:
        """The scheme's own plane, and its strides from batch row to batch row and from head to head.

        [1, 1 or B, K, D, D], the error feedback; or norms, [N, B, K, PAGE, 1]. With neither, the positions, which no kernel then reads.
        """
        if self.divides:
            norms = self.planes[3]
            return norms, norms.stride(1), norms.stride(2)
        if not self.corrects:
            return self.pos, 0, 0
        moves = self.planes[-1]
        return moves, 0 if moves.shape[1] == 1 else moves.stride(1), moves.stride(2)

    @property
    def programs(self) -> int:
        """Number of programs: one for each kv head of each batch row."""
        return self.x.shape[0] * self.x.shape[1]

    @property
    def used(self) -> torch.Tensor:
        """The origin by which this append counts each row's tokens, int64 [1 or B]: the mask's if the row begins, else the stored one.

        Read this before the append, which overwrites the clock.
        """
        first, kept = self.pos[:, 0], self.clock[0, :, 0, 0, 1]
        if self.origin is None:
            return torch.zeros_like(first)
        return torch.where(append_window.begins(first, kept, self.origin), self.origin, kept)

    def exact_newest(self) -> torch.Tensor:
        """Return an empty tensor for the newest tokens, [B, K, W + S, D]."""
        return self.x.new_empty(*self.x.shape[:2], self.window.shape[3] + self.x.shape[2], self.x.shape[3])

    def operands(self, exact_newest: torch.Tensor) -> tuple[object, ...]:
        """Return the kernels' arguments but the constants, in order: tensors, among them whole planes, no views; the pages; strides.

        ``exact_newest``: the tensor that the kernels fill.
        """
        codes, scales, zeros = self.coded
        origin = self.pos if self.origin is None else self.origin
        own, *own_strides = self.own
        return (
            self.x, self.window, self.clock, codes, scales, zeros, own, self.pos, origin, exact_newest, self.x.stride(0), self.x.stride(1),
            self.x.stride(3), codes.shape[0], codes.stride(0), scales.stride(0), 0 if self.pos.shape[0] == 1 else self.pos.stride(0),
            codes.stride(1), codes.stride(2), scales.stride(1), scales.stride(2), *own_strides,
        )

    def constants(self) -> dict[str, Any]:
        """Return the kernels' constants, by name."""
        rule, dtype = self.rule, self.planes[1].dtype
        assert rule is not None
        shared = {
            "D": self.x.shape[3], "W": self.window.shape[3], "PAGE": self.planes[0].shape[3], "HEADS": self.x.shape[1], "BITS": rule.bits,
            "PARTS": rule.parts, "GROUP": rule.group, "HAS_ORIGIN": self.origin is not None, "ULP": SCALE_ULP[dtype], "TINY": TINY[dtype],
        }
        if isinstance(rule, AbsMax):
            own = {"SEGMENTS": 1, "BLOCK": 1, "SUB": 0, "QMAX": rule.largest, "E4M3": e4m3_kind(rule.e4m3, self.x.device)}
        else:
            sub = NORMED.value if rule.norms else rule.subblock
            own = {"SEGMENTS": rule.segments, "BLOCK": rule.block, "SUB": sub, "QMAX": 0.0, "E4M3": 0}
        return shared | own


def known(slot: WindowSlot) -> bool:
    """Return whether kernels can append to a slot: codes by a known rule, contiguous rows, and 16-bit or 32-bit float tokens.

    Channels, tokens of the window and channels of a group must be powers of two.
    """
    rule, D, W = slot.rule, slot.x.shape[3], slot.window.shape[3]
    if rule is None or D & (D - 1) or W & (W - 1):
        return False
    if isinstance(rule, AbsMax):
        if D * W > MOST_ABSMAX or D % rule.group or rule.group & (rule.group - 1):
            return False
    elif not _own_known(slot, rule, D):
        return False
    in_order = slot.window.is_contiguous() and slot.clock.is_contiguous()
    rows = all(plane.stride(4) == 1 and plane.stride(3) == plane.shape[4] for plane in slot.coded)
    return in_order and rows and slot.x.dtype in {torch.float16, torch.bfloat16, torch.float32}


def _own_known(slot: WindowSlot, rule: MinMax, channels: int) -> bool:
    """Return whether kernels can read the plane of error feedback or of norms that ``rule`` needs; True if it needs neither.

    The plane must be contiguous. For error feedback, tensor cores need blocks of 16 tokens and panels of 16 channels.
    """
    narrow = channels < 16 or rule.block < 16 or rule.subblock & (rule.subblock - 1)
    if rule.subblock and (narrow or not slot.own[0].is_contiguous()):
        return False
    return not rule.norms or (slot.own[0].is_contiguous() and slot.planes[0].is_contiguous())


def fits(slot: WindowSlot) -> bool:
    """Return whether the kernel supports this append: one token, and ``known``."""
    return one_token(slot.x) and known(slot)


def append_window_slots(slots: Sequence[WindowSlot], launcher: Launcher | None = None) -> list[torch.Tensor]:
    """Append one token to one slot or two in one launch, as ``append_window_body``; return the newest tokens of each.

    Slots must satisfy ``fits``. ``launcher`` None starts the kernel immediately. The kernel overwrites the clock: a caller that needs the
    origins reads ``WindowSlot.used`` before the call.
    """
    results = [slot.exact_newest() for slot in slots]
    APPEND_TOKEN.start(
        launcher or Direct(slots[0].x.device.type == "cuda"),
        [SlotLaunch(slot.programs, slot.operands(newest), slot.constants()) for slot, newest in zip(slots, results, strict=True)],
    )
    return results
