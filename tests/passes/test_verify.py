"""A rewritten graph that is broken on purpose does not get past ``verify``, and the error says what and where."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e_models import CASES, inputs
from torch import fx

import kvcompile
from kvcompile.errors import VerificationFailed
from kvcompile.passes.rewrite.rewritten import Rewritten, Variant
from kvcompile.passes.verify import _asks, verify
from kvcompile.records import GraphRecord
from kvcompile.schemes.certificate.policy import Certify, Fallback

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

aten = torch.ops.aten


@pytest.fixture(scope="module")
def record() -> GraphRecord:
    """The pipeline's values for a decode graph of a module that returns its cache."""
    case = next(case for case in CASES if case.name == "tril-mask")
    module, owner = case.make(), kvcompile.backend("int8", inner="eager", strict=True)
    with torch.no_grad():
        case.drive(module, torch.compile(module, backend=owner), inputs(module, (7, 1)))
    torch._dynamo.reset()
    return owner.records[-1]


def broken(record: GraphRecord, change: Callable[[fx.Graph], None]) -> tuple[Rewritten, Any, Any]:
    """The arguments of ``verify`` after ``change`` was done to a copy of the rewritten graph."""
    rewritten = copy.copy(record.variants.rewritten(Variant.PAST))
    module = fx.GraphModule(rewritten.module, copy.deepcopy(rewritten.module.graph))
    change(module.graph)
    module.recompile()
    object.__setattr__(rewritten, "module", module)
    return rewritten, record.captured, record.variants.inputs(Variant.PAST)


def named(graph: fx.Graph, name: str) -> list[fx.Node]:
    """The nodes of one of our operations."""
    return [node for node in graph.nodes if str(node.target).startswith(f"kvcompile.{name}")]


def plane(graph: fx.Graph, index: int = 0) -> fx.Node:
    """One of the planes among the inputs."""
    return [node for node in graph.find_nodes(op="placeholder") if str(node.target).startswith("kv")][index]


def output(graph: fx.Graph) -> fx.Node:
    """The graph's output."""
    return next(iter(graph.find_nodes(op="output")))


def test_the_graph_as_it_is_passes(record: GraphRecord) -> None:
    verify(*broken(record, lambda graph: None))


def extra_reader(graph: fx.Graph) -> None:
    with graph.inserting_before(output(graph)):
        graph.call_function(aten.sum.default, (plane(graph),))


def plane_returned(graph: fx.Graph) -> None:
    output(graph).args = ([*output(graph).args[0], plane(graph)],)  # type: ignore[misc]


def two_appends(graph: fx.Graph) -> None:
    first = named(graph, "append")[0]
    with graph.inserting_after(first):
        graph.call_function(first.target, first.args)  # type: ignore[arg-type]


def no_append(graph: fx.Graph) -> None:
    graph.erase_node(named(graph, "append")[0])


def append_too_late(graph: fx.Graph) -> None:
    named(graph, "attend")[0].append(named(graph, "append")[0])


def plane_missing(graph: fx.Graph) -> None:
    attend, keys = named(graph, "attend")[0], named(graph, "append")[0].args[1]
    attend.args = (attend.args[0], keys, keys, *attend.args[3:])
    last = plane(graph, -1)
    graph.erase_node(next(node for node in named(graph, "append") if last in node.all_input_nodes))
    graph.erase_node(last)


def dtype_changed(graph: fx.Graph) -> None:
    result = output(graph).args[0][0]  # type: ignore[index]
    with graph.inserting_before(output(graph)):
        changed = graph.call_function(aten.to.dtype, (result, torch.float16))
    output(graph).args = ([changed],)


def shape_changed(graph: fx.Graph) -> None:
    result = output(graph).args[0][0]  # type: ignore[index]
    with graph.inserting_before(output(graph)):
        changed = graph.call_function(aten.unsqueeze.default, (result, 0))
    output(graph).args = ([changed],)


def result_missing(graph: fx.Graph) -> None:
    output(graph).args = ([],)


def test_a_gather_ahead_of_its_append_fails() -> None:
    case = next(case for case in CASES if case.name == "block-table")
    module, owner = case.make(), kvcompile.backend("int8", inner="eager", strict=True)
    with torch.no_grad():
        case.drive(module, torch.compile(module, backend=owner), inputs(module, (7,)))
    verify(*broken(owner.records[-1], lambda graph: None))

    def late(graph: fx.Graph) -> None:
        named(graph, "gather")[0].append(named(graph, "append")[0])

    with pytest.raises(VerificationFailed, match="every gather comes after the append of its tokens"):
        verify(*broken(owner.records[-1], late))


