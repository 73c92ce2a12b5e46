"""``append_window`` of many tokens on CUDA: two launches for keys and values; the traced body gives thirty Inductor kernels.

The first launch reads the window and the clock: a program has ROWS positions of one kv head of one batch row, aligned to
ROWS, so that it owns whole blocks within one page of the planes. It takes the call's tokens from x, and earlier tokens of
the first block from the window, encodes them, and writes them to the newest tokens. The second launch
copies the last W of those into the window and updates the clock. Together they compute ``ops.append_window.append_window_body`` for
schemes whose codes ``window_token`` makes, with its rounding. A test compares them.

A program whose positions are outside of the planes, before 0 or behind the last page, writes its newest tokens and encodes the
nearest tile inside: another program encodes that tile too, to equal bytes, or it is the first or last block, which the
body encodes even if the call has no token in it.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcompile.lowering.append.rounding import quads_of_words
from kvcompile.lowering.append.slot_kernels import SlotLaunch, slot_kernels
from kvcompile.lowering.append.window_token import NORMED, WindowSlot, block_codes, corrected, held_behind, known, normed, origin_of
from kvcompile.lowering.host.launches import Direct, Launcher

TILE = 4096
"""Elements of a program, unless a block is larger."""

PART = tl.constexpr(8)
"""Tokens outside of the planes that a program copies at a time, to save registers."""

CHECKED = tl.constexpr(1024)
"""Positions that a program compares at a time."""

MOST_ELEMENTS = 8192
"""Most elements of a program that fit its threads' registers."""


@triton.jit
def _refused(there, said, s, first, used, ordered, room):
    """Return the mask of the call's tokens ``s`` that are refused: out of order, or past the store's end.

    ``there``: the mask of the tokens that exist; ``said``: the positions given for them; ``first``: the position of the call's first token;
    ``used``: the row's origin; ``ordered``: whether the call continues the row; ``room``: the end of the store.
    """
    return there & ((ordered & (said == first + s) & (said - used < room)) == 0)


@triton.jit
def _new(s, SOURCE, POSITIONS, first, used, ordered, count, room, x_s, x_d, pos_s, D: tl.constexpr):
    """Return tokens ``s`` [n] of the call as [n, D], 0 for indices outside of the call, and the mask of those to become NaN, being refused.

    SOURCE, POSITIONS: the row's tokens, of which there are ``count``, and their positions. The other operands are as in ``_refused``.
    """
    there = (s >= 0) & (s < count)
    said = tl.load(POSITIONS + s * pos_s, mask=there, other=0)
    x = tl.load(SOURCE + s[:, None] * x_s + tl.arange(0, D)[None, :] * x_d, mask=there[:, None], other=0.0)
    return x, _refused(there, said, s, first, used, ordered, room)


@triton.jit
def _give(recent, s, x, poisoned, count, W: tl.constexpr, D: tl.constexpr):
    """Write tokens ``x`` [n, D], numbers ``s`` [n] of the call, to ``recent``, the tensor of newest tokens; as NaN where ``poisoned``.

    ``count``: number of tokens of the call, which follow the W tokens of the window. Two stores, since a select would unpack 16-bit pairs.
    """
    to = recent + (W + s)[:, None] * D + tl.arange(0, D)[None, :]
    there = (s >= 0) & (s < count)
    tl.store(to, x, mask=(there & (poisoned == 0))[:, None])
    tl.store(to, tl.full(x.shape, float("nan"), tl.float32).to(x.dtype), mask=poisoned[:, None])


