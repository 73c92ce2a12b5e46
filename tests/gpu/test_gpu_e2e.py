"""End to end on a GPU: logits, modes, host syncs, CUDA graphs, recompilations and memory."""

from __future__ import annotations

import gc

import pytest
import torch
from gpu_llama import DIM, HEADS, KV, LAYERS, gpu_config, gpu_model, narrow_model

import kvcompile
from kvcompile.lowering.ops.operations import calibrate_body
from kvcompile.schemes import parse
from kvcompile.types import Role

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def config() -> transformers.LlamaConfig:
    return gpu_config()


@pytest.fixture(scope="module")
def model(config: transformers.LlamaConfig) -> torch.nn.Module:
    return gpu_model(config)


def _cache(kind: str, config: transformers.LlamaConfig, capacity: int = 1024) -> object:
    if kind == "static":
        return transformers.StaticCache(config, max_cache_len=capacity)
    return transformers.DynamicCache(config=config)


def _tokens(batch: int, count: int) -> torch.Tensor:
    return torch.randint(0, 512, (batch, count), device="cuda")


TOLERANCE = {"dense": 0.03, "int8": 0.06, "fp8": 0.12, "int4": 0.5, "kivi(bits=4)": 0.5, "certified": 0.5}


def _same(model: torch.nn.Module, config: object, scheme: str, kind: str, mode: str, batch: int, steps: int = 24) -> float:
    torch._dynamo.reset()
    owner = kvcompile.backend(scheme, strict=True)
    compiled = torch.compile(model, backend=owner, fullgraph=True, mode=mode)
    ours, theirs = _cache(kind, config), _cache(kind, config)
    worst = 0.0
    with torch.no_grad():
        prompt = _tokens(batch, 70)
        model(prompt, past_key_values=theirs)
        model(prompt, past_key_values=ours)
        for _ in range(steps):
            token = _tokens(batch, 1)
            want = model(token, past_key_values=theirs).logits.float()
            got = compiled(token, past_key_values=ours).logits.float().clone()
            worst = max(worst, ((got - want).norm() / want.norm()).nan_to_num(nan=torch.inf).item())
    assert len(owner.graphs) <= 3
    return worst


@pytest.mark.parametrize("scheme", TOLERANCE)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_logits(model: torch.nn.Module, config: object, scheme: str, kind: str) -> None:
    assert _same(model, config, scheme, kind, "default", 3) < TOLERANCE[scheme]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("scheme", ["int4", "kivi(bits=4)", "certified"])
def test_modes(model: torch.nn.Module, config: object, mode: str, scheme: str) -> None:
    before = dict(torch._dynamo.utils.counters["inductor"])
    assert _same(model, config, scheme, "static", mode, 2) < TOLERANCE[scheme]
    after = torch._dynamo.utils.counters["inductor"]
    assert after["cudagraph_skips"] == before.get("cudagraph_skips", 0)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("scheme", ["int4", "kivi", "squat"])
