"""Equal layers become calls of one region: the same results, compiled once; what would not mean the same stays as it was."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from versions import OLD_TRANSFORMERS

import kvcompile
from kvcompile.lowering.layer_regions import fold_into_regions
from kvcompile.lowering.ops import operations as ops

aten = torch.ops.aten
Layer = Callable[[fx.Graph, fx.Node, fx.Node, fx.Node, int], fx.Node]


def visible_length(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(aten.unsqueeze.default, (graph.call_function(ops.first_visible, (x,)), 1))


def plain(graph: fx.Graph, x: fx.Node, weight: fx.Node, count: fx.Node, number: int) -> fx.Node:
    """A layer that moves a counter on and multiplies by a weight; an operation of this package stands in it."""
    del number
    seen = visible_length(graph, x)
    graph.call_function(aten.add_.Tensor, (count, 1))
    y = graph.call_function(aten.mul.Tensor, (x, weight))
    z = graph.call_function(aten.add.Tensor, (y, seen))
    return graph.call_function(aten.add.Tensor, (z, count))


def scaled_by_its_number(graph: fx.Graph, x: fx.Node, weight: fx.Node, count: fx.Node, number: int) -> fx.Node:
    return graph.call_function(aten.mul.Tensor, (plain(graph, x, weight, count, number), 2.0 + number))


def negated(graph: fx.Graph, x: fx.Node, weight: fx.Node, count: fx.Node, number: int) -> fx.Node:
    return graph.call_function(aten.neg.default, (plain(graph, x, weight, count, number),))


def writing_by_an_operation(graph: fx.Graph, x: fx.Node, weight: fx.Node, count: fx.Node, number: int) -> fx.Node:
    """An operation of ours that writes has no functional form inside of a region."""
    plane = graph.call_function(aten.view.default, (graph.call_function(aten.clone.default, (weight,)), [1, 1, 1, 2, 3]))
    pos = graph.call_function(aten.unsqueeze.default, (graph.call_function(aten.arange.default, (2,)), 0))
    new = graph.call_function(aten.view.default, (graph.call_function(aten.neg.default, (x,)), [1, 1, 2, 3]))
    graph.call_function(ops.append, (new, [plane], pos, "dense"))
    return plain(graph, x, graph.call_function(aten.view.default, (plane, [2, 3])), count, number)


def fakes_and_module(layer: Layer, layers: int = 4) -> tuple[fx.GraphModule, list[Any]]:
    """A graph of equal layers over fake values, as a capture leaves it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    graph, fakes = fx.Graph(), []

    def given(name: str, value: torch.Tensor) -> fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = mode.from_tensor(value)
        fakes.append(node.meta["val"])
        return node

    x = given("x", torch.zeros(2, 3))
    weights = [given(f"weight{number}", torch.zeros(2, 3)) for number in range(layers)]
    counts = [given(f"count{number}", torch.zeros(2, 1, dtype=torch.int64)) for number in range(layers)]
    for number in range(layers):
        x = layer(graph, x, weights[number], counts[number], number)
    graph.output((x, *counts))
    with mode:
        for node in graph.nodes:
            if node.op == "call_function" and "val" not in node.meta:
                node.meta["val"] = node.target(*fx.node.map_arg(node.args, lambda item: item.meta["val"]))
    return fx.GraphModule({}, graph), fakes


