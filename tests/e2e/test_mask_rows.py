"""Masks and limits with more rows than a call, of which the model reads the first by index: nothing says that the numbers are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_models import llama
from torch import nn

import kvcompile


class Rows(nn.Module):
    """An attention over a static cache; ``shown`` [8, T] and ``last`` [8] have a row for each batch row that might be."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("cache", torch.zeros(2, 8, 2, 32, 16))
        generator = torch.Generator().manual_seed(3)
        self.register_buffer("shown", torch.rand(8, 32, generator=generator) > 0.4)
        self.register_buffer("last", torch.randint(3, 20, (8,), generator=generator))
        self.shown[:, 0] = True

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        b = q.shape[0]
        self.cache[0, :b, :, pos] = k
        self.cache[1, :b, :, pos] = v
        row, place = torch.arange(b), torch.arange(32)
        seen = place[None, :] <= pos[:, None]
        if self.kind == "limit":
            mask = seen & (place[None, None, :] <= self.last[row][:, None, None])
        else:
            mask = seen & self.shown[row[:, None, None], place[None, None, :]]
        if self.kind == "bias":
            scores = torch.zeros(mask.shape).masked_fill(~mask, float("-inf")) + 0.1 * self.shown[row].float()[:, None]
            return F.scaled_dot_product_attention(q, self.cache[0, :b], self.cache[1, :b], scores[:, None])
        return F.scaled_dot_product_attention(q, self.cache[0, :b], self.cache[1, :b], mask[:, None])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["padding", "limit", "bias"])
def test_a_mask_with_more_rows_than_the_call(kind: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    plain, model = Rows(kind), Rows(kind)
    backend = kvcompile.backend("dense", inner="eager")
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    with torch.no_grad():
        for rows, start, count in ((3, 0, 6), (3, 6, 1), (5, 0, 6), (5, 6, 2)):
            torch.manual_seed(rows + start)
            q, k, v = (torch.randn(rows, 2, count, 16) for _ in range(3))
            pos = torch.arange(start, start + count)
            torch.testing.assert_close(compiled(q, k, v, pos), plain(q, k, v, pos), rtol=1e-5, atol=1e-6)
    report = backend.report()
    assert report.sites and not report.refusals


def test_sequences_after_a_single_one_are_rewritten_too() -> None:
    """Of the second request's mask Dynamo knows only that it has no fewer rows than the batch."""
    torch._dynamo.reset()
    model, backend = llama(layers=1), kvcompile.backend("dense", inner="eager")
    words = torch.randint(0, 60, (1, 9), generator=torch.Generator().manual_seed(0))
    asked: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3}]
    expected = []
    for options in asked:
        torch.manual_seed(1)
        expected.append(model.generate(words, max_new_tokens=6, **options))
    model.forward = torch.compile(model.forward, backend=backend)
    for options, text in zip(asked, expected, strict=True):
        torch.manual_seed(1)
        assert torch.equal(model.generate(words, max_new_tokens=6, **options), text)
    report = backend.report()
    assert report.sites and not report.refusals
