"""What callers do to a cache between steps: each works on the codes as it would on the dense cache, or says why not."""

from __future__ import annotations

import copy
import functools
import gc
import io
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from e2e_models import cache_of, llama, prompt
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM

import kvcompile
from kvcompile.errors import CacheStale
from kvcompile.runtime.handle import tensor as handle
from kvcompile.runtime.store.store import Store, StoreSpec
from kvcompile.schemes import parse
from kvcompile.types import Role, SlotSpec

KINDS = ("static", "dynamic")
WINDOWED = "kivi(group=16,window=64)"
each_exact = pytest.mark.parametrize("scheme", ["dense", WINDOWED])
"""Schemes that lose nothing here: fewer tokens than the window are all in it."""


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Small tensors on one thread."""


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    """A tiny Llama with grouped heads; what was compiled for it is forgotten with it."""
    torch._dynamo.reset()
    # One function is compiled for each kind of cache and scheme, all from the code of one model.
    with torch._dynamo.config.patch(recompile_limit=64):
        yield llama(layers=1)
    compiled_once.cache_clear()
    torch._dynamo.reset()


def compiled_for(model: LlamaForCausalLM, scheme: str) -> tuple[kvcompile.Backend, Any]:
    """Return a strict backend of a scheme, and the model compiled by it."""
    backend = kvcompile.backend(scheme, inner="eager", strict=True)
    return backend, torch.compile(model, backend=backend, fullgraph=True)


@functools.cache
def compiled_once(model: LlamaForCausalLM, kind: str, scheme: str) -> tuple[kvcompile.Backend, Any]:
    """Return ``compiled_for``, shared by the tests of this module and warm for a prompt and single tokens.

    Compiling takes longer than all that a test does to its caches, and one function serves any number of them.
    """
    made = compiled_for(model, scheme)
    cache = cache_of(model, kind)
    with torch.no_grad():
        for count in (9, 1, 1):
            made[1](prompt(3, count), past_key_values=cache)
    return made


class Pair:
    """A model with its own cache beside its compiled twin with another; every step compares the two.

    ``alone``: compiled for this pair, where a test counts graphs or the bytes of all caches.
    """

    def __init__(self, model: LlamaForCausalLM, kind: str, scheme: str = "dense", rows: int = 3, alone: bool = False) -> None:
        self.backend, self.compiled = compiled_for(model, scheme) if alone else compiled_once(model, kind, scheme)
        self.model, self.rows = model, rows
        self.plain, self.cache = cache_of(model, kind), cache_of(model, kind)

    @torch.no_grad()
    def step(self, *counts: int) -> float:
        """Feed chunks of new tokens to both; the largest difference of logits."""
        worst = 0.0
        for count in counts:
            tokens = prompt(self.rows, count, seed=self.plain.get_seq_length() + 7)
            expected = self.model(tokens, past_key_values=self.plain).logits
            found = self.compiled(tokens, past_key_values=self.cache).logits
            worst = max(worst, (expected - found).abs().max().nan_to_num(nan=torch.inf).item())
        return worst

    def both(self, change: Callable[[Any], Any]) -> None:
        """Do the same to both caches."""
        change(self.plain), change(self.cache)


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
    other.cache, other.plain = copy.deepcopy(pair.cache), copy.deepcopy(pair.plain)
    assert max(pair.step(1, 4), other.step(1, 1, 1), pair.step(1)) <= 1e-6


@pytest.mark.parametrize(("kind", "scheme"), [("dynamic", "int8"), ("static", "int4(group=16)")])
def test_save_and_load_keep_the_codes(model: LlamaForCausalLM, kind: str, scheme: str) -> None:
    pair = Pair(model, kind, scheme)
    pair.step(9, 1)
    file = io.BytesIO()
    torch.save(pair.cache, file)
    if kind == "static":
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


def _reloaded(cache: Any) -> Any:
    """A cache saved and loaded."""
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("change", [copy.deepcopy, _reloaded], ids=["deepcopy", "save and load"])
def test_a_cropped_window_is_copied_with_where_it_ends(model: LlamaForCausalLM, change: Callable[[Any], Any]) -> None:
    """The stores still hold what was cropped off until the next call goes back."""
    pair = Pair(model, "dynamic", WINDOWED)
    assert pair.step(9, 1, 4) <= 1e-6
    pair.both(lambda cache: cache.crop(-3))
    pair.plain, pair.cache = copy.deepcopy(pair.plain), change(pair.cache)
    assert pair.step(1, 2, 1) <= 1e-6


@pytest.mark.parametrize(("kind", "scheme"), [("static", "dense"), ("dynamic", WINDOWED)])
def test_two_caches_one_function(model: LlamaForCausalLM, kind: str, scheme: str) -> None:
    one, two = Pair(model, kind, scheme), Pair(model, kind, scheme)
    assert max(one.step(9), two.step(12)) <= 1e-6
    for _ in range(3):
        assert max(one.step(1), two.step(1, 4)) <= 1e-6


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


@pytest.mark.parametrize("read", [
    lambda keys: keys[torch.tensor([-1])], lambda keys: keys[torch.tensor([1, -2], dtype=torch.int32)],
    lambda keys: keys[torch.tensor([0, 1, 1], dtype=torch.uint8)], lambda keys: keys[torch.tensor([False, True, True])],
    lambda keys: keys[torch.tensor([True])], lambda keys: keys[torch.tensor([3])], lambda keys: keys[..., :][None],
    lambda keys: keys.index_select(0, torch.tensor(1)), lambda keys: keys.index_select(-4, torch.tensor([1, 1, 0])),
    lambda keys: keys.repeat_interleave(torch.tensor([0, 2, 1]), 0), lambda keys: keys[-1:],
    lambda keys: keys[torch.zeros(0, dtype=torch.int64)], lambda keys: keys[..., 2:5, :], lambda keys: keys[1:, ...],
    lambda keys: keys[..., 0:1, :, :, :],
], ids=["from the end", "int32", "uint8 mask", "mask", "short mask", "outside", "new dim", "no dims", "dim from the end", "repeats", "last",
        "none", "tokens behind dots", "rows ahead of dots", "dots for nothing"])
def test_rows_are_read_as_of_a_dense_tensor(model: LlamaForCausalLM, read: Callable[[Any], Any]) -> None:
    """The same rows of what it decodes to, or the same kind of error."""
    pair = Pair(model, "static", "int8")
    pair.step(9, 1)
    keys = pair.cache.layers[0].keys
    dense = kvcompile.decoded(keys)
    try:
        expected = read(dense)
    except IndexError:
        with pytest.raises((IndexError, RuntimeError)):
            kvcompile.decoded(read(keys))
        return
    assert torch.equal(kvcompile.decoded(read(keys)), expected)


def test_an_index_that_takes_all_of_a_cache_leaves_it_compressed(model: LlamaForCausalLM) -> None:
    pair = Pair(model, "static", "int8")
    pair.step(9, 1)
    keys = pair.cache.layers[0].keys
    assert all(keys[index] is keys for index in (slice(None), Ellipsis, (slice(None), Ellipsis), (slice(None),) * 4))


def test_what_is_joined_to_a_cache_in_another_dtype_widens_the_result(model: LlamaForCausalLM) -> None:
    pair = Pair(model, "dynamic", "int8")
    pair.step(9, 1)
    keys, dense = pair.cache.layers[0].keys, pair.plain.layers[0].keys
    joined = torch.cat([keys, keys.new_ones(1).expand(*keys.shape[:2], 1, keys.shape[3]), torch.ones(keys.shape, dtype=torch.float64)], 2)
    assert joined.dtype is torch.float64 and type(joined) is torch.Tensor
    assert joined.shape[2] == 2 * keys.shape[2] + 1 and torch.allclose(joined[:, :, : keys.shape[2]].float(), dense, atol=0.05)


@pytest.mark.parametrize("write", [
    lambda keys: keys.mul_(2),
    lambda keys: torch.add(torch.ones(keys.shape), 1, out=keys),
    lambda keys: keys[:, :, :1].add_(1.0),
    lambda keys: keys.__setitem__((..., 0), 1.0),
    lambda keys: keys.index_put_((torch.tensor([0]),), torch.ones(()), accumulate=True),
    lambda keys: torch._foreach_add_([keys], 1.0),
    lambda keys: torch.ops.aten.add_.Tensor(keys, 1.0),
    lambda keys: torch.nn.functional.relu(keys, inplace=True),
    lambda keys: setattr(keys, "data", torch.ones(keys.shape)),
], ids=["mul_", "out", "view", "channel", "accumulate", "foreach", "overload", "inplace", "data"])
def test_writes_that_are_no_tokens_make_it_dense(model: LlamaForCausalLM, write: Callable[[Any], Any], caplog: Any) -> None:
    """A write to the cache or to a view of it is neither lost nor refused; the next compiled call compresses the cache again."""
    handle.warn_of_densifying.cache_clear()
    pair = Pair(model, "static")
    pair.step(9, 1)
    for layer, plain in zip(pair.cache.layers, pair.plain.layers, strict=True):
        with caplog.at_level(logging.WARNING, logger="kvcompile"):
            write(layer.keys)
        write(plain.keys)
        assert type(layer.keys) is torch.Tensor and torch.allclose(layer.keys, plain.keys, atol=1e-6)
    assert len(caplog.records) <= 1 and ("test_cache_operations.py" in caplog.text or not caplog.records)
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


def test_a_tracer_that_describes_a_cache_leaves_it_compressed(model: LlamaForCausalLM) -> None:
    """Dynamo of torch 2.11 asks each input for its storage; were the cache dense from then on, every step would be compiled anew."""
    pair = Pair(model, "dynamic")
    pair.step(9, 1)
    keys = pair.cache.layers[0].keys
    with tracing(TracingContext(FakeTensorMode())):
        assert keys.untyped_storage().nbytes() <= 16
    assert isinstance(keys, kvcompile.CompressedCache)
    keys.untyped_storage()
    assert type(keys) is torch.Tensor


def test_views_show_what_is_written_after_them(model: LlamaForCausalLM) -> None:
    pair = Pair(model, "static")
    pair.step(9, 1)
    keys, plain = pair.cache.layers[0].keys, pair.plain.layers[0].keys
    views = [(cache[:, :, :4], cache[:2, :, 1:], cache.transpose(1, 2)[:, 3:]) for cache in (keys, plain)]
    for cache in (keys, plain):
        cache.index_copy_(2, torch.tensor([3]), torch.ones(3, 2, 1, 16))
    assert isinstance(keys, kvcompile.CompressedCache)
    for view, same in zip(*views, strict=True):
        assert torch.allclose(view + 0, same, atol=1e-6)
    views[0][1].mul_(3), views[1][1].mul_(3)
    for view, same in zip(*views, strict=True):
        assert torch.allclose(view + 0, same, atol=1e-6)


def test_a_compiled_graph_writes_to_a_view(model: LlamaForCausalLM) -> None:
    """A view that is an argument of compiled code is one of the cache's own memory by then."""
    pair = Pair(model, "static")
    pair.step(9, 1)
    keys, plain = pair.cache.layers[0].keys, pair.plain.layers[0].keys
    add = torch.compile(lambda view: view.add_(1.0).sum(), backend=kvcompile.backend("dense", inner="eager"))
    view, same = keys[:, :, :4, :8], plain[:, :, :4, :8]
    keys[:, :, 0] = 5.0
    plain[:, :, 0] = 5.0
    assert torch.allclose(add(view), same.add_(1.0).sum(), rtol=1e-4)
    assert torch.allclose(keys + 0, plain, atol=1e-6)
    # As long as somebody holds the view, the memory is not the cache's own.
    del view, same
    assert pair.step(1) <= 1e-5


