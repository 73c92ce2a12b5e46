"""Caches for a largest batch: calls bring more and fewer rows, rows that they do not bring keep what they hold."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from e2e_layers import Attention, FirstRows, FirstRowsCombined, FirstRowsIndexCopy, FirstRowsPerRow
from torch import nn

import kvcompile
from kvcompile.errors import Unsupported
from kvcompile.passes.plan.reporting import with_tally
from kvcompile.runtime.store.parked_rows import _joined
from kvcompile.runtime.store.store import Store, StoreSpec
from kvcompile.schemes import parse
from kvcompile.schemes.certificate.telemetry import TELEMETRY_PLANE
from kvcompile.types import Role, SlotSpec

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

BOUNDS = {"dense": 1e-5, "int8": 0.02, "kivi(bits=4)": 0.3, "int8(window=16)": 0.02, "certified": 0.05, "squat": 0.5}

Step = tuple[int, int, int]
"""Rows, the position of the first token, and how many tokens each row brings."""


def request(rows: int, prompt: int, steps: int, start: int = 0) -> list[Step]:
    """A prompt and decode steps behind it."""
    return [(rows, start, prompt), *((rows, start + prompt + index, 1) for index in range(steps))]


REQUESTS = [
    *request(3, 20, 3), *request(2, 9, 3), *request(4, 13, 2),
    # Rows are done one after another, the last ones first.
    (3, 15, 1), (2, 16, 1), (1, 17, 3), *request(4, 70, 2), (2, 72, 1),
]


def x_of(module: nn.Module, step: Step, seed: int) -> torch.Tensor:
    """The input of a step."""
    rows, _, count = step
    return torch.randn(rows, count, module.width, generator=torch.Generator().manual_seed(seed))


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a share of the largest value; NaN counts as infinite."""
    error = float((found - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


class Pair:
    """A module with a cache of four rows, compiled, and itself uncompiled."""

    def __init__(self, make: type[Attention], scheme: str, inner: str = "eager", **settings: Any) -> None:
        torch.manual_seed(0)
        self.module = make(dim=32, capacity=128).eval()
        self.plain = copy.deepcopy(self.module)
        self.backend = kvcompile.backend(scheme, inner=inner, **settings)
        self.call = torch.compile(self.module, backend=self.backend)
        self.steps = 0
        self.lengths = [0] * 4

    def step(self, step: Step) -> float:
        """Run a step of both; return how far they are apart."""
        self.steps += 1
        x, (_, start, count) = x_of(self.module, step, self.steps), step
        self.lengths[: step[0]] = [start + count] * step[0]
        where: Any = start
        if isinstance(self.module, (FirstRowsIndexCopy, FirstRowsPerRow)):
            where = torch.arange(start, start + count)
        if isinstance(self.module, FirstRowsPerRow):
            where = where.repeat(step[0], 1)
        with torch.no_grad():
            return far(self.call(x, where), self.plain(x, where))

    def at(self, places: Sequence[int]) -> float:
        """Run a step of both that brings one token of each row, at a place of its own; return how far they are apart."""
        self.steps += 1
        self.lengths[: len(places)] = [place + 1 for place in places]
        x, where = x_of(self.module, (len(places), 0, 1), self.steps), torch.tensor(places)[:, None]
        with torch.no_grad():
            return far(self.call(x, where), self.plain(x, where))

    def run(self, steps: Sequence[Step]) -> float:
        """Run steps; return the largest difference."""
        return max(self.step(step) for step in steps)

    def caches(self) -> float:
        """How far the tokens of each row's last request are apart, as the buffers are read outside of compiled code."""
        places = torch.arange(128).view(1, -1, 1) if isinstance(self.module, FirstRowsIndexCopy) else torch.arange(128).view(-1, 1, 1)
        written = torch.stack([places < length for length in self.lengths])
        both = zip(self.module.buffers(), self.plain.buffers(), strict=True)
        return max(far((one + 0) * written, other * written) for one, other in both if other.dim() > 1)


@pytest.mark.parametrize("scheme", ["dense", "int8", "kivi(bits=4)", "int8(window=16)", "certified", "squat"])
@pytest.mark.parametrize("make", [FirstRows, FirstRowsIndexCopy])
def test_requests_of_different_batches(make: type[Attention], scheme: str) -> None:
    pair = Pair(make, scheme, strict=True)
    assert pair.run(REQUESTS) <= BOUNDS[scheme]
    assert pair.caches() <= BOUNDS[scheme]
    report = pair.backend.report()
    assert report.sites and not report.refusals and report.allocated == report.announced


@pytest.mark.parametrize("make", [FirstRowsCombined, FirstRowsPerRow])
def test_other_layouts(make: type[Attention]) -> None:
    pair = Pair(make, "int8", strict=True)
    assert pair.run(REQUESTS) <= BOUNDS["int8"] and pair.caches() <= BOUNDS["int8"]


@pytest.mark.parametrize("scheme", ["int8", "kivi(bits=4)"])
def test_compiled_by_inductor(scheme: str) -> None:
    pair = Pair(FirstRows, scheme, "inductor", strict=True)
    steps = [*request(3, 20, 2), (2, 22, 1), (2, 23, 1), (1, 24, 1), *request(4, 20, 1)]
    # The variant for a filled cache is made where a request begins at 0, and serves a chunk that begins elsewhere.
    assert pair.run([*steps, (4, 21, 5), (4, 26, 1)]) <= BOUNDS[scheme]
    assert pair.caches() <= BOUNDS[scheme]


def test_the_first_request_goes_on_behind_a_shorter_one() -> None:
    """Its rows now begin with the other one's tokens, and the places behind them are its own."""
    pair = Pair(FirstRows, "int8", strict=True)
    assert pair.run([*request(3, 20, 2), *request(2, 9, 2), *request(3, 1, 3, start=22)]) <= BOUNDS["int8"]
    assert pair.caches() <= BOUNDS["int8"]


def test_a_window_that_forgot_those_places_says_so() -> None:
    pair = Pair(FirstRows, "kivi(bits=4)")
    assert pair.run([*request(3, 20, 2), *request(2, 9, 2)]) <= BOUNDS["kivi(bits=4)"]
    with pytest.raises(Unsupported, match="tokens are written at position 22 of a cache that holds 11"):
        pair.step((3, 22, 1))


def test_a_window_is_not_given_rows_that_begin_in_their_middle() -> None:
    """Rows that nobody has written yet, at position 11: the dense cache takes them, then the compressed one again."""
    pair = Pair(FirstRows, "kivi(bits=4)")
    assert pair.run([*request(2, 9, 2), (4, 11, 1), (4, 12, 1)]) <= BOUNDS["kivi(bits=4)"]
    assert pair.caches() <= BOUNDS["kivi(bits=4)"]


@pytest.mark.parametrize("scheme", ["int8", "kivi(bits=4)"])
def test_rows_that_come_back_go_on_at_places_of_their_own(scheme: str) -> None:
    """Each row is asked for its own end, parked or not: one goes on, one takes back a token, one was never written."""
    pair = Pair(FirstRowsPerRow, scheme, strict=True)
    assert pair.run([*request(3, 20, 1), *request(1, 1, 3, start=21)]) <= BOUNDS[scheme]
    for places in ([25, 21, 20], [26, 22, 21, 0], [27, 23], [28, 22, 22, 1]):
        assert pair.at(places) <= BOUNDS[scheme]
    assert pair.caches() <= BOUNDS[scheme]


def test_a_window_looks_for_the_end_of_a_parked_row() -> None:
    pair = Pair(FirstRowsPerRow, "kivi(bits=4)")
    assert pair.run([*request(3, 20, 1), *request(1, 1, 3, start=21)]) <= BOUNDS["kivi(bits=4)"]
    # The second row ends at 21: the dense cache takes the gap, then the compressed one again.
    for places in ([25, 22, 21], [26, 23, 22]):
        assert pair.at(places) <= BOUNDS["kivi(bits=4)"]
    assert pair.caches() <= BOUNDS["kivi(bits=4)"]


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_codes_of_all_rows_outlive_a_dense_spell(rows: int) -> None:
    """Rows of the call and others, whatever the groups were before: encoded again, all of them have the codes that they had."""
    pair = Pair(FirstRows, "int8")
    pair.run([*request(4, 40, 1), *request(2, 1, 2, start=41)])
    before = [cache + 0 for cache in pair.module.buffers()]
    for cache in pair.module.buffers():
        # A change that no code can hold.
        cache.mul_(1.0)
        assert type(cache) is torch.Tensor
    assert pair.step((rows, 43, 1)) <= BOUNDS["int8"]
    for cache, held in zip(pair.module.buffers(), before, strict=True):
        assert type(cache) is not torch.Tensor
        assert torch.equal((cache + 0)[:, :43], held[:, :43])


def test_what_is_held_follows_the_rows_in_use() -> None:
    pair = Pair(FirstRows, "int8", strict=True, reserve=64)
    held = []
    for rows in (1, 2, 4, 3):
        pair.run(request(rows, 9, 1))
        held.append(pair.backend.report().allocated)
    assert held[1] == 2 * held[0] and held[2] == held[3] == 4 * held[0]


def test_a_cache_filled_eagerly_keeps_its_other_rows() -> None:
    pair = Pair(FirstRows, "int8", strict=True)
    with torch.no_grad():
        for module in (pair.module, pair.plain):
            module(x_of(module, (4, 0, 20), 7), 0)
    assert pair.run([(2, 20, 1), (2, 21, 1), (4, 20, 3), (3, 23, 1)]) <= BOUNDS["int8"]
    assert pair.caches() <= BOUNDS["int8"]


@pytest.mark.parametrize("scheme", ["int8", "kivi(bits=4)"])
def test_operations_outside_of_compiled_code(scheme: str) -> None:
    """Copies, rows, crops and writes act on all rows of the cache, those of the last call and the others."""
    pair = Pair(FirstRows, scheme)
    # The second request is longer: behind a shorter one a window has forgotten what the dense cache still holds.
    pair.run([*request(3, 20, 2), *request(2, 24, 2)])
    for operation in (
        lambda cache: cache.clone(), copy.deepcopy, lambda cache: cache[:, :7], lambda cache: cache[2:], lambda cache: cache[1],
        lambda cache: cache.index_select(0, torch.tensor([2, 0, 3])), lambda cache: cache.repeat_interleave(2, 0), torch.sum,
    ):
        kept = copy.deepcopy(pair.module.k_cache)
        assert far(operation(kept) + 0, operation(pair.plain.k_cache)) <= BOUNDS[scheme]
    for module in (pair.module, pair.plain):
        module.k_cache[2:, 3] = 0.5
    assert pair.caches() <= BOUNDS[scheme]
    assert pair.run([*request(2, 1, 1, start=26), *request(4, 5, 1)]) <= BOUNDS[scheme]


def test_an_emptied_cache_holds_no_rows() -> None:
    pair = Pair(FirstRows, "kivi(bits=4)", strict=True)
    pair.run([*request(3, 20, 2), *request(2, 9, 2)])
    for module in (pair.module, pair.plain):
        for cache in module.buffers():
            cache.zero_()
    assert not any(bool((cache + 0).any()) for cache in pair.module.buffers())
    assert pair.run([*request(4, 6, 2), *request(1, 9, 1)]) <= BOUNDS["kivi(bits=4)"]


FAULT = {"armed": False}


@torch.library.custom_op("kvcompile_tests::fault_of_rows", mutates_args=())
def fault(x: torch.Tensor) -> torch.Tensor:
    """Raise once where a test said so; else a copy."""
    if FAULT["armed"]:
        FAULT["armed"] = False
        raise RuntimeError("in the middle of a step")
    return x.clone()


fault.register_fake(lambda x: torch.empty_like(x))


class Fails(FirstRows):
    """Raises behind its attention where a test said so."""

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        return fault(super().forward(x, start))


def test_an_interrupted_step_that_joined_rows_leaves_them_apart() -> None:
    pair = Pair(Fails, "kivi(bits=4)", strict=True)
    assert pair.run([*request(3, 20, 2), *request(2, 24, 2)]) <= BOUNDS["kivi(bits=4)"]
    FAULT["armed"] = True
    with pytest.raises(RuntimeError, match="in the middle of a step"), torch.no_grad():
        pair.call(x_of(pair.module, (3, 0, 5), 1), 0)
    # Two rows go on where they were, and the third, which is shorter, has kept its tokens.
    assert pair.caches() <= BOUNDS["kivi(bits=4)"]
    assert pair.run(request(2, 1, 2, start=26)) <= BOUNDS["kivi(bits=4)"]
    assert pair.caches() <= BOUNDS["kivi(bits=4)"]


def test_joined_rows_report_what_each_of_them_did() -> None:
    """A store counts from what its planes held when it was made: a copy's reports are not those of what it was copied from."""
    scheme, slot = parse("int8").for_role(Role.KEY), SlotSpec(2, 32, torch.float32, Role.KEY)
    spec = StoreSpec(slot, scheme, with_tally(scheme.layout(slot), slot))
    stores = [Store(spec, rows, torch.device("cpu"), 1) for rows in (2, 1)]
    for store, copied, own in zip(stores, (5, 0), (1, 3), strict=True):
        plane = store.plane(TELEMETRY_PLANE.name)
        assert plane is not None
        plane.fill_(copied)
        if copied:
            store._begin()
        plane.add_(own)
    found = _joined(stores, 1, stores[0]).telemetry
    assert found is not None and found.before is not None
    counted = (found.plane - found.before).flatten(2).amax(-1)[0]
    assert counted.tolist() == [1, 1, 3, 0]
