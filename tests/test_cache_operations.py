"""What callers do to a cache between steps: each works on the codes as it would on the dense cache, or says why not."""

from __future__ import annotations

import copy
import gc
import io
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e_models import cache_of, llama, prompt
from transformers import LlamaForCausalLM

import kvcompile
from kvcompile.errors import CacheStale
from kvcompile.runtime import handle

KINDS = ("static", "dynamic")
WINDOWED = "kivi(group=16,window=64)"
each_exact = pytest.mark.parametrize("scheme", ["dense", WINDOWED])
"""Schemes that lose nothing here: fewer tokens than the window are all in it."""


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A tiny Llama with grouped heads."""
    return llama(layers=1)


class Pair:
    """A model with its own cache beside its compiled twin with another; every step compares the two."""

    def __init__(self, model: LlamaForCausalLM, kind: str, scheme: str = "dense", rows: int = 3) -> None:
        self.backend = kvcompile.backend(scheme, inner="eager", strict=True)
        self.model, self.compiled = model, torch.compile(model, backend=self.backend, fullgraph=True)
        self.plain, self.cache = cache_of(model, kind), cache_of(model, kind)
        self.rows = rows

    @torch.no_grad()
    def step(self, *counts: int) -> float:
        """Feed chunks of new tokens to both; the largest difference of logits."""
        worst = 0.0
        for count in counts:
            tokens = prompt(self.rows, count, seed=self.plain.get_seq_length() + 7)
            expected = self.model(tokens, past_key_values=self.plain).logits
            found = self.compiled(tokens, past_key_values=self.cache).logits
            worst = max(worst, (expected - found).abs().max().item())
        return worst

    def both(self, change: Callable[[Any], Any]) -> None:
        """Do the same to both caches."""
        change(self.plain), change(self.cache)


@pytest.mark.parametrize("kind", KINDS)
@each_exact
def test_reset_and_reuse(model: LlamaForCausalLM, kind: str, scheme: str) -> None:
    pair = Pair(model, kind, scheme)
    graphs = []
    for _ in range(3):
        assert pair.step(9, 1, 1) <= 1e-6
        pair.both(lambda cache: cache.reset())
        graphs.append(len(pair.backend.graphs))
    assert graphs[1] == graphs[2]
    if kind == "static" and scheme == "dense":
        assert pair.backend.report().allocated == 0


@each_exact
def test_crop_after_each_speculative_step(model: LlamaForCausalLM, scheme: str) -> None:
    pair = Pair(model, "dynamic", scheme)
    assert pair.step(9) <= 1e-6
    for _ in range(4):
        assert pair.step(4) <= 1e-6
        pair.both(lambda cache: cache.crop(-2))
    graphs = len(pair.backend.graphs)
    assert pair.step(4, 1, 4) <= 1e-6
    assert len(pair.backend.graphs) <= graphs + 1


@each_exact
def test_reorder_select_and_repeat_rows(model: LlamaForCausalLM, scheme: str) -> None:
    pair = Pair(model, "dynamic", scheme)
    assert pair.step(9, 1) <= 1e-6
    pair.both(lambda cache: cache.batch_repeat_interleave(2))
    pair.rows = 6
    assert pair.step(1, 1) <= 1e-6
    pair.both(lambda cache: cache.batch_select_indices(torch.tensor([5, 0, 3])))
    pair.rows = 3
    assert pair.step(1, 1) <= 1e-6
    pair.both(lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])))
    assert pair.step(1, 4) <= 1e-6


@each_exact
def test_reorder_of_a_static_cache(model: LlamaForCausalLM, scheme: str) -> None:
    pair = Pair(model, "static", scheme)
    assert pair.step(9, 1) <= 1e-6
    for _ in range(3):
        pair.both(lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])))
        assert pair.step(1) <= 1e-6


@pytest.mark.parametrize(("kind", "scheme"), [("static", WINDOWED), ("dynamic", "dense")])
def test_copies_part_ways(model: LlamaForCausalLM, kind: str, scheme: str) -> None:
    pair = Pair(model, kind, scheme)
    assert pair.step(9, 1) <= 1e-6
    other = Pair(model, kind, scheme)
    other.compiled, other.backend = pair.compiled, pair.backend
    other.cache, other.plain = copy.deepcopy(pair.cache), copy.deepcopy(pair.plain)
    assert max(pair.step(1, 4), other.step(1, 1, 1), pair.step(1)) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["int8", "int4(group=16)"])
def test_save_and_load_keep_the_codes(model: LlamaForCausalLM, kind: str, scheme: str) -> None:
    pair = Pair(model, kind, scheme)
    pair.step(9, 1)
    file = io.BytesIO()
    torch.save(pair.cache, file)
    if scheme != "int8" and kind == "static":
        # Codes, not decoded values, and not the capacity.
        dense = sum(layer.keys.numel() * 4 * 2 for layer in pair.plain.layers)
        assert len(file.getvalue()) < dense
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    tokens = prompt(3, 1)
    with torch.no_grad():
        assert torch.equal(
            pair.compiled(tokens, past_key_values=loaded).logits, pair.compiled(tokens, past_key_values=pair.cache).logits
        )


@pytest.mark.parametrize(("kind", "scheme"), [("static", "dense"), ("dynamic", WINDOWED)])
def test_two_caches_one_function(model: LlamaForCausalLM, kind: str, scheme: str) -> None:
    one, two = Pair(model, kind, scheme), Pair(model, kind, scheme)
    two.compiled, two.backend = one.compiled, one.backend
    assert max(one.step(9), two.step(12)) <= 1e-6
    for _ in range(3):
        assert max(one.step(1), two.step(1, 4)) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_freed_cache_frees_its_stores(model: LlamaForCausalLM, kind: str) -> None:
    one, two = Pair(model, kind), Pair(model, kind)
    two.compiled, two.backend = one.compiled, one.backend
    one.step(9, 1, 1), two.step(9, 1, 1)
    both = one.backend.report().allocated
    states = [weakref.ref(layer.keys._kv) for layer in one.cache.layers]
    one.cache = None
    gc.collect()
    assert one.backend.report().allocated == both // 2
    assert all(state() is None for state in states)
    two.cache = None
    gc.collect()
    assert two.backend.report().allocated == 0


def test_a_stale_branch_is_refused_and_a_copy_is_not(model: LlamaForCausalLM) -> None:
    pair = Pair(model, "dynamic")
    pair.step(9, 1)
    branch = copy.copy(pair.cache)
    branch.layers = [copy.copy(layer) for layer in pair.cache.layers]
    safe = copy.deepcopy(pair.cache)
    pair.cache.crop(-3)
    with torch.no_grad():
        pair.compiled(prompt(3, 1), past_key_values=pair.cache)
        with pytest.raises(CacheStale, match=r"deepcopy"):
            pair.compiled(prompt(3, 1), past_key_values=branch)
        pair.compiled(prompt(3, 1), past_key_values=safe)
        with pytest.raises(CacheStale):
            branch.layers[0].keys.sum()


def test_a_branch_from_an_older_state_is_fine(model: LlamaForCausalLM) -> None:
    """Codes are written once: an older state of a cache that only grew is still what it was."""
    pair = Pair(model, "dynamic")
    pair.step(9)
    old = [(layer.keys, layer.values) for layer in pair.cache.layers]
    expected = [kvcompile.decoded(keys) for keys, _ in old]
    pair.step(1, 1)
    assert all(torch.equal(kvcompile.decoded(keys), before) for (keys, _), before in zip(old, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_reads_from_outside_decode(model: LlamaForCausalLM, kind: str) -> None:
    pair = Pair(model, kind, "int8")
    pair.step(9, 1, 1)
    keys, dense = pair.cache.layers[0].keys, pair.plain.layers[0].keys
    assert isinstance(keys, kvcompile.CompressedCache)
    assert keys.shape == dense.shape and keys.dtype == dense.dtype and keys.device == dense.device
    assert type(kvcompile.decoded(keys)) is torch.Tensor
    assert torch.allclose(kvcompile.decoded(keys), dense, atol=0.05)
    assert torch.allclose(keys + 0, dense, atol=0.05)
    assert torch.allclose(keys[..., 3, :], dense[..., 3, :], atol=0.05)
    assert torch.allclose(keys.float().norm(), dense.norm(), rtol=0.01)
    assert torch.allclose(torch.cat([keys, dense], 2)[:, :, : keys.shape[2]], dense, atol=0.05)
    assert keys.numpy().shape == tuple(dense.shape)
    assert "int8" in repr(keys)
    assert torch.isnan(keys.as_subclass(torch.Tensor)).any() or torch.allclose(keys.as_subclass(torch.Tensor), dense, atol=0.05)


@pytest.mark.parametrize("write", [
    lambda keys: keys.index_copy_(2, torch.tensor([0]), torch.ones(3, 2, 1, 16)),
    lambda keys: keys.__setitem__((slice(None), slice(None), 0), 1.0),
    lambda keys: keys.mul_(2),
    lambda keys: keys.fill_(1),
    lambda keys: keys.copy_(torch.ones(keys.shape)),
    lambda keys: torch.add(torch.ones(keys.shape), 1, out=keys),
    lambda keys: keys.narrow(2, 0, 1).copy_(torch.ones(3, 2, 1, 16)),
    lambda keys: keys[:, :, :1].fill_(1.0),
], ids=["index_copy_", "setitem", "mul_", "fill_", "copy_", "out", "narrow", "slice"])
def test_writes_from_outside_make_it_dense(model: LlamaForCausalLM, write: Callable[[Any], Any], caplog: Any) -> None:
    """A write to the cache or to a view of it is neither lost nor refused; the next compiled call compresses the cache again."""
    handle._say.cache_clear()
    pair = Pair(model, "static")
    pair.step(9, 1)
    for layer, plain in zip(pair.cache.layers, pair.plain.layers, strict=True):
        with caplog.at_level(logging.WARNING, logger="kvcompile"):
            write(layer.keys)
        write(plain.keys)
        assert type(layer.keys) is torch.Tensor and torch.allclose(layer.keys, plain.keys, atol=1e-6)
    assert len(caplog.records) == 1 and "outside of compiled code" in caplog.text
    assert pair.step(1, 1) <= 1e-5
    assert isinstance(pair.cache.layers[0].keys, kvcompile.CompressedCache)


def test_views_know_where_they_come_from(model: LlamaForCausalLM) -> None:
    """A view of a view, one of several parts, and what was read before the write."""
    pair = Pair(model, "static")
    pair.step(9, 1)
    keys, plain = pair.cache.layers[0].keys, pair.plain.layers[0].keys
    part, same = keys.transpose(1, 2).split(4, dim=1)[1][:, 2:], plain.transpose(1, 2).split(4, dim=1)[1][:, 2:]
    assert torch.allclose(part, same, atol=1e-6)
    part.mul_(3), same.mul_(3)
    assert torch.allclose(keys, plain, atol=1e-6) and torch.allclose(part, same, atol=1e-6)
    assert part.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()


@pytest.mark.parametrize("clear", [
    lambda keys: keys.zero_(), lambda keys: keys.fill_(0), lambda keys: keys.mul_(0), lambda keys: keys.__setitem__(..., 0),
    lambda keys: keys.__setitem__(slice(None), 0.0),
], ids=["zero_", "fill_", "mul_", "ellipsis", "slice"])
def test_clearing_empties_a_cache(model: LlamaForCausalLM, clear: Callable[[Any], Any]) -> None:
    pair = Pair(model, "static")
    pair.step(9, 1)
    keys = pair.cache.layers[0].keys
    clear(keys)
    assert isinstance(keys, kvcompile.CompressedCache) and not kvcompile.decoded(keys).any()


@pytest.mark.parametrize("kind", KINDS)
def test_eager_model_on_a_compressed_cache(model: LlamaForCausalLM, kind: str) -> None:
    """A dynamic cache is decoded and goes on; a static one, which the model writes to, becomes dense; both are compressed again."""
    pair = Pair(model, kind)
    pair.step(9, 1)
    tokens = prompt(3, 1)
    with torch.no_grad():
        expected = model(tokens, past_key_values=pair.plain).logits
        assert torch.allclose(model(tokens, past_key_values=pair.cache).logits, expected, atol=1e-6)
    assert pair.step(1, 1) <= 1e-6


@pytest.mark.parametrize("scheme", ["dense", "int8", "int4", "fp8"])
@pytest.mark.parametrize("position", [256, 100_000, -1])
def test_a_position_outside_of_the_planes_is_loud(scheme: str, position: int) -> None:
    """On a GPU the host does not see positions: what lies outside must become NaN, not a crash and not a number."""
    from kvcompile.lowering import ops
    from kvcompile.schemes import parse
    from kvcompile.types import Role, SlotSpec

    made = parse(scheme)
    layout = made.layout(SlotSpec(2, 32, torch.float32, Role.KEY))
    keys, values = ([torch.zeros(plane.shape(4, 1, 2), dtype=plane.dtype) for plane in layout.planes] for _ in range(2))
    x = torch.randn(1, 2, 1, 32)
    for planes in (keys, values):
        ops.append(x, planes, torch.tensor([[position]]), made.spell())
    hi = torch.tensor([[max(position, 255)]])
    out = ops.attend(x, keys, values, hi, None, None, None, None, made.spell(), made.spell(), 1.0, 0.0, 32)
    assert out.isnan().all()
