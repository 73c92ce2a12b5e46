"""Attentions that are nearly, but not quite, what one expects: the same cache read twice, in another order, too early, too wide."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from e2e_models import Attention, buffers, by_position, inputs, visible
from torch.nn import functional as F

import kvcompile

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Body = Callable[["Odd", torch.Tensor, torch.Tensor], torch.Tensor]


class Odd(Attention):
    """A buffer cache whose forward is a function."""

    def __init__(self, body: Body, kv: int = 4) -> None:
        super().__init__(kv=kv)
        buffers(self, self.batch, self.kv, self.capacity, self.dim)
        self.body = body
        self.register_buffer("index", torch.zeros(self.batch, self.capacity, self.dim))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return self.body(self, x, pos)

    def written(self, x: torch.Tensor, pos: torch.Tensor) -> Triple:
        """Queries, and the caches with the new tokens in them."""
        q, k, v = self.heads_first(x)
        return q, self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)


def attend(m: Odd, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return m.close(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).to(m.o.weight.dtype))


def by_head(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    q, k, v = m.written(x, pos)
    mask = visible(pos, m.capacity)
    one = [F.scaled_dot_product_attention(q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1], attn_mask=mask) for h in range(m.heads)]
    return m.close(torch.cat(one, 1))


def two_masks(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    q, k, v = m.written(x, pos)
    mask = visible(pos, m.capacity)
    return attend(m, q, k, v, mask) - attend(m, q, k, v, mask & (torch.arange(m.capacity) > pos[:, None] - 3))


def roles_swapped(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    q, k, v = m.written(x, pos)
    return attend(m, q, v, k, visible(pos, m.capacity))


def no_mask(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """The zeros that were never written are attended to as well."""
    return attend(m, *m.written(x, pos), None)


def prefix(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return attend(m, *m.written(x, pos), visible(pos, m.capacity) | (torch.arange(m.capacity) < 4))


def blocks(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    t = torch.arange(m.capacity)
    return attend(m, *m.written(x, pos), (t // 4 == pos[:, None] // 4) & (t <= pos[:, None]))


def relative_bias(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    bias = -(pos[:, None] - torch.arange(m.capacity)).abs().float() * 0.1
    return attend(m, *m.written(x, pos), bias.masked_fill(~visible(pos, m.capacity), float("-inf")))


def nothing_to_see(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """The first queries see no token at all."""
    return attend(m, *m.written(x, pos), visible(pos, m.capacity) & (torch.arange(m.capacity) > 2))


def integer_mask(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return attend(m, *m.written(x, pos), ((visible(pos, m.capacity).int() & 1) - 1).float() * 1e9)


def mask_changed_in_place(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """What is written into a mask in place counts: the first token is seen with a bias."""
    bias = torch.where(visible(pos, m.capacity), 0.0, float("-inf"))
    bias[:, 0] = 0.5
    return attend(m, *m.written(x, pos), bias)


def attention_of_an_attention(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    q, k, v = m.written(x, pos)
    mask = visible(pos, m.capacity)
    return attend(m, F.scaled_dot_product_attention(q, k, v, attn_mask=mask), k, v, mask)


def scores_in_place(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    q, k, v = m.written(x, pos)
    scores = q @ k.mT
    scores *= m.dim**-0.5
    scores.masked_fill_(~visible(pos, m.capacity), float("-inf"))
    return m.close(scores.softmax(-1) @ v)


def other_precision(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """The attention is computed in double precision over a cache in single precision."""
    q, k, v = m.written(x, pos)
    return attend(m, q.double(), k.double(), v.double(), visible(pos, m.capacity))


def one_cache(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    q, k, _ = m.heads_first(x)
    k = m.k_cache.index_copy_(2, pos, k)
    return attend(m, q, k, k, visible(pos, m.capacity))


def read_before_it_is_written(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    q, k, v = m.heads_first(x)
    y = attend(m, q, m.k_cache, m.v_cache, visible(pos, m.capacity))
    m.k_cache[:, :, pos], m.v_cache[:, :, pos] = k, v
    return y


def read_early_and_late(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return read_before_it_is_written(m, x, pos) + attend(m, m.heads_first(x)[0], m.k_cache, m.v_cache, visible(pos, m.capacity))


def written_twice(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    q, k, v = m.written(x, pos)
    m.k_cache[:, :, pos] = m.heads_first(x)[1] * 2
    return attend(m, q, k, v, visible(pos, m.capacity))


def half_the_channels(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    q, k, v = m.written(x, pos)
    d = m.dim // 2
    y = F.scaled_dot_product_attention(q[..., :d], k[..., :d], v[..., :d], attn_mask=visible(pos, m.capacity))
    return m.close(torch.cat([y, q[..., d:]], -1))


def heads_flipped(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    q, k, v = m.written(x, pos)
    return attend(m, q, k.flip(1), v.flip(1), visible(pos, m.capacity))


def heads_tiled(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Query head h reads kv head h % K."""
    q, k, v = m.written(x, pos)
    return attend(m, q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), visible(pos, m.capacity))


