"""Programs that a person might write around a cached attention: what stock ``torch.compile`` runs is run right, or left as it is.

A program is driven twice, compiled and uncompiled, over two requests. Each was once wrong, refused for no good reason, or an error.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_layers import Attention, Buffered
from torch import nn

import kvcompile
import kvcompile.lowering.compile
from kvcompile.errors import SiteRefused, TokensForgotten, Unsupported

Tensor = torch.Tensor
KIVI = "kivi(group=16)"
Drive = Callable[[Callable[[Any], Any]], list[Tensor]]


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


@pytest.fixture
def _poison() -> Iterator[None]:
    """``torch.empty`` gives NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def tokens(*counts: int, width: int = 64, seed: int = 0) -> list[Tensor]:
    """Random chunks of a sequence, two rows."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(2, count, width, generator=random) for count in counts]


def causal(count: int, total: int) -> Tensor:
    """bool [count, total]: the last ``count`` of ``total`` tokens look back."""
    return torch.ones(count, total, dtype=torch.bool).tril(total - count)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention with grouped heads."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def run(drive: Drive, compile_: Callable[[Any], Any]) -> list[Tensor]:
    """The results of a program whose module is compiled so."""
    torch.manual_seed(0)
    with torch.no_grad():
        return [item.clone() for item in drive(compile_)]


def check(drive: Drive, scheme: str, bound: float = 1e-5, **settings: Any) -> kvcompile.Backend:
    """Compare a program with itself uncompiled; the backend that compiled it."""
    backend = kvcompile.backend(scheme, inner="eager", **settings)
    expected = run(drive, lambda module: module)
    found = run(drive, lambda module: torch.compile(module, backend=backend))
    for index, (want, have) in enumerate(zip(expected, found, strict=True)):
        assert (want - have).norm() <= bound * want.norm(), f"result {index} of {len(found)}"
    return backend


def sites(backend: kvcompile.Backend) -> list[int]:
    """Rewritten attentions of each graph."""
    return [len(graph.sites) for graph in backend.graphs]


def reasons(backend: kvcompile.Backend) -> str:
    """All reasons of refusals."""
    return "; ".join(refusal.reason for graph in backend.graphs for refusal in graph.refusals)


def by_position(
    make: Callable[[], nn.Module], calls: Sequence[tuple[int, int]], ints: bool = False, after: Callable[[nn.Module], Any] | None = None
) -> Drive:
    """A program that gives its module ``count`` tokens at each position of ``calls``; ``after``: what is done to it behind them."""

    def drive(compile_: Callable[[Any], Any]) -> list[Tensor]:
        module = make()
        call, found = compile_(module), []
        for seed, (at, count) in enumerate(calls):
            found.append(call(tokens(count, seed=seed)[0], at if ints else torch.arange(at, at + count)))
        if after is not None:
            after(module)
        return [*found, *module.buffers()] if after is not None else found

    return drive


# --- one tensor for all layers, a position in Python ------------------------------------------------------


class Growing:
    """nanochat's cache: [layers, keys and values, rows, heads, tokens, channels], grown in chunks; slices are written and given back."""

    def __init__(self, room: int, make: Callable[..., Tensor]) -> None:
        self.shape, self.make, self.held, self.position = [2, 2, 2, 2, room, 16], make, None, 0

    def insert(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.held is None:
            self.held = self.make(self.shape)
        first, last = self.position, self.position + k.shape[2]
        if last > self.held.shape[4]:
            more = [*self.shape[:4], (last + 15) // 8 * 8 - self.held.shape[4], 16]
            self.held = torch.cat([self.held, self.make(more)], 4).contiguous()
            self.shape = list(self.held.shape)
        self.held[layer, 0, :, :, first:last] = k
        self.held[layer, 1, :, :, first:last] = v
        if layer == 1:
            self.position = last
        return self.held[layer, 0, :, :, :last], self.held[layer, 1, :, :, :last]


class Layer(Attention):
    """One layer over a shared cache."""

    def __init__(self, index: int) -> None:
        super().__init__(kv=2)
        self.index = index

    def forward(self, x: Tensor, cache: Growing) -> Tensor:
        q, k, v = self.heads_first(x)
        k, v = cache.insert(self.index, k, v)
        return self.close(sdpa(q, k, v, causal(q.shape[2], k.shape[2])))


class Layers(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(0), Layer(1)])

    def forward(self, x: Tensor, cache: Growing) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, cache)
        return x


