"""Pools on CUDA: kernels against the eager bodies on a CPU, in steps, prompts and captured graphs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_paged_kernels import APART, APPENDS, CASES, OF_TABLES, RAGGED, SCHEMES, Case, asked, filled

import kvcompile
from kvcompile.lowering.paged.prompts import LEAST
from kvcompile.serving.pools import Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDE = dataclasses.replace(Case(), dim=128, value_dim=128, heads=2, dtype=torch.bfloat16)
LONG = ((5000, 1), (0, 0), (1, 1), (777, 1), (20000, 1))
ROUNDED = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""The largest error of the results of long prompts, of their norm, by dtype."""
PROMPTS = ((300, 300), (5000, 64), (1, 1), (0, 0), (2000, 700), (4000, 1))


def cases() -> list[Case]:
    """Every scheme at a model's head size over long rows, prompts in pieces, and what the interpreter runs."""
    steps = [dataclasses.replace(WIDE, keys=scheme, rows=LONG) for scheme in SCHEMES]
    pieces = [dataclasses.replace(WIDE, keys=scheme, rows=PROMPTS, window=window, sinks=bool(window))
              for scheme in SCHEMES for window in (0, 200)]
    pages = [dataclasses.replace(WIDE, keys="int4", values="int8", rows=rows, page=page, table=torch.int64)
             for page in (16, 32, 48, 64, 128, 256) for rows in (LONG, RAGGED)]
    return [*steps, *pieces, *pages, *CASES]


def on_cuda(pool: Pool) -> Pool:
    """The pool with its codes and tables moved to CUDA, at the same stride between blocks."""
    whole = pool.data.as_strided((pool.data.shape[0], pool.data.stride(0)), (pool.data.stride(0), 1), 0)
    data = whole.cuda().as_strided(pool.data.shape, pool.data.stride(), pool.data.storage_offset())
    return dataclasses.replace(
        pool, data=data, key_tables=tuple(table.cuda() for table in pool.key_tables),
        value_tables=tuple(table.cuda() for table in pool.value_tables),
    )


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.keys}-{case.values}-{case.page}-{len(case.rows)}-{case.window}")
def test_attention_is_that_of_the_body(case: Case) -> None:
    pool, table = filled(case)
    q, lengths, start, most, sinks = asked(case)
    masks = {"scale": 0.3, "softcap": case.softcap, "window": case.window}
    want, lse = pool.attend(q, table, lengths, start, most, sinks=sinks, **masks)
    moved = on_cuda(pool)
    assert moved.runs["attend"] == "a kernel"
    torch.cuda.set_sync_debug_mode("error")
    try:
        arguments = [x.pin_memory().to("cuda", non_blocking=True) for x in (q, table, lengths, start)]
        of_heads = None if sinks is None else sinks.pin_memory().to("cuda", non_blocking=True)
        got, logs = moved.attend(*arguments, most, sinks=of_heads, **masks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    apart, tabled = APART[case.dtype], case.keys.startswith(("nf4", "gauss", "beyond"))
    short = torch.ones(len(want), dtype=torch.bool)
    for first, last in start.unfold(0, 2, 1).tolist():
        short[first:last] = last - first < LEAST
    got, logs = got.cpu(), logs.cpu()
    torch.testing.assert_close(got[short], want[short], atol=apart, rtol=apart, equal_nan=True)
    torch.testing.assert_close(logs[short], lse[short], atol=OF_TABLES if tabled else 2e-4, rtol=2e-4, equal_nan=True)
    if not short.all():
        # Long prompts read tokens rounded to the model's dtype, as a dense cache holds them.
        error = (got[~short].double() - want[~short].double()).norm() / want[~short].double().norm()
        assert error < ROUNDED[case.dtype]
        torch.testing.assert_close(got[~short], want[~short], atol=4 * apart, rtol=4 * apart, equal_nan=True)
        torch.testing.assert_close(logs[~short], lse[~short], atol=2 * apart, rtol=apart, equal_nan=True)


@pytest.mark.parametrize("schemes", APPENDS, ids=str)
def test_append_writes_the_bodys_bytes(schemes: tuple[str, str, int, int, torch.dtype, int]) -> None:
    keys, values, page, dim, dtype, count = schemes
    pool = kvcompile.pool(7, 3, dim, keys, values=values, page=page, dtype=dtype)
    moved = on_cuda(pool)
    k, v = torch.randn(2, count, 3, dim, generator=torch.Generator().manual_seed(4)).to(dtype).unbind()
    v[0, 1] = 0.0
    slots = torch.randperm(7 * page, generator=torch.Generator().manual_seed(5))[:count]
    slots[1::3] = -1 - torch.arange(len(slots[1::3]))
    pool.append(k, v, slots)
    moved.append(k.cuda(), v.cuda(), slots.cuda())
    assert pool.data.any()
    rotated = any(scheme.rotation(slot) is not None for scheme, slot in ((pool.layout.keys, pool.layout.key_slot),
                                                                         (pool.layout.values, pool.layout.value_slot)))
    if not rotated:
        assert torch.equal(moved.data.cpu(), pool.data)
        return
    # A rotation is a product of matrices, whose sums another device takes in another order: codes at an edge may move by one.
    assert (moved.data.cpu() != pool.data).float().mean() < 0.01


@pytest.mark.parametrize("scheme", ["int4", "int8", "nf4", "dense"])
def test_a_captured_graph_is_right_at_other_lengths(scheme: str) -> None:
    case = dataclasses.replace(WIDE, keys=scheme, rows=LONG)
    pool, table = filled(case)
    moved, start, lengths = on_cuda(pool), torch.arange(6, dtype=torch.int32), torch.tensor([5000, 0, 1, 777, 20000], dtype=torch.int32)
    q = torch.randn(5, 8, 128, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    held = [x.cuda() for x in (q, table, lengths, start)]
    moved.attend(*held, 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = moved.attend(*held, 1)
    for other in ([5000, 0, 1, 777, 20000], [3, 0, 1, 700, 12345], [4999, 0, 0, 16, 1], [0, 0, 0, 0, 0]):
        lengths.copy_(torch.tensor(other))
        held[2].copy_(lengths)
        graph.replay()
        want, logs = pool.attend(q, table, lengths, start, 1)
        torch.testing.assert_close(out.cpu(), want, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse.cpu(), logs, atol=6e-3, rtol=1e-3)


def test_a_block_outside_of_the_pool_makes_its_row_nan() -> None:
    pool, table = filled(dataclasses.replace(WIDE, rows=((40, 1), (70, 1), (20, 1))))
    moved, lengths, start = on_cuda(pool), torch.tensor([40, 70, 20]), torch.arange(4)
    q = torch.randn(3, 8, 128).to(torch.bfloat16)
    want, _ = pool.attend(q, table, lengths, start, 1)
    table[1, 2] = len(pool.data)
    out, lse = moved.attend(q.cuda(), table.cuda(), lengths.cuda(), start.cuda(), 1)
    assert bool(out[1].isnan().all()) and bool(lse[1].isnan().all())
    torch.testing.assert_close(out[::2].cpu(), want[::2], atol=2e-2, rtol=2e-2)
