"""A user's default device moves nothing that the package makes for itself.

The device is ``meta``: what is made there by mistake has no values, and ends in an error wherever it is read.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import kvcompile

SCHEMES = ("int4", "nf4", "kivi", "squat", "beyond", "int8-static", "fp8-static", "smartkv(budget=0.9)", "int8(sinks=4)")


class Attention(nn.Module):
    """Cached attention [B, S, 64] whose own tensors name their device."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(1, 2, 96, 32))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).view(1, -1, 2, 32).transpose(1, 2) for part in (self.q, self.k, self.v))
        self.k_cache.index_copy_(2, pos, k)
        self.v_cache.index_copy_(2, pos, v)
        scores = q @ self.k_cache.transpose(-1, -2) / math.sqrt(32)
        hidden = torch.arange(96, device=x.device) > pos[:, None]
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ self.v_cache


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_default_device_changes_no_result(scheme: str) -> None:
    torch.manual_seed(0)
    model = Attention().eval().requires_grad_(False)
    x = torch.randn(1, 60, 64)
    places = torch.arange(60)
    found = []
    for device in ("cpu", "meta"):
        torch._dynamo.reset()
        owner = kvcompile.backend(scheme, inner="aot_eager", strict=True)
        call = torch.compile(copy.deepcopy(model), backend=owner)
        with torch.no_grad(), torch.device(device):
            parts = [call(x[:, a:b], places[a:b]) for a, b in ((0, 40), *((at, at + 1) for at in range(40, 60)))]
        assert len(owner.graphs[-1].sites) == 1
        found.append(torch.cat(parts, 2))
    assert torch.equal(*found)