@triton.jit
def _append_blocks(
    program, b, X, RING, CLOCK, CODES, SCALES, ZEROS, OWN, POS, ORIGIN, RECENT, x_b, x_h, x_s, x_d, count, pages, codes_n, scales_n,
    pos_b, pos_s, codes_b, codes_h, scales_b, scales_h, own_b, own_h, D: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr, SEGMENTS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    SUB: tl.constexpr, QMAX: tl.constexpr, E4M3: tl.constexpr, HAS_ORIGIN: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Append ROWS positions of one kv head of batch row ``b``: write RECENT, the newest tokens, and CODES, SCALES, ZEROS of whole blocks.

    ZEROS only without QMAX; if SUB is NORMED also norms, to OWN. RING and CLOCK are only read: ``_roll`` writes them. They and RECENT are
    contiguous. ``program``: the tile of positions and the kv head, heads first; ``count``: number of tokens of the call; ``pages``: number
    of pages of the planes. Constants: see ``window_token._encode_block``.
    """
    h = (program % HEADS).to(tl.int64)
    tile = program // HEADS
    first = tl.load(POS + b * pos_b)
    kept = tl.load(CLOCK + (b * HEADS + h) * 2 + 1)
    used, _, fits = origin_of(first, kept, tl.load(ORIGIN + b) if HAS_ORIGIN else kept, HAS_ORIGIN)
    held = tl.load(CLOCK + (b * HEADS + h) * 2)
    start = first - used
    room = pages * PAGE
    ordered = ((first == 0) | (first == held + kept)) & fits
    i, d = tl.arange(0, ROWS), tl.arange(0, D)
    ring = RING + (b * HEADS + h) * (W * D)
    recent = RECENT + (b * HEADS + h) * ((W + count) * D)
    source = X + b * x_b + h * x_h
    positions = POS + b * pos_b

    begin = (start & (-ROWS)) + tile * ROWS
    stand = tl.minimum(tl.maximum(begin, 0), room - ROWS)
    if begin != stand:
        for part in range(0, ROWS, PART):
            s = begin - start + part + tl.arange(0, PART)
            other, outside = _new(s, source, positions, first, used, ordered, count, room, x_s, x_d, pos_s, D)
            _give(recent, s, other, outside, count, W, D)

    # Row j of the newest tokens is token start - W + j, from window slot (start + j) % W.
    COPY: tl.constexpr = W if W < ROWS else ROWS  # noqa: FURB136 - of tensors, to Triton
    if tile == 0:
        for row in range(0, W, COPY):
            j = row + tl.arange(0, COPY)
            old = tl.load(ring + ((start + j) & (W - 1))[:, None] * D + d[None, :])
            tl.store(recent + j[:, None] * D + d[None, :], old)

    # Blocks that the call touches; there is always at least one.
    last = tl.minimum(tl.maximum(start + (count - 1), 0), room - 1) // BLOCK
    lowest = tl.minimum(tl.maximum(start, 0) // BLOCK, last)
    # Relative to the tile, in 32 bits.
    since = tl.minimum(tl.maximum(lowest - stand // BLOCK, 0), ROWS).to(tl.int32)
    until = tl.minimum(tl.maximum(last - stand // BLOCK, -1), ROWS).to(tl.int32)
    touched = (i // BLOCK >= since) & (i // BLOCK <= until)

    # Each row's source: x for tokens of the call, the window for earlier tokens of a block that the call touches.
    s = stand - start
    new = (s + i >= 0) & (s + i < count)
    before = (s + i < 0) & touched
    said = tl.load(positions + s * pos_s + i * pos_s, mask=new, other=0)
    poisoned = _refused(new, said, s + i, first, used, ordered, room)
    rows = tl.where(before, ring + ((stand + i) & (W - 1)) * D, source + s * x_s + i * x_s)
    at = rows[:, None] + d[None, :] * (x_d + before.to(tl.int32) * (1 - x_d))[:, None]
    x = tl.load(at, mask=(new | before)[:, None], other=0.0)
    if tl.max(poisoned.to(tl.int32), 0) > 0:
        x = tl.where(poisoned[:, None], tl.full(x.shape, float("nan"), tl.float32).to(x.dtype), x)
    tl.store(recent + (W + s) * D + i[:, None] * D + d[None, :], x, mask=(new & (begin == stand))[:, None])
    content = x.to(tl.float32)
    if SUB > 0:
        content = corrected(content, OWN + b * own_b + h * own_h, SCALES.dtype.element_ty, BLOCK, SUB, BITS, ULP, TINY)
    if SUB == NORMED:
        content, norm = normed(content, SCALES.dtype.element_ty, ULP, TINY)
        to = OWN + (stand // PAGE) * (codes_n // (SEGMENTS * (D // PARTS))) + b * own_b + h * own_h + stand % PAGE + i
        tl.store(to, tl.reshape(norm, [ROWS]), mask=touched)
    # [blocks, tokens of a block, channels] or [groups, channels of a group, 1]; reduced over the middle axis.
    if BLOCK > 1:
        grouped = tl.reshape(content, [ROWS // BLOCK, BLOCK, D])
    else:
        grouped = tl.reshape(content, [ROWS * (D // GROUP), GROUP, 1])
    codes, scale, zero = block_codes(grouped, SCALES.dtype.element_ty, BITS, PARTS, QMAX, E4M3, ULP, TINY)

    page, row = stand // PAGE, (stand % PAGE).to(tl.int32)
    codes = tl.reshape(codes, [ROWS, D])
    if (SEGMENTS == 1) & (D // PARTS >= 4):
        to = (CODES + page * codes_n + b * codes_b + h * codes_h).to(tl.pointer_type(tl.int32), bitcast=True)
        to += (row + i)[:, None] * (D // PARTS // 4) + tl.arange(0, D // PARTS // 4)[None, :]
        tl.store(to, quads_of_words(codes, BITS, PARTS), mask=touched[:, None])
    else:
        planar = tl.reshape(codes, [ROWS, PARTS, D // PARTS])
        words = tl.sum(planar << (BITS * tl.arange(0, PARTS))[None, :, None], 1)
        to = CODES + page * codes_n + b * codes_b + h * codes_h + (row + i)[:, None] * (SEGMENTS * (D // PARTS))
        w = tl.arange(0, D // PARTS)
        for byte in tl.static_range(SEGMENTS):
            tl.store(to + byte * (D // PARTS) + w[None, :], ((words >> (8 * byte)) & 255).to(CODES.dtype.element_ty), mask=touched[:, None])
    WIDTH: tl.constexpr = D if BLOCK > 1 else D // GROUP
    i = tl.arange(0, ROWS // BLOCK)
    at = page * scales_n + b * scales_b + h * scales_h + (row // BLOCK + i)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    touched = ((i >= since) & (i <= until))[:, None]
    tl.store(SCALES + at, tl.reshape(scale, [ROWS // BLOCK, WIDTH]), mask=touched)
    if QMAX == 0:
        tl.store(ZEROS + at, tl.reshape(zero, [ROWS // BLOCK, WIDTH]), mask=touched)


@triton.jit
def _first_apart(positions, first, count, pos_s):
    """Return the index of the first of ``count`` tokens whose position is not ``first`` plus its index; 0 if there is none.

    ``positions``: a pointer to the tokens' positions.

    Token 0, whose position is ``first``, is never apart.
    """
    least = first * 0 + count
    for part in range(0, count, CHECKED):
        s = part + tl.arange(0, CHECKED)
        said = tl.load(positions + s * pos_s, mask=s < count, other=0)
        least = tl.minimum(least, tl.min(tl.where((s < count) & (said != first + s), s, count), 0))
    return tl.where(least == count, 0, least)


@triton.jit
def _roll(
    program, b, RING, CLOCK, POS, ORIGIN, RECENT, count, pages, pos_b, pos_s, D: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, HAS_ORIGIN: tl.constexpr, COPY: tl.constexpr,
):
    """Copy COPY of the W newest tokens of one kv head of batch row ``b`` from RECENT into the window RING.

    One program a head also writes CLOCK: the row's token count, or the mark of a broken row, and its origin. Other programs read the clock
    while it is written. ``count``: number of tokens of the call; ``pages``: number of pages of the planes.
    """
    h = (program % HEADS).to(tl.int64)
    first = tl.load(POS + b * pos_b)
    kept = tl.load(CLOCK + (b * HEADS + h) * 2 + 1)
    given = tl.load(ORIGIN + b) if HAS_ORIGIN else kept
    used, remembered, fits = origin_of(first, kept, given, HAS_ORIGIN)
    end = first - used + count
    j, d = (program // HEADS) * COPY + tl.arange(0, COPY), tl.arange(0, D)
    row = b * HEADS + h
    newest = tl.load(RECENT + row * ((W + count) * D) + (count + j)[:, None] * D + d[None, :])
    tl.store(RING + row * (W * D) + ((end + j) & (W - 1))[:, None] * D + d[None, :], newest)
    if program < HEADS:
        # Other programs may read the clock before or after this write; both give the same origin: see ``begins``.
        held = tl.load(CLOCK + row * 2)
        follows = (first == 0) | (first == held + kept)
        at = first * 0
        if follows:
            at = _first_apart(POS + b * pos_b, first, count, pos_s)
        found = tl.load(POS + b * pos_b + at * pos_s)
        tl.store(CLOCK + row * 2, held_behind(end, pages * PAGE, follows, fits, first + at, found, held, kept, given, HAS_ORIGIN))
        tl.store(CLOCK + row * 2 + 1, remembered)


APPEND_BLOCKS, ROLL = slot_kernels(_append_blocks), slot_kernels(_roll)


class Blocks(NamedTuple):
    """A slot of many tokens, with the sizes and arguments of its share of both launches; ``exact_newest``: the tensor that they fill."""

    slot: WindowSlot
    exact_newest: torch.Tensor

    @property
    def rows(self) -> int:
        """Number of positions per program: whole blocks, within one page."""
        return rows_of(self.slot)

    @property
    def warps(self) -> int:
        """Number of warps per program: one thread for 128 bytes of tokens; 4 with error feedback or norms, which need more registers."""
        if self.slot.constants()["SUB"]:
            return 4
        return max(1, self.rows * self.slot.x.shape[3] * self.slot.x.element_size() // (32 * 128))

    @property
    def copied(self) -> int:
        """Number of window tokens that one program of ROLL copies."""
        return min(self.slot.window.shape[3], self.rows)

    @property
    def pos_b(self) -> int:
        """Stride between the positions of batch rows, 0 if they are shared."""
        return 0 if self.slot.pos.shape[0] == 1 else self.slot.pos.stride(0)

    @property
    def origin(self) -> torch.Tensor:
        """The rows' origins, int64 [1 or B]; without padding the positions in their place, as an argument that no kernel reads."""
        return self.slot.pos if self.slot.origin is None else self.slot.origin

    @property
    def encoding(self) -> SlotLaunch:
        """The slot's share of the launch of APPEND_BLOCKS: whole planes, and as many tiles as the tokens may touch at any alignment."""
        x, pos, (codes, scales, zeros), (own, *own_strides) = self.slot.x, self.slot.pos, self.slot.coded, self.slot.own
        operands = (
            x, self.slot.window, self.slot.clock, codes, scales, zeros, own, pos, self.origin, self.exact_newest, x.stride(0), x.stride(1),
            x.stride(2), x.stride(3), x.shape[2], codes.shape[0], codes.stride(0), scales.stride(0), self.pos_b, pos.stride(1),
            codes.stride(1), codes.stride(2), scales.stride(1), scales.stride(2), *own_strides,
        )
        programs = ((x.shape[2] + self.rows - 2) // self.rows + 1) * x.shape[1]
        return SlotLaunch(programs, operands, {**self.slot.constants(), "ROWS": self.rows})

    @property
    def rolling(self) -> SlotLaunch:
        """The slot's share of the launch of ROLL, which copies the newest tokens into the window and updates the clock."""
        slot, pos = self.slot, self.slot.pos
        operands = (
            slot.window, slot.clock, pos, self.origin, self.exact_newest, slot.x.shape[2], slot.planes[0].shape[0], self.pos_b,
            pos.stride(1),
        )
        constants = {name: slot.constants()[name] for name in ("D", "W", "PAGE", "HEADS", "HAS_ORIGIN")} | {"COPY": self.copied}
        return SlotLaunch(slot.window.shape[3] // self.copied * slot.x.shape[1], operands, constants)


def rows_of(slot: WindowSlot) -> int:
    """Return the number of positions per program, a power of two: about TILE elements, in whole blocks, at most a page."""
    constants = slot.constants()
    return max(int(str(constants["BLOCK"])), min(slot.planes[0].shape[3], TILE // slot.x.shape[3]))


def fits(slot: WindowSlot) -> bool:
    """Return whether the kernels support this append: many tokens or a symbolic number of them, ``known``, and tiles that fit a program."""
    S, D = slot.x.shape[2:]
    if (isinstance(S, int) and S < 2) or not known(slot) or D > TILE or slot.window.dtype != slot.x.dtype:
        return False
    rows, page = rows_of(slot), slot.planes[0].shape[3]
    return rows * D <= MOST_ELEMENTS and page % rows == 0 and (slot.origin is None or slot.origin.is_contiguous())


def append_window_blocks(slots: Sequence[WindowSlot], launcher: Launcher | None = None) -> list[torch.Tensor]:
    """Append many tokens to one slot or two of one batch in two launches, as ``append_window_body``; return each slot's newest tokens.

    Slots must satisfy ``fits``. ``launcher`` None starts the kernels immediately. The kernels overwrite the clock: a caller that needs the
    origins reads ``WindowSlot.used`` before the call.
    """
    launcher, batch = launcher or Direct(slots[0].x.device.type == "cuda"), slots[0].x.shape[0]
    assert all(slot.x.shape[0] == batch for slot in slots)
    work = [Blocks(slot, slot.exact_newest()) for slot in slots]
    warps = max(blocks.warps for blocks in work)
    APPEND_BLOCKS.start(launcher, [blocks.encoding for blocks in work], batch, warps=warps)
    ROLL.start(launcher, [blocks.rolling for blocks in work], batch)
    return [blocks.exact_newest for blocks in work]
