"""``append`` on CUDA, keys and values in one launch: every byte is read once and written once.

A program has ROWS new tokens of one kv head of one batch row: it loads the channels of each part of a word, takes the
largest magnitude of every group, and packs codes equal to ``Symmetric.encode``'s, for schemes with a rule
(``Scheme.absmax``). Tracing the body instead gives Inductor kernels that pass x / scale through memory if the parts of a
word are in different groups, and 64-bit divisions of every position. Bit for bit equal to the body, which a test checks.
Positions outside of the planes poison the last row, as in ``ops.operations.append_body``; or, with SKIP, tokens with negative ones are left
out, as in a pool of blocks (``lowering.paged``), and one beyond the planes ends a GPU's process where assertions are on.

Names that append kernels share. X, POS: new tokens and their positions; ``x_b``, ``codes_n`` and the like: strides of X and planes by batch
row (b), head (h), token (s), channel (d) and page (n); ``count``: new tokens of a batch row; ``pages``: pages of a plane. HEADS: kv heads;
PAGE: tokens of a page; D: channels; PARTS, BITS: codes of a word and bits of a code; SEGMENTS: bytes of a word, stored apart; GROUP:
channels that share a scale; ULP, TINY: see ``rounding.rounded_up``.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvcompile import schemes
from kvcompile.lowering.append.absmax import absmax_scale, e4m3_kind, symmetric_codes
from kvcompile.lowering.append.slot_kernels import SlotLaunch, slot_kernels
from kvcompile.lowering.attention_plugins import AppendKernel
from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.schemes.symmetric import SCALE_ULP, TINY
from kvcompile.types import AbsMax

TILE = 4096
"""Elements of a program: 32 for each of 128 threads, in four loads of 16 bytes."""


@triton.jit
def row_places(given, pages, PAGE: tl.constexpr):
    """Return (inside, page, row) of the positions ``given``: whether each is within ``pages`` pages, and the page and row to write.

    A position outside is given the last row of the last page. Callers write NaN there, so that a wrong position shows in attention's
    result. PAGE: tokens of a page. Takes loaded positions: torch counts a pointer argument as written if the helper's result is used in an
    address.
    """
    room = pages * PAGE
    inside = (given >= 0) & (given < room)
    at = tl.where(inside, given, room - 1).to(tl.int32)
    return inside, (at // PAGE).to(tl.int64), (at % PAGE).to(tl.int64)


@triton.jit
def written(there, given, pages, PAGE: tl.constexpr, SKIP: tl.constexpr):
    """Return the mask of tokens to write: ``there`` or, with SKIP, ``there`` without the tokens at positions outside of the planes.

    ``given``: the tokens' positions, ``pages`` * PAGE of which are in the planes.
    """
    if SKIP:
        tl.device_assert(given < pages * PAGE, "expected slots of the pool, found one behind its last", mask=there)
        there = there & (given >= 0) & (given < pages * PAGE)
    return there


@triton.jit
def _append_rows(
    program, b, X, CODES, SCALES, POS, x_b, x_h, x_s, x_d, count, pages, codes_n, scales_n, pos_b, pos_s, codes_b, codes_h, scales_b,
    scales_h, HEADS: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, E4M3: tl.constexpr, QMAX: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr, UNIT: tl.constexpr, SKIP: tl.constexpr,
):
    """Encode ROWS tokens of one kv head of batch row ``b``; write CODES and SCALES at the tokens' positions.

    The WIDTH channels in one part of the words are WIDTH // GROUP groups with a scale each, padded to UNITS groups of UNIT channels.

    ``program``: the program's number in the batch row, kv heads first; ``count``: number of new tokens; ``pages``: number of pages of the
    planes. BITS, PARTS: a word has PARTS codes of BITS bits. E4M3: see ``symmetric_codes``; QMAX, ULP, TINY: see ``absmax_scale``; SKIP:
    see ``written``.
    """
    h = (program % HEADS).to(tl.int64)
    s = (program // HEADS) * ROWS + tl.arange(0, ROWS)
    there = s < count
    given = tl.load(POS + b * pos_b + s.to(tl.int64) * pos_s, mask=there, other=0)
    there = written(there, given, pages, PAGE, SKIP)
    inside, page, row = row_places(given, pages, PAGE)
    words = CODES + page * codes_n + b * codes_b + h * codes_h + row * WIDTH
    scales = SCALES + page * scales_n + b * scales_b + h * scales_h + row * (PARTS * (WIDTH // GROUP))

    unit, i = tl.arange(0, UNITS), tl.arange(0, UNIT)
    channel = unit[:, None] * GROUP + i[None, :]
    known = (unit < WIDTH // GROUP)[:, None] & (i < GROUP)[None, :]
    mask = there[:, None, None] & known[None, :, :]
    source = X + b * x_b + h * x_h + (s.to(tl.int64) * x_s)[:, None, None]
    packed = tl.zeros([ROWS, UNITS, UNIT], tl.int32)
    for part in tl.static_range(PARTS):
        x = tl.load(source + ((part * WIDTH + channel) * x_d)[None, :, :], mask=mask, other=0.0).to(tl.float32)
        # Magnitudes compare as integers, with infinity and NaN above all numbers.
        top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
        top = tl.where(inside[:, None], top, 0x7FC00000)
        scale = absmax_scale(top, QMAX, ULP, TINY, SCALES.dtype.element_ty)
        code = symmetric_codes(x, scale[:, :, None], BITS, PARTS, E4M3)
        packed = packed | (code << (BITS * part))
        where = part * (WIDTH // GROUP) + unit
        tl.store(scales[:, None] + where[None, :], scale, mask=there[:, None] & (unit < WIDTH // GROUP)[None, :])
    tl.store(words[:, None, None] + channel[None, :, :], packed.to(CODES.dtype.element_ty), mask=mask)


APPEND_ROWS = slot_kernels(_append_rows)


def places(x: torch.Tensor, pos: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> tuple[object, ...]:
    """Return the kernel arguments x_b to scales_h, in order: strides of tokens, two counts, strides of planes and of positions."""
    return (
        x.stride(0), x.stride(1), x.stride(2), x.stride(3), x.shape[2], codes.shape[0], codes.stride(0), scales.stride(0),
        0 if pos.shape[0] == 1 else pos.stride(0), pos.stride(1), codes.stride(1), codes.stride(2), scales.stride(1), scales.stride(2),
    )


def tokens_of(x: torch.Tensor, columns: int, tile: int) -> int:
    """Return the number of tokens of a program: as many of ``columns`` elements as fill ``tile``; 1 for a single new token."""
    return 1 if isinstance(x.shape[2], int) and x.shape[2] == 1 else max(1, tile // columns)


def launch(kernel: Any, slot: Any, launcher: Launcher | None) -> None:
    """Start a kernel of one slot, by programs of ``slot.rows`` tokens; ``launcher`` None starts it immediately.

    ``slot``: a record with x [B, K, S, D], ``rows``, ``operands`` and ``constants``.
    """
    launcher = launcher or Direct(slot.x.device.type == "cuda")
    grid = ((slot.x.shape[2] + slot.rows - 1) // slot.rows * slot.x.shape[1], slot.x.shape[0])
    launcher.kernel(kernel, grid, *slot.operands(), warps=1 if slot.rows == 1 else None, **slot.constants())


def by_constant(slot: Callable[..., Any], fits: Callable[[Any], bool], kernel: Any) -> AppendKernel:
    """Return the ``AppendKernel`` of a scheme that encodes by a constant plane; it launches ``kernel`` once per slot.

    ``slot``: a class that holds the operands of one ``append``, made from its arguments. ``fits``: whether ``kernel`` supports such
    operands.
    """

    def run(calls: Sequence[tuple[Any, ...]], launcher: Launcher) -> list[torch.Tensor]:
        for call in calls:
            launch(kernel, slot(*call), launcher)
        return []

    return AppendKernel(lambda call: fits(slot(*call)), run)


def plain(x: torch.Tensor, planes: Sequence[torch.Tensor]) -> bool:
    """Return whether the tokens ``x`` have a dtype that kernels load, and the rows of ``planes`` are contiguous."""
    in_order = all(plane.stride(4) == 1 and plane.stride(3) == plane.shape[4] for plane in planes)
    return in_order and x.dtype in {torch.float16, torch.bfloat16, torch.float32}


class Rows(NamedTuple):
    """The operands of ``append``, with the sizes of its kernel; ``skip``: leave out tokens at negative positions."""

    x: torch.Tensor
    planes: list[torch.Tensor]
    pos: torch.Tensor
    scheme: str
    skip: bool = False

    @property
    def rule(self) -> AbsMax:
        """The rule by which kernels encode the scheme's tokens; only for slots that ``fits`` accepts."""
        rule = schemes.parse(self.scheme).absmax(self.x.shape[3])
        assert rule is not None
        return rule

    @property
    def rows(self) -> int:
        """Number of tokens per program: as many as fill a tile; 1 for a single new token."""
        rule = self.rule
        width = self.x.shape[3] // rule.parts
        return tokens_of(self.x, triton.next_power_of_2(width // rule.group) * triton.next_power_of_2(rule.group), TILE)

    @property
    def programs(self) -> int:
        """Number of programs of one batch row."""
        return (self.x.shape[2] + self.rows - 1) // self.rows * self.x.shape[1]

    def operands(self) -> tuple[object, ...]:
        """Return the kernels' arguments, in order: whole planes, no views."""
        x, pos, (codes, scales) = self.x, self.pos, self.planes
        return (x, codes, scales, pos, *places(x, pos, codes, scales))

    def constants(self) -> dict[str, Any]:
        """Return the kernels' constants, by name."""
        rule, dtype = self.rule, self.planes[1].dtype
        width = self.x.shape[3] // rule.parts
        return {
            "HEADS": self.x.shape[1], "PAGE": self.planes[0].shape[3], "WIDTH": width, "PARTS": rule.parts, "BITS": rule.bits,
            "GROUP": rule.group, "E4M3": e4m3_kind(rule.e4m3, self.x.device), "QMAX": rule.largest, "ULP": SCALE_ULP[dtype],
            "TINY": TINY[dtype], "ROWS": self.rows, "UNITS": triton.next_power_of_2(width // rule.group),
            "UNIT": triton.next_power_of_2(rule.group), "SKIP": int(self.skip),
        }


def fits(slot: Rows) -> bool:
    """Return whether the kernel supports this append: a scheme with one scale per group by largest magnitudes, and contiguous rows.

    Also needed: a head dim that is no symbol and at most TILE, groups within one part of the words, and planes with pages of one size.
    """
    D = slot.x.shape[3]
    if not isinstance(D, int):
        return False
    rule = schemes.parse(slot.scheme).absmax(D)
    if rule is None or D % rule.parts or (D // rule.parts) % rule.group or D > TILE:
        return False
    return plain(slot.x, slot.planes) and len(slot.planes) == 2 and slot.planes[0].shape[3] == slot.planes[1].shape[3]


def append_rows(slots: Sequence[Rows], launcher: Launcher | None = None) -> None:
    """Encode and write the new tokens of one slot, or of two slots of one batch, in one launch, as ``append_body`` does.

    ``fits`` must accept the slots. ``launcher`` None starts the kernel immediately.
    """
    batch = slots[0].x.shape[0]
    assert all(slot.x.shape[0] == batch for slot in slots)
    # One token has few channels for each thread of one warp; more warps would only wait for each other.
    APPEND_ROWS.start(
        launcher or Direct(slots[0].x.device.type == "cuda"),
        [SlotLaunch(slot.programs, slot.operands(), slot.constants()) for slot in slots], batch, warps=1 if slots[0].rows == 1 else None,
    )
