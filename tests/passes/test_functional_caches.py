"""Caches of exported programs: updated out of place, copied back at the end, and written in place again before anything is matched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_models import Attention, buffers, inputs, visible
from torch import nn

import kvcompile
from kvcompile.passes.graph.shapes import op_name

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

STEPS = (1,) * 6
PADDING = torch.tensor([0, 2])


class Padded(Attention):
    """Grouped SDPA over buffers, whose row 1 has padding that sees nothing."""

    def __init__(self, write: Callable[..., Any], **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.kv, self.capacity, self.dim)
        self.write = write

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = (item.transpose(1, 2) for item in self.project(x))
        self.write(self.k_cache, k, pos), self.write(self.v_cache, v, pos)
        seen = visible(pos, self.capacity) & (torch.arange(self.capacity) >= PADDING[:, None])[:, None]
        return self.close(F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=seen[:, None], enable_gqa=True))


def indexed(cache: torch.Tensor, new: torch.Tensor, pos: torch.Tensor) -> None:
    cache[:, :, pos] = new


def copied(cache: torch.Tensor, new: torch.Tensor, pos: torch.Tensor) -> None:
    cache.index_copy_(2, pos, new)


class Stacked(Padded):
    """Keys and values in one buffer [2, B, K, T, D]: parts of it are updated one after the other."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(copied, **sizes)
        del self.k_cache, self.v_cache
        self.register_buffer("cache", torch.zeros(2, self.batch, self.kv, self.capacity, self.dim))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = (item.transpose(1, 2) for item in self.project(x))
        self.cache[0].index_copy_(2, pos, k), self.cache[1].index_copy_(2, pos, v)
        return self.close(F.scaled_dot_product_attention(q, self.cache[0], self.cache[1], attn_mask=visible(pos, self.capacity)))


class ReadBefore(Padded):
    """What the cache held before is read after it was updated: no write in place gives that."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        before = self.k_cache.clone()
        y = super().forward(x, pos)
        return y + (before * self.k_cache).mean()


def steps(module: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [module(x, torch.tensor([at])).clone() for at, x in enumerate(given)]


def exported(module: nn.Module, example: torch.Tensor) -> nn.Module:
    with torch.no_grad():
        return torch.export.export(copy.deepcopy(module), (example, torch.tensor([0]))).run_decompositions().module()


@pytest.mark.parametrize("scheme", ["dense", "int8"])
@pytest.mark.parametrize("build", [
    pytest.param(lambda: Padded(indexed, kv=2, dim=32), id="index_put"),
    pytest.param(lambda: Padded(copied, kv=2, dim=32), id="index_copy"),
    pytest.param(lambda: Stacked(dim=32), id="one-buffer"),
])
def test_a_decomposed_program_is_rewritten(build: Callable[[], nn.Module], scheme: str) -> None:
    torch.manual_seed(0)
    module = build().eval()
    given = inputs(module, STEPS)
    program = exported(module, given[0])
    wanted = steps(module, given)
    backend = kvcompile.backend(scheme, inner="eager", strict=True)
    found = steps(torch.compile(program, backend=backend, fullgraph=True), given)
    assert backend.report().sites
    writes = [node for node in backend.records[-1].captured.graph.nodes if op_name(node) in {"index_put_", "index_copy_"}]
    assert len(writes) == 2 and all("test_functional_caches.py" in node.meta["stack_trace"] for node in writes), "the model's lines"
    error = max((a - b).abs().max().item() for a, b in zip(wanted, found, strict=True))
    assert error <= (2e-6 if scheme == "dense" else 2e-2)


def test_a_cache_whose_past_is_read_stays_functional() -> None:
    torch.manual_seed(0)
    module = ReadBefore(copied, kv=2).eval()
    given = inputs(module, STEPS)
    program = exported(module, given[0])
    wanted = steps(module, given)
    backend = kvcompile.backend("int8", inner="eager")
    found = steps(torch.compile(program, backend=backend, fullgraph=True), given)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert backend.report().sites == 0 and backend.report().refusals
