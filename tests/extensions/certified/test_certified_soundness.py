"""The heart of certified attention: no head-step is further from float64 than its certificate, whatever it is given.

``benchmarks/extensions/certified/certified_soundness.py`` has the cases and runs them by the million; here they are counted, and an
adversary looks for more: hypothesis over shapes and options, gradient ascent on queries, selection among mutated caches, and bits flipped
in planes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.extensions.certified.certified_soundness import (
    CASES,
    DTYPES,
    POLICIES,
    SETTINGS,
    Draw,
    Inputs,
    Shape,
    Step,
    Tally,
    constant,
    denormal,
    distance,
    gaussian,
    judge,
    masked,
    needle,
    one_way_keys,
    one_way_values,
    outliers,
    returned,
    trials,
)
from kvcompile.extensions.certified.scheme import BLOCK, Certified
from kvcompile.extensions.certified.scheme import ValueStorage as Stored
from kvcompile.lowering.certificate.head_bounds import Sum, ValueBounds, certificate
from kvcompile.schemes.certificate.policy import EXACT, NAIVE, Cause, Certify, Count, Fallback, Figure, Rung, Select
from kvcompile.types import Role, SlotSpec

pytestmark = pytest.mark.usefixtures("one_thread")

NOTHING = Certify(tau_cov=0.0, k_min=0, k_max=0, widen=0, v_tol=math.inf, rank=0)


def test_more_than_a_quarter_of_a_million_head_steps() -> None:
    """Every case, policy and dtype; the numbers are those of the benchmark with this seed."""
    whole, kinds = Tally(), len(CASES) * len(SETTINGS) * len(DTYPES)
    for case, policy, dtype, tally in itertools.islice(trials(Shape(S=48), seed=20260421), kinds):
        assert not tally.violations, f"{tally.violations} of {tally.head_steps} head-steps: {case}, {policy}, {dtype}"
        whole.add(tally)
    assert whole.head_steps == kinds * 768 > 250_000
    assert whole.closest > 0.9, "certificates that nothing comes near prove little"
    assert 0 < whole.dense < whole.head_steps / 2


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    case=st.sampled_from(CASES), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31), tokens=st.integers(8, 150),
    queries=st.integers(1, 8), heads=st.sampled_from([(1, 1), (4, 1), (6, 2), (8, 8)]), width=st.sampled_from([16, 48, 80]),
    batch=st.integers(1, 3),
    policy=st.builds(
        Certify, tau_cov=st.floats(0, 1), k_min=st.integers(0, 4), k_max=st.integers(4, 200), widen=st.integers(0, 3),
        key_budget=st.sampled_from([math.inf, 1.0, 0.01]), v_tol=st.sampled_from([math.inf, 0.3, 0.01, 0.0]),
        value_budget=st.sampled_from([math.inf, 0.3, 0.0]), rank=st.integers(0, 4), explore=st.floats(0, 1), certain=st.booleans(),
        agree=st.booleans(), select=st.sampled_from(Select), fallback=st.sampled_from(Fallback),
    ),
    values=st.sampled_from(Stored),
)
def test_any_shape_and_policy(
    case: Callable[[Draw, Shape], Inputs], dtype: torch.dtype, seed: int, tokens: int, queries: int, heads: tuple[int, int], width: int,
    batch: int, policy: Certify, values: Stored,
) -> None:
    inputs = case(Draw(seed), Shape(batch, *heads, queries, width, tokens))
    step, k, v = inputs.step(policy, dtype, clock=seed, values=values)
    tally = judge(step, k, v)
    assert not tally.violations, f"{tally.violations} of {tally.head_steps}"


def decoded(x: torch.Tensor, role: Role) -> torch.Tensor:
    """What the codes of the whole blocks stand for, and the newest tokens as they are; float64."""
    whole = x.shape[2] // BLOCK * BLOCK
    scheme = Certified().for_role(role)
    coded = scheme.decode(scheme.encode(x[:, :, :whole]), SlotSpec(x.shape[1], x.shape[3], x.dtype, role))
    return torch.cat([coded, x[:, :, whole:].to(torch.float32)], 2).to(torch.float64)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """In float64, every token seen."""
    G = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
    return torch.softmax(q.to(torch.float64) @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


@pytest.mark.parametrize("case", [gaussian, outliers, one_way_keys, one_way_values, needle], ids=lambda case: case.__name__)
def test_gradient_ascent_on_queries(case: Callable[[Draw, Shape], Inputs]) -> None:
    """The planes stay; the query climbs towards the largest error relative to what it is worth in values and deviation."""
    shape = Shape(B=2, H=4, K=4, S=24, D=32, T=72)
    inputs = case(Draw(3), shape)
    k, v = inputs.k.to(torch.float64), inputs.v.to(torch.float64)
    codes = decoded(inputs.k, Role.KEY), decoded(inputs.v, Role.VALUE)
    full = dataclasses.replace(inputs, more={"lo": torch.zeros(1, shape.S, dtype=torch.int64)})

    def ratio(q: torch.Tensor) -> torch.Tensor:
        tally = []
        for at in range(0, shape.S, 8):
            part = q[:, :, at : at + 8].to(torch.float32)
            step = _last_sees_all(part, full, NOTHING)
            output, figures, counts = step.run()
            error, bound = distance(output, step.exact(full.k, full.v)), returned(figures)
            assert (error <= bound).all(), f"{float((error / bound).max()):.3f} of the certificate"
            tally.append(torch.where(counts[..., Count.RUNG] < Rung.HEAD, error / bound, 0))
        return torch.cat(tally, 2)

    q = inputs.q.to(torch.float64).clone().requires_grad_()
    first = ratio(q.detach())
    best, optimizer = first, torch.optim.Adam([q], lr=0.08)
    for round_ in range(48):
        optimizer.zero_grad()
        error = (attention(q, *codes) - attention(q, k, v)).norm(dim=-1)
        size = q.norm(dim=-1) + 1e-3
        (-(torch.log(error + 1e-30) - 0.5 * torch.log(size))).sum().backward()
        optimizer.step()
        if round_ % 6 == 5:
            best = torch.maximum(best, ratio(q.detach()))
    assert best.mean() > first.mean(), "the ascent found nothing worse than where it began"


def _last_sees_all(q: torch.Tensor, inputs: Inputs, policy: Certify) -> Step:
    """Queries as heads' own steps: each sees all tokens, since each is the last of its own."""
    made, _, _ = Inputs(q, inputs.k, inputs.v).step(policy, torch.float32)
    return _Unordered(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made)})