def nanochat(room: int, make: Callable[..., Tensor]) -> Drive:
    def drive(compile_: Callable[[Any], Any]) -> list[Tensor]:
        call, found = compile_(Layers()), []
        for seed in range(2):
            cache = Growing(room, make)
            found += [call(x, cache) for x in tokens(5, 1, 1, 3, 1, seed=seed)]
        cache.position = 0
        return found + [call(x, cache) for x in tokens(4, 1, seed=5)]

    return drive


def test_one_tensor_for_all_layers() -> None:
    backend = check(nanochat(32, torch.zeros), "dense")
    assert set(sites(backend)) == {2}, reasons(backend)


@pytest.mark.usefixtures("_poison")
def test_what_an_empty_cache_holds_is_not_validated() -> None:
    backend = check(nanochat(32, torch.empty), "dense")
    assert set(sites(backend)) == {2}, reasons(backend)


def test_a_cache_that_grows_by_empty_places() -> None:
    backend = check(nanochat(8, torch.zeros), "dense")
    assert set(sites(backend)) == {0, 2}
    assert "the concatenated cache is written to after it is made" in reasons(backend)


# --- sliding caches by hand ----------------------------------------------------------------------------------------


class SlidingCache(Attention):
    """Eight slots, written at ``position % 8``; read as far as they were written."""

    slots = 8

    def __init__(self) -> None:
        super().__init__(kv=2)
        self.register_buffer("k_cache", torch.zeros(2, 2, self.slots, 16))
        self.register_buffer("v_cache", torch.zeros(2, 2, self.slots, 16))

    def forward(self, x: Tensor, pos: Any) -> Tensor:
        q, k, v = self.heads_first(x)
        if isinstance(pos, int):
            at, seen = pos % self.slots, min(self.slots, pos + x.shape[1])
            self.k_cache[:, :, at : at + x.shape[1]], self.v_cache[:, :, at : at + x.shape[1]] = k, v
            mask = causal(x.shape[1], seen) if x.shape[1] > 1 else None
            return self.close(sdpa(q, self.k_cache[:, :, :seen], self.v_cache[:, :, :seen], mask))
        at = pos % self.slots
        k, v = self.k_cache.index_copy_(2, at, k), self.v_cache.index_copy_(2, at, v)
        token = pos[-1] - (pos[-1] - torch.arange(self.slots)) % self.slots
        return self.close(sdpa(q, k, v, (token <= pos[:, None]) & (token >= 0)))


AROUND = [(0, 5), *((at, 1) for at in range(5, 12)), (0, 4), (4, 1)]


@pytest.mark.parametrize("scheme", ["dense", KIVI])
@pytest.mark.parametrize("ints", [False, True], ids=["tensor", "int"])
def test_a_ring_by_hand(ints: bool, scheme: str) -> None:
    """A window of 32 tokens holds all of the eight exactly, and forgets seven of them when the cache is written from its front."""
    backend = check(by_position(SlidingCache, AROUND, ints), scheme)
    assert any(sites(backend)), reasons(backend)


# --- tokens out of their order ----------------------------------------------------------------------------


class Positioned(Buffered):
    """A buffer written at positions, masked by them."""

    def __init__(self) -> None:
        super().__init__(kv=2)

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        q, k, v = self.heads_first(x)
        k, v = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
        return self.close(sdpa(q, k, v, torch.arange(self.capacity) <= pos[:, None]))


