"""Bad input: every way to go wrong has an error of its own that says what to do, or leaves the model dense and right."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from e2e_models import CASES, Attention, Probed, cache_of, inputs, llama, prompt, visible
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F

import kvcompile
from kvcompile import errors
from kvcompile.passes.match.sites import Stage

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


# --- before anything is compiled ------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "error", "says"), [
    ("int5", errors.UnknownScheme, "did you mean"),
    ("int4(bits=5)", errors.UnknownOption, "bits"),
    ("int4(group=33)", errors.BadOption, "power of two"),
    ("int4(group=many)", errors.BadOption, "group"),
    ("int8(granularity=row)", errors.BadOption, "granularity"),
    ("int8(scale_dtype=int32)", errors.BadOption, "float16"),
    ({}, errors.BadPolicy, "at least one"),
    (7, errors.BadPolicy, "globs"),
    ({"*": "int3"}, errors.UnknownScheme, "int3"),
])
def test_a_wrong_scheme(scheme: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        kvcompile.backend(scheme)
    assert issubclass(error, errors.SchemeError)


@pytest.mark.parametrize("former", errors.FORMER)
def test_an_error_under_its_former_name(former: str) -> None:
    with pytest.warns(DeprecationWarning, match=errors.FORMER[former]):
        assert getattr(errors, former) is getattr(errors, errors.FORMER[former])
    with pytest.raises(AttributeError, match="no_such_error"):
        errors.no_such_error  # noqa: B018


def test_a_wrong_inner_compiler() -> None:
    with pytest.raises(errors.BadSetting, match="inductor"):
        kvcompile.backend("int8", inner="gcc")


def test_a_group_that_does_not_divide_the_head_dim() -> None:
    backend = kvcompile.backend("int4(group=64)", inner="eager")
    module = BY_NAME["additive"].make(dim=16)
    plain = copy.deepcopy(module)
    given = inputs(module, (5, 1))
    with torch.no_grad():
        found = BY_NAME["additive"].drive(module, torch.compile(module, backend=backend), given)
        expected = BY_NAME["additive"].drive(plain, plain, given)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    refusal = backend.report().refusals[0]
    assert refusal.stage is Stage.PLAN and "group" in refusal.reason and "16" in refusal.reason


# --- refused: dense and right ---------------------------------------------------------------------------


def test_strict_raises_with_every_refusal() -> None:
    module = BY_NAME["probed"].make()
    compiled = torch.compile(module, backend=kvcompile.backend("int8", inner="eager", strict=True))
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="also read by") as caught:
        compiled(inputs(module)[0], torch.arange(7))
    assert isinstance(caught.value.__cause__ or caught.value.inner_exception, errors.SiteRefused)


def test_a_dtype_that_no_scheme_holds() -> None:
    model, backend = llama(layers=1).double(), kvcompile.backend("int8", inner="eager")
    compiled, cache, plain = torch.compile(model, backend=backend), cache_of(model, "static"), cache_of(model, "static")
    with torch.no_grad():
        for index, count in enumerate((5, 1, 1)):
            words = prompt(3, count, index)
            found = compiled(words, past_key_values=cache).logits
            assert torch.allclose(found, model(words, past_key_values=plain).logits, atol=1e-12)
    assert all("float64" in item.reason and "float32" in item.reason for item in backend.report().refusals)


def test_gradients_are_on() -> None:
    model, backend = llama(layers=1), kvcompile.backend("int8", inner="eager")
    torch.compile(model, backend=backend)(prompt(), past_key_values=cache_of(model, "dynamic")).logits.sum().backward()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0
    assert "gradients" in backend.report().refusals[0].reason and "no_grad" in backend.report().refusals[0].advice


def test_gradients_on_a_compressed_cache() -> None:
    model, backend = llama(layers=1), kvcompile.backend("int8", inner="eager")
    compiled, cache = torch.compile(model, backend=backend), cache_of(model, "static")
    with torch.no_grad():
        compiled(prompt(), past_key_values=cache)
        compiled(prompt(3, 1), past_key_values=cache)
    # The program runs, on the dense tensor of what was compressed.
    assert compiled(prompt(3, 1), past_key_values=cache).logits.requires_grad
    assert type(cache.layers[0].keys) is torch.Tensor
    assert "gradients" in backend.report().refusals[-1].reason


def test_a_policy_without_the_layer() -> None:
    model, backend = llama(), kvcompile.backend({"model.layers.0.*": "int8"}, inner="eager")
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        compiled(prompt(), past_key_values=cache_of(model, "dynamic"))
    report = backend.report()
    assert report.sites == 1
    assert "model.layers.1" in report.refusals[0].reason


# --- a live cache ---------------------------------------------------------------------------------------


def test_a_live_cache_cannot_change_its_scheme() -> None:
    model, cache = llama(layers=1), None
    cache = cache_of(model, "dynamic")
    with torch.no_grad():
        torch.compile(model, backend=kvcompile.backend("int8", inner="eager"))(prompt(), past_key_values=cache)
        torch._dynamo.reset()
        other = torch.compile(model, backend=kvcompile.backend("fp8", inner="eager", strict=True))
        with pytest.raises(errors.SchemeChanged, match=r"fp8.*int8"):
            other(prompt(3, 1), past_key_values=cache)


def test_keys_and_values_of_different_lengths() -> None:
    case = BY_NAME["concatenated"]
    module = case.make()
    compiled = torch.compile(module, backend=kvcompile.backend("int8", inner="eager"))
    x = inputs(module, (5, 1, 1, 1))
    with torch.no_grad():
        past = None
        for chunk in x[:3]:
            _, past = compiled(chunk, past)
        # The model itself would fail too, but by a shape that explains nothing.
        with pytest.raises((errors.LengthsDiffer, RuntimeError)):
            compiled(x[3], (past[0][:, :, :4], past[1]))


class TwoPositions(Attention):
    """Keys and values are written where the caller says, each at its own place."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(self.batch, self.kv, self.capacity, self.dim))

    def forward(self, x: torch.Tensor, k_pos: torch.Tensor, v_pos: torch.Tensor) -> torch.Tensor:
        q, k, v = (item.transpose(1, 2) for item in self.project(x))
        keys, values = self.k_cache.index_copy_(2, k_pos, k), self.v_cache.index_copy_(2, v_pos, v)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(k_pos, self.capacity)))


