"""Attention over a pool's blocks in place on CUDA: the kernel equals the definition, in compiled modules and CUDA graphs too."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import paged_models
import pytest
import torch
from paged_models import PAGED_CASES
from test_attend_blocks import APART, CASES, Case, call

import kvcompile
from kvcompile.lowering.attend_kernels import BLOCKS
from kvcompile.lowering.blocks import attend_blocks_traced
from kvcompile.lowering.ops.attend_blocks import attend_blocks_body

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BY_NAME = {case.name: case for case in PAGED_CASES}


def moved(item: Any) -> Any:
    """A tensor, or all tensors of a list, on the device."""
    return [moved(each) for each in item] if isinstance(item, list) else item.cuda() if isinstance(item, torch.Tensor) else item


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.keys}-{case.values or case.keys}-{case.every}")
def test_the_kernel_equals_the_definition(case: Case) -> None:
    given, _, _ = call(case)
    operands = [moved(getattr(given, field.name)) for field in dataclasses.fields(given)]
    found = attend_blocks_traced(*operands)
    torch.testing.assert_close(found, attend_blocks_body(*operands), atol=APART[case.dtype], rtol=APART[case.dtype])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize(("name", "scheme", "page"), [
    ("blocks-first", "int4", 16), ("one-write", "int8", 48), ("rows-of-requests", "dense", 16), ("heads-first", "k=int8,v=int4", 64),
])
def test_compiled_modules(name: str, scheme: str, page: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and steps, beside the same codes attended to by the definition."""
    monkeypatch.setattr(paged_models, "BLOCK", page)
    case, results = BY_NAME[name], []
    made = case.make(torch.bfloat16, dim=64).cuda()
    for options in ({"inner": "eager"}, {}):
        torch._dynamo.reset()
        backend, module = kvcompile.backend(scheme, strict=True, **options), copy.deepcopy(made)
        compiled = torch.compile(module, backend=backend, fullgraph=True, **({} if options else {"mode": mode}))

        def step(*args: torch.Tensor, compiled: Any = compiled) -> torch.Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(*(item.cuda() for item in args)).float().cpu()

        with torch.no_grad():
            results.append(case.drive(module, step, (9, *[1] * 9)))
    assert f"1 x attend_blocks ({BLOCKS})" in str(backend.report().graphs[-1].kernels)
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(two, one, atol=3e-2, rtol=3e-2)
