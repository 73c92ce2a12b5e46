"""Inductor writes the templates' kernels for CUDA on a machine without a device, from operands that are fakes, and ``dump`` the same.

The offline renderer has stand-ins for Inductor's hooks; here the hooks are Inductor's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_writes import stand_in_for_a_device
from test_triton_attend import Case, early_cases, normed_cases, operands
from torch import fx
from torch._inductor import select_algorithm
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from kvcompile.lowering import inductor
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import attend, attend_body
from kvcompile.lowering.site_kernel import site_kernel

HALF: dict[str, Any] = {"dtype": torch.bfloat16, "D": 128, "Dv": 128, "K": 2}
CASES = [
    Case("int4", "int4", T=200, **HALF), Case("kivi", "kivi", T=200, exact_newest=40, **HALF), Case("beyond", "beyond", T=200, **HALF),
    dataclasses.replace(normed_cases()[0], **HALF), dataclasses.replace(early_cases()[1], **HALF),
    Case("kivi", "kivi", T=200, B=2, exact_newest=40, keep=True, **HALF), Case("int8", "int8", T=200, S=70, exact_newest=40, **HALF),
    # Beside first tokens nothing is looked up.
    Case("nf4", "nf4", T=200, exact_first=4, **HALF),
]


@contextlib.contextmanager
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Let Inductor lower for an H100 that is not there."""
    memory = SimpleNamespace(shared_memory_per_block_optin=232448, multi_processor_count=132, major=9, minor=0, gcnArchName="")
    known = DeviceProperties(
        type="cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, warp_size=32,
    )
    stand_in_for_a_device(monkeypatch)
    answers = {"get_device_properties": memory, "is_available": True, "current_device": 0, "get_device_capability": (9, 0)}
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(DeviceProperties, "create", classmethod(lambda cls, device: known))
    inductor.install()
    with FakeTensorMode() as mode:
        yield mode


def rendered(case: Case, log_sums: bool = False) -> dict[str, Any]:
    """The constants of the kernel that Inductor makes of a template for an attention, which are those of the kernel that ``dump`` shows."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return _rendered(case, log_sums, monkeypatch)


def _rendered(case: Case, log_sums: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    made: list[dict[str, Any]] = []
    generate = select_algorithm.TritonTemplate.generate

    def watched(self: Any, *args: Any, **more: Any) -> Any:
        found = generate(self, *args, **more)
        assert found is not None
        made.append(more)
        return found

    monkeypatch.setattr(select_algorithm.TritonTemplate, "generate", watched)
    leaves, spec = pytree.tree_flatten(AttendOperands(**operands(case), log_sums=log_sums).arguments())
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    with hopper(monkeypatch) as mode:
        given = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda") for each in tensors]

        def call(*fakes: torch.Tensor) -> tuple[torch.Tensor]:
            each = iter(fakes)
            filled = [next(each) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            return (torch.ops.kvcompile.attend(*pytree.tree_unflatten(filled, spec)),)

        graph = GraphLowering(make_fx(call)(*given), example_inputs=given)
    with V.set_graph_handler(graph), V.set_fake_mode(mode):
        graph.run(*given)
    asked, (result,) = AttendOperands(**operands(case), log_sums=log_sums), graph.graph_outputs
    assert [int(size) for size in result.get_size()] == list(attend_body(asked).shape)
    (constants,) = made
    shown = site_kernel(node_of(leaves, spec, given), "sm_90", int).config
    expected = {"num_warps": shown.tile.num_warps, "num_stages": shown.tile.num_stages, **shown.options()}
    assert {name: constants[name] for name in expected} == expected
    return expected


def node_of(leaves: list[Any], spec: Any, fakes: list[torch.Tensor]) -> fx.Node:
    """An ``attend`` node of a graph whose operands are ``fakes`` in place of the tensors among ``leaves``."""
    graph, each = fx.Graph(), iter(fakes)
    operands = [graph.placeholder(f"operand_{at}") if isinstance(leaf, torch.Tensor) else leaf for at, leaf in enumerate(leaves)]
    for operand in operands:
        if isinstance(operand, fx.Node):
            operand.meta["val"] = next(each)
    return graph.call_function(attend, tuple(pytree.tree_unflatten(operands, spec)))


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: torch remembers for good whether there was a device."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.skipif(torch.version.cuda is not None and not torch.cuda.is_available(), reason="a torch with CUDA needs its driver for fakes")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_inductor_renders_what_dump_shows(case: Case, process: ProcessPoolExecutor) -> None:
    """Inductor knows no operand before ``def_kernel``: the template once asked for the stride of norms there, and failed on CUDA only."""
    assert process.submit(rendered, case).result()


@pytest.mark.skipif(torch.version.cuda is not None and not torch.cuda.is_available(), reason="a torch with CUDA needs its driver for fakes")
def test_log_sums_are_merged_from_splits(process: ProcessPoolExecutor) -> None:
    """Of so many rows that a kernel would write the result itself, and have no place for log-sums."""
    many = Case("dense", "dense", B=1024, T=3, D=32, Dv=32, K=4, dtype=torch.bfloat16)
    assert process.submit(rendered, many, True).result()["DIRECT"] == 0
