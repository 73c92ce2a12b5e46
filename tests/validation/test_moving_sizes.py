"""Sizes that change from call to call: masks made of as many rows as there are tokens so far, and what a trial must have moved."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kvcompile
from kvcompile import compilation
from kvcompile.errors import BadSetting
from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.match.agreement import DISAGREED
from kvcompile.passes.match.match import Matched
from kvcompile.passes.match.sites import Limit, LimitKind, Stage
from kvcompile.validation.inverse import solve

Mask = Callable[[int, int, torch.dtype], torch.Tensor]
"""The mask of n new tokens behind ``start`` others, [n, start + n]."""

INF = float("inf")


def ones(*sizes: int) -> torch.Tensor:
    """A mask that shows everything."""
    return torch.ones(*sizes, dtype=torch.bool)


MASKS: dict[str, Mask] = {
    "tril, last rows": lambda s, n, dtype: ones(s + n, s + n).tril()[-n:],
    "tril, rows from the start": lambda s, n, dtype: ones(s + n, s + n).tril()[s:],
    "tril, rows from T - n": lambda s, n, dtype: ones(s + n, s + n).tril()[s + n - n : s + n],
    "tril of n rows": lambda s, n, dtype: ones(n, s + n).tril(s),
    "triu, negated": lambda s, n, dtype: ~ones(n, s + n).triu(s + 1),
    "triu transposed": lambda s, n, dtype: ones(s + n, s + n).triu().T[-n:],
    "last positions": lambda s, n, dtype: torch.arange(s + n)[-n:, None] >= torch.arange(s + n),
    "positions from T": lambda s, n, dtype: torch.arange(s + n - n, s + n)[:, None] >= torch.arange(s + n)[None],
    "full of -inf, triu": lambda s, n, dtype: torch.full((n, s + n), -INF, dtype=dtype).triu(s + 1),
    "full of -inf, last rows": lambda s, n, dtype: torch.full((s + n, s + n), -INF, dtype=dtype).triu(1)[-n:, :],
    "zeros beside a triangle": lambda s, n, dtype: torch.cat(
        [torch.zeros(n, s, dtype=dtype), torch.full((n, n), -INF, dtype=dtype).triu(1)], -1,
    ),
    "flipped": lambda s, n, dtype: ones(s + n, s + n).triu().flip(0, 1)[-n:],
    "counted": lambda s, n, dtype: ones(s + n, s + n).cumsum(0)[-n:] - 1 >= torch.arange(s + n),
    "narrowed": lambda s, n, dtype: ones(s + n, s + n).tril().narrow(0, s, n),
    "window": lambda s, n, dtype: ones(s + n, s + n).tril()[-n:] & ones(s + n, s + n).triu(-5)[-n:],
    "last row selected": lambda s, n, dtype: ones(s + n, s + n).tril()[torch.arange(n) + s],
}

SESSIONS = (((0, 9), (9, 1), (10, 1), (11, 1), (12, 1), (13, 4), (17, 1)), ((0, 5), (5, 1), (6, 3), (9, 1)))
"""(start, new tokens) of the calls of two requests."""


class Chunked(nn.Module):
    """An attention over two buffers of 48 places at a start that Python counts."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(1, 2, 48, 16))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
        n = q.shape[2]
        self.k_cache[:, :, start : start + n] = k
        self.v_cache[:, :, start : start + n] = v
        keys, values = self.k_cache[:, :, : start + n], self.v_cache[:, :, : start + n]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask(start, n, q.dtype))


def errors(module: nn.Module, backend: kvcompile.Backend, sessions: tuple[tuple[tuple[int, int], ...], ...] = SESSIONS) -> list[float]:
    """The largest difference of each call between a module and itself compiled."""
    plain, call, found = copy.deepcopy(module), torch.compile(module, backend=backend), []
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for start, n in (each for session in sessions for each in session):
            q, k, v = (torch.randn(1, 2, n, 16, generator=random) for _ in "qkv")
            found.append(float((plain(q, k, v, start) - call(q, k, v, start)).abs().max()))
    return found


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_as_many_rows_as_tokens_are_right(name: str) -> None:
    backend = kvcompile.backend("dense", inner="eager")
    assert max(errors(Chunked(MASKS[name]), backend)) <= 2e-6
    report = backend.report()
    assert report.sites + len(report.refusals) == len(backend.graphs)
    assert all(graph.validated == len(graph.sites) for graph in backend.graphs)


