"""The widths of tokens: against the source's heap, an exact dynamic program, the continuous optimum; and the laws of section 9.2."""

from __future__ import annotations

import heapq
import itertools
import math
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.errors import BadOption
from kvcompile.extensions.smartkv.allocation import Terms, allocate, binding_from, spendable, spent, utility, worth_of
from kvcompile.extensions.smartkv.budget import Cost, KeyValueWidths, Phases, layer_budgets
from kvcompile.extensions.smartkv.ladder import Ladder, LevelPreference, ladder

COST = Cost(heads=2, head_dim=64)
HALVES = KeyValueWidths()
KEYS_FINER = KeyValueWidths(keys=(3, 4, 8))


def spend_of(budget: float, tokens: int, cost: Cost = COST) -> torch.Tensor:
    return torch.tensor([int(budget * cost.dense * tokens)])


def allocated(
    importance: torch.Tensor, spend: torch.Tensor, halves: KeyValueWidths, preference: LevelPreference | None = None,
    keep: torch.Tensor | None = None,
    protected: torch.Tensor | None = None, most: torch.Tensor | None = None,
) -> Any:
    """Levels, widths of keys and of values, and bytes, of tokens [R, T] between the least level and the largest."""
    preference = preference or LevelPreference()
    levels = ladder(halves, preference)
    terms = Terms.of(COST, levels, preference)
    high = torch.full(importance.shape, levels.top, dtype=torch.int8) if most is None else most
    if keep is not None:
        high = torch.where(keep, high, -1).to(torch.int8)
    low = high.clamp(max=0) if protected is None else torch.where(protected, high, high.clamp(max=0))
    found = allocate(importance, spend, terms, low, high)
    keys, values = (torch.tensor([0, *widths])[found.long() + 1] for widths in (levels.keys, levels.values))
    return types.SimpleNamespace(level=found, keys=keys, values=values, spent=spent(found, terms), levels=levels, terms=terms)


def by_heap(importance: list[float], spend: int, levels: Ladder, terms: Terms) -> list[int]:
    """The source's allocator (5.1), written down as it says, for one row, of tokens that climb the ladder."""
    found = [0 for _ in importance]
    left = spend - terms.costs[0] * len(importance)
    heap: list[tuple[float, int, int]] = []
    value = worth_of(torch.tensor(importance), terms)

    def push(token: int) -> None:
        if found[token] < levels.top:
            worth = value[token] * torch.tensor(terms.worths[found[token]], dtype=torch.float32)
            heapq.heappush(heap, (-float(worth), found[token], -token))

    for token in range(len(importance)):
        push(token)
    while heap:
        _, step, token = heapq.heappop(heap)
        if terms.steps[step] <= left:
            left -= terms.steps[step]
            found[-token] += 1
            push(-token)
    return found


IMPORTANCE = st.lists(st.sampled_from([0.0, 1e-7, 0.01, 0.3, 1.0, 1.0, 2.5, 40.0]), min_size=1, max_size=24)


@given(
    IMPORTANCE, st.floats(0.17, 0.56), st.sampled_from([HALVES, KEYS_FINER, KeyValueWidths((2, 8), (4,))]), st.sampled_from([0.3, 0.5, 1.0])
)
@settings(max_examples=150, deadline=None)
def test_the_same_as_the_heap_of_the_source(importance: list[float], budget: float, halves: KeyValueWidths, alpha: float) -> None:
    spend, preference = spend_of(budget, len(importance)), LevelPreference(alpha, keys=1.5)
    found = allocated(torch.tensor([importance]), spend, halves, preference)
    assert found.level[0].tolist() == by_heap(importance, int(spend), found.levels, found.terms)


@pytest.mark.parametrize("halves", [HALVES, KEYS_FINER, KeyValueWidths((2, 8), (4,)), KeyValueWidths((8,), (8,))])
@pytest.mark.parametrize("preference", [LevelPreference(), LevelPreference(0.3, keys=2.0), LevelPreference(1.0)])
def test_a_ladder_has_all_widenings_in_the_order_of_their_worth(halves: KeyValueWidths, preference: LevelPreference) -> None:
    levels = ladder(halves, preference)
    assert len(levels) == len(halves.keys) + len(halves.values) - 1
    assert (levels.keys[0], levels.values[0]) == (halves.keys[0], halves.values[0])
    assert (levels.keys[-1], levels.values[-1]) == (halves.keys[-1], halves.values[-1])
    for below, above in itertools.pairwise(zip(levels.keys, levels.values, strict=True)):
        assert sum(a != b for a, b in zip(below, above, strict=True)) == 1 and all(a <= b for a, b in zip(below, above, strict=True))
    assert list(levels.worths) == sorted(levels.worths, reverse=True)