each_clear = pytest.mark.parametrize("clear", [
    lambda keys: keys.zero_(), lambda keys: keys.fill_(0), lambda keys: keys.mul_(0), lambda keys: keys.__setitem__(..., 0),
    lambda keys: keys.__setitem__(slice(None), 0.0),
], ids=["zero_", "fill_", "mul_", "ellipsis", "slice"])


@each_clear
@each_exact
def test_zeros_in_a_cache_that_grows_are_tokens(model: LlamaForCausalLM, clear: Callable[[Any], Any], scheme: str) -> None:
    """transformers before 5.23 resets a DynamicCache by zeros in place: the next prompt stands behind as many zero tokens."""
    pair = Pair(model, "dynamic", scheme)
    pair.step(9, 1)
    for layer in (*pair.cache.layers, *pair.plain.layers):
        clear(layer.keys)
        clear(layer.values)
    assert pair.step(4, 1) <= 1e-5
    assert pair.cache.layers[0].keys.shape == pair.plain.layers[0].keys.shape


@each_clear
def test_clearing_empties_a_cache(model: LlamaForCausalLM, clear: Callable[[Any], Any]) -> None:
    pair = Pair(model, "static")
    pair.step(9, 1)
    keys = pair.cache.layers[0].keys
    clear(keys)
    assert isinstance(keys, kvcompile.CompressedCache) and not kvcompile.decoded(keys).any()


