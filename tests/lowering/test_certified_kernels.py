"""The kernels of certified attention in Triton's interpreter against the definition and float64, traced, and compiled offline."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from interpreted import interpreted
from kernel_writes import stand_in_for_a_device, written_by
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from benchmarks.certified_soundness import (
    POLICIES,
    Cache,
    Draw,
    Inputs,
    Shape,
    Step,
    by_kernels,
    denormal,
    distance,
    equal_blocks,
    flipped,
    gaussian,
    needle,
    one_way_keys,
    outliers,
    padded,
    returned,
    ties,
)
from kvcompile.errors import Tier2Missing
from kvcompile.lowering.certified import device_step as certified_device
from kvcompile.lowering.host.launches import KernelLaunch, OnlyRoom, Recorder
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.schemes.certificate.policy import Cause, Certify, Count, Figure, Rung
from kvcompile.schemes.certificate.telemetry import TELEMETRY
from kvcompile.schemes.certified import BLOCK, Certified

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def near(mine: torch.Tensor, wanted: torch.Tensor, relative: float) -> bool:
    """Whether figures agree but for the order of their sums; what is not finite agrees with what is not."""
    fine = (mine - wanted).abs() <= relative * wanted.abs() + 1e-12
    return bool((fine | ~(torch.isfinite(mine) | torch.isfinite(wanted))).all())


def compare(step: Step, k: torch.Tensor, v: torch.Tensor, name: str, splits: int = 3) -> torch.Tensor:
    """Kernels against the definition and float64; the counters."""

    def run(*operands: Any) -> Any:
        return by_kernels(*operands, splits)

    (output, figures, counts), (mine, own_figures, own_counts) = step.run(), step.run(run)
    assert torch.equal(own_counts, counts), (name, own_counts[(own_counts != counts).any(-1)], counts[(own_counts != counts).any(-1)])
    bounds = [Figure.CANDIDATE_KEY, Figure.CANDIDATE_VALUE, Figure.KEY, Figure.VALUE, Figure.DELTA, Figure.TAIL]
    # The key bound's center has the arithmetic in it, which is not the definition's.
    assert near(own_figures[..., bounds], figures[..., bounds], 2e-2), (name, own_figures, figures)
    exact = step.exact(k, v)
    finite = torch.isfinite(mine).all(-1)
    error, bound = distance(mine, exact), returned(own_figures)
    assert (torch.where(finite, error <= bound, counts[..., Count.RUNG] >= Rung.HEAD)).all(), (name, error, bound)
    apart = distance(mine, output.to(torch.float64))
    both = finite & torch.isfinite(output).all(-1)
    assert (~both | (apart <= 0.02 * bound + 1e-30) | (apart <= 4e-3 * exact.norm(dim=-1))).all(), (name, apart, bound)
    return counts


def early(length: int) -> None:
    """A row that is hardly longer than its window, which begins before the first position."""
    made = gaussian(Draw(5), Shape(B=2, H=4, K=2, S=1, D=32, T=length))
    cache = Cache.of(made.k, made.v)
    before = torch.randn(2, 2, 17, 32, generator=torch.Generator().manual_seed(length))
    recent = [torch.cat([before, x], 2)[:, :, length : length + 17] for x in (made.k, made.v)]
    cache = dataclasses.replace(cache, recent=recent, base=torch.tensor([length - 17] * 2))
    step = Step(made.q, cache, 0.2, Certify(tau_cov=0.5, k_min=1, explore=0.3))
    counts = compare(step, made.k, made.v, f"early {length}")
    assert (counts[..., Count.BLOCKS] == max(0, -(-(length - 17) // BLOCK))).all()


def damaged() -> None:
    """One flipped bit in a plane that every block is compared with: the same rungs and causes as the definition's."""
    shape, caught = Shape(B=1, H=2, K=1, S=1, D=32, T=60), 0
    for seed, (side, plane, bit) in enumerate([("keys", 0, 6), ("keys", 3, 25), ("values", 0, 7), ("values", 3, 25)]):
        step, k, v = gaussian(Draw(seed), shape).step(Certify(explore=1.0, rank=0), F32)
        planes = list(getattr(step.cache, side))
        planes[plane] = flipped(planes[plane], (0, 0, 0, 1, seed % 2), bit)
        cache = dataclasses.replace(step.cache, **{side: planes})
        counts = compare(dataclasses.replace(step, cache=cache), k, v, f"flipped {side} {plane}")
        caught += bool((counts[..., Count.CAUSES] & int(Cause.DAMAGED)).any())
    assert caught >= 2, "a flip that nobody notices proves nothing"


