"""Calibration: scales of what caches are given, padding left out, whatever the architecture; and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learned_tables import llama_paths
from transformers import DynamicCache

import kvcompile
from kvcompile.errors import BadBatch, BadCalibration, BadScales, NothingToLearn
from kvcompile.extensions.static_scales.measure.calibrate import Calibration
from kvcompile.extensions.static_scales.measure.magnitudes import Magnitudes
from kvcompile.extensions.static_scales.scales import ModelScales, ScaleExtent
from kvcompile.extensions.static_scales.scheme import STATIC
from kvcompile.schemes import Fp8, Int8
from kvcompile.schemes.symmetric import stored_scale
from kvcompile.tools.cli.targets import TargetOptions, resolve
from kvcompile.types import Granularity, Role

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

WORDS = torch.randint(1, 60, (2, 21), generator=torch.Generator().manual_seed(0))


def model_of(name: str, attention: str = "sdpa") -> torch.nn.Module:
    """A tiny model of an architecture, in float32."""
    return resolve(f"hf:{name}", TargetOptions(dtype=torch.float32, attention=attention)).model


def cached(model: Any, words: torch.Tensor, keep: torch.Tensor | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The keys and values [B, K, S, D] of every layer that the model itself writes into its cache."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=words, attention_mask=keep, past_key_values=cache, use_cache=True)
    return [(layer.keys, layer.values) for layer in cache.layers]


def scales_of(scheme: Any) -> dict[str, dict[Role, torch.Tensor]]:
    """The scales of a measured scheme, by path and half."""
    assert isinstance(scheme.scales, ModelScales)
    return {path: {role: site.for_role(role).values for role in Role} for path, site in scheme.scales.sites.items()}


# Heads repeated and not, one projection of all three, rotary and learned positions, ALiBi, softcap with windows, experts.
@pytest.mark.parametrize(("name", "attention"), [
    ("llama", "sdpa"), ("llama", "eager"), ("gpt2", "sdpa"), ("gpt_neox", "eager"), ("bloom", "eager"), ("falcon", "sdpa"),
    ("gemma2", "eager"), ("qwen3_moe", "sdpa"), ("gpt_bigcode", "sdpa"),
])
def test_scales_are_those_of_what_the_model_caches(name: str, attention: str) -> None:
    """Keys as stored, behind RoPE, of the kv heads alone: the largest magnitudes in the model's own cache."""
    model = model_of(name, attention)
    wanted = cached(model, WORDS)
    for extent, dims in ((ScaleExtent.TENSOR, (0, 1, 2, 3)), (ScaleExtent.HEAD, (0, 2, 3))):
        found = scales_of(kvcompile.calibrate(model, [WORDS[:1], WORDS[1:]], "int8", granularity=extent))
        assert len(found) == len(wanted) == 2
        for halves, pair in zip(found.values(), wanted, strict=True):
            for role, tokens in zip(Role, pair, strict=True):
                amax = tokens.abs().amax(dims).reshape(-1)
                assert torch.allclose(halves[role], amax / 127, rtol=1e-5), (name, extent, role)


