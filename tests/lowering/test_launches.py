"""Operators that start kernels: what they declare as written is what their kernels write, and a compiled graph has each as one node.

No kernel runs here. Operands are fake tensors on the CPU; kernels are compiled as far as torch reads in them what they write, and
Inductor is stopped where it would import the module that it wrote.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from kernel_writes import stand_in_for_a_device, written_by
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves, tree_map_only

from kvcompile import schemes
from kvcompile.extensions.certified.scheme import PLACES, SCRATCH
from kvcompile.extensions.certified.site_op import SiteOperands, certified_site, site_by_kernels
from kvcompile.extensions.smartkv.attend import smartkv_attend
from kvcompile.extensions.smartkv.decode_step import DecodeStepOperands, step_by_kernels, step_gap
from kvcompile.lowering.append import operations as append_ops
from kvcompile.lowering.compile import compile_graph
from kvcompile.lowering.host.launches import KernelLaunch, NotRecorded, OnlyRoom, OperatorCall, Recorder
from kvcompile.lowering.ops.operands import attend_operands, named
from kvcompile.schemes.certificate.telemetry import TELEMETRY
from kvcompile.settings import Settings
from kvcompile.types import Role, SlotSpec

pytest.importorskip("triton")

K, G, D, PAGES = 2, 2, 64, 4


def planes_of(text: str, role: Role, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """A store of zeros."""
    layout = schemes.parse(text).for_role(role).layout(SlotSpec(K, D, dtype, role))
    return [torch.zeros(plane.shape(PAGES, 1, K), dtype=plane.dtype) for plane in layout.planes]


def append_operands(text: str, count: int, padded: bool = False) -> list[Any]:
    """Those of an append of keys and values by kernels."""
    operands: list[Any] = []
    for role in Role:
        planes, spelled = planes_of(text, role), schemes.parse(text).for_role(role).spec()
        x, pos = torch.zeros(1, count, K, D, dtype=torch.bfloat16).transpose(1, 2), torch.arange(count)[None]
        if not schemes.parse(text).window:
            operands += [x, planes, pos, spelled]
            continue
        written = append_ops.written(planes)
        moves = planes[-1] if text == "squat" and role is Role.KEY else None
        operands += [x, written, moves, pos, torch.zeros(1, dtype=torch.int64) if padded else None, spelled]
    return operands


def threshold_operands(text: str, count: int) -> list[Any]:
    """Operands of an append by thresholds."""
    *planes, _, table = planes_of(text, Role.KEY)
    x, pos = torch.zeros(1, count, K, D, dtype=torch.bfloat16).transpose(1, 2), torch.arange(count)[None]
    return [x, planes, pos, table, schemes.parse(text).spec()]


def static_operands(text: str, count: int) -> list[Any]:
    """Return the operands of ``append_own_kernel``."""
    codes, scales = planes_of(text, Role.KEY)
    x, pos = torch.zeros(1, count, K, D, dtype=torch.bfloat16).transpose(1, 2), torch.arange(count)[None]
    return [x, [codes], pos, scales, schemes.parse(text).spec()]


def site_operands(options: str = "", scratch: bool = False) -> list[Any]:
    """Return the operands of ``kvcompile::certified_site``; its scheme has ``options``."""
    text = f"certified({options})"
    keys, values = (
        {plane.name: made for plane, made in zip(
            schemes.parse(text).for_role(role).layout(SlotSpec(K, D, torch.bfloat16, role)).planes, planes_of(text, role), strict=True,
        )} for role in Role
    )
    read = [[planes[name] for name in ("codes", "scales", "zeros", "notes", "originals")] for planes in (keys, values)]
    exact_newest = [torch.zeros(1, K, 17, D, dtype=torch.bfloat16) for _ in Role]
    telemetry = torch.zeros(1, 1, K, 1, TELEMETRY, dtype=torch.float64)
    return [
        torch.zeros(1, K * G, 1, D, dtype=torch.bfloat16), *read, torch.zeros(1, 1, dtype=torch.int64), None, None, None, None,
        *(schemes.parse(text).for_role(role).spec() for role in Role), 0.125, 0.0, D, exact_newest, torch.zeros(1, dtype=torch.int64),
        telemetry,
        *([keys[PLACES], keys[SCRATCH], values[PLACES], values[SCRATCH]] if scratch else [None] * 4),
    ]


def site_body(recorder: Any, *operands: Any) -> list[torch.Tensor]:
    """The kernels of a site, from the operands of ``kvcompile::certified_site``."""
    return [site_by_kernels(recorder, SiteOperands.of(operands, {}))]


def smartkv_operands() -> list[Any]:
    """Return the operands of ``kvcompile::smartkv_attend``."""
    keys, values = (planes_of("smartkv", role) for role in Role)
    scheme = schemes.make("smartkv")
    count = scheme.for_role(Role.KEY).planes_read(SlotSpec(K, D, torch.bfloat16, Role.KEY))
    importance, _, heads, _ = keys[count:]
    return [
        torch.zeros(1, K * G, 1, D, dtype=torch.bfloat16), keys[:count], values, torch.zeros(1, 1, dtype=torch.int64), None, None, None,
        None, *(scheme.for_role(role).spec() for role in Role), 0.125, 0.0, D, importance, heads,
    ]


def smartkv_body(recorder: Any, *operands: Any) -> list[torch.Tensor]:
    """The kernels of a step, from the operands of ``kvcompile::smartkv_attend``."""
    given = named(smartkv_attend, operands, {})
    step = DecodeStepOperands(attend_operands(given), given["importance"], given["heads"])
    assert step_gap(step) is None
    return [step_by_kernels(recorder, step)]


CASES: dict[str, tuple[Any, Callable[..., Any], Callable[[], list[Any]]]] = {
    "certified": (certified_site, site_body, site_operands),
    "certified, all options": (
        certified_site, site_body,
        lambda: site_operands(
            "certify=rank:2/explore:0.1/value_budget:0.1/key_budget:0.5/select:group, tier2=host, scratch=32, value_scratch=16", True,
        ),
    ),
    "int8, many": (append_ops.append_kernel_pair, append_ops.rows_by_kernels, lambda: append_operands("int8", 40)),
    "int4, many, alone": (append_ops.append_kernel, append_ops.rows_by_kernels, lambda: append_operands("int4", 40)[:4]),
    "thresholds, many": (
        append_ops.append_own_kernel, append_ops.own_by_kernel, lambda: threshold_operands("beyond", 40),
    ),
    "thresholds of five bits, one": (
        append_ops.append_own_kernel, append_ops.own_by_kernel, lambda: threshold_operands("beyond(bits=5)", 1),
    ),
    "static scales, many": (append_ops.append_own_kernel, append_ops.own_by_kernel, lambda: static_operands("fp8-static", 40)),
    "static scales, one": (append_ops.append_own_kernel, append_ops.own_by_kernel, lambda: static_operands("int8-static", 1)),
    "kivi, one": (append_ops.append_window_kernel_pair, append_ops.windows_by_kernels, lambda: append_operands("kivi", 1)),
    "kivi, one, alone": (append_ops.append_window_kernel, append_ops.windows_by_kernels, lambda: append_operands("kivi", 1, True)[6:]),
    "kivi, many": (append_ops.append_window_kernel_pair, append_ops.windows_by_kernels, lambda: append_operands("kivi", 40, True)),
    "certified append": (append_ops.append_window_kernel_pair, append_ops.windows_by_kernels, lambda: append_operands("certified", 1)),
    "certified append to host": (
        append_ops.append_window_kernel, append_ops.windows_by_kernels, lambda: append_operands("certified(tier2=host)", 1, True)[:6],
    ),
    "squat, one": (append_ops.append_window_kernel_pair, append_ops.windows_by_kernels, lambda: append_operands("squat", 1)),
    "squat, many": (append_ops.append_window_kernel_pair, append_ops.windows_by_kernels, lambda: append_operands("squat", 40)),
}
each_case = pytest.mark.parametrize("case", CASES)

# What torch derives of smartkv's first kernel is more than it writes: it takes a plane that a loop searches in for written.
STORES = {**CASES, "smartkv": (smartkv_attend, smartkv_body, smartkv_operands)}


def faked(operands: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """The same with fake tensors."""
    return tree_map_only(torch.Tensor, lambda x: mode.from_tensor(x, static_shapes=True), list(operands))


def declared(target: Any, operands: Sequence[Any]) -> list[torch.Tensor]:
    """Operands that an operator's schema says it writes."""
    pairs = zip(target._schema.arguments, operands, strict=False)
    return [
        tensor for argument, operand in pairs if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tree_leaves(operand) if tensor is not None
    ]


