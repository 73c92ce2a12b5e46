"""Fitting a policy to bytes, against trying every choice and against compiled stores; its file; sensitivity of a tiny model."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from e2e_models import llama
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StaticCache

import kvcompile
from kvcompile.errors import BudgetTooSmall, NotPlanned, SensitivityUnread
from kvcompile.passes.plan.policy import Pair
from kvcompile.schemes import Dense, parse
from kvcompile.tools.planner import fitting
from kvcompile.tools.planner.fitting import fitted
from kvcompile.tools.planner.model import traced
from kvcompile.tools.planner.sensitivity import CachePart, Layer, LayerDamage, Sensitivity, Trial, layers_of, measured, only
from kvcompile.types import Role, SlotSpec

NAMES = ("int8", "int4", "kivi")
SLOTS = tuple(SlotSpec(2, 64, torch.float32, role) for role in Role)


def known(table: list[float], layers: int = 2) -> Sensitivity:
    """Damages by layer, half and scheme, in this order."""
    paths = [f"layers.{index}" for index in range(layers)]
    halves = (CachePart.KEY, CachePart.VALUE)
    keys = itertools.product(paths, halves, NAMES)
    damages = tuple(LayerDamage(path, half, name, kl) for (path, half, name), kl in zip(keys, table, strict=True))
    return Sensitivity("made up", tuple(Layer(path, SLOTS, None, halves) for path in paths), damages, 1, 1, 1, 0.0)


def every_choice(given_: Sensitivity, memory: int, tokens: int) -> float:
    """The least sum of damages within some bytes, by trying all."""
    def nbytes(pair: Pair) -> int:
        window = max(pair.k.window, pair.v.window)
        total = 0
        for slot, scheme in zip(SLOTS, (pair.k, pair.v), strict=True):
            layout = scheme.for_role(slot.role).layout(slot)
            layout = layout.windowed(slot, window) if window else layout
            total += layout.nbytes(max(2, -(-tokens // 64)), 1, slot.heads)
        return total

    options = []
    for layer in given_.layers:
        halves = [[*given_.of(layer.path, half).items(), ("dense", 0.0)] for half in layer.halves]
        options.append([(nbytes(Pair(parse(k), parse(v))), a + b) for (k, a), (v, b) in itertools.product(*halves)])
    sums = [tuple(map(sum, zip(*choice, strict=True))) for choice in itertools.product(*options)]
    return min(damage for size, damage in sums if size <= memory)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=12, max_size=12), st.integers(110_000, 700_000), st.sampled_from([64, 300, 640]))
def test_no_choice_is_better(table: list[float], memory: int, tokens: int) -> None:
    sensitivity = known(table)
    try:
        found = fitted(sensitivity, memory, tokens)
    except BudgetTooSmall as error:
        assert error.facts["least"] > memory  # type: ignore[operator]
        return
    assert found.nbytes <= memory
    assert found.damage == pytest.approx(every_choice(sensitivity, memory, tokens))


def test_a_budget_for_everything_leaves_everything() -> None:
    found = fitted(known([0.5] * 12), 10**9, 640)
    assert all(pair == Pair(Dense(), Dense()) for _, pair in found.policy.rules)
    assert found.damage == 0


def test_of_equal_damage_the_fewest_bytes_are_taken() -> None:
    """Codes that do no damage leave nothing dense, whatever the budget is."""
    found = fitted(known([0.0] * 12), 10**9, 640)
    assert found.damage == 0 and not any(Dense() in {pair.k, pair.v} for _, pair in found.policy.rules)
    assert found.nbytes == fitted(known([0.0] * 12), found.nbytes, 640).nbytes


def test_fewer_choices_are_kept_with_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the optimum between the ends may be missed: a budget for everything still leaves everything."""
    states: Any = [(number, 9.0 - number, ()) for number in range(9)]
    for most in (1, 2, 4, 8, 9):
        monkeypatch.setattr(fitting, "MOST_CHOICES", most)
        kept = fitting._thinned(states)
        assert kept[0] == states[0] and kept[-1] == states[-1] and len(kept) <= most + 1


