"""Checks the layouts of every Triton kernel that these tests compile: an operand of a product is no wider than its inner dim."""

from __future__ import annotations

import pytest
from operand_widths import hold_operands


@pytest.fixture(autouse=True)
def _operands_fit_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_operands(monkeypatch)
