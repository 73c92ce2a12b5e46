"""A step that raises in its middle leaves the caches as they were: tried again, it gives what it would have given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from e2e_models import Attention, buffers, cache_of, llama, prompt, visible
from torch.nn import functional as F

import kvcompile

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

SCHEMES = ("kivi(group=16,window=16)", "int4(group=16,window=16)", "squat(group=16,window=16,subblock=8,rotate=none)", "certified", "int8")
CAPACITY = 128
FAULT = {"armed": False}


class Fault(RuntimeError):
    """What the model raises in the middle of a step."""


@torch.library.custom_op("kvcompile_tests::fault", mutates_args=())
def fault(x: torch.Tensor) -> torch.Tensor:
    """Raise once where a test said so; else a copy."""
    if FAULT["armed"]:
        FAULT["armed"] = False
        raise Fault("in the middle of a step")
    return x.clone()


fault.register_fake(lambda x: torch.empty_like(x))


class Layers(torch.nn.Module):
    """Two attentions over buffers; what comes out of the first may raise, after its keys and values were written."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = One(), One()

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return self.second(fault(self.first(x, pos)), pos)


class One(Attention):
    """An ``index_copy_`` cache in buffers."""

    def __init__(self) -> None:
        super().__init__(kv=2, dim=32)
        buffers(self, self.batch, self.kv, CAPACITY, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = (item.transpose(1, 2) for item in self.project(x))
        keys, values = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, CAPACITY), enable_gqa=True))


def steps(module: Layers, run: Callable[..., torch.Tensor], interrupted: bool) -> list[torch.Tensor]:
    """The results of a prompt, of steps of one token and of many, and of two that go back, each interrupted or not; and the caches."""
    for layer in (module.first, module.second):
        buffers(layer, layer.batch, layer.kv, CAPACITY, layer.dim)
    x = torch.randn(module.first.batch, 70, module.first.width, generator=torch.Generator().manual_seed(1))
    found, at = [], 0
    for back, count in ((0, 40), (0, 1), (0, 1), (0, 3), (0, 1), (0, 20), (0, 1), (3, 2), (0, 1), (67, 3)):
        at -= back
        given = x[:, at : at + count] * (1 + back), torch.arange(at, at + count)
        if interrupted and found:
            held = [kvcompile.decoded(item) for item in module.buffers()]
            FAULT["armed"] = True
            with pytest.raises(Fault):
                run(*given)
            assert all(torch.equal(kvcompile.decoded(item), before) for item, before in zip(module.buffers(), held, strict=True))
        found.append(run(*given))
        at += count
    return [*found, *(kvcompile.decoded(item) for item in module.buffers())]


@pytest.mark.parametrize(("scheme", "inner"), [
    *((scheme, "eager") for scheme in SCHEMES[1:]), (SCHEMES[0], "aot_eager"),
    pytest.param(SCHEMES[0], "inductor", marks=pytest.mark.compile),
])
@torch.no_grad()
def test_a_step_is_atomic(scheme: str, inner: str) -> None:
    """By one compiled module, whose caches begin anew; what is compiled during a step is so during one that raises."""
    torch.manual_seed(0)
    module = Layers().eval()
    run = torch.compile(module, backend=kvcompile.backend(scheme, inner=inner, strict=True), fullgraph=True)
    found, expected = (steps(module, run, interrupted) for interrupted in (True, False))
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


def test_kept_padding_comes_back() -> None:
    """Keys of padding that an eager prompt wrote: a request that begins anew forgets them only where it succeeds."""
    model = llama(layers=2, head_dim=32)
    cache, ids, mask = cache_of(model, "static"), prompt(2, 20, seed=1), torch.ones(2, 24, dtype=torch.long)
    mask[0, :7] = 0
    run = torch.compile(model, backend=kvcompile.backend(SCHEMES[0], inner="eager"))
    with torch.no_grad():
        model(ids, attention_mask=mask[:, :20], past_key_values=cache)
        run(ids[:, :1], attention_mask=mask[:, :21], past_key_values=cache)
        held = [kvcompile.decoded(tensor).clone() for layer in cache.layers for tensor in (layer.keys, layer.values)]
        assert held[0][0, :, :7].any(), "no padding is held"
        assert all(store.padding is not None for store in cache.layers[0].keys._kv.stores.values())
        for layer in cache.layers:
            layer.cumulative_length.zero_()
        hook = model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, args, out: fault(out))
        torch._dynamo.reset()
        FAULT["armed"] = True
        with pytest.raises(Fault):
            run(ids[:, :3], attention_mask=mask[:, 21:], past_key_values=cache)
        hook.remove()
    found = [kvcompile.decoded(tensor) for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert all(torch.equal(a, b) for a, b in zip(held, found, strict=True))


@pytest.mark.parametrize("scheme", SCHEMES[:1])
def test_a_returned_cache_is_as_it_was(scheme: str) -> None:
    """A cache that grows by concatenation: the tensors that the caller holds go on."""
    model = llama(layers=2, head_dim=32)
    run = torch.compile(model, backend=kvcompile.backend(scheme, inner="aot_eager", strict=True))
    results = []
    for interrupted in (False, True):
        cache, found = cache_of(model, "dynamic"), []
        hook = model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda module, args, out: fault(out))
        with torch.no_grad():
            for at, count in ((0, 40), (40, 1), (41, 3), (44, 1)):
                ids = prompt(2, count, seed=at)
                if interrupted and at:
                    FAULT["armed"] = True
                    with pytest.raises(Fault):
                        run(ids, past_key_values=cache)
                found.append(run(ids, past_key_values=cache).logits)
        hook.remove()
        results.append(found)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
