"""One guard for both faces of a cache: as many frames as stock compiles, and none that would be wrong for what is passed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import kvcompile
from benchmarks.fuzz.trial import Found, Way, tried
from kvcompile import variants
from kvcompile.errors import NotCompiled
from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.match.agreement import facts
from kvcompile.passes.rewrite.rewritten import Rewritten, Variant
from kvcompile.passes.verify import verify
from kvcompile.runtime.handle.guards import Expected
from kvcompile.runtime.handle.tensor import CompressedCache

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=64, vocab_size=64,
    )
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def _request(compiled: Any, model: Any, first: Any, prompt: int, rows: int = 1) -> float:
    """The largest difference of the logits of six steps from the uncompiled model's; ``first`` runs the prompt."""
    ours, theirs = (transformers.StaticCache(model.config, max_cache_len=64) for _ in range(2))
    ids = torch.randint(0, 64, (rows, 24), generator=torch.Generator().manual_seed(prompt))
    worst = 0.0
    with torch.no_grad():
        first(ids[:, :prompt], past_key_values=ours)
        model(ids[:, :prompt], past_key_values=theirs)
        for at in range(prompt, prompt + 6):
            got, want = (run(ids[:, at : at + 1], past_key_values=cache).logits for run, cache in ((compiled, ours), (model, theirs)))
            worst = max(worst, (got - want).abs().max().nan_to_num(nan=torch.inf).item())
    assert compiled is model or isinstance(ours.layers[0].keys, CompressedCache)
    return worst


@pytest.mark.usefixtures("fresh_dynamo")
def test_an_eager_prompt_costs_no_second_trace(model: Any) -> None:
    counters.clear()
    compiled = torch.compile(model, backend=kvcompile.backend("dense", strict=True, inner="aot_eager"))
    for prompt in (7, 11):
        assert _request(compiled, model, model, prompt) < 1e-5
    assert counters["frames"]["ok"] == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_prompts_compiled_and_eager_share_a_decode_step(model: Any) -> None:
    counters.clear()
    compiled = torch.compile(model, backend=kvcompile.backend("dense", strict=True, inner="aot_eager"))
    assert _request(compiled, model, compiled, 7) < 1e-5
    assert _request(compiled, model, model, 9) < 1e-5
    assert counters["frames"]["ok"] == 2


@pytest.mark.usefixtures("fresh_dynamo")
def test_another_batch_is_another_frame(model: Any) -> None:
    counters.clear()
    compiled = torch.compile(model, backend=kvcompile.backend("dense", strict=True, inner="aot_eager"), dynamic=False)
    for rows in (1, 3, 1):
        assert _request(compiled, model, model, 7, rows) < 1e-5
    assert counters["frames"]["ok"] == 2


def test_what_is_accepted() -> None:
    dense = torch.zeros(1, 2, 8, 4)
    expected = Expected.of(dense)
    assert expected.accepts(torch.ones(1, 2, 8, 4))
    refused = {
        "rows": torch.zeros(2, 2, 8, 4), "dtype": torch.zeros(1, 2, 8, 4, dtype=torch.float64), "no tensor": None,
        "strides": torch.zeros(1, 8, 2, 4).transpose(1, 2), "gradients": torch.zeros(1, 2, 8, 4, requires_grad=True),
        "parameter": torch.nn.Parameter(dense),
    }
    assert [name for name, value in refused.items() if expected.accepts(value)] == []
    with torch.inference_mode():
        assert not expected.accepts(torch.zeros(1, 2, 8, 4))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("fails", [False, True], ids=["a compiler that compiles", "a compiler that fails"])
def test_no_guard_on_pages_reaches_dynamo(model: Any, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Whatever looks at the planes may guard on their pages, of which Dynamo knows nothing, whatever comes of it."""
    seen = []

    def looks(rewritten: Any, captured: Any, fakes: tuple[Any, ...]) -> None:
        seen.append(bool(fakes[len(rewritten.kept)].shape[0] % 7 == 3))
        verify(rewritten, captured, fakes)

    monkeypatch.setattr(variants, "verify", looks)
    if fails:
        monkeypatch.setattr(variants, "compile_graph", compile_but(variants.compile_graph))
    owner = kvcompile.backend("int8", inner="aot_eager")
    compiled = torch.compile(model, backend=owner)
    ids = torch.randint(0, 64, (1, 24), generator=torch.Generator().manual_seed(1))
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :7], past_key_values=cache)
        for at in range(7, 12):
            compiled(ids[:, at : at + 1], past_key_values=cache)
    assert len(seen) >= 2
    refused = [str(refusal) for graph in owner.graphs for refusal in graph.refusals]
    assert any("this compiler fails" in text for text in refused) == fails, refused


def compile_but(compile_graph: Any) -> Any:
    """An inner compiler that fails over codes and compiles what has none."""
    def compiled(module: Any, *args: Any, **settings: Any) -> Any:
        if any("kvcompile" in str(node.target) for node in module.graph.nodes):
            raise NotCompiled(error="this compiler fails")
        return compile_graph(module, *args, **settings)

    return compiled


def _reads_a_size(late: Variant, rewritten: Rewritten, captured: Captured, fakes: tuple[Any, ...]) -> None:
    """What some operations do with an operand's sizes, in place of ``verify``: read one that is a symbol as a number."""
    if rewritten.variant is not late:
        return
    sizes = (size for fake in fakes[: len(rewritten.kept)] if isinstance(fake, torch.Tensor) for size in fake.shape)
    int(next(size for size in sizes if isinstance(size, torch.SymInt)))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_size_that_is_fixed_behind_the_guards_is_no_code_for_others(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks of a prompt share a frame, and the variant for a filled cache is made behind its guards: not for the second chunk alone."""
    monkeypatch.setattr(variants, "verify", functools.partial(_reads_a_size, Variant.PAST))
    compiled = torch.compile(model, backend=kvcompile.backend("dense"), dynamic=True)
    cache, other = (transformers.StaticCache(model.config, max_cache_len=64) for _ in range(2))
    for chunk in (7, 5, 9):
        ids = torch.randint(0, 64, (1, chunk), generator=torch.Generator().manual_seed(chunk))
        with torch.no_grad():
            got, want = compiled(ids, past_key_values=cache).logits, model(ids, past_key_values=other).logits
        torch.testing.assert_close(got, want)
    assert "specialises on sizes" in caplog.text


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_graph_as_it_was_captured_is_not_made_for_a_size_that_a_variant_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variant for an empty cache is made in the first call; what serves that call serves a chunk of another length too."""
    monkeypatch.setattr(variants, "verify", functools.partial(_reads_a_size, Variant.FRESH))
    choice = {"layout": "halves", "groups": "2", "positions": "late-counter", "chunks": "20,1,1,5,1,1", "dynamic": "True"}
    assert tried(1, choice, Way("inductor")).found is Found.RIGHT


def test_a_fact_is_what_its_symbols_are_now() -> None:
    """Guards of sites that are read later make one symbol of two: 20 of 32 layers over a growing cache were refused with torch 2.11."""
    env = ShapeEnv()
    sources = map(ConstantSource, ("first", "second"))
    made = [env.create_symbol(7, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None) for source in sources]
    first, second = (env.create_symintnode(symbol, hint=7, source=ConstantSource("size")) for symbol in made)
    assert facts((made[0], 1), env) != facts((made[1], 1), env)
    assert bool(first == second)
    assert facts((made[0], 1), env) == facts((made[1], 1), env) == facts((first, 1), env)
