"""Pools whose blocks attention reads in place: which ones, that they are right with Inductor too, and what is said of them."""

from __future__ import annotations

import copy
import math
from typing import Any

import paged_models
import pytest
import torch
import torch.nn.functional as F
from paged_models import PAGED_CASES, BlocksFirst, PagedCase
from torch import fx

import kvcompile
from kvcompile.backend import Backend
from kvcompile.lowering.attend_kernels import kernel_lines
from kvcompile.passes.rewrite.rewritten import Variant
from kvcompile.tools.cli.dump import Dump, DumpStage

BY_NAME = {case.name: case for case in PAGED_CASES}
TOLERANCE = 2e-6
BRIEF = (9, 1, 1)
IN_PLACE = frozenset({
    "blocks-first", "heads-first", "rows-of-requests", "rows-tokens-first", "rows-and-heads", "rows-taken", "row-by-row", "one-pool",
    "one-write", "used-blocks", "pool-of-layers", "one-token", "flat-table", "shared-prefix", "lengths", "beside-a-static-cache",
    "whole-blocks",
})
"""Cases whose steps of one token read blocks in place. The others gather: by a table of tokens, by two tables, latents, or by a mask that
is no length."""


class Windowed(BlocksFirst):
    """Each token sees the 20 up to its own."""

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        t, at = torch.arange(keys.shape[2], device=pos.device)[None, None, None], pos[:, None, :, None]
        y = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=(t <= at) & (t > at - 20), enable_gqa=True)
        return self.close(y)


class Padded(BlocksFirst):
    """A mask that hides tokens of the prompt."""

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        t, at = torch.arange(keys.shape[2], device=pos.device)[None, None, None], pos[:, None, :, None]
        y = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=(t <= at) & (t % 7 != 3), enable_gqa=True)
        return self.close(y)


class Moving(BlocksFirst):
    """The table is written to between the two gathers: they read different blocks."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        table = table.clone()
        self.k_cache[self.where(pos, table)] = k
        keys = self.k_cache[table].flatten(1, 2).transpose(1, 2)
        table.copy_(table.flip(0))
        self.v_cache[self.where(pos, table)] = v
        return self.attend(q, keys, self.v_cache[table].flatten(1, 2).transpose(1, 2), pos)


class FlatTables(paged_models.TwoTables):
    """One table for both, flattened for each by itself, the values gathered first."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        self.k_cache[self.where(pos, table)] = k
        self.v_cache[self.where(pos, table)] = v
        values, keys = (
            pool.index_select(0, table.flatten()).unflatten(0, table.shape).flatten(1, 2).transpose(1, 2)
            for pool in (self.v_cache, self.k_cache)
        )
        return self.attend(q, keys, values, pos)


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


@pytest.fixture(params=[16, 48, 64])
def page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pools have pages of so many tokens."""
    monkeypatch.setattr(paged_models, "BLOCK", request.param)
    return int(request.param)


def attends(backend: Backend) -> list[fx.Node]:
    """The attentions of all graphs that a backend rewrote which read blocks in place."""
    graphs = [record.variants.rewritten(Variant.PAST).module.graph for record in backend.records if record.variants is not None]
    return [node for graph in graphs for node in graph.nodes if node.target is torch.ops.kvcompile.attend_blocks.default]


def in_place(backend: Backend) -> list[int]:
    """The tokens of a block of each attention that reads blocks in place."""
    return [int(node.args[4]) for node in attends(backend)]


@pytest.mark.parametrize("case", PAGED_CASES, ids=str)
def test_dense_equals_the_module(case: PagedCase, page: int) -> None:
    backend = kvcompile.backend("dense", inner="eager", strict=True)
    assert case.error(backend, BRIEF if case.name != "whole-blocks" else None) <= TOLERANCE
    found = in_place(backend)
    assert bool(found) == (case.name in IN_PLACE)
    # A row of a cache is a block of all its tokens, in pages of the store.
    assert set(found) <= {64 if case.rows else math.gcd(page, 64)}
    report = backend.report()
    assert not report.refusals and report.sites == case.sites * len(report.graphs)


@pytest.mark.parametrize(("name", "expected"), [("blocks-first", []), ("rows-taken", [64])])
def test_a_page_of_eight_tokens_is_gathered_and_rows_are_not(name: str, expected: list[int]) -> None:
    """Rows of 64 tokens, of which the last five are not read."""
    backend = kvcompile.backend("int8", inner="eager", strict=True)
    assert 0 < BY_NAME[name].error(backend, BRIEF) <= 0.01
    assert in_place(backend) == expected


def test_a_row_that_is_full_sees_none_of_the_tokens_that_are_cut_off() -> None:
    """The mask shows positions that the attention does not read."""
    backend = kvcompile.backend("dense", inner="eager", strict=True)
    assert BY_NAME["rows-taken"].error(backend, (58, *[1] * 6)) <= TOLERANCE
    assert in_place(backend) == [64]


@pytest.mark.parametrize(("build", "expected"), [(Windowed, 20), (FlatTables, 0), (Padded, None), (Moving, None)])
def test_masks_and_tables(build: Any, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are limits as well; other masks, and tables that change, are for tokens that are gathered."""
    monkeypatch.setattr(paged_models, "BLOCK", 16)
    case, backend = PagedCase("own", build), kvcompile.backend("dense", inner="eager", strict=True)
    assert case.error(backend, (40, *[1] * 20)) <= TOLERANCE
    assert [node.args[6] for node in attends(backend)] == ([] if expected is None else [expected])