@pytest.mark.parametrize("scheme", ["dense", "int8", "int4", "fp8"])
@pytest.mark.parametrize("position", [256, 100_000, -1])
def test_a_position_outside_of_the_planes_is_loud(scheme: str, position: int) -> None:
    """On a GPU the host does not see positions: what lies outside must become NaN, not a crash and not a number."""
    from kvcompile.lowering.ops import operations as ops
    from kvcompile.schemes import parse
    from kvcompile.types import Role, SlotSpec

    made = parse(scheme)
    layout = made.layout(SlotSpec(2, 32, torch.float32, Role.KEY))
    keys, values = ([torch.zeros(plane.shape(4, 1, 2), dtype=plane.dtype) for plane in layout.planes] for _ in range(2))
    x = torch.randn(1, 2, 1, 32)
    for planes in (keys, values):
        ops.append(x, planes, torch.tensor([[position]]), made.spec())
    hi = torch.tensor([[max(position, 255)]])
    out = ops.attend(x, keys, values, hi, None, None, None, None, made.spec(), made.spec(), 1.0, 0.0, 32)
    assert out.isnan().all()


# --- graphs and bytes, counted ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@each_exact
def test_reset_and_reuse(model: LlamaForCausalLM, fresh_dynamo: None, kind: str, scheme: str) -> None:
    pair = Pair(model, kind, scheme, alone=True)
    graphs = []
    for _ in range(3):
        assert pair.step(9, 1, 1) <= 1e-6
        pair.both(lambda cache: cache.reset())
        graphs.append(len(pair.backend.graphs))
    assert graphs[1] == graphs[2]
    if kind == "static" and scheme == "dense":
        assert pair.backend.report().allocated == 0


