"""Calls whose places the host does not look at, as on a GPU, here on a CPU: a row out of order is NaN at once, and said where one reads.

``host_reads.free`` decides where the host looks, so that all that follows from it runs here: the check on the device, in eager code and in
C++, the steady steps, and what the host learns when it reads anyway.
"""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import torch
from e2e_layers import cache_of, llama
from test_row_places import CASES, PLACES, attention, even, indexed, rows, scattered, shared
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode

import kvcompile
from kvcompile.errors import CachesSwapped, TokensOutOfOrder
from kvcompile.passes.rewrite import attend
from kvcompile.runtime.call.bound import BoundGraph
from kvcompile.runtime.handle.tensor import CompressedCache
from kvcompile.runtime.store import host_reads

WINDOWED = ("kivi(bits=4)", "int8(window=16)", "normed(bits=4)", "squat(bits=4,rotate=none)", "certified")
MORE = {
    "a draft written twice": [even(0, 40), torch.tensor([[40, 41, 41]] * 2), even(42, 1), even(43, 5)],
    "an old token again": [even(0, 100), torch.tensor([[100, 101, 3]] * 2), even(102, 1)],
    "a far jump": [even(0, 40), even(300, 1), even(301, 1), even(302, 5)],
    "one back": [even(0, 40), even(39, 1), even(40, 5)],
    "a row waits at its place": [even(0, 20), rows(20, 19), rows(21, 19), rows(22, 19)],
}
IN_ORDER = {
    "a row begins anew": CASES["a row begins anew"],
    "one after the other": [even(0, 40), even(40, 1), even(41, 5), even(46, 1)],
    "a second request": [even(0, 40), even(40, 1), even(0, 30), even(30, 1), even(31, 5)],
    "a row waits at 0": [even(0, 20), rows(20, 0), rows(21, 0), rows(22, 0)],
}
@pytest.fixture(autouse=True)
def _unlooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host may not look, and nothing is compiled before."""
    monkeypatch.setattr(host_reads, "free", lambda device: False)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        yield
    torch._dynamo.reset()


class Buffers(torch.nn.Module):
    """An attention over caches of its own."""

    def __init__(self, write: Any, device: str) -> None:
        super().__init__()
        self.write = write
        for name in ("kc", "vc"):
            self.register_buffer(name, torch.zeros(2, 1, PLACES, 32, device=device))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        """Write and attend."""
        return attention(self.write, q, k, v, self.kc, self.vc, pos)


class Pair:
    """An attention over two rows, plain and compiled, fed the same tokens; ``options`` are those of torch.compile."""

    def __init__(
        self, scheme: str, inner: str = "eager", attention: Any = attention, strict: bool = False, device: str = "cpu", **options: Any
    ) -> None:
        self.backend, self.attention, self.device = kvcompile.backend(scheme, inner=inner, strict=strict), attention, device
        self.random = torch.Generator().manual_seed(0)
        self.call = torch.compile(attention, backend=self.backend, dynamic=False, **options)
        self.begin()

    def begin(self) -> None:
        """Start with empty caches; those before are gone."""
        gc.collect()
        self.plain, self.own = ([torch.zeros(2, 1, PLACES, 32, device=self.device) for _ in "kv"] for _ in "ab")

    def tokens(self, count: int) -> list[torch.Tensor]:
        """Draw queries, keys and values of both rows."""
        q, k, v = (torch.randn(2, 1, count, 32, generator=self.random) for _ in "qkv")
        return [item.to(self.device) for item in (q / 6, (k > 0).float(), (v > 0).float())]

    def step(self, write: Any, pos: torch.Tensor) -> list[str]:
        """Call both with new tokens at ``pos`` [2, S]; say of each row whether it is right, NaN, or wrong."""
        tokens, pos = self.tokens(pos.shape[1]), pos.to(self.device)
        with torch.no_grad():
            expected, found = self.attention(write, *tokens, *self.plain, pos), self.call(write, *tokens, *self.own, pos)
        return [self.said(*row) for row in zip(expected, found, strict=True)]

    @staticmethod
    def said(expected: torch.Tensor, found: torch.Tensor) -> str:
        """Compare one row."""
        if bool(found.isnan().all()):
            return "NaN"
        return "right" if float((expected - found).abs().max()) < 0.02 else "wrong"


def is_broken(row: int, calls: list[torch.Tensor]) -> bool:
    """Whether the tokens of a row came out of order since it began at 0 the last time."""
    end, broken = 0, False
    for pos in calls:
        first, count = int(pos[row, 0]), pos.shape[1]
        broken = (broken or first != end) and first != 0
        broken = broken or pos[row].tolist() != list(range(first, first + count))
        end = first + count
    return broken


ALL = {name: calls for name, calls in (CASES | MORE | IN_ORDER).items() if not any(is_broken(row, calls[:1]) for row in range(2))}
"""All sequences of calls but those that the host sees at their first call: those are the dense cache's."""


