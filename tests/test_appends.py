"""Which appends of a graph become which call, and that two in one launch are what they were."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import kvcompile
from kvcompile import schemes
from kvcompile.explain import observe
from kvcompile.lowering import appends, ops
from kvcompile.lowering.compile import BODIES, compile_graph, inductor_patches, inline_append
from kvcompile.settings import Settings
from kvcompile.targets import CacheKind, Options, resolve
from kvcompile.types import Role, SlotSpec

KV, DIM = 2, 64
aten = torch.ops.aten


def planes_of(text: str, role: Role) -> list[torch.Tensor]:
    """An empty store of two pages."""
    layout = schemes.parse(text).of(role).layout(SlotSpec(KV, DIM, torch.float32, role))
    return [torch.zeros(plane.shape(2, 1, KV), dtype=plane.dtype) for plane in layout.planes]


def spelled(text: str) -> list[str]:
    return [schemes.parse(text).of(role).spell() for role in Role]


def graph_of(text: str, between: Callable[..., Any] | None = None) -> fx.GraphModule:
    """Two appends and what a step does with their results; ``between`` gets the graph, the planes and results of the first one, and x."""
    graph, window = fx.Graph(), bool(schemes.parse(text).window)
    stores = [planes_of(text, role) for role in Role]
    k, v, pos, *planes = (graph.placeholder(name) for name in ("k", "v", "pos", *(f"p{i}" for i in range(sum(map(len, stores))))))
    halves = planes[: len(stores[0])], planes[len(stores[0]) :]
    results: list[fx.Node] = []
    for x, half, scheme in zip((k, v), halves, spelled(text), strict=True):
        if window:
            made = graph.call_function(ops.append_window, (x, half, pos, None, scheme))
            results += [graph.call_function(operator.getitem, (made, index)) for index in (0, 1)]
        else:
            graph.call_function(ops.append, (x, half, pos, scheme))
        if x is k and between is not None:
            between(graph, halves[0], results, v)
    graph.output(tuple(results) or k)
    return fx.GraphModule(torch.nn.Module(), graph)


def targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]


@pytest.mark.parametrize(("text", "count", "both"), [
    ("kivi", 1, appends.append_window_both), ("kivi", 5, appends.append_window_both), ("int4", 1, appends.append_both),
    ("int8", 9, appends.append_both),
])
def test_two_appends_are_one_call_with_their_results(text: str, count: int, both: Any) -> None:
    joined = inline_append(graph_of(text), cuda=True)
    assert targets(joined) == [both]
    generator = torch.Generator().manual_seed(3)
    operands = [torch.randn(1, KV, count, DIM, generator=generator) for _ in Role] + [torch.arange(count).unsqueeze(0)]
    stores = [planes_of(text, role) for role in Role]
    mine, wanted = ([[plane.clone() for plane in planes] for planes in stores] for _ in range(2))
    found = joined(*operands, *mine[0], *mine[1])
    expected = graph_of(text)(*operands, *wanted[0], *wanted[1])
    flat = torch.utils._pytree.tree_leaves
    for a, b in zip(flat((mine, found)), flat((wanted, expected)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("text", ["kivi", "int8"])
def test_elsewhere_every_append_is_its_body(text: str) -> None:
    assert set(targets(inline_append(graph_of(text)))) == {ops.append_window_body if text == "kivi" else ops.append_body}
    assert BODIES[ops.append] is ops.append_body
    assert BODIES[ops.append_window] is ops.append_window_body


def read_result(graph: fx.Graph, planes: list[fx.Node], results: list[fx.Node], x: fx.Node) -> None:
    graph.call_function(aten.add.Tensor, (results[0], 1))


def read_plane(graph: fx.Graph, planes: list[fx.Node], results: list[fx.Node], x: fx.Node) -> None:
    graph.call_function(aten.clone.default, (planes[0],))


def change(graph: fx.Graph, planes: list[fx.Node], results: list[fx.Node], x: fx.Node) -> None:
    graph.call_function(aten.add_.Tensor, (x, 1))


def unrelated(graph: fx.Graph, planes: list[fx.Node], results: list[fx.Node], x: fx.Node) -> None:
    graph.call_function(operator.add, (1, 2))
    graph.call_function(aten.mul.Tensor, (x, 2))


@pytest.mark.parametrize(("between", "calls"), [(read_result, 2), (read_plane, 2), (change, 2), (unrelated, 1)])
def test_what_stands_between_two_appends(between: Any, calls: int) -> None:
    made = targets(inline_append(graph_of("kivi", between), cuda=True))
    joined = made.count(appends.append_window_both)
    assert (made.count(appends.append_window_traced), joined) == ((2, 0) if calls == 2 else (0, 1))


@pytest.fixture(scope="module")
def seen() -> Iterator[kvcompile.backend.Backend]:
    """A tiny Llama's graphs with kivi."""
    torch._dynamo.reset()
    target = resolve("hf:llama", Options(cache=CacheKind.DYNAMIC))
    owner = kvcompile.backend("kivi", inner="eager")
    observe(target.model, target.inputs, owner)
    yield owner
    torch._dynamo.reset()