@each_exact
def test_crop_after_each_speculative_step(model: LlamaForCausalLM, fresh_dynamo: None, scheme: str) -> None:
    pair = Pair(model, "dynamic", scheme, alone=True)
    assert pair.step(9) <= 1e-6
    for _ in range(4):
        assert pair.step(4) <= 1e-6
        pair.both(lambda cache: cache.crop(-2))
    graphs = len(pair.backend.graphs)
    assert pair.step(4, 1, 4) <= 1e-6
    assert len(pair.backend.graphs) <= graphs + 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_freed_cache_frees_its_stores(model: LlamaForCausalLM, fresh_dynamo: None, kind: str) -> None:
    one, two = Pair(model, kind, alone=True), Pair(model, kind, alone=True)
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


@pytest.mark.parametrize("copied", [Store.clone, lambda store: store.select_rows(torch.tensor([1, 1, 0]))], ids=["clone", "rows"])
def test_copies_keep_in_host_memory_what_is_kept_there(copied: Callable[[Store], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Originals of a copy were on the device, while reports counted them as the host's."""
    scheme, slot = parse("certified(tier2=host)").for_role(Role.KEY), SlotSpec(2, 32, torch.float16, Role.KEY)
    store = Store(StoreSpec(slot, scheme, scheme.layout(slot)), 2, torch.device("cpu"), 2)
    for plane in store.planes:
        plane.copy_(torch.arange(plane.numel()).view(plane.shape) % 100)
    pinned: list[torch.Tensor] = []

    def host_plane(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        pinned.append(torch.zeros(shape, dtype=dtype))
        return pinned[-1]

    monkeypatch.setattr("kvcompile.runtime.store.store.host_plane", host_plane)
    plain = copied(store)
    assert not pinned
    # As on a device, of which this machine has none.
    store.device = torch.device("cuda")
    made = copied(store)
    kept = [plane for plane, spec in made.described() if spec.host]
    assert kept and [id(plane) for plane in kept] == [id(plane) for plane in pinned]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(made.planes, plain.planes, strict=True))