def test_the_more_sensitive_half_keeps_more() -> None:
    table = [0.5, 0.9, 2.0, 0.0, 0.01, 0.1] * 2
    dense = fitted(known([0.5] * 12), 10**9, 640).nbytes
    found = fitted(known(table), dense * 66 // 100, 640)
    assert all(pair.k == Dense() and pair.v != Dense() for _, pair in found.policy.rules)


def test_too_small_a_budget(tmp_path: Path) -> None:
    path = tmp_path / "known.json"
    known([0.5] * 12).save(path)
    with pytest.raises(BudgetTooSmall, match="at least"):
        kvcompile.fit(1000, path, 640)
    assert Sensitivity.load(path) == known([0.5] * 12)
    path.write_text("{}")
    with pytest.raises(SensitivityUnread, match="the field format in known.json, found none"):
        kvcompile.fit(10**9, path, 640)
    with pytest.raises(SensitivityUnread, match="no.json"):
        kvcompile.fit(10**9, tmp_path / "no.json", 640)


def prompt(model: Any, rows: int, tokens: int, capacity: int) -> dict[str, Any]:
    """Random words and an empty static cache."""
    ids = torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "past_key_values": StaticCache(config=model.config, max_cache_len=capacity), "use_cache": True}


@pytest.mark.usefixtures("one_thread", "fresh_dynamo")
def test_sensitivity_and_the_bytes_of_its_policy(tmp_path: Path) -> None:
    """Damages of a tiny model are those of its policies, more bits harm less, and a fitted policy holds the bytes that were promised."""
    model = llama(head_dim=64)
    given_ = prompt(model, 2, 70, 200)
    with torch.no_grad():
        layers = layers_of(traced("tiny", model, given_, 200))
    assert [layer.path for layer in layers] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    trial = Trial(model, given_["input_ids"], 64, lambda: prompt(model, 1, 1, 70)["past_key_values"])
    found = measured("tiny", trial, layers, ["int8", "kivi"])
    assert abs(found.floor) < 1e-9
    assert len(found.damages) == 8
    for layer in layers:
        for half in layer.halves:
            kl = found.of(layer.path, half)
            assert kl["kivi"] > kl["int8"] > abs(found.floor)
    again = trial.kl(only(layers[1].path, CachePart.VALUE.pair(parse("kivi"))))
    assert again == found.of(layers[1].path, CachePart.VALUE)["kivi"]

    found.save(tmp_path / "tiny.json")
    whole = fitted(found, 10**9, 192, 3)
    chosen = fitted(found, whole.nbytes * 3 // 10, 192, 3)
    torch.compiler.reset()
    owner = kvcompile.backend(kvcompile.fit(whole.nbytes * 3 // 10, tmp_path / "tiny.json", 192, 3), inner="eager", strict=True)
    with torch.no_grad():
        alive = prompt(model, 3, 192, 192)
        torch.compile(model, backend=owner)(**alive)
    report = owner.report()
    assert report.allocated == report.announced == chosen.nbytes <= whole.nbytes * 3 // 10


@pytest.mark.usefixtures("one_thread", "fresh_dynamo")
def test_a_latent_has_one_scheme_for_keys_and_values() -> None:
    stored = [SimpleNamespace(path=path, slot=slot, end=None) for path in ("plain", "latent") for slot in SLOTS]
    sites = [SimpleNamespace(path="plain", assembly=None), SimpleNamespace(path="latent", assembly=object())]
    seen = SimpleNamespace(matched=SimpleNamespace(sites=sites))
    model: Any = SimpleNamespace(stores=lambda scheme: SimpleNamespace(stored=stored), observed=SimpleNamespace(graphs=[seen]), name="two")
    halves = {layer.path: layer.halves for layer in layers_of(model)}
    assert halves == {"plain": (CachePart.KEY, CachePart.VALUE), "latent": (CachePart.BOTH,)}


def test_attentions_that_share_a_cache_are_refused() -> None:
    from kvcompile.tools.cli.architectures import build

    subject = build("gemma3n_text", "sdpa")
    ids = torch.randint(3, 64, (1, 20))
    with torch.no_grad():
        model = traced("shared", subject.model, {"input_ids": ids, "past_key_values": subject.static_cache(90), "use_cache": True}, 90)
    with pytest.raises(NotPlanned, match="a cache of its own"):
        layers_of(model)