@pytest.mark.compile
@pytest.mark.parametrize(("name", "scheme"), [
    ("one-write", "k=int8,v=int4"), ("used-blocks", "dense"),
])
def test_inductor(name: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and steps, as the same codes give without a compiler; then a second request in the same blocks."""
    monkeypatch.setattr(paged_models, "BLOCK", 16)
    case = BY_NAME[name]
    results = {}
    for inner in ("eager", "inductor"):
        torch._dynamo.reset()
        backend = kvcompile.backend(scheme, inner=inner, strict=True)
        module = case.make(dim=32)
        plain = copy.deepcopy(module)
        compiled = torch.compile(module, backend=backend, fullgraph=True)
        with torch.no_grad():
            results[inner] = [*case.drive(module, compiled, (9, 1, 1)), *case.drive(module, compiled, (20, 1))]
            wanted = [*case.drive(plain, plain, (9, 1, 1)), *case.drive(plain, plain, (20, 1))]
        assert in_place(backend)
        apart = max((a - b).abs().max().item() for a, b in zip(results[inner], wanted, strict=True))
        assert apart <= (1e-5 if scheme == "dense" else 0.2)
    for one, two in zip(results["eager"], results["inductor"], strict=True):
        torch.testing.assert_close(two, one, atol=1e-3, rtol=0)


def test_what_is_said_of_the_kernel_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_models, "BLOCK", 16)
    backend = kvcompile.backend("int8", inner="eager", strict=True)
    BY_NAME["blocks-first"].error(backend, BRIEF, dim=64)
    assert "1 x attend_blocks (eager body)" in str(backend.report().graphs[-1].kernels)
    (node,) = attends(backend)
    step = node.graph
    assert "1 x attend_blocks (codes gathered, Inductor C++ template)" in kernel_lines(step, "cpu", {}, 1)
    assert "1 x attend_blocks (Triton kernel over blocks of a pool)" in kernel_lines(step, "cuda", {}, 1)
    queries = node.args[0]
    assert isinstance(queries, fx.Node)
    queries.meta["val"] = queries.meta["val"].double()
    assert "attend_blocks (codes gathered, eager body: queries in torch.float64)" in kernel_lines(step, "cuda", {}, 1)


@pytest.mark.compile
def test_dump_shows_the_kernel_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_models, "BLOCK", 48)
    backend = kvcompile.backend("int4", inner="eager", strict=True)
    BY_NAME["blocks-first"].error(backend, BRIEF, torch.bfloat16, dim=64)
    dump = Dump(backend, variant=Variant.PAST)
    text = dump.text(DumpStage.TRITON)
    assert "# blocks of 16 tokens read in place by a table" in text and "BLOCK_TABLE" in text
    compile(text, "kernel", "exec")
    assert ".entry kvcompile_attend" in dump.text(DumpStage.PTX)


@pytest.mark.compile
def test_inductor_says_what_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: a gather and the C++ template, in one module with the appends."""
    monkeypatch.setattr(paged_models, "BLOCK", 16)
    backend = kvcompile.backend("int8", strict=True)
    BY_NAME["blocks-first"].error(backend, (9, 1), dim=64)
    assert "1 x attend_blocks (codes gathered, Inductor C++ template)" in str(backend.report().graphs[-1].kernels)
    emitted = Dump(backend, variant=Variant.PAST).text(DumpStage.INDUCTOR)
    assert "_attend::run(p)" in emitted and "kvcompile.attend" not in emitted
