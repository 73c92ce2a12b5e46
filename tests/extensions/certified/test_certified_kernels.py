"""The kernels of certified attention in Triton's interpreter against the definition and float64, traced, and compiled offline."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interpreted import interpreted
from kernel_writes import stand_in_for_a_device, written_by
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from benchmarks.extensions.certified.certified_soundness import (
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
from kvcompile.extensions.certified import device_step as certified_device
from kvcompile.extensions.certified.scheme import BLOCK, SET, Certified, Tier2, ValueStorage
from kvcompile.extensions.certified.sizes import RADIUS, kernel_gap
from kvcompile.lowering.host.launches import KernelLaunch, OnlyRoom, Recorder
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.schemes.certificate.policy import Cause, Certify, Count, Figure, Rung, Select
from kvcompile.schemes.certificate.telemetry import TELEMETRY
from kvcompile.types import PAGE, Role, SlotSpec

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
    exact_newest = [torch.cat([before, x], 2)[:, :, length : length + 17] for x in (made.k, made.v)]
    cache = dataclasses.replace(cache, exact_newest=exact_newest, base=torch.tensor([length - 17] * 2))
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
        (needle, small, POLICIES["group"], BF16), (ties, one, POLICIES["agree"], F32),
        (gaussian, one, POLICIES["naive"], F32), (padded, dataclasses.replace(one, B=2), both, F32),
        (padded, Shape(B=2, H=2, K=1, S=3, D=32, T=90), POLICIES["default"], BF16), (ties, one, POLICIES["value budget"], F32),
        (gaussian, Shape(B=1, H=7, K=1, S=1, D=64, T=120), POLICIES["explore"], BF16),
        (outliers, Shape(B=1, H=4, K=1, S=1, D=128, T=100), POLICIES["key budget"], BF16),
        (equal_blocks, one, POLICIES["few keys"], F32), (one_way_keys, one, POLICIES["report"], F32),
        (denormal, one, POLICIES["exact"], F32),
    ]):
        inputs: Inputs = made(Draw(number + 1), shape)
        step, k, v = inputs.step(policy, dtype, clock=number)
        counts = compare(step, k, v, f"{made.__name__} {policy.spec()} {dtype}", splits=1 + number % 3)
        rungs.update(counts[..., Count.RUNG].flatten().tolist())
    for number, (made, dtype) in enumerate([(gaussian, BF16), (outliers, F16)]):
        step, k, v = made(Draw(number), small).step(POLICIES["explore"], dtype, values=ValueStorage.FULL)
        assert (compare(step, k, v, f"full values {dtype}")[..., Count.VALUES] == 0).all()
    assert {int(Rung.PLAIN), int(Rung.WIDENED), int(Rung.VALUES), int(Rung.HEAD)} <= set(rungs), rungs


@pytest.mark.timeout(900)
def test_the_kernels_decide_as_the_definition_and_stay_within_their_certificates() -> None:
    pytest.importorskip("triton")
    interpreted(compare_all)


def test_what_the_kernels_do_not_know_is_said() -> None:
    step, _, _ = gaussian(Draw(1), Shape(S=1, T=40)).step(Certify(), F32)

    def gap(q: torch.Tensor = step.q, **changes: Any) -> str | None:
        scheme = Certified(group=changes.pop("group", 16), values=changes.pop("stored", ValueStorage.INT4))
        return kernel_gap(dataclasses.replace(step.operands(), q=q, **changes), scheme)

    assert gap() is None
    assert "softcap" in str(gap(softcap=3.0)) and "bias" in str(gap(bias=torch.zeros(1, 1, 1, 40)))
    assert "newest tokens" in str(gap(exact_newest=None))
    assert "20 rows" in str(gap(step.q.expand(-1, -1, 5, -1)))
    assert "channels" in str(gap(value_dim=80)) and "channels" in str(gap(group=32))
    assert "values of torch.float32" in str(gap(values=[step.cache.originals[1], step.cache.values[3]], stored=ValueStorage.FULL))


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
    linear = step * RADIUS[0] + zero * RADIUS[1] + RADIUS[2]
    assert (linear >= printed * (1 - 2.0**-22)).all() and (linear <= printed * (1 + 2.0**-18)).all()


@pytest.mark.parametrize("slots", [0, 32])
@pytest.mark.parametrize("growing", [False, True])
def test_a_step_is_recorded_kernel_by_kernel(growing: bool, slots: int) -> None:
    """A step is eleven kernels and nothing that reads data; a number taken to the host would raise.

    ``slots``: of a scratch of keys and one of values, which is a kernel more each. ``growing``: the number of pages is a symbol, on which
    nothing may depend but sizes and operands.
    """
    pytest.importorskip("triton")
    step, _, _ = gaussian(Draw(1), Shape(S=1, T=333, D=64)).step(Certify(), BF16)
    cache = step.cache

    pages = cache.keys[0].shape[0]
    scratch = [torch.zeros(pages, 1, 2, 4, 2, dtype=torch.int32), torch.zeros(1, 1, 2, max(16, slots) * BLOCK, 64, dtype=BF16)]
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)

    def faked(x: Any) -> Any:
        if isinstance(x, list):
            return [faked(item) for item in x]
        sizes = [DimDynamic.DYNAMIC if growing and x.dim() == 5 and axis == 0 else DimDynamic.STATIC for axis in range(x.dim())]
        return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    operands = [faked(x) for x in (
        step.q, cache.keys, cache.values, cache.originals, step.hi, torch.tensor([1]), cache.exact_newest, cache.base, scratch,
    )]
    q, keys, values, originals, hi, clock, exact_newest, base, held = operands
    recorder = Recorder()
    with mode, OnlyRoom():
        attended = AttendOperands(q, keys, values, hi, None, None, None, None, "certified", "certified", 0.1, 0.0, 64, exact_newest, base)
        certified_device.certified_by_kernels(
            Certify(), Certified(), attended, originals, clock, launcher=recorder,
            scratch=certified_device.Scratches(*[(held[0], held[1])] * 2) if slots else certified_device.Scratches(),
        )
    assert len(recorder.steps) == 11 + 2 * bool(slots)
    symbols = {str(size) for x in operands[1] for size in x.shape if isinstance(size, torch.SymInt)}
    assert bool(symbols) == growing
    assert not [value for value in shapes.replacements.values() if value.is_number], "the number of pages was fixed"


def test_kernels_change_what_they_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes are read only, but for the scratch."""
    pytest.importorskip("triton")
    stand_in_for_a_device(monkeypatch)
    policy = Certify(explore=0.1, value_budget=0.1, select=Select.GROUP)
    step, _, _ = gaussian(Draw(1), Shape(S=1, T=333, D=64)).step(policy, BF16)
    pages, mode = step.cache.keys[0].shape[0], FakeTensorMode()
    held = [torch.zeros(pages, 1, 2, 4, 2, dtype=torch.int32), torch.zeros(1, 1, 2, SET * BLOCK, 64, dtype=BF16)]
    given = (step.q, step.cache.keys, step.cache.values, step.cache.originals, step.hi, step.cache.exact_newest, step.cache.base, held,
             torch.zeros(1, 1, 2, 1, TELEMETRY, dtype=torch.float64))

    q, keys, values, originals, hi, exact_newest, base, scratch, telemetry = (
        [mode.from_tensor(x) for x in side] if isinstance(side, list) else mode.from_tensor(side) for side in given
    )
    recorder = Recorder()
    with mode:
        attended = AttendOperands(q, keys, values, hi, None, None, None, None, "certified", "certified", 0.1, 0.0, 64, exact_newest, base)
        certified_device.certified_by_kernels(
            policy, Certified(), attended, originals, telemetry, telemetry=telemetry, launcher=recorder,
            scratch=certified_device.Scratches((scratch[0], scratch[1])),
        )
    written = {launch.kernel.fn.__name__: set(written_by(launch)) for launch in recorder.steps if isinstance(launch, KernelLaunch)}
    assert len(written) == 13, "one kernel runs twice"
    assert written["spend_value_budget"] == {"ORDER", "TERM", "VALUES", "OUT"} and "CHOSEN" not in written["unite_blocks"]
    assert written["stage_blocks"] == {"SCRATCH", "PLACES", "HELD", "FOUND_AT"}
    assert written["exact_scores"] == {"LOGITS", "PEAK", "WEIGHT", "TOP", "DAMAGED"}
    planes = {"CODES", "STEPS", "ZEROS", "ORIGINALS", "KEY_NOTES", "VALUE_NOTES", "RECENT_K", "RECENT_V", "Q"}
    assert not planes & set().union(*written.values())


