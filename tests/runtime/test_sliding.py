"""Caches that keep only their newest tokens: recognised, kept in slots that are written over, right across the moment it fills."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_models import Attention, Case, buffers, cache_of, inputs, prompt
from sliding_models import CHUNKS, SLIDING_CASES, WINDOW
from versions import OLD_TORCH

import kvcompile
from kvcompile import validation
from kvcompile.backend import Backend
from kvcompile.errors import CacheStale
from kvcompile.lowering.ops.operations import append_body, as_tokens, unroll_body
from kvcompile.schemes import Int8
from kvcompile.validation import equivalence, sizes

KINDS = ("static", "dynamic")
BY_NAME = {case.name: case for case in SLIDING_CASES}


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


def eager(scheme: object = "dense", **options: Any) -> Backend:
    """A strict backend that compiles nothing after the rewrite."""
    return kvcompile.backend(scheme, inner="eager", strict=True, **options)


def mistral(layers: int = 1, window: int = WINDOW, attention: str = "sdpa", **options: Any) -> Any:
    """A tiny random Mistral: 4 query heads of 16 channels, 64 words, every layer with a window."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
        head_dim=16, attn_implementation=attention, sliding_window=window, eos_token_id=None, bos_token_id=None, pad_token_id=0, **options,
    )).eval()


def gemma(attention: str = "sdpa") -> Any:
    """A tiny random Gemma 3: one layer with a window, one without."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    return Gemma3ForCausalLM(Gemma3TextConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64, head_dim=16,
        layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW, query_pre_attn_scalar=16, attn_implementation=attention,
        eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )).eval()


@torch.no_grad()
def differences(model: Any, compiled: Any, kind: str, chunks: tuple[int, ...], rows: int = 3, first: Any = None) -> tuple[list[float], Any]:
    """Feed both the same chunks, row 0 of several left padded; differences of the last logits, and the compiled model's cache."""
    plain, cache = cache_of(model, kind), cache_of(model, kind)
    mask = torch.ones(rows, 0, dtype=torch.long)
    found = []
    for index, count in enumerate(chunks):
        tokens = prompt(rows, count, index)
        mask = torch.cat([mask, torch.ones(rows, count, dtype=torch.long)], 1)
        if rows > 1 and index == 0:
            mask[0, :4] = 0
        given = {"attention_mask": mask} if rows > 1 else {}
        call = first if first is not None and index == 0 else compiled
        a, b = model(tokens, past_key_values=plain, **given).logits, call(tokens, past_key_values=cache, **given).logits
        found.append((a - b)[:, -1].abs().max().item())
    return found, cache


# --- transformers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "chunks", "rows"), [
    *((kind, (20, 1, 1, 4, 1), 3) for kind in KINDS),
    *((kind, (5, 4, 4, 9, 1), 1) for kind in KINDS),
])
def test_logits(kind: str, chunks: tuple[int, ...], rows: int) -> None:
    model, backend = mistral(), eager()
    errors, _ = differences(model, torch.compile(model, backend=backend, fullgraph=True), kind, chunks, rows)
    assert max(errors) <= 1e-6
    assert backend.report().sites == len(backend.graphs)


@pytest.mark.parametrize(("kind", "attention"), [("static", "sdpa"), ("dynamic", "eager")])
def test_windows_beside_full_layers(kind: str, attention: str) -> None:
    model, backend = gemma(attention), eager()
    errors, cache = differences(model, torch.compile(model, backend=backend, fullgraph=True), kind, (10, 1, 1, 1, 1, 4, 1, 1))
    assert max(errors) <= 1e-6
    assert backend.report().sites == 2 * len(backend.graphs)
    kept, full = (cache.layers[at].keys._kv for at in range(2))
    assert kept.slots == WINDOW and full.slots is None
    assert full.length == 20 and kept.pages == 2


