"""Which appends of a graph become which call, and that two in one launch are what they were."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import kvcompile
from kvcompile import schemes
from kvcompile.explain import observe
from kvcompile.lowering.append import appends
from kvcompile.lowering.append import operations as append_ops
from kvcompile.lowering.compile import BODIES, compile_graph, inductor_patches, inline_append
from kvcompile.lowering.ops import operations as ops
from kvcompile.passes.rewrite.rewritten import Variant
from kvcompile.settings import Settings
from kvcompile.tools.cli.targets import CacheKind, TargetOptions, resolve
from kvcompile.types import Role, SlotSpec

KV, DIM = 2, 64
aten = torch.ops.aten


def planes_of(text: str, role: Role) -> list[torch.Tensor]:
    """An empty store of two pages."""
    layout = schemes.parse(text).for_role(role).layout(SlotSpec(KV, DIM, torch.float32, role))
    return [torch.zeros(plane.shape(2, 1, KV), dtype=plane.dtype) for plane in layout.planes]


def spelled(text: str) -> list[str]:
    return [schemes.parse(text).for_role(role).spec() for role in Role]


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


@pytest.mark.parametrize("window", [False, True])
def test_two_appends_with_tables_are_what_they_were(window: bool) -> None:
    """One call of both, each with its own thresholds behind its origin; beside a window they are bodies, which the kernels do not know."""
    scheme, graph = schemes.make("beyond"), fx.Graph()
    slot = SlotSpec(KV, DIM, torch.float32, Role.KEY)
    layout = scheme.layout(slot).windowed(slot, 8) if window else scheme.layout(slot)
    written = layout.written
    tables = [scheme.constants(slot)["thresholds"][None, None] * factor for factor in (0.5, 1.25)]
    stores = [[scheme.empty(plane, slot, 2, 1) for plane in layout.planes[:written]] for _ in tables]
    names = [graph.placeholder(name) for name in ("k", "v", "pos", "t0", "t1", *(f"p{i}" for i in range(2 * written)))]
    k, v, pos, *rest = names
    made = []
    for x, half, table in zip((k, v), (rest[2 : 2 + written], rest[2 + written :]), rest[:2], strict=True):
        operands = (x, half, pos, None, scheme.spec(), [table]) if window else (x, half, pos, scheme.spec(), None, [table])
        made.append(graph.call_function(ops.append_window if window else ops.append, operands))
    graph.output([graph.call_function(operator.getitem, (item, 0)) for item in made] if window else k)
    plain = fx.GraphModule(torch.nn.Module(), graph)
    joined = inline_append(plain, cuda=True)
    assert targets(joined) == [appends.append_window_both if window else appends.append_both]
    tokens = [torch.randn(1, KV, 9, DIM, generator=torch.Generator().manual_seed(at)) for at in range(2)]
    found, wanted = ([[plane.clone() for plane in planes] for planes in stores] for _ in range(2))
    for module, held in ((joined, found), (plain, wanted)):
        module(*tokens, torch.arange(9)[None], *tables, *held[0], *held[1])
    for mine, other in zip(itertools.chain(*found), itertools.chain(*wanted), strict=True):
        assert torch.equal(mine, other)
    assert not torch.equal(found[0][0], found[1][0])


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


@pytest.fixture(scope="module", params=["kivi", "kivi(sinks=4,rotate=kv)", "int8(sinks=4,rotate=kv)"])
def seen(request: pytest.FixtureRequest) -> Iterator[kvcompile.backend.Backend]:
    """A tiny Llama's graphs with kivi, and with first tokens kept beside a window and without one."""
    torch._dynamo.reset()
    target = resolve("hf:llama", TargetOptions(cache=CacheKind.DYNAMIC))
    owner = kvcompile.backend(request.param, inner="eager")
    observe(target.model, target.inputs, owner)
    yield owner
    torch._dynamo.reset()


def test_a_step_has_one_append_a_layer(seen: Any) -> None:
    module = seen.records[-1].variants.rewritten(Variant.PAST).module
    layers = sum(node.target is ops.attend for node in module.graph.nodes)
    assert layers == 2
    made, bodies = targets(inline_append(module, cuda=True)), targets(inline_append(module))
    both, body = (appends.append_window_both, ops.append_window_body) if body_in(bodies) else (appends.append_both, ops.append_body)
    assert made.count(both) == layers
    assert not {ops.append, ops.append_window, appends.append_traced, appends.append_window_traced, body} & set(made)
    assert bodies.count(body) == 2 * layers
    # First tokens are kept behind both appends, and ahead of whoever reads them.
    kept = [at for at, target in enumerate(made) if target is ops.keep_first_body]
    reads = [at for at, target in enumerate(made) if target is ops.attend]
    joined = [at for at, target in enumerate(made) if target is both]
    assert len(kept) in {0, 2 * layers} and all(any(a < at < r for a, r in zip(joined, reads, strict=True)) for at in kept)