SCHEMES = {"default": Certified(), "host": Certified(tier2=Tier2.HOST), "full": Certified(values=ValueStorage.FULL)}
LAUNCHES: tuple[tuple[str, str, Certify], ...] = (
    ("default", "", Certify()), ("host", "stage_blocks exact_scores weighted_originals", Certify(explore=0.1)),
    ("full", "weighted_values weighted_originals", Certify()),
    ("default", "select_blocks unite_blocks bound_sums spend_value_budget certify", Certify(
        select=Select.GROUP, explore=0.1, value_budget=0.1, key_budget=1.0, agree=True,
    )),
)
"""Scheme, kernels and policy of what is compiled, all kernels where none are named."""


@functools.cache
def recorded(scheme: str, policy: Certify, tokens: int = 131072) -> dict[str, KernelLaunch]:
    """The launches of a step of a layer of 32 query heads over 8 of 128 channels, by kernel; of the two of ``bound_sums`` the first."""
    made, pages, K, D = SCHEMES[scheme], tokens // PAGE, 8, 128
    slots = [SlotSpec(K, D, BF16, role) for role in Role]
    halves = [made.for_role(slot.role).layout(slot) for slot in slots]
    with FakeTensorMode():
        planes = [
            {spec.name: torch.empty(spec.shape(pages, 1, K), dtype=spec.dtype, device="cuda") for spec in layout.planes}
            for layout in halves
        ]
        coded = [[side[name] for name in ("codes", "scales", "zeros", "notes") if name in side] for side in planes]
        if scheme == "full":
            coded[1] = [planes[1]["originals"], planes[1]["notes"]]
        q, exact_newest = torch.empty(1, 32, 1, D, dtype=BF16, device="cuda"), [torch.empty(1, K, 17, D, dtype=BF16, device="cuda")] * 2
        hi, base = torch.empty(1, 1, dtype=torch.int64, device="cuda"), torch.empty(1, dtype=torch.int64, device="cuda")
        recorder, telemetry = Recorder(), planes[0]["telemetry"]
        certified_device.certified_by_kernels(
            policy, made, AttendOperands(q, *coded, hi, None, None, None, None, "certified", "certified", 0.09, 0.0, D, exact_newest, base),
            [side["originals"] for side in planes], telemetry, telemetry=telemetry, launcher=recorder,
            scratch=certified_device.Scratches(*((side["places"], side["scratch"]) if "scratch" in side else None for side in planes)),
        )
    found: dict[str, KernelLaunch] = {}
    for launch in recorder.steps:
        assert isinstance(launch, KernelLaunch)
        found.setdefault(launch.kernel.fn.__name__, launch)
    return found