def test_masked_tokens_do_not_count() -> None:
    model = model_of("llama")
    keep = torch.ones_like(WORDS)
    keep[0, :8] = 0
    batch = {"input_ids": WORDS, "attention_mask": keep}
    loud = {"input_ids": WORDS.where(keep.bool(), torch.tensor(63)), "attention_mask": keep}
    found: list[Calibration] = []
    one, other = (kvcompile.calibrate(model, [each], granularity="head", report=found.append) for each in (batch, loud))
    assert scales_of(one).keys() == scales_of(other).keys() == set(llama_paths(2))
    assert found[0].tokens == int(keep.sum())
    for path, halves in scales_of(one).items():
        assert all(torch.allclose(halves[role], scales_of(other)[path][role], rtol=1e-5) for role in Role)
    for (keys, values), halves in zip(cached(model, WORDS, keep), scales_of(one).values(), strict=True):
        for role, tokens in zip(Role, (keys, values), strict=True):
            kept = tokens.transpose(1, 2)[keep.bool()]
            assert torch.allclose(halves[role], kept.abs().amax((0, 2)) / 127, rtol=1e-5)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_codes_of_the_calibration_data_are_those_of_a_dynamic_scale(scheme: str) -> None:
    model = model_of("llama")
    made = kvcompile.calibrate(model, [WORDS[:1]], scheme)
    plain = {"int8": Int8, "fp8": Fp8}[scheme](granularity=Granularity.TENSOR, scale_dtype=torch.float32)
    for path, pair in zip(llama_paths(2), cached(model, WORDS[:1]), strict=True):
        for role, tokens in zip(Role, pair, strict=True):
            scale = made.for_module(path).scales.for_role(role).values  # type: ignore[union-attr]
            codes, dynamic = plain.encode(tokens)
            assert torch.allclose(dynamic.reshape(-1)[0], scale[0], rtol=1e-5)
            # From the model's own cache, whose last bits are those of another graph.
            exact = stored_scale(tokens.abs().amax().reshape(1), made.qmax, torch.float32)
            assert torch.equal(made.for_module(path).encode(tokens, exact.reshape(1, 1, 1, 1, 1))[0], codes)


def test_a_percentile_clips_its_share_and_a_margin_none() -> None:
    model, found = model_of("llama"), []
    batches, others = [WORDS], [torch.randint(1, 60, (2, 21), generator=torch.Generator().manual_seed(9))]
    for changes in ({}, {"percentile": 99.0}, {"margin": 2.0}, {"margin": 0.5}):
        kvcompile.calibrate(model, batches, granularity="head", validation=others, report=found.append, **changes)
    plain, percentile, wide, narrow = (made.slots for made in found)
    assert all(slot.clipped == 0 for slot in (*plain, *wide))
    assert all(0.001 < slot.clipped <= 0.0101 for slot in percentile)
    assert all(slot.clipped > 0.001 for slot in narrow)
    assert any(slot.clipped_validation for slot in plain), "text that was not seen goes beyond what was"
    for a, b, c in zip(plain, wide, percentile, strict=True):
        assert torch.allclose(2 * a.scales.values, b.scales.values) and (c.scales.values < a.scales.values).all() and a.amax == b.amax
    assert found[0].tokens == WORDS.numel()


def test_a_percentile_is_within_its_bins() -> None:
    tokens = torch.randn(500, 3, 16, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-3, 1.0, 300.0])[:, None]
    found = Magnitudes(counted=True)
    for part in tokens.split(77):
        found.add(part)
    for percentile in (50.0, 99.0, 99.9):
        exact = tokens.abs().transpose(0, 1).flatten(1).kthvalue(round(percentile * 80), 1).values
        head = found.covering(ScaleExtent.HEAD, percentile)
        assert (head >= exact).all() and (head <= exact * (1 + 1 / 64)).all()
    assert torch.equal(found.covering(ScaleExtent.HEAD, 100.0), tokens.abs().amax((0, 2)))


def test_a_head_of_zeros_has_the_scale_of_the_others_and_a_slot_of_zeros_none() -> None:
    found = Magnitudes()
    tokens = torch.ones(5, 2, 4)
    tokens[:, 1] = 0
    found.add(tokens)
    assert found.scales(ScaleExtent.HEAD, 100.0, 1.0, 127.0).values.unique().numel() == 1
    model = model_of("llama")
    with torch.no_grad():
        model.get_submodule("model.layers.1.self_attn.v_proj").weight.zero_()
    with pytest.raises(BadScales, match="other than zeros, in the values of model.layers.1.self_attn"):
        kvcompile.calibrate(model, [WORDS])