def doubtful_norms() -> None:
    """Notes that are hardly above what they note, or hardly below: float32 cannot tell them apart, and the kernel must."""
    for factor, caught in ((1 - 2.0**-40, False), (1 - 2.0**-20, True)):
        for place in (0, 1):
            step, k, v = gaussian(Draw(3), Shape(B=1, H=2, K=1, S=1, D=64, T=60)).step(Certify(explore=1.0, rank=0), F32)
            # Eight tokens of the block are the same, and so are the others: none of them is settled in float32.
            k = k.clone()
            k[:, :, 2:16] = k[:, :, :2].repeat(1, 1, 7, 1)
            made = Cache.of(k, v)
            keys = [plane.clone() for plane in made.keys]
            keys[3][0, 0, 0, 0, place] = (keys[3][0, 0, 0, 0, place].double() * factor).float()
            cache = dataclasses.replace(made, keys=keys)
            counts = compare(dataclasses.replace(step, cache=cache), k, v, f"note {place} {factor}")
            assert bool((counts[..., Count.CAUSES] & int(Cause.DAMAGED)).any()) == caught, (place, factor)


def odd_numbers() -> None:
    """Values that float16 cannot hold, a NaN among keys, and blocks that tie: no damage, no ranking where no codes are left."""
    shape = Shape(B=1, H=4, K=2, S=1, D=32, T=120)
    for number, (policy, dtype) in enumerate([
        (Certify(explore=1.0), F32), (Certify(), F32), (Certify(tau_cov=1.0, k_max=64), F32),
    ]):
        inputs = gaussian(Draw(40 + number), shape)
        if number == 0:
            inputs.v[0, 0, 40:44] *= 1e6
        elif number == 1:
            inputs.k[0, 1, 70, 3] = math.nan
        else:
            inputs.k = inputs.k[:, :, :16].repeat(1, 1, 8, 1)[:, :, :120] + 1e-5 * torch.randn(inputs.k.shape)
        step, k, v = inputs.step(policy, dtype)
        if number == 1:
            # The largest deviation is no number in the definition, and the largest number in the kernels: telemetry alone has it.
            counts = step.run()[2]
            assert torch.equal(step.run(by_kernels)[2], counts)
        else:
            counts = compare(step, k, v, f"odd {number}")
        assert not (counts[..., Count.CAUSES] & int(Cause.DAMAGED | Cause.RANK)).any(), number


def compare_all() -> None:
    """Everything that needs the interpreter."""
    early(3), early(40)
    damaged()
    small, one = Shape(B=1, H=4, K=2, S=1, D=32, T=120), Shape(B=1, H=2, K=1, S=1, D=32, T=120)
    both = Certify(tau_cov=0.7, k_min=0, k_max=2, widen=2, key_budget=0.05, v_tol=math.inf, value_budget=0.05, explore=0.1, rank=2)
    wide = Certify(tau_cov=0.0, k_min=0, k_max=2, widen=3, key_budget=0.3, v_tol=math.inf, rank=0)
    doubtful_norms()
    odd_numbers()
    rungs: collections.Counter[int] = collections.Counter()
    for number, (made, shape, policy, dtype) in enumerate([
        (gaussian, small, POLICIES["default"], BF16), (gaussian, one, wide, F32), (needle, small, both, F16),
        (gaussian, one, POLICIES["naive"], F32), (padded, dataclasses.replace(one, B=2), both, F32),
        (padded, Shape(B=2, H=2, K=1, S=3, D=32, T=90), POLICIES["default"], BF16), (ties, one, POLICIES["value budget"], F32),
        (gaussian, Shape(B=1, H=7, K=1, S=1, D=64, T=120), POLICIES["explore"], BF16),
        (outliers, Shape(B=1, H=4, K=1, S=1, D=128, T=100), POLICIES["key budget"], BF16),
        (equal_blocks, one, POLICIES["few keys"], F32), (one_way_keys, one, POLICIES["report"], F32),
        (denormal, one, POLICIES["exact"], F32),
    ]):
        inputs: Inputs = made(Draw(number + 1), shape)
        step, k, v = inputs.step(policy, dtype, clock=number)
        counts = compare(step, k, v, f"{made.__name__} {policy.spell()} {dtype}", splits=1 + number % 3)
        rungs.update(counts[..., Count.RUNG].flatten().tolist())
    assert {int(Rung.PLAIN), int(Rung.WIDENED), int(Rung.VALUES), int(Rung.HEAD)} <= set(rungs), rungs