@each_case
@pytest.mark.timeout(300)
def test_an_operator_declares_exactly_what_its_kernels_write(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_a_device(monkeypatch)
    target, body, make = CASES[case]
    mode, recorder = FakeTensorMode(), Recorder()
    operands = faked(make(), mode)
    with mode:
        body(recorder, *operands)
    written = {
        id(tensor) for step in recorder.steps
        for tensor in (written_by(step).values() if isinstance(step, KernelLaunch) else declared(step.target, step.operands))
    }
    names = {id(tensor): f"{at}" for at, tensor in enumerate(tree_leaves(operands)) if isinstance(tensor, torch.Tensor)}
    assert {names[each] for each in written if each in names} == {names[id(tensor)] for tensor in declared(target, operands)}


class Stopped(Exception):
    """Inductor has come as far as it was let."""


def graph_of(target: Any, operands: Sequence[Any], mode: FakeTensorMode) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A graph that calls the operator on its inputs, and its inputs."""
    graph, inputs = fx.Graph(), list(dict.fromkeys(x for x in tree_leaves(list(operands)) if isinstance(x, torch.Tensor)))
    names = {id(x): graph.placeholder(f"operand{index}") for index, x in enumerate(inputs)}
    made = graph.call_function(target, tuple(tree_map_only(torch.Tensor, lambda x: names[id(x)], list(operands))))
    returns = len(target._schema.returns)
    first = next(iter(names.values()))
    # Something that depends on what is written, behind it.
    read = graph.call_function(torch.ops.aten.add.Tensor, (graph.call_function(torch.ops.aten.mul.Tensor, (first, 2)), 1))
    results = [made] if returns == 1 else [graph.call_function(operator.getitem, (made, at)) for at in range(returns)]
    graph.output((*results, read))
    return fx.GraphModule({}, graph), faked(inputs, mode)


def compiled(case: str, monkeypatch: pytest.MonkeyPatch, stop: str, seen: Callable[[Any], Any]) -> Any:
    """What ``seen`` makes of Inductor's graph where its method ``stop`` is called."""
    from torch._inductor.graph import GraphLowering

    target, _, make = CASES[case]
    mode = FakeTensorMode(shape_env=ShapeEnv())
    module, fakes = graph_of(target, make(), mode)
    found: list[Any] = []

    def stopped(self: Any, *inputs: Any) -> Any:
        found.append(seen(self))
        raise Stopped

    monkeypatch.setattr(GraphLowering, stop, stopped)
    settings = Settings(options={"force_disable_caches": True})
    with torch.no_grad(), pytest.raises(Exception, match="Stopped"):
        compile_graph(module, fakes, mode, settings)
    return found[0]


@each_case
@pytest.mark.timeout(300)
def test_functionalization_leaves_planes_where_they_are(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that Inductor lowers has the operator in place on its own inputs, and copies nothing."""
    target, _, make = CASES[case]
    graph = compiled(case, monkeypatch, "run", lambda lowering: lowering.module.graph)
    (node,) = [node for node in graph.nodes if node.target is target]
    given = [item for item in tree_leaves(list(node.args)) if isinstance(item, fx.Node)]
    assert {item.op for item in given} == {"placeholder"}
    assert len(given) == len([x for x in tree_leaves(make()) if isinstance(x, torch.Tensor)])
    # What is left of an input that was written is a copy of it onto itself, which is lowered to nothing.
    called = {str(item.target): item for item in graph.nodes if item.op == "call_function" and item.args[0] is not item.args[1]}
    assert not [name for name in called if "copy" in name or "clone" in name or "functionalized" in name], called


@each_case
@pytest.mark.timeout(300)
def test_a_compiled_operator_is_its_launches_and_nothing_is_derived(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's module starts every kernel once, in order, on planes as they are; torch never reads a kernel's code."""
    from torch._higher_order_ops import triton_kernel_wrap
    from torch._inductor import lowering as inductor_lowering

    from kvcompile.lowering import inductor
    from kvcompile.lowering.host.launch_node import lower_launches

    def derived(*operands: Any, **more: Any) -> Any:
        raise AssertionError("torch derived what a kernel writes")

    monkeypatch.setattr(triton_kernel_wrap, "generate_ttir", derived)
    stand_in_for_a_device(monkeypatch)
    target, body, make = CASES[case]
    inductor.install()

    def lowered(*operands: Any, **more: Any) -> Any:
        """The lowering for CUDA, of operands in the schema's order, of which those behind may be left out."""
        given = [*operands, *more.values()]
        given += [None] * (len(target._schema.arguments) - len(given))
        results = lower_launches(body, given, declared(target, given))
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    monkeypatch.setitem(inductor_lowering.lowerings, target, lowered)
    text = compiled(case, monkeypatch, "_compile_to_module", lambda graph: graph.codegen()[0].value)
    recorder, mode = Recorder(), FakeTensorMode()
    with mode:
        body(recorder, *faked(make(), mode))
    code = text[text.index("def call") :]
    started = [line.split("(")[0].strip() for line in code.splitlines() if ".run(" in line or "torch.ops.kvcompile" in line]
    wanted = [
        step.kernel.fn.__name__ if isinstance(step, KernelLaunch) else f"torch.ops.{step.target}" for step in recorder.steps
    ]
    own = [line.removesuffix(".run") for line in started if not line.startswith(("cpp_fused", "triton_"))]
    assert [name.rsplit("_", 1)[0] if "torch.ops" not in name else name for name in own] == wanted
    assert "copy_" not in code


def growing(mode: FakeTensorMode, x: torch.Tensor) -> torch.Tensor:
    """A fake of x, whose pages are a symbol where it is a plane of them."""
    dynamic = [DimDynamic.DYNAMIC if x.dim() == 5 and at == 0 and size == PAGES else DimDynamic.STATIC for at, size in enumerate(x.shape)]
    return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))


