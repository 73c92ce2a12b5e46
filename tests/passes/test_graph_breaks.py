"""Graph breaks in the user's code: a site that is whole inside one partial graph is rewritten, one that is cut is refused for that."""

from __future__ import annotations

import copy

import pytest
import torch
from e2e_models import Attention, buffers, by_position, inputs, visible
from torch.nn import functional as F

import kvcompile

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")


class Broken(Attention):
    """A graph break before the write, between the write and the attention, or behind it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        buffers(self, self.batch, self.kv, self.capacity, self.dim)
        self.where = where

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = (item.transpose(1, 2) for item in self.project(x))
        if self.where == "before":
            torch._dynamo.graph_break()
        self.k_cache.index_copy_(2, pos, k)
        self.v_cache.index_copy_(2, pos, v)
        if self.where == "between":
            torch._dynamo.graph_break()
        y = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=visible(pos, self.capacity))
        if self.where == "behind":
            torch._dynamo.graph_break()
        return self.close(y)


def run(where: str) -> tuple[float, kvcompile.Report]:
    torch.manual_seed(0)
    module = Broken(where).eval()
    plain, backend = copy.deepcopy(module), kvcompile.backend("dense", inner="eager")
    given = inputs(module, (7, 1, 1, 4, 1))
    with torch.no_grad():
        expected = by_position(plain, plain, given)
        found = by_position(module, torch.compile(module, backend=backend), given)
    return max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)), backend.report()


@pytest.mark.parametrize("where", ["before", "behind"])
def test_whole_inside_one_graph(where: str) -> None:
    error, report = run(where)
    assert error <= 2e-6
    assert report.sites and not report.refusals


def test_cut_in_two() -> None:
    error, report = run("between")
    assert error == 0.0 and report.sites == 0
    assert report.refusals
    assert all("read but not written in this graph" in item.reason and "graph break" in item.reason for item in report.refusals)
    assert all("test_graph_breaks.py" in item.line and item.advice for item in report.refusals)


class Asked(torch.nn.Module):
    """What a decoder does around its layers, in a frame that is left to Python while the frames that it calls are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Broken("nowhere")
        self.lengths: list[int] = []

    @torch._dynamo.disable(recursive=False)
    def ask(self) -> None:
        held = self.layer.k_cache.numel()
        self.lengths.append(held + self.layer.k_cache.shape[2])

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        self.ask()
        return self.layer(x, pos)


def test_a_cache_is_asked_outside_of_compiled_frames() -> None:
    torch.manual_seed(0)
    module, backend = Asked().eval(), kvcompile.backend("dense", inner="eager")
    with torch.no_grad():
        by_position(module, torch.compile(module, backend=backend), inputs(module, (7, 1, 1)))
    assert backend.report().sites
    assert module.lengths == [module.layer.capacity * (1 + module.layer.batch * module.layer.kv * module.layer.dim)] * 3


class Stack(torch.nn.Module):
    """More layers than Dynamo compiles one code object for."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Broken("nowhere") for _ in range(layers))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, pos)
        return x


@pytest.mark.parametrize("scheme", ["dense", "kivi(group=16,window=64)"])
def test_layers_compiled_one_by_one(scheme: str) -> None:
    """Dynamo gives a code object up that it compiled too often; its caches are then used by code that is not compiled."""
    torch.manual_seed(0)
    module = Stack(5).eval()
    plain, given = copy.deepcopy(module), inputs(module.layers[0], (7, 1, 1, 4, 1, 2, 1, 3))
    backend = kvcompile.backend(scheme, inner="eager")
    for layer in module.layers:
        layer.compile(backend=backend, dynamic=False)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=4):
        expected, found = by_position(plain, plain, given), by_position(module, module, given)
    assert max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)) <= 2e-5
    held = [type(layer.k_cache) is kvcompile.CompressedCache for layer in module.layers]
    assert backend.report().sites and any(held)
