"""``torch.ops.kvcompile.attend`` compiled by Inductor on CUDA equals the eager definition, in every mode."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_triton_attend import Case, check, operands

from kvcompile.lowering.decode.config import Bias
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import attend_body

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCHEMES = ("dense", "int8", "fp8", "int4", "kivi", "kivi(bits=4)", "lookup")


def moved(args: dict) -> dict:
    """The operands on the device."""

    def move(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.cuda()
        return [move(item) for item in value] if isinstance(value, list) else value

    return {name: move(value) for name, value in args.items()}


def attend(args: dict, **changes: object) -> torch.Tensor:
    """The operation with the operands in their order."""
    args = {**args, **changes}
    return torch.ops.kvcompile.attend(
        args["q"], args["keys"], args["values"], args["hi"], args["lo"], args["keep"], args["bias"], args["sinks"],
        args["key_scheme"], args["value_scheme"], args["scale"], args["softcap"], args["value_dim"], args["exact_newest"], args["base"],
        args["rope"], args["interleaved"], exact_first=args["exact_first"], exact_first_at=args["exact_first_at"],
        log_sums=args.get("log_sums", False),
    )


def compiled(**options: object):
    from kvcompile.lowering import inductor

    inductor.install()
    torch._dynamo.reset()
    return torch.compile(attend, fullgraph=True, **options)


def assert_equals_eager(case: Case, run) -> None:
    args = moved(operands(case))
    # ex2.approx is good to two units of float32, which eager's expf is not limited to.
    failure = check(case, run(args), args, slack=4.0 if case.dtype == torch.float32 else 1.0)
    assert failure is None, failure


def cases() -> list[Case]:
    """Every scheme and shape; bfloat16 throughout, float16 and float32 once."""
    found = []
    for scheme in SCHEMES:
        odd = {"int4": "int4(group=16)", "kivi": "kivi(group=16,window=16)", "kivi(bits=4)": "kivi(group=16,window=16,bits=3)"}
        odd = odd.get(scheme, scheme)
        base = Case(scheme, scheme, dtype=torch.bfloat16, K=2, D=128, Dv=128, T=1000)
        found += [
            base,
            dataclasses.replace(base, T=1, B=3), dataclasses.replace(base, T=63, G=1), dataclasses.replace(base, T=65, G=7, B=3),
            Case(odd, odd, dtype=torch.bfloat16, K=2, G=8, D=96 if scheme == "lookup" else 80, Dv=96, T=200),
            dataclasses.replace(base, exact_newest=40, B=3), dataclasses.replace(base, exact_newest=160, G=7, sinks=True),
            dataclasses.replace(base, exact_newest=36, S=4, B=2, lo=True, keep=True), dataclasses.replace(base, T=20, exact_newest=36),
            dataclasses.replace(base, rotary=128), dataclasses.replace(base, rotary=64, interleaved=True, exact_newest=40, B=2, S=3),
            dataclasses.replace(base, D=256, Dv=256, T=300), dataclasses.replace(base, D=64, Dv=64, dtype=torch.float16),
            dataclasses.replace(base, dtype=torch.float32, T=200),
            dataclasses.replace(base, S=5, B=2, lo=True, keep=True), dataclasses.replace(base, S=70, T=500, sinks=True),
            dataclasses.replace(base, bias=Bias.ADDED, S=3, softcap=20.0), dataclasses.replace(base, bias=Bias.BOOLEAN, keep=True),
            # The low-precision reference of arbitrary levels overflows where values of 5000 do not.
            dataclasses.replace(base, equal=True), dataclasses.replace(base, magnitude=20.0 if scheme == "lookup" else 5000.0),
            dataclasses.replace(base, magnitude=1e-4), dataclasses.replace(base, outlier=True), dataclasses.replace(base, T=9000),
        ]
    found += [
        Case("dense", "dense", dtype=torch.bfloat16, K=2, D=128, Dv=128, S=300, T=300, plain=True, sinks=True),
        Case("dense", "dense", dtype=torch.bfloat16, K=2, D=128, Dv=80, S=300, T=300, B=2, plain=True, keep=True),
        Case("int8", "int4", dtype=torch.bfloat16, K=2, D=128, Dv=64, T=500), Case("fp8", "dense", dtype=torch.float16, T=500),
    ]
    return found


@pytest.mark.parametrize("case", cases(), ids=str)
def test_compiled_equals_eager(case: Case) -> None:
    assert_equals_eager(case, compiled())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead"])
def test_modes(scheme: str, mode: str) -> None:
    case = Case(scheme, scheme, dtype=torch.bfloat16, K=2, D=128, Dv=128, T=1000, sinks=True)
    run = compiled(mode=mode)
    for _ in range(3):
        assert_equals_eager(case, lambda args: run(args).clone())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dynamic_sizes_do_not_recompile(scheme: str) -> None:
    run = compiled(dynamic=True)
    for T, B in ((200, 2), (1000, 3), (77, 5)):
        assert_equals_eager(Case(scheme, scheme, dtype=torch.bfloat16, K=2, D=128, Dv=128, T=T, B=B, keep=True), run)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_equals_eager(Case(scheme, scheme, dtype=torch.bfloat16, K=2, D=128, Dv=128, T=2000, B=4, keep=True), run)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_neighbors_are_compiled_with_it(scheme: str) -> None:
    """A pointwise query, positions made in the graph, and an epilogue."""
    from kvcompile.lowering import inductor

    inductor.install()
    torch._dynamo.reset()
    case = Case(scheme, scheme, dtype=torch.bfloat16, K=2, D=128, Dv=128, T=1000, B=2)
    args = moved(operands(case))

    def layer(args: dict, start: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        q = (args["q"].transpose(1, 2) * gate).transpose(1, 2)
        out = attend(args, q=q, hi=start + args["hi"])
        return (out.transpose(1, 2).flatten(2) * 2.0).relu()

    start = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    gate = torch.rand(case.D, device="cuda").to(torch.bfloat16)
    expected = layer(args, start, gate)
    found = torch.compile(layer, fullgraph=True)(args, start, gate)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_time_follows_the_length_not_the_capacity() -> None:
    """A hundred times the pages, the same positions: far less than a hundred times the time."""
    from triton.testing import do_bench

    run = compiled(dynamic=True)
    times = []
    for pages in (32, 3200):
        case = Case("int8", "int8", dtype=torch.bfloat16, K=8, D=128, Dv=128, T=2000)
        args = moved(operands(case))
        for name in ("keys", "values"):
            args[name] = [torch.cat([p, p.new_zeros(pages, *p.shape[1:])]) for p in args[name]]
        run(args)
        times.append(do_bench(lambda args=args: run(args), return_mode="median"))
    assert times[1] < 2 * times[0], times


SUMMED = (
    # One split that would write its result alone; many splits; many rows; newest tokens in full precision.
    Case("dense", "dense", dtype=torch.bfloat16, B=1024, T=3, D=64, Dv=64, K=2),
    Case("int4", "kivi", dtype=torch.bfloat16, T=4000, sinks=True),
    Case("int8", "int8", dtype=torch.bfloat16, K=2, D=128, Dv=128, S=200, T=900),
    Case("kivi", "kivi", dtype=torch.bfloat16, S=3, T=300, exact_newest=40),
)


@pytest.mark.parametrize("case", SUMMED, ids=str)
def test_log_sums_stand_behind_the_result(case: Case) -> None:
    args = moved(operands(case))
    got = compiled()(args, log_sums=True).double()
    exact = attend_body(AttendOperands(**{**args, "q": args["q"].double()}, log_sums=True), compute=torch.float64)
    assert got.shape == exact.shape and torch.equal(got.isneginf(), exact.isneginf())
    difference = (got - exact).nan_to_num(0.0).abs()
    largest = exact.nan_to_num(neginf=0.0).abs()
    for part in (slice(None, -1), slice(-1, None)):
        assert difference[..., part].max() <= 0.02 * largest[..., part].max().clamp(min=1.0)
