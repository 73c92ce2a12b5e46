"""``append`` of many tokens on CUDA for schemes with given scales (``Scheme.static``): quotient, clamp and code in one pass.

A program has ROWS new tokens of one kv head of one batch row, and that head's scale. Nothing is reduced, so Inductor could compute the
codes as well; but it converts to e4m3 only on devices that do, and divides every position by the rows of a page in 64 bits. The kernel's
codes equal those of ``append_body`` bit for bit; a test compares them. Positions outside of the planes make the last row NaN in both, or
are left out (``rows``).
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvcompile import schemes
from kvcompile.lowering.append.absmax import e4m3_codes, e4m3_kind
from kvcompile.lowering.append.rounding import MAGIC, quotient
from kvcompile.lowering.append.rows import by_constant, plain, row_places, tokens_of, written
from kvcompile.types import Static

TILE = 4096
"""Elements of a program: 32 for each of 128 threads."""


@triton.jit
def append_static(
    X, CODES, POS, SCALES, x_b, x_h, x_s, x_d, count, pages, codes_n, codes_b, codes_h, pos_b, pos_s, scales_h, HEADS: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, E4M3: tl.constexpr, QMAX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SKIP: tl.constexpr,
):
    """Encode ROWS tokens of one kv head of one batch row by the head's entry in SCALES; write CODES at the tokens' positions.

    Grid: blocks of ROWS tokens times kv heads, the heads first; batch rows. COLUMNS: D rounded up to a power of two. A position outside of
    the planes makes their last row NaN; with SKIP, a token at a negative one is left out. QMAX: the largest code; E4M3: see
    ``symmetric_codes``. The other names are as in ``append.rows``.
    """
    program, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    h = (program % HEADS).to(tl.int64)
    s = (program // HEADS) * ROWS + tl.arange(0, ROWS)
    there = s < count
    given = tl.load(POS + b * pos_b + s.to(tl.int64) * pos_s, mask=there, other=0)
    there = written(there, given, pages, PAGE, SKIP)
    inside, page, row = row_places(given, pages, PAGE)
    channel = tl.arange(0, COLUMNS)
    mask = there[:, None] & (channel < D)[None, :]
    source = X + b * x_b + h * x_h + (s.to(tl.int64) * x_s)[:, None] + (channel * x_d)[None, :]
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    # NaN, Inf and tokens outside of the planes get the code of NaN.
    fine = (tl.abs(x) < float("inf")) & inside[:, None]
    scaled = quotient(tl.where(fine, x, 0.0), tl.load(SCALES + h * scales_h))
    scaled = tl.minimum(tl.maximum(scaled, -QMAX), QMAX)
    if E4M3 == 0:
        # The low bits of the sum with MAGIC are the rounded integer.
        code = tl.where(fine, (scaled + MAGIC).to(tl.int32, bitcast=True) & 255, 128)
    elif E4M3 == 1:
        code = tl.where(fine, e4m3_codes(scaled), 127)
    else:
        code = tl.where(fine, scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32), 127)
    to = CODES + page * codes_n + b * codes_b + h * codes_h + row * D
    tl.store(to[:, None] + channel[None, :], code.to(CODES.dtype.element_ty), mask=mask)


class StaticRows(NamedTuple):
    """The operands of ``append`` of one slot; ``scales``: float32, [1, 1, K, 1, 1]."""

    x: torch.Tensor
    planes: list[torch.Tensor]
    pos: torch.Tensor
    scales: torch.Tensor
    scheme: str
    skip: bool = False

    @property
    def rule(self) -> Static:
        """The rule by which the scheme encodes; only for slots that ``fits`` accepts."""
        rule = schemes.parse(self.scheme).static(self.x.shape[3])
        assert rule is not None
        return rule

    @property
    def columns(self) -> int:
        """Number of channels of a token, rounded up to a power of two."""
        return triton.next_power_of_2(self.x.shape[3])

    @property
    def rows(self) -> int:
        """Number of tokens per program: as many as fill a tile, or one for a decode step."""
        return tokens_of(self.x, self.columns, TILE)

    def operands(self) -> tuple[object, ...]:
        """Return the arguments of the kernel, in their order: whole planes, no views."""
        x, pos, scales, codes = self.x, self.pos, self.scales, self.planes[0]
        return (
            x, codes, pos, scales, x.stride(0), x.stride(1), x.stride(2), x.stride(3), x.shape[2], codes.shape[0], codes.stride(0),
            codes.stride(1), codes.stride(2), 0 if pos.shape[0] == 1 else pos.stride(0), pos.stride(1), scales.stride(2),
        )

    def constants(self) -> dict[str, Any]:
        """Return the kernel's constants, by name."""
        rule = self.rule
        return {
            "HEADS": self.x.shape[1], "PAGE": self.planes[0].shape[3], "D": self.x.shape[3],
            "E4M3": e4m3_kind(rule.e4m3, self.x.device), "QMAX": rule.largest, "ROWS": self.rows, "COLUMNS": self.columns,
            "SKIP": int(self.skip),
        }


def fits(slot: StaticRows) -> bool:
    """Return whether the append kernel supports these operands: a scheme with static scales in float32, and codes of one byte a channel.

    Other conditions: a head dim that is no symbol and at most TILE, and a contiguous plane of codes.
    """
    D = slot.x.shape[3]
    if not isinstance(D, int) or D > TILE or len(slot.planes) != 1 or schemes.parse(slot.scheme).static(D) is None:
        return False
    codes = slot.planes[0]
    bytewise = codes.shape[4] == D and codes.dtype.itemsize == 1
    return bytewise and plain(slot.x, slot.planes) and slot.scales.dtype == torch.float32


APPEND = by_constant(StaticRows, fits, append_static)