@given(IMPORTANCE.filter(lambda given: len(given) <= 5), st.floats(0.17, 0.56))
@settings(max_examples=30, deadline=None)
def test_at_most_one_step_below_the_exact_optimum(importance: list[float], budget: float) -> None:
    """A dynamic program over bytes; the loss is at most what one step is worth, the claim that replaces (1 - 1/e)."""
    preference, chain = LevelPreference(), HALVES.keys
    spend, given = spend_of(budget, len(importance)), torch.tensor([importance], dtype=torch.float64)
    found = allocated(given, spend, HALVES, preference)
    best = {0: 0.0}
    for value in importance:
        more: dict[int, float] = {}
        for (cost, gained), keys, values in itertools.product(best.items(), chain, chain):
            total = cost + COST.token(keys, values)
            if total <= int(spend):
                gain = gained + max(value, preference.floor) * (keys**preference.alpha + values**preference.alpha)
                more[total] = max(gain, more.get(total, -1.0))
        best = more
    if not best:
        assert found.spent > spend
        return
    optimum, reached = max(best.values()), float(utility(given, found.level, found.levels, preference))
    dearest = max(*importance, preference.floor) * max(b**preference.alpha - a**preference.alpha for a, b in itertools.pairwise(chain))
    assert optimum - dearest - 1e-9 <= reached <= optimum + 1e-9