@pytest.mark.timeout(900)
def test_the_kernels_decide_as_the_definition_and_stay_within_their_certificates() -> None:
    pytest.importorskip("triton")
    interpreted(compare_all)


def test_what_the_kernels_do_not_know_is_said() -> None:
    step, _, _ = gaussian(Draw(1), Shape(S=1, T=40)).step(Certify(), F32)

    def gap(q: torch.Tensor = step.q, **changes: Any) -> str | None:
        group = changes.pop("group", 16)
        return certified_device.kernel_gap(dataclasses.replace(step.operands(), q=q, **changes), group)

    assert gap() is None
    assert "softcap" in str(gap(softcap=3.0)) and "bias" in str(gap(bias=torch.zeros(1, 1, 1, 40)))
    assert "newest tokens" in str(gap(recent=None))
    assert "20 rows" in str(gap(step.q.expand(-1, -1, 5, -1)))
    assert "channels" in str(gap(value_dim=80)) and "channels" in str(gap(group=32))


def test_tier_2_that_is_short_is_an_error() -> None:
    step, _, _ = gaussian(Draw(1), Shape(S=1, T=100)).step(Certify(), F32)
    short = dataclasses.replace(step.cache, originals=[plane[:1] for plane in step.cache.originals])
    with pytest.raises(Tier2Missing):
        dataclasses.replace(step, cache=short).run(by_kernels)


def test_constants_of_the_radius_are_those_of_the_printed_bound() -> None:
    from kvcompile.lowering.certificate.bound_printer import aten
    from kvcompile.schemes.certificate import bounds

    step, zero = torch.rand(1000) * 10, torch.rand(1000) * 100
    printed = aten(bounds.RADIUS)(step=step, zero=zero)
    linear = step * certified_device.RADIUS[0] + zero * certified_device.RADIUS[1] + certified_device.RADIUS[2]
    assert (linear >= printed * (1 - 2.0**-22)).all() and (linear <= printed * (1 + 2.0**-18)).all()


@pytest.mark.parametrize("slots", [0, 4])
@pytest.mark.parametrize("growing", [False, True])
def test_a_step_is_recorded_kernel_by_kernel(growing: bool, slots: int) -> None:
    """A step is twelve kernels and nothing that reads data; a number taken to the host would raise.

    ``slots``: of a scratch, which is one kernel more. ``growing``: the number of pages is a symbol, on which nothing may depend but
    sizes and operands.
    """
    pytest.importorskip("triton")
    step, _, _ = gaussian(Draw(1), Shape(S=1, T=333, D=64)).step(Certify(), BF16)
    cache = step.cache

    pages = cache.keys[0].shape[0]
    scratch = [torch.zeros(pages, 1, 2, 4, 2, dtype=torch.int32), torch.zeros(pages, 1, 2, 4 * max(1, slots), 64, dtype=BF16)]
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)

    def faked(x: Any) -> Any:
        if isinstance(x, list):
            return [faked(item) for item in x]
        sizes = [DimDynamic.DYNAMIC if growing and x.dim() == 5 and axis == 0 else DimDynamic.STATIC for axis in range(x.dim())]
        return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    operands = [faked(x) for x in (
        step.q, cache.keys, cache.values, cache.originals, step.hi, torch.tensor([1]), cache.recent, cache.base, scratch,
    )]
    q, keys, values, originals, hi, clock, recent, base, held = operands
    recorder = Recorder()
    with mode, OnlyRoom():
        attended = AttendOperands(q, keys, values, hi, None, None, None, None, "certified", "certified", 0.1, 0.0, 64, recent, base)
        certified_device.certified_by_kernels(
            Certify(), Certified(), attended, originals, clock, scratch=(held[0], held[1]) if slots else None, launcher=recorder
        )
    assert len(recorder.steps) == 12 + bool(slots)
    symbols = {str(size) for x in operands[1] for size in x.shape if isinstance(size, torch.SymInt)}
    assert bool(symbols) == growing
    assert not [value for value in shapes.replacements.values() if value.is_number], "the number of pages was fixed"


