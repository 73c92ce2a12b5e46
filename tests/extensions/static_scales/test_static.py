"""Static scales: codes of given scales that saturate, hold NaN themselves, are data of each layer, and are what every kernel reads."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from e2e_layers import cache_of, llama
from learned_tables import llama_paths
from static_scales import random_scales, random_slot

import kvcompile
from kvcompile.errors import BadScales, ScalesMissing
from kvcompile.extensions.static_scales.scales import ModelScales, Scales, SiteScales
from kvcompile.extensions.static_scales.scheme import STATIC, Calibrated
from kvcompile.lowering.ops.append_window import append_window_body
from kvcompile.lowering.ops.gather import gather_body
from kvcompile.lowering.ops.operations import append_body, decodable
from kvcompile.lowering.ops.sliding import unroll_body
from kvcompile.schemes import Fp8, Int8, parse
from kvcompile.schemes.symmetric import stored_scale
from kvcompile.testing.bounds import bound_of
from kvcompile.testing.samples import normal
from kvcompile.types import Granularity, Role, SlotSpec

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

each_kind = pytest.mark.parametrize("kind", STATIC, ids=lambda kind: kind.name)
SLOT = SlotSpec(2, 64, torch.float32, Role.KEY)


def site(kind: type[Calibrated], scales: Scales) -> Calibrated:
    """The scheme of one attention."""
    return kind(measured=True, scales=SiteScales(scales, scales))


def plane(scales: Scales) -> torch.Tensor:
    """Scales as ``encode`` takes them."""
    return scales.values[None, None, :, None, None]


@each_kind
def test_scales_of_the_data_give_the_codes_of_the_dynamic_scheme(kind: type[Calibrated]) -> None:
    """One scale that covers all that is written is what a dynamic scheme with one scale a write makes, bit for bit."""
    x = normal(1, 2, 50, 64, seed=4)
    plain = {"int8": Int8, "fp8": Fp8}[kind.dynamic](granularity=Granularity.TENSOR, scale_dtype=torch.float32)
    codes, scale = plain.encode(x)
    made = Scales(stored_scale(x.abs().amax().reshape(1), kind.qmax, torch.float32))
    assert torch.equal(scale.unique(), made.values)
    found = site(kind, made).encode(x, plane(made))
    assert torch.equal(found[0], codes)
    assert torch.equal(site(kind, made).decode((*found, plane(made)), SLOT), plain.decode((codes, scale), SLOT))


@each_kind
def test_what_lies_beyond_the_range_saturates(kind: type[Calibrated]) -> None:
    scales = random_slot(2, 1, qmax=kind.qmax)
    most = scales.values * kind.qmax
    x = torch.stack([most * 1.5, -most * 7, most * 1e30, most], -1)[None, :, :, None].expand(1, 2, 4, 64)
    found = site(kind, scales).decode((*site(kind, scales).encode(x, plane(scales)), plane(scales)), SLOT)
    wanted = torch.stack([most, -most, most, most], -1)[None, :, :, None].expand(1, 2, 4, 64)
    assert torch.equal(found, wanted)


@each_kind
def test_the_bound_says_what_is_clipped(kind: type[Calibrated]) -> None:
    x = normal(3, 2, 300, 64, seed=11)
    for amax in (0.5, 3.0, 200.0):
        scales = random_slot(2, 5, amax, kind.qmax)
        scheme = site(kind, scales)
        error = (scheme.decode((*scheme.encode(x, plane(scales)), plane(scales)), SLOT).double() - x.double()).abs()
        bound = bound_of(scheme, x, SLOT)
        assert (error <= bound).all() and (error > 0.3 * bound).any()
    assert kind(measured=True).bound(SLOT) is None, "a model's scales are many"
    assert site(kind, scales).radius(SLOT) is None, "what is stored does not tell what was clipped"


@each_kind
def test_nan_and_inf_are_nan_and_no_other_code_is(kind: type[Calibrated]) -> None:
    words = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(kind().word_dtype)
    values = kind().unpack(words, 0)
    assert values.isnan().nonzero().flatten().tolist() == ([128] if kind().word_dtype == torch.int8 else [127, 255])
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 3e38, 0.0]).expand(1, 2, 1, 5)
    assert kind().unpack(kind().encode(x)[0], 0)[0, 0, 0].isnan().tolist() == [True, True, True, False, False]


def test_a_token_stores_its_codes_and_nothing_else() -> None:
    slot = SlotSpec(8, 128, torch.bfloat16, Role.KEY)
    for kind in STATIC:
        layout = kind().layout(slot)
        assert kind().bits_per_value(slot) == 8.0 and layout.bytes_per_token(8) == 8 * 128
        assert layout.bytes_per_head == 4 and layout.encoded == 1 and not layout.ordered and kind().position_independent


def test_a_class_that_derives_encodes_by_itself() -> None:
    """What a subclass encodes is its own: no kernel writes codes in its place."""

    class Own(STATIC[0]):  # type: ignore[name-defined,misc]
        pass

    assert STATIC[0]().static(64) is not None and Own().static(64) is None


def test_every_write_path_takes_the_same_scales() -> None:
    """``append``, the windowed form beside another scheme, the copy of a sliding cache, and the gather of a paged one."""
    scales, x = random_slot(2, 3), normal(1, 2, 70, 64)
    scheme = site(STATIC[0], scales)
    text, given = scheme.spec(), plane(scales)
    (wanted,) = scheme.encode(x, given)
    planes = [scheme.empty(spec, SLOT, 2, 1) for spec in scheme.layout(SLOT).planes]
    append_body(x, planes[:1], torch.arange(70).unsqueeze(0), text, None, [given])
    windowed = [scheme.empty(spec, SLOT, 2, 1) for spec in scheme.layout(SLOT).windowed(SLOT, 8).planes]
    append_window_body(x, windowed, torch.arange(70).unsqueeze(0), None, text, [given])
    for found in (planes, windowed):
        assert torch.equal(found[0].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :70], wanted)
        assert torch.equal(found[1], given)
    (copied,) = unroll_body(x, planes[:1], torch.tensor([70]), 3, 70, text, [given])
    assert torch.equal(copied[0], torch.cat([wanted[:, :, -3:], wanted], 2))
    (gathered,) = gather_body([planes[0]], torch.tensor([[3, 69, 400]]), 64, text)
    assert torch.equal(gathered[0, :, :, :2], wanted[:, :, [3, 69]])
    assert scheme.decode(decodable(scheme, [gathered, given], SLOT, slice(None)), SLOT)[:, :, 2].isnan().all()


def test_a_measured_scheme_never_falls_back_on_a_guess() -> None:
    text = random_scales(["a"]).spec()
    assert text == "int8-static(amax=32.0,measured=True)"
    unbound = parse(text)
    for wrong in (
        lambda: unbound.encode(normal(1, 2, 3, 32)), lambda: unbound.constants(SLOT), lambda: unbound.for_module("a"),
        lambda: random_scales(["a"]).for_module("b"), lambda: random_scales(["a"]).constants(SLOT),
    ):
        with pytest.raises(ScalesMissing, match="expected static scales for the attention at"):
            wrong()


def test_paths_that_begin_further_out_or_name_a_layer_are_the_same_attention() -> None:
    scales = random_scales(["model.layers.0.self_attn", "model.layers.10.self_attn"]).scales
    assert isinstance(scales, ModelScales)
    assert scales.for_module("layers.0.self_attn") == scales.for_module("model.layers.0.self_attn") == scales.for_module(
        "lm.model.layers.0.self_attn"
    )
    layers = ModelScales({f"layers.{at}": scales.sites["model.layers.0.self_attn"] for at in (1, 11)}, "")
    assert layers.for_module("transformer.layers.1.attention") is layers.sites["layers.1"]
    for wrong in ("0.self_attn_", "self_attn", "", "layers.100.self_attn"):
        for known in (scales, layers):
            with pytest.raises(ScalesMissing):
                known.for_module(wrong)


@pytest.mark.parametrize("values", [
    torch.tensor([0.0]), torch.tensor([float("nan")]), torch.tensor([-1.0]), torch.tensor([]), torch.ones(2, 2),
    torch.ones(1, dtype=torch.float64),
], ids=["zero", "nan", "negative", "none", "shape", "dtype"])
def test_scales_that_are_none_are_refused(values: torch.Tensor) -> None:
    with pytest.raises(BadScales):
        Scales(values)


def test_scales_compare_by_what_they_hold() -> None:
    assert random_slot(2, 0) == random_slot(2, 0) != random_slot(2, 1) and hash(random_slot(2, 0)) == hash(random_slot(2, 0))
    assert random_scales(["a"]) == random_scales(["a"]) != random_scales(["a"], seed=1)


def test_without_calibration_the_report_warns() -> None:
    model, owner = llama(head_dim=32), kvcompile.backend("fp8-static", inner="eager", strict=True)
    with torch.no_grad():
        torch.compile(model, backend=owner)(torch.ones(1, 3, dtype=torch.long), past_key_values=cache_of(model, "static"))
    assert "scales were not calibrated: one covers magnitudes up to 448" in str(owner.report())
    assert STATIC[1]().guessed() == 1.0, "what vLLM does with a checkpoint without scales"


# Every pair of two of the three; each takes 10 to 70 s.
@pytest.mark.parametrize(("inner", "name", "kind"), [
    ("eager", "int8", "static"), ("eager", "fp8", "dynamic"), pytest.param("inductor", "int8", "dynamic", marks=pytest.mark.compile),
    pytest.param("inductor", "fp8", "static", marks=pytest.mark.compile),
])
def test_each_layer_has_its_own_scales(kind: str, inner: str, name: str) -> None:
    """A prompt, pieces, steps, a second request, left padding in static caches: near the eager definition, in the announced bytes."""
    scheme, model = random_scales(llama_paths(2), name, amax=6.0), llama(head_dim=32)
    owner = kvcompile.backend(scheme, inner=inner, strict=True)
    compiled, plain = torch.compile(model, backend=owner), llama(head_dim=32)
    defined = torch.compile(plain, backend=kvcompile.backend(scheme, inner="eager", strict=True))
    for request in range(2):
        words = torch.randint(1, 64, (2, 75), generator=torch.Generator().manual_seed(request))
        keep = torch.ones(2, 75, dtype=torch.long)
        keep[1, :9] = 0
        caches = [cache_of(model, kind, 128) for _ in range(2)]
        found = []
        for run, cache in zip((compiled, defined), caches, strict=True):
            logits, start = [], 0
            for count in (70, 1, 3, 1):
                part = slice(start, start + count)
                with torch.no_grad():
                    mask = keep[:, : part.stop] if kind == "static" else None
                    logits.append(run(words[:, part], attention_mask=mask, past_key_values=cache).logits)
                start += count
            found.append(torch.cat(logits, 1)[:, 9:])
        with torch.no_grad():
            dense = plain(words, attention_mask=keep if kind == "static" else None).logits[:, 9:]
        assert torch.allclose(found[0], found[1], atol=2e-4)
        assert 0 < (found[0] - dense).norm() < 0.2 * dense.norm()
    assert isinstance(scheme.scales, ModelScales)
    stores = [store for state in owner.memory.live for store in state.stores.values()]  # type: ignore[attr-defined]
    assert {store.spec.scheme.scales for store in stores} == set(scheme.scales.sites.values())
    for store in stores:
        wanted = store.spec.scheme.scales_of(store.spec.slot)  # type: ignore[attr-defined]
        assert torch.equal(store.plane("scales"), plane(wanted)) and store.nbytes == store.announced(75)
        copied = store.select_rows(torch.tensor([1, 0]))
        store.clear()
        assert torch.equal(store.plane("scales"), copied.plane("scales"))


@pytest.mark.compile
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_generate_writes_what_the_eager_definition_writes(name: str) -> None:
    """Left padding, a growing and a static cache, and a second request, through Inductor."""
    model, plain = llama(head_dim=32), llama(head_dim=32)
    scheme = random_scales(llama_paths(2), name, amax=6.0)
    model.forward = torch.compile(model.forward, backend=kvcompile.backend(scheme))
    plain.forward = torch.compile(plain.forward, backend=kvcompile.backend(scheme, inner="eager"))
    for seed, options in enumerate(({}, {"cache_implementation": "static"})):
        words = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(seed))
        keep = torch.ones_like(words)
        keep[1, :5] = 0
        found, wanted = (
            each.generate(words, attention_mask=keep, max_new_tokens=10, do_sample=False, **options) for each in (model, plain)
        )
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("policy", ["kv", "windowed"])
def test_beside_other_schemes(policy: str) -> None:
    scheme, model = random_scales(llama_paths(2), amax=6.0), llama(head_dim=32)
    pair = {"kv": {"k": scheme, "v": "int4"}, "windowed": {"k": "kivi", "v": scheme}}[policy]
    compiled, plain = torch.compile(model, backend=kvcompile.backend(pair, inner="eager", strict=True)), llama(head_dim=32)
    caches = [cache_of(model, "static", 128) for _ in range(2)]
    for count in (70, 1, 3):
        words = torch.randint(1, 64, (2, count), generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            found, wanted = (run(words, past_key_values=cache).logits for run, cache in zip((compiled, plain), caches, strict=True))
        assert (found - wanted).norm() <= 0.4 * wanted.norm()


@pytest.mark.parametrize("form", ["paged", "sliding"])
def test_in_every_form_of_cache(form: str) -> None:
    """Scales that are given serve as the same ones guessed do, through pools and windows too; others are used as well."""
    import test_paged
    import test_sliding

    def error(scheme: Calibrated) -> float:
        torch._dynamo.reset()
        owner = kvcompile.backend(scheme, inner="eager", strict=True)
        if form == "paged":
            return test_paged.BY_NAME["blocks-first"].error(owner, test_paged.BRIEF, dim=32)
        return test_sliding.BY_NAME["roll-and-put"].error(owner, chunks=test_sliding.CHUNKS)

    for kind in STATIC:
        wanted = error(kind())
        assert error(site(kind, Scales(kind().guessed()))) == wanted < 0.2
        assert error(site(kind, Scales(torch.tensor([1e-3])))) > wanted, "clipped to next to nothing"


def test_a_latent_has_no_measured_scales() -> None:
    """Calibration sees keys and values as attention takes them, and a latent is stored in their place."""
    measured = site(STATIC[0], random_slot(2, 0))
    with pytest.raises(kvcompile.KvcompileError, match="made from a cached latent"):
        measured.check_pair(measured, measured, True, "a")
    dataclasses.replace(measured, measured=False, scales=None).check_pair(measured, measured, True, "a")
