"""Counters that a module advances and its user moves: the host looks at the positions again, and every number is the dense module's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from e2e_models import llama

import kvcompile
from kvcompile.errors import WindowPassed
from kvcompile.runtime.call.bound import BoundGraph

SCHEMES = ("dense", "int8", "kivi(bits=4)", "int8(window=16)", "squat(bits=4,rotate=none)", "certified", "smartkv")
WINDOWS = {"kivi(bits=4)", "int8(window=16)", "squat(bits=4,rotate=none)", "certified"}
PLACES = 128


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """One attention [B, H, S, D] whose counter ``at`` [] or [B, 1] says where new tokens go."""
    pos = at + torch.arange(k.shape[2])
    if at.dim():
        rows = torch.arange(k.shape[0])[:, None]
        kc[rows, :, pos] = k.transpose(1, 2)
        vc[rows, :, pos] = v.transpose(1, 2)
    else:
        kc.index_copy_(2, pos, k)
        vc.index_copy_(2, pos, v)
    at.add_(k.shape[2])
    hidden = torch.arange(PLACES) > (pos[:, None, :, None] if at.dim() else pos[:, None])
    return (q @ kc.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ vc


@pytest.fixture(scope="module", autouse=True)
def _once() -> Iterator[None]:
    """Graphs are compiled once a scheme."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        yield
    compiled.cache_clear()
    torch._dynamo.reset()


@functools.cache
def compiled(scheme: str) -> tuple[Any, kvcompile.Backend]:
    """The attention compiled for a scheme."""
    backend = kvcompile.backend(scheme, inner="eager")
    return torch.compile(attention, backend=backend, dynamic=False), backend


class Pair:
    """A dense run and a compressed one over caches of their own, fed the same tokens of 0 and 1, which every scheme holds closely."""

    def __init__(self, scheme: str, rows: int = 1, counter: Callable[[], torch.Tensor] | None = None, seed: int = 0) -> None:
        self.random, self.rows = torch.Generator().manual_seed(seed), rows
        made = counter or (lambda: torch.zeros((), dtype=torch.long))
        self.plain, self.own = ([torch.zeros(rows, 1, PLACES, 32), torch.zeros(rows, 1, PLACES, 32), made()] for _ in "ab")
        self.call = compiled(scheme)[0]

    def step(self, count: int) -> None:
        """Feed ``count`` tokens to both and compare."""
        q, k, v = (torch.randn(self.rows, 1, count, 32, generator=self.random) for _ in "qkv")
        with torch.no_grad():
            expected = attention(q, (k > 0).float(), (v > 0).float(), *self.plain)
            found = self.call(q, (k > 0).float(), (v > 0).float(), *self.own)
        assert (found - expected).abs().max() < 0.03, (found - expected).abs().max()

    def compare(self) -> None:
        """Compare what the caches hold up to the counters."""
        end = int(self.plain[2].max())
        for mine, other in zip(self.own[:2], self.plain[:2], strict=True):
            for state in (kvcompile.decoded(mine), copy.deepcopy(mine) + 0, mine.clone() + 0):
                assert (state[:, :, :end] - other[:, :, :end]).abs().max() < 0.03
        assert torch.equal(self.own[2], self.plain[2])

    def move(self, how: Callable[[torch.Tensor], Any]) -> None:
        """Let the user move both counters; what ``how`` returns takes the counter's place if it is another tensor."""
        for run in (self.plain, self.own):
            made = how(run[2])
            run[2] = made if isinstance(made, torch.Tensor) else run[2]

    def go(self, *counts: int) -> None:
        """Take steps, then compare states."""
        for count in counts:
            self.step(count)
        self.compare()


MOVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "to 0": lambda at: at.zero_(), "by -1": lambda at: at.sub_(1), "by -3": lambda at: at.add_(-3), "to 20": lambda at: at.fill_(20),
    "by 1": lambda at: at.add_(1), "to 80": lambda at: at.copy_(torch.tensor(80)), "data": lambda at: at.data.fill_(41),
    "numpy": lambda at: at.numpy().fill(44), "another tensor": lambda at: torch.full_like(at, 41), "nowhere": lambda at: at.fill_(int(at)),
    "an equal one": lambda at: at.clone(),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_moved_counter_is_followed(scheme: str, move: str) -> None:
    """Gaps, rewinds and restarts: the dense numbers, or for a window that went too far back an error that names it."""
    run = Pair(scheme)
    run.go(40, 1, 1, 1)
    assert compiled(scheme)[1].report().sites
    run.move(MOVES[move])
    try:
        run.go(1, 1, 1, 5, 1, 1)
    except WindowPassed:
        assert move == "to 20" and scheme in WINDOWS
        return
    run.move(lambda at: at.sub_(2))
    run.go(1, 1, 5, 1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_counters_of_rows(scheme: str) -> None:
    """Each row has a counter of its own: rows take back drafts of different lengths, all at once and one at a time."""
    run = Pair(scheme, rows=3, counter=lambda: torch.zeros(3, 1, dtype=torch.long))
    run.go(40, 1, 1, 5)
    for back in ([1, 0, 4], [0, 2, 0], [3, 3, 3]):
        run.move(lambda at, back=back: at.sub_(torch.tensor(back)[:, None]))
        for count in (1, 1, 5, 1):
            run.step(count)


@pytest.mark.parametrize("scheme", ["int8", "kivi(bits=4)", "smartkv"])
def test_counters_without_versions(scheme: str) -> None:
    """A counter made in inference mode counts no versions; on a CPU its numbers tell."""
    def made() -> torch.Tensor:
        with torch.inference_mode():
            return torch.zeros((), dtype=torch.long)

    with torch.inference_mode():
        run = Pair(scheme, counter=made)
        run.go(40, 1, 1, 1)
        run.move(lambda at: at.sub_(1))
        run.go(1, 1, 5, 1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_counter_of_two_caches(scheme: str) -> None:
    """A counter that another cache's calls advance moved for this one."""
    run, other = Pair(scheme), Pair(scheme, seed=1)
    other.plain[2], other.own[2] = run.plain[2], run.own[2]
    run.go(40, 1, 1)
    other.step(1)
    run.go(1, 1, 5, 1)


@pytest.mark.parametrize("scheme", ["int8", "kivi(bits=4)", "squat(bits=4,rotate=none)", "smartkv"])
def test_a_token_written_in_between(scheme: str) -> None:
    """A token that its user writes over in the middle does not move where the next call goes on; so do tokens behind the last one."""
    run = Pair(scheme)
    run.go(40, 1, 1, 1)
    for at in (42, 3):
        for cache in (*run.plain[:2], *run.own[:2]):
            cache[:, :, at] = 1.0
        run.go(1, 1)
    for cache in (*run.plain[:2], *run.own[:2]):
        cache[:, :, int(run.plain[2])] = 1.0
    run.move(lambda at: at.add_(1))
    run.go(1, 1, 5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_second_request(scheme: str) -> None:
    """Cleared caches and a counter at 0, and caches that were not cleared."""
    run = Pair(scheme)
    run.go(40, 1, 1)
    for tensor in (*run.plain, *run.own):
        tensor.zero_()
    run.go(20, 1, 1)
    run.move(lambda at: at.zero_())
    run.go(5, 1, 1)


def test_nothing_is_looked_at_while_nobody_moves_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a counter that nobody moved take the short way, one after it was moved does not, the next one does again."""
    short: list[int] = []
    taken = BoundGraph._fast_step
    monkeypatch.setattr(BoundGraph, "_fast_step", lambda graph, *rest: short.append(1) or taken(graph, *rest))
    run = Pair("kivi(bits=4)")
    run.go(40, 1)
    for moves, expected in ((False, 4), (True, 3)):
        if moves:
            run.move(lambda at: at.sub_(1))
        short.clear()
        run.go(1, 1, 1, 1)
        assert len(short) == expected


@pytest.mark.parametrize("scheme", SCHEMES)
def test_static_caches_of_transformers(scheme: str) -> None:
    """``cumulative_length`` of a StaticCache set back and forth by its user: refused drafts, a place reserved, a second request."""
    torch._dynamo.reset()
    model = llama(layers=1, head_dim=32)
    call = torch.compile(model, backend=kvcompile.backend(scheme, inner="eager"))
    plain, own = (transformers.StaticCache(config=model.config, max_cache_len=PLACES) for _ in "ab")
    random = torch.Generator().manual_seed(0)
    for moved, counts in ((0, (40, 1, 1, 5)), (-3, (1, 5)), (-1, (1, 1)), (1, (1, 1))):
        for cache in (plain, own):
            cache.layers[0].cumulative_length.add_(moved) if moved else None
        for count in counts:
            ids = torch.randint(0, model.config.vocab_size, (2, count), generator=random)
            with torch.no_grad():
                expected, found = (each(ids, past_key_values=cache).logits for each, cache in ((model, plain), (call, own)))
            assert (found - expected).abs().max() < (1e-4 if scheme == "dense" else 0.3) * expected.abs().max()
        decoded = kvcompile.decoded(own.layers[0].keys)
        if scheme != "kivi(bits=4)":
            assert (decoded - plain.layers[0].keys).abs().max() < 0.1 * decoded.abs().max()
