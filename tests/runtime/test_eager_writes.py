"""Writes to a compressed cache by code that is not compiled: tokens are encoded, everything else makes it dense, nothing is lost."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from e2e_models import cache_of, llama, prompt
from transformers import LlamaForCausalLM

import kvcompile
from kvcompile import schemes
from kvcompile.runtime.handle import tensor as handle
from kvcompile.types import Role, SlotSpec

KINDS = ("static", "dynamic")
BY_TOKEN = ("dense", "int8", "int4(group=16)", "fp8", "int8(granularity=tensor)")
SCHEMES = (
    *BY_TOKEN, "kivi(group=16,window=16)", "int4(group=16,window=16)", "squat(group=16,window=16,subblock=8,rotate=none)", "certified",
)


@pytest.fixture(autouse=True)
def _fresh(one_thread: None) -> None:
    """Small tensors on one thread, no warning said before."""
    handle.warn_of_densifying.cache_clear()
    handle.warn_of_eager_use.cache_clear()


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    """A tiny Llama with grouped heads of 32 channels, compiled once a scheme."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        yield llama(layers=1, head_dim=32)
    compiled.cache_clear()
    torch._dynamo.reset()


@functools.cache
def compiled(model: LlamaForCausalLM, scheme: str) -> Any:
    """The model compiled for a scheme."""
    return torch.compile(model, backend=kvcompile.backend(scheme, inner="eager", strict=True))


class Run:
    """A compiled model and a cache of it."""

    def __init__(self, model: LlamaForCausalLM, kind: str, scheme: str, *counts: int, rows: int = 2) -> None:
        self.model, self.scheme, self.rows = model, scheme, rows
        self.compiled = compiled(model, scheme)
        self.cache, self.length = cache_of(model, kind), 0
        self.feed(self.compiled, *counts)

    @torch.no_grad()
    def feed(self, call: Any, *counts: int) -> torch.Tensor:
        """The logits of chunks of new tokens, the last ones."""
        for count in counts:
            logits = call(prompt(self.rows, count, seed=self.length), past_key_values=self.cache).logits
            self.length += count
        return logits

    @property
    def keys(self) -> Any:
        """The first layer's keys."""
        return self.cache.layers[0].keys


def rounded(scheme: str, x: torch.Tensor, role: Role = Role.KEY) -> torch.Tensor:
    """What the codes of tokens [B, K, S, D], written at once, decode to."""
    made = schemes.parse(scheme).for_role(role)
    return made.decode(made.encode(x), SlotSpec(x.shape[1], x.shape[3], x.dtype, role)).to(x.dtype)


TOKENS = torch.randn(2, 2, 3, 32, generator=torch.Generator().manual_seed(5))
AT = torch.tensor([10, 11, 12])

SPELLINGS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "index_copy_": lambda keys, at, x: keys.index_copy_(2, at, x),
    "index": lambda keys, at, x: keys.__setitem__((slice(None), slice(None), at), x),
    "slice": lambda keys, at, x: keys.__setitem__((slice(None), slice(None), slice(int(at[0]), int(at[-1]) + 1)), x),
    "narrow": lambda keys, at, x: keys.narrow(2, int(at[0]), len(at)).copy_(x),
    "view": lambda keys, at, x: keys[:, :, int(at[0]) : int(at[-1]) + 1].copy_(x),
    "transposed": lambda keys, at, x: keys.transpose(1, 2).__setitem__((slice(None), at), x.transpose(1, 2)),
    "index_put_": lambda keys, at, x: keys.index_put_((torch.arange(2)[:, None], torch.tensor(0), at[None]), x[:, 0])
    .index_put_((torch.arange(2)[:, None], torch.tensor(1), at[None]), x[:, 1]),
    "scatter_": lambda keys, at, x: keys.scatter_(2, at[None, None, :, None].expand(x.shape), x),
    "overload": lambda keys, at, x: torch.ops.aten.index_copy_.default(keys, 2, at, x),
    "select": lambda keys, at, x: [keys[:, :, position].copy_(x[:, :, index]) for index, position in enumerate(at.tolist())],
    "where": lambda keys, at, x: keys.copy_(torch.where(
        torch.isin(torch.arange(keys.shape[2]), at)[:, None], torch.zeros(keys.shape).index_copy(2, at, x), keys,
    )),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("scheme", ["int8", "int4(group=16)"])
def test_tokens_are_encoded(model: LlamaForCausalLM, scheme: str, spelling: str, caplog: Any) -> None:
    """New tokens are held as the scheme rounds them, the others' codes are what they were, and one warning names the line."""
    run = Run(model, "static", scheme, 9, 1)
    before, keys = kvcompile.decoded(run.keys), run.keys
    planes = [plane.clone() for store in keys._kv.stores.values() for plane in store.planes]
    with caplog.at_level(logging.WARNING, logger="kvcompile"):
        SPELLINGS[spelling](keys, AT, TOKENS)
    assert isinstance(keys, kvcompile.CompressedCache) and keys is run.keys and keys._kv.nbytes < before.numel() * 4
    after = kvcompile.decoded(keys)
    assert torch.equal(after[:, :, :10], before[:, :, :10]) and torch.equal(after[:, :, 10:13], rounded(scheme, TOKENS))
    assert not after[:, :, 13:].any()
    now = [plane for store in keys._kv.stores.values() for plane in store.planes]
    assert all(torch.equal(new[:, :, :, :10], old[:, :, :, :10]) for new, old in zip(now, planes, strict=True))
    assert len(caplog.records) == (2 if spelling == "index_put_" else 1) and "test_eager_writes.py" in caplog.text


