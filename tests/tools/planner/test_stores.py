"""Planned bytes are those that a compiled model's stores hold: schemes, batches, lengths, windows, latents, shared caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from e2e_models import llama
from transformers import StaticCache

import kvcompile
from kvcompile.passes.plan.policy import policy_of
from kvcompile.tools.cli.architectures import build
from kvcompile.tools.planner.model import traced
from kvcompile.tools.planner.stores import BATCH, TOKENS, StoragePurpose, Stores, page_symbol

SCHEMES = (
    "dense", "int8", "int4(group=16)", "nf4", "fp8", "kivi", "kivi(bits=4,window=64)", "squat", "certified",
    {"k": "int8", "v": "int4"},
)


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


def inputs(model: Any, rows: int, prompt: int, capacity: int) -> dict[str, Any]:
    """A prompt with an empty static cache."""
    config = model.config.get_text_config(decoder=True)
    ids = torch.randint(3, config.vocab_size, (rows, prompt), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "past_key_values": StaticCache(config=config, max_cache_len=capacity), "use_cache": True}


@torch.no_grad()
def held(model: Any, scheme: object, rows: int, prompt: int, tokens: int, capacity: int) -> tuple[int, int]:
    """Bytes of a compiled model's stores at ``tokens`` tokens, and of all cache tensors that stay dense."""
    torch.compiler.reset()
    backend = kvcompile.backend(scheme, inner="eager", validate=False)
    compiled, given = torch.compile(model, backend=backend), inputs(model, rows, prompt, capacity)
    compiled(**given)
    for _ in range(prompt, tokens):
        compiled(input_ids=given["input_ids"][:, :1].contiguous(), past_key_values=given["past_key_values"], use_cache=True)
    report = backend.report()
    # The pipeline's own word and the memory agree before the plan is held against them.
    assert report.announced == report.allocated or "smartkv" in str(scheme)
    return report.allocated, report.dense


def plan(model: Any, scheme: object, prompt: int, capacity: int, exact: bool) -> Stores:
    """The stores that the planner sees, for caches of that capacity, or (``exact``) as long as what is asked for."""
    with torch.no_grad():
        seen = traced("a test", model, inputs(model, 1, prompt, capacity), capacity if exact else None)
    return seen.stores(policy_of(scheme))


# One scheme of each kind of plane; the formula of all of them is compared below.
COMPILED = [scheme for scheme in SCHEMES if scheme not in ("int8", "nf4", "fp8", "kivi")]


@pytest.mark.parametrize("scheme", COMPILED, ids=str)
def test_planned_bytes_are_those_of_the_stores(scheme: object) -> None:
    model = llama(head_dim=64)
    planned = plan(model, scheme, 9, 400, exact=False)
    for rows, tokens in ((1, 11), (3, 270)):
        allocated, dense = held(model, scheme, rows, tokens - 2, tokens, 400)
        assert planned.device_bytes(rows, tokens) + planned.host_bytes(rows, tokens) == allocated
        assert planned.dense_bytes(rows, tokens) == dense
    # A cache as long as the sequence has no room behind it.
    exactly = plan(model, scheme, 9, 400, exact=True)
    allocated, _ = held(model, scheme, 1, 300, 300, 300)
    assert exactly.device_bytes(1, 300) == allocated


@pytest.fixture(scope="module")
def sites() -> Any:
    """A model's sites as the planner sees them."""
    model = llama(head_dim=64)
    with torch.no_grad():
        return traced("a test", model, inputs(model, 1, 9, 400), 400)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_formula_is_what_is_counted(scheme: object, sites: Any) -> None:
    stores = sites.stores(policy_of(scheme))
    for rows, tokens in ((1, 64), (5, 1000), (16, 4097)):
        at = {BATCH: rows, TOKENS: tokens, page_symbol(None): stores.stored[0].pages(tokens)}
        assert stores.formula.subs(at) == stores.device_bytes(rows, tokens) + stores.host_bytes(rows, tokens)
        assert sum(stores.shares(rows, tokens).values()) == stores.formula.subs(at)


@pytest.mark.parametrize("name", [
    "gemma3_text", "deepseek_v3", "gemma3n_text", "mimo_v2_flash", "qwen3_next",
])
def test_architectures(name: str) -> None:
    """Windows, latents, caches that layers share, keys wider than values, layers without a cache."""
    try:
        subject = build(name, "eager" if name == "mimo_v2_flash" else "sdpa")
    except KeyError:
        pytest.skip(f"this transformers has no {name}")
    planned = plan(subject.model, "int8", 40, 90, exact=False)
    allocated, _ = held(subject.model, "int8", 2, 40, 43, 90)
    compressed = sum(count for (share, _), count in planned.shares(2, 43).items() if share is not StoragePurpose.LEFT)
    assert compressed == allocated > 0


def listener(which: str, sounds: int) -> tuple[Any, Any]:
    """A small decoder with cross-attention, and the arguments of a prompt of ``count`` tokens in ``rows`` rows, with new caches."""
    torch.manual_seed(0)
    if which == "whisper":
        config = transformers.WhisperConfig(
            vocab_size=64, d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=sounds, max_target_positions=512, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
        )
        model: Any = transformers.WhisperForConditionalGeneration(config).eval().model.decoder
    else:
        config = transformers.T5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
        model = transformers.T5ForConditionalGeneration(config).eval().decoder

    def given(rows: int, count: int, static: bool) -> dict[str, Any]:
        own, cross = (
            [StaticCache(config=model.config, max_cache_len=length) for length in (400, sounds)] if static
            else [transformers.DynamicCache(), transformers.DynamicCache()]
        )
        return {
            "input_ids": torch.randint(3, 64, (rows, count)), "encoder_hidden_states": torch.randn(rows, sounds, 64),
            "past_key_values": transformers.EncoderDecoderCache(own, cross), "use_cache": True,
        }

    return model, given


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize(("which", "sounds", "scheme"), [("whisper", 300, "int8"), ("t5", 20, "int8"), ("t5", 9, "int4(group=16)")])
@torch.no_grad()
def test_caches_of_cross_attention_are_as_long_as_what_the_encoder_read(which: str, sounds: int, scheme: str, static: bool) -> None:
    model, given = listener(which, sounds)
    stores = traced("a test", model, given(1, 9, static)).stores(policy_of(scheme), 270)
    for rows, tokens in ((1, 11), (3, 270)):
        torch.compiler.reset()
        backend = kvcompile.backend(scheme, inner="eager", validate=False)
        compiled, prompt = torch.compile(model, backend=backend), given(rows, tokens - 1, static)
        compiled(**prompt)
        compiled(**{**prompt, "input_ids": prompt["input_ids"][:, :1].contiguous()})
        report = backend.report()
        assert not report.refusals
        assert stores.device_bytes(rows, tokens) == report.announced == report.allocated
        assert stores.dense_bytes(rows, tokens) == report.dense
        at = {BATCH: rows, TOKENS: tokens, **{page_symbol(item.end): item.pages(tokens) for item in stores.stored if item.once is None}}
        assert stores.formula.subs(at) == report.allocated
    cross = [item for item in stores.stored if item.once is not None]
    assert [item.once for item in cross] == [sounds] * 4 and not any(item.bytes_per_token(5) for item in cross)


def test_a_budget_is_announced() -> None:
    stores = plan(llama(head_dim=64), "smartkv(budget=0.5)", 9, 400, exact=True)
    values = 3 * 1000 * sum(item.slot.heads * item.slot.head_dim for item in stores.stored)
    assert stores.device_bytes(3, 1000) == values