@pytest.mark.parametrize("scheme", ["int8", "kivi(bits=4,group=16)", "certified"])
def test_the_last_rows_of_a_triangle_under_other_schemes(scheme: str) -> None:
    backend = kvcompile.backend(scheme, inner="eager", strict=True)
    assert max(errors(Chunked(MASKS["tril, last rows"]), backend)) <= 0.5
    assert backend.report().sites == len(backend.graphs) <= 3


@pytest.mark.parametrize("name", ["tril, last rows", "last positions", "narrowed"])
def test_a_mask_of_last_rows_is_rewritten_and_compiled_once_a_kind_of_call(name: str) -> None:
    backend = kvcompile.backend("dense", inner="eager", strict=True)
    errors(Chunked(MASKS[name]), backend)
    assert backend.report().sites == len(backend.graphs) <= 3


class Past:
    """A cache that grows by concatenation up to a window; with dynamic=True both of its ints are symbolic."""

    def __init__(self) -> None:
        self.keys = self.values = torch.zeros(1, 2, 0, 16)
        self.window, self.seen = 100, 0


class Grown(nn.Module):
    """An attention over such a cache, which asks for the window to find where its keys begin."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor, past: Past) -> torch.Tensor:
        n = x.shape[1]
        q, k, v = (part.view(1, n, 2, 16).transpose(1, 2) for part in self.qkv(x).split(32, -1))
        first = max(past.seen - past.window + 1, 0)
        s, t = torch.arange(n)[:, None] + past.seen, torch.arange(past.seen + n) + first
        past.keys, past.values = torch.cat([past.keys, k], 2), torch.cat([past.values, v], 2)
        past.seen += n
        mask = (t <= s).expand(1, 1, n, past.keys.shape[2])
        return F.scaled_dot_product_attention(q, past.keys, past.values, attn_mask=mask)


def test_an_int_that_is_the_length_of_a_window_counts_no_tokens() -> None:
    """The count of tokens beside it moves from call to call, and it does not."""
    backend = kvcompile.backend("dense", inner="eager", strict=True)
    module = Grown()
    call = torch.compile(module, backend=backend, dynamic=True)
    with torch.no_grad():
        for session in SESSIONS:
            plain, ours = Past(), Past()
            for _, n in session:
                x = torch.randn(1, n, 32)
                torch.testing.assert_close(call(x, ours), module(x, plain))
    assert backend.report().sites == len(backend.graphs)
    assert all(graph.validated == len(graph.sites) for graph in backend.graphs)


def frozen(sites: Matched, offset: int) -> Matched:
    """What was matched with the upper limit of every site a constant."""
    limit = Limit(LimitKind.CONST, offset)
    return dataclasses.replace(sites, sites=tuple(
        dataclasses.replace(site, bounds=dataclasses.replace(site.bounds, hi=limit)) for site in sites.sites
    ))


def test_a_limit_that_is_a_number_of_one_call_is_refused_by_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finding itself, were the matcher to read it so again: the limit is that of the captured step."""
    match, starts = compilation.match, iter((8, 9, 10, 11))
    monkeypatch.setattr(compilation, "match", lambda captured: frozen(match(captured), next(starts)))
    backend = kvcompile.backend("dense", inner="eager")
    assert max(errors(Chunked(MASKS["tril, last rows"]), backend, (SESSIONS[0][:5],))) <= 2e-6
    assert not any(graph.sites for graph in backend.graphs[2:]) and backend.report().refusals[-1].stage is Stage.VALIDATE


class CountedPool(nn.Module):
    """Steps of one token over a pool of eight blocks of eight places that a table chooses from; Python counts the tokens."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(8, 8, 2, 16))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, pos: torch.Tensor, held: int) -> torch.Tensor:
        blocks = table.gather(1, pos // 8)
        self.k_cache[blocks, pos % 8] = k.transpose(1, 2)
        self.v_cache[blocks, pos % 8] = v.transpose(1, 2)
        keys, values = (pool[table].flatten(1, 2).transpose(1, 2) for pool in (self.k_cache, self.v_cache))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=torch.arange(keys.shape[2])[None] < held)


@pytest.mark.parametrize("freeze", [False, True], ids=["as it is", "frozen"])
def test_a_pool_is_tried_at_other_sizes_than_those_of_its_first_step(freeze: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first step alone would be equal: a limit that is a number of that step agrees with it."""
    if freeze:
        match, limits = compilation.match, iter((20, 21, 22, 23))
        monkeypatch.setattr(compilation, "match", lambda captured: frozen(match(captured), next(limits)))
    module, table = CountedPool(), torch.tensor([[6, 2, 7, 1, 4]])
    backend = kvcompile.backend("dense", inner="eager")
    plain, call = copy.deepcopy(module), torch.compile(module, backend=backend)
    with torch.no_grad():
        for at in range(20, 27):
            given = *(torch.randn(1, 2, 1, 16) for _ in "qkv"), table, torch.tensor([[at]]), at + 1
            torch.testing.assert_close(call(*given), plain(*given))
    assert [len(graph.sites) for graph in backend.graphs] == ([1, 0, 0] if freeze else [1, 1])
    assert not freeze or "its first step is equal" in backend.report().refusals[-1].reason


