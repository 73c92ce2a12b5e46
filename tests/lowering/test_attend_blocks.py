"""``attend_blocks``, attention over a pool's blocks in place: its definition by hand, and the kernel over a store's own planes."""

from __future__ import annotations

import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from interpreted import interpreted
from launched import OnPtx
from test_inductor_renders import hopper
from torch._inductor import lowering as inductor_lowering
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile import schemes
from kvcompile.lowering import blocks
from kvcompile.lowering.decode.site import Machine
from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.lowering.ops.attend_blocks import BlockOperands, attend_blocks_body
from kvcompile.lowering.ops.operations import append_body
from kvcompile.lowering.paged.store import attended, first_of, rows_of, viewed
from kvcompile.types import PAGE, Role, SlotSpec

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
APART = {F16: 4e-3, BF16: 2e-2, F32: 2e-5}
"""How far a kernel's results may be from the definition's, by dtype: a rounding or two."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A call over a store of ``pages`` pages; ``limits``: the last position that each row's query sees."""

    keys: str = "int4"
    values: str = ""
    every: int = 16
    limits: tuple[int, ...] = (39, -1, 69, 2, 94)
    heads: int = 2
    group: int = 3
    dim: int = 64
    value_dim: int = 64
    window: int = 0
    sinks: bool = False
    softcap: float = 0.0
    dtype: torch.dtype = F16
    entries: int = 6
    pages: int = 9


def store(case: Case, scheme: str, dim: int, role: Role, generator: torch.Generator) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The planes of a store that is full of tokens, those that attention reads, and the decoded tokens [K, T, D]."""
    parsed, slot = schemes.parse(scheme).for_role(role), SlotSpec(case.heads, dim, case.dtype, role)
    planes = [parsed.empty(spec, slot, case.pages, 1, None) for spec in parsed.layout(slot).planes]
    x = torch.randn(1, case.heads, case.pages * PAGE, dim, generator=generator).to(case.dtype)
    encoding = [plane for plane, spec in zip(planes, parsed.layout(slot).planes, strict=True) if spec.encoding]
    append_body(x, planes, torch.arange(case.pages * PAGE)[None], parsed.spec(), None, encoding)
    read = planes[: parsed.planes_read(slot)]
    grown = [plane.permute(1, 2, 0, 3, 4).flatten(2, 3) if not spec.constant else plane[0] for plane, spec in zip(
        read, parsed.layout(slot).planes, strict=False)]
    levels = [plane for plane, spec in zip(read, parsed.layout(slot).planes, strict=False) if spec.constant]
    decoded = parsed.decode((*grown[: len(read) - len(levels)], *levels), slot)
    return read, decoded[0]


def call(case: Case) -> tuple[BlockOperands[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The operands of a call, and all keys and values of the store, decoded."""
    generator, rows = torch.Generator().manual_seed(1), len(case.limits)
    values = case.values or case.keys
    keys, k = store(case, case.keys, case.dim, Role.KEY, generator)
    stored, v = store(case, values, case.value_dim, Role.VALUE, generator)
    blocks_there = case.pages * PAGE // case.every
    table = torch.stack([torch.randperm(blocks_there, generator=generator)[: case.entries] for _ in case.limits])
    hi = torch.tensor(case.limits)[:, None]
    # What is behind a row's length is never looked at.
    outside = torch.tensor([-3, blocks_there + 5])[torch.arange(rows) % 2, None]
    table = torch.where(torch.arange(case.entries) * case.every <= hi, table, outside)
    heads = case.heads * case.group
    q = torch.randn(rows, heads, 1, case.dim, generator=generator).to(case.dtype)
    texts = [schemes.parse(text).for_role(role).spec() for text, role in ((case.keys, Role.KEY), (values, Role.VALUE))]
    sinks = torch.linspace(-1, 2, heads) if case.sinks else None
    return BlockOperands(
        q, keys, stored, table, case.every, hi, case.window, sinks, *texts, 0.3, case.softcap, case.value_dim,
    ), k, v


