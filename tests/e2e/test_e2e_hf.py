"""transformers models end to end: logits and generated words against the same model, uncompiled."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from e2e_models import cache_of, llama, prompt
from transformers import CompileConfig

import kvcompile
from kvcompile.backend import Backend

KINDS = ("static", "dynamic")


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


def eager(scheme: object = "dense", **options: Any) -> Backend:
    """A strict backend that compiles nothing after the rewrite."""
    return kvcompile.backend(scheme, inner="eager", strict=True, **options)


@torch.no_grad()
def compare(
    model: Any, compiled: Any, kind: str, chunks: tuple[int, ...], *, padded: bool = False, seed: int = 0, first: Any = None
) -> list[float]:
    """Feed both the same chunks of words, each with a cache of its own; the difference of logits at every chunk."""
    plain, cache = cache_of(model, kind), cache_of(model, kind)
    mask = torch.ones(3, 0, dtype=torch.long)
    worst = []
    for index, count in enumerate(chunks):
        tokens = prompt(3, count, seed + index)
        mask = torch.cat([mask, torch.ones(3, count, dtype=torch.long)], 1)
        if padded and index == 0:
            mask[0, :4] = 0
        given = {"attention_mask": mask} if padded else {}
        call = first if first is not None and index == 0 else compiled
        expected, found = model(tokens, past_key_values=plain, **given).logits, call(tokens, past_key_values=cache, **given).logits
        worst.append((expected - found)[:, -1:].abs().max().item())
    return worst


# Compiled prefills of static caches are those of test_padded_rows.
@pytest.mark.parametrize(("kind", "prefill"), [("static", "eager"), ("dynamic", "eager"), ("dynamic", "compiled")])
def test_logits_with_grouped_heads(kind: str, prefill: str) -> None:
    model, backend = llama(), eager()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    first = model if prefill == "eager" else None
    assert max(compare(model, compiled, kind, (9, 1, 1, 4, 1, 7, 1), first=first)) <= 1e-6
    assert backend.report().sites == 2 * len(backend.graphs)


@pytest.mark.parametrize(("kind", "heads", "attention"), [
    ("static", 4, "eager"), ("static", 1, "sdpa"), ("dynamic", 1, "sdpa"), ("dynamic", 2, "eager"),
])
def test_padded_rows(kind: str, heads: int, attention: str) -> None:
    model = llama(heads, attention, layers=1)
    compiled = torch.compile(model, backend=eager(), fullgraph=True)
    assert max(compare(model, compiled, kind, (9, 1, 1, 4, 1), padded=True)) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_one_word(kind: str) -> None:
    model = llama(layers=1)
    compiled = torch.compile(model, backend=eager(), fullgraph=True)
    assert max(compare(model, compiled, kind, (1, 1, 1, 4))) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    model = llama(layers=1).to(dtype)
    compiled = torch.compile(model, backend=eager(), fullgraph=True)
    assert max(compare(model, compiled, "static", (9, 1, 4, 1))) <= 0.01


@pytest.mark.parametrize(("scheme", "bound"), [
    ("int8", 2e-3), ("fp8", 1e-2), ("int4(group=16)", 3e-2), ("int4(group=16,window=16)", 3e-2),
    ("nf4(group=16,window=8)", 3e-2), ("kivi(bits=4,group=16,window=16)", 3e-2),
])
def test_compressed_logits(scheme: str, bound: float) -> None:
    model = llama(layers=1)
    compiled = torch.compile(model, backend=eager(scheme), fullgraph=True)
    errors = compare(model, compiled, "dynamic", (9, *[1] * 20))
    # The first tokens of a new cache are attended to as they are.
    assert errors[0] <= 1e-6
    assert 0 < max(errors) <= bound


def test_masks_of_four_dims_and_positions_by_row() -> None:
    model = llama(layers=1)
    compiled = torch.compile(model, backend=eager(), fullgraph=True)
    for kind in KINDS:
        plain, cache, length = cache_of(model, kind), cache_of(model, kind), 0
        for count in (9, 1, 1, 4):
            tokens = prompt(3, count, length)
            length += count
            reach = length if kind == "dynamic" else 64
            rows = torch.arange(length - count, length)
            seen = (torch.arange(reach) <= rows[:, None]).expand(3, 1, count, reach).clone()
            seen[0, :, :, :3] = False
            positions = rows.expand(3, count).clone()
            positions[0] = (positions[0] - 3).clamp(min=0)
            mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
            with torch.no_grad():
                expected = model(tokens, past_key_values=plain, attention_mask=mask, position_ids=positions).logits
                found = compiled(tokens, past_key_values=cache, attention_mask=mask, position_ids=positions).logits
            assert torch.allclose(found[:, -1], expected[:, -1], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_no_recompiles_over_300_steps(kind: str) -> None:
    model, backend = llama(layers=1), eager("int8")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    cache = cache_of(model, kind, capacity=400)
    with torch.no_grad():
        compiled(prompt(), past_key_values=cache)
        for index in range(300):
            assert torch.isfinite(compiled(prompt(3, 1, index), past_key_values=cache).logits).all()
            # A growing cache is dynamic from its first step on: no graph for that length alone. A static one's tensors change once.
            if index == (0 if kind == "dynamic" else 3):
                graphs, frames = len(backend.graphs), dict(torch._dynamo.utils.counters["frames"])
    assert len(backend.graphs) == graphs
    assert dict(torch._dynamo.utils.counters["frames"]) == frames
    assert not torch._dynamo.utils.counters["graph_break"]
    report = backend.report()
    assert report.allocated == report.announced


def test_a_static_cache_costs_the_length_in_use() -> None:
    model, backend = llama(layers=1), eager("int8", reserve=64)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    cache = cache_of(model, "static", capacity=4096)
    with torch.no_grad():
        for index, count in enumerate((37, 1, 1, 1)):
            compiled(prompt(3, count, index), past_key_values=cache)
    keys = cache.layers[0].keys
    assert keys.shape == (3, 2, 4096, 16)
    with torch._C.DisableTorchFunctionSubclass():
        assert keys.untyped_storage().nbytes() <= 16
    assert max(store.pages for store in keys._kv.stores.values()) <= 2
    assert backend.report().allocated < 2 * keys.numel() * 4 // 20


# --- generate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {}, {"do_sample": True, "cache_implementation": "static"}, {"num_beams": 3}, {"num_beams": 2, "cache_implementation": "static"},
], ids=["dynamic", "static sampling", "beams", "static beams"])
def test_generate_with_a_compiled_forward(options: dict[str, Any]) -> None:
    model, backend = llama(layers=1), eager()
    options = {"do_sample": False, "max_new_tokens": 16, **options}
    torch.manual_seed(1)
    expected = model.generate(prompt(), **options)
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    torch.manual_seed(1)
    assert torch.equal(model.generate(prompt(), **options), expected)
    assert backend.report().sites == len(backend.graphs) > 0


def test_generate_compiles_by_itself() -> None:
    model, backend = llama(layers=1), eager()
    config = CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True
    for seed in range(3):
        words = prompt(seed=seed)
        expected = model.generate(words, max_new_tokens=12, do_sample=False)
        found = model.generate(words, max_new_tokens=12, do_sample=False, cache_implementation="static", compile_config=config)
        assert torch.equal(found, expected)
    assert len(backend.graphs) == 1


def test_generate_with_padding_past_the_first_allocation() -> None:
    model, backend = llama(layers=1), eager()
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, :5] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 280, "do_sample": False}
    expected = model.generate(prompt(), **options)
    model.forward = torch.compile(model.forward, backend=backend)
    assert torch.equal(model.generate(prompt(), **options), expected)


@pytest.mark.parametrize("how", ["lookup", "assistant"])
def test_generate_with_speculation(how: str) -> None:
    model, small, backend = llama(layers=1), llama(layers=1, seed=1), eager()
    words = prompt(1).repeat(1, 3)
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    options |= {"prompt_lookup_num_tokens": 3} if how == "lookup" else {"assistant_model": small}
    expected = model.generate(words, **options)
    model.forward = torch.compile(model.forward, backend=backend)
    assert torch.equal(model.generate(words, **options), expected)


@pytest.mark.parametrize("where", ["model", "layers"])
def test_a_compiled_submodule(where: str) -> None:
    model, backend = llama(), eager()
    expected = model.generate(prompt(), max_new_tokens=8, do_sample=False)
    if where == "model":
        model.model = torch.compile(model.model, backend=backend, fullgraph=True)
    else:
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, backend=backend)
    assert torch.equal(model.generate(prompt(), max_new_tokens=8, do_sample=False), expected)
    assert backend.report().sites


def test_two_models_in_two_threads() -> None:
    errors: dict[str, float] = {}

    def work(name: str, model: Any, kind: str, seed: int) -> None:
        compiled = torch.compile(model, backend=eager(), fullgraph=True)
        errors[name] = max(compare(model, compiled, kind, (9, 1, 1, 4, 1), seed=seed))

    threads = [
        threading.Thread(target=work, args=("one", llama(layers=1), "static", 1)),
        threading.Thread(target=work, args=("two", llama(4, "eager", layers=1), "dynamic", 2)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(errors) == {"one", "two"} and max(errors.values()) <= 1e-6


@pytest.mark.compile
def test_inductor() -> None:
    """Left-padded rows of a static cache; those of a dynamic one go through Inductor in the acceptance run's slice."""
    model, backend = llama(layers=1), kvcompile.backend("dense", strict=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert max(compare(model, compiled, "static", (9, 1, 1), padded=True)) <= 1e-5
