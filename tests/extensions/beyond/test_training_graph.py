"""Quantizers in cache-less graphs: training computes what serving does, in every architecture that is matched, and others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learned_tables import random_table
from transformers import DynamicCache

import kvcompile
from kvcompile.errors import BadTables
from kvcompile.extensions.beyond.learning import quantizer
from kvcompile.extensions.beyond.learning.parameters import Parameters
from kvcompile.extensions.beyond.learning.quantizer import QuantizerConfig
from kvcompile.extensions.beyond.learning.training_graph import TrainingBackend
from kvcompile.passes.match import uncached
from kvcompile.schemes import Beyond
from kvcompile.settings import Inner
from kvcompile.tools.cli.targets import TargetOptions, resolve
from kvcompile.types import Role

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

RULE = QuantizerConfig(4, torch.float16, 0.135)
WORDS = torch.randint(1, 60, (2, 21), generator=torch.Generator().manual_seed(0))


def trained(model: torch.nn.Module, inner: Inner = Inner.EAGER, budget: float = 1.0) -> tuple[Any, Parameters, TrainingBackend]:
    """The compiled model, with random tables in all of its attentions."""
    parameters = Parameters(Beyond())
    owner = TrainingBackend(parameters, RULE, inner, budget)
    run = torch.compile(model.requires_grad_(False), backend=owner, dynamic=False)
    with torch.no_grad():
        run(input_ids=WORDS, use_cache=False)
    for at, slot in enumerate(parameters.all()):
        slot.load(random_table(4, slot.levels.shape[0], slot.levels.shape[1], at))
    return run, parameters, owner


# Heads repeated and not, one projection of all three in three layouts, rotary and learned positions, ALiBi, softcap with windows, experts.
@pytest.mark.parametrize(("name", "attention"), [
    ("llama", "sdpa"), ("llama", "eager"), ("gpt2", "sdpa"), ("gpt_neox", "eager"), ("bloom", "eager"), ("falcon", "sdpa"),
    ("gemma2", "eager"), ("qwen3_moe", "sdpa"), ("gpt_bigcode", "sdpa"),
])
def test_training_computes_what_serving_does(name: str, attention: str) -> None:
    model = resolve(f"hf:{name}", TargetOptions(dtype=torch.float32, attention=attention)).model
    run, parameters, _ = trained(model)
    assert len(parameters.paths) == 2 and len(parameters.slots) == 4
    with torch.no_grad():
        found, native = (call(input_ids=WORDS, use_cache=False).logits for call in (run, model))
    torch._dynamo.reset()
    scheme = Beyond(trained=True, tables=parameters.tables("test"))
    served = torch.compile(model, backend=kvcompile.backend(scheme, inner="eager", strict=True))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        wanted = served(input_ids=WORDS, past_key_values=cache, use_cache=True).logits
        step = served(input_ids=WORDS[:, -1:], past_key_values=cache, use_cache=True).logits
        again = run(input_ids=torch.cat([WORDS, WORDS[:, -1:]], 1), use_cache=False).logits[:, -1:]
    # One is flash attention where the other spells it out.
    assert torch.allclose(found, wanted, atol=2e-5 if attention == "eager" else 2e-6)
    assert torch.allclose(step, again, atol=2e-4)
    assert (found - native).abs().max() > 100 * (found - wanted).abs().max()


def test_training_is_serving_bit_for_bit_where_the_attention_is() -> None:
    model = resolve("hf:llama", TargetOptions(dtype=torch.bfloat16, attention="sdpa")).model
    run, parameters, _ = trained(model)
    with torch.no_grad():
        found = run(input_ids=WORDS, use_cache=False).logits
        torch._dynamo.reset()
        scheme = Beyond(trained=True, tables=parameters.tables("test"))
        served = torch.compile(model, backend=kvcompile.backend(scheme, inner="eager", strict=True))
        assert torch.equal(found, served(input_ids=WORDS, past_key_values=DynamicCache(config=model.config), use_cache=True).logits)


def nested_code(code: Any, device: str) -> Any:
    """Code of an operator as CUDA would run it, by a compiler that needs no device."""
    del device
    return torch.compile(code, dynamic=False, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(("inner", "budget", "nested"), [
    (Inner.AOT_EAGER, 1.0, False), (Inner.EAGER, 1.0, True), pytest.param(Inner.INDUCTOR, 1.0, True, marks=pytest.mark.compile),
    pytest.param(Inner.INDUCTOR, 0.2, False, marks=pytest.mark.compile),
])
def test_every_inner_compiler_gives_the_same_gradients(
    inner: Inner, budget: float, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With activations computed again, too, and with operators that compile their code when they first run, as they do on CUDA."""
    model = resolve("hf:llama", TargetOptions(dtype=torch.float32, attention="sdpa")).model
    found = []
    for how, share in ((Inner.EAGER, 1.0), (inner, budget)):
        torch._dynamo.reset()
        run, parameters, _ = trained(model, how, share)
        loss = run(input_ids=WORDS, use_cache=False).logits.square().mean()
        loss.backward()
        if nested:
            monkeypatch.setattr(quantizer, "_code", nested_code)
        found.append((loss.detach(), *(operand.grad for slot in parameters.all() for operand in (slot.levels, slot.left, slot.right))))
        assert all(slot.thresholds.grad is None for slot in parameters.all())
        assert all(parameter.grad is None for parameter in model.parameters())
    for mine, eager in zip(found[1], found[0], strict=True):
        assert torch.allclose(mine, eager, rtol=1e-3, atol=1e-6 + 1e-3 * float(eager.abs().max()))


