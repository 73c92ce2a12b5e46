"""Differential attention as transformers writes it: two attentions over the same queries and keys, each with half of the values' heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from e2e_models import cache_of

import kvcompile

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

KIVI = "kivi(bits=4,group=16,window=16)"
ALLOWED = {"dense": 3e-6, "int8": 0.02, KIVI: 0.2}
HEADS = {"grouped": (8, 4), "two": (4, 2), "ungrouped": (4, 4)}
CALLS = (36, 1, 1, 3, 1)


def model(attention: str, heads: str) -> Any:
    """A tiny random DiffLlama: two layers, 64 words."""
    torch.manual_seed(0)
    query, kv = HEADS[heads]
    return transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(
        hidden_size=16 * query, intermediate_size=64, num_hidden_layers=2, num_attention_heads=query, num_key_value_heads=kv, vocab_size=64,
        head_dim=16, attn_implementation=attention, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )).eval()


def error(plain: Any, run: Any, kind: str) -> float:
    """The largest difference of logits over two requests."""
    worst = 0.0
    for seed in (0, 1):
        words, start = torch.Generator().manual_seed(seed), 0
        caches = [cache_of(plain, kind) for _ in "ab"]
        for count in CALLS:
            given = {"input_ids": torch.randint(1, 64, (2, count), generator=words)}
            given["position_ids"] = torch.arange(start, start + count)[None]
            with torch.no_grad():
                a, b = (call(**given, past_key_values=cache).logits for call, cache in zip((plain, run), caches, strict=True))
            worst, start = max(worst, (a - b).abs().max().item()), start + count
    return worst


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_int8(attention: str, kind: str, heads: str) -> None:
    plain, backend = model(attention, heads), kvcompile.backend("int8", inner="eager", strict=True)
    assert 1e-6 < error(plain, torch.compile(plain, backend=backend), kind) <= ALLOWED["int8"]
    assert backend.report().sites == 4 * len(backend.graphs) and not any(graph.unvalidated for graph in backend.report().graphs)


@pytest.mark.parametrize("scheme", ["dense", KIVI, "kivi(bits=4,group=16,window=16,rotate=kv,sinks=4)", "nf4(group=16)"])
def test_other_schemes(scheme: str) -> None:
    plain, backend = model("sdpa", "grouped"), kvcompile.backend(scheme, inner="eager", strict=True)
    assert (scheme != "dense") * 1e-6 <= error(plain, torch.compile(plain, backend=backend), "dynamic") <= ALLOWED.get(scheme, 0.3)


@pytest.mark.compile
@pytest.mark.parametrize(("attention", "kind", "scheme"), [
    ("sdpa", "static", "int8"), ("eager", "dynamic", "dense"), ("sdpa", "dynamic", KIVI),
])
def test_through_inductor(attention: str, kind: str, scheme: str) -> None:
    plain, backend = model(attention, "grouped"), kvcompile.backend(scheme, strict=True)
    assert error(plain, torch.compile(plain, backend=backend), kind) <= ALLOWED[scheme]
    # Two layers of two attentions of two tiles each.
    assert "8 x attend" in str(backend.report().graphs[-1].kernels)


@pytest.mark.parametrize("scheme", ["smartkv", "certified"])
def test_attentions_that_take_as_many_heads_of_both_refuse(scheme: str) -> None:
    plain, backend = model("sdpa", "two"), kvcompile.backend(scheme, inner="eager")
    assert error(plain, torch.compile(plain, backend=backend), "static") <= ALLOWED["dense"]
    assert any(found in str(backend.report().refusals[0]) for found in ("fewer heads than the keys", "another attention reads too"))