def test_a_limit_that_is_a_number_of_one_call_is_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matcher reads every graph in two worlds: what differs between them is refused before anything is tried."""
    from kvcompile.passes.graph.shapes import hint
    from kvcompile.passes.match import match as matching

    def read(captured: Captured, *known: Any) -> Matched:
        found = matched(captured, *known)
        sizes = [node.meta["val"] for node in captured.graph.find_nodes(op="placeholder") if isinstance(node.meta["val"], torch.SymInt)]
        return frozen(found, hint(sizes[0])) if sizes else found

    matched = matching._matched
    monkeypatch.setattr(matching, "_matched", read)
    backend = kvcompile.backend("dense", inner="eager", validate=False)
    assert max(errors(Chunked(MASKS["tril, last rows"]), backend, (SESSIONS[0][:5],))) <= 2e-6
    assert DISAGREED in backend.report().refusals[-1].reason


@pytest.mark.parametrize("made", [
    lambda p: 3 * p + 1, lambda p: 100 * p, lambda p: -p, lambda p: 40 - 2 * p, lambda p: (p // 4) * 8 + p % 4,
], ids=["3p + 1", "100p", "-p", "40 - 2p", "blocks"])
def test_solving_for_what_positions_are_computed_from(made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    table = made(torch.arange(200))

    def positions(value: torch.Tensor) -> torch.Tensor:
        rising = bool(table[1] > table[0])
        found = torch.searchsorted(table if rising else -table, value if rising else -value)
        return found.view(-1)

    value = solve(positions, torch.zeros(1, 5, dtype=torch.int64), torch.arange(7, 12))
    assert value is not None and torch.equal(positions(value), torch.arange(7, 12))
    assert solve(lambda value: torch.zeros(5), torch.zeros(5), torch.arange(5)) is None


class Scrambled(nn.Module):
    """Positions come multiplied by 37 modulo 10007: neither readings of them nor bisection find what to give."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(1, 2, 48, 16))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
        pos = (code * 37) % 10007
        self.k_cache.index_copy_(2, pos, k)
        self.v_cache.index_copy_(2, pos, v)
        return F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=torch.arange(48) <= pos[:, None])


@pytest.mark.parametrize(("validate", "sites"), [(True, 0), ("where possible", 2), (False, 2)])
@pytest.mark.unvalidated
def test_what_could_not_be_tried_is_refused_unless_asked_for(validate: object, sites: int) -> None:
    backend = kvcompile.backend("dense", inner="eager", validate=validate)  # type: ignore[arg-type]
    module = Scrambled()
    plain, call = copy.deepcopy(module), torch.compile(module, backend=backend)
    inverse = pow(37, -1, 10007)
    with torch.no_grad():
        for start, n in ((3, 5), (8, 1), (9, 1)):
            q, k, v = (torch.randn(1, 2, n, 16) for _ in "qkv")
            code = torch.arange(start, start + n) * inverse % 10007
            torch.testing.assert_close(call(q, k, v, code), plain(q, k, v, code))
    report = backend.report()
    assert report.sites == sites
    assert [refusal.stage for refusal in report.refusals] == [Stage.VALIDATE] * (2 - sites)
    assert all("could not be run on random inputs" in refusal.reason and "where possible" in refusal.advice for refusal in report.refusals)
    assert sum(len(graph.unvalidated) for graph in report.graphs) == (2 if validate == "where possible" else 0)


@pytest.mark.parametrize("value", ["always", 1, None, "True"])
def test_another_value_of_validate(value: object) -> None:
    with pytest.raises(BadSetting, match=r"validate.*True or 'where possible' or False"):
        kvcompile.backend(validate=value)  # type: ignore[arg-type]
