"""Products whose operands are cut wider than they are, by the layouts that Triton chose for them."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

LANES = 4
"""Threads that share the inner dim of an operand of the tensor cores."""
PRODUCT = re.compile(
    r"tt\.dot .*? : tensor<(?:\d+x)+(?P<inner>\d+)x[a-z]\S* #ttg\.dot_op<\{opIdx = 0, [^>]*?kWidth = (?P<width>\d+)\}>>"
    r" \* (?P<other>.*?) ->"
)
WIDTH = re.compile(r"kWidth = (\d+)")


def too_wide(ttgir: str) -> list[str]:
    """The products of a kernel's TTGIR that read some elements twice and others never.

    Each of four threads has ``kWidth`` neighboring elements of the inner dim, which must be that long. Triton 3.6 and 3.7 choose ``kWidth``
    by the narrowest number that an operand is computed from and do not look at the dim: a byte of a mask, halved by ``tl.join``,
    gives eight float16, and a product over 16 tokens then has tokens 0 to 3 for 4 to 7 too.
    """
    found = []
    for product in PRODUCT.finditer(ttgir):
        widths = [int(product["width"]), *map(int, WIDTH.findall(product["other"]))]
        if int(product["inner"]) < LANES * max(widths):
            found.append(product.group())
    return found


def hold_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every compilation of a Triton kernel fail that has such a product; without Triton there is none."""
    if importlib.util.find_spec("triton") is None:
        return
    import triton

    compiled = triton.compile

    def held(*args: Any, **kwargs: Any) -> Any:
        made = compiled(*args, **kwargs)
        wide = too_wide(made.asm.get("ttgir", ""))
        assert not wide, wide[0]
        return made

    monkeypatch.setattr(triton, "compile", held)