def test_a_step_has_one_append_a_layer(seen: Any) -> None:
    module = seen.stages[-1]["past"].module
    layers = sum(node.target is ops.attend for node in module.graph.nodes)
    assert layers == 2
    made = targets(inline_append(module, cuda=True))
    assert made.count(appends.append_window_both) == layers
    assert not {ops.append_window, appends.append_window_traced, ops.append_window_body} & set(made)
    assert targets(inline_append(module)).count(ops.append_window_body) == 2 * layers


def test_divisions_are_those_of_eager() -> None:
    """The option exists in this version of torch, and whoever sets it is obeyed."""
    name = "eager_numerics.division_rounding"
    patches = inductor_patches(Settings(), None, None, "")
    assert patches[name] is True
    with torch._inductor.config.patch(**{name: patches[name]}):
        assert torch._inductor.config.eager_numerics.division_rounding
    assert inductor_patches(Settings(options={name: False}), None, None, "")[name] is False


@pytest.mark.parametrize("text", ["int8", "int4(scale_dtype=bfloat16)", "kivi"])
@pytest.mark.timeout(300)
def test_compiled_codes_are_made_from_what_is_stored(text: str) -> None:
    """Inductor keeps scales and zero points in float32 where it can, and codes of unrounded ones are other codes."""
    module = graph_of(text)
    generator = torch.Generator().manual_seed(5)
    stores = [plane for role in Role for plane in planes_of(text, role)]
    operands = [torch.randn(1, KV, 65, DIM, generator=generator) + torch.arange(DIM) / 8 for _ in Role] + [torch.arange(65).unsqueeze(0)]
    wanted = [plane.clone() for plane in stores]
    module(*operands, *wanted)
    mode = torch._subclasses.FakeTensorMode()
    with torch.no_grad():
        run = compile_graph(module, [mode.from_tensor(x) for x in (*operands, *stores)], mode, Settings())
        run(*operands, *stores)
    for mine, body in zip(stores, wanted, strict=True):
        assert torch.equal(mine, body), (int((mine != body).sum()), tuple(mine.shape), mine.dtype)