class _Unordered(Step):
    """Every query sees every token."""

    @property
    def hi(self) -> torch.Tensor:
        return torch.full((1, self.q.shape[2]), self.cache.length - 1)


def test_selection_among_mutated_caches() -> None:
    """A population of caches: those nearest to their certificates survive, and their mutations; codes are made anew each time."""
    draw = Draw(5)
    population = one_way_keys(draw, Shape(B=48, H=1, K=1, S=8, D=16, T=48))
    nearest = []
    for generation in range(24):
        policy = NOTHING if generation % 3 else Certify(tau_cov=0.6, k_min=0, k_max=1, widen=0, v_tol=math.inf, rank=0)
        made, k, v = population.step(policy, torch.float32)
        output, figures, counts = made.run()
        error, bound = distance(output, made.exact(k, v)), returned(figures)
        assert (error <= bound).all(), f"{float((error / bound).max()):.3f} of the certificate"
        score = torch.where(counts[..., Count.RUNG] < Rung.HEAD, error / bound, 0).flatten(1).amax(-1)
        nearest.append(float(score.max()))
        parents = score.argsort(descending=True)[:16].repeat(3)
        size = 10.0 ** -float(1 + 2 * draw.uniform(1))
        q, k, v = (x[parents] for x in (population.q, population.k, population.v))
        for x in (q, k, v):
            x[16:] += size * x[16:].abs().mean() * draw.normal(*x[16:].shape)
        population = Inputs(q, k, v)
    assert max(nearest) > 0.5


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 6e-8, 1e4, 1e15, 1e30], ids=str)
def test_one_magnitude_throughout(value: float) -> None:
    for seed, (dtype, sign) in enumerate(itertools.product((torch.float32, torch.bfloat16), (1.0, -1.0))):
        made = Draw(seed).inputs(Shape(B=1, H=4, K=2, S=4, D=32, T=60))
        made.k, made.v = made.k.sign() * value, made.v * value * sign
        for policy in (NOTHING, Certify(), EXACT, NAIVE):
            step, k, v = made.step(policy, dtype)
            assert judge(step, k, v).violations == 0


