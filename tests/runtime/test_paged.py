"""Caches that are read through a gather: block tables, token tables, rows assigned to requests; rewritten and right, or refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from paged_models import BLOCK, PAGED_CASES, REFUSED_CASES, BlocksFirst, GivenBack, Packed, PagedCase, RowsOfRequests

import kvcompile
from kvcompile import schemes
from kvcompile.backend import Backend
from kvcompile.errors import Unsupported
from kvcompile.lowering.ops.gather import gather_body
from kvcompile.lowering.ops.operations import append_body
from kvcompile.types import Role, SlotSpec, pages_for

BY_NAME = {case.name: case for case in PAGED_CASES}
BY_TOKEN = [item.spec() for kind in (schemes.Dense, schemes.Int8, schemes.Fp8, schemes.Int4) for item in kind.variants()]
TOLERANCE = 2e-6
BRIEF = (9, 1, 1)


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


def eager(scheme: object = "dense", **options: Any) -> Backend:
    """A strict backend that compiles nothing after the rewrite."""
    return kvcompile.backend(scheme, inner="eager", strict=True, **options)


@pytest.mark.parametrize("case", PAGED_CASES, ids=str)
def test_dense_equals_the_module(case: PagedCase) -> None:
    backend = eager()
    assert case.error(backend) <= TOLERANCE
    report = backend.report()
    assert report.sites == case.sites * len(report.graphs) and not report.refusals
    assert len(report.graphs) == 2 + case.grows


@pytest.mark.parametrize("case", PAGED_CASES[::2], ids=str)
def test_int8_is_near_the_module(case: PagedCase) -> None:
    # Every attention adds an error of its own.
    assert 0 < case.error(eager("int8")) <= 0.01 * case.sites


@pytest.mark.parametrize(("scheme", "bound"), [("fp8", 0.06), ("int4", 0.15), ("nf4", 0.15)])
def test_schemes_are_near_the_module(scheme: str, bound: float) -> None:
    assert 0 < BY_NAME["blocks-first"].error(eager(scheme), BRIEF, dim=32) <= bound


SIZES: tuple[dict[str, int], ...] = (
    {"batch": 1, "heads": 1, "kv": 1}, {"batch": 4, "kv": 4}, {"batch": 1}, {"kv": 1}, {"kv": 4, "dim": 8},
)


@pytest.mark.parametrize(("name", "sizes"), [
    *((name, sizes) for name in ("heads-first", "rows-of-requests", "one-write") for sizes in SIZES),
    *((name, sizes) for name in ("slots", "token-by-token", "one-token") for sizes in SIZES[:2]),
], ids=str)
def test_dims_of_one_and_of_equal_size(name: str, sizes: dict[str, int]) -> None:
    assert BY_NAME[name].error(eager(), BRIEF, **sizes) <= TOLERANCE


@pytest.mark.parametrize("name", ["blocks-first", "rows-of-requests"])
def test_half_precision(name: str) -> None:
    assert BY_NAME[name].error(eager(), BRIEF, torch.bfloat16) <= 2e-2


@pytest.mark.parametrize("case", REFUSED_CASES, ids=str)
def test_refused_for_its_reason_and_right(case: PagedCase) -> None:
    backend = kvcompile.backend("int8", inner="eager")
    assert case.error(backend, BRIEF) == 0.0
    report = backend.report()
    assert report.sites == 0 and report.allocated == 0 and report.refusals
    assert any(case.refused in item.reason for item in report.refusals), [str(item) for item in report.refusals]
    assert all("paged_models.py" in item.line and item.advice for item in report.refusals)


@pytest.mark.parametrize(("scheme", "why"), [
    *((scheme, "blocks of consecutive tokens") for scheme in ("kivi", "squat", "certified")),
    *(
        (scheme, "tokens in full precision beside its codes")
        for scheme in ("int4(window=32)", "nf4(window=32)", "gauss(window=32)", "beyond(window=16)")
    ),
])
def test_schemes_that_need_tokens_in_order_are_refused(scheme: str, why: str) -> None:
    backend = kvcompile.backend(scheme, inner="eager")
    assert BY_NAME["slots"].error(backend, BRIEF, dim=64) == 0.0
    report = backend.report()
    assert report.refusals and not report.sites
    assert all("read through a gather" in item.reason and why in item.reason for item in report.refusals)


@pytest.mark.parametrize("name", ["blocks-first", "flat-pool", "rows-of-requests", "used-blocks"])
def test_no_recompiles_beyond_stock_over_50_steps(name: str) -> None:
    case, backend = BY_NAME[name], eager("int8")
    stock: list[int] = []

    def plain(module: torch.fx.GraphModule, given: list[Any]) -> Any:
        stock.append(1)
        return torch._dynamo.lookup_backend("aot_eager")(module, given)

    counts: dict[str, list[int]] = {}
    for who, inner, seen in (("stock", plain, stock), ("ours", backend, backend.graphs)):
        torch._dynamo.reset()
        module = case.make()
        compiled = torch.compile(module, backend=inner, fullgraph=True)
        counts[who] = []

        def call(*args: Any, who: str = who, compiled: Any = compiled, seen: Any = seen) -> torch.Tensor:
            result = compiled(*args)
            counts[who].append(len(seen))
            return result

        with torch.no_grad():
            results = case.drive(module, call, (9, *[1] * 50))
        assert all(torch.isfinite(result).all() for result in results)
    assert counts["ours"] == counts["stock"]
    assert len(counts["ours"]) == 51


@pytest.mark.parametrize("name", ["blocks-first", "slots", "rows-of-requests"])
def test_requests_come_and_go(name: str) -> None:
    """Continuous batching: prompts of one request, steps of whichever are there, in any order; the number of rows is dynamic."""
    case = BY_NAME[name]
    module = case.make()
    plain, backend = copy.deepcopy(module), eager()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    table, lengths = case.table(module), torch.zeros(3, dtype=torch.int64)
    generator = torch.Generator().manual_seed(4)
    calls = [([0], 5), ([0], 1), ([1], 7), ([1, 0], 1), ([0, 1], 1), ([2], 3), ([2, 0, 1], 1), ([0, 2], 1), ([1], 1), ([0, 1, 2], 4)]
    with torch.no_grad():
        for rows, count in calls:
            x = torch.randn(len(rows), count, module.width, generator=generator)
            pos = lengths[rows][:, None] + torch.arange(count)
            torch.testing.assert_close(compiled(x, pos, table[rows]), plain(x, pos, table[rows]), atol=TOLERANCE, rtol=0)
            lengths[rows] += count
    assert not backend.report().refusals


@pytest.mark.parametrize(("scheme", "bound"), [("dense", TOLERANCE), ("int8", 0.01)])
def test_requests_packed_into_one_row(scheme: str, bound: float) -> None:
    """Prompts and steps side by side, as many as there are: tokens written and tokens read are dynamic numbers."""
    torch.manual_seed(0)
    module = Packed().eval()
    plain, backend = copy.deepcopy(module), eager(scheme)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    generator = torch.Generator().manual_seed(5)
    owned, lengths = torch.randperm(module.blocks * BLOCK, generator=generator)[:90].view(3, 30), [0, 0, 0]
    with torch.no_grad():
        for step in ({0: 7}, {0: 1, 1: 5}, {0: 1, 1: 1}, {0: 1, 1: 1, 2: 3}, {0: 1, 2: 1}, {2: 1}, {0: 2, 1: 1, 2: 1}):
            write = torch.cat([owned[row, lengths[row] : lengths[row] + new] for row, new in step.items()])
            read = torch.cat([owned[row, : lengths[row] + new] for row, new in step.items()])
            seen = [torch.ones(new, lengths[row] + new).tril(lengths[row]) for row, new in step.items()]
            mask = torch.block_diag(*seen).bool()[None, None]
            x = torch.randn(1, len(write), module.width, generator=generator)
            torch.testing.assert_close(compiled(x, write, read, mask), plain(x, write, read, mask), atol=bound, rtol=0)
            for row, new in step.items():
                lengths[row] += new
    assert len(backend.graphs) <= 3


def test_a_write_behind_a_graph_break_is_refused() -> None:
    class Broken(BlocksFirst):
        def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x)
            self.k_cache[self.where(pos, table)], self.v_cache[self.where(pos, table)] = k, v
            torch._dynamo.graph_break()
            return self.attend(q, *(pool[table].flatten(1, 2).transpose(1, 2) for pool in (self.k_cache, self.v_cache)), pos)

    case, backend = PagedCase("broken", Broken), kvcompile.backend("int8", inner="eager")
    module = case.make()
    plain = copy.deepcopy(module)
    with torch.no_grad():
        found = case.drive(module, torch.compile(module, backend=backend), BRIEF)
        torch.testing.assert_close(found, case.drive(plain, plain, BRIEF), atol=0, rtol=0)
    report = backend.report()
    assert report.refusals and not report.sites and all("not written in this graph" in item.reason for item in report.refusals)


def test_a_pool_filled_eagerly_is_adopted_whole() -> None:
    case, backend = BY_NAME["heads-first"], eager("int8")
    module = case.make()
    plain = copy.deepcopy(module)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    table, x = case.table(module), torch.randn(3, 11, module.width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for model in (module, plain):
            model(x[:, :9], torch.arange(9).repeat(3, 1), table)
        filled = module.k_cache.clone()
        for at in (9, 10):
            pos = torch.full((3, 1), at)
            torch.testing.assert_close(compiled(x[:, at : at + 1], pos, table), plain(x[:, at : at + 1], pos, table), atol=0.01, rtol=0)
    assert isinstance(module.k_cache, kvcompile.CompressedCache)
    report = backend.report()
    places = module.blocks * BLOCK
    assert report.allocated == report.announced == 2 * pages_for(places) * 64 * 2 * (16 + 2)
    assert report.allocated == report.graphs[0].sites[0].bytes_after
    assert report.dense == report.graphs[0].sites[0].bytes_before == 2 * places * 2 * 16 * 4
    with torch._C.DisableTorchFunctionSubclass():
        assert module.k_cache.untyped_storage().nbytes() <= 16
    # Every place was taken over, in its order.
    untouched = filled == plain.k_cache
    decoded = kvcompile.decoded(module.k_cache)
    assert decoded.shape == filled.shape
    assert (decoded - plain.k_cache)[untouched].abs().max() <= plain.k_cache.abs().max() / 127


@pytest.mark.parametrize("name", ["blocks-first", "rows-of-requests"])
def test_places_never_written_bring_no_nan(name: str) -> None:
    case = BY_NAME[name]
    module = case.make()
    plain = copy.deepcopy(module)
    module.k_cache.fill_(float("nan")), module.v_cache.fill_(float("nan"))
    with torch.no_grad():
        wanted = case.drive(plain, plain, BRIEF)
        found = case.drive(module, torch.compile(module, backend=eager(), fullgraph=True), BRIEF)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


def test_entries_of_a_table_that_are_not_in_use_may_be_negative() -> None:
    case = BY_NAME["blocks-first"]
    module = case.make()
    plain = copy.deepcopy(module)
    compiled = torch.compile(module, backend=eager(), fullgraph=True)
    table, x = case.table(module), torch.randn(3, 10, module.width, generator=torch.Generator().manual_seed(0))
    table[:, 2:] = -1
    with torch.no_grad():
        for at in (slice(0, 9), slice(9, 10)):
            pos = torch.arange(10)[at].repeat(3, 1)
            torch.testing.assert_close(compiled(x[:, at], pos, table), plain(x[:, at], pos, table), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("written", [False, True])
def test_a_place_outside_of_the_pool_gives_nan_not_numbers(written: bool) -> None:
    """The model itself stops with an error there; compiled code cannot without waiting for the device."""
    case = BY_NAME["blocks-first"]
    module = case.make()
    compiled = torch.compile(module, backend=eager("int8"), fullgraph=True)
    table, x = case.table(module), torch.randn(3, 9, module.width)
    with torch.no_grad():
        compiled(x, torch.arange(9).repeat(3, 1), table)
        table[1, 1 if written else 0] = module.blocks
        result = compiled(x[:, :1], torch.full((3, 1), 9), table)
    assert result[1].isnan().all()
    assert written or result[[0, 2]].isfinite().all()


def test_what_the_handle_of_a_pool_can_do() -> None:
    case = BY_NAME["blocks-first"]
    module = case.make()
    plain = copy.deepcopy(module)
    compiled = torch.compile(module, backend=eager(), fullgraph=True)
    with torch.no_grad():
        case.drive(module, compiled, BRIEF), case.drive(plain, plain, BRIEF)
        pool = module.k_cache
        assert torch.allclose(pool[2:4], plain.k_cache[2:4], atol=TOLERANCE)
        assert torch.allclose(pool.transpose(0, 1), plain.k_cache.transpose(0, 1), atol=TOLERANCE)
        for same in (pickle.loads(pickle.dumps(pool)), copy.deepcopy(pool)):
            assert isinstance(same, kvcompile.CompressedCache)
            assert torch.equal(kvcompile.decoded(same), kvcompile.decoded(pool))
        pool[3] = pool[4]
        plain.k_cache[3] = plain.k_cache[4]
        assert type(pool) is torch.Tensor and torch.allclose(pool[2:5], plain.k_cache[2:5], atol=TOLERANCE)
        for buffer in (module.k_cache, module.v_cache, plain.k_cache, plain.v_cache):
            buffer.zero_()
        torch.testing.assert_close(case.drive(module, compiled), case.drive(plain, plain), atol=TOLERANCE, rtol=0)
        # Who writes at the address of a view writes to the pool.
        assert isinstance(pool, kvcompile.CompressedCache) and pool[:1].data_ptr() == pool.data_ptr()


def test_a_pool_is_not_read_in_two_ways() -> None:
    class Both(RowsOfRequests):
        def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
            if table is not None:
                return super().forward(x, pos, table)
            q, k, v = self.project(x)
            rows = torch.arange(x.shape[0])[:, None]
            self.k_cache[rows, :, pos], self.v_cache[rows, :, pos] = k, v
            return self.attend(q, self.k_cache, self.v_cache, pos)

    module = Both(batch=7).eval()
    compiled = torch.compile(module, backend=eager())
    x, pos = torch.randn(7, 1, module.width), torch.zeros(7, 1, dtype=torch.int64)
    with torch.no_grad():
        compiled(x, pos, torch.randperm(7))
        with pytest.raises(Unsupported, match="reads in one way"):
            compiled(x, pos, None)


def test_pools_that_are_given_back() -> None:
    module, backend = GivenBack().eval(), eager()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    table, generator = BY_NAME["blocks-first"].table(module), torch.Generator().manual_seed(6)
    ours, plain = [torch.zeros(module.shape()) for _ in range(2)], [torch.zeros(module.shape()) for _ in range(2)]
    with torch.no_grad():
        for at in (slice(0, 9), slice(9, 10), slice(10, 11), slice(11, 12)):
            pos = torch.arange(12)[at].repeat(3, 1)
            x = torch.randn(3, pos.shape[1], module.width, generator=generator)
            y, *ours = compiled(x, pos, table, *ours)
            z, *plain = module(x, pos, table, *plain)
            torch.testing.assert_close(y, z, atol=TOLERANCE, rtol=0)
    assert all(isinstance(pool, kvcompile.CompressedCache) for pool in ours) and len(backend.graphs) <= 3


def test_attention_over_embeddings_is_no_cache() -> None:
    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(20, 16)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            words = self.words(ids)
            return torch.nn.functional.scaled_dot_product_attention(x, words, words)

    backend = eager()
    with torch.no_grad():
        torch.compile(Words(), backend=backend)(torch.randn(2, 3, 16), torch.randint(0, 20, (2, 7)))
    assert not backend.report().refusals and not backend.report().sites


def test_what_is_gathered_is_not_returned() -> None:
    class Returning(BlocksFirst):
        def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> Any:
            q, k, v = self.project(x)
            self.k_cache[self.where(pos, table)], self.v_cache[self.where(pos, table)] = k, v
            keys, values = (pool[table].flatten(1, 2).transpose(1, 2) for pool in (self.k_cache, self.v_cache))
            return self.attend(q, keys, values, pos), values

    backend = kvcompile.backend("int8", inner="eager")
    module = Returning().eval()
    plain = copy.deepcopy(module)
    given = torch.randn(3, 9, module.width), torch.arange(9).repeat(3, 1), BY_NAME["blocks-first"].table(module)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend=backend)(*given), plain(*given), atol=0, rtol=0)
    assert [item.reason for item in backend.report().refusals] == ["keys or values that are made from the cache are returned to the caller"]


def test_a_pool_that_belongs_to_another_tensor_stays_dense() -> None:
    class Given(BlocksFirst):
        def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor, *pools: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x)
            for pool, new in zip(pools, (k, v), strict=True):
                pool[self.where(pos, table)] = new
            return self.attend(q, *(pool[table].flatten(1, 2).transpose(1, 2) for pool in pools), pos)

    backend = kvcompile.backend("int8", inner="eager")
    module = Given().eval()
    owner = torch.zeros(2, *module.shape())
    x, pos, table = torch.randn(3, 9, module.width), torch.arange(9).repeat(3, 1), BY_NAME["blocks-first"].table(module)
    with torch.no_grad():
        wanted = module(x, pos, table, *owner.clone())
        assert torch.equal(torch.compile(module, backend=backend)(x, pos, table, *owner), wanted)
    assert all("owns" in item.reason for item in backend.report().refusals) and backend.report().refusals
    # A pool of its own is taken over where it was passed in.
    own = [torch.zeros(module.shape()) for _ in range(2)]
    with torch.no_grad():
        torch.compile(module, backend=eager())(x, pos, table, *own)
    assert all(isinstance(pool, kvcompile.CompressedCache) for pool in own)


@pytest.mark.parametrize("scheme", BY_TOKEN)
def test_gather_copies_codes(scheme: str) -> None:
    parsed = schemes.parse(scheme)
    slot = SlotSpec(2, 64, torch.float32, Role.KEY)
    generator = torch.Generator().manual_seed(0)
    planes = [
        torch.randint(0, 100, spec.shape(3, 1, 2), generator=generator).to(spec.dtype) for spec in parsed.layout(slot).planes
    ]
    x = torch.randn(1, 2, 150, 64, generator=generator)
    append_body(x, planes, torch.arange(150).unsqueeze(0), scheme)
    places = torch.randint(0, 150, (4, 70), generator=generator)
    places[2, 5], places[3, 69] = -1, 3 * 64
    made = gather_body(planes[: parsed.planes_read(slot)], places, 64, scheme)
    assert all(plane.shape[:4] == (1, 4, 2, 70) and plane.is_contiguous() for plane in made)
    found = parsed.decode(tuple(plane[0] for plane in made), slot)
    whole = parsed.decode(tuple(plane.permute(1, 2, 0, 3, 4).flatten(2, 3) for plane in planes), slot)[0]
    inside = (places >= 0) & (places < 150)
    wanted = whole[:, places.clamp(0, 149)].permute(1, 0, 2, 3)
    assert torch.equal(found.permute(0, 2, 1, 3)[inside], wanted.permute(0, 2, 1, 3)[inside])
    assert found.permute(0, 2, 1, 3)[~inside].isnan().all() and int((~inside).sum()) == 2


@pytest.mark.compile
@pytest.mark.parametrize("name", ["blocks-first", "rows-of-requests"])
def test_inductor(name: str) -> None:
    reference = BY_NAME[name].error(eager("int8"), BRIEF)
    torch._dynamo.reset()
    assert abs(BY_NAME[name].error(kvcompile.backend("int8", strict=True), BRIEF) - reference) <= 1e-3

