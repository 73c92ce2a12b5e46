"""Counters of positions that the model advances itself, in place, between its writes, its mask and its attention, as torchtune does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_models import Buffered, inputs, visible
from torch import nn

import kvcompile
from kvcompile.passes.rewrite import positions
from kvcompile.runtime.handle.tensor import CompressedCache


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


class Counting(Buffered):
    """``when``: the counter is advanced ahead of the writes, behind them, behind the mask as well, or at the end."""

    def __init__(self, when: str, **sizes: int) -> None:
        super().__init__(**{"dim": 32, **sizes})
        self.when = when
        self.register_buffer("counter", torch.arange(self.capacity), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        count, pos = x.shape[1], self.counter[: x.shape[1]]
        if self.when == "ahead":
            self.counter.add_(count)
            pos = pos - count
        self.k_cache[:, :, pos] = k
        self.v_cache[:, :, pos] = v
        if self.when in {"ahead", "end", "behind the mask"}:
            mask = visible(pos, self.capacity)
        if self.when in {"behind the writes", "behind the mask"}:
            self.counter.add_(count)
        if self.when == "behind the writes":
            mask = visible(self.counter[:count] - count, self.capacity)
        y = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=mask)
        if self.when == "end":
            self.counter.add_(count)
        return self.close(y)

    def reset(self) -> None:
        """Begin again, as torchtune's caches do."""
        self.k_cache.zero_()
        self.v_cache.zero_()
        self.counter -= self.counter[0].item()


def drive(module: nn.Module, call: Any, chunks: list[torch.Tensor]) -> torch.Tensor:
    """A request: the last token's result of every chunk."""
    module.reset()
    with torch.no_grad():
        return torch.stack([call(x)[:, -1] for x in chunks])


WHEN = ["ahead", "behind the writes", "behind the mask", "end"]


@pytest.mark.parametrize(("when", "inner"), [*((when, "eager") for when in WHEN), ("behind the mask", "inductor")])
def test_a_window_holds_the_newest_tokens(when: str, inner: str) -> None:
    """All tokens are in kivi's window, so nothing is lost; an attention that took the advanced counter read codes that nobody wrote."""
    module = Counting(when).eval()
    plain, chunks = copy.deepcopy(module), inputs(module, (20, 1, 1, 3))
    backend = kvcompile.backend("kivi", inner=inner, strict=True)
    call = torch.compile(module, backend=backend, fullgraph=True)
    for _ in range(2):
        assert (drive(module, call, chunks) - drive(plain, plain, chunks)).abs().max() <= 2e-6
        assert isinstance(module.k_cache, CompressedCache) and module.k_cache._length == 25
    assert not any(graph.unvalidated for graph in backend.graphs)


def test_what_is_read_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewrite that takes positions as they are, a view of the counter, is refused: ``check_reads`` finds the write to the counter."""
    monkeypatch.setattr(positions.NewPositions, "_emit", lambda self, emit, slot: positions.indexed(emit, slot.slot.write.position))
    module = Counting("behind the mask").eval()
    plain, chunks = copy.deepcopy(module), inputs(module, (20, 1, 1, 3))
    backend = kvcompile.backend("kivi", inner="eager")
    assert (drive(module, torch.compile(module, backend=backend, fullgraph=True), chunks) - drive(plain, plain, chunks)).abs().max() <= 2e-6
    report = backend.report()
    assert report.sites == 0 and all("that nothing changes before" in item.reason for item in report.refusals)
