"""``append_window`` of one new token into certified planes on CUDA, keys and values in one launch.

A program has one kv head of one batch row. Like ``ops.append_window.append_window_body`` with ``Certified.encode``, it returns the newest
tokens, encodes the token's block from the window and the token, writes the block's codes, notes and originals, and puts the token into the
window. Traced, that body is about 28 kernels per layer, and most of the compile time of a certified model.

Codes, scales, zero points, originals and the window are equal to the body's bit for bit. The notes are float64 norms whose squares are
added in another order; the margin of ``certified.scheme.largest_norm`` covers that, so a note may be a neighbouring float and is as sound.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvcompile import schemes
from kvcompile.extensions.certified.scheme import BLOCK, Certified
from kvcompile.lowering.append.rounding import MAGIC
from kvcompile.lowering.append.slot_kernels import SlotLaunch, slot_kernels
from kvcompile.lowering.append.window_token import WindowSlot, held_behind, minmax_codes, origin_of
from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.lowering.ops.append_window import _encoded, one_token
from kvcompile.schemes.symmetric import SCALE_ULP, TINY
from kvcompile.types import KeyOrValue

TOKENS = tl.constexpr(BLOCK)
"""Tokens of a block and of the window; slot i of the window holds the token at index i of the current block, or of the block before."""


@triton.jit
def _largest_norm(x):
    """Return the largest norm of float64 tokens [tokens, D] as float32, rounded up; see ``certified.scheme.largest_norm``."""
    norms = tl.sqrt(tl.sum(x * x, 1))
    largest = tl.max(norms, 0)
    above = (largest * (1 + 2.0**-22) + 2.0**-149).to(tl.float32)
    finite = (tl.max((norms != norms).to(tl.int32), 0) == 0) & (above < float("inf"))
    return tl.where(finite, tl.where(largest == 0, 0.0, above), float("nan"))


@triton.jit
def _code_keys(content, CODES, SCALES, ZEROS, D: tl.constexpr):
    """Encode float32 keys [tokens, D] of one block by channel; return the decoded keys, float32 [tokens, D].

    Written: CODES int8 [tokens, D], and SCALES and ZEROS [D], all pointers to the block.
    """
    d = tl.arange(0, D)
    nans = tl.max((content != content).to(tl.int32), 0) != 0
    low = tl.where(nans, float("nan"), tl.min(content, 0))
    high = tl.where(nans, float("nan"), tl.max(content, 0))
    spread = high - low
    # 16 significant bits, rounded up: a code times a step is exact.
    near = tl.math.div_rn(spread, tl.full([D], 255.0, tl.float32))
    step = ((near.to(tl.int32, bitcast=True) + 255) & -256).to(tl.float32, bitcast=True)
    zero = low + 128 * step
    finite = (tl.abs(zero) < float("inf")) & (tl.abs(spread) < float("inf"))
    step = tl.where(finite, step, float("nan"))
    coded = finite & (step != 0)
    ratio = tl.math.div_rn(content - zero[None, :], tl.broadcast_to(tl.where(coded, step, 1.0)[None, :], content.shape))
    rounded = (tl.minimum(tl.maximum(ratio, -128.0), 127.0) + MAGIC).to(tl.int32, bitcast=True)
    codes = tl.where(coded[None, :], (rounded << 24) >> 24, 0)
    tl.store(CODES + tl.arange(0, TOKENS)[:, None] * D + d[None, :], codes.to(tl.int8))
    tl.store(SCALES + d, step)
    tl.store(ZEROS + d, zero)
    return codes.to(tl.float32) * step[None, :] + zero[None, :]


@triton.jit
def _code_values(
    content, CODES, SCALES, ZEROS, D: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, ULP: tl.constexpr,
    TINY: tl.constexpr,
):
    """Encode float32 values [tokens, D] of one block by groups of channels; return the decoded values, float32 [tokens, D].

    Written: CODES uint8 [tokens, D // PARTS], and SCALES and ZEROS [tokens, D // GROUP], all pointers to the block. A byte has PARTS codes
    of BITS bits; GROUP: channels that share a scale; ULP, TINY: see ``rounded_up``.
    """
    codes, scale, zero = minmax_codes(
        tl.reshape(content, [TOKENS * (D // GROUP), GROUP, 1]), SCALES.dtype.element_ty, BITS, ULP, TINY
    )
    i, w, g = tl.arange(0, TOKENS), tl.arange(0, D // PARTS), tl.arange(0, TOKENS * (D // GROUP))
    words = tl.sum(tl.reshape(codes, [TOKENS, PARTS, D // PARTS]) << (BITS * tl.arange(0, PARTS))[None, :, None], 1)
    tl.store(CODES + i[:, None] * (D // PARTS) + w[None, :], words.to(tl.uint8))
    tl.store(SCALES + g, tl.reshape(scale, [TOKENS * (D // GROUP)]))
    tl.store(ZEROS + g, tl.reshape(zero, [TOKENS * (D // GROUP)]))
    return tl.reshape(codes.to(tl.float32) * scale.to(tl.float32) + zero.to(tl.float32), [TOKENS, D])


@triton.jit
def _append_certified(
    program, X, RING, CLOCK, CODES, SCALES, ZEROS, NOTES, ORIGINALS, PLACES, POS, ORIGIN, RECENT, x_b, x_h, x_d, pages, batch, pos_b,
    D: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr, HAS_ORIGIN: tl.constexpr, HAS_PLACES: tl.constexpr, FULL: tl.constexpr,
):
    """Append one token of one kv head of one batch row: write the newest tokens to RECENT, and the token to the window RING.

    Also written: CLOCK, the row's token count and origin; of the token's block, with zeros after the token, ORIGINALS, the two NOTES,
    CODES, SCALES and ZEROS (not if FULL: without codes), and with HAS_PLACES zeros to PLACES, as the scratch's copy is now outdated. A
    token out of order becomes NaN. ``program``: batch row and kv head, heads first; KEYS: the slot holds keys. The other names are as in
    ``window_token``. All planes are contiguous. See the module.
    """
    b = (program // HEADS).to(tl.int64)
    h = (program % HEADS).to(tl.int64)
    d = tl.arange(0, D)
    j = tl.arange(0, TOKENS)
    clock = CLOCK + (b * HEADS + h) * 2
    ring = RING + (b * HEADS + h) * (TOKENS * D)
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

    # The newest tokens: row j of W + 1 is token start - W + j, which is in slot (start + j) % W.
    slot = (start & (TOKENS - 1)).to(tl.int32)
    out = RECENT + (b * HEADS + h) * (TOKENS + 1) * D
    tl.store(out + ((j - slot) & (TOKENS - 1))[:, None] * D + d[None, :], whole)
    tl.store(out + TOKENS * D + d, x)

    # The token's block, zeros after the token.
    last = tl.minimum(tl.maximum(start, 0), room - 1) // TOKENS
    t = last * TOKENS + j
    zeros = tl.zeros([TOKENS, D], tl.float32).to(X.dtype.element_ty)
    content = tl.where((t == start)[:, None], x[None, :], tl.where((t < start)[:, None], whole, zeros))
    # All threads must have read the window before any of it is overwritten.
    tl.debug_barrier()
    tl.store(ring + slot * D + d, x)
    tl.store(clock, held_behind(start + 1, room, follows, fits, first, first, held, kept, given, HAS_ORIGIN))
    tl.store(clock + 1, remembered)

    blocks: tl.constexpr = PAGE // TOKENS
    page = ((last // blocks) * batch + b) * HEADS + h
    block = page * blocks + last % blocks
    wide = content.to(tl.float32)
    tl.store(ORIGINALS + block * (TOKENS * D) + j[:, None] * D + d[None, :], content)
    if FULL:
        # Finite tokens decode to themselves; NaN and Inf make the note NaN.
        decoded = wide
    elif KEYS:
        decoded = _code_keys(wide, CODES + block * (TOKENS * D), SCALES + block * D, ZEROS + block * D, D)
    else:
        scales = block * (TOKENS * (D // GROUP))
        decoded = _code_values(
            wide, CODES + block * (TOKENS * (D // PARTS)), SCALES + scales, ZEROS + scales, D, BITS, PARTS, GROUP, ULP, TINY
        )
    tl.store(NOTES + block * 2, _largest_norm(wide.to(tl.float64) - decoded.to(tl.float64)))
    tl.store(NOTES + block * 2 + 1, _largest_norm(wide.to(tl.float64)))
    if HAS_PLACES:
        tl.store(PLACES + block * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))


APPEND_CERTIFIED = slot_kernels(_append_certified)


def is_certified(spelled: str) -> bool:
    """Return whether a scheme's text is that of certified keys or certified values."""
    scheme = schemes.parse(spelled)
    return isinstance(scheme, Certified) and scheme.key_or_value is not KeyOrValue.AUTO


def fits(slot: WindowSlot) -> bool:
    """Return whether the kernel supports this append: one token, a number of channels that is a power of two, and contiguous planes."""
    D = slot.x.shape[3]
    if not one_token(slot.x) or not is_certified(slot.scheme) or D & (D - 1) or slot.x.dtype not in {
        torch.float16, torch.bfloat16, torch.float32,
    }:
        return False
    at = _encoded(slot.planes)
    originals = _split(slot)[4]
    return all(_contiguous(plane) for plane in slot.planes[: at + 2]) and originals.dtype == slot.window.dtype == slot.x.dtype


def _contiguous(plane: torch.Tensor) -> bool:
    """Return whether a plane [N, B, K, R, width] is contiguous, without a guard on a symbolic number of pages."""
    step = 1
    for axis in reversed(range(1, plane.dim())):
        if plane.stride(axis) != step and plane.shape[axis] != 1:
            return False
        step *= plane.shape[axis]
    return plane.stride(0) == step or (isinstance(plane.shape[0], int) and plane.shape[0] == 1)


def _split(slot: WindowSlot) -> tuple[torch.Tensor, ...]:
    """Return the planes codes, scales, zeros, notes, originals and, if there is one, places.

    For a slot without codes, the originals take the places of codes, scales and zeros.
    """
    planes = slot.planes[: _encoded(slot.planes)]
    if len(planes) > 2:
        return tuple(planes)
    originals, notes = planes
    return originals, originals, originals, notes, originals


def _operands(slot: WindowSlot, exact_newest: torch.Tensor) -> tuple[object, ...]:
    """Return the arguments of the kernels, in their order: whole planes, no views."""
    codes, scales, zeros, notes, originals, *more = _split(slot)
    origin = slot.pos if slot.origin is None else slot.origin
    return (
        slot.x, slot.window, slot.clock, codes, scales, zeros, notes, originals, more[0] if more else slot.pos, slot.pos, origin,
        exact_newest,
        slot.x.stride(0), slot.x.stride(1), slot.x.stride(3), codes.shape[0], slot.x.shape[0],
        0 if slot.pos.shape[0] == 1 else slot.pos.stride(0),
    )


def _constants(slot: WindowSlot) -> dict[str, Any]:
    """Return the constants of the kernels, by name."""
    scheme = schemes.parse(slot.scheme)
    assert isinstance(scheme, Certified)
    rule, dtype = scheme.value_scheme.minmax(slot.x.shape[3]), scheme.value_scheme.scale_dtype
    assert rule is not None
    return {
        "D": slot.x.shape[3], "PAGE": slot.planes[0].shape[3], "HEADS": slot.x.shape[1], "KEYS": scheme.key_or_value is KeyOrValue.KEY,
        "BITS": rule.bits, "PARTS": rule.parts, "GROUP": rule.group, "ULP": SCALE_ULP[dtype], "TINY": TINY[dtype],
        "HAS_ORIGIN": slot.origin is not None, "HAS_PLACES": _encoded(slot.planes) > 5, "FULL": _encoded(slot.planes) == 2,
    }


def append_certified(slots: Sequence[WindowSlot], launcher: Launcher | None = None) -> list[torch.Tensor]:
    """Append tokens to one or two slots that ``fits`` accepts, in one launch; returns each slot's newest tokens, as ``append_window_body``.

    ``launcher`` None starts the kernel immediately.
    """
    results = [slot.exact_newest() for slot in slots]
    APPEND_CERTIFIED.start(
        launcher or Direct(slots[0].x.device.type == "cuda"),
        [SlotLaunch(slot.programs, _operands(slot, newest), _constants(slot)) for slot, newest in zip(slots, results, strict=True)],
    )
    return results
