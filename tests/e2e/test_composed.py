"""Tensors that are made of others, sharded or quantized weights: calls on them stay, attention beside them is rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from composed_modules import Indexed, Parted, SeenTwice, ShardedBias, ShardedCache, WrittenInPlace, mesh, quantize, shard
from e2e_models import Case, by_position, inputs
from processes import in_two_processes
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import kvcompile
from kvcompile import validation
from kvcompile.lowering.graph_cache import call_key
from kvcompile.passes.graph.shapes import AS_WRITTEN
from kvcompile.validation.subgraph import Subgraph


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> Iterator[None]:
    """Small tensors on one thread, nothing compiled before, a group of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


CASES = (
    Case("sharded", lambda **given: shard(Indexed(**given)), by_position),
    Case("quantized", lambda **given: quantize(Indexed(**given)), by_position),
    Case("sharded-bias", ShardedBias, by_position),
    Case("sharded-cache", ShardedCache, by_position, refused="another operation than a view"),
    Case("seen-twice", SeenTwice, by_position, refused="changed in place"),
    Case("written-in-place", WrittenInPlace, by_position, refused="no in-place writes"),
)
REWRITTEN = [pytest.param(case, id=case.name) for case in CASES if not case.refused]


@pytest.mark.parametrize("case", REWRITTEN)
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_dense_equals_the_module(case: Case, inner: str) -> None:
    backend = kvcompile.backend("dense", inner=inner, strict=True)
    assert case.error(backend) <= 2e-6
    assert backend.report().sites == len(backend.graphs)


@pytest.mark.parametrize("case", REWRITTEN)
def test_int8_is_near_the_module(case: Case) -> None:
    assert 0 < case.error(kvcompile.backend("int8", strict=True)) <= 0.01


@pytest.mark.parametrize("case", [case for case in CASES if case.refused], ids=str)
def test_refused_for_its_reason_and_right(case: Case) -> None:
    backend = kvcompile.backend("int8")
    assert case.error(backend) <= 2e-6
    report = backend.report()
    assert report.sites == 0 and report.allocated == 0
    assert any(case.refused in item.reason for item in report.refusals), [str(item) for item in report.refusals]


def test_validation_runs_nothing_in_which_others_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that knows the verdict from before would not come, and the others would wait: the cut begins behind such calls."""
    seen: list[str] = []
    plain = validation.plain

    def looked_at(part: Subgraph, *rest: Any) -> Subgraph:
        seen.extend(str(node.target) for node in part.captured.graph.nodes if AS_WRITTEN in node.meta and node.op != "placeholder")
        return plain(part, *rest)

    monkeypatch.setattr(validation, "plain", looked_at)
    backend = kvcompile.backend("int8", inner="eager", strict=True)
    CASES[2].error(backend)
    assert all(graph.validated == 1 for graph in backend.graphs) and not seen


def test_a_second_request_compiles_nothing() -> None:
    module = shard(Indexed())
    backend = kvcompile.backend("int8", strict=True)
    call = torch.compile(module, backend=backend, fullgraph=True)
    given = inputs(module)
    with torch.no_grad():
        first = by_position(module, call, given)
        graphs = len(backend.graphs)
        second = by_position(module, call, given)
    assert len(backend.graphs) == graphs
    assert all(torch.equal(a, b) for a, b in zip(first[1:], second[1:], strict=True))


@pytest.mark.parametrize("make", [
    lambda: [distribute_tensor(torch.zeros(4), mesh(), [kind]) for kind in (Shard(0), Replicate())],
    lambda: [Parted(torch.zeros(4, 4, dtype=dtype), torch.ones(4, 1)) for dtype in (torch.int8, torch.int16)],
], ids=["placements", "parts"])
def test_code_is_not_shared_by_tensors_of_other_parts(make: Callable[[], list[torch.Tensor]]) -> None:
    """Their sizes are the same; what is compiled for one is wrong for the other."""
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    one, other = (call_key(graph, [value], lambda value: False, "") for value in make())
    assert one is not None and other is not None and one != other


@pytest.mark.slow
def test_two_processes_give_what_one_gives() -> None:
    """``torchrun``, a model of four layers, each process with half of the heads: prompt, steps, two requests, both kinds of cache."""
    script = Path(__file__).parents[1] / "support" / "sharded_model.py"
    said = in_two_processes(str(script), port=29518)
    assert said.count("right") == 2, said