@pytest.mark.parametrize("make", [mistral, gemma])
@pytest.mark.parametrize(("kind", "chunks"), [("static", (6, 1, 1, *[1] * 6, 1)), ("dynamic", (4, 1, 3, 1))])
def test_where_every_int_is_symbolic(kind: str, chunks: tuple[int, ...], make: Callable[[], Any]) -> None:
    """With dynamic=True the lengths of windows are symbolic too: that of a buffer is guarded, that of a growing cache is not reached."""
    model, backend = make(), eager()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for _ in range(2):
        errors, _ = differences(model, compiled, kind, chunks)
        assert max(errors) <= 1e-6
    assert all(len(graph.sites) == graph.validated > 0 for graph in backend.graphs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefill_outside_of_the_compiled_model(kind: str) -> None:
    model, backend = mistral(), eager()
    for chunks in ((10, 1, 1, 1, 1), (20, 1, 4)):
        errors, _ = differences(model, torch.compile(model, backend=backend), kind, chunks, first=model)
        assert max(errors) <= 1e-6


@pytest.mark.parametrize(("kind", "scheme", "bound"), [
    ("dynamic", "fp8", 1e-2), ("static", "int4(group=16)", 3e-2),
])
def test_compressed_logits(kind: str, scheme: str, bound: float) -> None:
    model = mistral()
    errors, _ = differences(model, torch.compile(model, backend=eager(scheme), fullgraph=True), kind, (9, *[1] * 7, 4, 1))
    assert errors[0] <= 1e-6
    assert 0 < max(errors) <= bound


@pytest.mark.parametrize("kind", KINDS)
def test_the_ring_is_all_that_is_held(kind: str) -> None:
    """Bytes stay those of the window, and equal those announced; nothing recompiles once it is full."""
    window, model = 130, mistral(window=130)
    backend = eager("int8")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    cache = cache_of(model, kind, capacity=400)
    with torch.no_grad():
        compiled(prompt(3, window - 2), past_key_values=cache)
        for index in range(150):
            compiled(prompt(3, 1, index), past_key_values=cache)
            if index == 6:
                graphs = len(backend.graphs)
    report = backend.report()
    assert len(backend.graphs) == graphs
    # Three pages of 64 tokens, 16 codes and a float16 scale each, keys and values.
    assert report.allocated == report.announced == 2 * 3 * 2 * 3 * 64 * (16 + 2)
    assert cache.get_seq_length() == window - 2 + 150


def test_a_window_that_is_too_large_to_try_is_tried_as_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards hold the past at its end, or made a number of it."""
    for module in (sizes, equivalence, validation):
        monkeypatch.setattr(module, "MOST_ELEMENTS", 1 << 15)
    model, backend = mistral(window=1030), eager()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        errors, _ = differences(model, compiled, "dynamic", (1027, *[1] * 5), rows=1)
        assert max(errors) <= 1e-6
    assert all(graph.validated == len(graph.sites) == 1 for graph in backend.graphs)


def decoded(cache: Any) -> list[torch.Tensor]:
    """Keys and values of a cache's first layer."""
    return [kvcompile.decoded(getattr(cache.layers[0], name)) for name in ("keys", "values")]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_read_from_outside_are_in_order(kind: str) -> None:
    model = mistral()
    compiled = torch.compile(model, backend=eager(), fullgraph=True)
    plain, cache = cache_of(model, kind), cache_of(model, kind)
    with torch.no_grad():
        for index, count in enumerate((10, 1, 1, 1, 4, 1)):
            expected, found = (
                call(prompt(3, count, index), past_key_values=into).logits for call, into in ((model, plain), (compiled, cache))
            )
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
            for mine, theirs in zip(decoded(cache), (plain.layers[0].keys, plain.layers[0].values), strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
    assert cache.get_seq_length() == plain.get_seq_length()


def changed(cache: Any, change: str) -> tuple[Any, torch.Tensor]:
    """The cache after one operation, and the rows that it then has, of three."""
    rows = torch.tensor({"reorder": [2, 0, 0], "select": [1, 2], "repeat": [0, 0, 1, 1, 2, 2]}.get(change, [0, 1, 2]))
    if change == "reorder":
        cache.reorder_cache(rows)
    elif change == "select":
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
    elif change == "repeat":
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.repeat_interleave(2, dim=0), layer.values.repeat_interleave(2, dim=0)
    else:
        cache = copy.deepcopy(cache) if change == "deepcopy" else pickle.loads(pickle.dumps(cache))
    return cache, rows


@pytest.mark.parametrize("kind", KINDS)
def test_operations_on_a_full_window(kind: str) -> None:
    """One compiled model for all of them: compiling it is what takes long."""
    model = mistral()
    compiled = torch.compile(model, backend=eager("int8"), fullgraph=True)
    for change in ("reorder", "deepcopy", "pickle", "select", "repeat"):
        cache = cache_of(model, kind)
        with torch.no_grad():
            for index, count in enumerate((14, 1)):
                compiled(prompt(3, count, index), past_key_values=cache)
            before = decoded(cache)
            cache, rows = changed(cache, change)
            for mine, theirs in zip(decoded(cache), before, strict=True):
                assert torch.equal(mine, theirs[rows]), change
            compiled(prompt(len(rows), 1, 99), past_key_values=cache)
            after = decoded(cache)
        moved = 1 if kind == "static" or after[0].shape[2] == before[0].shape[2] else 0
        for mine, theirs in zip(after, before, strict=True):
            assert torch.equal(mine[:, :, : theirs.shape[2] - 1], theirs[rows][:, :, moved : moved + theirs.shape[2] - 1]), change


def test_reset_starts_again() -> None:
    model = mistral()
    compiled = torch.compile(model, backend=eager(), fullgraph=True)
    cache = cache_of(model, "static")
    with torch.no_grad():
        for round_ in range(2):
            plain = cache_of(model, "static")
            for index, count in enumerate((10, 1, 1, 1, 1)):
                words = prompt(3, count, 10 * round_ + index)
                expected, found = model(words, past_key_values=plain).logits, compiled(words, past_key_values=cache).logits
                torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
            cache.reset()


def test_an_older_view_of_a_ring_is_stale() -> None:
    model = mistral()
    compiled = torch.compile(model, backend=eager(), fullgraph=True)
    cache = cache_of(model, "dynamic")
    with torch.no_grad():
        compiled(prompt(3, 20), past_key_values=cache)
        old = cache.layers[0].keys
        wanted = kvcompile.decoded(old)
        compiled(prompt(3, 1, 1), past_key_values=cache)
        assert torch.equal(kvcompile.decoded(old), wanted)
        compiled(prompt(3, 1, 2), past_key_values=cache)
        with pytest.raises(CacheStale):
            kvcompile.decoded(old)


def test_speculation_crops_what_was_recorded() -> None:
    model = mistral()
    words = prompt(1, 15).repeat(1, 2)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "prompt_lookup_num_tokens": 3}
    expected = model.generate(words, **options)
    model.forward = torch.compile(model.forward, backend=kvcompile.backend("dense", inner="eager"))
    assert torch.equal(model.generate(words, **options), expected)


@pytest.mark.parametrize(("scheme", "why", "kind", "attention"), [
    ("kivi", "blocks of consecutive tokens", "static", "eager"),
    ("int4(group=8,window=4)", "keeps its newest 4 tokens in full precision beside its codes", "dynamic", "eager"),
    ("squat(group=16,window=32,subblock=8,rank=4,rotate=none)", "blocks of consecutive tokens", "dynamic", "sdpa"),
    ("dense(pre_rope=True)", "undoes RoPE by a key's slot", "static", "sdpa"),
])
def test_schemes_that_need_the_order_of_tokens_are_refused(scheme: str, why: str, kind: str, attention: str) -> None:
    model, backend = mistral(attention=attention), kvcompile.backend(scheme, inner="eager")
    errors, cache = differences(model, torch.compile(model, backend=backend), kind, (10, 1, 1, 1, 1))
    assert max(errors) <= 1e-6
    assert backend.report().sites == 0
    assert all("keeps its newest 12 tokens" in item.reason and why in item.reason for item in backend.report().refusals)
    assert type(cache.layers[0].keys) is torch.Tensor


@pytest.mark.parametrize(("kind", "chunks", "scheme"), [
    ("static", (9, 1, 1, 1, 1, 1), "squat(group=16,window=32,subblock=8,rank=4,rotate=none)"),
    ("dynamic", (20, 1, 1, 4, 1), "dense(pre_rope=True)"),
])
def test_rings_beside_schemes_that_need_the_order_of_tokens(kind: str, chunks: tuple[int, ...], scheme: str) -> None:
    model, backend = gemma(), eager({"*layers.0*": "dense", "*": scheme})
    errors, cache = differences(model, torch.compile(model, backend=backend), kind, chunks)
    # Fewer tokens than squat keeps exact.
    assert max(errors) <= 1e-6
    assert backend.report().sites == 2 * len(backend.graphs)
    assert not backend.report().never_calibrated
    assert cache.layers[0].keys._kv.slots == 12
    assert cache.layers[1].keys._kv.slots is None


# --- hand-written ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SLIDING_CASES, ids=str)
def test_hand_written_windows(case: Case) -> None:
    backend = eager()
    assert case.error(backend, chunks=CHUNKS) <= 1e-6
    assert backend.report().sites == len(backend.graphs)


@pytest.mark.parametrize("name", ["roll-and-put", "sliced-later"])
def test_hand_written_windows_compressed(name: str) -> None:
    assert 0 < BY_NAME[name].error(eager("int8"), chunks=CHUNKS) <= 0.01
    # Its table of levels has no tokens that could go around.
    assert 0 < BY_NAME[name].error(eager("nf4(group=16)"), chunks=CHUNKS) <= 0.2


def test_one_row() -> None:
    for name in ("roll-and-put", "combined-roll", "sliced-later"):
        assert BY_NAME[name].error(eager(), chunks=CHUNKS, batch=1) <= 1e-6


@pytest.mark.compile
@pytest.mark.skipif(OLD_TORCH, reason="stock torch.compile fails on this model: Inductor's C++ of torch 2.11 checks an index too early")
def test_inductor() -> None:
    """Buffers of a fixed size; a window that grows goes through Inductor in the acceptance run's slice."""
    model, backend = mistral(), kvcompile.backend("int8", strict=True)
    errors, _ = differences(model, torch.compile(model, backend=backend, fullgraph=True), "static", (14, 1, 4))
    assert max(errors) <= 2e-3


# --- what is no window ----------------------------------------------------------------------------------

Use = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], Any]