@pytest.mark.parametrize("case", [denormal, gaussian, constant], ids=lambda case: case.__name__)
def test_denormals_may_be_flushed(case: Callable[[Draw, Shape], Inputs]) -> None:
    """As code that is compiled with fast arithmetic leaves the processor, and as some devices are."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        for number in range(6):
            inputs = case(Draw(number), Shape(S=8))
            if number % 2:
                inputs.v *= 2.0**-120
            step, k, v = inputs.step(NOTHING if number < 4 else Certify(), torch.float32)
            output, figures, _ = step.run()
            torch.set_flush_denormal(False)
            assert (distance(output, step.exact(k, v)) <= returned(figures)).all()
            torch.set_flush_denormal(True)
    finally:
        torch.set_flush_denormal(False)


def test_certificates_are_those_of_what_is_returned() -> None:
    """A dense head has no key and no value error left; every other one returns its candidate."""
    for policy in POLICIES.values():
        step, _, _ = needle(Draw(4), Shape()).step(policy, torch.float32)
        _, figures, counts = step.run()
        dense = counts[..., Count.RUNG] >= Rung.HEAD
        assert (figures[..., [Figure.KEY, Figure.VALUE]][dense] == 0).all()
        mine, candidate = (figures[..., list(Figure)[at : at + 3]][~dense] for at in (Figure.KEY, Figure.CANDIDATE_KEY))
        assert torch.equal(mine, candidate)


def test_nothing_visible_is_zero_with_a_certificate_of_nothing() -> None:
    inputs = gaussian(Draw(2), Shape(B=2, S=2, T=40))
    inputs.more["keep"] = torch.zeros(2, 40, dtype=torch.bool)
    step, _, _ = inputs.step(Certify(), torch.float32)
    output, figures, counts = step.run()
    assert (output == 0).all() and (returned(figures) < 1e-30).all() and (counts[..., Count.CAUSES] == 0).all()


PLANES = {"codes": 0, "scales": 1, "zeros": 2, "notes": 3}


def flipped(plane: torch.Tensor, place: int, bit: int) -> torch.Tensor:
    """The plane with one bit of one element flipped."""
    out = plane.clone()
    raw = out.flatten().view(torch.uint8)
    at = place * plane.element_size() + bit // 8
    raw[at] ^= 1 << (bit % 8)
    return raw.view(plane.dtype).view(plane.shape)


@pytest.mark.parametrize("half", ["keys", "values"])
@pytest.mark.parametrize("plane", PLANES)
def test_a_flipped_bit_is_caught_or_harmless_where_everything_is_compared(half: str, plane: str) -> None:
    """With exploration of all blocks no result is beyond its certificate, and damage beyond the bounds sends the row to the originals."""
    shape = Shape(B=1, H=4, K=2, S=8, D=16, T=64)
    inputs = gaussian(Draw(6), shape)
    draw, caught, trials_ = torch.Generator().manual_seed(1), 0, 160
    for number in range(trials_):
        step, k, v = inputs.step(dataclasses.replace(NOTHING, explore=1.0), torch.float32, clock=number)
        assert (step.run()[2][..., Count.CAUSES] == 0).all() if number == 0 else True
        planes = getattr(step.cache, half)
        victim = planes[PLANES[plane]]
        place, bit = (int(torch.randint(n, (1,), generator=draw)) for n in (victim.numel(), 8 * victim.element_size()))
        planes[PLANES[plane]] = flipped(victim, place, bit)
        output, figures, counts = step.run()
        assert (distance(output, step.exact(k, v)) <= returned(figures)).all(), f"bit {bit} of element {place}"
        hit = (counts[..., Count.CAUSES] & Cause.DAMAGED) != 0
        if hit.any():
            caught += 1
            assert hit.all() and (counts[..., Count.RUNG] == Rung.LAYER).all() and torch.equal(output, step.dense())
    # The lowest bits of scales and notes hardly matter, and codes may move by a step within the radius of their block.
    assert caught >= trials_ * {"codes": 0.3, "scales": 0.15, "zeros": 0.15, "notes": 0.05}[plane]


def test_damage_that_is_compared_by_no_rule_is_caught_at_the_rate_of_exploration() -> None:
    """The top bit of one code; nothing is promoted, so that only exploration reads the originals."""
    inputs = gaussian(Draw(7), Shape(B=1, H=2, K=2, S=1, D=16, T=64))
    inputs.q *= 0.1
    step, _, _ = inputs.step(dataclasses.replace(NOTHING, explore=0.05), torch.float32)
    step.cache.keys[0] = flipped(step.cache.keys[0], 3 * 16 + 5, 7)
    caught = sum(
        int(((dataclasses.replace(step, clock=clock).run()[2][..., Count.CAUSES] & Cause.DAMAGED) != 0).any()) for clock in range(400)
    )
    assert 8 <= caught <= 36, "one head of one block in twenty, 400 steps"
    blind = dataclasses.replace(step, policy=NOTHING)
    assert (blind.run()[2][..., Count.CAUSES] == 0).all()


def test_promoted_blocks_are_compared_without_exploration() -> None:
    step, k, v = gaussian(Draw(8), Shape(B=2, H=4, K=2, S=1, D=16, T=64)).step(Certify(tau_cov=1.0), torch.float32)
    clean = step.run()
    step.cache.keys[0] = flipped(step.cache.keys[0], 16, 7)
    output, figures, counts = step.run()
    assert (counts[0, ..., Count.RUNG] == Rung.LAYER).all() and torch.equal(output[0], step.dense()[0])
    assert torch.equal(output[1], clean[0][1]) and torch.equal(counts[1], clean[2][1]), "another request's result changed"
    assert (distance(output, step.exact(k, v)) <= returned(figures)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_false_alarms(dtype: torch.dtype) -> None:
    """Undamaged planes are never called damaged, with no guard at all."""
    for number, case in enumerate((*CASES, masked, masked, masked)):
        step, _, _ = case(Draw(100 + number), Shape()).step(dataclasses.replace(NOTHING, explore=1.0, guard=0.0), dtype)
        _, _, counts = step.run()
        assert not ((counts[..., Count.CAUSES] & Cause.DAMAGED) != 0).any(), case.__name__


SOME = Shape(B=2, H=4, K=2, S=4, D=32, T=200)
LAX = Certify(tau_cov=0.5, k_min=1, k_max=2, widen=0, v_tol=math.inf, rank=0)


def causes(counts: torch.Tensor, cause: Cause) -> torch.Tensor:
    """Which head-steps fell for a cause, bool [B, H, S]."""
    return (counts[..., Count.CAUSES] & int(cause)) != 0


@pytest.mark.parametrize("policy", [LAX, Certify(), NAIVE], ids=["lax", "default", "naive"])
def test_values_at_the_end_of_float16_stay_numbers(policy: Certify) -> None:
    inputs = gaussian(Draw(31), SOME)
    inputs.v[:, 0] = 65504 * torch.sign(inputs.v[:, 0])
    inputs.v[:, 1, :, :16] = 65504
    step, k, v = inputs.step(policy, torch.float16)
    output, figures, counts = step.run()
    assert torch.isfinite(output).all() and (distance(output, step.exact(k, v)) <= returned(figures)).all()
    assert not causes(counts, Cause.DAMAGED).any()


def test_a_result_beyond_its_dtype_has_no_certificate() -> None:
    softmax = Sum(*(torch.zeros(1, 1, 2, 1, dtype=torch.float64) + x for x in (0.0, 1.0)), 0.0)
    delta = torch.zeros(1, 1, 2, 1, dtype=torch.float64)
    values = ValueBounds(delta + 7e4, delta)
    output = torch.tensor([65504.0, 65530.0], dtype=torch.float64).view(1, 1, 2, 1)
    found = certificate(softmax, delta, values, output, torch.float16).arithmetic[0, 0]
    assert torch.isfinite(found[0]) and found[1] == math.inf
    assert torch.isfinite(certificate(softmax, delta, values, output, torch.bfloat16).arithmetic).all()


@pytest.mark.parametrize("policy", [LAX, Certify(), Certify(explore=1.0)], ids=["lax", "default", "explored"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_that_float16_cannot_hold_are_no_damage(dtype: torch.dtype, policy: Certify) -> None:
    """They have no scale, so that the heads that see them are dense; every other one is what it was."""
    inputs = gaussian(Draw(32), SOME)
    inputs.q *= 0.1
    clean = inputs.step(policy, dtype)[0].run()
    inputs.v[0, 0, 40:44] *= 1e6
    step, k, v = inputs.step(policy, dtype)
    output, figures, counts = step.run()
    assert (distance(output, step.exact(k, v)) <= returned(figures)).all()
    assert not causes(counts, Cause.DAMAGED).any() and (counts[0, :2, ..., Count.RUNG] == Rung.HEAD).all()
    assert torch.equal(output[0, 2:], clean[0][0, 2:]) and torch.equal(output[1], clean[0][1])
    assert torch.equal(counts[0, 2:], clean[2][0, 2:]) and torch.equal(counts[1], clean[2][1])


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_nan_is_no_damage_and_stays_in_its_head(side: str) -> None:
    inputs = gaussian(Draw(33), SOME)
    clean = inputs.step(Certify(explore=1.0), torch.float32)[0].run()
    getattr(inputs, side)[0, 1, 70, 3] = math.nan
    output, _, counts = inputs.step(Certify(explore=1.0), torch.float32)[0].run()
    assert not causes(counts, Cause.DAMAGED).any()
    assert torch.isnan(output[0, 2:]).any(-1).all() and causes(counts, Cause.NOT_FINITE)[0, 2:].all()
    assert torch.equal(output[0, :2], clean[0][0, :2]) and torch.equal(counts[0, :2], clean[2][0, :2])
    assert torch.equal(output[1], clean[0][1])


@pytest.mark.parametrize("rank", [1, 2])
def test_ties_do_not_fall_where_no_codes_are_left(rank: int) -> None:
    """Blocks of equal keys: their order by codes and by originals differs by rounding, on which nothing rests once all are exact."""
    inputs = gaussian(Draw(34), SOME)
    inputs.k = inputs.k[:, :, :16].repeat(1, 1, 13, 1)[:, :, :200] + 1e-5 * torch.randn(inputs.k.shape)
    step, k, v = inputs.step(dataclasses.replace(EXACT, rank=rank), torch.float32)
    output, figures, counts = step.run()
    assert not causes(counts, Cause.RANK | Cause.BOUNDARY).any() and (counts[..., Count.RUNG] < Rung.HEAD).all()
    assert (distance(output, step.exact(k, v)) <= returned(figures)).all()


def test_an_uncertified_cache_would_be_noticed() -> None:
    """The trials can fail: with a note that is too small, results beyond their certificates are found."""
    inputs = one_way_values(Draw(9), Shape())
    step, k, v = inputs.step(NOTHING, torch.float32)
    step.cache.values[3][..., 0] *= 0.25
    assert judge(step, k, v).violations > 0
    step, k, v = one_way_keys(Draw(9), Shape()).step(NOTHING, torch.float32)
    step.cache.keys[1] *= 0.9
    step.cache.keys[3] *= 0.05
    assert judge(step, k, v).violations > 0