def test_below_the_continuous_optimum_and_near_it() -> None:
    """Fractional widths between the least and the largest, by their Lagrangian (10.5), bound what whole ones can reach."""
    torch.manual_seed(0)
    importance, preference = torch.rand(1, 500, dtype=torch.float64) ** 4, LevelPreference()
    spend = spend_of(0.3, 500)
    found = allocated(importance, spend, HALVES, preference)
    bits = (int(spend) - 500 * (COST.token(2, 2) - 4 * COST.heads * 64 // 8)) / (COST.heads * 64 / 8) / 2

    def wanted(price: float) -> torch.Tensor:
        return ((preference.alpha * importance / price) ** (1 / (1 - preference.alpha))).clamp(2, 8)

    low, high = 1e-9, 10.0
    for _ in range(200):
        price = math.sqrt(low * high)
        low, high = (price, high) if float(wanted(price).sum()) > bits else (low, price)
    bound = float((2 * importance * wanted(price) ** preference.alpha).sum())
    reached = float(utility(importance, found.level, found.levels, preference))
    assert 0.97 * bound <= reached <= bound + 1e-9


@given(st.integers(200, 600), st.floats(0.15, 0.52), st.integers(0, 5), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_the_budget_is_met_within_two_percent_and_never_exceeded(tokens: int, budget: float, protected: int, seed: int) -> None:
    torch.manual_seed(seed)
    importance, mask = torch.rand(3, tokens) ** 3, (torch.arange(tokens) < protected).expand(3, -1)
    spend = spend_of(budget, tokens).expand(3)
    found = allocated(importance, spend, HALVES, protected=mask)
    by_hand = [sum(COST.token(int(k), int(v)) for k, v in zip(*pair, strict=True)) for pair in zip(found.keys, found.values, strict=True)]
    assert found.spent.tolist() == by_hand
    assert bool((found.keys[:, :protected] == 8).all()) and bool((found.values[:, :protected] == 8).all())
    wide = protected * COST.token(8, 8) + (tokens - protected) * COST.token(2, 2)
    if wide <= int(spend[0]):
        assert bool((found.spent <= spend).all()) and bool((found.spent >= 0.98 * spend).all())


def test_uniform_importance_gives_uniform_widths() -> None:
    """Neighbouring widths at most, as the budget lies between two (9.2)."""
    for budget in (0.2, 0.25, 0.3, 0.4, 0.5):
        found = allocated(torch.ones(1, 300), spend_of(budget, 300), HALVES)
        for widths in (found.keys, found.values):
            seen = sorted(set(widths[0].tolist()))
            assert len(seen) <= 2 and all(HALVES.keys.index(b) - HALVES.keys.index(a) == 1 for a, b in itertools.pairwise(seen))


@given(st.integers(0, 2**31), st.floats(0.15, 0.54))
@settings(max_examples=60, deadline=None)
def test_widths_do_not_fall_with_importance(seed: int, budget: float) -> None:
    torch.manual_seed(seed)
    # Above the floor, below which all are alike.
    importance = torch.rand(2, 100) ** 4 + 1e-3
    found = allocated(importance, spend_of(budget, 100).expand(2), KEYS_FINER)
    order = importance.argsort(-1)
    for widths in (found.keys, found.values):
        assert bool((widths.gather(1, order).diff(dim=-1) >= 0).all())


def test_rows_have_their_own_widths_and_padding_has_none() -> None:
    importance = torch.tensor([[9.0, 1.0, 1.0, 1.0], [5.0, 1.0, 1.0, 9.0]])
    keep = torch.tensor([[True] * 4, [False, True, True, True]])
    found = allocated(importance, torch.tensor([4, 3]) * COST.token(4, 4), HALVES, keep=keep)
    assert found.keys[0].argmax() == 0 and found.keys[1].argmax() == 3
    assert found.keys[1, 0] == found.values[1, 0] == 0
    assert found.spent[1] <= 3 * COST.token(4, 4)


def test_tokens_that_are_held_keep_their_levels() -> None:
    levels = ladder(HALVES, LevelPreference())
    low, high = (torch.tensor([[0, at, levels.top]], dtype=torch.int8) for at in (0, levels.top))
    found = allocate(torch.tensor([[9.0, 1.0, 0.0]]), spend_of(0.5, 3), Terms.of(COST, levels, LevelPreference()), low, torch.tensor(
        [[0, levels.top, levels.top]], dtype=torch.int8,
    ))
    assert found[0].tolist()[::2] == [0, levels.top] and torch.equal(high[:, 2:], low[:, 2:])


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    found = allocated(torch.ones(1, tokens), spend_of(0.54, tokens), HALVES)
    assert found.keys.shape == (1, tokens) and found.keys.tolist() == [[8] * tokens]
    assert allocated(torch.ones(1, tokens), torch.tensor([0]), HALVES).keys.tolist() == [[2] * tokens]


def test_what_is_not_finite_is_worth_nothing() -> None:
    found = allocated(torch.tensor([[float("nan"), 1.0, 0.0]]), spend_of(0.3, 3), HALVES)
    assert found.keys[0, 1] >= found.keys[0, 0] and found.keys[0, 0] in HALVES.keys


@pytest.mark.parametrize(("head_dim", "scale_bytes", "least"), [(128, 4, 0.1406), (128, 2, 0.1328), (64, 4, 0.1562)])
def test_the_smallest_budget(head_dim: int, scale_bytes: int, least: float) -> None:
    """2/16 + (bits of a scale) / (16 D); the source's 0.156 is 64 channels with float32 scales."""
    cost = Cost(8, head_dim, scale_bytes, beside=0)
    assert cost.least(HALVES) == pytest.approx(least, abs=5e-5)
    cost.check(cost.least(HALVES), HALVES)
    with pytest.raises(BadOption, match=f"at least {cost.least(HALVES):.4f}"):
        cost.check(cost.least(HALVES) - 1e-4, HALVES)
    cost.check(math.ceil(100 * cost.least(HALVES)) / 100, HALVES)


@pytest.mark.parametrize("widths", [(), (4, 2), (2, 2), (5,)])
def test_widths_that_there_are_not(widths: tuple[int, ...]) -> None:
    with pytest.raises(BadOption, match="widths"):
        KeyValueWidths(keys=widths)


@given(st.floats(0.2, 0.5), st.integers(0, 8), st.integers(32, 64))
@settings(max_examples=40, deadline=None)
def test_tokens_that_enter_at_the_largest_widths_stay_in_the_budget(budget: float, protected: int, steps: int) -> None:
    """From the announced number of tokens on, at every step up to the next allocation."""
    least = binding_from(budget, protected, steps, COST, HALVES)
    assert least is not None
    for tokens in (least, least + 1, 2 * least + 7):
        spend = spendable(budget, tokens - steps, steps, COST, HALVES)
        mask = (torch.arange(tokens - steps) < protected).unsqueeze(0)
        found = allocated(torch.rand(1, tokens - steps), torch.tensor([spend]), HALVES, protected=mask)
        for more in range(steps + 1):
            assert int(found.spent) + more * COST.token(8, 8) <= budget * COST.dense * (tokens - steps + more) + 1e-3


def test_no_number_of_tokens_meets_a_budget_at_the_floor() -> None:
    assert binding_from(COST.least(HALVES), 4, 32, COST, HALVES) is None
    assert binding_from(0.6, 4, 32, COST, HALVES) == 0


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12), st.floats(0.15, 0.5))
@settings(max_examples=60, deadline=None)
def test_layers_share_a_budget(weights: list[float], budget: float) -> None:
    found = layer_budgets(budget, weights, 0.14, 0.53)
    assert sum(found) / len(found) == pytest.approx(budget, abs=1e-9)
    assert all(0.14 <= item <= 0.53 for item in found)
    order = sorted(range(len(weights)), key=weights.__getitem__)
    assert all(found[a] <= found[b] + 1e-12 for a, b in itertools.pairwise(order))


def test_a_layer_without_weight_is_refused() -> None:
    with pytest.raises(BadOption, match="layer weights"):
        layer_budgets(0.3, [1.0, 0.0], 0.1, 0.5)


def test_a_budget_changes_with_the_number_of_tokens() -> None:
    phases = Phases(0.2, 0.4, 1000)
    assert (phases.at(999), phases.at(1000)) == (0.2, 0.4)


@given(IMPORTANCE, st.floats(0.17, 0.6), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_no_token_is_wider_than_its_most(importance: list[float], budget: float, random: Any) -> None:
    tokens, top = len(importance), len(ladder(HALVES, LevelPreference())) - 1
    most = torch.tensor([[random.randint(0, top) for _ in range(tokens)]], dtype=torch.int8)
    protected = torch.tensor([[random.random() < 0.2 for _ in range(tokens)]])
    spend = spend_of(budget, tokens)
    found = allocated(torch.tensor([importance]), spend, HALVES, protected=protected, most=most)
    assert (found.level <= most).all()
    assert torch.equal(found.level[protected], most[protected])
    # What is left is too little for any step that a token may still take, or all have what they may.
    for token, level in enumerate(found.level[0].tolist()):
        if level < int(most[0, token]) and not protected[0, token] and int(found.spent) <= int(spend):
            assert found.terms.steps[level] > int(spend - found.spent)
