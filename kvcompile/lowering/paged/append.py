"""``kvcompile::paged_append`` on CUDA: kernels that encode one slot's new tokens and write their codes into the blocks of a pool.

A pool's plane [blocks, K, page, width] is a store with one batch row, in which slots are positions; so the kernels of ``append`` write it,
and skip tokens with negative slots. A slot beyond the pool's last one ends the process by a device-side assertion.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvcompile import schemes
from kvcompile.lowering.append import rows
from kvcompile.lowering.append.rows import Rows, tokens_of
from kvcompile.lowering.attention_plugins import append_of
from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.lowering.paged import cells
from kvcompile.lowering.paged.cells import tokens_of_program
from kvcompile.types import Cells, SlotSpec

TILE = 4096
"""Elements of a program that copies tokens: 32 for each of 128 threads."""


@dataclasses.dataclass(frozen=True)
class PagedAppend:
    """The operands of ``paged_append`` for one slot, keys or values: tokens ``x`` [T, K, D], and ``slots`` [T] of the pool to write.

    If the pool stores rotated channels, ``x`` is rotated already. ``planes``: the pool's planes [blocks, K, page, width]. ``tables``: the
    constant planes with which the scheme encodes.
    """

    x: torch.Tensor
    planes: Sequence[torch.Tensor]
    slots: torch.Tensor
    tables: Sequence[torch.Tensor]
    scheme: str
    slot: SlotSpec

    @property
    def operands(self) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Tokens [1, K, T, D], planes [blocks, 1, K, page, width] and positions [1, T]: the shapes that ``append`` takes."""
        return self.x.transpose(0, 1).unsqueeze(0), [plane.unsqueeze(1) for plane in self.planes], self.slots.unsqueeze(0)

    @property
    def by_edges(self) -> Cells | None:
        """The rule of a scheme whose codes count constant edges; None for other schemes, and for sizes that the kernel does not support."""
        rule = schemes.parse(self.scheme).cells(self.x.shape[2])
        return rule if cells.fits(rule, self.x, self.planes) else None

    @property
    def plain(self) -> bool:
        """Whether the pool stores the tokens themselves, uncompressed."""
        fmt = schemes.parse(self.scheme).format(self.slot)
        return not (fmt.coded or fmt.static or fmt.levels) and len(self.planes) == 1 and self.planes[0].dtype == self.x.dtype


class Checked(Direct):
    """A launcher that compiles kernels with assertions on a GPU, so that they check that every slot is in the pool."""

    def kernel(self, kernel: Any, grid: tuple[Any, ...], *operands: Any, warps: int | None = None, **constants: Any) -> None:
        """Run a kernel, on a GPU with its assertions enabled; Triton's interpreter does not check them."""
        asserting = {"debug": True, "sanitize_overflow": False} if self.cuda else {}
        super().kernel(kernel, grid, *operands, warps=warps, **asserting, **constants)


@triton.jit
def copy_rows(
    X, PLANE, SLOTS, x_s, x_h, x_d, count, blocks, plane_n, plane_h, HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Copy ROWS tokens of X of one kv head, unchanged, into PLANE at their SLOTS.

    Grid: blocks of ROWS tokens times kv heads, the heads first. ``count``: number of tokens; ``blocks``: number of blocks of the pool;
    COLUMNS: D rounded up to a power of two.
    """
    h, s, there, block, row = tokens_of_program(SLOTS, count, blocks, HEADS, PAGE, ROWS)
    channel = tl.arange(0, COLUMNS)
    mask = there[:, None] & (channel < D)[None, :]
    x = tl.load(X + h * x_h + (s.to(tl.int64) * x_s)[:, None] + (channel * x_d)[None, :], mask=mask, other=0.0)
    tl.store(PLANE + h * plane_h + (block * plane_n + row * D)[:, None] + channel[None, :], x, mask=mask)


def refusal(given: PagedAppend) -> str | None:
    """Return why no kernel can append the tokens of this slot, so that the eager body must; None if a kernel can."""
    x, planes, slots = given.operands
    if given.plain or given.by_edges is not None:
        return None
    if rows.fits(Rows(x, planes, slots, given.scheme, True)):
        return None
    own = append_of(given.scheme)
    if own is None:
        return f"no kernel encodes {given.scheme} with heads of {x.shape[3]} channels"
    fits = own.fits((x, planes, slots, given.tables[0], given.scheme, True))
    return None if fits else f"the kernel of {given.scheme} does not take these sizes"


def append_by_kernels(slots: Sequence[PagedAppend], launcher: Launcher) -> None:
    """Encode new keys, values or both (``slots``) and write their codes into the pool's planes; ``refusal`` must return None for each."""
    by_rows = []
    for given in slots:
        x, planes, places = given.operands
        if given.plain:
            copy(given, launcher)
        elif (rule := given.by_edges) is not None:
            cells.launch(rule, given.x, given.planes, given.slots, launcher)
        elif rows.fits(found := Rows(x, planes, places, given.scheme, True)):
            by_rows.append(found)
        else:
            own = append_of(given.scheme)
            assert own is not None
            own.run([(x, planes, places, given.tables[0], given.scheme, True)], launcher)
    if by_rows:
        rows.append_rows(by_rows, launcher)


def copy(given: PagedAppend, launcher: Launcher) -> None:
    """Start the kernel that copies the tokens of ``given`` into the pool uncompressed; ``given.plain`` must be true."""
    x, (plane,), (count, heads, dim) = given.x, given.planes, given.x.shape
    columns = triton.next_power_of_2(dim)
    many = tokens_of(given.operands[0], columns, TILE)
    launcher.kernel(
        copy_rows, (-(-count // many) * heads,), x, plane, given.slots, x.stride(0), x.stride(1), x.stride(2), count, plane.shape[0],
        plane.stride(0), plane.stride(1), warps=1 if many == 1 else 4, HEADS=heads, PAGE=plane.shape[2], D=dim, ROWS=many, COLUMNS=columns,
    )