def heads_tiled_with_a_bias(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """As before, spelled out, with another slope for each query head."""
    q, k, v = m.written(x, pos)
    scores = q @ k.repeat(1, 2, 1, 1).transpose(2, 3) * 0.25
    slopes = torch.arange(1, m.heads + 1)[:, None, None] * 0.1
    scores = scores - slopes * (pos[:, None] - torch.arange(m.capacity)).abs()
    return m.close(scores.masked_fill(~visible(pos, m.capacity), float("-inf")).softmax(-1) @ v.repeat(1, 2, 1, 1))


def heads_tiled_and_blocked(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Keys go round, values come in blocks: no query head has one kv head."""
    q, k, v = m.written(x, pos)
    return attend(m, q, k.repeat(1, 2, 1, 1), v.repeat_interleave(2, 1), visible(pos, m.capacity))


def ranked(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """An index of keys beside the cache picks the tokens to attend to: a product with a cache that is no attention."""
    q, k, v = m.written(x, pos)
    m.index.index_copy_(1, pos, x[..., : m.dim])
    scores = torch.relu(x[..., : m.dim] @ m.index.transpose(1, 2)).masked_fill(~visible(pos, m.capacity), -1.0)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(12, -1).indices, True)
    return attend(m, q, k, v, (chosen & visible(pos, m.capacity))[:, None])


def hidden_by_subtraction(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """``(1 - mask) * 1e9`` taken from the scores."""
    q, k, v = m.written(x, pos)
    scores = q @ k.transpose(2, 3) * 0.25 - (1.0 - visible(pos, m.capacity).float()) * 1e9
    return m.close(scores.softmax(-1) @ v)


def scaled_after_the_mask(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Bias and mask are part of what is scaled."""
    q, k, v = m.written(x, pos)
    bias = -(pos[:, None] - torch.arange(m.capacity)).abs().float()
    scores = (q @ k.transpose(2, 3) + bias).masked_fill(~visible(pos, m.capacity), float("-inf"))
    return m.close((scores / 4.0).softmax(-1) @ v)


def normed_on_read(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    q, k, v = m.written(x, pos)
    return attend(m, q, F.normalize(k, dim=-1), v, visible(pos, m.capacity))


def cleared_inside(m: Odd, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    m.k_cache.zero_()
    return attend(m, *m.written(x, pos), visible(pos, m.capacity))


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


def run(body: Body, kv: int, scheme: str) -> tuple[float, kvcompile.Report]:
    torch.manual_seed(0)
    module = Odd(body, kv).eval()
    plain, backend = copy.deepcopy(module), kvcompile.backend(scheme, inner="eager")
    given = inputs(module, (7, 1, 1, 4, 1))
    with torch.no_grad():
        expected = by_position(plain, plain, given)
        found = by_position(module, torch.compile(module, backend=backend, fullgraph=True), given)
    return max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)), backend.report()


@pytest.mark.parametrize("body", [
    by_head, two_masks, roles_swapped, no_mask, prefix, blocks, relative_bias, nothing_to_see, integer_mask, ranked,
    hidden_by_subtraction, scaled_after_the_mask,
    mask_changed_in_place, attention_of_an_attention, scores_in_place, other_precision, one_cache, read_before_it_is_written,
], ids=lambda body: body.__name__)
def test_odd_but_rewritten(body: Body) -> None:
    error, report = run(body, 4, "dense")
    assert error <= 2e-6
    assert report.sites and not report.refusals


@pytest.mark.parametrize("body", [heads_tiled, heads_tiled_with_a_bias], ids=lambda body: body.__name__)
def test_query_heads_that_go_round_the_kv_heads(body: Body) -> None:
    error, report = run(body, 2, "dense")
    assert error <= 2e-6
    assert report.sites and not report.refusals


@pytest.mark.parametrize(("body", "reason", "kv"), [
    (read_early_and_late, "before its new tokens are written and another one after", 4), (written_twice, "2 times", 4),
    (half_the_channels, "entries are read by attention", 4), (heads_flipped, "made from the cache", 4),
    (heads_tiled_and_blocked, "in different orders", 2),
    (normed_on_read, "made from the cache", 4), (cleared_inside, "zero_", 4),
], ids=lambda item: getattr(item, "__name__", ""))
def test_odd_and_refused(body: Body, reason: str, kv: int) -> None:
    error, report = run(body, kv, "int8")
    assert error == 0.0
    assert report.sites == 0
    assert any(reason in item.reason for item in report.refusals), [str(item) for item in report.refusals]
