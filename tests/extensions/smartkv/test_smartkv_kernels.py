"""smartkv's kernels in Triton's interpreter against the operation's body, and compiled offline."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hopper import compiled_for_hopper
from interpreted import interpreted
from launched import OnPtx
from test_smartkv_attend import Case, masks
from test_triton_attend import allow_ranges_over_scalars
from torch._subclasses import FakeTensorMode

from kvcompile.extensions.smartkv import decode_step
from kvcompile.extensions.smartkv.attend import attend_by_definition, smartkv_attend
from kvcompile.extensions.smartkv.codes import Frame
from kvcompile.extensions.smartkv.decode_step import DecodeStepOperands, step_by_kernels, step_gap
from kvcompile.extensions.smartkv.importance import Measure
from kvcompile.lowering.host.launches import Direct, KernelLaunch, Launcher, OnlyRoom, Recorder
from kvcompile.lowering.ops.operands import AttendOperands, attend_operands, named
from kvcompile.schemes import Smartkv
from kvcompile.types import Extent, Role, SlotSpec

SCHEMES = (
    Smartkv(), Smartkv(keys="2/3/4/8", values="4/8"), Smartkv(keys="8", values="2", decay=0.97, head_decay=0.9),
    Smartkv(keys="2/4", values="2/3", frame=Frame.SOURCE),
)


def step_of(case: Case, **given: Any) -> DecodeStepOperands:
    """The operands of a case's attention as the kernels take them."""
    optional = [given.get(name) for name in ("lo", "keep", "bias", "sinks")]
    args = (
        case.q, case.keys, case.values, given.get("hi", case.hi), *optional, case.spec(Role.KEY), case.spec(Role.VALUE), 0.3,
        given.get("softcap", 0.0), case.q.shape[3], case.importance, case.heads,
    )
    found = named(smartkv_attend, args, {})
    return DecodeStepOperands(attend_operands(found), case.importance, case.heads)


def body(step: DecodeStepOperands) -> tuple[torch.Tensor, DecodeStepOperands]:
    """Return the definition's result, and the step with the planes as the definition leaves them."""
    after = dataclasses.replace(step, importance=step.importance.clone(), heads=step.heads.clone())
    return attend_by_definition(after), after


def differences(step: DecodeStepOperands, launcher: Launcher | None = None) -> dict[str, float]:
    """The largest differences of result and planes between kernels and body, after two steps; NaN where only one is NaN."""
    launcher = launcher or Direct(cuda=step.attend.q.is_cuda)
    expected, after = body(step)
    again, after = body(after)
    with torch.no_grad():
        first, second = (step_by_kernels(launcher, step) for _ in range(2))
    pairs = {
        "result": (first, expected), "second": (second, again), "plain": (step.importance[..., 0], after.importance[..., 0]),
        "weighted": (step.importance[..., 1], after.importance[..., 1]), "heads": (step.heads, after.heads),
    }
    return {name: float((found.float() - wanted.float()).abs().max()) for name, (found, wanted) in pairs.items()}


def few_programs() -> None:
    """Two splits: the interpreter runs one program at a time."""
    allow_ranges_over_scalars()
    decode_step.PROGRAMS = 12


def compare_masks() -> None:
    """Every mask at one number of queries, wherever buckets end, and three sets of widths."""
    few_programs()
    cases = [(5 if number % 2 else 1, mask, SCHEMES[0], 100) for number, mask in enumerate(masks(1))]
    cases += [(2, "none", SCHEMES[1], 1), (1, "float bias", SCHEMES[1], 150), (3, "keep", SCHEMES[2], 64), (1, "none", SCHEMES[2], 0)]
    cases += [(1, "none", SCHEMES[3], 150)]
    for queries, mask, scheme, settled in cases:
        case = Case(queries, scheme, settled=settled)
        found = differences(step_of(case, **masks(queries)[mask]))
        assert all(value <= 4e-6 for value in found.values()), (queries, mask, scheme.spec(), settled, found)