def test_buffers_written_at_different_positions() -> None:
    module = TwoPositions().eval()
    compiled = torch.compile(module, backend=kvcompile.backend("int8", inner="eager", strict=True))
    x = inputs(module, (4, 1))
    with torch.no_grad():
        compiled(x[0], torch.arange(4), torch.arange(4))
        with pytest.raises(errors.LengthsDiffer, match="4 keys and 9 values"):
            compiled(x[1], torch.tensor([4]), torch.tensor([9]))


@pytest.mark.parametrize("first", [True, False], ids=["first write", "later write"])
def test_positions_outside_the_cache(first: bool) -> None:
    module = BY_NAME["index-copy-attribute"].make(capacity=16)
    compiled = torch.compile(module, backend=kvcompile.backend("int8", inner="eager"))
    x = inputs(module, (4, 4))
    with torch.no_grad():
        if not first:
            compiled(x[0], torch.arange(4))
        with pytest.raises(errors.PositionsUnknown, match=r"14\.\.17"):
            compiled(x[1], torch.arange(14, 18))


def test_a_full_static_cache() -> None:
    model = llama(layers=1)
    compiled, cache = torch.compile(model, backend=kvcompile.backend("int8", inner="eager")), cache_of(model, "static", capacity=12)
    with torch.no_grad():
        compiled(prompt(), past_key_values=cache)
        for index in range(3):
            compiled(prompt(3, 1, index), past_key_values=cache)
        with pytest.raises((errors.PositionsUnknown, errors.CacheFull), match="12"):
            compiled(prompt(3, 1), past_key_values=cache)


@pytest.mark.parametrize(("kind", "scheme"), [("static", "dense"), ("dynamic", "int8"), ("static", "fp8"), ("dynamic", "int4(group=16)")])
def test_nan_stays_nan(kind: str, scheme: str) -> None:
    """A poisoned token poisons every later result of its row and no other row."""
    model = llama(layers=1)
    compiled, cache = torch.compile(model, backend=kvcompile.backend(scheme, inner="eager", strict=True)), cache_of(model, kind)
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
        cache.layers[0].keys[1, :, 2, 3] = float("nan")
        for index in range(2):
            logits = compiled(prompt(3, 1, index), past_key_values=cache).logits
            assert logits[1].isnan().all()
            assert not logits[0].isnan().any() and not logits[2].isnan().any()


# --- a compressed cache meets a graph that cannot use it ------------------------------------------------


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_the_next_graph_wants_the_weights(kind: str) -> None:
    """output_attentions: a dynamic cache is decoded for that call; a static one, which is written, becomes dense for it."""
    model, backend = llama(attention="eager", layers=1), kvcompile.backend("dense", inner="eager")
    compiled, cache, plain = torch.compile(model, backend=backend), cache_of(model, kind), cache_of(model, kind)

    def step(count: int, **options: Any) -> float:
        words = prompt(3, count, count)
        with torch.no_grad():
            expected = model(words, past_key_values=plain, **options).logits
            return (compiled(words, past_key_values=cache, **options).logits - expected).abs().max().item()

    assert max(step(9), step(1)) <= 1e-6
    assert step(1, output_attentions=True) <= 1e-6
    assert not isinstance(cache.layers[0].keys, kvcompile.CompressedCache)
    assert step(1) <= 1e-6
    assert isinstance(cache.layers[0].keys, kvcompile.CompressedCache)


