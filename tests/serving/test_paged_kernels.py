"""The kernels over blocks of a pool, in Triton's interpreter, against the eager bodies of the operations."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from interpreted import interpreted
from launched import OnPtx

import kvcompile
from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.schemes.gauss import Gauss
from kvcompile.schemes.nf4 import Nf4
from kvcompile.serving.pools import Pool
from kvcompile.types import Role

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
APART = {F16: 4e-3, BF16: 2e-2, F32: 2e-5}
"""How far results may be apart, by dtype: a rounding or two."""
INTERPRETED = Direct(False)
OF_TABLES = 6e-3
"""How far log-sums may be apart where levels are looked up as integers of 14 bits (``decode/tables.jinja``)."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: schemes, sizes, (tokens, queries) of each row, masks; ``most``: ``max_queries``, 0 for as many as rows have.

    ``layers``: of how many pools side by side in one memory, of which the call has the last.
    """

    keys: str = "int4"
    values: str = ""
    rows: tuple[tuple[int, int], ...] = ((40, 1), (0, 0), (70, 1), (3, 1), (100, 1))
    page: int = 16
    heads: int = 1
    group: int = 4
    dim: int = 64
    value_dim: int = 64
    window: int = 0
    sinks: bool = False
    softcap: float = 0.0
    table: torch.dtype = torch.int32
    dtype: torch.dtype = F16
    most: int = 0
    multiprocessors: int = 3
    layers: int = 1


RAGGED = ((40, 3), (5, 0), (70, 5), (0, 0), (33, 1), (9, 9))

SCHEMES = (
    "dense", "int8", "fp8", "int4", "nf4", "gauss", "gauss(bits=3)", "gauss(bits=2)", "beyond", "beyond(bits=5)", "int8-static",
    "fp8-static", "int4(rotate=k)", "int8(rotate=kv)", "fp8(granularity=group)", "int4(scale_dtype=float32)",
)

CASES = (
    Case("int4", "int8", page=32, heads=2, value_dim=32, window=20, sinks=True, softcap=3.0, table=torch.int64),
    Case("dense", "int4", RAGGED, page=64, heads=1, group=3, sinks=True, table=torch.int64),
    Case("int4", "", RAGGED, group=3, window=20, softcap=3.0),
    Case("fp8", "dense", ((40, 1), (300, 1)), heads=2, group=1, window=50, sinks=True),
    Case("int8", "", RAGGED, page=48, dim=80, value_dim=80),
    Case("int8", "", RAGGED, page=256, sinks=True),
    Case("nf4", "", RAGGED, window=17, sinks=True),
    Case("int4", "", ((90, 40), (50, 2)), group=2, sinks=True),
    Case("int8", "int4", ((200, 64), (50, 2)), group=2, window=30, dtype=BF16),
    Case("int4", "nf4", RAGGED, dtype=F32, window=1),
    Case("int4", "", RAGGED, most=2, sinks=True, layers=3),
    Case("int8", "dense", ((3, 5), (40, 1)), sinks=True),
    Case("int8", "", tuple((1 + 7 * i % 50, 1) for i in range(150)), group=1, dim=32, value_dim=32, multiprocessors=1),
    # One item a request: programs are tiles of queries of all requests, most of which have none.
    Case("int8", "", ((90, 90), *((0, 0),) * 140, (50, 2), (0, 3), (70, 1)), group=1, dim=32, value_dim=32, window=40, multiprocessors=1),
    Case("int4", "", ((90, 40), (0, 0), (50, 2)), group=2, most=33, sinks=True, multiprocessors=1),
)


def filled(case: Case) -> tuple[Pool, torch.Tensor]:
    """A pool with every row's tokens in blocks of random order, whatever else in all others, and the table of blocks."""
    generator = torch.Generator().manual_seed(1)
    need = [math.ceil(tokens / case.page) for tokens, _ in case.rows]
    pool = kvcompile.pool(
        sum(need) + 2, case.heads, case.dim, case.keys, values=case.values or case.keys, value_dim=case.value_dim, page=case.page,
        dtype=case.dtype,
    )
    whole = pool.data.unsqueeze(1).repeat(1, case.layers, 1, 1).random_(0, 256, generator=generator)
    pool = dataclasses.replace(pool, data=whole[:, -1])
    order = torch.randperm(sum(need) + 2, generator=generator).tolist()
    table = torch.full((len(need), max(1, *need) + 1), -7, dtype=case.table)
    for row, (tokens, _) in enumerate(case.rows):
        blocks = torch.tensor([order.pop() for _ in range(need[row])], dtype=torch.int64)
        table[row, : need[row]] = blocks
        t = torch.arange(tokens)
        k, v = (torch.randn(tokens, case.heads, dim, generator=generator).to(case.dtype) for dim in (case.dim, case.value_dim))
        pool.append(k, v, blocks[t // case.page] * case.page + t % case.page)
    return pool, table


def asked(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor | None]:
    """Queries with one in no row ahead and one behind, lengths, query starts, ``max_queries`` and sinks of a call."""
    counts = torch.tensor([count for _, count in case.rows])
    start = torch.cat((torch.zeros(1), counts.cumsum(0))).to(case.table) + 1
    lengths = torch.tensor([tokens for tokens, _ in case.rows], dtype=case.table)
    heads = case.heads * case.group
    q = torch.randn(int(start[-1]) + 1, heads, case.dim, generator=torch.Generator().manual_seed(2)).to(case.dtype)
    return q, lengths, start, case.most or int(counts.max()), torch.linspace(-1, 2, heads) if case.sinks else None


def attends_as_the_body(case: Case, launcher: Launcher = INTERPRETED) -> None:
    """Hold a call by kernels, which the launcher runs, to the eager body over the same pool."""
    from kvcompile.lowering.decode.site import Machine
    from kvcompile.lowering.paged.config import refusal
    from kvcompile.serving.kernels import attended, to_attend

    pool, table = filled(case)
    q, lengths, start, most, sinks = asked(case)
    tables, numbers = (table, lengths, start), (0.3, case.softcap, case.window)
    want = pool.attend(q, *tables, most, scale=0.3, softcap=case.softcap, window=case.window, sinks=sinks)
    given = to_attend(pool.layout, q, pool.data, tables, most, pool.key_tables, pool.value_tables, numbers, sinks)
    assert refusal(given) is None
    got = attended(pool.layout, given, Machine(case.multiprocessors, 232448), launcher)
    apart, tabled = APART[case.dtype], case.keys.startswith(("nf4", "gauss", "beyond"))
    torch.testing.assert_close(got[0], want[0], atol=apart, rtol=apart, equal_nan=True)
    torch.testing.assert_close(got[1], want[1], atol=OF_TABLES if tabled else 1e-4, rtol=1e-4, equal_nan=True)
    assert not got[0][0].any() and not got[0][-1].any(), "queries in no row"
    assert bool(got[0].isnan().any()) == bool(case.most)


def attend_as_the_body(*cases: Case) -> None:
    """In one interpreter, since a process takes longer than a case: each case, named where it fails."""
    for case in cases:
        try:
            attends_as_the_body(case)
        except Exception as error:
            raise AssertionError(f"failed: {case}") from error


@pytest.mark.parametrize("schemes", [SCHEMES[:8], SCHEMES[8:]], ids=("common", "others"))
def test_every_scheme_is_attended_to_as_by_the_body(schemes: tuple[str, ...]) -> None:
    interpreted(attend_as_the_body, *(Case(scheme, rows=((40, 1), (0, 0), (70, 1))) for scheme in schemes), guarded=True)


@pytest.mark.parametrize("first", range(0, len(CASES), 3))
def test_masks_pages_and_ragged_queries_are_those_of_the_body(first: int) -> None:
    interpreted(attend_as_the_body, *CASES[first : first + 3], guarded=True)


ON_PTX = (
    Case("int4", rows=((40, 1), (70, 1)), dim=128, value_dim=128, dtype=BF16),
    Case("int4", rows=((40, 3), (70, 4)), page=64, dim=128, value_dim=128, dtype=BF16, sinks=True),
    Case("dense", layers=2, rows=((40, 1), (0, 0), (150, 1)), dim=128, value_dim=128, dtype=BF16, table=torch.int64),
    Case("int8", "fp8", rows=((40, 1), (70, 1)), dim=128, value_dim=128, window=50),
    Case("nf4", "gauss", rows=((40, 1), (70, 1)), dim=128, value_dim=128, dtype=BF16),
    Case("fp8-static", "beyond", rows=((40, 1), (70, 1)), dim=128, value_dim=128, dtype=BF16, softcap=3.0),
)


@pytest.mark.compile
@pytest.mark.parametrize("case", ON_PTX, ids=lambda case: f"{case.keys}-{case.values or case.keys}-page{case.page}")
def test_as_the_ptx_of_a_hopper_they_attend_as_the_body(case: Case) -> None:
    """What the interpreter has not: inline assembly, tensor cores, asynchronous copies."""
    attends_as_the_body(dataclasses.replace(case, multiprocessors=1), OnPtx())


@pytest.mark.compile
@pytest.mark.parametrize("scheme", ["int4", "fp8", "dense", "int8-static", "nf4"])
def test_as_the_ptx_of_a_hopper_they_append_as_the_body(scheme: str) -> None:
    from kvcompile.lowering.paged.append import append_by_kernels
    from kvcompile.serving.kernels import to_append

    pool = kvcompile.pool(3, 2, 128, scheme)
    x, slots = torch.randn(9, 2, 128).to(BF16), torch.tensor([5, -1, 47, 0, 16, -9, 33, 2, 1])
    # What is run in numpy writes contiguous tensors back.
    planes = [plane.contiguous() for plane in pool.layout.planes(pool.data)[0]]
    append_by_kernels([to_append(pool.layout, Role.KEY, x, planes, slots, pool.key_tables)], OnPtx())
    pool.append(x, x, slots)
    assert any(plane.any() for plane in planes)
    for plane, wanted in zip(planes, pool.layout.planes(pool.data)[0], strict=True):
        assert torch.equal(plane, wanted)


def wrong_blocks() -> None:
    """In the interpreter: a block that the pool does not have makes its row NaN, no other, and nothing outside is read."""
    from kvcompile.lowering.decode.site import Machine
    from kvcompile.serving.kernels import attended, to_attend

    case = Case(rows=((40, 1), (70, 1), (20, 1)))
    pool, table = filled(case)
    lengths, start, q = torch.tensor([40, 70, 20]), torch.arange(4), torch.randn(3, 4, 64).to(F16)
    right = pool.attend(q, table, lengths, start, 1, scale=0.3)[0]
    for block in (-1, len(pool.data)):
        wrong = table.clone()
        wrong[1, 2] = block
        given = to_attend(pool.layout, q, pool.data, (wrong, lengths, start), 1, (), (), (0.3, 0.0, 0), None)
        out, lse = attended(pool.layout, given, Machine(3, 232448), Direct(False))
        assert bool(out[1].isnan().all()) and bool(lse[1].isnan().all())
        torch.testing.assert_close(out[::2], right[::2], atol=4e-3, rtol=4e-3)


def test_a_block_outside_of_the_pool_makes_its_row_nan() -> None:
    interpreted(wrong_blocks, guarded=True)


def appends_as_the_body(keys: str, values: str, page: int, dim: int, dtype: torch.dtype, count: int) -> None:
    """In the interpreter: kernels write the very bytes of the eager body, and none for negative slots."""
    from kvcompile.serving.kernels import appended

    pool = kvcompile.pool(7, 3, dim, keys, values=values, page=page, dtype=dtype)
    pool.data.random_(0, 256, generator=torch.Generator().manual_seed(3))
    other, tables = pool.data.clone(), (pool.key_tables, pool.value_tables)
    k, v = torch.randn(2, count, 3, dim, generator=torch.Generator().manual_seed(4)).to(dtype).unbind()
    k[0, 0, 0], v[0, 1] = float("nan"), 0.0
    slots = torch.randperm(7 * page, generator=torch.Generator().manual_seed(5))[:count]
    slots[1::3] = -1 - torch.arange(len(slots[1::3]))
    for kind in (torch.int32, torch.int64):
        pool.append(k, v, slots.to(kind))
        appended(pool.layout, (k, v), other, slots.to(kind), tables, INTERPRETED)
        for one, same in zip(*(sum(pool.layout.planes(data), ()) for data in (pool.data, other)), strict=True):
            # One NaN is as good as another.
            torch.testing.assert_close(same, one, rtol=0, atol=0, equal_nan=True)
        k, v, slots = k.flip(0).clone(), v * 2, torch.where(slots < 0, slots, (slots + 5) % (7 * page))
    before = other.clone()
    appended(pool.layout, (k, v), other, torch.full_like(slots, -1), tables, INTERPRETED)
    assert torch.equal(before, other), "skipped tokens wrote"


def rotates_as_the_body() -> None:
    """In the interpreter: strided tokens, one head or several, several blocks of channels."""
    from kvcompile.lowering.paged.rotate import rotated
    from kvcompile.schemes.rotation import rotate

    for count, heads, dim, order, dtype in ((1, 8, 128, 128, BF16), (37, 3, 96, 32, F16), (5, 1, 64, 16, F32), (0, 2, 64, 64, F16)):
        x = torch.randn(heads, count, dim + 8, generator=torch.Generator().manual_seed(6)).to(dtype).transpose(0, 1)[..., 8:]
        wanted = rotate(x.transpose(0, 1).unsqueeze(0).double(), order, None)[0].transpose(0, 1).to(dtype)
        torch.testing.assert_close(rotated(x, order, INTERPRETED), wanted, atol=1e-6, rtol=APART[dtype])


def test_a_kernel_rotates_as_the_body() -> None:
    interpreted(rotates_as_the_body, guarded=True)


APPENDS = (
    ("dense", "int8", 16, 64, F16, 9), ("int4", "fp8", 17, 64, BF16, 1), ("int8-static", "beyond", 32, 64, F32, 40),
    ("nf4", "int4(rotate=kv)", 64, 64, F16, 20), ("gauss", "dense", 16, 80, F16, 5), ("gauss", "gauss(bits=3)", 16, 128, BF16, 7),
    ("gauss(bits=2,scale_dtype=bfloat16)", "nf4(granularity=token)", 32, 64, BF16, 1), ("fp8-static", "fp8", 16, 96, BF16, 30),
    ("int4", "int4", 16, 128, BF16, 33),
)


def append_as_the_body(*cases: tuple[Any, ...]) -> None:
    for case in cases:
        try:
            appends_as_the_body(*case)
        except Exception as error:
            raise AssertionError(f"failed: {case}") from error


def test_append_writes_the_bodys_bytes() -> None:
    interpreted(append_as_the_body, *APPENDS, guarded=True)


def test_what_has_no_kernel_says_so() -> None:
    found = kvcompile.pool(1, 1, 80, "int8", values="gauss", page=17).runs
    assert found["append keys"] == "a kernel"
    assert found["append values"] == "tensor operations: no kernel encodes gauss(bits=4,scale_dtype=float16) with heads of 80 channels"
    assert found["attend"] == "tensor operations: a page of 17 tokens is not a multiple of 16"
    assert set(kvcompile.pool(1, 1, 64, "int4", values="fp8").runs.values()) == {"a kernel"}


@pytest.mark.parametrize("parent", [Nf4(), Gauss()], ids=lambda scheme: scheme.name)
def test_a_kernel_encodes_no_scheme_that_derives_from_its_own(parent: Nf4 | Gauss) -> None:
    """It may encode in another way."""
    derived = type("Derived", (type(parent),), {"name": "derived"})()
    assert parent.cells(64) is not None and derived.cells(64) is None


def test_operations_have_kernels_on_cuda() -> None:
    for name in ("paged_append", "paged_attend"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"kvcompile::{name}", "CUDA")
