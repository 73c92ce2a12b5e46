"""Scales that are no numbers of the graph: Python floats that Dynamo made symbols of, and tensors of one element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import kvcompile

BATCH, KV, TOKENS, DIM = 2, 2, 40, 32
Step = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]


def _after_mask(scores: torch.Tensor, seen: torch.Tensor, scale: Any) -> torch.Tensor:
    return scores.masked_fill(~seen, float("-inf")) * scale


STEPS: dict[str, Step] = {
    "times": lambda scores, seen, scale: (scores * scale).masked_fill(~seen, float("-inf")),
    "in place": lambda scores, seen, scale: scores.mul_(scale).masked_fill(~seen, float("-inf")),
    "over": lambda scores, seen, scale: (scores / (1 / scale)).masked_fill(~seen, float("-inf")),
    "then masked": lambda scores, seen, scale: scale * scores + torch.where(seen, 0.0, float("-inf")),
    "after a mask": _after_mask,
    "in half": lambda scores, seen, scale: (scores * scale).to(torch.bfloat16).masked_fill(~seen, float("-inf")),
    "softcap": lambda scores, seen, scale: (torch.tanh(scores * 0.2 / scale) * scale).masked_fill(~seen, float("-inf")),
}


class Spelled(nn.Module):
    """Attention over a static cache of two kv heads; ``step``: from the product to what the softmax is over, or "sdpa", "baddbmm"."""

    def __init__(self, step: str, scale: Any = None, grouped: bool = False) -> None:
        super().__init__()
        self.step, self.scale, self.grouped = step, scale, grouped
        self.register_buffer("k", torch.zeros(BATCH, KV, TOKENS, DIM))
        self.register_buffer("v", torch.zeros(BATCH, KV, TOKENS, DIM))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor, scale: Any = None) -> torch.Tensor:
        scale = self.scale if scale is None else scale
        self.k.index_copy_(2, pos, k)
        self.v.index_copy_(2, pos, v)
        seen = torch.arange(TOKENS) <= pos[:, None]
        keys, values = (item.repeat_interleave(2, 1) if self.grouped else item for item in (self.k, self.v))
        if self.step == "sdpa":
            return F.scaled_dot_product_attention(q, keys, values, seen, scale=scale)
        if self.step == "baddbmm":
            bias = torch.where(seen, 0.0, float("-inf")).expand(BATCH * q.shape[1], -1, -1)
            scores = torch.baddbmm(bias, q.flatten(0, 1), keys.flatten(0, 1).mT, alpha=scale).unflatten(0, (BATCH, -1))
        else:
            scores = STEPS[self.step](q @ keys.mT, seen, scale)
        return torch.softmax(scores, -1) @ values


def _run(
    scales: list[Any], scheme: str, step: str, held: Any = None, grouped: bool = False, inner: str = "eager", dynamic: bool | None = True,
) -> tuple[float, kvcompile.Report]:
    """(the largest error of a prompt and its steps, one for each of ``scales``; the report)."""
    torch.manual_seed(0)
    plain, module = (Spelled(step, held, grouped).eval() for _ in "ab")
    backend = kvcompile.backend(scheme, inner=inner)
    compiled = torch.compile(module, backend=backend, dynamic=dynamic)
    worst, at = 0.0, 0
    with torch.no_grad():
        for scale in scales:
            count = 6 if not at else 1
            q = torch.randn(BATCH, KV * (2 if grouped else 1), count, DIM)
            k, v = torch.randn(2, BATCH, KV, count, DIM)
            operands = (q, k, v, torch.arange(at, at + count), scale)
            worst = max(worst, float((compiled(*operands) - plain(*operands)).abs().max()))
            at += count
    return worst, backend.report()


CHANGING = [0.2, 0.2, 0.3, 0.3, 0.1, 0.25]
"""A float that is a constant at first, and a symbol from the third call on."""


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("scheme", ["dense", "int8", "kivi(bits=4)"])
@pytest.mark.parametrize("step", ["times", "over", "sdpa"])
def test_a_float_that_changes_is_a_factor_of_the_queries(step: str, scheme: str) -> None:
    """Each call has its own scale: a constant of an earlier one would be a wrong number."""
    worst, report = _run(CHANGING, scheme, step, dynamic=None)
    assert report.sites
    assert not report.refusals
    assert worst < (5e-2 if scheme == "int8" else 1e-5)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("step", ["in place", "then masked", "baddbmm", "softcap"])
def test_every_spelling_under_dynamic(step: str) -> None:
    """A module's own float, with grouped queries."""
    worst, report = _run([None] * 3, "dense", step, held=0.2 if step != "softcap" else 3.0, grouped=True)
    assert report.sites
    assert not report.refusals
    assert worst < 1e-5


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("scale", [torch.tensor(0.2), torch.full((1,), 0.2), torch.full((1, 1, 1, 1), 0.2)])
def test_a_tensor_of_one_element_is_a_factor_of_the_queries(scale: torch.Tensor) -> None:
    """A learned temperature, of any rank and either sign."""
    worst, report = _run([scale, scale, scale * 2, -scale / 2], "dense", "times", dynamic=None)
    assert report.sites
    assert not report.refusals
    assert worst < 1e-5


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1, 1)], ids=str)
def test_a_factor_of_a_wider_dtype_leaves_the_queries_theirs(shape: tuple[int, ...]) -> None:
    """A float32 tensor with dims would make float32 of the queries, which the planes of a bfloat16 cache do not meet."""
    torch.manual_seed(0)
    plain, module = (Spelled("in half", torch.full(shape, 0.2)).bfloat16().eval() for _ in "ab")
    backend = kvcompile.backend("dense", inner="eager", strict=True)
    q, k, v = torch.randn(3, BATCH, KV, 6, DIM).bfloat16()
    with torch.no_grad():
        found = torch.compile(module, backend=backend)(q, k, v, torch.arange(6))
        assert (found - plain(q, k, v, torch.arange(6))).abs().max() <= 0.02


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_masks_were_multiplied_with_is_refused() -> None:
    """A negative float would show what was hidden."""
    worst, report = _run([0.2, 0.3, 0.4], "int8", "after a mask")
    assert worst == 0.0
    assert not report.sites
    assert "scaled, after they were masked" in report.refusals[0].reason


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("step", ["times", "sdpa"])
def test_through_inductor(step: str) -> None:
    """Variants that are compiled when a call first needs them ask nobody to begin again."""
    worst, report = _run(CHANGING[:5], "int8", step, inner="inductor", dynamic=None)
    assert report.sites
    assert not report.refusals
    assert worst < 5e-2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("cache", ["StaticCache", "DynamicCache"])
def test_transformers_eager_attention_under_dynamic(cache: str) -> None:
    """Every layer is rewritten, and gives what plain calls give."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, initializer_range=0.15, attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    backend = kvcompile.backend("dense", inner="eager")
    compiled = torch.compile(model, backend=backend, dynamic=True)
    caches = [
        transformers.StaticCache(config=config, max_cache_len=48) if cache == "StaticCache" else transformers.DynamicCache(config=config)
        for _ in "ab"
    ]
    worst = -math.inf
    with torch.no_grad():
        for count in (12, 1, 1, 1):
            ids = torch.randint(0, 64, (1, count))
            expected, found = (run(ids, past_key_values=held).logits for run, held in zip((model, compiled), caches, strict=True))
            worst = max(worst, float((expected - found).abs().max()))
    assert backend.report().sites
    assert not backend.report().refusals
    assert worst < 1e-4