def test_one_of_two_layers_is_refused_later() -> None:
    """A graph that rewrites one layer writes the other layer's tokens into its cache, not into a decoded copy of it."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Probed(), Probed()

        def forward(self, x: torch.Tensor, pos: torch.Tensor, probe: bool) -> torch.Tensor:
            return self.two(self.one(x, pos, False), pos, probe)

    module = Two().eval()
    plain = copy.deepcopy(module)
    compiled = torch.compile(module, backend=kvcompile.backend("dense", inner="eager"))
    x = inputs(module, (4, 1, 1, 1))
    places = [torch.arange(4), torch.tensor([4]), torch.tensor([5]), torch.tensor([6])]
    kinds = []
    with torch.no_grad():
        for step, pos, probe in zip(x, places, (False, True, True, False), strict=True):
            torch.testing.assert_close(compiled(step, pos, probe), plain(step, pos, probe), atol=1e-5, rtol=0)
            kinds.append([isinstance(layer.k_cache, kvcompile.CompressedCache) for layer in (module.one, module.two)])
    assert kinds == [[True, True], [True, False], [True, False], [True, True]]


def test_a_fact_that_is_lost_leaves_the_cache_dense(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What verify finds is no error of the user's program."""
    model = llama(layers=1)
    compiled = torch.compile(model, backend=kvcompile.backend("int8", inner="eager"))

    def lost(*given: Any) -> None:
        raise errors.VerificationFailed(fact="one append into every plane", found="none", where="here")

    monkeypatch.setattr(sys.modules["kvcompile.variants"], "verify", lost)
    cache, plain = cache_of(model, "static"), cache_of(model, "static")
    with torch.no_grad():
        for count in (9, 1, 1):
            words = prompt(1, count, count)
            found, expected = compiled(words, past_key_values=cache).logits, model(words, past_key_values=plain).logits
            assert torch.allclose(found, expected, atol=1e-6)
    assert "expected of the rewritten graph: one append into every plane" in caplog.text


@pytest.mark.parametrize(("kind", "stage"), [("static", "match"), ("dynamic", "plan"), ("static", "rewrite"), ("dynamic", "rewrite")])
def test_a_fault_of_ours_is_a_refusal(kind: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that a pass breaks on runs as it is, over caches that others have compressed; under ``strict`` it raises."""
    model, backend = llama(layers=1), kvcompile.backend("dense", inner="eager")
    compiled, cache, plain = torch.compile(model, backend=backend), cache_of(model, kind), cache_of(model, kind)
    module = sys.modules["kvcompile.variants" if stage == "rewrite" else "kvcompile.compilation"]

    def broken(*given: Any) -> Any:
        raise IndexError("list index out of range")

    def step(count: int, run: Any = compiled) -> float:
        words = prompt(3, count, count)
        with torch.no_grad():
            expected = model(words, past_key_values=plain).logits
            return (run(words, past_key_values=cache).logits - expected).abs().max().item()

    assert max(step(9), step(1)) <= 1e-6
    with monkeypatch.context() as patched:
        patched.setattr(module, stage, broken)
        # Another number of tokens is another graph.
        assert step(4) <= 1e-6
        assert "IndexError: list index out of range" in backend.report().refusals[-1].reason
        with pytest.raises(BackendCompilerFailed, match="could not be analysed"):
            step(5, torch.compile(copy.deepcopy(model), backend=kvcompile.backend("dense", inner="eager", strict=True)))


@pytest.mark.parametrize("other", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_another_backend_gets_a_compressed_cache(kind: str, other: str) -> None:
    """Its graph fails when it runs, for reads and for writes: no number ever comes out of what holds none."""
    model = llama(layers=1)
    compiled, cache = torch.compile(model, backend=kvcompile.backend("int8", inner="eager")), cache_of(model, kind)
    with torch.no_grad():
        compiled(prompt(), past_key_values=cache)
        compiled(prompt(3, 1), past_key_values=cache)
        foreign = torch.compile(model.forward, backend=other)
        with pytest.raises((errors.ForeignBackend, TypeError), match="kvcompile"):
            foreign(input_ids=prompt(3, 1), past_key_values=cache)
        # Neither the cache nor the stub that all handles share was written to.
        keys = cache.layers[0].keys
        with torch._C.DisableTorchFunctionSubclass():
            assert keys.as_strided((1,), (1,)).isnan().all()
        assert kvcompile.decoded(keys).isfinite().all()


def test_every_error_has_a_sentence_of_its_own() -> None:
    classes = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, errors.KvcompileError)]
    templates = [item.template for item in classes if "template" in vars(item)]
    assert len(set(templates)) == len(templates)
    assert all(text.count(" ") >= 4 for text in templates if text != "{detail}")