def test_kernels_change_what_they_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes are read only, but for the scratch."""
    pytest.importorskip("triton")
    stand_in_for_a_device(monkeypatch)
    policy = Certify(explore=0.1)
    step, _, _ = gaussian(Draw(1), Shape(S=1, T=333, D=64)).step(policy, BF16)
    pages, mode = step.cache.keys[0].shape[0], FakeTensorMode()
    held = [torch.zeros(pages, 1, 2, 4, 2, dtype=torch.int32), torch.zeros(pages, 1, 2, 16, 64, dtype=BF16)]
    given = (step.q, step.cache.keys, step.cache.values, step.cache.originals, step.hi, step.cache.recent, step.cache.base, held,
             torch.zeros(1, 1, 2, 1, TELEMETRY, dtype=torch.float64))

    q, keys, values, originals, hi, recent, base, scratch, telemetry = (
        [mode.from_tensor(x) for x in side] if isinstance(side, list) else mode.from_tensor(side) for side in given
    )
    recorder = Recorder()
    with mode:
        attended = AttendOperands(q, keys, values, hi, None, None, None, None, "certified", "certified", 0.1, 0.0, 64, recent, base)
        certified_device.certified_by_kernels(
            policy, Certified(), attended, originals, telemetry, telemetry=telemetry, scratch=(scratch[0], scratch[1]), launcher=recorder
        )
    written = {launch.kernel.fn.__name__: set(written_by(launch)) for launch in recorder.steps if isinstance(launch, KernelLaunch)}
    assert len(written) == 12, "one kernel runs twice"
    assert written["stage_keys"] == {"SCRATCH", "PLACES", "HELD", "FOUND_AT"}
    assert written["exact_scores"] == {"LOGITS", "PEAK", "WEIGHT", "TOP", "DAMAGED"}
    planes = {"CODES", "STEPS", "ZEROS", "ORIGINALS", "KEY_NOTES", "VALUE_NOTES", "RECENT_K", "RECENT_V", "Q"}
    assert not planes & set().union(*written.values())


COMMON = dict(K=8, G=4, S=1, S2=1)
KERNELS: dict[str, tuple[int, dict[str, Any]]] = {
    "key_scores": (1, dict(COMMON, SCALE=0.09, D=128, DV=128, SPAN=16, PER_PAGE=4, KEY_NOTE=2, OF_STEP=0.5, OF_ZERO=1e-6, OF_ONE=1e-30,
                       HAS_LO=True, HAS_SINK=True, PACKED=True, STAGES=3)),
    "exact_scores": (1, dict(COMMON, SCALE=0.09, GUARD=1e-6, D=128, PER_PAGE=4, SLOTS=4)),
    "stage_keys": (1, dict(D=128, K=8, ROWS=4, ROWS2=4, SLOTS=8, PER_PAGE=4, EXPLORE=True, COUNTS_STEPS=True)),
    "dense_scores": (1, dict(COMMON, SCALE=0.09, D=128, PER_PAGE=4, STAGES=3)),
    "weighted_values": (1, dict(COMMON, DV=128, GROUP=16, TILE=4, PAGE=64, T=64, PACKED=True)),
    "weighted_originals": (4, dict(COMMON, DV=128, GROUP=16, PAGE=64)),
    "dense_values": (4, dict(COMMON, DV=128, PAGE=64, T=64, STAGES=3)),
    "select_blocks": (16, dict(
        K=8, G=4, S=1, LEAST=2, MOST=128, MOST_WIDENED=256, COVER=0.005, BUDGET=1.0, WIDEN=True, EXPLORE=2**31, CHUNK=2048,
        WIDE=8192,
    )),
    "bound_sums": (4, dict(
        K=8, G=4, S=1, CHAIN=64.0, RANK=True, SCALE=0.09, D=128, CHUNK=256, WIDTH=15, OUT_WIDTH=5, ALL=False,
    )),
    "bound_value_sums": (4, dict(
        K=8, G=4, S=1, CHAIN=64.0, V_TOL=0.05, BUDGET=0.1, SPEND=False, EXPLORE=True, CHUNK=256, WIDE=8192, WIDTH=15, OUT_WIDTH=5, T=64,
        FLOOR=1e-3,
    )),
    "certify": (16, dict(
        KEY_BUDGET=1.0, VALUE_BUDGET=1e308, RANKED=1, DENSE=True, OUT_UNIT=2.0**-8, OUT_TINY=1e-37, K=8, K2=8, ROWS=4, DV=128, SPAN=128,
    )),
    "finalize": (16, dict(OUT_UNIT=2.0**-8, OUT_TINY=1e-37, K=8, ROWS=4, ROWS2=4, DV=128, SPAN=128, DENSE=True, COUNTS_STEPS=True)),
}
POINTERS = {
    "Q": "*bf16", "CODES": "*i8", "STEPS": "*fp32", "ZEROS": "*fp32", "KEY_NOTES": "*fp32", "VALUE_NOTES": "*fp32", "RECENT_K": "*bf16",
    "RECENT_V": "*bf16", "AT": "*i32", "ORIGINALS": "*bf16", "READ": "*i8", "DAMAGED": "*i8", "SIZE": "*fp32", "ORDER": "*fp32",
    "SHARE": "*fp64", "TERM": "*fp64", "CHOSEN": "*i8", "STATS": "*fp64", "LOGITS": "*fp32", "PEAK": "*fp32", "WEIGHT": "*fp32",
    "CHANNELS": "*fp32", "NOTES": "*fp32", "TOP": "*fp32", "OUT": "*fp32", "DELTA": "*fp64", "OWN": "*fp64", "QUERY_NORM": "*fp64",
    "EXACT": "*fp32", "EXACT_PEAK": "*fp32", "EXACT_WEIGHT": "*fp32", "SINKS": "*fp32", "EXPLORED": "*i8", "KEY_SIZE": "*fp32",
    "VALUE_SIZE": "*fp32", "VALUES": "*i8", "SUMS": "*fp64", "HI": "*i64", "LO": "*i64", "BASE": "*i64", "SINK": "*bf16", "CLOCK": "*fp64",
    "LEFT": "*fp64", "PARTS": "*fp32", "GIVEN": "*i32", "RESULT": "*bf16", "FOUND": "*fp32", "COUNTED_OUT": "*i32", "FALLS": "*i8",
    "TELEMETRY": "*fp64", "LIST": "*i32", "SCRATCH": "*bf16", "PLACES": "*i32", "FOUND_AT": "*i32", "HELD": "*fp64", "LISTED": "*i32",
    "CODED_PEAK": "*fp32", "EXACT_TOP": "*fp32",
}
OF_VALUES = {"CODES": "*u8", "STEPS": "*fp16", "ZEROS": "*fp16"}
OF_TALLIES = {"OUT": "*fp64"}


UNION = ("key_scores", "exact_scores", "dense_scores", "stage_keys", "weighted_values", "bound_sums", "finalize")
"""Kernels that together have all that differs by architecture: integer and float dots, PTX, atomics, pipelined loads, float64, rounding."""


@pytest.mark.parametrize(("capability", "name"), [*((90, name) for name in KERNELS), *itertools.product((80, 100), UNION)])
def test_the_kernels_compile_offline(capability: int, name: str) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvcompile.lowering.certified.kernels import bound_sums as triton_tally
    from kvcompile.lowering.certified.kernels import dense_fallback as triton_mix_rows
    from kvcompile.lowering.certified.kernels import exact_scores as triton_exact
    from kvcompile.lowering.certified.kernels import finish as triton_judge
    from kvcompile.lowering.certified.kernels import key_scores as triton_score
    from kvcompile.lowering.certified.kernels import select_blocks as triton_choose
    from kvcompile.lowering.certified.kernels import stage_keys as triton_stage
    from kvcompile.lowering.certified.kernels import weighted_values as triton_mix

    modules = {
        "key_scores": triton_score, "select_blocks": triton_choose, "stage_keys": triton_stage, "exact_scores": triton_exact,
        "dense_scores": triton_exact, "bound_sums": triton_tally, "bound_value_sums": triton_tally, "weighted_values": triton_mix,
        "weighted_originals": triton_mix, "dense_values": triton_mix_rows, "certify": triton_judge, "finalize": triton_judge,
    }
    kernel, (warps, constants) = getattr(modules[name], name), KERNELS[name]
    if name == "stage_keys" and capability != 90:
        # As many slots as it copies at once; more take LLVM ever longer.
        constants = constants | {"SLOTS": 4}
    pointers = POINTERS | (OF_VALUES if name in {"weighted_values", "weighted_originals", "dense_values"} else OF_TALLIES if
    name.startswith("bound_") else {})
    signature = {each: "constexpr" if each in constants else pointers.get(each, "i32") for each in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, each in enumerate(kernel.arg_names) if signature[each].startswith("*")}
    source = ASTSource(
        kernel, signature, constexprs={(kernel.arg_names.index(each),): value for each, value in constants.items()}, attrs=aligned
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    assert compiled.asm["cubin"]
