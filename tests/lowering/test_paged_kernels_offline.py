"""The kernels over blocks of a pool, compiled for sm_90 without a device: registers, loads, and what a launch depends on."""

from __future__ import annotations

import math
import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import triton
import triton.language as tl
from hopper import usage
from interpreted import interpreted
from test_hot_loops import loops, waits
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kvcompile
from kvcompile.lowering.decode import offline
from kvcompile.lowering.decode.offline import Operand
from kvcompile.lowering.decode.site import Machine
from kvcompile.lowering.host.launches import Direct
from kvcompile.lowering.host.triton_api import POINTERS
from kvcompile.lowering.paged.append import Checked, append_by_kernels
from kvcompile.lowering.paged.attend import attend_by_kernels, operands_of, paged_source, sizes_of
from kvcompile.lowering.paged.config import PagedAttend, PagedConfig, paged_config
from kvcompile.lowering.paged.merge import merge_items
from kvcompile.lowering.paged.residency import Multiprocessor, programs_at_a_time
from kvcompile.lowering.paged.splits import items_of, request_of, tiles_of_an_item
from kvcompile.serving.kernels import to_append, to_attend
from kvcompile.types import Role

H100 = Machine(132, 232448)
REQUESTS = 8


def call(scheme: str, page: int = 16, queries: int = 1, window: int = 0, table: torch.dtype = torch.int32) -> PagedAttend:
    """Eight requests of a model of 8 kv heads of 128 channels and 32 heads of queries."""
    pool = kvcompile.pool(64, 8, 128, scheme, page=page)
    q = torch.empty(REQUESTS * queries, 32, 128, dtype=torch.bfloat16)
    tables = (torch.zeros(REQUESTS, 16, dtype=table), torch.zeros(REQUESTS, dtype=table), torch.zeros(REQUESTS + 1, dtype=table))
    return to_attend(pool.layout, q, pool.data, tables, queries, pool.key_tables, pool.value_tables, (0.1, 0.0, window), None)


def compiled(given: PagedAttend) -> tuple[PagedConfig, dict[str, Any]]:
    """The kernel of a call, and its stages."""
    config, tensors = paged_config(given, H100, True), operands_of(given)
    operands = {name: sizes_of(name, tensors[name]) for name in config.operands}
    source = paged_source(config, operands)
    return config, offline.compile_rendered(source, operands, Operand((1,), (1,), torch.float32), config.tile, "sm_90")


SPILL_NOT = (
    ("dense", 16, 1), ("int8", 16, 1), ("fp8", 16, 1), ("int4", 16, 1), ("int4", 64, 1), ("int4", 16, 8), ("int8", 16, 32),
    ("int8-static", 16, 1),
)


@pytest.mark.compile
@pytest.mark.parametrize(("scheme", "page", "queries"), SPILL_NOT)
def test_nothing_spills_and_codes_are_loaded_by_sixteen_bytes(scheme: str, page: int, queries: int) -> None:
    _, made = compiled(call(scheme, page, queries))
    assert usage(made["cubin"])["STACK"] == 0
    asynchronous, plain = re.findall(r"cp\.async\.cg\S* .*0x10", made["ptx"]), re.findall(r"ld\.global\S*\.v4\.\w?32", made["ptx"])
    assert len(asynchronous) + len(plain) >= 8


@pytest.mark.compile
@pytest.mark.parametrize(("scheme", "page", "table"), [
    ("int4", 16, torch.int64), ("dense", 16, torch.int32), ("nf4", 16, torch.int32), ("int4", 64, torch.int32),
])
def test_no_load_of_a_whole_tile_is_waited_for(scheme: str, page: int, table: torch.dtype) -> None:
    """Blocks are found by assembly, which the pipeline does not see as loads; what is copied from them comes ahead of its use."""
    config, made = compiled(call(scheme, page, table=table))
    hot = next(body for body in loops(str(made["ttgir"])) if any("_dot" in line or "tt.dot" in line for line in body))
    assert any("async_copy_global_to_local" in line for line in hot)
    assert not waits(hot)
    assert any("ld.global.nc.b32" in line for line in hot) == (config.tile.block_t > page)