@pytest.mark.parametrize("scheme", BY_TOKEN)
def test_any_tokens_of_some_heads_and_rows(model: LlamaForCausalLM, scheme: str) -> None:
    """A write over old tokens of one head of one row touches nothing else."""
    run = Run(model, "static", scheme, 9, 1)
    before = kvcompile.decoded(run.keys)
    run.keys[1, 0, 2:4] = TOKENS[1, 0, :2]
    after = kvcompile.decoded(run.keys)
    assert isinstance(run.keys, kvcompile.CompressedCache)
    assert torch.allclose(after[1, 0, 2:4], TOKENS[1, 0, :2], atol=0.3) and not torch.equal(after[1, 0, 2:4], before[1, 0, 2:4])
    after[1, 0, 2:4] = before[1, 0, 2:4]
    assert torch.equal(after, before)


@pytest.mark.parametrize("scheme", [item for item in SCHEMES if item not in BY_TOKEN])
def test_windows_take_tokens_in_order_and_what_they_still_hold(model: LlamaForCausalLM, scheme: str) -> None:
    run, other = (Run(model, "static", scheme, 40, 1, 1) for _ in range(2))
    keys, expected = run.keys, kvcompile.decoded(run.keys)
    x = torch.randn(2, 2, 5, 32, generator=torch.Generator().manual_seed(3))
    keys[:, :, 40:45] = x
    assert isinstance(keys, kvcompile.CompressedCache)
    expected[:, :, 40:45] = x
    found = kvcompile.decoded(keys)
    assert torch.equal(found[:, :, 40:45], x)
    # A block that left the window on the way is read from its codes: what they are in a cache that was written in order.
    other.keys[:, :, 40:42] = x[:, :, :2]
    for step in range(2, 5):
        other.keys[:, :, 40 + step : 41 + step] = x[:, :, step : step + 1]
    assert torch.equal(found, kvcompile.decoded(other.keys))
    keys[:, 0, 42] = 1.0
    found[:, 0, 42] = 1.0
    assert isinstance(keys, kvcompile.CompressedCache) and torch.equal(kvcompile.decoded(keys), found)


def test_originals_take_any_token(model: LlamaForCausalLM) -> None:
    """A scheme that keeps them goes back behind its window: the cache stays compressed."""
    run = Run(model, "static", "certified", 40, 1)
    keys, expected = run.keys, kvcompile.decoded(run.keys)
    keys[:, :, 2] = 2.0
    expected[:, :, 2] = 2.0
    assert isinstance(keys, kvcompile.CompressedCache) and torch.allclose(kvcompile.decoded(keys), expected, atol=0.02)


