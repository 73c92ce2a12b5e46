"""The decode kernel of random attentions as Triton compiles it for sm_90, its PTX run in numpy, against ``attend_body`` in float64.

Written cases vary one thing at a time; a mask of bytes beside a tile of 16 tokens was wrong for a day because nobody wrote that pair. A
few are drawn here each time, always the same ones; ``EXAMPLES`` is how many. What needs wgmma is not known to the PTX in numpy, and passed
over.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st
from test_table_kernel import chosen, launcher
from test_triton_attend import Case, check, operands, run_kernel

from kvcompile import schemes
from kvcompile.lowering.decode.config import Bias
from kvcompile.types import Role, SlotSpec

pytestmark = pytest.mark.compile

EXAMPLES = int(os.environ.get("KVCOMPILE_RANDOM_KERNELS", "4"))
"""Attentions that are drawn; some five seconds each."""
VALUES = (
    "int4", "int8", "fp8", "kivi", "kivi(bits=3)", "kivi(bits=4)", "nf4", "beyond", "beyond(bits=2)", "beyond(bits=3)", "beyond(bits=5)",
    "dense", "int8-static", "fp8-static", "int4(group=64)", "int8(granularity=group,group=16)", "kivi(axis=token)",
    "kivi(group=64,window=64)", "beyond(group=64)", "int4(granularity=token)", "gauss", "gauss(bits=3)", "gauss(bits=2)",
)
KEYS = (*VALUES, "normed", "normed(bits=4)")
WIDE = (64, 80, 96, 128, 256)


@st.composite
def attentions(draw: st.DrawFn) -> Case:
    """Schemes, shapes, masks, first and newest tokens, RoPE, splits: all that a case of the decode kernel has."""
    key = draw(st.sampled_from(KEYS))
    value = key if key in VALUES and draw(st.booleans()) else draw(st.sampled_from(VALUES))
    windowed = any(text.startswith(("kivi", "normed")) for text in (key, value))
    dim = draw(st.sampled_from(WIDE))
    shape: dict[str, Any] = {
        "D": dim, "Dv": draw(st.sampled_from((dim, dim, dim, *WIDE))), "S": draw(st.sampled_from((1, 1, 1, 2, 5, 8))),
        "B": draw(st.integers(1, 3)), "G": draw(st.sampled_from((1, 2, 3, 4, 7, 8))), "K": draw(st.integers(1, 2)),
        "T": draw(st.sampled_from((8, 40, 65, 100, 130, 200))), "dtype": draw(st.sampled_from((torch.bfloat16, torch.float16))),
        "lo": draw(st.booleans()), "keep": draw(st.booleans()), "sinks": draw(st.booleans()),
        "bias": draw(st.sampled_from((Bias.NONE, Bias.NONE, Bias.ADDED, Bias.BOOLEAN))),
        "softcap": draw(st.sampled_from((0.0, 0.0, 5.0))), "magnitude": draw(st.sampled_from((1.0, 1e-3, 30.0))),
        "exact_newest": draw(st.sampled_from((0, 20, 40, 100))) if windowed else 0, "rotary": draw(st.sampled_from((0, 0, 0, 32, 64))),
        "interleaved": draw(st.booleans()), "exact_first": draw(st.sampled_from((0, 0, 1, 4, 40))),
    }
    if shape["exact_first"] and not windowed:
        shape["exact_first_at"] = draw(st.sampled_from((0, 3, -2, 10)))
    # What is not encoded has a split of its own.
    return Case(key, value, splits=draw(st.integers(2 if shape["exact_newest"] or shape["exact_first"] else 1, 3)), **shape)


def fits(case: Case) -> bool:
    """Whether the schemes have a format for heads that wide."""
    slots = (case.key, case.D, Role.KEY), (case.value, case.Dv, Role.VALUE)
    groups = [(schemes.parse(text).format(SlotSpec(case.K, dim, case.dtype, role)).group, dim) for text, dim, role in slots]
    return all(dim % group == 0 for group, dim in groups)


@pytest.mark.timeout(300 + 60 * EXAMPLES)
@given(case=attentions())
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_ptx_of_random_attentions_is_the_body(case: Case) -> None:
    assume(fits(case))
    case = dataclasses.replace(case, tile=chosen(case).tile)
    args = operands(case)
    try:
        out = run_kernel(case, args, launcher(case.tile), packed=True)
    except NotImplementedError:
        reject()
    failure = check(case, out, args)
    assert failure is None, failure