def test_nan_is_refused() -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.get_submodule("model.layers.0.self_attn.k_proj").weight[0, 0] = float("nan")
    with pytest.raises(BadScales, match="finite numbers in the keys of model.layers.0.self_attn"):
        kvcompile.calibrate(model, [WORDS])


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_what_is_measured_is_served(scheme: str, granularity: str) -> None:
    """A prompt and steps near the dense model, and nearer than a range that was not measured."""
    model = model_of("llama")
    made = kvcompile.calibrate(model, [WORDS], scheme, granularity=granularity)
    errors = []
    for chosen in (made, {"int8": STATIC[0], "fp8": STATIC[1]}[scheme](amax=1000.0)):
        torch._dynamo.reset()
        served = torch.compile(model, backend=kvcompile.backend(chosen, inner="eager", strict=True))
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            served(input_ids=WORDS[:, :17], past_key_values=cache, use_cache=True)
            steps = [served(input_ids=WORDS[:, at : at + 1], past_key_values=cache, use_cache=True).logits for at in range(17, 21)]
            dense = model(input_ids=WORDS, use_cache=False).logits[:, 17:]
        errors.append(float((torch.cat(steps, 1) - dense).norm() / dense.norm()))
    assert errors[0] < 0.05
    assert errors[0] < errors[1] or scheme == "fp8", "floats of eight bits have a range of their own"


def test_texts_of_many_lengths_are_all_seen() -> None:
    """More lengths than Dynamo compiles versions of a frame: behind that limit it would run the model unobserved."""
    model = model_of("llama")
    whole = [WORDS[:, :length] for length in range(2, 22)]
    found: list[Calibration] = []
    made = kvcompile.calibrate(model, [words[:, :2] for words in whole[:1]] + whole[:-1] + [WORDS], granularity="head", report=found.append)
    assert scales_of(made).keys() == set(llama_paths(2)) and all(slot.clipped == 0 for slot in found[0].slots)
    for halves, pair in zip(scales_of(made).values(), cached(model, WORDS), strict=True):
        for role, tokens in zip(Role, pair, strict=True):
            assert torch.allclose(halves[role], tokens.abs().amax((0, 2, 3)) / 127, rtol=1e-5)


def test_a_batch_that_shows_less_than_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcompile.extensions.static_scales.measure import calibrate

    monkeypatch.setattr(calibrate, "MOST_GRAPHS", 1)
    with pytest.raises(BadBatch, match="a batch that shows all 4 keys and values of the others, found 0 of them"):
        kvcompile.calibrate(model_of("llama"), [WORDS, WORDS[:, :5], WORDS[:, :7]])


def test_the_model_is_as_it_was() -> None:
    model = model_of("llama").train()
    kvcompile.calibrate(model, [WORDS])
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())


def test_what_cannot_be_calibrated_is_refused_with_a_sentence() -> None:
    model = model_of("llama")
    for changes, sentence in (
        ({"scheme": "int4"}, "expects scheme to be int8 or fp8, found 'int4'"), ({"granularity": "token"}, "granularity to be tensor or"),
        ({"percentile": 101}, "percentile to be a number from 50 to 100"), ({"margin": 0}, "margin to be a number from 0.1 to 16"),
        ({"margin": True}, "found True"),
    ):
        with pytest.raises(BadCalibration, match=sentence):
            kvcompile.calibrate(model, [WORDS], **changes)
    for batch, sentence in (
        (torch.zeros(3, dtype=torch.long), "token ids"), ({"input_ids": WORDS, "attention_mask": WORDS[:, :3]}, "an attention_mask of"),
    ):
        with pytest.raises(BadBatch, match=sentence):
            kvcompile.calibrate(model, [batch])
    with pytest.raises(NothingToLearn):
        kvcompile.calibrate(model, [])
    masked = {"input_ids": WORDS, "attention_mask": torch.zeros_like(WORDS)}
    with pytest.raises(BadScales, match="tokens that count"):
        kvcompile.calibrate(model, [masked])
