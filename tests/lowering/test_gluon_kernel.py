"""The Gluon kernel for one token against ``attend_body`` in float64: its launches' PTX for sm_90 runs in numpy, no device needed."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from hot_loops import hot_way
from launched import argument, compile_launch, run_launch
from test_triton_attend import Case, check, operands

from kvcompile.lowering.gluon.config import Merge, TileConfig, ragged_splits, splits_for
from kvcompile.lowering.gluon.launch import Device, launches
from kvcompile.lowering.gluon.plan import DEFAULT, MEASURED, NoFragments, cut_of, key_plan, measured, value_plan
from kvcompile.lowering.ops.operands import AttendOperands

HOPPER = Device(132, True)


def run(args: dict[str, Any], most: int | None = 3, merging: Merge | None = None) -> torch.Tensor:
    """What the launches of the operation write; results and partial sums begin as NaN, and so does shared memory."""
    given = AttendOperands(**args)
    out, found = launches(given, HOPPER, most, merging)
    for written in (out, argument(found[0], "SUMS"), argument(found[0], "TOPS")):
        written.fill_(float("nan"))
    for launch in found:
        run_launch(launch)
    return out


def case_of(scheme: str, **changes: Any) -> Case:
    """Eight query heads over two kv heads of 128 channels."""
    return dataclasses.replace(Case(scheme, scheme, T=200, D=128, Dv=128, K=2, G=4, dtype=torch.bfloat16), **changes)


# Cases behind one another compile to one kernel where their operands are of one kind.
CASES = [
    case_of("int4", T=500), case_of("int4", T=1), case_of("int4", magnitude=5000.0), case_of("int4", outlier=True),
    case_of("int4", T=200, B=3, K=1, lo=True, keep=True, exact_newest=36, sinks=True, G=7),
    case_of("kivi", exact_newest=33, T=300), case_of("kivi", exact_newest=36, T=20), case_of("kivi", exact_newest=33, magnitude=5000.0),
    case_of("kivi", exact_newest=33, magnitude=1e-3), case_of("kivi", exact_newest=33, equal=True),
    case_of("kivi", T=300, exact_newest=40, B=2, K=1, shares=2, dtype=torch.float16),
    # Padding in front: in some splits, all of a row but its newest token, none of a row but a few tokens of its middle.
    case_of("int4", T=900, B=2, K=1, fronts=(899, 100)), case_of("int4", T=900, B=2, K=1, fronts=(0, 0)),
    case_of("kivi", T=900, B=2, K=1, exact_newest=33, fronts=(520, 20)),
    # What is served on demand: codes that gained little, slots of two formats, other widths.
    case_of("int8", T=300), case_of("int8", magnitude=5000.0), case_of("fp8", T=300, B=2, K=1, lo=True, keep=True, G=7),
    case_of("fp8", outlier=True), case_of("kivi(bits=4)", T=300, exact_newest=33, D=256, Dv=256),
    case_of("int8", value="int4", D=64, Dv=64),
    case_of("int4", value="fp8", T=300), case_of("kivi(bits=4)", value="kivi", T=300, exact_newest=33), case_of("int8", D=256, Dv=256),
]


@pytest.mark.compile
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_equals_the_definition(case: Case) -> None:
    args = operands(case)
    failure = check(case, run(args), args)
    assert failure is None, failure


@pytest.mark.compile
@pytest.mark.parametrize("merging", [Merge(8, 8, 8, overlap=True), Merge(4, 32, 64, overlap=False)], ids=str)
@pytest.mark.parametrize("group", [1, 4, 8])
def test_splits_are_merged_alike_by_every_program(merging: Merge, group: int) -> None:
    """Sixteen splits, in two goes and in one; of groups whose rows a warp or several have."""
    case = case_of("int4", T=500, G=group)
    args = operands(case)
    failure = check(case, run(args, None, merging), args)
    assert failure is None, failure


@pytest.mark.compile
def test_the_merge_begins_early_and_waits_before_it_reads_what_splits_write() -> None:
    """Ahead of the wait it loads the position alone; where launches do not overlap nothing waits."""
    args = AttendOperands(**operands(case_of("int4")))
    _, (attend, merge) = launches(args, HOPPER)
    assert merge.early and not attend.early
    assert compile_launch(attend)[0]["ptx"].count("griddepcontrol.launch_dependents") == 1
    before, after = compile_launch(merge)[0]["ptx"].split("griddepcontrol.wait;")
    assert before.count("ld.global") == 1 and "st.global" not in before and "ld.global" in after
    _, found = launches(args, dataclasses.replace(HOPPER, overlaps=False))
    assert not any(launch.early or "griddepcontrol" in compile_launch(launch)[0]["ptx"] for launch in found)


@pytest.mark.compile
@pytest.mark.parametrize("scheme", ["int4", "kivi"])
def test_partial_sums_are_written_sixteen_bytes_a_thread(scheme: str) -> None:
    """Four channels of each store; four bytes each were 32 stores of sixteen sectors."""
    _, (attend, _) = launches(AttendOperands(**operands(case_of(scheme))), HOPPER)
    stores = re.findall(r"^.*?(st\.global\S*)", compile_launch(attend)[0]["ptx"], re.MULTILINE)
    assert stores.count("st.global.v4.b32") == 4 and len(stores) == 6, stores


@pytest.mark.compile
@pytest.mark.parametrize("scheme", ["int4", "kivi", "int8", "fp8"])
def test_what_is_no_number_stays_none(scheme: str) -> None:
    """A query of NaN gives NaN, and others what they gave; codes of a place that nobody attends to do not show."""
    case = case_of(scheme, exact_newest=33 if scheme == "kivi" else 0, T=100)
    args = operands(case)
    plain = run(args)
    bad = torch.arange(case.K * case.G)[None, :, None, None] == 1
    found = run({**args, "q": torch.where(bad, float("nan"), args["q"])})
    assert found[:, 1].isnan().all()
    keep = torch.arange(case.K * case.G) != 1
    assert torch.equal(found[:, keep], plain[:, keep])


@pytest.mark.compile
@pytest.mark.parametrize(("scheme", "most"), [("int4", 1.8), ("kivi", 1.95), ("int8", 2.0), ("fp8", 3.0)])
def test_instructions_of_the_hot_loop(scheme: str, most: float) -> None:
    """The Triton template issues 2.8 a K or V element; loads and products of the loop are what is expected, and nothing spills."""
    case = case_of(scheme, exact_newest=33 if scheme == "kivi" else 0)
    _, (attend, _) = launches(AttendOperands(**operands(case)), HOPPER)
    made, _ = compile_launch(attend)
    body = hot_way(made["cubin"])
    issued = len(body) * 32 / (cut_of(scheme, scheme, case.D).tokens * 2 * case.D)
    assert issued < most, issued
    assert any(line.startswith("HMMA") for line in body) and not any(line.startswith(("LDL", "STL")) for line in body)


def test_what_did_not_win_is_told_from_what_has_no_fragments() -> None:
    assert measured("int4", "int4", 128) and measured("kivi", "kivi", 128)
    for pair in (("int8", "int8"), ("fp8", "fp8"), ("kivi(bits=4)", "kivi(bits=4)"), ("int4", "int8")):
        assert not measured(*pair, 128) and cut_of(*pair, 128) == DEFAULT
    assert not measured("int4", "int4", 64) and cut_of("int8", "int8", 256).programs == DEFAULT.programs // 2
    assert not measured("int4(group=256)", "int4", 256), "groups that heads of 128 do not have"
    with pytest.raises(NoFragments, match="32 tokens"):
        key_plan("kivi(group=16,window=16)", 128, torch.uint8)
    with pytest.raises(NoFragments, match="channels"):
        value_plan("int4", 96, torch.uint8, True)
    for scheme in ("dense", "nf4", "int8-static", "normed"):
        with pytest.raises(NoFragments):
            key_plan(scheme, 128, torch.bfloat16)


def test_splits_follow_the_capacity_and_the_device() -> None:
    int4, kivi = MEASURED[True, 2], MEASURED[False, 4]
    assert splits_for(int4, 8, 132, 131072) == 132 and splits_for(kivi, 8, 132, 131072) == 49
    assert splits_for(int4, 128, 132, 32768) == 8 and splits_for(kivi, 128, 132, 32768) == 3
    assert splits_for(int4, 8, 132, 8192) == 32 and splits_for(int4, 8, 132, 1024) == 16
    assert splits_for(int4, 8, 132, 64) == 2 and splits_for(int4, 4096, 132, 131072) == 1
    assert ragged_splits(8, 1) == 8 and ragged_splits(8, 4) == 32 and ragged_splits(132, 16) == 256
    assert all(cut.tile == cut.warps * cut.tokens and 64 % cut.tokens == 0 for cut in (int4, kivi, TileConfig(1, 32, 3, 8)))


def test_the_merge_follows_the_pairs_and_not_the_capacity() -> None:
    """Few pairs: programs of eight channels, enough for every multiprocessor."""

    def chosen(scheme: str, pairs_of: dict[str, int], pages: int = 2) -> Merge:
        case = case_of(scheme, T=100 * pages, exact_newest=33 if scheme == "kivi" else 0, **pairs_of)
        made = operands(case)
        made["hi"] = made["hi"][:1]
        return launches(AttendOperands(**made), HOPPER)[1][1].arguments[-1]

    assert chosen("int4", {"K": 8}) == chosen("int4", {"K": 8}, 4) == Merge(8, 8, 256, overlap=True)
    assert chosen("kivi", {"K": 8}) == Merge(8, 8, 256, overlap=True)
    assert chosen("int4", {"K": 8, "B": 4}) == Merge(4, 32, 64, overlap=True)
    assert chosen("int4", {"K": 8, "B": 16}) == Merge(4, 32, 16, overlap=True)