def refusal(cache: torch.Tensor) -> TokensOutOfOrder:
    """Return the error that reading a cache raises, without the frames that hold the cache."""
    try:
        cache.cpu()
    except TokensOutOfOrder as error:
        return error.with_traceback(None)
    raise AssertionError("it was read")


def play(pair: Pair, write: Any, names: Collection[str] = ALL.keys()) -> int:
    """Play sequences of calls: each row is right where it is in order, else NaN, and then what reads the cache says so."""
    found = 0
    for name in names:
        calls = ALL[name]
        if write is shared and any(bool((pos[0] != pos[1]).any()) for pos in calls):
            continue
        pair.begin()
        for index, pos in enumerate(calls):
            for row, said in enumerate(pair.step(write, pos)):
                assert said == ("NaN" if is_broken(row, calls[: index + 1]) else "right"), (name, index, row)
        assert isinstance(pair.own[0], CompressedCache), name
        broken = [row for row in range(2) if is_broken(row, calls)]
        report, found = pair.backend.report(), found + len(broken)
        assert report.sites
        assert all(f" of row {row}, found " in line for row, line in zip(broken, report.disorder, strict=True)), name
        if not broken:
            assert kvcompile.decoded(pair.own[0]).isfinite().all()
            continue
        assert refusal(pair.own[0]).facts["row"] == broken[0]
    return found


@pytest.mark.parametrize("write", [indexed, scattered, shared])
@pytest.mark.parametrize("scheme", WINDOWED)
def test_a_row_is_right_or_nan_from_the_call_on_that_breaks_its_order(scheme: str, write: Any) -> None:
    assert play(Pair(scheme), write) > 5


@pytest.mark.parametrize("scheme", ["kivi(bits=4)", "certified"])
def test_the_same_in_cpp(scheme: str) -> None:
    assert play(Pair(scheme, "inductor"), indexed, ("a row begins anew", "one accepts a draft", "an old token again", "a far jump")) == 5


@pytest.mark.parametrize("scheme", ["int8", "beyond", "smartkv"])
def test_schemes_without_a_window_take_any_order(scheme: str) -> None:
    """And what they hold is all there for whoever reads it, though the host did not see where it went."""
    pair = Pair(scheme)
    for name in ("a draft written twice", "one back", "reversed chunk", "swapped draft", "a second request"):
        pair.begin()
        for pos in ALL[name]:
            assert pair.step(shared, pos) == ["right", "right"], name
        assert isinstance(pair.own[0], CompressedCache)
        assert (kvcompile.decoded(pair.own[0]) - pair.plain[0]).abs().max() < 0.03, name
        assert pair.backend.report().disorder == []


def test_tokens_ahead_of_those_that_the_host_counts_are_seen_when_the_cache_is_read() -> None:
    pair = Pair("int8")
    for pos in (even(0, 20), even(40, 1), even(41, 1)):
        assert pair.step(shared, pos) == ["right", "right"]
    copies = [copy.deepcopy(pair.own[0]), pair.own[0].clone(), pickle.loads(pickle.dumps(pair.own[0]))]
    for cache in (pair.own[0], *copies):
        assert (kvcompile.decoded(cache) - pair.plain[0]).abs().max() < 0.03
    for cache in (pair.own[0], pair.plain[0]):
        cache[:, :, 40:41] = 0
    assert (kvcompile.decoded(pair.own[0]) - pair.plain[0]).abs().max() < 0.03


