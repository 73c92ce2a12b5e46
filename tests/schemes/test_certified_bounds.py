"""The theorems of ``schemes.bounds`` on logits and values chosen against them, and that what is printed stays a bound when rounded."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.lowering.certificate import bound_printer
from kvcompile.lowering.certificate.bound_printer import UnprintableBound, aten, aten_source, dtype_of, relative_error, slack, up32
from kvcompile.schemes.certificate import bounds
from kvcompile.schemes.certificate.bounds import BOUNDS, Bound, BoundUnit, Outward

pytestmark = pytest.mark.usefixtures("one_thread")

steady = settings(max_examples=60, deadline=None, derandomize=True, database=None)
each_bound = pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.name)

# No denormals: other tests load code that has the process flush them to zero.
deviations = st.one_of(st.just(0.0), st.floats(1e-30, 1e-3), st.floats(1e-3, 40))

RANGES = {
    "gap": st.floats(-300, -1e-30), "log_mass": st.floats(-1e4, 1e4, allow_subnormal=False), "delta": deviations, "delta_max": deviations,
    "weight": st.floats(1, 16), "least": st.floats(1e-30, 1e6), "total": st.floats(1e-30, 1e6), "terms": st.integers(1, 520).map(float),
    "chain": st.integers(0, 10**6).map(float),
}
"""What an argument may be, where it is not any magnitude."""

anything = st.one_of(st.just(0.0), st.floats(2.0**-100, 2.0**60), st.floats(0.01, 10))


def exact(bound: Bound, arguments: dict[str, float]) -> mpmath.mpf:
    """The bound as it is written, in 100 digits."""
    expression = bound.expression.rewrite(sympy.exp).subs({})
    symbols = sorted(bound.expression.free_symbols, key=lambda symbol: symbol.name)
    with mpmath.workdps(100):
        return mpmath.mpf(sympy.lambdify(symbols, expression, "mpmath")(*(mpmath.mpf(arguments[symbol.name]) for symbol in symbols)))


@each_bound
def test_printed_bounds_are_rounded_outwards(bound: Bound) -> None:
    kind = dtype_of(bound)

    @steady
    @given(st.fixed_dictionaries({name: RANGES.get(name, anything) for name in bound.arguments}))
    def law(arguments: dict[str, float]) -> None:
        given = {name: torch.tensor(value, dtype=kind) for name, value in arguments.items()}
        found, true = mpmath.mpf(aten(bound)(**given).item()), exact(bound, {name: value.item() for name, value in given.items()})
        if true > 1e30 and kind == torch.float32:
            return
        least = mpmath.mpf(2) ** -1000 if kind == torch.float64 else 0
        assert found >= true - least if bound.outward is Outward.UP else found <= true + least
        assert abs(found - true) <= (slack(bound) + 1e-5) * (abs(true) + max(map(abs, arguments.values())) * (slack(bound) == 0)) + 1e-300

    law()


def test_inputs_that_are_summed_in_float32_are_allowed_for() -> None:
    for bound in BOUNDS:
        if bounds.WEIGHT in bound.expression.free_symbols:
            assert slack(bound) > bound_printer.INPUT_ERRORS[bounds.WEIGHT]
    for _ in range(20):
        logits = torch.rand(4096, 16) * 120 - 120
        logits[:, 0] = 0
        found = torch.exp(logits).sum(-1).to(torch.float64)
        true = torch.exp(logits.to(torch.float64)).sum(-1)
        assert ((found - true).abs() <= bound_printer.INPUT_ERRORS[bounds.WEIGHT] * true / 4).all()


def test_what_could_cancel_is_refused() -> None:
    x, y = sympy.symbols("x y", nonnegative=True)
    for expression in (x - y, 1 - sympy.exp(-x), sympy.log(1 + x), sympy.sin(x), sympy.sqrt(x), sympy.exp(x * y)):
        with pytest.raises(UnprintableBound):
            relative_error(expression, 2.0**-24)
        with pytest.raises(UnprintableBound):
            aten_source(Bound("wrong", expression, Outward.UP, BoundUnit.HEAD, "none"))


def test_every_bound_says_its_theorem() -> None:
    assert len({bound.name for bound in BOUNDS}) == len(BOUNDS)
    for bound in BOUNDS:
        assert any(f"Theorem {number}" in (bounds.__doc__ or "") for number in bound.theorem if number.isdigit()), bound.name
        assert bound.arguments == tuple(sorted(bound.arguments))


def test_up32_never_falls_below() -> None:
    x = torch.cat([torch.logspace(-320, 37, 4000, dtype=torch.float64), torch.tensor([0.0, 5e-324, 2.0**-149, 2.0**-126])])
    assert (up32(x).to(torch.float64) >= x).all() and (up32(x) > 0).all()
    assert torch.isnan(up32(torch.tensor(float("nan"), dtype=torch.float64)))


def softmax(logits: np.ndarray) -> np.ndarray:
    """In float64."""
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@st.composite
def perturbed(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computed logits, deviations per token, and exact logits at the corners of what those allow or inside."""
    n = draw(st.integers(1, 24))
    computed = np.array(draw(st.lists(st.floats(-8, 3, allow_subnormal=False), min_size=n, max_size=n)))
    deviation = np.array(draw(st.lists(st.sampled_from([0.0, 1e-6, 0.01, 0.2, 1.0, 3.0]), min_size=n, max_size=n)))
    toward = np.array(draw(st.lists(st.sampled_from([-1.0, 1.0, 1.0, -1.0, 0.3]), min_size=n, max_size=n)))
    return computed, deviation, computed + toward * deviation


