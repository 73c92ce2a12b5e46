"""``varlen_attn`` over caches, with a block table and without: rewritten and right, or refused; a reference stands in for its operator."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import kvcompile
from kvcompile.backend import Backend
from kvcompile.passes.capture.varlen import explicit
from kvcompile.passes.rewrite.rewritten import Variant

varlen = pytest.importorskip("torch.nn.attention.varlen")
if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
    pytest.skip("torch 2.11 has no varlen_attn over a cache", allow_module_level=True)

PAGE, PAGES, ROWS = 16, 6, 3
STEPS = ((9, 7, 20), (1, 1, 1), (1, 1, 1), (1, 1, 1), (3, 1, 2), (1, 1, 1))
"""New tokens of each row in each call."""


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, starts_k: torch.Tensor | None, max_q: int, max_k: int,
    is_causal: bool = False, scale: float | None = None, window: Any = None, gqa: bool = False, used: torch.Tensor | None = None,
    table: torch.Tensor | None = None, splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each query by itself, over the tokens of its row that it sees: what the documentation of ``varlen_attn`` says."""
    left, right = window or (-1, -1)
    out, logs = torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), float("-inf"))
    for row in range(len(starts) - 1):
        first, end = int(starts[row]), int(starts[row + 1])
        length = int(used[row]) if used is not None else int(starts_k[row + 1] - starts_k[row])  # type: ignore[index]
        if table is not None:
            keys, values = (pool[table[row, : -(-length // PAGE)].long()].flatten(0, 1)[:length] for pool in (k, v))
        else:
            assert starts_k is not None
            keys, values = (x[int(starts_k[row]) : int(starts_k[row]) + length] for x in (k, v))
        for at in range(first, end):
            place = length - end + at
            low = max(0, place - left) if left >= 0 else 0
            high = min(length - 1, place + max(right, 0)) if right >= 0 or is_causal else length - 1
            if high < low:
                continue
            mine, theirs = (x[low : high + 1].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
            scores = torch.einsum("hd,thd->ht", q[at], mine) * (scale or q.shape[2] ** -0.5)
            out[at], logs[:, at] = torch.einsum("ht,thd->hd", scores.softmax(-1), theirs), scores.logsumexp(-1)
    return out, logs, torch.empty((2,), dtype=torch.uint64)


@pytest.fixture(autouse=True)
def _on_a_cpu(one_thread: None, fresh_dynamo: None) -> Iterator[None]:
    """Small tensors on one thread, nothing compiled before, and the operator on a CPU."""
    with torch.library._scoped_library("torch_attn", "FRAGMENT") as library:
        library.impl("_varlen_attn", reference, "CPU")
        yield


class Packed(nn.Module):
    """An attention whose rows lie one after another, over a pool [blocks, page, K, D], or over its tokens one after another."""

    def __init__(
        self, window: tuple[int, int] = (-1, 0), tabled: bool = True, kv: int = 2, log_sums: bool = False, used: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.kv, self.dim, self.window, self.tabled, self.log_sums, self.used = 4, kv, 32, window, tabled, log_sums, used
        self.qkv, self.o = nn.Linear(32, (4 + 2 * kv) * 32), nn.Linear(4 * 32, 32)
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(ROWS * PAGES + 2, PAGE, kv, 32))

    def forward(
        self, x: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, most: int, lengths: torch.Tensor, where: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.dim)).split((self.heads, self.kv, self.kv), 1)
        flat = [pool.view(-1, self.kv, self.dim) for pool in (self.k_cache, self.v_cache)]
        flat[0][slots], flat[1][slots] = k, v
        options: dict[str, Any] = {"window_size": self.window, "enable_gqa": self.kv < self.heads}
        if self.used:
            options["seqused_k"] = lengths
        if self.log_sums:
            options["return_aux"] = varlen.AuxRequest(lse=True)
        if self.tabled:
            found = varlen.varlen_attn(
                q, self.k_cache, self.v_cache, starts, None, most, where.shape[1] * PAGE, block_table=where, **options
            )
        else:
            found = varlen.varlen_attn(q, *flat, starts, where, most, PAGES * PAGE, **options)
        y, logs = found if self.log_sums else (found, None)
        y = self.o(y.flatten(1))
        return y if logs is None else y + logs.mean()


def drive(module: Packed, call: Any, steps: tuple[tuple[int, ...], ...] = STEPS) -> list[torch.Tensor]:
    """Prompts of all rows in one call, then steps; blocks of the pool are in no order, entries of the table not in use are -1."""
    generator, lengths, results = torch.Generator().manual_seed(1), [0] * ROWS, []
    order = torch.randperm(ROWS * PAGES + 2, generator=generator)[: ROWS * PAGES].view(ROWS, PAGES)
    for counts in steps:
        places = [torch.arange(length, length + count) for length, count in zip(lengths, counts, strict=True)]
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        if module.tabled:
            slots = torch.cat([order[row][place // PAGE] * PAGE + place % PAGE for row, place in enumerate(places)])
            used = torch.arange(PAGES) * PAGE < torch.tensor(lengths)[:, None]
            where = torch.where(used, order, -1).to(torch.int32)
        else:
            slots = torch.cat([PAGES * PAGE * row + place for row, place in enumerate(places)])
            where = torch.arange(ROWS + 1, dtype=torch.int32) * (PAGES * PAGE)
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        x = torch.randn(sum(counts), 32, generator=generator)
        results.append(call(x, slots, starts, max(counts), torch.tensor(lengths, dtype=torch.int32), where))
    return results


def compared(backend: Backend, **options: Any) -> float:
    """How far the compiled module is from the module itself."""
    torch.manual_seed(0)
    module = Packed(**options).eval()
    plain = copy.deepcopy(module)
    with torch.no_grad():
        wanted = drive(plain, plain)
        found = drive(module, torch.compile(module, backend=backend, fullgraph=True))
    return max((a - b).abs().max().item() for a, b in zip(wanted, found, strict=True))


def windows_in_place(backend: Backend) -> list[int]:
    """The window of each attention that reads blocks in place."""
    graphs = [record.variants.rewritten(Variant.PAST).module.graph for record in backend.records if record.variants is not None]
    found = [node for graph in graphs for node in graph.nodes if node.target is torch.ops.kvcompile.attend_blocks.default]
    return [int(node.args[6]) for node in found]


@pytest.mark.parametrize("window", [(-1, 0), (10, 0), (-1, -1)], ids=str)
@pytest.mark.parametrize(("tabled", "kv"), [(True, 2), (True, 4), (False, 2), (False, 1)])
def test_dense_equals_the_module(tabled: bool, kv: int, window: tuple[int, int]) -> None:
    backend = kvcompile.backend("dense", inner="eager", strict=True)
    assert compared(backend, window=window, tabled=tabled, kv=kv) <= 2e-6
    report = backend.report()
    assert report.sites == len(report.graphs) == 3 and not report.refusals
    assert windows_in_place(backend) == ([max(0, window[0] + 1)] if tabled else []), "steps of one token a row read blocks"


@pytest.mark.parametrize(("scheme", "bound"), [("int8", 0.01), ("int4", 0.15), ("k=int8,v=fp8", 0.06)])
@pytest.mark.parametrize("tabled", [True, False])
def test_codes_are_near_the_module(scheme: str, bound: float, tabled: bool) -> None:
    backend = kvcompile.backend(scheme, inner="eager", strict=True)
    assert 0 < compared(backend, tabled=tabled) <= bound


@pytest.mark.parametrize(("scheme", "options", "reason", "advice"), [
    ("int8", {"log_sums": True}, "the cache is read by varlen_attn", "read no log-sums"),
    ("int8", {"used": False, "tabled": False}, "the cache is read by varlen_attn", "with seqused_k"),
    ("kivi", {}, "read through a gather", ""),
])
def test_what_is_refused_runs_as_it_is(scheme: str, options: dict[str, Any], reason: str, advice: str) -> None:
    backend = kvcompile.backend(scheme, inner="eager")
    assert compared(backend, **options) == 0.0
    report = backend.report()
    assert not report.sites and report.refusals
    assert all(reason in item.reason and advice in item.advice and "test_varlen.py" in item.line for item in report.refusals)


@dataclasses.dataclass(frozen=True)
class Call:
    """Rows of (tokens, queries), a window, and queries before the first row and behind the last."""

    rows: tuple[tuple[int, int], ...]
    window: tuple[int, int] = (-1, 0)
    scale: float | None = None


@pytest.mark.parametrize("tabled", [True, False])
@pytest.mark.parametrize("call", [
    Call(((40, 1), (0, 0), (70, 1), (3, 1))), Call(((40, 3), (5, 0), (70, 5), (9, 9)), (4, 0), 0.3), Call(((7, 2), (33, 4)), (-1, -1)),
    Call(((7, 2), (33, 4)), (3, 2)), Call(((7, 2), (33, 4)), (-1, 3)), Call(((1, 1), (2, 0)), (0, 0)),
], ids=str)
def test_what_is_spelled_out_is_what_it_says(call: Call, tabled: bool) -> None:
    generator, counts = torch.Generator().manual_seed(0), [count for _, count in call.rows]
    rows, lengths = len(call.rows), torch.tensor([tokens for tokens, _ in call.rows], dtype=torch.int32)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(sum(counts), 4, 8, generator=generator)
    k, v = torch.randn(2, rows * PAGES, PAGE, 2, 8, generator=generator).unbind()
    table = torch.randperm(rows * PAGES, generator=generator).view(rows, PAGES).to(torch.int32) if tabled else None
    pools = (k, v) if tabled else (k.flatten(0, 1), v.flatten(0, 1))
    starts_k = None if tabled else torch.arange(rows + 1, dtype=torch.int32) * (PAGES * PAGE)
    masks = call.window == (-1, 0), call.scale, list(call.window)
    operands = (q, *pools, starts, starts_k, max(counts), PAGES * PAGE, *masks, True, lengths, table)
    torch.testing.assert_close(explicit(*operands)[0], reference(*operands)[0], atol=2e-6, rtol=2e-6)


@pytest.mark.compile
@pytest.mark.parametrize(("scheme", "tabled"), [("int8", True), ("int4", False)])
def test_inductor(scheme: str, tabled: bool) -> None:
    wanted = compared(kvcompile.backend(scheme, inner="eager"), tabled=tabled)
    torch._dynamo.reset()
    assert abs(compared(kvcompile.backend(scheme, strict=True), tabled=tabled) - wanted) <= 1e-3
