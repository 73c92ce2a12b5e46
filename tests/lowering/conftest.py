"""Checks the layouts of every Triton kernel that these tests compile: an operand of a product is no wider than its inner dim."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from operand_widths import too_wide


@pytest.fixture(autouse=True)
def _operands_fit_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = triton.compile

    def held(*args: Any, **kwargs: Any) -> Any:
        made = compiled(*args, **kwargs)
        wide = too_wide(made.asm.get("ttgir", ""))
        assert not wide, wide[0]
        return made

    monkeypatch.setattr(triton, "compile", held)