def test_one_projection_is_mapped_once_for_attentions_that_share_it() -> None:
    """As layers that read another layer's keys and values do: serving has one cache for both."""

    class Shared(torch.nn.Module):
        """Two attentions over the same keys and values."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.kv = torch.nn.Embedding(64, 64), torch.nn.Linear(64, 128)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            k, v = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
            for _ in range(2):
                q = x.unflatten(-1, (2, 32)).transpose(1, 2)
                x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
            return x

    torch.manual_seed(0)
    parameters = Parameters(Beyond())
    owner = TrainingBackend(parameters, RULE, Inner.EAGER)
    torch.compile(Shared(), backend=owner, dynamic=False)(WORDS)
    assert len(parameters.slots) == 2 and not owner.refusals


def test_attentions_of_one_module_with_other_shapes_are_refused() -> None:
    """Tables are found by module path, in serving as well."""
    parameters = Parameters(Beyond())
    parameters.of("", Role.KEY, 2, 32, torch.device("cpu"))
    with pytest.raises(BadTables, match="one shape"):
        parameters.of("", Role.KEY, 4, 32, torch.device("cpu"))


class Encoder(torch.nn.Module):
    """An attention without a mask, and one over another sequence."""

    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.cross, self.embed, self.qkv = cross, torch.nn.Embedding(64, 64), torch.nn.Linear(64, 192)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.qkv(self.embed(input_ids)).chunk(3, -1))
        q = q[:, :, :5] if self.cross else q
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize(("cross", "why"), [(False, "attend to later ones"), (True, "5 queries attend to 21 tokens")])
def test_attention_that_has_no_cache_is_left_as_it_is(cross: bool, why: str) -> None:
    torch.manual_seed(0)
    model, parameters = Encoder(cross), Parameters(Beyond())
    owner = TrainingBackend(parameters, RULE, Inner.EAGER)
    assert torch.equal(torch.compile(model, backend=owner, dynamic=False)(WORDS), model(WORDS))
    assert not parameters.slots and why in owner.refusals[0].reason


def test_keys_that_are_written_into_place_are_refused_with_a_reason() -> None:
    model = resolve("hf:deepseek_v3", TargetOptions(dtype=torch.float32, attention="sdpa")).model.requires_grad_(False)
    parameters = Parameters(Beyond())
    owner = TrainingBackend(parameters, RULE, Inner.EAGER)
    with torch.no_grad():
        torch.compile(model, backend=owner, dynamic=False)(input_ids=WORDS, use_cache=False)
    assert not parameters.slots and any("written to in place" in refusal.reason for refusal in owner.refusals)


def test_an_attention_that_a_recogniser_fails_at_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours is a refusal with a reason; the model runs, and what others recognise learns."""

    def fails(node: Any) -> None:
        if node.op == "call_function" and "softmax" in str(node.target):
            raise IndexError("nobody foresaw this")

    monkeypatch.setattr("kvcompile.passes.match.uncached.ATTENTIONS", (fails, *uncached.ATTENTIONS))
    model = resolve("hf:llama", TargetOptions(dtype=torch.float32, attention="eager")).model
    _, parameters, owner = trained(model)
    assert len(parameters.paths) == 2
    assert not owner.refusals, "an attention that another recogniser knows is not refused"
    monkeypatch.setattr("kvcompile.passes.match.uncached.ATTENTIONS", (fails,))
    torch._dynamo.reset()
    run, parameters, owner = trained(model)
    assert not parameters.slots
    assert [refusal.reason for refusal in owner.refusals] == ["it could not be analysed: IndexError: nobody foresaw this"] * 2
    with torch.no_grad():
        assert torch.equal(run(input_ids=WORDS, use_cache=False).logits, model(input_ids=WORDS, use_cache=False).logits)
