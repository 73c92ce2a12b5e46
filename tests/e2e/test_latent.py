"""Attention over cached latents: hand-written modules and transformers models, rewritten and right, or refused for a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from e2e_models import Case, cache_of, inputs, prompt
from latent_models import LATENT_CASES, RANK, ROTARY

import kvcompile
from kvcompile.types import PAGE

REWRITTEN = [case for case in LATENT_CASES if not case.refused]
REFUSED = [case for case in LATENT_CASES if case.refused]


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


def held(tensor: torch.Tensor) -> int:
    """Bytes that the caller's tensor itself keeps alive."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("case", REWRITTEN, ids=str)
def test_dense_equals_the_module(case: Case) -> None:
    backend = kvcompile.backend("dense", inner="eager", strict=True)
    assert case.error(backend) <= 2e-6
    assert backend.report().sites and not backend.report().refusals


@pytest.mark.parametrize("name", ["latent-two-buffers", "latent-one-buffer", "latent-two-products", "latent-grown"])
def test_one_row(name: str) -> None:
    case = next(case for case in REWRITTEN if case.name == name)
    backend = kvcompile.backend("dense", inner="eager", strict=True)
    assert case.error(backend, batch=1) <= 2e-6
    assert backend.report().sites


@pytest.mark.parametrize("name", ["latent-two-buffers", "latent-one-buffer", "latent-grown"])
def test_bfloat16(name: str) -> None:
    case = next(case for case in REWRITTEN if case.name == name)
    assert case.error(kvcompile.backend("dense", inner="eager", strict=True), dtype=torch.bfloat16) <= 2e-2


@pytest.mark.parametrize(("name", "scheme"), [
    *(("latent-two-buffers", scheme) for scheme in ("int8", "fp8", "int4(group=8)", "kivi(bits=4,group=8,window=8)")),
    ("latent-one-buffer", "int8"), ("latent-two-products", "int8"), ("latent-grown", "int8"),
    ("latent-grown", "kivi(bits=4,group=8,window=8)"), ("latent-rolled", "int8"),
])
def test_schemes_are_near_the_module(name: str, scheme: str) -> None:
    case = next(case for case in REWRITTEN if case.name == name)
    bound = {"int8": 0.02, "fp8": 0.06}.get(scheme, 0.2)
    assert 0 < case.error(kvcompile.backend(scheme, inner="eager", strict=True), chunks=(7, *[1] * 8, 4, 1)) <= bound


def test_inductor() -> None:
    """One store read as keys and as values; two stores read as one key are in the acceptance run's slice."""
    case = next(case for case in REWRITTEN if case.name == "latent-one-buffer")
    backend = kvcompile.backend("dense", strict=True)
    assert case.error(backend, chunks=(7, 1, 1, 1)) <= 2e-6
    assert backend.report().sites


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused_for_its_reason_and_right(case: Case) -> None:
    backend = kvcompile.backend("int4", inner="eager")
    assert case.error(backend) == 0.0
    report = backend.report()
    assert report.sites == 0 and report.allocated == 0
    assert any(case.refused in item.reason for item in report.refusals), [str(item) for item in report.refusals]