@pytest.mark.parametrize("scheme", WINDOWED)
def test_rows_that_came_apart_are_not_taken_for_one(scheme: str) -> None:
    """One place for both rows, where one of them is a token behind."""
    pair = Pair(scheme)
    for write, pos, said in (
        (indexed, even(0, 20), ["right", "right"]), (shared, even(20, 1), ["right", "right"]), (indexed, rows(21, 0), ["right", "right"]),
        (shared, even(22, 1), ["right", "NaN"]),
    ):
        assert pair.step(write, pos) == said


def test_a_call_that_the_host_looks_at_says_which_row_and_where() -> None:
    """It looks where the tokens that it counts fill the cache: they go on in a row that nothing can be said of."""
    pair = Pair("kivi(bits=4)", strict=True)
    pair.step(indexed, even(0, 390))
    assert pair.step(indexed, rows(390, 391)) == ["right", "NaN"]
    with pytest.raises(TokensOutOfOrder, match=r"expected a token at position 390 of row 1, found one at position 391 \(at .*kc\[rows"):
        pair.step(indexed, rows(385, 390, count=10))
    # Rows that begin anew are looked at and served.
    assert pair.step(indexed, even(0, 20)) == ["right", "right"]
    assert kvcompile.decoded(pair.own[0]).isfinite().all()


def test_it_is_said_by_the_report_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair("kivi(bits=4)")
    for pos in (even(0, 20), rows(20, 22)):
        pair.step(indexed, pos)
    with caplog.at_level(logging.ERROR, "kvcompile"):
        report = pair.backend.report()
    (line,) = report.disorder
    assert "expected a token at position 20 of row 1, found one at position 22" in line
    assert line in caplog.text
    assert "error: expected a token at position 20 of row 1" in " ".join(str(report).split())
    for cache in pair.own:
        cache.zero_()
    assert pair.backend.report().disorder == []


class NoReads(TorchDispatchMode):
    """Fails where anything reads a number of a tensor on the host: on a GPU it would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in {
            torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal, torch.ops.aten.is_nonzero,
        }, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scheme", ["kivi(bits=4)", "certified", "int8"])
def test_a_step_reads_nothing_on_the_host(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, ran = Pair(scheme), []
    for pos in (even(0, 20), even(20, 1), even(21, 1)):
        pair.step(shared, pos)
    run = BoundGraph._run

    def watched(graph: BoundGraph, args: tuple[Any, ...]) -> Any:
        with NoReads():
            ran.append(run(graph, args))
        return ran[-1]

    monkeypatch.setattr(BoundGraph, "_run", watched)
    for at in (22, 23, 30, 31):
        if at == 30:
            # All that a step does once, and those behind it leave out.
            for cache in pair.own:
                cache._kv.checked_for.clear()
        pair.step(shared, even(at, 1))
    assert len(ran) == 4


def test_it_costs_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step has as many kernels as one that does not ask whether rows are broken."""

    def counted() -> int:
        torch._dynamo.reset()
        metrics.reset()
        pair = Pair("kivi(bits=4)", "inductor", turned)
        with torch._inductor.config.patch(force_disable_caches=True):
            for pos in (even(0, 20), even(20, 1)):
                pair.step(indexed, pos)
        return metrics.generated_kernel_count

    asked = counted()
    monkeypatch.setattr(attend, "in_order", lambda emit, item, q, planes: q)
    assert asked == counted() > 0


