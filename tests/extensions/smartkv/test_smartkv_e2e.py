"""smartkv in models of transformers: prompts and steps, padded batches, generate, beams, crops, and Inductor."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import e2e_models
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvcompile
from kvcompile.extensions.smartkv import buckets, reallocation
from kvcompile.extensions.smartkv.buckets import Buckets
from kvcompile.runtime.handle import tensor as handle
from kvcompile.runtime.store.adaptive_store import AdaptiveStore
from kvcompile.types import Role

LAYERS, D = 2, 64
SCHEME = "smartkv(budget=0.6,tau=1e-6)"
KINDS = ("static", "dynamic")
cache_of = functools.partial(e2e_models.cache_of, capacity=256)
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _quick(one_thread: None, fresh_dynamo: None) -> Iterator[None]:
    """Small tensors on one thread, nothing compiled before."""
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def llama() -> LlamaForCausalLM:
    """Two layers with grouped heads, whose attention looks at some tokens more than at others."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = LlamaConfig(
            hidden_size=96, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=D,
            vocab_size=97, max_position_embeddings=1024, initializer_range=0.05,
        )
        return LlamaForCausalLM(config).eval()


def words(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


def compiled(model: LlamaForCausalLM, scheme: Any = SCHEME, inner: str = "eager") -> tuple[kvcompile.Backend, Any]:
    backend = kvcompile.backend(scheme, inner=inner, strict=True)
    return backend, torch.compile(model, backend=backend)


@torch.no_grad()
def logits(model: Any, cache: Any, ids: torch.Tensor, prompt: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of the last prompt token and of every step behind it."""
    def called(first: int, last: int) -> torch.Tensor:
        seen = None if mask is None else mask[:, :last]
        return model(ids[:, first:last], attention_mask=seen, past_key_values=cache).logits[:, -1]

    return torch.stack([called(0, prompt), *(called(at, at + 1) for at in range(prompt, ids.shape[1]))], 1)


def store_of(cache: Any, layer: int = 0, keys: bool = True) -> AdaptiveStore:
    tensor = cache.layers[layer].keys if keys else cache.layers[layer].values
    assert handle.is_handle(tensor)
    return next(iter(tensor._kv.stores.values()))


def divergence(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The mean KL of two rows of logits, in nats."""
    p, q = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.compile
# A static cache through Inductor is in the acceptance's slice for CPUs.
@pytest.mark.parametrize("kind", ["dynamic"])
def test_inductor_gives_what_the_definitions_give(kind: str) -> None:
    model, ids, mask = llama(), words(3, 190), torch.ones(3, 190, dtype=torch.long)
    mask[0, :9] = mask[2, :2] = 0
    found = {}
    for inner in ("eager", "inductor"):
        torch._dynamo.reset()
        backend, run = compiled(model, inner=inner)
        cache = cache_of(model, kind)
        found[inner] = logits(run, cache, ids, 140, mask), backend.report(), cache
    plain = logits(model, cache_of(model, kind), ids, 140, mask)
    # Codes on the border between two values may fall to either side, and widths between two tokens of equal worth too.
    assert torch.allclose(found["inductor"][0][:, :2], found["eager"][0][:, :2], atol=1e-3)
    assert divergence(found["inductor"][0], found["eager"][0]) < 1e-5
    assert 0 < divergence(found["inductor"][0], plain) < 1e-3
    assert found["inductor"][1].allocated == found["eager"][1].allocated
    assert store_of(found["inductor"][2]).first == 140 + 30
    # A second request on the same code, which is Inductor's.
    assert torch.equal(logits(run, cache_of(model, kind), ids, 140, mask), found["inductor"][0])


@each_kind
def test_eight_bits_for_all_are_int8(kind: str) -> None:
    model, ids = llama(), words(2, 170)
    found = []
    for scheme in ("int8", "smartkv(budget=1.0,keys=8,values=8)"):
        torch._dynamo.reset()
        found.append(logits(compiled(model, scheme)[1], cache_of(model, kind), ids, 120))
    assert torch.allclose(*found, atol=1e-5)
    assert divergence(found[0], logits(model, cache_of(model, kind), ids, 120)) > 0


def test_more_budget_is_nearer_to_the_model() -> None:
    model, ids = llama(), words(1, 330)
    plain = logits(model, cache_of(model, "dynamic"), ids, 300)
    apart = []
    for budget in (0.23, 0.4, 0.6):
        torch._dynamo.reset()
        apart.append(divergence(logits(compiled(model, f"smartkv(budget={budget})")[1], cache_of(model, "dynamic"), ids, 300), plain))
    assert apart[0] > 3 * apart[1] > 9 * apart[2] > 0, apart


def test_padding_counts_for_nothing() -> None:
    model, ids = llama(), words(1, 120)
    padded = torch.cat([torch.zeros(1, 11, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 11, dtype=torch.long), torch.ones(1, 120, dtype=torch.long)], 1)
    shares = []
    for given, seen in ((ids, torch.ones_like(ids)), (padded, mask)):
        torch._dynamo.reset()
        cache = cache_of(model, "dynamic")
        logits(compiled(model, "smartkv(interval=500)")[1], cache, given, given.shape[1], seen)
        plane = store_of(cache).plane("importance")
        assert plane is not None
        shares.append(reallocation.by_position(plane, given.shape[1])[0])
    assert not shares[1][:11].any()
    assert torch.allclose(shares[1][11:, 0], shares[0][:, 0], rtol=1e-3, atol=1e-7)


@each_kind
def test_a_prompt_that_ran_elsewhere_is_adopted(kind: str) -> None:
    model, ids = llama(), words(2, 200)
    backend, run = compiled(model)
    cache = cache_of(model, kind)
    with torch.no_grad():
        model(ids[:, :180], past_key_values=cache)
    found = logits(run, cache, ids[:, 180:], 1)
    plain = logits(model, cache_of(model, kind), ids, 181)
    assert divergence(found, plain) < 2e-3
    assert store_of(cache).first >= 180 and backend.report().allocated == sum(
        store_of(cache, layer, keys).nbytes for layer in range(LAYERS) for keys in (True, False)
    )


@each_kind
def test_generate(kind: str) -> None:
    model, ids = llama(), words(2, 150)
    backend = kvcompile.backend(SCHEME, inner="eager", strict=True)
    run = torch.compile(model.forward, backend=backend)
    model.forward, plain = run, model.forward
    # A report is of the caches that are still there.
    caches = [cache_of(model, kind) for _ in range(2)]
    try:
        out = [model.generate(ids, past_key_values=cache, max_new_tokens=40, do_sample=False, pad_token_id=0) for cache in caches]
    finally:
        model.forward = plain
    assert out[0].shape == (2, 190) and torch.equal(*out)
    assert backend.report().sites >= 2 * LAYERS
    assert backend.report().widths.keys() == set(Role)


def test_beams_crops_and_rows() -> None:
    """Each change of a cache against a fresh cache of the same tokens, whose stores hold each at eight bits."""
    model, ids = llama(), words(3, 60)
    eight = "smartkv(budget=1.0,keys=8,values=8,scale_dtype=float32)"
    _, run = compiled(model, eight)
    cache = cache_of(model, "dynamic")
    plain = cache_of(model, "dynamic")

    def step(tokens: torch.Tensor) -> float:
        with torch.no_grad():
            found, wanted = (each(tokens, past_key_values=held).logits for each, held in ((run, cache), (model, plain)))
        return float((found - wanted).abs().max())

    def both(name: str, *given: Any) -> None:
        for held in (cache, plain):
            getattr(held, name)(*given)

    assert step(ids[:, :40]) < 1e-4
    assert step(ids[:, 40:41]) < 0.02
    both("reorder_cache", torch.tensor([2, 0, 0]))
    assert step(ids[:, 41:42]) < 0.02
    both("batch_repeat_interleave", 2)
    assert step(ids[:, 42:43].repeat_interleave(2, 0)) < 0.02
    both("batch_select_indices", torch.tensor([5, 1]))
    assert step(ids[:2, 43:44]) < 0.02
    both("crop", -3)
    assert step(ids[:2, 50:51]) < 0.02
    # Into what was settled.
    both("crop", -22)
    assert step(ids[:2, 51:60]) < 0.02
    assert store_of(cache).first <= 29 and cache.get_seq_length() == plain.get_seq_length() == 29
    assert not torch.equal(store_of(cache).values(0, 1)[0], store_of(cache).values(0, 1)[1])


def test_layers_with_schemes_of_their_own() -> None:
    model, ids = llama(), words(1, 160)
    backend, run = compiled(model, {"*": "int8", "model.layers.1.*": SCHEME})
    cache = cache_of(model, "dynamic")
    plain = logits(model, cache_of(model, "dynamic"), ids, 150)
    assert divergence(logits(run, cache, ids, 150), plain) < 1e-3
    assert type(next(iter(cache.layers[0].keys._kv.stores.values()))) is not AdaptiveStore
    assert store_of(cache, 1).first >= 150
    assert backend.report().widths[Role.KEY].keys() <= {3, 4, 8}


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_importance_of_a_layer_or_of_the_model(scope: str) -> None:
    model, ids = llama(), words(2, 330)
    _, run = compiled(model, f"smartkv(budget=0.45,scope={scope},tau=1e9,drift=1.0)")
    cache = cache_of(model, "dynamic")
    logits(run, cache, ids, 280)
    levels = []
    for layer in range(LAYERS):
        store = store_of(cache, layer)
        assert store.churn.allocations == 2
        levels.append(buckets.levels(Buckets.of(tuple(store.planes), store.scheme.form), store.first))
    assert len(levels[0].unique()) > 1
    # Layers whose tokens count alike and whose budgets are equal have the same levels.
    assert torch.equal(*levels) == (scope == "model")


def test_weights_of_layers() -> None:
    model, ids = llama(), words(1, 700)
    _, run = compiled(model, "smartkv(budget=0.4,layer_weights=3/1,tau=1e9,drift=1.0)")
    cache = cache_of(model, "dynamic")
    logits(run, cache, ids, 700)
    held = [sum(store_of(cache, layer, keys).nbytes for keys in (True, False)) / (700 * 2 * 2 * D * 2) for layer in range(LAYERS)]
    assert held[0] > 1.3 * held[1] and sum(held) / 2 <= 0.4


# --- originals kept ----------------------------------------------------------------------------------

KEPT = "smartkv(budget=0.6,tau=1e-6,checks=1,moved=0.02,tier2=device)"


def originals_differ(cache: Any) -> tuple[float, int]:
    """The largest difference of narrow codes' values from their originals' codes, over layers and halves; how many tokens are settled."""
    worst, settled = 0.0, 0
    for layer in range(LAYERS):
        for keys in (True, False):
            store = store_of(cache, layer, keys)
            half = Buckets.of(tuple(store.planes), store.scheme.form)  # type: ignore[attr-defined]
            plane = store.plane("originals")
            assert plane is not None
            for part in half.parts:
                x = plane[part.position // 64, part.row, :, part.position % 64].transpose(0, 1)
                wanted = half.plain(half.coded(x, part.bits, part.row), part.bits, part.row)
                found = half.plain(part.coded(), part.bits, part.row)
                worst = max(worst, float((found - wanted).abs().amax()) if found.numel() else 0.0)
                settled += len(part.position)
    return worst, settled


@pytest.mark.compile
@pytest.mark.parametrize("kind", KINDS)
def test_promotions_through_inductor(kind: str) -> None:
    """Tokens are promoted between steps of compiled code, padded rows too, and nothing is compiled for that."""
    model, ids, mask = llama(), words(2, 230), torch.ones(2, 230, dtype=torch.long)
    mask[0, :9] = 0
    found, graphs = {}, 0
    for inner in ("eager", "inductor"):
        torch._dynamo.reset()
        backend, run = compiled(model, KEPT, inner)
        cache = cache_of(model, kind)
        some = logits(run, cache, ids[:, :150], 140, mask[:, :150])
        graphs = len(backend.graphs)
        with torch.no_grad():
            # To the last one but one: there a mask is as long as rows of tokens are apart, for which Dynamo compiles anew.
            steps = [run(ids[:, at : at + 1], attention_mask=mask[:, : at + 1], past_key_values=cache) for at in range(150, 229)]
        assert len(backend.graphs) == graphs
        assert store_of(cache).churn.promoted > 0 and store_of(cache).churn.refused == 0
        worst, settled = originals_differ(cache)
        assert worst == 0 and settled > 2 * 2 * LAYERS * 140
        found[inner] = torch.cat([some, torch.stack([step.logits[:, -1] for step in steps], 1)], 1)
    plain = logits(model, cache_of(model, kind), ids[:, :229], 140, mask[:, :229])
    assert divergence(found["inductor"], found["eager"]) < 1e-5
    assert 0 < divergence(found["inductor"], plain) < 1e-3


@each_kind
def test_generate_and_changes_of_a_cache_with_originals(kind: str) -> None:
    model, ids = llama(), words(2, 150)
    backend = kvcompile.backend(KEPT, inner="eager", strict=True)
    run = torch.compile(model.forward, backend=backend)
    model.forward, plain = run, model.forward
    try:
        caches = [cache_of(model, kind) for _ in range(2)]
        out = [model.generate(ids, past_key_values=cache, max_new_tokens=60, do_sample=False, pad_token_id=0) for cache in caches]
    finally:
        model.forward = plain
    assert out[0].shape == (2, 210) and torch.equal(*out)
    assert originals_differ(caches[0])[0] == 0 and store_of(caches[0]).churn.promoted > 0
    if kind == "static":
        return
    cache = caches[0]
    for change in (
        lambda: cache.reorder_cache(torch.tensor([1, 1])), lambda: cache.batch_repeat_interleave(2), lambda: cache.crop(-5),
        lambda: cache.batch_select_indices(torch.tensor([3, 0])), lambda: cache.crop(-60),
    ):
        change()
        rows = store_of(cache).batch
        with torch.no_grad():
            for at in range(40):
                run(ids[:1, at : at + 1].expand(rows, -1), past_key_values=cache)
        worst, settled = originals_differ(cache)
        assert worst == 0 and settled > 0
