"""``torch.ops.kvcompile.attend`` with many rows on CUDA: the prefill template through Inductor equals the eager definition."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_prefill_kernel import merged, windowed
from test_triton_attend import Case, check, operands

from kvcompile import schemes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCHEMES = ("dense", "int8", "fp8", "int4", "kivi", "kivi(bits=4)")


def moved(value: Any) -> Any:
    """The operands on the device."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, dict):
        return {name: moved(item) for name, item in value.items()}
    return [moved(item) for item in value] if isinstance(value, list) else value


def attend(args: dict[str, Any]) -> torch.Tensor:
    """The operation with the operands in their order."""
    return torch.ops.kvcompile.attend(
        args["q"], args["keys"], args["values"], args["hi"], args["lo"], args["keep"], args["bias"], args["sinks"],
        args["key_scheme"], args["value_scheme"], args["scale"], args["softcap"], args["value_dim"], args.get("exact_newest"),
        args.get("base"),
    )


def cases() -> list[Case]:
    """Every scheme: whole tiles and masked ones, every mask, other dims and dtypes."""
    found = []
    for scheme in SCHEMES:
        base = Case(scheme, scheme, dtype=torch.bfloat16, K=2, D=128, Dv=128, S=100, T=1000)
        found += [
            base, dataclasses.replace(base, S=250, T=250), dataclasses.replace(base, lo=True, S=200),
            dataclasses.replace(base, keep=True, B=2),
            dataclasses.replace(base, dtype=torch.float16, magnitude=1e-3), dataclasses.replace(base, D=64, Dv=64, G=7, outlier=True),
        ]
        if not schemes.parse(scheme).window:
            found += [
                dataclasses.replace(base, sinks=True, softcap=20.0), dataclasses.replace(base, T=20000, K=8),
                dataclasses.replace(base, D=256, Dv=256),
            ]
    found += [
        Case("dense", "dense", dtype=torch.bfloat16, K=2, D=128, Dv=128, S=300, T=300, plain=True, sinks=True),
        Case("dense", "dense", dtype=torch.bfloat16, K=2, D=64, Dv=128, S=300, T=300, B=2, plain=True, keep=True),
    ]
    return found


def assert_equals_eager(case: Case, way: str) -> None:
    """What is compiled equals eager and has ``way`` in its source; no cached module, whose source nobody would see."""
    from torch._inductor.utils import run_and_get_code

    from kvcompile.lowering import inductor

    inductor.install()
    torch._dynamo.reset()
    args = moved(windowed(case) if schemes.parse(case.key).window else operands(case))
    with torch._inductor.config.patch(force_disable_caches=True):
        out, sources = run_and_get_code(torch.compile(attend, fullgraph=True), args)
    assert way in "".join(sources), "another way was chosen"
    failure = check(case, out, args)
    assert failure is None, failure


@pytest.mark.parametrize("case", cases(), ids=str)
def test_compiled_equals_eager(case: Case) -> None:
    assert_equals_eager(case, "RAISED : tl.constexpr")


def chunked_cases() -> list[Case]:
    """A thousand rows a kv head and more over codes: one chunk and several, every mask, other dims, sums of several splits."""
    found = []
    for scheme in SCHEMES[1:]:
        base = Case(scheme, scheme, dtype=torch.bfloat16, K=2, D=128, Dv=128, S=300, T=1000)
        found += [
            base, dataclasses.replace(base, lo=True, B=2), dataclasses.replace(base, keep=True, B=2, S=600),
            dataclasses.replace(base, dtype=torch.float16, magnitude=1e-3), dataclasses.replace(base, D=64, Dv=64, G=7, outlier=True),
            dataclasses.replace(base, T=20000, K=4),
        ]
        if not schemes.parse(scheme).window:
            found += [
                dataclasses.replace(base, sinks=True, softcap=20.0), dataclasses.replace(base, D=256, Dv=256),
                dataclasses.replace(base, B=3),
            ]
    return found


@pytest.mark.parametrize("case", chunked_cases(), ids=str)
def test_chunks_equal_eager(case: Case) -> None:
    assert_equals_eager(case, "kvcompile.attend_chunks")


def test_chunks_in_a_cuda_graph() -> None:
    """A replayed graph follows positions that change, within a chunk and from one chunk to the next, and keeps no scratch but its own."""
    from kvcompile.lowering.prefill.chunked import operation

    case = Case("int4", "int8", dtype=torch.bfloat16, K=2, D=128, Dv=128, S=300, T=3000)
    args = moved(operands(case))
    hi = args["hi"].clone()

    def call() -> torch.Tensor:
        return operation(
            args["q"], args["keys"], args["values"], hi, None, None, args["key_scheme"], args["value_scheme"], args["scale"], 0.0, 128,
            None, None, [1024, 2, 64, 128, 8, 3],
        )

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = call()
    for back in (0, 500, 1100, 2690):
        hi.copy_(args["hi"] - back)
        graph.replay()
        failure = check(case, merged(out, None).to(case.dtype), {**args, "hi": hi})
        assert failure is None, failure