@pytest.mark.compile
@pytest.mark.parametrize(("columns", "items"), [(32, 64), (128, 4)])
def test_the_merge_keeps_its_numbers_in_registers(columns: int, items: int) -> None:
    constants = {
        "HEADS": 32, "DIM": 128, "COLUMNS": columns, "WINDOW": 0, "BLOCK_T": 32, "PAGE_ROWS": 16, "HAS_SINKS": 1, "ITEMS": items,
    }
    pointers = {"PARTS": "*fp32", "SINKS": "*fp32", "LENGTHS": "*i32", "QUERY_START": "*i32", "OUT": "*bf16", "LSE": "*fp32"}
    names = merge_items.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    source = ASTSource(merge_items, signature, {(names.index(name),): value for name, value in constants.items()})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert usage(made.asm["cubin"])["STACK"] == 0


@pytest.mark.compile
@pytest.mark.parametrize("scheme", ["dense", "int4", "beyond", "fp8-static"])
def test_append_asserts_on_the_device_that_slots_are_in_the_pool(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, dict[str, Any]]] = []

    def kernel(self: Direct, kernel: Any, grid: tuple[Any, ...], *operands: Any, warps: int | None = None, **constants: Any) -> None:
        launches.append((kernel, {**dict(zip(kernel.arg_names, operands, strict=False)), **constants}))

    monkeypatch.setattr(Direct, "kernel", kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    pool = kvcompile.pool(4, 2, 128, scheme)
    x, slots = torch.zeros(5, 2, 128, dtype=torch.bfloat16), torch.arange(5)
    planes, _ = pool.layout.planes(pool.data)
    append_by_kernels([to_append(pool.layout, Role.KEY, x, planes, slots, pool.key_tables)], Checked(True))
    ((launched, given),) = launches
    options = {name: given.pop(name) for name in ("debug", "sanitize_overflow")}
    assert options == {"debug": True, "sanitize_overflow": False} and set(given) == set(launched.arg_names)
    constants = {parameter.name for parameter in launched.params if parameter.is_constexpr}
    signature = {
        name: "constexpr" if name in constants else POINTERS[given[name].dtype] if isinstance(given[name], torch.Tensor) else "i32"
        for name in launched.arg_names
    }
    fixed = {(launched.arg_names.index(name),): given[name] for name in constants}
    made = triton.compile(ASTSource(launched, signature, fixed), target=GPUTarget("cuda", 90, 32), options=options)
    assert "__assertfail" in made.asm["ptx"]


def test_a_launch_depends_on_no_number_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors have none; so one captured graph serves all lengths."""
    grids: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Direct, "kernel", lambda self, kernel, grid, *operands, **constants: grids.append(grid))
    pool = kvcompile.pool(64, 8, 128, "int4", device="meta")
    q, table = torch.empty(4, 32, 128, dtype=torch.bfloat16, device="meta"), torch.zeros(4, 9, dtype=torch.int32, device="meta")
    tables = (table, table[:, 0], torch.zeros(5, dtype=torch.int32, device="meta"))
    given = to_attend(pool.layout, q, pool.data, tables, 1, pool.key_tables, pool.value_tables, (0.1, 0.0, 0), None)
    out, lse = attend_by_kernels(given, H100, Direct(True))
    assert out.shape == (4, 32, 128) and lse.shape == (4, 32)
    # 132 multiprocessors hold 8 programs of one warp each: 132 for each kv head, and one more a request.
    assert grids == [(1, 8, 132 + 4), (4, 32, 4)]


@pytest.mark.parametrize(("registers", "shared", "warps", "programs"), [
    (168, 10368, 1, 12), (169, 10368, 1, 11), (255, 0, 1, 8), (85, 36864, 4, 5), (80, 36864, 4, 6), (32, 0, 1, 32), (255, 200_000, 8, 1),
])
def test_as_many_programs_run_at_a_time_as_registers_and_shared_memory_hold(registers: int, shared: int, warps: int, programs: int) -> None:
    assert programs_at_a_time(registers, shared, warps, Multiprocessor(65536, 233472, 64)) == programs


@triton.jit
def ask(LENGTHS, STARTS, FOUND, OWN, total, capacity, TARGET, items, WINDOW: tl.constexpr, BLOCK_T: tl.constexpr):  # noqa: ANN001, ANN201, N803
    """Write each item's request, place and tiles, the share behind them, and the items of each request."""
    share = tiles_of_an_item(LENGTHS, STARTS, total, capacity, TARGET, WINDOW, BLOCK_T)
    tl.store(FOUND + items * 3, share)
    for item in range(items):
        request, split, tiles = request_of(item, share, LENGTHS, STARTS, total, capacity, WINDOW, BLOCK_T)
        tl.store(FOUND + item * 3, request)
        tl.store(FOUND + item * 3 + 1, split)
        tl.store(FOUND + item * 3 + 2, tiles)
    for request in range(total):
        first, own = items_of(request, share, LENGTHS, STARTS, total, capacity, WINDOW, BLOCK_T)
        tl.store(OWN + request * 2, first)
        tl.store(OWN + request * 2 + 1, own)


def share_of(tiles: list[int], target: int) -> int:
    """Tiles of an item: it grows three times at most, until there are no more items than ``target``."""
    share = max(1, math.ceil(sum(tiles) / target))
    for _ in range(3):
        items = sum(math.ceil(many / share) for many in tiles)
        if items > target > sum(many > 0 for many in tiles):
            share = math.ceil(share * items / target)
    return share


@pytest.mark.parametrize(("tokens", "target"), [
    ([32768] * 16, 132), ([32768] * 16, 198), ([1024 * (1 + row % 15) for row in range(64)], 132),
])
def test_requests_are_cut_into_no_more_items_than_run_at_a_time(tokens: list[int], target: int) -> None:
    tiles = [many // 32 for many in tokens]
    share = share_of(tiles, target)
    assert 0.9 * target < sum(math.ceil(many / share) for many in tiles) <= target


def cut(cases: list[tuple[list[int], list[int], int, int, int]]) -> None:
    """In the interpreter: the items of each request are its tiles, each once, in order."""
    for lengths, counts, target, window, capacity in cases:
        total, items = len(lengths), target + len(lengths)
        starts = torch.tensor([0, *counts]).cumsum(0)
        found, own = torch.zeros(items + 1, 3, dtype=torch.int32), torch.zeros(total, 2, dtype=torch.int32)
        ask[(1,)](torch.tensor(lengths), starts, found, own, total, capacity, target, items, window, 32)
        tiles = []
        for length, count in zip(lengths, counts, strict=True):
            first = max(0, length - count - window + 1) // 32 if window else 0
            tiles.append(max(0, math.ceil(min(length, capacity) / 32) - first) if count else 0)
        share = int(found[items, 0])
        assert share == share_of(tiles, target)
        wanted = []
        for request, many in enumerate(tiles):
            own_items = math.ceil(many / share)
            wanted += [[request, split, math.ceil(many / own_items)] for split in range(own_items)]
        assert len(wanted) <= items
        assert found[: len(wanted)].tolist() == wanted and bool((found[len(wanted) : items, 0] >= total).all())
        first = [sum(math.ceil(many / share) for many in tiles[:request]) for request in range(total)]
        assert own.tolist() == [[at, math.ceil(many / share)] for at, many in zip(first, tiles, strict=True)]


def test_items_are_the_tiles_of_all_requests_each_once() -> None:
    drawn: list[tuple[list[int], list[int], int, int, int]] = []

    @hypothesis.settings(max_examples=12, deadline=None, database=None)
    @hypothesis.given(st.data())
    def draw(data: st.DataObject) -> None:
        lengths = data.draw(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 3000)), min_size=1, max_size=6))
        counts = [data.draw(st.integers(0, 3)) for _ in lengths]
        kinds = st.integers(1, 9), st.sampled_from((0, 1, 100)), st.sampled_from((64, 4096))
        target, window, capacity = map(data.draw, kinds)
        drawn.append((lengths, counts, target, window, capacity))

    draw()
    many = [7 * at % 90 for at in range(140)]
    interpreted(cut, [*drawn, (many, [int(at % 3 != 0) for at in range(140)], 5, 0, 4096)])
