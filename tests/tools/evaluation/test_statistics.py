"""Statistics against values worked out by hand, and against each other."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvcompile.tools.evaluation.statistics import Paired, Proportion, bootstrap, mcnemar, wilson


@pytest.mark.parametrize(("lost", "won", "p"), [
    (0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (5, 3, 0.7265625), (16, 16, 1.0), (2, 10, 2 * (1 + 12 + 66) / 4096), (31, 0, 2 / 2**31),
])
def test_mcnemar(lost: int, won: int, p: float) -> None:
    """5 and 3: 2 (1 + 8 + 28 + 56) / 256 = 0.727, as the source reports for these counts."""
    assert mcnemar(lost, won) == pytest.approx(p) == mcnemar(won, lost)


def test_mcnemar_of_many_pairs_is_no_float_overflow() -> None:
    assert 0 < mcnemar(900, 1100) < 1e-4 and mcnemar(3000, 0) == 0.0


def test_wilson() -> None:
    assert wilson(95, 100) == pytest.approx((0.8882, 0.9785), abs=1e-4)
    assert wilson(0, 10)[0] == 0.0 and wilson(10, 10)[1] == 1.0 and wilson(0, 0) == (0.0, 1.0)
    assert Proportion(8, 10).interval[0] == pytest.approx(0.4902, abs=1e-4) and math.isnan(Proportion(0, 0).value)


def test_bootstrap_of_two_values_is_a_binomial() -> None:
    """Means of resamples of (0, 1) are 0, 1/2 and 1 with 1/4, 1/2 and 1/4: the 95% ends are the values themselves."""
    found = bootstrap([0.0, 1.0])
    assert (found.value, found.low, found.high) == (0.5, 0.0, 1.0)
    constant = bootstrap([3.0] * 7)
    assert (constant.value, constant.low, constant.high) == (3.0, 3.0, 3.0)


def test_bootstrap_is_seeded_and_near_the_normal_interval() -> None:
    values = np.random.default_rng(0).normal(2.0, 3.0, 400).tolist()
    found, again, other = bootstrap(values, 1), bootstrap(values, 1), bootstrap(values, 2)
    assert found == again != other
    half = 1.96 * np.std(values) / 20
    assert found.low == pytest.approx(found.value - half, abs=0.03) and found.high == pytest.approx(found.value + half, abs=0.03)
    assert math.isnan(bootstrap([]).value)


def test_bootstrap_in_parts_takes_as_many_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcompile.tools.evaluation.statistics.LARGEST", 30)
    found = bootstrap([0.0, 1.0, 2.0], resamples=1000)
    assert found.low >= 0 and found.high <= 2 and found.low < 1 < found.high


def test_paired_outcomes() -> None:
    dense = [True, True, True, True, False, False, True, True]
    scheme = [True, False, False, True, True, False, False, True]
    found = Paired.of(dense, scheme)
    assert (found.both, found.lost, found.won, found.neither, found.trials) == (3, 3, 1, 1, 8)
    assert found.p == pytest.approx(2 * (1 + 4) / 16)
    assert found.difference.value == pytest.approx(-0.25) and found.difference.low < -0.25 < found.difference.high
    same = Paired.of(dense, dense)
    assert same.p == 1.0 and (same.difference.low, same.difference.high) == (0.0, 0.0)
    with pytest.raises(ValueError):
        Paired.of(dense, scheme[:-1])