def test_the_latent_is_stored_once() -> None:
    """Announced and allocated: codes and a scale for the latent and for the rotary part, nothing for any head."""
    backend = kvcompile.backend("int8", inner="eager", strict=True)
    module = LATENT_CASES[0].make()
    given = inputs(module, (7, 1))
    with torch.no_grad():
        LATENT_CASES[0].drive(module, torch.compile(module, backend=backend, fullgraph=True), given)
    report = backend.report()
    pages = -(-96 // PAGE)
    assert report.allocated == report.announced == 2 * pages * PAGE * (RANK + 2 + ROTARY + 2)
    assert report.dense == 2 * 8 * (RANK + ROTARY) * 4
    site = report.graphs[-1].sites[0]
    assert site.bytes_before == 2 * 96 * (RANK + ROTARY) * 4 and site.heads == f"4/1 x {RANK}+{ROTARY}"
    assert held(module.latents) == held(module.ropes) == 4


def test_what_the_author_absorbed_is_one_store() -> None:
    backend = kvcompile.backend("int8", inner="eager", strict=True)
    case = next(case for case in LATENT_CASES if case.name == "latent-one-buffer-absorbed")
    case.error(backend)
    report = backend.report()
    assert report.graphs[-1].sites[0].bytes_before == 2 * 96 * (RANK + ROTARY) * 4


def test_a_scheme_that_does_not_fit_the_rotary_part_refuses_the_site() -> None:
    backend = kvcompile.backend("int4(group=16)", inner="eager")
    assert LATENT_CASES[0].error(backend) == 0.0
    assert all("group" in item.reason and item.stage.value == "plan" for item in backend.report().refusals)
    assert backend.report().refusals


# --- transformers -----------------------------------------------------------------------------------------


def deepseek(attention: str = "sdpa", **changes: Any) -> Any:
    """A tiny random model with multi-head latent attention, weights large enough that attention matters."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    sizes = dict(
        vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, n_shared_experts=1,
        first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=24, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20,
        initializer_range=0.2, attn_implementation=attention, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**sizes, **changes})).eval()


@torch.no_grad()
def compare(model: Any, compiled: Any, kind: str, rows: int, steps: int = 16) -> tuple[list[float], Any]:
    """Prefill and decode, left-padded where there are several rows: differences of the last logits, and the cache."""
    plain, cache = cache_of(model, kind), cache_of(model, kind)
    mask = torch.ones(rows, 0, dtype=torch.long)
    worst = []
    for index, count in enumerate((9, *[1] * steps)):
        tokens = prompt(rows, count, index)
        mask = torch.cat([mask, torch.ones(rows, count, dtype=torch.long)], 1)
        if rows > 1 and index == 0:
            mask[0, :4] = 0
        given = {"attention_mask": mask} if rows > 1 else {}
        expected, found = (call(tokens, past_key_values=past, **given).logits for call, past in ((model, plain), (compiled, cache)))
        worst.append((expected - found)[:, -1].abs().max().item() / expected.abs().max().item())
    return worst, cache


@pytest.mark.parametrize(("kind", "attention", "rows"), [
    ("static", "sdpa", 3), ("static", "eager", 1), ("dynamic", "sdpa", 1), ("dynamic", "eager", 3),
])
def test_logits(kind: str, attention: str, rows: int) -> None:
    model, backend = deepseek(attention), kvcompile.backend("dense", inner="eager", strict=True)
    worst, _ = compare(model, torch.compile(model, backend=backend, fullgraph=True), kind, rows)
    assert max(worst) <= 2e-6
    assert backend.report().sites == len(backend.graphs) and len(backend.graphs) <= 3


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_compressed_logits(kind: str) -> None:
    model, backend = deepseek(), kvcompile.backend("int8", inner="eager", strict=True)
    worst, cache = compare(model, torch.compile(model, backend=backend, fullgraph=True), kind, 3)
    assert worst[0] <= 2e-6 and 0 < max(worst) <= 0.05
    report = backend.report()
    assert report.allocated == report.announced
    layer = cache.layers[0]
    assert layer.keys._kv.stores[()].spec.slot.head_dim == 32 and layer.values._kv.stores[()].spec.slot.head_dim == 16


def test_a_prompt_read_by_the_model_itself_is_adopted() -> None:
    model = deepseek()
    backend = kvcompile.backend("dense", inner="eager", strict=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    plain, cache = cache_of(model, "static"), cache_of(model, "static")
    with torch.no_grad():
        for past in (plain, cache):
            model(prompt(3, 9), past_key_values=past)
        for index in range(3):
            tokens = prompt(3, 1 + 3 * (index == 1), index)
            expected, found = model(tokens, past_key_values=plain).logits, compiled(tokens, past_key_values=cache).logits
            assert torch.allclose(expected, found, atol=2e-6 * expected.abs().max().item())
    assert held(cache.layers[0].keys) == 4