class Wrapped:
    """A kernel that a trace on the CPU records as one on CUDA."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        from torch.library import wrap_triton

        return wrap_triton(self.kernel)[grid]


def traced_step(step: Callable[..., Any], text: str, count: int, growing: bool, origin: bool = False) -> fx.GraphModule:
    """A step of new keys and values, positions, the origins where asked for, and all planes; no size of those that grow is fixed."""
    shapes = ShapeEnv()
    mode = torch._subclasses.FakeTensorMode(shape_env=shapes)

    def faked(x: torch.Tensor, axis: int) -> torch.Tensor:
        sizes = [DimDynamic.DYNAMIC if growing and at == axis and x.shape[at] > 1 else DimDynamic.STATIC for at in range(x.dim())]
        return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    stores = [plane for role in Role for plane in planes_of(text, role)]
    new = [torch.zeros(1, count, KV, DIM).transpose(1, 2) for _ in Role]
    given = [mode.from_tensor(torch.zeros(1, dtype=torch.int64))] if origin else []
    operands = [*(faked(x, 2) for x in new), faked(torch.arange(count).unsqueeze(0), 1), *given, *(faked(x, 0) for x in stores)]
    with mode:
        traced = make_fx(step)(*operands)
    assert not [value for value in shapes.replacements.values() if value.is_number], "a size was fixed"
    return traced


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize(("text", "count"), [("kivi", 1), ("int8", 65), ("int4", 65)])
def test_a_traced_append_is_one_kernel_on_whole_planes(text: str, count: int, growing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied before or behind: what a kernel changes are the graph's own inputs, not views of them.

    ``growing``: numbers of pages and of new tokens are symbols, on which nothing may depend but sizes and operands.
    """
    pytest.importorskip("triton")
    from kvcompile.lowering import triton_append, triton_append_rows

    for module, name in ((triton_append, "append_two"), (triton_append_rows, "append_rows_two")):
        monkeypatch.setattr(module, name, Wrapped(getattr(module, name)))
    window = bool(schemes.parse(text).window)

    def step(k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor, *planes: torch.Tensor) -> list[torch.Tensor]:
        halves = list(planes[: len(planes) // 2]), list(planes[len(planes) // 2 :])
        if not window:
            slots = [triton_append_rows.Rows(x, half, pos, text) for x, half in zip((k, v), halves, strict=True)]
            assert all(triton_append_rows.fits(slot) for slot in slots)
            triton_append_rows.append_rows(slots)
            return []
        both = [triton_append.Slot(x, half, pos, None, one) for x, half, one in zip((k, v), halves, spelled(text), strict=True)]
        return [recent for recent, _ in triton_append.append_window_slots(both)]

    traced = traced_step(step, text, count, growing)
    kernels = [node for node in traced.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    assert len(kernels) == 1
    given = kernels[0].kwargs["kwargs"].values()  # type: ignore[union-attr]
    inputs = [node for node in given if isinstance(node, fx.Node) and isinstance(node.meta["val"], torch.Tensor)]
    # Room for the newest tokens is the one thing that is made.
    assert {node.op for node in inputs} == {"placeholder"} | ({"call_function"} if window else set())
    assert {node.target for node in inputs if node.op == "call_function"} <= {aten.empty.memory_format, aten.new_empty.default}
    given_once(kernels[0])


def given_once(kernel: fx.Node) -> None:
    """What a kernel may change it has under one name: what it reads as well under another would be copied first."""
    operands = kernel.kwargs["kwargs"]
    assert isinstance(operands, dict)
    nodes = [node for node in operands.values() if isinstance(node, fx.Node) and isinstance(node.meta["val"], torch.Tensor)]
    read = {"X", "POS", "ORIGIN", "MOVES"}
    again = {name for name, node in operands.items() if nodes.count(node) > 1}
    assert {name.removesuffix("_2") for name in again} <= read, again


def block_step(padded: bool, monkeypatch: pytest.MonkeyPatch, text: str = "kivi") -> Callable[..., Any]:
    """A step of many tokens by the kernels, as a trace on the CPU records it."""
    from kvcompile.lowering import triton_append_blocks as blocks
    from kvcompile.lowering.triton_append import Slot

    for name in ("append_blocks_two", "roll_two"):
        monkeypatch.setattr(blocks, name, Wrapped(getattr(blocks, name)))

    def step(k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
        origin, planes = (rest[0], rest[1:]) if padded else (None, rest)
        halves = list(planes[:-5]), list(planes[-5:])
        slots = [Slot(x, half, pos, origin, one) for x, half, one in zip((k, v), halves, spelled(text), strict=True)]
        assert all(blocks.fits(slot) for slot in slots)
        return [recent for recent, _ in blocks.append_window_blocks(slots)]

    return step


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_traced_block_of_a_window_is_two_kernels_on_whole_planes(growing: bool, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they read and change are the graph's own inputs and the room for the newest tokens, which is made once."""
    pytest.importorskip("triton")
    traced = traced_step(block_step(padded, monkeypatch), "kivi", 65, growing, padded)
    kernels = [node for node in traced.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    assert len(kernels) == 2
    for kernel in kernels:
        given = kernel.kwargs["kwargs"].values()  # type: ignore[union-attr]
        inputs = {node for node in given if isinstance(node, fx.Node) and isinstance(node.meta["val"], torch.Tensor)}
        made = [node for node in inputs if node.op == "call_function"]
        assert {node.target for node in made} <= {aten.empty.memory_format, aten.new_empty.default}
        assert len(made) == 2, "keys and values"
        assert {node.op for node in inputs} == {"placeholder", "call_function"}


class DeviceStandIn:
    """What triton asks of a driver to lower a kernel."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.mark.parametrize(("text", "padded"), [("kivi", False), ("kivi", True), ("squat", True)])
def test_a_block_of_a_window_changes_what_it_writes(text: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads in a kernel's code what it may write; positions taken for written would be copied, and no graph of a step recorded."""
    pytest.importorskip("triton")
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", DeviceStandIn())
    traced = traced_step(torch.func.functionalize(block_step(padded, monkeypatch, text), remove="mutations"), text, 65, True, padded)
    kernels = [node for node in traced.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    written = [{name for name in node.kwargs["tensors_to_clone"] if not name.endswith("_2")} for node in kernels]  # type: ignore[union-attr]
    given_once(kernels[0])
    assert written == [{"CODES", "SCALES", "ZEROS", "RECENT"}, {"RING", "CLOCK"}]


def test_many_tokens_of_a_window_take_the_kernels_that_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels know goes to them, one token of the rest to the body, many of them to the operation."""
    pytest.importorskip("triton")
    from kvcompile.lowering import triton_append_blocks as blocks

    taken: list[Any] = []
    monkeypatch.setattr(blocks, "append_window_blocks", lambda slots: taken.append(len(slots)) or [None] * len(slots))
    monkeypatch.setattr(ops, "append_window_body", lambda *call: taken.append("body"))
    monkeypatch.setattr(ops, "append_window", lambda *call: taken.append("operation"))

    class OnCuda(torch.Tensor):
        device = torch.device("cuda")

    def calls(text: str, count: int) -> list[tuple[Any, ...]]:
        x = torch.zeros(1, KV, count, DIM).as_subclass(OnCuda)
        return [(x, planes_of(text, role), torch.arange(count)[None], None, one) for role, one in zip(Role, spelled(text), strict=True)]

    for text, count in (("kivi", 40), ("squat", 40), ("squat(subblock=8)", 40), ("kivi(window=96)", 40), ("kivi(window=96)", 1)):
        appends._windows(calls(text, count))
    # The values of squat are kivi's.
    assert taken == [2, 2, "operation", 1, "operation", "operation", "body", "body"]