def compare_oddities() -> None:
    """Queries of NaN, rows that see nothing, float16."""
    few_programs()
    case = Case(2)
    case.q[1, 2, 0, 3] = float("nan")
    step = step_of(case)
    expected, after = body(step)
    out = step_by_kernels(Direct(cuda=False), step)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.allclose(out.nan_to_num(), expected.nan_to_num(), atol=1e-6)
    assert torch.allclose(step.importance, after.importance, atol=1e-7) and torch.allclose(step.heads, after.heads, atol=1e-6)
    case = Case(1)
    case.hi = torch.tensor([[149], [-1], [40]])
    assert all(value <= 2e-6 for value in differences(step_of(case)).values())
    case = Case(1)
    case.q = case.q.half()
    assert all(value <= 2e-3 for value in differences(step_of(case)).values())


@pytest.mark.parametrize("function", [compare_masks, compare_oddities])
def test_kernels_give_what_the_body_gives(function: Any) -> None:
    interpreted(function)


def test_what_the_kernels_do_not_know_is_named() -> None:
    assert step_gap(step_of(Case(1))) is None
    assert "9 queries" in str(step_gap(step_of(Case(9))))
    assert "entropy" in str(step_gap(step_of(Case(1, Smartkv(measure=Measure.ENTROPY)))))


def recorded(scheme: Smartkv, dtype: torch.dtype, D: int, queries: int = 1, keep: bool = False) -> list[KernelLaunch]:
    """The launches of one step of Llama 3.1 8B's heads over 64,000 tokens."""
    with FakeTensorMode():
        planes = []
        for role in (Role.KEY, Role.VALUE):
            spec, own = SlotSpec(8, D, dtype, role), scheme.for_role(role)
            fixed = {Extent.ROW, Extent.BATCH}
            planes.append([
                torch.empty(each.shape_of(1 if each.extent in fixed else 1000, 2, 8), dtype=each.dtype, device="cuda")
                for each in own.layout(spec).planes[: own.planes_read(spec)]
            ])
        kept = torch.empty(2, 64000, dtype=torch.bool, device="cuda") if keep else None
        hi = torch.empty(1, queries, dtype=torch.int64, device="cuda")
        attend = AttendOperands(
            torch.empty(2, 32, queries, D, dtype=dtype, device="cuda"), *planes, hi, None, kept, None, None,
            scheme.for_role(Role.KEY).spec(), scheme.for_role(Role.VALUE).spec(), 0.1, 0.0, D,
        )
        step = DecodeStepOperands(attend, torch.empty(1000, 2, 1, 64, 2, device="cuda"), torch.empty(1, 2, 8, 1, 1, device="cuda"))
        assert step_gap(step) is None
        recorder = Recorder()
        with OnlyRoom():
            step_by_kernels(recorder, step)
    assert all(isinstance(launch, KernelLaunch) for launch in recorder.steps)
    return recorder.steps  # type: ignore[return-value]


@pytest.mark.parametrize(("keys", "values", "queries", "heads"), [("4", "4", 1, 4), ("3", "2", 1, 4), ("8", "4", 3, 2)])
def test_ptx_gives_what_the_body_gives(keys: str, values: str, queries: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels decode by PTX on a GPU alone, and store two rows' scores as one word where the number of rows is even."""
    monkeypatch.setattr(decode_step, "PROGRAMS", 12)
    case = Case(queries, Smartkv(keys=keys, values=values), heads=heads)
    case.q = case.q.half()
    found = differences(step_of(case), OnPtx())
    assert all(value <= 2e-3 for value in found.values()), found


@pytest.mark.parametrize(("scheme", "dtype", "D", "queries"), [
    (SCHEMES[0], torch.bfloat16, 128, 1), (SCHEMES[3], torch.float16, 80, 3), (SCHEMES[2], torch.float32, 64, 1),
], ids=str)
def test_kernels_compile_for_hopper(scheme: Smartkv, dtype: torch.dtype, D: int, queries: int) -> None:
    for launch in recorded(scheme, dtype, D, queries, keep=queries > 1):
        made = compiled_for_hopper(launch)
        assert made.metadata.shared <= 113 * 1024, "two programs of a multiprocessor"