def cases() -> Iterator[tuple[int, str, str, Certify]]:
    """What is compiled: capability, scheme, kernel, policy; beside sm_90 the kernels that have all that differs by architecture."""
    for scheme, names, policy in LAUNCHES:
        for name in names.split() or ALL_KERNELS:
            yield 90, scheme, name, policy
    for capability, name in itertools.product((80, 100), (
        "key_scores", "exact_scores", "dense_scores", "stage_blocks", "weighted_values", "bound_sums", "finalize",
    )):
        yield capability, "host", name, Certify()


FINISH, SPENDS = ("certify", "finalize"), ("select_blocks", "spend_value_budget")
ALL_KERNELS = (
    "key_scores", "select_blocks", "exact_scores", "bound_sums", "weighted_values", "weighted_originals", "certify", "dense_scores",
    "dense_values", "finalize",
)


def test_no_kernel_is_another_one_where_a_cache_is_a_page_longer() -> None:
    """What a graph of a cache that grows starts is compiled once: a length beyond which a kernel does something else would be a cliff.

    One there was at 8,192 blocks, where ``select_blocks`` ran out of registers: timed at 131,072 tokens, used with room for some more.
    """
    short, long = (recorded("default", Certify(), tokens) for tokens in (131072, 262144))
    for name, launch in long.items():
        constants = {parameter.name for parameter in launch.kernel.params if parameter.is_constexpr}
        assert constants and {x: launch.arguments[x] for x in constants} == {x: short[name].arguments[x] for x in constants}, name
        assert launch.warps == short[name].warps


@pytest.mark.parametrize(
    ("capability", "scheme", "name", "policy"), list(cases()), ids=lambda x: x.spec() if isinstance(x, Certify) else str(x)
)
def test_the_kernels_compile_offline(capability: int, scheme: str, name: str, policy: Certify) -> None:
    pytest.importorskip("triton")
    from hopper import compiled_for_hopper, resources

    found = recorded(scheme, policy)
    assert set(ALL_KERNELS) <= set(found)
    used = resources(compiled_for_hopper(found[name], capability, aligned=True))
    # Spilled registers are local memory: hardly any where there are loops over tokens or a step waits, some where a program has all of a
    # row's sums, more where budgets are float64 terms of its blocks.
    most = 256 if name in FINISH else 16
    assert used["stack"] <= (768 if name in (*FINISH, *SPENDS) and not math.isinf(policy.key_budget) else most), used
