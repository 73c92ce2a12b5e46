"""``window=N`` of schemes of single tokens: what attention reads is exactly the newest N tokens, and the codes of all others.

Where a window holds every token there is, logits are the model's own, whatever way the tokens came; a token in a wrong place would show.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from e2e_layers import cache_of, llama, prompt
from transformers import StaticCache

import kvcompile
from kvcompile import schemes
from kvcompile.types import Role, SlotSpec

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

WIDE = (
    "int4(group=16,window=64)", "int8(window=48)", "nf4(group=16,window=64,rotate=kv)", "beyond(window=64)", "fp8-static(window=64)",
    "gauss(bits=3,order=16,window=64)",
)
"""Windows that hold all tokens of these tests; one is no power of two."""
NARROW = ("int4(group=16,window=8)", "int8(window=16)", "nf4(group=16,window=8)", "beyond(window=8)", "gauss(window=8)")


def compiled_of(model: Any, scheme: object, inner: str = "eager") -> Any:
    """The model over a compressed cache."""
    return torch.compile(model, backend=kvcompile.backend(scheme, inner=inner, strict=True))


@torch.no_grad()
def logits(call: Any, cache: Any, chunks: tuple[int, ...], padding: int = 0) -> torch.Tensor:
    """Return the last logits of every chunk, [chunks, 3, vocabulary]; ``padding``: hidden first tokens of row 0."""
    mask, found = torch.ones(3, 0, dtype=torch.long), []
    for index, count in enumerate(chunks):
        mask = torch.cat([mask, torch.ones(3, count, dtype=torch.long)], 1)
        mask[0, :padding] = 0
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -count:]
        given = {"attention_mask": mask, "position_ids": places} if padding else {}
        found.append(call(prompt(3, count, index), past_key_values=cache, **given).logits[:, -1])
    return torch.stack(found)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("scheme", WIDE)
def test_a_window_of_all_tokens_changes_nothing(scheme: str, kind: str, padding: int) -> None:
    """A prompt in pieces, steps, and several tokens at a time."""
    model = llama(layers=1, head_dim=32)
    chunks = (9, 12, 1, 1, 5, 1, 3, 1)
    expected = logits(model, cache_of(model, kind), chunks, padding)
    found = logits(compiled_of(model, scheme), cache_of(model, kind), chunks, padding)
    assert (found - expected).abs().max() <= 2e-5


@pytest.mark.parametrize("scheme", ["int4(group=16,window=32)", "nf4(group=16,window=32)", "gauss(bits=3,window=32)"])
def test_tokens_behind_a_window_are_codes(scheme: str) -> None:
    """The logits stay exact until the first token leaves the window, then differ by its codes, and less than without a window."""
    model, chunks = llama(layers=1, head_dim=32), (9, *[1] * 40)
    plain = scheme.replace(",window=32", "")
    expected = logits(model, cache_of(model, "static"), chunks)
    found, coded = (logits(compiled_of(model, text), cache_of(model, "static"), chunks) for text in (scheme, plain))
    errors, others = ((x - expected).abs().amax((1, 2)) for x in (found, coded))
    # A step attends to the window as it was before it, and to its own token: 33 tokens.
    assert errors[:25].max() <= 1e-5 < errors[25:].min()
    assert others[1:].min() > 1e-5 and errors[25:].mean() < others[25:].mean()


@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("scheme", ["int4(group=16,window=64)", "beyond(window=64)"])
def test_beams_and_a_second_request(scheme: str, cache: str) -> None:
    model = llama(layers=1, head_dim=32)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3}
    if cache == "static":
        options["cache_implementation"] = "static"
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    asked = [(prompt(2, 9, seed), mask) for seed in (1, 2)]
    expected = [model.generate(ids, attention_mask=given, **options) for ids, given in asked]
    model.forward = torch.compile(model.forward, backend=kvcompile.backend(scheme, inner="eager", strict=True))
    for (ids, given), wanted in zip(asked, expected, strict=True):
        assert torch.equal(model.generate(ids, attention_mask=given, **options), wanted)


@pytest.mark.parametrize("scheme", ["int4(group=16,window=32)", "int8(window=16)", "beyond(window=16)"])
def test_going_back_by_any_number_of_tokens(scheme: str) -> None:
    """Within the window all is exact again; behind it there is no block to complete, so that no length is refused."""
    model = llama(layers=1, head_dim=32)
    compiled, size = compiled_of(model, scheme), schemes.parse(scheme).window
    ids = prompt(1, 60)
    with torch.no_grad():
        for kept in (57, 59 - size):
            plain, cache = cache_of(model, "dynamic"), cache_of(model, "dynamic")
            for at in (slice(0, 40), *(slice(place, place + 1) for place in range(40, 60))):
                model(ids[:, at], past_key_values=plain)
                compiled(ids[:, at], past_key_values=cache)
            plain.crop(kept - 60)
            cache.crop(kept - 60)
            for place in range(4):
                expected = model(ids[:, place : place + 1], past_key_values=plain).logits
                found = compiled(ids[:, place : place + 1], past_key_values=cache).logits
                assert (found - expected).abs().max() < 0.05 * expected.abs().max(), (kept, place)
            assert isinstance(cache.layers[0].keys, kvcompile.CompressedCache)


@pytest.mark.parametrize(("keys", "values"), [("int4(group=16,window=24)", "int8"), ("kivi(bits=4,group=16,window=16)", "int8(window=40)")])
def test_halves_share_the_larger_window(keys: str, values: str) -> None:
    """One attention reads both, so 40 beside blocks of 16 is 40 for both."""
    model = llama(layers=1, head_dim=32)
    backend = kvcompile.backend({"k": keys, "v": values}, inner="eager", strict=True)
    size = max(schemes.parse(text).window for text in (keys, values))
    chunks = (size - 3, *[1] * 4, 20, *[1] * 3)
    cache = cache_of(model, "static", 128)
    found = logits(torch.compile(model, backend=backend), cache, chunks)
    expected = logits(model, cache_of(model, "static", 128), chunks)
    assert (found - expected)[:5].abs().max() <= 1e-5
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    for tensor in (cache.layers[0].keys, cache.layers[0].values):
        (store,) = tensor._kv.stores.values()
        assert store.window.shape[2] == size


def test_a_policy_gives_some_layers_a_window() -> None:
    model = llama(layers=2, head_dim=32)
    policy = {"*": "int4(group=16,window=64)", "model.layers.1.*": "int4(group=16)"}
    cache = cache_of(model, "static")
    logits(compiled_of(model, policy), cache, (9, 1, 1))
    windows = [next(iter(layer.keys._kv.stores.values())).window for layer in cache.layers]
    assert windows[0] is not None and windows[0].shape[2] == 64 and windows[1] is None


@pytest.mark.parametrize("scheme", NARROW)
def test_through_inductor_it_is_the_eager_graph(scheme: str) -> None:
    """``generate`` twice over one static cache, and steps behind a prompt that passes the window."""
    model = llama(layers=1, head_dim=32)
    results = []
    for inner in ("eager", "inductor"):
        torch.compiler.reset()
        compiled, cache = compiled_of(model, scheme, inner), StaticCache(config=model.config, max_cache_len=64)
        both = []
        for _ in range(2):
            cache.reset()
            both.append(logits(compiled, cache, (19, 1, 1, 4, 1)))
        assert torch.equal(*both)
        results.append(both[0])
    assert (results[0] - results[1]).abs().max() <= 1e-5


@pytest.mark.parametrize("scheme", ["int8(window=16)", "int4(group=16,window=24)"])
def test_bytes_are_announced_as_held(scheme: str) -> None:
    """The window and its clock count once a row, beside the bytes of the codes."""
    model, made = llama(layers=1, head_dim=32), schemes.parse(scheme)
    cache = cache_of(model, "static")
    logits(compiled_of(model, scheme), cache, (9, 1))
    (store,) = cache.layers[0].keys._kv.stores.values()
    spec = SlotSpec(2, 32, torch.float32, Role.KEY)
    plain = schemes.parse(scheme.partition("(")[0] + ("(group=16)" if "group" in scheme else "")).layout(spec)
    extra = 3 * 2 * (made.window * 32 * 4 + 2 * 8)
    held = sum(plane.numel() * plane.element_size() for plane in store.planes)
    assert held == store.spec.layout.nbytes(store.pages, 3, 2) == plain.nbytes(store.pages, 3, 2) + extra
