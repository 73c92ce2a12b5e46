"""The kernel of tables' gradients in Triton's interpreter against tensor code, and compiled offline."""

from __future__ import annotations

import pytest
import torch
from interpreted import interpreted
from learned_tables import random_table

from kvcompile.extensions.beyond.learning.quantizer import QuantizerConfig, table_gradients

CASES = ((4, 32, torch.float16, torch.float16), (2, 64, torch.float32, torch.float32), (3, 16, torch.float32, torch.float16))
"""Bits, group, dtype of tokens and of scales. The interpreter cuts bfloat16 instead of rounding."""


def operands(bits: int, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients, tokens as a projection leaves them, and a table of every head and group."""
    generator = torch.Generator().manual_seed(bits)
    x, grad = (torch.randn(2, 37, 2, 64, generator=generator).to(dtype).transpose(1, 2) for _ in range(2))
    x[0, 0, 3, :group] = 1.5
    table = random_table(bits, 2, 64 // group, 0)
    return grad, x, table.levels, table.thresholds


def compare() -> None:
    from kvcompile.extensions.beyond import table_sums

    for bits, group, dtype, stored in CASES:
        grad, x, levels, thresholds = operands(bits, group, dtype)
        rule = QuantizerConfig(bits, stored, 0.02 * (2**bits - 1))
        assert table_sums.known(x, levels.shape[1])
        for spoiled in (False, True) if bits == 4 else (False,):
            if spoiled:
                x[1, 1, 5, 7] = float("nan")
            by_level, left, right = table_sums.sums(grad, x, thresholds, bits, stored, rule.window)
            jumps = levels.diff(dim=-1)
            found = by_level, -jumps * left, -jumps * right
            for mine, wanted in zip(found, table_gradients(grad, x, levels, thresholds, rule), strict=True):
                assert mine.is_contiguous() and mine.dtype == wanted.dtype
                torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4 * float(wanted.nan_to_num().abs().max()), equal_nan=True)
        assert bool(by_level.isnan().any()) == (bits == 4)


def test_the_kernel_is_the_tensor_code() -> None:
    pytest.importorskip("triton")
    interpreted(compare)


def test_the_kernel_compiles_offline() -> None:
    pytest.importorskip("triton")
    from hopper import compiled_for_hopper

    from kvcompile.extensions.beyond import table_sums
    from kvcompile.lowering.host.launches import Recorder

    recorded = Recorder()
    grad, x, _, thresholds = operands(4, 32, torch.bfloat16)
    table_sums.sums(grad, x, thresholds, 4, torch.float16, 0.1, recorded)
    (launch,) = recorded.steps
    assert compiled_for_hopper(launch).metadata.shared == 0, "sums of one warp need no memory"
    assert not table_sums.known(torch.zeros(1, 1, 1, 24), 1)
