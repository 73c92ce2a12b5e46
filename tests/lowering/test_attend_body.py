"""The eager ``attend`` over keys and values of different schemes, widths and heads, against attention written down in float64.

What holds of it under every scheme alone are laws of ``kvcompile.testing.attention``.
"""

from __future__ import annotations

import pytest
from registry import VARIANTS

from kvcompile.schemes import Scheme
from kvcompile.testing.problem import Problem
from kvcompile.testing.samples import fitting, holds, slot
from kvcompile.types import PAGE

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("tokens", [1, PAGE - 1, PAGE, PAGE + 1, 1000])
@pytest.mark.parametrize(("kv_heads", "groups"), [(1, 1), (1, 4), (2, 7), (1, 8), (8, 1)])
def test_heads_and_lengths(kv_heads: int, groups: int, tokens: int) -> None:
    Problem(VARIANTS[-1], VARIANTS[0], kv_heads=kv_heads, groups=groups, tokens=tokens, queries=1, batch=3).check()


@pytest.mark.parametrize("values", VARIANTS, ids=lambda scheme: scheme.spec())
def test_keys_and_values_have_schemes_and_widths_of_their_own(values: Scheme) -> None:
    for keys in VARIANTS[:: len(VARIANTS) // 5]:
        if holds(keys, slot(head_dim=128)) and holds(values, fitting(values)):
            Problem(keys, values, width=128, width_v=fitting(values).head_dim, queries=2).check()