class Given(Positioned):
    """A mask that is an argument: whether it hides anything is known from its values alone."""

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        return self.attend(x, pos, torch.arange(self.capacity) < pos.max() + 1 + 3 * (pos.max() < 6))

    def attend(self, x: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.heads_first(x)
        k, v = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
        return self.close(sdpa(q, k, v, mask.logical_and(mask.new_ones(x.shape[1], 1))))


@pytest.mark.parametrize("scheme", [KIVI, "certified"])
def test_tokens_that_leave_places_out(scheme: str, caplog: Any) -> None:
    """A window has no place for them: it gave NaN."""
    check(by_position(Positioned, [(0, 10), (15, 1), (16, 1), (30, 1), (31, 2)]), scheme)
    assert "a window needs tokens in order" in caplog.text


def test_a_restart_is_served_compressed(caplog: Any) -> None:
    check(by_position(Positioned, [(0, 20), (20, 1), (0, 7), (7, 1), (5, 3), (8, 1)]), KIVI)
    assert "dense" not in caplog.text


def test_a_mask_that_shows_what_a_window_forgot(caplog: Any) -> None:
    check(by_position(Given, [(0, 20), (20, 1), (4, 1), (5, 1), (8, 3)]), KIVI)
    assert "a window drops all tokens after" in caplog.text


def test_tokens_that_were_forgotten_are_missed() -> None:
    with pytest.raises(TokensForgotten, match="the tokens between them were dropped"):
        check(by_position(Positioned, [(0, 20), (5, 1), (20, 1)]), KIVI)


def test_strict_raises_where_a_window_cannot_serve() -> None:
    with pytest.raises(Unsupported, match="as strict=True demands"):
        check(by_position(Positioned, [(0, 10), (15, 1)]), KIVI, strict=True)


@pytest.mark.parametrize("scheme", ["dense", KIVI])
def test_set_gives_a_cache_other_memory(scheme: str) -> None:
    """``Tensor.set_`` asks no ``__torch_function__``."""

    def drive(compile_: Callable[[Any], Any]) -> list[Tensor]:
        module = Positioned()
        call, found = compile_(module), []
        for seed in range(2):
            found += [call(tokens(count, seed=seed)[0], torch.arange(at, at + count)) for at, count in ((0, 12), (12, 1))]
            for cache in module.buffers():
                cache.set_(torch.zeros(cache.shape))
        return [*found, call(tokens(3)[0], torch.arange(3)), *module.buffers()]

    check(drive, scheme)


# --- padding by symbolic sizes ----------------------------------------------------------------------------


class PaddedMask(Positioned):
    """Keys are read up to a multiple of eight, and the additive mask is padded to it."""

    def forward(self, x: Tensor, at: int) -> Tensor:
        q, k, v = self.heads_first(x)
        count, total = x.shape[1], at + x.shape[1]
        self.k_cache[:, :, at:total], self.v_cache[:, :, at:total] = k, v
        end = (total + 7) // 8 * 8
        mask = F.pad(torch.zeros(count, total).masked_fill(~causal(count, total), -math.inf), (0, end - total), value=-math.inf)
        return self.close(sdpa(q, self.k_cache[:, :, :end], self.v_cache[:, :, :end], mask))


class PaddedTokens(Positioned):
    """New tokens are padded to a multiple of four before they are written."""

    def forward(self, x: Tensor, at: int) -> Tensor:
        q, k, v = self.heads_first(x)
        more = -x.shape[1] % 4
        k, v = F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more))
        self.k_cache[:, :, at : at + x.shape[1] + more], self.v_cache[:, :, at : at + x.shape[1] + more] = k, v
        return self.close(sdpa(q, self.k_cache, self.v_cache, torch.arange(self.capacity) <= (at + torch.arange(x.shape[1]))[:, None]))


