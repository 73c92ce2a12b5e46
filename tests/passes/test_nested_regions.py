"""Models whose layers are marked with ``torch.compiler.nested_compile_region``: rewritten in every layer, as if unmarked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import kvcompile
from kvcompile.passes.capture.nested import is_region

LAYERS, HEADS, DIM, ROOM, PROMPT = 3, 2, 64, 64, 9

pytestmark = pytest.mark.usefixtures("one_thread")


class Layer(nn.Module):
    """Attention over a cache that is written in place, or that grows by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(HEADS * DIM, 3 * HEADS * DIM, bias=False), nn.Linear(HEADS * DIM, HEADS * DIM, bias=False)

    def attend(self, x: torch.Tensor, past: Any, at: torch.Tensor | None) -> Any:
        q, k, v = self.into(x).view(*x.shape[:2], 3, HEADS, DIM).permute(2, 0, 3, 1, 4)
        if at is None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(past, (k, v), strict=True))
            out = functional.scaled_dot_product_attention(q, k, v)
        else:
            keys, values = past
            keys.index_copy_(2, at, k)
            values.index_copy_(2, at, v)
            mask = torch.arange(ROOM)[None, :] <= at[:, None]
            out = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x if at is not None else (x, k, v)

    def forward(self, x: torch.Tensor, past: Any, at: torch.Tensor | None = None) -> Any:
        return self.attend(x, past, at)


class Marked(Layer):
    """A layer that Dynamo traces once and calls."""

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor, past: Any, at: torch.Tensor | None = None) -> Any:
        return self.attend(x, past, at)


class Model(nn.Module):
    """Layers in a row."""

    def __init__(self, kind: type[Layer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, caches: Any, at: torch.Tensor | None = None) -> Any:
        grown = []
        for layer, past in zip(self.layers, caches, strict=True):
            if at is None:
                x, *more = layer(x, past)
                grown.append(more)
            else:
                x = layer(x, past, at)
        return x if at is not None else (x, grown)


@torch.no_grad()
def outputs(model: Model, call: Any, static: bool, steps: int = 4) -> torch.Tensor:
    """The outputs of decode steps behind a prompt, which a static cache gets from ``call`` and a growing one from the model."""
    x, found = torch.randn(1, PROMPT + steps, HEADS * DIM, generator=torch.Generator().manual_seed(1)), []
    caches: Any = [[torch.zeros(1, HEADS, ROOM if static else 0, DIM) for _ in "kv"] for _ in range(LAYERS)]
    if static:
        call(x[:, :PROMPT], caches, torch.arange(PROMPT))
    else:
        caches = model(x[:, :PROMPT], caches)[1]
    for step in range(PROMPT, PROMPT + steps):
        if static:
            out = call(x[:, step : step + 1], caches, torch.tensor([step]))
        else:
            out, caches = call(x[:, step : step + 1], caches)
        found.append(out)
    return torch.cat(found)


def compiled(kind: type[Layer], static: bool, scheme: Any = "int8", inner: str = "eager") -> tuple[torch.Tensor, Any]:
    """Outputs of a compiled model, and its backend."""
    torch._dynamo.reset()
    model, owner = Model(kind).eval(), kvcompile.backend(scheme, strict=True, inner=inner)
    return outputs(model, torch.compile(model, backend=owner, fullgraph=True), static), owner


@pytest.mark.parametrize("static", [True, False])
def test_marked_layers_are_rewritten_as_unmarked_ones(static: bool) -> None:
    plain, other = compiled(Layer, static)
    marked, owner = compiled(Marked, static)
    assert torch.equal(marked, plain)
    assert [len(graph.sites) for graph in owner.graphs] == [len(graph.sites) for graph in other.graphs]
    assert {len(graph.sites) for graph in owner.graphs} == {LAYERS}
    model = Model(Layer).eval()
    exact = outputs(model, model, static)
    assert 0 < (marked - exact).norm() / exact.norm() < 0.02


def test_marked_layers_go_through_inductor() -> None:
    plain, _ = compiled(Layer, True)
    marked, owner = compiled(Marked, True, inner="inductor")
    torch.testing.assert_close(marked, plain, rtol=1e-4, atol=1e-4)
    assert {len(graph.sites) for graph in owner.graphs} == {LAYERS}


@pytest.mark.parametrize("static", [True, False])
def test_every_layer_has_the_scheme_of_its_own_path(static: bool) -> None:
    scheme = {"*": "int4", "*layers.1*": "int8"}
    plain, other = compiled(Layer, static, scheme)
    marked, owner = compiled(Marked, static, scheme)
    assert torch.equal(marked, plain)
    paths, expected = ([(site.path, site.scheme) for site in each.graphs[-1].sites] for each in (owner, other))
    assert paths == expected
    assert len({path for path, _ in paths}) == LAYERS


def test_dynamo_makes_regions_of_them() -> None:
    seen: list[Any] = []

    def keep(module: Any, inputs: Any) -> Any:
        seen.extend(node for node in module.graph.nodes if is_region(node))
        return module.forward

    torch._dynamo.reset()
    model = Model(Marked).eval()
    outputs(model, torch.compile(model, backend=keep, fullgraph=True), static=False, steps=1)
    assert len(seen) >= LAYERS - 1, "this test tries nothing: no region was called"