def turned(write: Any, q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """Make an attention whose queries are computed, as a model's are."""
    return attention(write, q * 0.5 + torch.roll(q, 1, -1), *rest)


def test_keys_and_values_that_change_places_are_seen_in_a_steady_step() -> None:
    pair = Pair("kivi(bits=4)")
    for pos in (even(0, 20), even(20, 1), even(21, 1)):
        assert pair.step(shared, pos) == ["right", "right"]
    for caches in (pair.plain, pair.own):
        caches.reverse()
    assert pair.step(shared, even(22, 1)) == ["right", "right"]


@pytest.mark.parametrize("scheme", ["normed(bits=4)", "squat(bits=4,rotate=none)"])
def test_a_refused_call_over_a_broken_row_says_what_broke_it(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    """The caches change places, which such a scheme refuses; but a row is out of order by then, so no dense cache has its values."""
    pair = Pair(scheme)
    for pos, said in ((even(0, 20), "right"), (even(20, 1), "right"), (rows(21, 18), "NaN"), (rows(22, 19), "NaN")):
        assert pair.step(indexed, pos) == ["right", said]
    for caches in (pair.plain, pair.own):
        caches.reverse()
    with (
        caplog.at_level(logging.WARNING, "kvcompile"),
        pytest.raises(TokensOutOfOrder, match="expected a token at position 21 of row 1, found one at position 18") as raised,
    ):
        pair.step(indexed, even(23, 1))
    assert isinstance(raised.value.__context__, CachesSwapped)
    assert "stays dense" not in caplog.text
    # Both begin anew.
    pair.begin()
    assert pair.step(indexed, even(0, 20)) == pair.step(indexed, even(20, 1)) == ["right", "right"]


def shown(
    write: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor, pos: torch.Tensor,
    seen: torch.Tensor,
) -> torch.Tensor:
    """Attend to the places that a mask [B, 1, S, T] shows."""
    write(kc, vc, k, v, pos)
    return (q @ kc.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ vc


@pytest.mark.parametrize("scheme", ["kivi(bits=4)", "squat(bits=4,rotate=none)", "certified"])
def test_a_mask_that_shows_what_nobody_wrote_is_nan_or_seen_in_time(scheme: str) -> None:
    """A first call, and one that adopts a dense cache, are looked at; later the tokens of a window end at the newest one."""
    pair = Pair(scheme, attention=shown)
    for first in (even(0, 20), even(0, 20).flip(1)):
        for mores in ((1, 1, 1), (0, 0, 1), (0, 1, 1)):
            pair.begin()
            for index, (pos, more) in enumerate(zip((first, even(20, 1), even(21, 1)), mores, strict=True)):
                tokens, seen = pair.tokens(pos.shape[1]), torch.arange(PLACES) <= pos[:, None, :, None] + more
                with torch.no_grad():
                    expected, found = shown(shared, *tokens, *pair.plain, pos, seen), pair.call(shared, *tokens, *pair.own, pos, seen)
                # The second call after a prompt in reversed order finds a dense cache.
                looked = mores[0] or (mores[1] and bool(first[0, 0])) or not more
                said = [Pair.said(*row) for row in zip(expected, found, strict=True)]
                assert said == (["right", "right"] if looked else ["NaN", "NaN"]), (bool(first[0, 0]), mores, index)


@pytest.mark.parametrize("looks", [True, False])
def test_a_row_that_is_only_padding_so_far_is_in_order(looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are counted from behind the padding, so that it holds fewer than none."""
    monkeypatch.setattr(host_reads, "free", lambda device: looks)
    model, backend = llama(), kvcompile.backend("certified", inner="eager", strict=True)
    call, caches = torch.compile(model, backend=backend), [cache_of(model, "static", 64) for _ in range(2)]
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    keep = torch.ones_like(ids)
    keep[1, :15] = 0
    begin = 0
    for count in (10, 10, 1, 1, 2):
        end = begin + count
        with torch.no_grad():
            plain, ours = (
                run(ids[:, begin:end], past_key_values=cache, attention_mask=keep[:, :end]).logits
                for run, cache in zip((model, call), caches, strict=True)
            )
        assert (plain - ours)[0].abs().max() < 0.02
        assert ours.isfinite().all()
        begin = end
    assert backend.report().disorder == []
