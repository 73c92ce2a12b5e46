"""Long prompts over blocks: the decoder into a scratch and the kernels around flash attention, in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from interpreted import interpreted
from launched import OnPtx
from test_paged_kernels import APART, BF16, OF_TABLES, SCHEMES, Case, asked, filled

from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.lowering.paged.config import PagedAttend
from kvcompile.lowering.paged.prompts import LEAST, PromptPlaces, PromptPlan
from kvcompile.types import Role, SlotSpec

ROWS = ((200, 150), (0, 0), (70, 1), (300, 129), (40, 127), (100, 140))
"""Long and short requests; the last has queries before its first token, which see nothing."""

CASES = (
    Case("int4", "int8", ROWS, heads=2, group=2, dim=32, value_dim=32, sinks=True),
    Case("int4", "int4", ROWS, page=48, heads=2, group=3, dim=64, window=37, sinks=True, table=torch.int64),
    Case("int8", "fp8", ROWS, page=64, group=1, dim=32, value_dim=32, window=500),
    Case("dense", "dense", ROWS, heads=3, group=2, dim=40, value_dim=40, layers=2),
    Case("nf4", "int8-static", ROWS, group=2, most=140),
    Case("gauss", "beyond(bits=5)", ((200, 130), (50, 3)), page=32),
)


def flashed(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: PromptPlaces, given: PagedAttend, plan: PromptPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch's flash attention gives by its description: garbage where no request has a query, inf where a query sees nothing."""
    tokens, heads, dim = q.shape
    out, logs = torch.full((tokens, heads, dim), 77.0, dtype=q.dtype), torch.full((heads, tokens), -55.0)
    for row, used in enumerate(places.used.tolist()):
        first, last = places.queries[row : row + 2].tolist()
        begin = int(places.keys[row])
        k, v = (x[begin : begin + used].float().repeat_interleave(heads // x.shape[1], 1) for x in (keys, values))
        position = used - (last - first) + torch.arange(last - first)
        ahead = torch.arange(used) > position[:, None]
        if given.window:
            ahead |= torch.arange(used) <= position[:, None] - given.window
        scores = torch.einsum("qhd,thd->hqt", q[first:last].float(), k) * given.scale
        scores = scores.masked_fill(ahead, -math.inf)
        log = scores.logsumexp(-1)
        # Where nothing is seen, and where a sum is NaN, flash attention gives zeros and inf.
        none = ~log.isfinite()
        weights = torch.where(none[..., None], 0.0, (scores - log[..., None]).exp())
        out[first:last] = torch.einsum("hqt,thd->qhd", weights, v.nan_to_num(0.0)).to(q.dtype)
        logs[:, first:last] = torch.where(none, math.inf, log)
    assert given.max_queries >= plan.least
    return out, logs


def planned(case: Case, max_length: int = 0, packed: bool = False) -> tuple[PagedAttend, PromptPlan | None, tuple[torch.Tensor, ...]]:
    """The operands of a call as kernels take them, its plan, and the results and log-sums of the eager body."""
    from kvcompile.lowering.paged.prompts import plan_of
    from kvcompile.serving.kernels import to_attend

    pool, table = filled(case)
    q, lengths, start, most, sinks = asked(case)
    tables, numbers = (table, lengths, start), (0.3, case.softcap, case.window)
    given = to_attend(pool.layout, q, pool.data, tables, most, pool.key_tables, pool.value_tables, numbers, sinks, max_length)
    want = pool.attend(q, *tables, most, scale=0.3, softcap=case.softcap, window=case.window, sinks=sinks)
    return given, plan_of(given, packed), want


def takes_over_as_the_body(case: Case, launcher: Launcher, max_length: int = 0, heads: int | None = None) -> None:
    """Hold the results of the long prompts of a call to the eager body's over the same pool; those of others are left alone.

    ``heads``: kv heads that the scratch has room for, if not for all.
    """
    from kvcompile import schemes
    from kvcompile.lowering.paged.prompts import placed, take_over
    from kvcompile.serving.kernels import turned

    given, plan, (want, logs) = planned(case, max_length, launcher.cuda)
    assert plan is not None
    plan = dataclasses.replace(plan, heads=heads or plan.heads, least=LEAST)
    places = placed(given, plan, launcher)
    out, lse = torch.full_like(want, 99.0), torch.full_like(logs, 99.0)
    take_over(given, plan, places, (out, lse), launcher, flashed)
    rotation = schemes.parse(given.value_scheme).rotation(SlotSpec(case.heads, case.value_dim, case.dtype, Role.VALUE))
    of_prompts = torch.zeros(len(out), dtype=torch.bool)
    for first, last in given.query_start.unfold(0, 2, 1).tolist():
        of_prompts[first:last] = last - first >= plan.least
    assert bool((out[~of_prompts] == 99.0).all()) and bool((lse[~of_prompts] == 99.0).all())
    apart, tabled = APART[case.dtype], case.keys.startswith(("nf4", "gauss", "beyond"))
    found = turned(out[of_prompts], rotation)
    torch.testing.assert_close(found, want[of_prompts], atol=apart, rtol=apart, equal_nan=True)
    torch.testing.assert_close(lse[of_prompts], logs[of_prompts], atol=OF_TABLES if tabled else apart, rtol=apart, equal_nan=True)
    assert bool(found.isnan().any()) == bool(case.most)


def take_over_as_the_body(*cases: Case) -> None:
    """In one interpreter: each case, named where it fails."""
    for case in cases:
        try:
            takes_over_as_the_body(case, Direct(False))
        except Exception as error:
            raise AssertionError(f"failed: {case}") from error


@pytest.mark.parametrize("first", range(0, len(CASES), 2))
def test_masks_pages_and_rows_are_those_of_the_body(first: int) -> None:
    interpreted(take_over_as_the_body, *CASES[first : first + 2], guarded=True)


@pytest.mark.parametrize("schemes", [SCHEMES[::2], SCHEMES[1::2]], ids=("even", "odd"))
def test_every_scheme_is_decoded_as_by_the_body(schemes: tuple[str, ...]) -> None:
    interpreted(take_over_as_the_body, *(Case(scheme, rows=((150, 130), (20, 1)), group=1) for scheme in schemes), guarded=True)


def together() -> None:
    """In the interpreter: prompts and steps in one call."""
    from kvcompile.lowering.decode.site import Machine
    from kvcompile.lowering.paged.prompts import attend_with_prompts

    mixed = Case("int4", "int8", ((140, 130), (0, 0), (70, 1), (50, 20)), group=2, dim=32, value_dim=32, sinks=True)
    for case, least in ((mixed, LEAST), (mixed, 1), (CASES[1], 1)):
        given, plan, (want, logs) = planned(case)
        assert plan is not None
        plan = dataclasses.replace(plan, least=least, places=plan.places if least == LEAST else len(case.rows))
        out, lse = attend_with_prompts(given, plan, Machine(1, 232448), Direct(False), flashed)
        torch.testing.assert_close(out, want, atol=APART[case.dtype], rtol=APART[case.dtype])
        torch.testing.assert_close(lse, logs, atol=APART[case.dtype], rtol=APART[case.dtype])
        assert not out[0].any() and not out[-1].any(), "queries in no row"


def test_prompts_and_steps_of_one_call() -> None:
    interpreted(together, guarded=True)


def bounded() -> None:
    """In the interpreter: a bound of the lengths, one that is too small, a scratch for one head at a time, a wrong block."""
    from kvcompile.lowering.paged.prompts import placed, take_over

    case = Case("int4", rows=((200, 130), (90, 2), (150, 150)), heads=3, group=1, dim=32, value_dim=32, sinks=True)
    takes_over_as_the_body(case, Direct(False), max_length=200)
    takes_over_as_the_body(case, Direct(False), max_length=200, heads=2)
    for wrong, length in ((-1, 200), (10_000, 200), (None, 160)):
        given, plan, (want, _) = planned(case, length)
        assert plan is not None
        plan = dataclasses.replace(plan, least=LEAST)
        assert plan.room == -(-length // 64) * 64
        if wrong is not None:
            given.block_table[0, 3] = wrong
        places, results = placed(given, plan, Direct(False)), (torch.zeros_like(want), torch.zeros(want.shape[:2]))
        take_over(given, plan, places, results, Direct(False), flashed)
        assert all(bool(result[1:131].isnan().all()) for result in results)
        torch.testing.assert_close(results[0][133:-1], want[133:-1], atol=4e-3, rtol=4e-3)


def test_bounds_of_lengths_and_of_the_scratch_and_wrong_blocks() -> None:
    interpreted(bounded, guarded=True)


def damaged() -> None:
    """In the interpreter: a query of NaN, a row longer than its blocks, blocks given up behind a window, channels that lie apart."""
    from kvcompile.lowering.paged.prompts import placed, take_over

    def taken(given: PagedAttend, plan: PromptPlan) -> torch.Tensor:
        plan = dataclasses.replace(plan, least=LEAST)
        out = torch.zeros_like(given.q)
        take_over(given, plan, placed(given, plan, Direct(False)), (out, torch.zeros(out.shape[:2])), Direct(False), flashed)
        return out

    case = Case("int4", rows=((300, 140), (200, 150)), group=1, dim=32, value_dim=32)
    given, plan, (want, _) = planned(case)
    assert plan is not None
    spoiled = given.q.clone()
    spoiled[5] = float("nan")
    out = taken(dataclasses.replace(given, q=spoiled), plan)
    assert bool(out[5].isnan().all()) and not out[6:].isnan().any()
    short = dataclasses.replace(given, block_table=given.block_table[:, :15].contiguous())
    out = taken(short, dataclasses.replace(plan, most=240, room=256))
    assert bool(out[1:141].isnan().all())
    torch.testing.assert_close(out[141:-1], want[141:-1], atol=4e-3, rtol=4e-3)
    apart = torch.stack((given.q, given.q + 1), -1).flatten(2)[..., ::2]
    torch.testing.assert_close(taken(dataclasses.replace(given, q=apart), plan)[1:-1], want[1:-1], atol=4e-3, rtol=4e-3)
    given, plan, (want, _) = planned(dataclasses.replace(case, window=20))
    assert plan is not None
    # The first queries of row 0 see tokens from 141 on, which are in block 8; those of row 1 tokens from 31 on, in block 1.
    given.block_table[0, :8], given.block_table[1, :1] = -1, 10_000
    torch.testing.assert_close(taken(given, plan)[1:-1], want[1:-1], atol=4e-3, rtol=4e-3)


def test_damage_stays_where_it_is() -> None:
    interpreted(damaged, guarded=True)


@pytest.mark.parametrize(
    "change", [{"dtype": torch.float32}, {"softcap": 2.0}, {"value_dim": 32}, {"rows": ((200, 127), (50, 1))}], ids=str
)
def test_what_flash_attention_does_not_take_has_no_plan(change: dict[str, object]) -> None:
    assert planned(Case(rows=ROWS))[1] is not None
    assert planned(dataclasses.replace(Case(rows=ROWS), **change))[1] is None  # type: ignore[arg-type]


def test_a_scratch_has_a_limit_and_so_has_a_call_of_many_prompts() -> None:
    given, plan, _ = planned(Case(rows=((2000, 128), (300, 256)), heads=2))
    assert plan is not None
    assert (plan.least, plan.places, plan.heads) == (1, 2, 2), "most requests are long: all go through the scratch"
    _, few, _ = planned(Case(rows=((300, 140), *((20, 1),) * 5), heads=2))
    assert few is not None
    assert (few.least, few.places) == (128, 1)
    from kvcompile.lowering.paged.prompts import MOST_SCRATCH, plan_of

    for tokens in (1 << 20, 1 << 21):
        longer = dataclasses.replace(given, block_table=torch.empty(2, tokens // given.page, dtype=torch.int32))
        made = plan_of(longer, False)
        assert made is not None
        assert made.places * made.room * made.heads * 2 * 64 * 2 <= MOST_SCRATCH
        assert made.least == (1 if tokens == 1 << 20 else 256)
    assert plan_of(dataclasses.replace(longer, block_table=torch.empty(2, 1 << 19, dtype=torch.int32)), False) is None
    bounded = plan_of(dataclasses.replace(longer, max_length=1000), False)
    assert bounded is not None
    assert (bounded.most, bounded.room) == (1000, 1024)


@pytest.mark.compile
@pytest.mark.parametrize("scheme", ["int4", "fp8", "dense", "nf4", "int8-static"])
def test_as_the_ptx_of_a_hopper_they_attend_as_the_body(scheme: str) -> None:
    case = Case(scheme, rows=((140, 128), (70, 1)), dim=128, value_dim=128, dtype=BF16, group=1)
    takes_over_as_the_body(case, OnPtx())
