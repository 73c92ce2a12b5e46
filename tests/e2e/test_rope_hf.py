"""transformers models whose keys are cached before RoPE: every kind of rotation and of scaling, left padding, both caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from e2e_models import cache_of, llama, prompt
from transformers import AutoConfig, AutoModelForCausalLM
from versions import OLD_TRANSFORMERS

import kvcompile

LOSSLESS = "dense(pre_rope=True)"
WINDOWED = {"k": LOSSLESS, "v": "kivi(bits=4,group=8,window=8)"}
SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}
OLD = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 64, "rotary_dim": 8, "n_positions": 128}


def scaling(kind: str, **more: Any) -> dict[str, Any]:
    """A llama's options for scaled frequencies."""
    given = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16, **more}
    return {"rope_parameters": given, "max_position_embeddings": 64}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3 scaling": ("llama", scaling("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "yarn": ("llama", scaling("yarn") | {"num_hidden_layers": 2}),
    "interleaved table, part of the channels": ("gptj", OLD),
    "interleaved": ("cohere", {}),
    "part of the channels, fused projection": ("gpt_neox", {}),
    "part of the channels": ("phi", {}),
    "norm of keys": ("qwen3", {"head_dim": 16}),
}


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


def model_of(family: str, options: dict[str, Any]) -> Any:
    """A tiny random model."""
    torch.manual_seed(0)
    given = options if family == "gptj" else {**SMALL, **options}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given)).eval()


@torch.no_grad()
def compare(
    model: Any, call: Any, kind: str, *, first: Any = None, positions: bool = True, chunks: tuple[int, ...] = (9, 1, 4, 1)
) -> float:
    """The largest difference of the last logits over chunks, rows 0 and 2 padded on the left."""
    plain, cache = cache_of(model, kind), cache_of(model, kind)
    mask = torch.ones(3, 0, dtype=torch.long)
    worst = 0.0
    for index, count in enumerate(chunks):
        tokens = prompt(3, count, index)
        mask = torch.cat([mask, torch.ones(3, count, dtype=torch.long)], 1)
        if index == 0:
            mask[0, :4] = mask[2, :2] = 0
        given = {"attention_mask": mask}
        if positions:
            given["position_ids"] = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)[:, -count:]
        used = first if first is not None and index == 0 else call
        wanted = model(tokens, past_key_values=plain, **given).logits
        apart = (wanted - used(tokens, past_key_values=cache, **given).logits)[:, -1].abs().max()
        worst = max(worst, apart.nan_to_num(nan=torch.inf).item())
    return worst


def strict(model: Any, scheme: object) -> Any:
    return torch.compile(model, backend=kvcompile.backend(scheme, inner="eager", strict=True), fullgraph=True)


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_rotation(name: str) -> None:
    family, options = MODELS[name]
    model, number = model_of(family, options), list(MODELS).index(name)
    # Several tokens at once are turned as one is, whatever the angles: one model of each kind of cache has them.
    chunks = (9, 1, 4, 1) if number < 2 else (9, 1, 1)
    assert compare(model, strict(model, LOSSLESS), "static" if number % 2 else "dynamic", chunks=chunks) <= 1e-6


@pytest.mark.parametrize(("prefill", "positions", "kinds"), [
    ("compiled", True, ("static", "dynamic")), ("compiled", False, ("dynamic",)), ("eager", True, ("dynamic",)),
    ("eager", False, ("static",)),
])
def test_windows_with_padded_rows(prefill: str, positions: bool, kinds: tuple[str, ...]) -> None:
    """Blocks and windows begin with a row's first token, whichever positions the model gives to it."""
    model = llama(layers=1)
    options: dict[str, Any] = {"first": model if prefill == "eager" else None, "positions": positions}
    # Several tokens at once after a prompt are another graph, and the same one whoever read the prompt.
    options["chunks"] = (9, *[1] * 4, 4, 1) if prefill == "compiled" else (9, *[1] * 9)
    errors = []
    for kind, scheme in (("static", {**WINDOWED, "k": "dense"}), *((kind, WINDOWED) for kind in kinds)):
        torch._dynamo.reset()
        errors.append(compare(model, strict(model, scheme), kind, **options))
    assert errors == pytest.approx([errors[0]] * len(errors), abs=1e-6)
    assert 1e-4 < errors[0] < 0.02


def test_a_padded_row_is_stored_as_it_is_alone() -> None:
    model, scheme = llama(layers=1), "kivi(group=8,window=8,pre_rope=True)"
    planes = []
    for rows, padding in ((3, 4), (1, 0)):
        torch._dynamo.reset()
        compiled, cache = strict(model, scheme), cache_of(model, "static")
        tokens = prompt(1, 20)
        words = torch.cat([torch.ones(1, padding, dtype=torch.long), tokens], 1).repeat(rows, 1)
        mask = torch.ones_like(words)
        mask[0, :padding] = 0
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
        with torch.no_grad():
            compiled(words, past_key_values=cache, attention_mask=mask, position_ids=positions)
        store = next(iter(cache.layers[0].keys._kv.stores.values()))
        planes.append([plane[:, :1].float() for plane in store.planes[:3]])
    for padded, alone in zip(*planes, strict=True):
        # Whole blocks: 16 of the 20 tokens.
        rows = 16 * padded.shape[3] // 64
        assert torch.allclose(padded[:1, :, :, :rows], alone[:1, :, :, :rows], atol=1e-3)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_generate(implementation: str) -> None:
    model = llama(layers=1)
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, :5] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "num_beams": 2}
    if implementation == "static":
        options["cache_implementation"] = "static"
    expected = model.generate(prompt(), **options)
    model.forward = strict(model.forward, LOSSLESS)
    assert torch.equal(model.generate(prompt(), **options), expected)


@pytest.mark.parametrize(("kind", "more", "reason"), [
    ("dynamic", {}, "come from outside of this graph"),
    ("longrope", {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}, "come from outside" if OLD_TRANSFORMERS else "updated in place"),
])
def test_frequencies_that_follow_the_length_are_refused(kind: str, more: dict[str, Any], reason: str) -> None:
    model = model_of("llama", {**scaling(kind, **more), "num_hidden_layers": 1})
    backend = kvcompile.backend(LOSSLESS, inner="eager")
    assert compare(model, torch.compile(model, backend=backend), "dynamic") <= 1e-6
    report = backend.report()
    assert report.sites == 0 and report.refusals
    assert all(reason in item.reason for item in report.refusals), [item.reason for item in report.refusals]


@pytest.mark.compile
def test_inductor() -> None:
    """Two layers, one that loses nothing and one with a window, in one compilation: what the rewritten graph makes when it runs eagerly."""
    model = llama(layers=2)
    scheme = {"*layers.0*": LOSSLESS, "*": WINDOWED}
    eager, compiled = (
        torch.compile(model, backend=kvcompile.backend(scheme, inner=inner, strict=True), fullgraph=True) for inner in ("eager", "inductor")
    )
    assert compare(eager, compiled, "static", chunks=(9, 1, 1)) <= 1e-5
