"""``append`` of many tokens on CUDA for schemes that encode by thresholds (``Scheme.bins``): minimum, step, bin and packing in one pass.

A program has ROWS new tokens of one kv head of one batch row. It takes minimum and maximum of every group, counts for each value the
thresholds of the group's table that do not exceed it, and packs the counts. The result equals that of ``append_body`` bit for bit; a test
compares them. Positions outside of the planes make the last row NaN in both, or are left out (``rows``). Keys and
values have a launch each.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvcompile import schemes
from kvcompile.lowering.append.rounding import in_scales, stored_range
from kvcompile.lowering.append.rows import by_constant, places, plain, row_places, tokens_of, written
from kvcompile.schemes.symmetric import SCALE_ULP, TINY
from kvcompile.types import Bins

TILE = 2048
"""Elements of a program: 16 for each of 128 threads, each with its code."""


@triton.jit
def append_thresholds(
    X, CODES, SCALES, ZEROS, POS, TABLE, x_b, x_h, x_s, x_d, count, pages, codes_n, scales_n, pos_b, pos_s, codes_b, codes_h, scales_b,
    scales_h, HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr, SEGMENTS: tl.constexpr,
    GROUP: tl.constexpr, ULP: tl.constexpr, TINY: tl.constexpr, ROWS: tl.constexpr,
    SKIP: tl.constexpr,
):
    """Encode ROWS tokens of one kv head of one batch row; write CODES, SCALES and ZEROS at the tokens' positions.

    Grid: blocks of ROWS tokens times kv heads, the heads first; batch rows. TABLE: the thresholds, [HEADS, D // GROUP, 2^BITS - 1], in
    units of scales. A position outside of the planes makes their last row NaN; with SKIP, a token at a negative one is left out. The other
    names are as in ``append.rows``.
    """
    program, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    h = (program % HEADS).to(tl.int64)
    s = (program // HEADS) * ROWS + tl.arange(0, ROWS)
    there = s < count
    given = tl.load(POS + b * pos_b + s.to(tl.int64) * pos_s, mask=there, other=0)
    there = written(there, given, pages, PAGE, SKIP)
    inside, page, row = row_places(given, pages, PAGE)
    GROUPS: tl.constexpr = D // GROUP
    stored: tl.constexpr = SCALES.dtype.element_ty
    group, i = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    channel = group[:, None] * GROUP + i[None, :]
    source = X + b * x_b + h * x_h + (s.to(tl.int64) * x_s)[:, None, None] + (channel * x_d)[None, :, :]
    x = tl.load(source, mask=there[:, None, None], other=0.0).to(tl.float32)
    x = tl.where(inside[:, None, None], x, float("nan"))
    scale, zero = stored_range(x, 2**BITS - 1, ULP, TINY, stored)
    ratio = in_scales(x, scale, zero)
    codes = tl.zeros([ROWS, GROUPS, GROUP], tl.int32)
    table = TABLE + h * (GROUPS * (2**BITS - 1)) + group * (2**BITS - 1)
    for k in tl.static_range(2**BITS - 1):
        codes += (ratio >= tl.load(table + k)[None, :, None]).to(tl.int32)
    codes = tl.where(scale == scale, codes, 0)

    WIDTH: tl.constexpr = D // PARTS
    planar = tl.reshape(codes, [ROWS, PARTS, WIDTH])
    if SEGMENTS > 4:
        planar = planar.to(tl.int64)
    words = tl.sum(planar << (BITS * tl.arange(0, PARTS))[None, :, None], 1)
    to = CODES + b * codes_b + h * codes_h + page * codes_n + row * (SEGMENTS * WIDTH)
    w = tl.arange(0, WIDTH)
    for byte in tl.static_range(SEGMENTS):
        tl.store(to[:, None] + byte * WIDTH + w[None, :], ((words >> (8 * byte)) & 255).to(tl.uint8), mask=there[:, None])
    beside = (b * scales_b + h * scales_h + page * scales_n + row * GROUPS)[:, None] + group[None, :]
    tl.store(SCALES + beside, tl.reshape(scale, [ROWS, GROUPS]), mask=there[:, None])
    tl.store(ZEROS + beside, tl.reshape(zero.to(stored), [ROWS, GROUPS]), mask=there[:, None])


class ThresholdRows(NamedTuple):
    """The operands of ``append`` of one slot; ``table``: its thresholds, [1, 1, K, D // group, 2^bits - 1]."""

    x: torch.Tensor
    planes: list[torch.Tensor]
    pos: torch.Tensor
    table: torch.Tensor
    scheme: str
    skip: bool = False

    @property
    def rule(self) -> Bins:
        """The rule by which the scheme encodes; only for slots that ``fits`` accepts."""
        rule = schemes.parse(self.scheme).bins(self.x.shape[3])
        assert rule is not None
        return rule

    @property
    def rows(self) -> int:
        """Number of tokens per program: as many as fill a tile, or one for a decode step."""
        return tokens_of(self.x, self.x.shape[3], TILE)

    def operands(self) -> tuple[object, ...]:
        """Return the arguments of the kernel, in their order: whole planes, no views."""
        x, pos, (codes, scales, zeros) = self.x, self.pos, self.planes
        return (x, codes, scales, zeros, pos, self.table, *places(x, pos, codes, scales))

    def constants(self) -> dict[str, Any]:
        """Return the kernel's constants, by name."""
        rule, dtype = self.rule, self.planes[1].dtype
        return {
            "HEADS": self.x.shape[1], "PAGE": self.planes[0].shape[3], "D": self.x.shape[3], "BITS": rule.bits, "PARTS": rule.parts,
            "SEGMENTS": rule.segments, "GROUP": rule.group, "ULP": SCALE_ULP[dtype], "TINY": TINY[dtype], "ROWS": self.rows,
            "SKIP": int(self.skip),
        }


def fits(slot: ThresholdRows) -> bool:
    """Return whether the kernel supports this append: a head dim that is a power of two, planes with contiguous rows."""
    D = slot.x.shape[3]
    if not isinstance(D, int) or D & (D - 1) or D > TILE or len(slot.planes) != 3:
        return False
    rule = schemes.parse(slot.scheme).bins(D)
    if rule is None or D % rule.parts or D % rule.group or not slot.table.is_contiguous():
        return False
    alike = slot.planes[1].stride() == slot.planes[2].stride() and slot.planes[0].shape[3] == slot.planes[1].shape[3]
    return alike and plain(slot.x, slot.planes)


APPEND = by_constant(ThresholdRows, fits, append_thresholds)