@pytest.mark.parametrize(("scheme", "at"), [
    ("kivi(group=16,window=16)", 3), ("kivi(group=16,window=16)", 50), ("int4(group=16,window=16)", 3),
])
def test_windows_refuse_the_rest_and_become_dense(model: LlamaForCausalLM, scheme: str, at: int, caplog: Any) -> None:
    run = Run(model, "static", scheme, 40, 1)
    keys, expected = run.keys, kvcompile.decoded(run.keys)
    with caplog.at_level(logging.WARNING, logger="kvcompile"):
        keys[:, :, at] = 2.0
    expected[:, :, at] = 2.0
    assert type(keys) is torch.Tensor and torch.equal(keys, expected)
    assert len(caplog.records) == 1 and "test_eager_writes.py" in caplog.text and scheme.partition("(")[0] in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_eager_model_goes_on_with_a_compressed_cache(model: LlamaForCausalLM, kind: str, scheme: str) -> None:
    """As many tokens as a compiled model would hold, in the same codes; memory stays what is announced; compiled code goes on."""
    eager, twin = (Run(model, kind, scheme, 40, 1) for _ in range(2))
    for count in (1, 3, 1):
        found, expected = eager.feed(model, count), twin.feed(twin.compiled, count)
        # Compiled attention reads a window as it was before the step, and ``certified`` codes where eager code reads the originals.
        assert scheme not in BY_TOKEN or torch.allclose(found, expected, atol=1e-4), (found - expected).abs().max()
    for layer, same in zip(eager.cache.layers, twin.cache.layers, strict=True):
        for tensor, other in ((layer.keys, same.keys), (layer.values, same.values)):
            assert isinstance(tensor, kvcompile.CompressedCache)
            assert torch.allclose(kvcompile.decoded(tensor), kvcompile.decoded(other), atol=1e-5)
            state = tensor._kv
            assert state.nbytes == sum(s.spec.layout.nbytes(s.pages, s.batch, s.spec.slot.heads) for s in state.stores.values())
    assert torch.allclose(eager.feed(eager.compiled, 1, 2), twin.feed(twin.compiled, 1, 2), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_to_a_copy_is_its_own(model: LlamaForCausalLM, kind: str) -> None:
    run = Run(model, kind, "int8", 9, 1)
    before = kvcompile.decoded(run.keys)
    for made in (copy.deepcopy(run.keys), run.keys.clone(), run.keys.index_select(0, torch.tensor([0, 1])), run.keys[torch.tensor([0, 1])]):
        made[:, :, 4] = 2.0
        found = kvcompile.decoded(made)
        assert torch.allclose(found[:, :, 4], torch.tensor(2.0), atol=0.02)
        assert torch.equal(kvcompile.decoded(run.keys), before)
        found[:, :, 4] = before[:, :, 4]
        assert torch.equal(found, before)
        made.mul_(2)
        assert type(made) is torch.Tensor and torch.equal(kvcompile.decoded(run.keys), before)


@pytest.mark.parametrize("part", [lambda keys: keys[:, :, :5], lambda keys: keys[:1], lambda keys: keys[..., 2:6, :]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_to_a_part_is_seen_by_the_whole(model: LlamaForCausalLM, kind: str, part: Callable[[Any], Any]) -> None:
    run = Run(model, kind, "int8", 9, 1)
    whole = run.keys
    expected = kvcompile.decoded(whole)
    piece = part(whole)
    piece[:, :, 1] = 2.0
    part(expected)[:, :, 1] = 2.0
    assert torch.allclose(kvcompile.decoded(whole), expected, atol=0.02)
    assert torch.allclose(piece + 0, part(expected), atol=0.02)
    whole[:, :, 0] = -2.0
    expected[:, :, 0] = -2.0
    assert torch.allclose(kvcompile.decoded(whole), expected, atol=0.02)
    assert torch.allclose(piece + 0, part(expected), atol=0.02)


def test_codes_are_copied_between_caches(model: LlamaForCausalLM) -> None:
    run, other = Run(model, "static", "int4(group=16)", 9, 1), Run(model, "static", "int4(group=16)", 4)
    expected = kvcompile.decoded(run.keys)
    other.keys.copy_(run.keys)
    assert isinstance(other.keys, kvcompile.CompressedCache) and torch.equal(kvcompile.decoded(other.keys), expected)
    run.keys[:] = run.keys[torch.tensor([1, 0])]
    assert isinstance(run.keys, kvcompile.CompressedCache) and torch.equal(kvcompile.decoded(run.keys), expected.flip(0))
    assert torch.equal(kvcompile.decoded(other.keys), expected)


def test_two_caches_from_one(model: LlamaForCausalLM) -> None:
    """``cat`` twice behind the same cache: neither result sees the other's tokens."""
    run = Run(model, "dynamic", "int8", 9, 1)
    base, before = run.keys, kvcompile.decoded(run.keys)
    one, two = torch.cat([base, TOKENS], 2), torch.cat([base, -TOKENS], 2)
    assert isinstance(one, kvcompile.CompressedCache) and one.shape == two.shape
    assert torch.equal(kvcompile.decoded(one), torch.cat([before, rounded("int8", TOKENS)], 2))
    assert torch.equal(kvcompile.decoded(two), torch.cat([before, rounded("int8", -TOKENS)], 2))
    assert torch.equal(kvcompile.decoded(base), before)
    one[:, :, 0] = 1.0
    assert torch.equal(kvcompile.decoded(base), before) and not torch.equal(kvcompile.decoded(one)[:, :, 0], before[:, :, 0])


def test_memory_is_not_given_away(model: LlamaForCausalLM) -> None:
    """An address is the dense tensor's own, and numpy is told that it has a copy."""
    run = Run(model, "static", "int8", 9, 1)
    expected = kvcompile.decoded(run.keys)
    array = run.keys.numpy()
    assert (array == expected.numpy()).all()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    keys = run.keys
    address = keys.data_ptr()
    assert type(keys) is torch.Tensor and address == keys.data_ptr() and torch.equal(keys, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["dense", "kivi(group=16,window=64)"])
def test_gradients_on_are_served(model: LlamaForCausalLM, kind: str, scheme: str) -> None:
    """A call with gradients makes the cache dense, gives what the model gives, and can be gone on from."""
    run, plain = Run(model, kind, scheme, 9, 1), cache_of(model, kind)
    model(prompt(2, 9, seed=0), past_key_values=plain), model(prompt(2, 1, seed=9), past_key_values=plain)
    step = prompt(2, 2, seed=10)
    compiled_twice = torch.compile(model, backend=kvcompile.backend(scheme, inner="eager"))
    found, expected = (call(step, past_key_values=cache).logits for call, cache in ((compiled_twice, run.cache), (model, plain)))
    assert found.requires_grad and torch.allclose(found, expected, atol=1e-5)
    assert type(run.keys) is torch.Tensor
    with torch.no_grad():
        step = prompt(2, 1, seed=12)
        found, expected = (call(step, past_key_values=cache).logits for call, cache in ((compiled_twice, run.cache), (model, plain)))
    assert torch.allclose(found, expected, atol=1e-5)
