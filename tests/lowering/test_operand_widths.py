"""The check that ``conftest`` makes of every compiled kernel notices a kernel that fails it."""

from __future__ import annotations

import dataclasses

import pytest
from operand_widths import too_wide
from test_table_kernel import Case, chosen, launcher
from test_triton_attend import operands, run_kernel

TILED = Case("nf4", "nf4", D=256, Dv=256, G=2, T=40, splits=1, keep=True)
OPERAND = "tensor<{m}x{k}xf16, #ttg.dot_op<{{opIdx = {index}, parent = #mma, kWidth = {width}}}>>"


@pytest.mark.parametrize("batch", ["", "1x"])
@pytest.mark.parametrize(("inner", "width", "narrow"), [(16, 2, True), (16, 4, True), (16, 8, False), (32, 8, True), (32, 16, False)])
def test_four_threads_share_the_inner_dim(inner: int, width: int, narrow: bool, batch: str) -> None:
    left = OPERAND.format(m=f"{batch}16", k=inner, index=0, width=width)
    right = OPERAND.format(m=f"{batch}{inner}", k=8, index=1, width=width)
    assert (not too_wide(f"  %3 = tt.dot %0, %1, %2 : {left} * {right} -> tensor<32x8xf32, #mma>\n")) is narrow


@pytest.mark.compile
def test_two_columns_of_a_row_beside_bytes_of_a_mask_are_noticed() -> None:
    """The kernel that counted half of a tile's tokens twice on the GPU fails the check.

    If this test fails, Triton cuts such operands as they are, and tiles of 16 tokens may hold each row twice again.
    """
    case = dataclasses.replace(TILED, tile=dataclasses.replace(chosen(TILED).tile, copies=2))
    with pytest.raises(AssertionError, match="kWidth = 8"):
        run_kernel(case, operands(case), launcher(case.tile), packed=True)