def arguments(layers: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    weights = [torch.randn(2, 3) for _ in range(layers)]
    return [torch.randn(2, 3), *weights, *(torch.full((2, 1), number) for number in range(layers))]


def test_equal_layers_become_calls_of_one_region() -> None:
    module, fakes = fakes_and_module(plain)
    expected = module(*arguments())
    assert fold_into_regions(module, fakes) == 4
    calls = [node for node in module.graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]
    assert len(calls) == 4 and len({call.args[1] for call in calls}) == 1
    found = module(*arguments())
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_many_layers_are_found_among_few_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 32 layers the search looked at every pair of them, and took longer than the compilation that it saves."""
    module_of_fold, seen = sys.modules["kvcompile.lowering.layer_regions"], []
    moved = module_of_fold._moved
    monkeypatch.setattr(module_of_fold, "_moved", lambda *given: seen.append(1) or moved(*given))
    module, fakes = fakes_and_module(plain, 32)
    assert fold_into_regions(module, fakes) == 32
    assert len(seen) <= 4 * module_of_fold.MOST_CANDIDATES


def test_operations_that_write_stay_between_regions() -> None:
    """A region reaches from what follows one layer's write to what stands before the next one's."""
    module, fakes = fakes_and_module(writing_by_an_operation)
    expected = module(*arguments())
    assert fold_into_regions(module, fakes) == 3
    targets = [node.target for node in module.graph.nodes if node.target in {torch.ops.higher_order.invoke_subgraph, ops.append}]
    assert targets == [*[ops.append, torch.ops.higher_order.invoke_subgraph] * 3, ops.append]
    assert all(torch.equal(a, b) for a, b in zip(expected, module(*arguments()), strict=True))


def test_what_is_not_equal_stays() -> None:
    module, fakes = fakes_and_module(scaled_by_its_number)
    before = str(module.graph)
    assert fold_into_regions(module, fakes) == 0
    assert str(module.graph) == before


def test_the_name_of_a_region_says_what_it_does() -> None:
    """Torch keeps what it traced by that name, so another region has another."""
    names = []
    for layer in (plain, negated):
        module, fakes = fakes_and_module(layer)
        assert fold_into_regions(module, fakes)
        names += [node.args[1] for node in module.graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]
    assert len(set(names)) == 2


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()


def calls_of(model: Any, kind: str, backend: Any) -> list[torch.Tensor]:
    """Logits of a prompt and of single tokens, and of a second request."""
    from transformers import DynamicCache, StaticCache

    torch._dynamo.reset()
    compiled, words, found = torch.compile(model, backend=backend), torch.arange(20).view(1, -1) % 7, []
    for _ in range(2):
        cache = StaticCache(config=model.config, max_cache_len=64) if kind == "static" else DynamicCache(config=model.config)
        start = 0
        for count in (9, 1, 1):
            with torch.no_grad():
                found.append(compiled(words[:, start : start + count], past_key_values=cache).logits)
            start += count
    return found


@pytest.mark.parametrize(("scheme", "kind"), [("int4", "static"), ("kivi", "dynamic")])
def test_a_folded_model_gives_the_same(scheme: str, kind: str, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    folded: list[int] = []
    monkeypatch.setattr("kvcompile.lowering.compile.fold_into_regions", lambda *given: folded.append(fold_into_regions(*given)))
    model = llama()
    expected = calls_of(model, kind, kvcompile.backend(scheme, inner="aot_eager"))
    assert not folded
    found = calls_of(model, kind, kvcompile.backend(scheme, inner="aot_eager", fold=True))
    assert max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True)) <= 1e-6
    # With transformers before 5.23 the first layer of a growing cache has sizes of its own.
    assert (2 if OLD_TRANSFORMERS and kind == "dynamic" else 3) in folded


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    """Return the logits of the model without folding and without an optimizing compiler."""
    return calls_of(llama(), "static", kvcompile.backend("int8", inner="aot_eager"))


def test_a_region_that_does_not_compile_is_compiled_as_it_was(
    expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None
) -> None:
    def broken(module: fx.GraphModule, fakes: Any, writers: Any) -> int:
        """One operand less than the region takes."""
        count = fold_into_regions(module, fakes, writers)
        for call in module.graph.nodes:
            if call.target is torch.ops.higher_order.invoke_subgraph:
                call.args = call.args[:-1]
        return count

    monkeypatch.setattr("kvcompile.lowering.compile.fold_into_regions", broken)
    found = calls_of(llama(), "static", kvcompile.backend("int8", inner="aot_eager", fold=True))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.compile
@pytest.mark.parametrize("writers", [(), (ops.append_body,)], ids=["inside", "between"])
def test_inductor(writers: tuple[Any, ...], expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    """With the writes inside of a region, and between regions, as they are on CUDA."""
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr("kvcompile.lowering.compile.WRITERS", writers)
    found, sources = run_and_get_code(calls_of, llama(), "static", kvcompile.backend("int8", fold=True))
    assert max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True)) <= 1e-5
    regions = [set(re.findall(r"def (\w*subgraph\w*)\(", source)) for source in sources]
    calls = 3 if writers else 4
    assert any(len(names) == 1 and source.count(f"{next(iter(names))}(") >= calls for names, source in zip(regions, sources, strict=True))