def key_bounds(computed: np.ndarray, deviation: np.ndarray, nu: np.ndarray, center: float) -> tuple[float, float, float]:
    """Theorems 2, 3 (times 2 Vmax) and 4 from the expressions, every token a block of its own."""
    share = softmax(computed)
    mass = {bounds.WEIGHT: 1.0}
    terms = [
        {**mass, bounds.GAP: float(np.log(p)), bounds.DELTA: float(d), bounds.NU: float(v), bounds.CENTER: center}
        for p, d, v in zip(share, deviation, nu, strict=True)
    ]

    def over(bound: Bound) -> float:
        function = sympy.lambdify(list(terms[0]), bound.expression.rewrite(sympy.exp), "math")
        return sum(function(*each.values()) for each in terms)

    vmax, total = float(nu.max()), over(bounds.TOTAL_TERM)
    centered = over(bounds.KEY_TERM) / over(bounds.LEAST_TERM)
    spread = 2 * vmax * min(over(bounds.SHIFT_TERM) / total, float(np.tanh(deviation.max() / 2)))
    return centered, spread, vmax + center


@steady
@given(perturbed(), st.integers(0, 2**31))
def test_key_error_is_within_each_of_the_three_bounds(logits: tuple[np.ndarray, np.ndarray, np.ndarray], seed: int) -> None:
    computed, deviation, true = logits
    rng = np.random.default_rng(seed)
    v = rng.normal(size=(len(computed), 3)) * 10 ** rng.uniform(-3, 3, size=(len(computed), 1))
    given, wanted = softmax(computed) @ v, softmax(true) @ v
    error = np.linalg.norm(given - wanted)
    for bound in key_bounds(computed, deviation, np.linalg.norm(v, axis=1), float(np.linalg.norm(given))):
        assert error <= bound * (1 + 1e-9) + 1e-12


@steady
@given(perturbed())
def test_total_variation_is_within_both_forms(logits: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    computed, deviation, true = logits
    variation = np.abs(softmax(computed) - softmax(true)).sum() / 2
    assert variation <= np.tanh(deviation.max() / 2) + 1e-12
    assert variation <= (softmax(computed) * np.expm1(deviation)).sum() + 1e-12


@pytest.mark.parametrize("delta", [1e-3, 0.18, 1.0, 4.0])
def test_total_variation_is_attained_at_half_of_what_the_source_says(delta: float) -> None:
    """A share 1 / (1 + exp(Delta)) of the mass goes up by Delta, the rest down: tanh(Delta / 2), not lemma A.2's tanh(Delta)."""
    share = 1 / (1 + np.exp(delta))
    computed = np.log([share, 1 - share])
    variation = np.abs(softmax(computed) - softmax(computed + np.array([delta, -delta]))).sum() / 2
    assert variation == pytest.approx(np.tanh(delta / 2), rel=1e-9)
    rng, largest = np.random.default_rng(0), 0.0
    for _ in range(3000):
        logits = rng.normal(size=8) * rng.uniform(0, 4)
        largest = max(largest, np.abs(softmax(logits) - softmax(logits + delta * np.sign(rng.normal(size=8)))).sum() / 2)
    assert largest <= np.tanh(delta / 2) < np.tanh(delta)


@pytest.mark.parametrize("delta", [1e-4, 0.01])
def test_centered_bound_is_attained_for_small_deviations(delta: float) -> None:
    """Half of the tail up with values +x, half down with -x: the bound is reached but for terms of second order."""
    computed = np.zeros(64)
    toward = np.where(np.arange(64) % 2 == 0, 1.0, -1.0)
    v = toward[:, None] * np.array([[1.0, 0.0]])
    error = np.linalg.norm((softmax(computed + delta * toward) - softmax(computed)) @ v)
    centered, spread, _ = key_bounds(computed, np.full(64, delta), np.ones(64), 0.0)
    assert 1 - 3 * delta <= error / centered <= 1
    assert 1 - 3 * delta <= error / spread <= 1


@steady
@given(perturbed(), st.integers(0, 2**31))
def test_never_above_the_form_of_the_source(logits: tuple[np.ndarray, np.ndarray, np.ndarray], seed: int) -> None:
    """Equation 15 with the tail mass as it was when every token was scored from codes."""
    computed, deviation, true = logits
    rng = np.random.default_rng(seed)
    exact = rng.random(len(computed)) < 0.5
    nu = rng.exponential(size=len(computed))
    center = float(rng.uniform(0, nu.max()))
    tail = softmax(computed)[~exact].sum()
    source = float(bounds.SOURCE_KEY.subs({bounds.VMAX: nu.max(), bounds.TAIL: tail, bounds.DELTA_MAX: deviation.max()}))
    mixed = np.where(exact, true, computed)
    ours = min(key_bounds(mixed, np.where(exact, 0, deviation), nu, center))
    assert ours <= source * (1 + 1e-9) + 1e-12


def test_the_sources_vmax_does_not_bound_where_the_newest_tokens_are_larger() -> None:
    """nu_b exists for whole blocks only; key error of old blocks moves mass onto the newest, partial one all the same."""
    delta, newest = 0.2, 1000.0
    computed, true = np.zeros(32), np.concatenate([np.full(31, delta), [0.0]])
    v = np.ones((32, 1))
    v[-1] = newest
    error = float(np.linalg.norm((softmax(computed) - softmax(true)) @ v))
    values = {bounds.TAIL: 31 / 32, bounds.DELTA_MAX: delta}
    assert error > float(bounds.SOURCE_KEY.subs({**values, bounds.VMAX: 1.0}))
    nu = np.abs(v[:, 0])
    assert error <= min(key_bounds(computed, np.concatenate([np.full(31, delta), [0.0]]), nu, float((softmax(computed) @ v).item())))
