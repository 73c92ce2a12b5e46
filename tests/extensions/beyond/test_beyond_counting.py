"""The source's Appendix E, its Table 6 and its figures, and that stores and plans count what they say."""

from __future__ import annotations

import pytest
import sympy
import torch

from kvcompile.extensions.beyond import counting as c
from kvcompile.schemes import Beyond
from kvcompile.types import PAGE, Role, SlotSpec

PLAIN = {c.CHANNELS: 128, c.GROUP: 32, c.BITS: 4, c.STATISTIC: 16}


@pytest.mark.parametrize(("layers", "heads", "published"), [(32, 8, 63_488), (40, 8, 79_360), (48, 4, 47_616)])
def test_parameters_are_those_of_table_6(layers: int, heads: int, published: int) -> None:
    """Llama-3.1-8B, Ministral-3-14B and Qwen3-30B-A3B."""
    assert c.PARAMETERS.subs({**PLAIN, c.LAYERS: layers, c.HEADS: heads}) == published


def test_amortized_bits_are_five_and_31_over_the_tokens() -> None:
    found = sympy.simplify(c.AMORTIZED_BITS.subs(PLAIN))
    assert sympy.simplify(found - (5 + sympy.Integer(31) / (c.ROWS * c.TOKENS))) == 0
    for tokens, published in ((8192, 5.0038), (32768, 5.0009)):
        assert round(float(found.subs({c.ROWS: 1, c.TOKENS: tokens})), 4) == published


@pytest.mark.parametrize("scheme", [scheme for scheme in Beyond.variants() if not scheme.window], ids=lambda scheme: scheme.spec())
def test_layouts_count_what_the_formulas_say(scheme: Beyond) -> None:
    """Bytes of one layer's keys and values at 10 pages, three rows: codes, statistics and tables."""
    slots = [SlotSpec(8, 128, torch.bfloat16, role) for role in Role]
    held = sum(8 * scheme.layout(slot).nbytes(10, 3, 8) for slot in slots)
    facts = {c.LAYERS: 1, c.HEADS: 8, c.CHANNELS: 128, c.GROUP: scheme.group, c.BITS: scheme.bits, c.ROWS: 3, c.TOKENS: 10 * PAGE,
             c.STATISTIC: 8 * scheme.scale_dtype.itemsize}
    assert held == c.AMORTIZED_BITS.subs(facts) * 2 * 3 * 10 * PAGE * 8 * 128
    assert scheme.bits_per_value(slots[0]) == float(c.CACHE_BITS.subs(facts))
