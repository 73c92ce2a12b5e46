"""Padding that a window's store learns of late, or wrongly: prompts in chunks shorter than it, and caches that were filled uncompiled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e_models import llama
from transformers import StaticCache

import kvcompile
from kvcompile.errors import TokensOutOfOrder
from kvcompile.runtime.store import host_reads

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

WINDOWED = (
    "kivi(bits=4,group=16,window=16)", "kivi(bits=4,group=16,window=16,pre_rope=True,sinks=4)", "normed(bits=4,group=16,window=16)",
    "int8(window=16)", "nf4(group=16,window=8,sinks=4)",
    "squat(bits=4,group=16,window=16,rank=4,subblock=8,rotate=none)", "certified",
)
SCHEMES = (*WINDOWED, "smartkv(budget=1.0)")
WITHOUT_ROPE = tuple(scheme.replace("pre_rope=True,", "") for scheme in SCHEMES)
PLACES, DIM = 64, 32
PADDED = 15


def logits(call: Callable[..., Any], config: Any, chunks: tuple[int, ...]) -> list[torch.Tensor]:
    """Return what each row's own tokens give, [20 and 20 - PADDED, vocabulary], and in four steps behind them."""
    ids = torch.randint(1, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1, :PADDED] = 0
    places, cache, found, at = (mask.cumsum(-1) - 1).clamp(min=0), StaticCache(config=config, max_cache_len=40), [], 0
    for count in (*chunks, 1, 1, 1, 1):
        new = slice(at, at + count)
        out = call(input_ids=ids[:, new], attention_mask=mask[:, : new.stop], position_ids=places[:, new], past_key_values=cache)
        found.append(out.logits)
        at += count
    made = torch.cat(found, 1)
    return [made[0], made[1, PADDED:]]


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_padding_longer_than_the_first_chunk(scheme: str, looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not looks:
        monkeypatch.setattr(host_reads, "free", lambda device: False)
    model = llama(layers=1)
    compiled = torch.compile(model, backend=kvcompile.backend(scheme, inner="eager", strict=True))
    with torch.no_grad():
        expected, found = logits(model, model.config, (10, 10)), logits(compiled, model.config, (10, 10))
    for a, b in zip(expected, found, strict=True):
        assert (a - b).abs().max() < 0.05 * a.abs().max()


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor, pos: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Write at ``pos`` [S] and attend to what ``mask`` [B, T] shows of the past."""
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    seen = (torch.arange(PLACES) <= pos[:, None]) & mask[:, None, None, :]
    return torch.nn.functional.scaled_dot_product_attention(q, kc, vc, seen)


def masks(hidden: tuple[int, int]) -> torch.Tensor:
    """A mask [2, T] that hides so many first tokens of each row."""
    return torch.arange(PLACES) >= torch.tensor(hidden)[:, None]


class Both:
    """An attention plain and compiled, fed the same tokens, signs that every scheme stores almost as they are."""

    def __init__(self, scheme: str) -> None:
        self.compiled = torch.compile(attention, backend=kvcompile.backend(scheme, inner="eager"), dynamic=False)
        self.caches = [[torch.zeros(2, 1, PLACES, DIM) for _ in "kv"] for _ in "ab"]
        self.random = torch.Generator().manual_seed(0)
        self.at = 0

    def step(self, count: int, hidden: tuple[int, int], eager: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Call both with new tokens; return for each row what was expected and what was found."""
        q, k, v = (torch.randn(2, 1, count, DIM, generator=self.random) for _ in "qkv")
        given = (q / 2, (k > 0) * 2.0 - 1, (v > 0) * 2.0 - 1)
        rest = torch.arange(self.at, self.at + count), masks(hidden)
        self.at += count
        with torch.no_grad():
            expected = attention(*given, *self.caches[0], *rest)
            found = (attention if eager else self.compiled)(*given, *self.caches[1], *rest)
        return list(zip(expected, found, strict=True))


def near(pair: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether one row is right."""
    return float((pair[0] - pair[1]).abs().max()) < 0.2


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("scheme", WITHOUT_ROPE)
def test_tokens_taken_for_padding_are_kept_and_never_read_as_zeros(scheme: str, looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of eager code is adopted by a step whose mask hides its first three tokens, which the next step's mask shows again."""
    if not looks:
        monkeypatch.setattr(host_reads, "free", lambda device: False)
    both = Both(scheme)
    both.step(20, (0, 0), eager=True)
    assert all(near(row) for row in both.step(1, (0, 3)))
    for expected, found in zip(*both.caches, strict=True):
        # What eager code reads, copies and files.
        for held in (found, found.clone(), copy.deepcopy(found), pickle.loads(pickle.dumps(found)), found[torch.tensor([0, 1])]):
            assert (kvcompile.decoded(held) - expected).abs().max() < 0.5
    for hidden in ((0, 0), (0, 3), (0, 1)):
        first, second = both.step(1, hidden)
        assert near(first)
        # A CPU looks, and has the dense cache serve what shows them.
        assert near(second) or (not looks and bool(second[1].isnan().all())), hidden


@pytest.mark.parametrize("scheme", [WINDOWED[0], WINDOWED[1]])
def test_keys_of_padding_are_turned_back(scheme: str) -> None:
    """A model's eager prompt and a compiled step: what the cache holds, before and behind a pickle, is what the plain model's holds."""
    model = llama(layers=1)
    compiled = torch.compile(model, backend=kvcompile.backend(scheme, inner="eager", strict=True))
    mask = torch.ones(2, 21, dtype=torch.int64)
    mask[1, :6] = 0
    caches = []
    for call in (model, compiled):
        cache, ids = StaticCache(config=model.config, max_cache_len=40), torch.arange(1, 43).view(2, 21)
        with torch.no_grad():
            model(input_ids=ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
            call(input_ids=ids[:, 20:], attention_mask=mask, past_key_values=cache)
        caches.append(cache.layers[0])
    for name in ("keys", "values"):
        expected, found = getattr(caches[0], name), getattr(caches[1], name)
        assert (kvcompile.decoded(found) - expected).abs().max() < 0.1 * expected.abs().max()
        rows = kvcompile.decoded(found[1:])
        assert (rows - expected[1:]).abs().max() < 0.1 * expected.abs().max()


def test_eager_code_finds_what_was_taken_for_padding() -> None:
    both = Both(WINDOWED[0])
    both.step(20, (0, 0), eager=True)
    both.step(1, (0, 3))
    assert all(near(row) for row in both.step(1, (0, 0), eager=True))
    assert all(near(row) for row in both.step(1, (0, 0)))


def test_the_error_names_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_reads, "free", lambda device: False)
    both = Both(WINDOWED[0])
    both.step(20, (0, 0), eager=True)
    both.step(1, (0, 3))
    both.step(1, (0, 1))
    with pytest.raises(TokensOutOfOrder, match="expected a mask that hides the padding before position 3 of row 1, found one that shows 1"):
        kvcompile.decoded(both.caches[1][0])