def by_hand(given: BlockOperands[torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each row's tokens picked one by one, in float64."""
    rows = []
    for row in range(len(given.q)):
        last = min(int(given.hi[row % len(given.hi)]), given.table.shape[1] * given.every - 1)
        first = max(0, int(given.hi[row % len(given.hi)]) - given.window + 1) if given.window else 0
        places = [int(given.table[row, t // given.every]) * given.every + t % given.every for t in range(first, last + 1)]
        keys, values = (x[:, places].double().repeat_interleave(given.q.shape[1] // len(x), 0) for x in (k, v))
        scores = (given.q[row].double() @ keys.mT) * given.scale
        if given.softcap:
            scores = given.softcap * torch.tanh(scores / given.softcap)
        if given.sinks is not None:
            scores = torch.cat((scores, given.sinks.double()[:, None, None]), -1)
            values = torch.cat((values, torch.zeros(len(values), 1, values.shape[2])), 1)
        rows.append(scores.softmax(-1) @ values)
    return torch.stack(rows)


CASES = (
    Case(), Case("dense", every=32, dtype=F32), Case("int8", "int4", every=64, heads=1, group=4, limits=(127, 300, 5), value_dim=32),
    Case("int8", window=20, sinks=True, softcap=3.0), Case("fp8", "dense", every=32, heads=3, group=1, limits=(190, 64), window=50),
    Case("nf4", "int8", sinks=True, limits=(95,) * 4), Case("int8-static", "fp8-static", heads=4, group=2, dtype=BF16, every=64),
    Case("int4", "beyond", every=16, window=1, limits=(0, 17, 95, 120)), Case("gauss", "int4", limits=(95,), pages=2, dtype=BF16),
    Case("dense", dim=80, value_dim=80, heads=1, group=8, limits=(15, 16, 31, 32, 33), every=32),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.keys}-{case.values or case.keys}-{case.every}")
def test_its_definition_is_attention_over_the_blocks_of_the_table(case: Case) -> None:
    given, k, v = call(dataclasses.replace(case, dtype=F32))
    found = attend_blocks_body(*(getattr(given, field.name) for field in dataclasses.fields(given)))
    torch.testing.assert_close(found, by_hand(given, k, v).float(), atol=2e-5, rtol=2e-5)


def test_one_limit_serves_all_rows_and_a_block_outside_makes_its_row_nan() -> None:
    given, k, v = call(Case("int8", limits=(70, 70, 70), dtype=F32))
    one = dataclasses.replace(given, hi=given.hi[:1])
    operands = [getattr(one, field.name) for field in dataclasses.fields(one)]
    wanted = by_hand(one, k, v).float()
    torch.testing.assert_close(torch.ops.kvcompile.attend_blocks(*operands), wanted, atol=2e-5, rtol=2e-5)
    for block in (-1, -(2**34), 9 * PAGE // 16):
        table = given.table.clone()
        table[1, 2] = block
        found = attend_blocks_body(*operands[:3], table, *operands[4:])
        assert bool(found[1].isnan().all())
        torch.testing.assert_close(found[::2], wanted[::2], atol=2e-5, rtol=2e-5)


def test_a_view_of_blocks_has_every_token_where_the_store_has_it() -> None:
    for every, heads in ((16, 3), (32, 2), (64, 5), (16, 1)):
        plane = torch.arange(4 * heads * PAGE * 2).view(4, 1, heads, PAGE, 2)
        view, table = viewed(plane, every), torch.arange(-1, 4 * PAGE // every + 1)
        first = first_of(table, plane, every)
        assert int(first[0]) == int(first[-1]) == -1 and first.dtype == torch.int32 and len(set(first[1:-1].tolist())) == len(table) - 2
        tokens = plane.permute(1, 2, 0, 3, 4).reshape(heads, -1, 2)
        assert torch.equal(view[first[1:-1].long()].transpose(0, 1).reshape(heads, -1, 2), tokens)
        last = view.storage_offset() + sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
        assert last == plane.numel() - 1


def attends_as_the_body(case: Case, launcher: Launcher) -> None:
    """Hold the kernels, which the launcher runs, to the definition over the same store."""
    given, _, _ = call(case)
    want = attend_blocks_body(*(getattr(given, field.name) for field in dataclasses.fields(given)))
    got = attended(given, rows_of(given), Machine(3, 232448), launcher)
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=APART[case.dtype], rtol=APART[case.dtype])


def attend_as_the_body(*cases: Case) -> None:
    """In one interpreter: each case, named where it fails."""
    for case in cases:
        try:
            attends_as_the_body(case, Direct(False))
        except Exception as error:
            raise AssertionError(f"failed: {case}") from error
    # A block that the window has left behind, and limits of which an int32 has nothing.
    given, _, _ = call(Case("int8", limits=(63, 63, 47), window=20))
    want = attend_blocks_body(*(getattr(given, field.name) for field in dataclasses.fields(given)))
    given.table[:, 0], given.table[0, 1] = -1, 9 * PAGE
    torch.testing.assert_close(attended(given, rows_of(given), Machine(3, 232448), Direct(False)), want, atol=4e-3, rtol=4e-3)
    given, _, _ = call(Case("int8", limits=(70, 70, 39)))
    given.hi[0], given.hi[1] = -(2**40), torch.iinfo(torch.int64).min
    found = attended(given, rows_of(given), Machine(3, 232448), Direct(False))
    assert not found[:2].any() and found[2].any(), "rows that see no token"
    given, _, _ = call(Case("int8", limits=(70, 70, 70)))
    given.table[1, 2] = 9 * PAGE // 16
    found = attended(given, rows_of(given), Machine(3, 232448), Direct(False))
    assert bool(found[1].isnan().all()) and not found[::2].isnan().any(), "a block outside of the store"


@pytest.mark.parametrize("first", range(0, len(CASES), 5))
def test_the_kernel_reads_a_stores_planes_in_place(first: int) -> None:
    interpreted(attend_as_the_body, *CASES[first : first + 5], guarded=True)


@pytest.mark.compile
@pytest.mark.parametrize("case", [
    Case("int4", dim=128, value_dim=128, dtype=BF16, group=4), Case("dense", every=64, dim=128, value_dim=128, dtype=BF16, group=4),
    Case("int8", every=32, dim=128, value_dim=128, dtype=BF16, group=4, window=30),
], ids=lambda case: f"{case.keys}-{case.every}")
def test_as_the_ptx_of_a_hopper_it_attends_as_the_body(case: Case) -> None:
    attends_as_the_body(dataclasses.replace(case, limits=(39, 69)), OnPtx())


def traced(dtype: torch.dtype) -> list[str]:
    """The operations of ours that a graph for CUDA has where ``attend_blocks`` was, from fakes of an H100."""
    given, _, _ = call(Case("int8", dtype=F32))
    operands: list[Any] = [getattr(given, field.name) for field in dataclasses.fields(given)]
    operands[0] = operands[0].to(dtype)

    def fake(item: Any) -> Any:
        if isinstance(item, list):
            return [fake(each) for each in item]
        found = isinstance(item, torch.Tensor)
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="cuda") if found else item

    with pytest.MonkeyPatch.context() as monkeypatch, hopper(monkeypatch):
        # Indexing a fake of a device that is not there fails.
        monkeypatch.setattr(blocks, "attend_blocks_body", lambda *given: given[0] + 0)
        fakes = [fake(item) for item in operands]

        def step(q: torch.Tensor, table: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
            return blocks.attend_blocks_traced(q, fakes[1], fakes[2], table, fakes[4], hi, *fakes[6:])

        graph = make_fx(step)(fakes[0], fakes[3], fakes[5]).graph
        (result,) = next(iter(graph.find_nodes(op="output"))).args
        assert result.meta["val"].shape == given.q.shape and result.meta["val"].dtype == dtype
        ours = [node.target for node in graph.nodes if "kvcompile" in str(node.target)]
        assert all(target not in inductor_lowering.lowerings for target in ours), "called as it is"
        return [str(target) for target in ours]


@pytest.mark.skipif(torch.version.cuda is not None and not torch.cuda.is_available(), reason="a torch with CUDA needs its driver for fakes")
def test_a_graph_for_cuda_calls_the_kernel_or_gathers() -> None:
    # A process of its own: torch remembers for good whether there was a device.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(traced, BF16).result() == ["kvcompile.attend_blocks_triton.default"]
        assert pool.submit(traced, torch.float64).result() == []