@pytest.mark.parametrize("case", STORES)
@pytest.mark.timeout(300)
def test_stores_may_have_any_number_of_pages(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids over planes of a symbol of pages are those over planes of as many, and computed from it without fixing it."""
    stand_in_for_a_device(monkeypatch)
    _, body, make = STORES[case]
    fixed, grown = Recorder(), Recorder()
    with FakeTensorMode() as mode:
        body(fixed, *faked(make(), mode))
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes) as mode:
        body(grown, *tree_map_only(torch.Tensor, lambda x: growing(mode, x), make()))
    grids = [
        [[size.node.require_hint() if isinstance(size, torch.SymInt) else size for size in step.grid] for step in recorder.steps
         if isinstance(step, KernelLaunch)] for recorder in (fixed, grown)
    ]
    assert grids[0] == grids[1]
    assert not shapes.replacements, "pages are fixed"


def test_what_computes_between_kernels_is_refused() -> None:
    with FakeTensorMode(), OnlyRoom() as mode:
        room = torch.empty(3, 4)
        assert room.expand(2, 3, 4).stride() == (0, 4, 1)
        with pytest.raises(NotRecorded, match="aten::add"):
            room + 1
    assert len(mode.room) == 1


def test_an_operator_between_kernels_is_a_step() -> None:
    mode, recorder = FakeTensorMode(), Recorder()
    _, body, make = CASES["certified, all options"]
    with mode:
        body(recorder, *faked(make(), mode))
    assert [str(step.target) for step in recorder.steps if isinstance(step, OperatorCall)] == ["kvcompile.certified_ranks.default"]
    assert len(recorder.steps) == 16