def body_in(bodies: list[Any]) -> bool:
    """Whether windows are appended to."""
    return ops.append_window_body in bodies


def test_the_end_of_padding_is_found_where_nothing_fuses_with_it() -> None:
    seen = torch.tensor([[0, 0, 3, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    module = make_fx(ops.first_visible)(seen)
    assert targets(inline_append(module, cuda=True)) == [ops.first_visible]
    assert targets(inline_append(module)) == [ops.first_visible_body]
    for mask in (seen, seen.bool(), seen[:1]):
        assert ops.first_visible(mask).tolist() == [2, 5, 0][: len(mask)]
        torch.library.opcheck(ops.first_visible, (mask,), test_utils=("test_schema", "test_faketensor"))


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


class OnCuda(torch.Tensor):
    """A tensor on the CPU that says it is on CUDA."""

    device = torch.device("cuda")


def kernels_of(calls: list[tuple[Any, ...]], step: Callable[[list[tuple[Any, ...]]], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operators that a step of these appends calls on CUDA, with their operands."""
    taken: list[Any] = []
    for name in ("append_kernel", "append_kernel_pair", "append_window_kernel", "append_window_kernel_pair"):
        monkeypatch.setattr(append_ops, name, lambda *operands, name=name: taken.append((name, operands)) or [None] * (len(calls)))
    step([(call[0].as_subclass(OnCuda), *call[1:]) for call in calls])
    return taken


@pytest.mark.parametrize(("text", "count", "name"), [
    ("kivi", 1, "append_window_kernel_pair"), ("kivi", 65, "append_window_kernel_pair"), ("int8", 65, "append_kernel_pair"),
    ("squat", 65, "append_window_kernel_pair"), ("certified", 1, "append_window_kernel_pair"),
])
def test_appends_of_keys_and_values_are_one_operator_that_writes_its_planes(
    text: str, count: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every plane is an operand once; what a scheme only reads is not among those that are declared as written."""
    pytest.importorskip("triton")
    stores, window = [planes_of(text, role) for role in Role], bool(schemes.parse(text).window)
    pos, more = torch.arange(count)[None], ((None,) if window else ())
    calls = [
        (torch.zeros(1, KV, count, DIM), planes, pos, *more, one) for planes, one in zip(stores, spelled(text), strict=True)
    ]
    (called, operands), = kernels_of(calls, appends._windows if window else appends._rows, monkeypatch)
    assert called == name
    each = append_ops.WINDOW_OPERANDS if window else append_ops.ROW_OPERANDS
    for slot, planes in zip((operands[:each], operands[each:]), stores, strict=True):
        assert [id(plane) for plane in slot[1]] == [id(plane) for plane in (append_ops.written(planes) if window else planes)]
        if window:
            assert slot[2] is (planes[5] if text == "squat" and len(planes) > 5 else None)


def test_many_tokens_of_a_window_take_the_kernels_that_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels know goes to them, one token of the rest to the body, many of them to the operation."""
    pytest.importorskip("triton")
    taken: list[Any] = []
    monkeypatch.setattr(appends, "_window_kernels", lambda slots: taken.append(len(slots)) or [None] * len(slots))
    monkeypatch.setattr(ops, "append_window_body", lambda *call: taken.append("body"))
    monkeypatch.setattr(ops, "append_window", lambda *call: taken.append("operation"))

    def calls(text: str, count: int) -> list[tuple[Any, ...]]:
        x = torch.zeros(1, KV, count, DIM).as_subclass(OnCuda)
        return [(x, planes_of(text, role), torch.arange(count)[None], None, one) for role, one in zip(Role, spelled(text), strict=True)]

    for text, count in (("kivi", 40), ("squat", 40), ("squat(group=8,window=8)", 40), ("kivi(window=96)", 40), ("kivi(window=96)", 1)):
        appends._windows(calls(text, count))
    # The values of squat are kivi's.
    assert taken == [2, 2, "operation", 1, "operation", "operation", "body", "body"]
