"""The report's bytes: held now, a dense cache of the same tokens, what the caller's own tensors took, and a peak that outlives them."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from e2e_models import cache_of, llama, prompt

import kvcompile
from kvcompile import variants
from kvcompile.types import PAGE

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

ROWS, CAPACITY = 3, 1024


def token_bytes(model: torch.nn.Module) -> int:
    """Bytes of a token of all rows in a dense float32 cache."""
    config = model.config
    return 2 * config.num_hidden_layers * ROWS * config.num_key_value_heads * config.head_dim * 4


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_three_numbers_and_a_peak(kind: str) -> None:
    model, backend = llama(), kvcompile.backend("int8", inner="eager", reserve=PAGE)
    compiled, cache = torch.compile(model, backend=backend), cache_of(model, kind, capacity=CAPACITY)
    with torch.no_grad():
        for count in (9, 1, 1):
            compiled(prompt(ROWS, count, count), past_key_values=cache)
    report = backend.report()
    assert report.dense == 11 * token_bytes(model)
    assert report.callers == (CAPACITY if kind == "static" else 11) * token_bytes(model)
    held = sum(store.nbytes for layer in cache.layers for x in (layer.keys, layer.values) for store in x._kv.stores.values())
    assert report.allocated == report.peak == held
    assert f"{report.allocated / report.callers:.1%} of it" in str(report)
    layer, capacity = None, None
    del cache, layer, capacity, compiled
    torch._dynamo.reset()
    gc.collect()
    later = backend.report()
    assert not later.allocated and later.peak == held and "most that caches held at once" in str(later)


def test_a_peak_is_of_caches_that_live_together() -> None:
    model, backend = llama(layers=1), kvcompile.backend("int8", inner="eager")
    compiled, caches = torch.compile(model, backend=backend), [cache_of(model, "static") for _ in "ab"]
    with torch.no_grad():
        compiled(prompt(ROWS, 5), past_key_values=caches[0])
        one = backend.report().peak
        compiled(prompt(ROWS, 5), past_key_values=caches[1])
        assert backend.report().peak == 2 * one
        caches.pop()
        gc.collect()
        compiled(prompt(ROWS, 1), past_key_values=caches[0])
    assert backend.report().allocated == one and backend.report().peak == 2 * one


@pytest.mark.compile
@pytest.mark.parametrize(("scheme", "slow"), [("kivi(group=16)", True), ("int8", False)])
def test_a_scheme_without_a_kernel_here_is_warned_about(scheme: str, slow: bool, caplog: pytest.LogCaptureFixture) -> None:
    variants.warn_once.cache_clear()
    model, backend = llama(layers=1), kvcompile.backend(scheme)
    compiled, cache = torch.compile(model, backend=backend), cache_of(model, "static")
    with caplog.at_level(logging.WARNING, "kvcompile"), torch.no_grad():
        for count in (5, 1, 1):
            compiled(prompt(ROWS, count), past_key_values=cache)
    said = "kivi has no kernel on cpu (scales of several tokens (kivi)), so its eager definition runs, which is slow; int8, int4, fp8 "
    assert caplog.text.count(said) == int(slow)
    assert (said[:40] in str(backend.report())) == slow


@pytest.mark.parametrize("scheme", ["smartkv", "certified", "kivi(group=16)", "int8", "int4(group=16,sinks=4)"])
def test_explain_names_schemes_that_are_slow_here(scheme: str) -> None:
    model = llama(layers=1)
    report = kvcompile.explain(model, {"input_ids": prompt(1), "past_key_values": cache_of(model, "static"), "use_cache": True}, scheme)
    kernels = [line for graph in report.graphs for line in graph.kernels]
    slow = [line for graph in report.graphs for line in graph.slow]
    assert kernels and bool(slow) == any("eager body" in line for line in kernels), (kernels, slow)
    assert all("int8, int4, fp8 have one here" in line for line in slow)