def limits_for_other_queries(graph: fx.Graph) -> None:
    attend = named(graph, "attend")[0]
    with graph.inserting_before(attend):
        twice = graph.call_function(aten.cat.default, ([attend.args[3]] * 2, 1))
    attend.update_arg(3, twice)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (extra_reader, "only calibrate, append, gather and attend touch a plane"),
        (plane_returned, "only calibrate, append, gather and attend touch a plane"),
        (two_appends, "one append into every plane"),
        (no_append, "one append into every plane"),
        (append_too_late, "every attend comes after the append of its tokens"),
        (plane_missing, "as many inputs as kept arguments, planes, cursors and sizes"),
        (dtype_changed, "a result of torch.float32"),
        (shape_changed, "a result of torch.float32"),
        (result_missing, "as many results as before"),
        (limits_for_other_queries, "a limit for each query"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_a_broken_graph_fails(record: GraphRecord, change: Callable[[fx.Graph], None], fact: str) -> None:
    with pytest.raises(VerificationFailed) as caught:
        verify(*broken(record, change))
    assert fact in str(caught.value)
    assert "please report it" in str(caught.value)


@pytest.mark.parametrize(("late", "users", "fine"), [
    (False, "sub", True), (True, "sub", False), (True, "lt", True), (False, "lt", False), (True, "lt sub", False), (False, "lt sub", True),
])
def test_a_clock_is_counted_from_before_its_append_and_tested_after_it(late: bool, users: str, fine: bool) -> None:
    """The append moves the clock on: positions counted from it later would be those of the next call."""
    graph = fx.Graph()
    clock = graph.placeholder("kv0_k_clock")
    append = None if not late else graph.call_function(torch.ops.kvcompile.append.default, (clock,))
    view = graph.call_function(aten.select.int, (clock, 0, 0))
    for user in users.split():
        graph.call_function({"sub": aten.sub.Tensor, "lt": aten.lt.Scalar}[user], (view, 1))
    append = append or graph.call_function(torch.ops.kvcompile.append.default, (clock,))
    assert _asks(view, "clock", [append], {node: index for index, node in enumerate(graph.nodes)}) is fine


def test_an_append_may_not_take_what_attention_adds_to() -> None:
    case = next(case for case in CASES if case.name == "tril-mask")
    module = case.make()
    owner = kvcompile.backend("int8", certify=Certify(fallback=Fallback.REPORT), inner="eager", strict=True)
    with torch.no_grad():
        case.drive(module, torch.compile(module, backend=owner), inputs(module, (7, 1)))
    torch._dynamo.reset()

    def take(graph: fx.Graph) -> None:
        telemetry = next(node for node in graph.find_nodes(op="placeholder") if "telemetry" in str(node.target))
        first = named(graph, "append")[0]
        first.args = (first.args[0], [*first.args[1], telemetry], *first.args[2:])  # type: ignore[misc]

    verify(*broken(owner.records[-1], lambda graph: None))
    with pytest.raises(VerificationFailed, match="no append into a plane that attention adds to"):
        verify(*broken(owner.records[-1], take))


class Furthest(torch.nn.Module):
    """Attention whose queries all see what the furthest one sees, from some places behind the first one on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 2, 48, 16))
        self.register_buffer("values", torch.zeros(1, 2, 48, 16))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        """Write and attend."""
        self.keys[:, :, pos] = k
        self.values[:, :, pos] = v
        t = torch.arange(48)
        seen = (t <= pos.max()) & (t >= pos.min() - 6)
        return (q @ self.keys.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ self.values


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("scheme", ["int8", "kivi(bits=4,group=16,window=16)", "certified", "smartkv"])
def test_a_limit_that_all_queries_share_is_given_to_each(scheme: str, dynamic: bool) -> None:
    """A kernel on a GPU reads one for each query, whatever lies behind a single one; eager code and C++ broadcast it."""
    module, owner = Furthest(), kvcompile.backend(scheme, inner="eager", strict=True)
    compiled, begin = torch.compile(module, backend=owner, dynamic=dynamic), 0
    with torch.no_grad():
        for count in (5, 3, 1, 4):
            compiled(*torch.randn(3, 1, 2, count, 16), torch.arange(begin, begin + count))
            begin += count
    limited = 0
    for record in owner.records:
        for node in record.variants.printed(Variant.PAST).graph.nodes:
            named_by = [item.name for item in node.target._schema.arguments] if "kvcompile" in str(node.target) else []
            if "hi" in named_by:
                queries = node.args[0].meta["val"].shape[2]
                for at in (named_by.index("hi"), named_by.index("lo")):
                    assert node.args[at].meta["val"].shape[1] == queries
                    limited += 1
    assert limited >= 2 * len(owner.records)
