"""smartkv: codes of every width, the importance of tokens, when widths are allocated again, and which tokens may change theirs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.extensions.smartkv.allocation import Terms, allocate, spent, utility
from kvcompile.extensions.smartkv.budget import Cost, KeyValueWidths
from kvcompile.extensions.smartkv.clock import divergence, drifted, interval, percentiles
from kvcompile.extensions.smartkv.codes import (
    WIDTHS,
    Frame,
    _packed,
    _unpacked,
    channels,
    decode,
    encode,
    largest_code,
    narrower,
    runs,
    turned,
)
from kvcompile.extensions.smartkv.hysteresis import Decided, Hysteresis, LevelBounds, decide
from kvcompile.extensions.smartkv.importance import (
    Measure,
    across_layers,
    averaged,
    blended,
    head_measure,
    head_weights,
    of_mean_one,
    token_mass,
    unbiased,
    weighted_by_recency,
)
from kvcompile.extensions.smartkv.ladder import LevelPreference, ladder

COST, HALVES = Cost(heads=2, head_dim=64), KeyValueWidths()


# --- codes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("width", [16, 64, 80])
def test_integers_come_back_from_bytes(bits: int, width: int) -> None:
    raised = torch.randint(0, 1 << bits, (2, 3, width), dtype=torch.int32)
    words = _packed(runs(raised), bits)
    assert words.shape == (2, 3, width * bits // 8) and torch.equal(channels(_unpacked(words.to(torch.int32), bits)), raised)


@pytest.mark.parametrize("frame", Frame)
@pytest.mark.parametrize("bits", WIDTHS)
@given(seed=st.integers(0, 2**31), size=st.sampled_from([1e-6, 1e-2, 1.0, 1e4]))
@settings(max_examples=25, deadline=None)
def test_codes_are_within_half_a_step(bits: int, frame: Frame, seed: int, size: float) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 64) * size
    coded = encode(x, bits, frame=frame)
    error, scale = (decode(coded, bits) - x).abs(), coded[1].float()
    # Where all levels are used, what is as large as the largest but of the other sign is a step away at most.
    clipped = (frame is Frame.TURNED and bits < 8) & (x / scale > largest_code(bits))
    assert bool((error <= scale.abs() * torch.where(clipped, 1.0, 0.5) * (1 + 1e-5)).all())
    # The scale is rounded up to float16, by one in the last place or one of its smallest numbers.
    levels = largest_code(bits) + (frame is Frame.TURNED and bits < 8)
    assert bool((scale.abs() <= x.abs().amax(-1, keepdim=True) / levels * (1 + 2**-10) + 2**-24).all())
    if frame is Frame.TURNED and bits < 8:
        assert bool((x.gather(-1, x.abs().argmax(-1, keepdim=True)) * scale < 0).all()), "the largest is the lowest code"


@pytest.mark.parametrize("width", [8, 16, 48, 64, 80, 128])
def test_turning_is_orthogonal_and_its_own_inverse(width: int) -> None:
    x, q = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0)).double(), torch.randn(3, width).double()
    assert torch.allclose(turned(turned(x)).double(), x, atol=1e-5)
    assert torch.allclose((turned(x) * turned(q)).sum(-1).double(), (x * q).sum(-1), atol=1e-4)
    # A token alone is turned as among others, bit for bit.
    assert torch.equal(turned(x)[1, 2], turned(x[1, 2]))
    if width & (width - 1) == 0:
        unit = torch.zeros(width)
        unit[3] = 1.0
        assert torch.allclose(turned(unit).abs(), torch.full((width,), width**-0.5)), "one channel is spread over all"


def test_what_is_not_finite_never_becomes_finite() -> None:
    x = torch.ones(3, 64)
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    for bits in WIDTHS:
        found = decode(encode(x, bits), bits)
        assert bool(found[:2].isnan().all()) and bool(found[2].isfinite().all())


def test_codes_only_become_narrower() -> None:
    x = torch.randn(5, 64)
    eight = encode(x, 8)
    for to in (2, 3, 4):
        assert torch.equal(narrower(eight, 8, to)[0], encode(decode(eight, 8), to)[0])
        with pytest.raises(ValueError, match="full-precision values"):
            narrower(encode(x, to), to, 8)


# --- importance -----------------------------------------------------------------------------------------


def test_the_sources_head_weights_weigh_nothing_and_ours_do() -> None:
    sharp, flat = torch.zeros(32), torch.full((32,), 1 / 32)
    sharp[9] = 1
    weights = torch.stack([sharp, flat]).unsqueeze(0)
    assert torch.allclose(head_weights(head_measure(weights, Measure.MEAN)), torch.ones(1, 2))
    for measure in (Measure.PEAK, Measure.ENTROPY, Measure.OFF_SINKS):
        found = head_weights(head_measure(weights, measure))[0]
        assert found[0] > 1.05 > 0.95 > found[1], measure
    of_heads = head_weights(head_measure(weights, Measure.PEAK))
    plain, weighted = token_mass(weights), token_mass(weights, of_heads)
    mixed = blended(plain, weighted)
    assert mixed[0, 9] > of_mean_one(plain)[0, 9] and mixed.mean() == pytest.approx(1, abs=1e-5)


def test_padding_has_no_importance_and_counts_in_no_mean() -> None:
    keep = torch.tensor([[False, False, True, True, True]])
    weights = torch.tensor([[[9.0, 9.0, 0.5, 0.25, 0.25]]])
    found = of_mean_one(weights[:, 0], keep)
    assert found[0].tolist() == pytest.approx([0, 0, 1.5, 0.75, 0.75])
    for measure in Measure:
        alone = head_measure(weights[..., 2:], measure, sinks=1)
        assert torch.allclose(head_measure(weights, measure, keep, sinks=1), alone), measure
    assert torch.equal(of_mean_one(weights[:, 0], torch.zeros_like(keep)), torch.zeros(1, 5))


def test_averages_over_steps_and_layers() -> None:
    average = torch.zeros(1)
    for step in range(1, 6):
        average = averaged(average, torch.ones(1), 0.9)
        assert average.item() == pytest.approx(1 - 0.9**step)
        assert unbiased(average, torch.tensor([step]), 0.9).item() == pytest.approx(1)
    layers = torch.tensor([[[1.0, 3.0]], [[3.0, 1.0]]])
    assert across_layers(layers)[0].tolist() == pytest.approx([1, 1])
    assert weighted_by_recency(torch.ones(1, 2), torch.tensor([[0, 512]]), 512)[0].tolist() == pytest.approx([1, math.exp(-1)])


def test_a_head_that_is_not_finite_gives_nothing() -> None:
    weights = torch.full((1, 2, 3), 1 / 3)
    weights[0, 1] = float("nan")
    assert token_mass(weights)[0].tolist() == pytest.approx([1 / 6] * 3)


# --- when -----------------------------------------------------------------------------------------------


def test_the_interval_is_that_of_the_source() -> None:
    assert [interval(layer, 100) for layer in (0, 3, 4, 8, 12)] == [32, 32, 32, 48, 64]
    assert interval(0, 8192) == 1024


def test_ranks_of_tokens() -> None:
    importance, keep = torch.tensor([[5.0, 1.0, 1.0, 3.0, 99.0]]), torch.tensor([[True, True, True, True, False]])
    assert percentiles(importance, keep)[0].tolist() == pytest.approx([0.75, 0, 0, 0.5, 0])


def test_drift() -> None:
    torch.manual_seed(0)
    before, common = torch.rand(1, 400), torch.ones(1, 400, dtype=torch.bool)
    assert not drifted(before, before, common)
    assert divergence(before, before, common).item() == pytest.approx(0, abs=1e-6)
    assert drifted(before[:, torch.randperm(400)], before, common)
    # A new token is in the one and not in the other: over all tokens the divergence would be infinite.
    grown, old = torch.cat([before, torch.full((1, 1), 50.0)], 1), torch.cat([before, torch.zeros(1, 1)], 1)
    both = torch.cat([common, torch.zeros(1, 1, dtype=torch.bool)], 1)
    assert torch.isfinite(divergence(grown, old, both)).all() and not drifted(grown, old, both)
    # Few tokens that move far are drift by their mass, many that move a little by their number.
    shifted = before.clone()
    shifted[:, :60] = (shifted[:, :60] + 0.2) % 1
    assert drifted(shifted, before, common, tau=float("inf"))
    assert not drifted(shifted, before, common, tau=float("inf"), share=0.5)


# --- who ------------------------------------------------------------------------------------------------


LEVELS, TASTE = ladder(HALVES, LevelPreference()), LevelPreference()
TERMS = Terms.of(COST, LEVELS, TASTE)


def nothing(tokens: int) -> tuple[torch.Tensor, Decided]:
    return torch.zeros(1, tokens, dtype=torch.int8), Decided.nothing(1, tokens)


def spend_of(budget: float, tokens: int) -> torch.Tensor:
    return torch.tensor([int(budget * COST.dense * tokens)])


def bounds(tokens: int) -> LevelBounds:
    return LevelBounds(torch.zeros(1, tokens, dtype=torch.int8), torch.full((1, tokens), LEVELS.top, dtype=torch.int8))


def decided_on(
    importance: torch.Tensor, spend: torch.Tensor, before: torch.Tensor, decided: Decided, hysteresis: Hysteresis | None = None
) -> tuple[torch.Tensor, Decided]:
    return decide(importance, spend, TERMS, LEVELS, TASTE, before, decided, bounds(importance.shape[1]), hysteresis or Hysteresis())


def whole(importance: torch.Tensor, spend: torch.Tensor) -> torch.Tensor:
    given = bounds(importance.shape[1])
    return allocate(importance, spend, TERMS, given.low, given.high)


def churn(before: torch.Tensor, after: torch.Tensor) -> int:
    return int((before != after).sum())


def test_the_first_allocation_happens() -> None:
    """As printed in the source a token that never moves in rank stays at the least width."""
    importance = torch.arange(200.0).unsqueeze(0)
    levels, decided = decided_on(importance, spend_of(0.3, 200), *nothing(200))
    assert torch.equal(levels, whole(importance, spend_of(0.3, 200)))
    assert levels[0, -1] == LEVELS.top and not decided.rank.isnan().any()


def test_noise_moves_no_token_and_hysteresis_is_why() -> None:
    torch.manual_seed(0)
    importance, spend = torch.rand(1, 400), spend_of(0.3, 400)
    moved = {}
    for hysteresis in (Hysteresis(), Hysteresis(moved=0.0, checks=0)):
        levels, decided = decided_on(importance, spend, *nothing(400), hysteresis)
        moved[hysteresis] = 0
        for _ in range(8):
            after, decided = decided_on(importance + 0.01 * torch.randn(1, 400), spend, levels, decided, hysteresis)
            moved[hysteresis] += churn(levels, after)
            levels = after
    held, free = moved.values()
    assert held == 0 < free


def test_tokens_that_stay_moved_change_at_the_second_check() -> None:
    """Two tokens change places; what the one gives up the other takes, and nobody else changes."""
    importance, spend = torch.arange(100.0).unsqueeze(0), spend_of(0.3, 100)
    levels, decided = decided_on(importance, spend, *nothing(100))
    assert levels[0, 0] == 0 < levels[0, 60]
    swapped = importance.clone()
    swapped[0, 0], swapped[0, 60] = importance[0, 60], importance[0, 0]
    first, decided = decided_on(swapped, spend, levels, decided)
    assert churn(levels, first) == 0
    second, decided = decided_on(swapped, spend, first, decided)
    assert second[0, 0] == levels[0, 60] and second[0, 60] == 0
    assert churn(first, second) == 2 and bool((spent(second, TERMS) <= spend).all())
    # Where one goes back at once, it stays what it was.
    third, decided = decided_on(importance, spend, second, decided)
    assert churn(second, third) == 0


def test_a_budget_that_is_not_met_frees_all() -> None:
    importance = torch.arange(100.0).unsqueeze(0)
    levels, decided = decided_on(importance, spend_of(0.5, 100), *nothing(100))
    tight = spend_of(0.2, 100)
    after, decided = decided_on(importance, tight, levels, decided)
    assert bool((spent(after, TERMS) <= tight).all()) and churn(levels, after) > 0
    # And one of which much is left over.
    wide = spend_of(0.5, 100)
    again, _ = decided_on(importance, wide, after, decided)
    assert bool((spent(again, TERMS) >= 0.98 * wide).all())


def test_new_tokens_are_free() -> None:
    importance = torch.arange(100.0).unsqueeze(0)
    levels, decided = decided_on(importance, spend_of(0.3, 100), *nothing(100))
    more = torch.cat([importance, torch.full((1, 20), 0.5)], 1)
    before = torch.cat([levels, torch.full((1, 20), LEVELS.top, dtype=torch.int8)], 1)
    after, decided = decided_on(more, spend_of(0.3, 120), before, decided.grown(120))
    assert bool((spent(after, TERMS) <= spend_of(0.3, 120)).all())
    # Not what a growing cache may spend, whatever they are worth.
    most = utility(more, whole(more, spend_of(0.3, 120)), LEVELS, TASTE)
    assert bool((utility(more, after, LEVELS, TASTE) >= 0.98 * most).all())
    assert decided.rank.shape == (1, 120) and not decided.rank.isnan().any()