@pytest.mark.parametrize("scheme", ["dense", KIVI, "certified"])
@pytest.mark.parametrize("make", [PaddedMask, PaddedTokens])
def test_padding_by_a_symbolic_size(make: Callable[[], nn.Module], scheme: str) -> None:
    backend = check(by_position(make, [(0, 5), (5, 1), (6, 1), (7, 3), (10, 2), (0, 4), (4, 1)], ints=True), scheme)
    assert all(sites(backend)), reasons(backend)


# --- sizes that are equal in the traced call only ---------------------------------------------------------


class SomeRows(Attention):
    """The first rows of a cache of four, as many as come in."""

    def __init__(self) -> None:
        super().__init__(kv=2)
        self.register_buffer("k_cache", torch.zeros(4, 2, 32, 16))
        self.register_buffer("v_cache", torch.zeros(4, 2, 32, 16))

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        q, k, v = self.heads_first(x)
        k = self.k_cache[: x.shape[0]].index_copy_(2, pos, k)
        v = self.v_cache[: x.shape[0]].index_copy_(2, pos, v)
        return self.close(sdpa(q, k, v, torch.arange(32) <= pos[:, None]))


def test_a_batch_that_once_fills_the_cache() -> None:
    """The graph of a symbolic batch is traced with four rows, and called with three."""

    def drive(compile_: Callable[[Any], Any]) -> list[Tensor]:
        call = compile_(SomeRows())
        return [
            call(x.repeat(2, 1, 1)[:rows], torch.arange(at, at + x.shape[1]))
            for rows in (2, 4, 3) for at, x in zip((0, 5, 6), tokens(5, 1, 1, seed=rows), strict=True)
        ]

    backend = check(drive, "dense")
    assert backend.report().sites and not reasons(backend)


# --- refused, and why -------------------------------------------------------------------------------------


class Talking(Buffered):
    """Weights are mixed over heads before they meet the values."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(self.heads, self.heads, bias=False)

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        q, k, v = self.heads_first(x)
        k, v = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
        scores = (q @ k.mT / 4).masked_fill(torch.arange(self.capacity) > pos[:, None], -math.inf)
        return self.close(torch.einsum("bhst,gh->bgst", scores.softmax(-1), self.mix.weight) @ v)


def test_weights_mixed_over_heads() -> None:
    backend = check(by_position(Talking, [(0, 5), (5, 1), (0, 3)]), "int4")
    assert not any(sites(backend)) and "has no dim of cached tokens" in reasons(backend)


def test_a_graph_whose_sizes_cannot_be_spelled_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise Unsupported(expected="a size", found="another", where="here", todo="nothing")

    monkeypatch.setattr("kvcompile.passes.rewrite.symbols.Symbols.of", fail)
    drive = by_position(functools.partial(PaddedMask), [(0, 5), (5, 1), (6, 1), (7, 3)], ints=True)
    backend = check(drive, "int4", bound=0.2, validate=False)
    assert "expected a size, found another (at here)" in reasons(backend)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        check(drive, "int4", bound=0.2, validate=False, strict=True)
    assert isinstance(caught.value.inner_exception, SiteRefused)


@pytest.mark.parametrize("scheme", ["dense", KIVI])
@pytest.mark.parametrize("failing", ["past", "fresh"])
def test_a_graph_that_the_inner_compiler_rejects_is_left_as_it_is(failing: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may fail on what a graph became, and not on what it was."""
    compile_graph = kvcompile.lowering.compile.compile_graph

    def reject(*args: Any, plan: str, **rest: Any) -> Any:
        if plan.endswith(failing):
            raise RuntimeError("no such instruction")
        return compile_graph(*args, plan=plan, **rest)

    monkeypatch.setattr(importlib.import_module("kvcompile.variants"), "compile_graph", reject)
    drive = by_position(Positioned, [(0, 9), (9, 1), (10, 1), (0, 7), (7, 1)])
    backend = check(drive, scheme)
    assert "no such instruction" in reasons(backend)
    # A prompt's graph is none that was rewritten where it cannot be compiled, and neither is a step's.
    assert [bool(graph.sites) for graph in backend.graphs[:2]] == [failing == "past", failing == "fresh"]
