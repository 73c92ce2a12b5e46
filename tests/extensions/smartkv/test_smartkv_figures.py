"""Statistics and choices behind smartkv's quality figures, against what can be worked out by hand."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.extensions.smartkv import smartkv_figures as figures


def row(label: str, family: str, held: float, kl: list[float]) -> dict[str, object]:
    """A measured row of two seeds."""
    half = len(kl) // 2
    seeds = [0] * half + [1] * (len(kl) - half)
    return {"label": label, "family": family, "held": held, "kl": kl, "seed": seeds, "bits": kl, "same": kl, "length": 8}


def test_texts_of_all_seeds_fit_and_their_tails_do_not_overlap() -> None:
    window, tail = 300, 64
    found = figures.starts(4000, window, 3, 4)
    ends = sorted(at + window for seed in found for at in seed)
    assert [len(seed) for seed in found] == [4, 4, 4]
    assert ends[-1] <= 4000
    assert all(later - sooner >= tail for sooner, later in itertools.pairwise(ends))
    assert found == figures.starts(4000, window, 3, 4)
    with pytest.raises(ValueError, match="do not fit"):
        figures.starts(310, 300, 3, 4)


def test_the_interval_of_a_mean_holds_it_and_is_a_point_where_nothing_varies() -> None:
    low, high = figures.bootstrap([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert 1.5 < low < 3.5 < high < 5.5
    assert figures.bootstrap([2.0] * 5) == (2.0, 2.0)


def test_the_interval_of_a_ratio_pairs_texts() -> None:
    theirs = [0.1, 1.0, 10.0, 3.0]
    ratio, low, high = figures.bootstrap_ratio([x / 2 for x in theirs], theirs)
    assert (ratio, low, high) == pytest.approx((0.5, 0.5, 0.5))


def test_wilson() -> None:
    assert figures.wilson(24, 24) == pytest.approx((0.862, 1.0), abs=1e-3)
    assert figures.wilson(12, 24) == pytest.approx((0.314, 0.686), abs=1e-3)


def test_a_mixture_gives_bytes_to_the_layer_that_needs_them() -> None:
    share = {"few": 0.2, "many": 0.4}
    harm = [{"few": 1.0, "many": 0.1}, {"few": 0.2, "many": 0.0}, {"few": 3.0, "many": 0.0}]
    assert figures.mixture(harm, share, 0.2) == ("few", "few", "few")
    assert figures.mixture(harm, share, 0.8 / 3) == ("few", "few", "many")
    assert figures.mixture(harm, share, 1.0 / 3) == ("many", "few", "many")
    assert figures.mixture(harm, share, 0.19) is None


@pytest.mark.parametrize(("slope", "rest"), [(1.0, -0.03), (0.7, 0.05), (1.0, 0.0)])
def test_a_budget_is_found_at_which_so_much_is_held(slope: float, rest: float) -> None:
    asked: list[float] = []

    def held(budget: float) -> float:
        asked.append(budget)
        return slope * budget + rest

    budget = figures.budget_for(held, 0.3, 0.2)
    assert budget is not None
    assert slope * budget + rest == pytest.approx(0.3, rel=0.005)
    assert len(asked) <= 4


def test_no_budget_where_the_least_holds_more() -> None:
    assert figures.budget_for(lambda budget: max(budget, 0.25), 0.2, 0.22) is None


def test_rows_of_equal_bytes_are_paired_with_what_adapts_alone() -> None:
    rows = [
        row("int4", "uniform", 0.280, [1.0, 1.0]), row("smartkv(budget=0.3)", "smartkv", 0.281, [0.5, 2.0]),
        row("smartkv(keys=4)", "smartkv, one width", 0.282, [1.0, 1.0]), row("smartkv(budget=0.4)", "smartkv", 0.4, [0.1, 0.1]),
    ]
    assert figures.pairs(rows) == {"smartkv(budget=0.3)": ["int4", "smartkv(keys=4)"], "smartkv(budget=0.4)": []}
    assert figures.seeds_won(rows[1], rows[0]) == "1 of 2 seeds"
    table = figures.text_table(rows, figures.pairs(rows))
    assert "`int4`: 1.25 (0.50 to 2.00), 1 of 2 seeds" in table
    assert len(table.splitlines()) == 2 + len(rows)


def test_changes_are_held_against_the_row_without_one() -> None:
    rows = [row("int4", "uniform", 0.28, [1.0]), row("smartkv(budget=0.3)", "smartkv", 0.28, [1.0])]
    rows.append(row("smartkv(budget=0.3,recency=0)", "smartkv", 0.28, [1.0]))
    assert figures.changes(rows) == {"smartkv(budget=0.3)": ["int4"], "smartkv(budget=0.3,recency=0)": ["smartkv(budget=0.3)"]}


def test_a_table_of_tasks() -> None:
    table = figures.task_table([{"label": "int4", "held": 0.28, "tasks": {"needle": (24, 24)}}])
    assert "| `int4` | 0.280 | 24 of 24 (86% to 100%) |" in table
