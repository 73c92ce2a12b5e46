"""First tokens that stay exact: which they are, what becomes of them in every cache, and what cannot keep any.

Where more tokens stay exact than there are, a compressed cache is the uncompressed one but for rounding: nothing else would show a token
that was kept in a wrong place, or read from its codes.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import latent_models
import pytest
import torch
from e2e_models import cache_of, llama, prompt
from latent_models import LATENT_CASES
from paged_models import PAGED_CASES
from sliding_models import SLIDING_CASES
from transformers import StaticCache

import kvcompile
from kvcompile.lowering.ops.keep_first import keep_first_body
from kvcompile.runtime.store.codec import decode, encode
from kvcompile.runtime.store.store import Store, StoreSpec
from kvcompile.schemes import parse
from kvcompile.testing.samples import normal
from kvcompile.types import Role, SlotSpec

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

ALL = (
    "int4(group=16,rotate=kv,sinks=64)", "kivi(group=16,window=16,sinks=64,rotate=kv)",
    {"k": "int8(sinks=64)", "v": "kivi(group=16,window=16)"},
)
"""More first tokens than any of the caches below holds; the last keeps them of both halves, since one of the two asks for it."""

HEADS, WIDTH = 2, 32


# --- the operation ---------------------------------------------------------------------------------------


def rows(count: int, batch: int = 1) -> list[torch.Tensor]:
    """The planes of an empty store without a window: first tokens, and where they begin."""
    return [torch.zeros(1, batch, HEADS, count, WIDTH), torch.zeros(1, batch, 1, 1, 1, dtype=torch.int64)]


def put(planes: list[torch.Tensor], x: torch.Tensor, start: int, origin: torch.Tensor | None = None) -> None:
    """Write tokens from position ``start`` on."""
    keep_first_body(x, planes, torch.arange(start, start + x.shape[2])[None], origin)


def test_any_pieces_keep_the_same_tokens() -> None:
    x, origin = normal(2, HEADS, 30, WIDTH), torch.tensor([0, 4])
    once = rows(9, 2)
    put(once, x, 0, origin)
    assert torch.equal(once[0][0, 0], x[0, :, :9]) and torch.equal(once[0][0, 1], x[1, :, 4:13]) and once[1].flatten().tolist() == [0, 4]
    for pieces in ((5, 1, 1, 6, 17), (1,) * 30, (12, 18)):
        parts, at = rows(9, 2), 0
        for count in pieces:
            # Later calls may say what they like of padding.
            put(parts, x[:, :, at : at + count], at, origin if at == 0 else None)
            at += count
        assert all(torch.equal(a, b) for a, b in zip(once, parts, strict=True))


def test_rows_at_positions_of_their_own() -> None:
    x, planes = normal(2, HEADS, 20, WIDTH), rows(6, 2)
    put(planes, x[:, :, :4], 0)
    keep_first_body(x[:, :, 4:6], planes, torch.tensor([[4, 5], [2, 9]]), None)
    assert torch.equal(planes[0][0, 0], x[0, :, :6]) and torch.equal(planes[0][0, 1, :, 2], x[1, :, 4])


def test_a_row_that_begins_elsewhere_holds_no_token_of_the_one_before() -> None:
    x, planes = normal(1, HEADS, 20, WIDTH), rows(6)
    put(planes, x, 0, torch.tensor([3]))
    put(planes, -x[:, :, :4], 0)
    assert torch.equal(planes[0][0, 0, :, :4], -x[0, :, :4]) and planes[0][0, 0, :, 4:].isnan().all()
    put(planes, -x[:, :, 4:5], 4)
    assert torch.equal(planes[0][0, 0, :, 4], -x[0, :, 4]) and planes[0][0, 0, :, 5].isnan().all()
    again = rows(6)
    put(again, x, 0)
    put(again, -x[:, :, :4], 0)
    assert torch.equal(again[0][0, 0, :, 4:], x[0, :, 4:6]), "places keep what they held, as in a dense buffer"


@pytest.mark.parametrize("text", ["int8(sinks=5)", "kivi(sinks=5,rotate=k)"])
def test_copies_of_a_store_keep_them(text: str) -> None:
    scheme = parse(text).for_role(Role.KEY)
    spec = SlotSpec(HEADS, 64, torch.float32, Role.KEY)
    store = Store(StoreSpec(spec, scheme, scheme.layout(spec)), 2, torch.device("cpu"), 2)
    x, padding = normal(2, HEADS, 90, 64), torch.tensor([0, 7])
    encode(store, x, padding)
    for other, order in ((store.clone(), [0, 1]), (store.select_rows(torch.tensor([1, 1, 0])), [1, 1, 0])):
        found = decode(other, 90)
        for row, source in enumerate(order):
            first = int(padding[source])
            assert torch.allclose(found[row, :, first : first + 5], x[source, :, first : first + 5], atol=1e-5)
    if scheme.by_token and not scheme.window:
        later = store.gathered(3, 60, None)
        assert torch.equal(decode(later, 60), decode(store, 63)[:, :, 3:]), "the first tokens stand three places earlier now"
    store.clear()
    assert not any(plane.any() for plane in store.exact_first)


# --- models ----------------------------------------------------------------------------------------------


def masked(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """A padding mask and the positions that it gives."""
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


@torch.no_grad()
def steps(model: Any, call: Any, cache: Any, counts: tuple[int, ...], padded: bool, seed: int = 0) -> torch.Tensor:
    """Logits behind each of the calls."""
    found, mask = [], torch.ones(3, 0, dtype=torch.int64)
    for index, count in enumerate(counts):
        more = torch.ones(3, count, dtype=torch.int64)
        if padded and index == 0:
            more[0, :4], more[2, : count - 1] = 0, 0
        mask = torch.cat([mask, more], 1)
        given = {name: item if name == "attention_mask" else item[:, -count:] for name, item in masked(mask).items()} if padded else {}
        found.append(call(prompt(3, count, seed + index), past_key_values=cache, **given).logits[:, -1])
    return torch.stack(found)


@pytest.mark.parametrize("scheme", ALL, ids=str)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_where_all_tokens_are_first_ones_nothing_is_lost(scheme: object, kind: str) -> None:
    """Prompts in one piece and in several, padded and not, a second request, a cache that arrives filled, rows that are exchanged."""
    model, backend = llama(layers=1), kvcompile.backend(scheme, inner="eager", strict=True)
    compiled = torch.compile(model, backend=backend)
    for padded, counts in ((True, (9, 1, 12, 1)), (False, (5, 20, 1))):
        plain, cache = cache_of(model, kind), cache_of(model, kind)
        assert (steps(model, compiled, cache, counts, padded) - steps(model, model, plain, counts, padded)).abs().max() < 2e-5
        order = torch.tensor([2, 0, 2])
        for held in (plain, cache):
            held.reorder_cache(order)
        if not padded:
            assert (steps(model, compiled, cache, (1, 1), False, 9) - steps(model, model, plain, (1, 1), False, 9)).abs().max() < 2e-5
    prefilled, plain = cache_of(model, kind), cache_of(model, kind)
    steps(model, model, prefilled, (11,), False)
    steps(model, model, plain, (11,), False)
    assert (steps(model, compiled, prefilled, (1, 1), False, 5) - steps(model, model, plain, (1, 1), False, 5)).abs().max() < 2e-5
    assert backend.report().allocated == backend.report().announced > 0


def test_a_static_cache_is_reset_copied_saved_and_cropped() -> None:
    model = llama(layers=1)
    compiled = torch.compile(model, backend=kvcompile.backend(ALL[1], inner="eager", strict=True))
    cache, plain = cache_of(model, "static"), cache_of(model, "static")
    steps(model, compiled, cache, (14,), False)
    cache.reset()
    assert (steps(model, compiled, cache, (9, 1), False, 3) - steps(model, model, plain, (9, 1), False, 3)).abs().max() < 2e-5
    file = io.BytesIO()
    torch.save([copy.deepcopy(layer) for layer in cache.layers], file)
    file.seek(0)
    cache.layers = torch.load(file, weights_only=False)
    assert (steps(model, compiled, cache, (1, 3), False, 5) - steps(model, model, plain, (1, 3), False, 5)).abs().max() < 2e-5
    # Back by four tokens: written again, they are the ones that count.
    for held in (cache, plain):
        for layer in held.layers:
            layer.cumulative_length -= 4
    assert (steps(model, compiled, cache, (2, 1), False, 8) - steps(model, model, plain, (2, 1), False, 8)).abs().max() < 2e-5


def test_a_few_first_tokens_are_exact_and_the_others_are_codes() -> None:
    model = llama(layers=1)
    compiled = torch.compile(model, backend=kvcompile.backend("int4(group=16,rotate=k,sinks=3)", inner="eager", strict=True))
    cache, plain = cache_of(model, "static"), cache_of(model, "static")
    mask = torch.ones(3, 10, dtype=torch.int64)
    mask[1, :4] = 0
    with torch.no_grad():
        for call, held in ((compiled, cache), (model, plain)):
            call(prompt(3, 10), past_key_values=held, **masked(mask))
    found, exact = kvcompile.decoded(cache.layers[0].keys), plain.layers[0].keys
    for row, first in enumerate((0, 4, 0)):
        assert torch.allclose(found[row, :, first : first + 3], exact[row, :, first : first + 3], atol=1e-5)
        apart = (found[row, :, first + 3 : 10] - exact[row, :, first + 3 : 10]).abs().amax((0, 2))
        assert (apart > 1e-3).all() and (apart < 0.5).all()
    # A write outside of compiled code goes to where its token is.
    new = torch.randn_like(exact[:, :, :1])
    cache.layers[0].keys[:, :, 1:2] = new
    again = kvcompile.decoded(cache.layers[0].keys)
    assert torch.allclose(again[[0, 2], :, 1:2], new[[0, 2]], atol=1e-5) and not torch.allclose(again[1, :, 1:2], new[1], atol=1e-3)
    assert torch.equal(again[:, :, 2:], found[:, :, 2:])


@pytest.mark.slow
def test_generate_by_inductor_says_what_the_model_says() -> None:
    """Prompt and steps through compiled code, two requests, padded rows: every operation of both options as Inductor has it."""
    model = llama(layers=1, head_dim=32)
    expected, caches = [], [StaticCache(config=model.config, max_cache_len=40) for _ in range(2)]
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, :5] = 0

    def answers(cache: StaticCache) -> list[torch.Tensor]:
        found = []
        for seed in (0, 1):
            cache.reset()
            found.append(model.generate(
                prompt(2, 12, seed), attention_mask=mask, past_key_values=cache, max_new_tokens=9, do_sample=False, disable_compile=True,
            ))
        return found

    expected = answers(caches[0])
    model.forward = torch.compile(model.forward, backend=kvcompile.backend("int8(rotate=kv,sinks=64)", strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected, answers(caches[1]), strict=True))


@pytest.mark.parametrize(("case", "words"), [
    (SLIDING_CASES[0], "expected a scheme that encodes each token separately for a cache that keeps its newest"),
    (PAGED_CASES[0], "expected a scheme that encodes each token separately for a cache that is read through a gather"),
], ids=str)
def test_caches_without_an_order_keep_no_first_tokens(case: Any, words: str) -> None:
    backend = kvcompile.backend("int8(sinks=4)", inner="eager")
    case.error(backend)
    report = backend.report()
    assert not report.sites and report.refusals and all(words in refusal.reason for refusal in report.refusals)


OTHERS = (SLIDING_CASES[0], SLIDING_CASES[3], PAGED_CASES[0], LATENT_CASES[0], LATENT_CASES[2])
"""Windows that are written over, by one token and by several; a pool; a latent with its rotary part in a buffer of its own, and in one."""


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_other_caches_are_rotated_as_any(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What eight bits lose, rotated or not, is some thousandth."""
    sizes = {}
    if case is LATENT_CASES[0]:
        # Widths that blocks divide.
        monkeypatch.setattr(latent_models, "ROTARY", 16)
        sizes = {"rank": 32}
    rotated, plain = (case.error(kvcompile.backend(text, inner="eager", strict=True), **sizes) for text in ("int8(rotate=kv)", "int8"))
    assert 0 < rotated < 3 * plain


def test_a_latent_keeps_its_first_tokens_in_both_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_models, "ROTARY", 16)
    assert LATENT_CASES[0].error(kvcompile.backend("int8(rotate=kv,sinks=64)", inner="eager", strict=True), rank=32) < 1e-5