class Kept(Attention):
    """A buffer of ``WINDOW`` tokens that the test's own function of (self, q, k, v) uses, all [B, H, S, D]."""

    def __init__(self, use: Use) -> None:
        super().__init__(capacity=WINDOW)
        buffers(self, self.batch, self.kv, self.capacity, self.dim)
        self.use = use

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = (item.transpose(1, 2) for item in self.project(x))
        return self.use(self, q, k, v)

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The plain attention."""
        return self.close(F.scaled_dot_product_attention(q, keys, values))


def rejected(use: Use, reason: str) -> None:
    """``use`` stays as it was, is right, and is refused for ``reason``."""
    torch.manual_seed(0)
    module = Kept(use).eval()
    plain = copy.deepcopy(module)
    backend = kvcompile.backend("int8", inner="eager")
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    with torch.no_grad():
        for x in inputs(module, (1, 1, 1)):
            torch.testing.assert_close(compiled(x), plain(x))
    report = backend.report()
    assert report.sites == 0
    assert any(reason in item.reason for item in report.refusals), [item.reason for item in report.refusals]
    assert type(module.k_cache) is torch.Tensor


def _shifted(cache: torch.Tensor, new: torch.Tensor, by: int = 1) -> torch.Tensor:
    return torch.cat([cache[:, :, by:], new], 2)


def test_another_window_is_kept_than_is_read() -> None:
    def use(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        keys, values = _shifted(m.k_cache, k), _shifted(m.v_cache, v)
        y = m.attend(q, keys, values)
        m.k_cache.copy_(_shifted(m.k_cache, 2 * k))
        m.v_cache.copy_(values)
        return y

    rejected(use, "what is written back into the window is not what attention reads")


def test_another_part_of_the_past_is_kept() -> None:
    def use(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        keys, values = _shifted(m.k_cache, k), _shifted(m.v_cache, v)
        y = m.attend(q, keys, values)
        m.k_cache.copy_(torch.cat([m.k_cache[:, :, :-1], k], 2))
        m.v_cache.copy_(values)
        return y

    rejected(use, "attention and the kept window see different parts of the past")


def test_the_first_tokens_stay() -> None:
    """Attention sinks: the oldest tokens are kept beside the newest."""

    def use(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        for cache, new in ((m.k_cache, k), (m.v_cache, v)):
            cache.copy_(torch.cat([cache[:, :, :2], cache[:, :, 3:], new], 2))
        return m.attend(q, m.k_cache, m.v_cache)

    rejected(use, "")


def test_rolled_by_more_than_is_written() -> None:
    def use(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        for cache, new in ((m.k_cache, k), (m.v_cache, v)):
            rolled = cache.roll(-2, 2)
            rolled[:, :, -1:] = new
            cache.copy_(rolled)
        return m.attend(q, m.k_cache, m.v_cache)

    rejected(use, "")


def test_rolled_the_other_way() -> None:
    def use(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        for cache, new in ((m.k_cache, k), (m.v_cache, v)):
            rolled = cache.roll(1, 2)
            rolled[:, :, :1] = new
            cache.copy_(rolled)
        return m.attend(q, m.k_cache, m.v_cache)

    rejected(use, "")


def test_the_window_is_read_by_something_else() -> None:
    def use(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        keys, values = _shifted(m.k_cache, k), _shifted(m.v_cache, v)
        m.k_cache.copy_(keys)
        m.v_cache.copy_(values)
        return m.attend(q, m.k_cache, m.v_cache) + values.mean()

    rejected(use, "the cache is also read by mean")


def test_the_past_is_read_by_something_else() -> None:
    def use(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        late = m.k_cache[:, :, :3].sum()
        for cache, new in ((m.k_cache, k), (m.v_cache, v)):
            cache.copy_(_shifted(cache, new))
        return m.attend(q, m.k_cache, m.v_cache) + late

    rejected(use, "the cache is also read by sum")


def test_the_new_tokens_are_changed_while_the_window_is_made() -> None:
    def use(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        keys, values = _shifted(m.k_cache, k), _shifted(m.v_cache, v)
        k.mul_(2)
        y = m.attend(q, keys, values)
        m.k_cache.copy_(keys)
        m.v_cache.copy_(values)
        return y

    rejected(use, "the new tokens are written to while the window is made")


def test_the_window_is_returned_too() -> None:
    def use(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        keys, values = _shifted(m.k_cache, k), _shifted(m.v_cache, v)
        m.k_cache.copy_(keys)
        m.v_cache.copy_(values)
        return m.attend(q, keys, values), keys

    rejected(use, "a view of the cache is returned to the caller")


def test_older_tokens_than_the_newest_are_read() -> None:
    def use(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        keys, values = torch.cat([m.k_cache, k], 2), torch.cat([m.v_cache, v], 2)
        m.k_cache.copy_(keys[:, :, 1:])
        m.v_cache.copy_(values[:, :, 1:])
        return m.attend(q, keys[:, :, :-1], values[:, :, :-1])

    rejected(use, "attention reads other tokens than the last ones of the window")


# --- the operation --------------------------------------------------------------------------------------


def test_unroll_copies_codes_in_order() -> None:
    scheme, slots = Int8(), 70
    x = torch.randn(2, 3, 100, 16)
    planes = [torch.zeros(2, 2, 3, 64, 16, dtype=torch.int8), torch.zeros(2, 2, 3, 64, 1, dtype=torch.float16)]
    for at in range(100):
        append_body(x[:, :, at : at + 1], planes, torch.tensor([[at % slots]]), scheme.spec())
    new = torch.randn(2, 3, 5, 16)
    found = unroll_body(new, planes, torch.tensor([100 % slots]), 69, slots, scheme.spec())
    wanted = scheme.encode(torch.cat([x[:, :, 31:], new], 2))
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.shape[0] == 1 and torch.equal(as_tokens(mine), theirs)


def test_report_says_what_is_kept() -> None:
    model, backend = mistral(), eager("int8")
    differences(model, torch.compile(model, backend=backend), "static", (14, 1))
    sites = [site for graph in backend.report().graphs for site in graph.sites]
    assert {site.cache for site in sites} == {"made and filled here, newest 12", "written in place, newest 12"}