def test_no_host_sync_and_no_recompilation_over_300_steps(model: torch.nn.Module, config: object, kind: str, scheme: str) -> None:
    torch._dynamo.reset()
    owner = kvcompile.backend(scheme, strict=True)
    compiled = torch.compile(model, backend=owner, fullgraph=True)
    cache = _cache(kind, config)
    with torch.no_grad():
        model(_tokens(2, 64), past_key_values=cache)
        token = _tokens(2, 1)
        for _ in range(4):
            compiled(token, past_key_values=cache)
        graphs = len(owner.graphs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(300):
                compiled(token, past_key_values=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(owner.graphs) == graphs
    report = owner.report()
    assert report.allocated == report.announced > 0


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_prefill_teaches_a_store(config: transformers.LlamaConfig, mode: str) -> None:
    torch._dynamo.reset()
    model = narrow_model(config)
    owner = kvcompile.backend("squat(bits=4)", strict=True)
    compiled = torch.compile(model, backend=owner, fullgraph=True, mode=mode)
    ours, theirs = _cache("static", config), _cache("static", config)
    worst = 0.0
    with torch.no_grad():
        prompt = _tokens(2, 70)
        compiled(prompt, past_key_values=ours)
        model(prompt, past_key_values=theirs)
        for _ in range(40):
            token = _tokens(2, 1)
            want = model(token, past_key_values=theirs).logits.float()
            got = compiled(token, past_key_values=ours).logits.float().clone()
            worst = max(worst, ((got - want).norm() / want.norm()).nan_to_num(nan=torch.inf).item())
    assert worst < TOLERANCE["kivi(bits=4)"]
    for layer in ours.layers:  # type: ignore[attr-defined]
        (store,) = layer.keys._kv.stores.values()
        # Every head: the guard declines nothing here (tests/extensions/squat/test_guard.py), so zeros would be a head without a lesson.
        assert store.planes[-1].any(-1).any(-1).all()


def test_learning_does_not_wait_for_the_device() -> None:
    scheme = parse("squat").for_role(Role.KEY)
    queries = torch.randn(2, HEADS, 200, DIM, device="cuda", dtype=torch.bfloat16)
    keep = torch.ones(2, 256, device="cuda", dtype=torch.bool)
    planes = [torch.zeros(1, 1, KV, DIM, DIM, device="cuda")]
    calibrate_body(queries, planes, keep, scheme.spec())
    expected = scheme.calibrate(queries.cpu().unflatten(1, (KV, -1)), None)[0]
    assert torch.allclose(planes[0].cpu(), expected, atol=1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        calibrate_body(queries, planes, keep, scheme.spec())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("scheme", "share"), [("int4", 0.31), ("kivi", 0.2)])
def test_memory_of_a_decode_is_what_was_announced(
    model: torch.nn.Module, config: transformers.LlamaConfig, scheme: str, share: float
) -> None:
    torch._dynamo.reset()
    owner = kvcompile.backend(scheme, strict=True)
    compiled = torch.compile(model, backend=owner, fullgraph=True)
    length, batch = 32768, 4
    cache = _cache("static", config, length + 64)
    with torch.no_grad():
        # The matrix library's workspace (32 MiB) belongs to the model, not to the cache.
        model(_tokens(batch, 1), use_cache=False)
        for layer in cache.layers:  # type: ignore[attr-defined]
            like = torch.empty(batch, KV, 1, DIM, device="cuda", dtype=torch.bfloat16)
            layer.lazy_initialization(like, like)
            layer.keys[:, :, :length].normal_()
            layer.values[:, :, :length].normal_()
            layer.cumulative_length.fill_(length)
        gc.collect()
        torch.cuda.synchronize()
        dense = LAYERS * 2 * batch * KV * (length + 64) * DIM * 2
        base = torch.cuda.memory_allocated() - dense
        token = _tokens(batch, 1)
        for _ in range(3):
            compiled(token, past_key_values=cache)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(5):
            compiled(token, past_key_values=cache)
        torch.cuda.synchronize()
    announced = owner.report().announced
    peak = torch.cuda.max_memory_allocated() - base
    assert announced < dense * share
    assert peak <= announced * 1.05 + 4 * 2**20, (peak, announced)


def test_a_causal_prefill_makes_no_mask(model: torch.nn.Module, config: transformers.LlamaConfig) -> None:
    torch._dynamo.reset()
    owner = kvcompile.backend("int4", strict=True)
    compiled = torch.compile(model, backend=owner, fullgraph=True)
    tokens = 16384
    cache = _cache("dynamic", config)
    with torch.no_grad():
        prompt = _tokens(1, tokens)
        keep = torch.ones(1, tokens, dtype=torch.long, device="cuda")
        keep[0, :100] = 0
        compiled(prompt, past_key_values=_cache("dynamic", config), attention_mask=keep, logits_to_keep=1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        compiled(prompt, past_key_values=cache, attention_mask=keep, logits_to_keep=1)
        torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - base
    # A bool mask of S x S alone would be 256 MiB.
    assert used < 200 * 2**20, used
