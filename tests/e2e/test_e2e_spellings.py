"""Attention in every spelling that we could think of over one plain cache: products, groupings, softmaxes, masks; each right to rounding.

The first chunk has as many tokens as there are heads, so that sizes alone do not tell the dims apart.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from e2e_models import Attention, buffers, by_position, inputs, visible
from torch.nn import functional as F

import kvcompile

Body = Callable[["Spelling", torch.Tensor, torch.Tensor], torch.Tensor]
CHUNKS = (4, 1, 1, 5, 1)
INF = float("inf")

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")


class Spelling(Attention):
    """A cache of a given layout, attended to by a function."""

    def __init__(self, body: Body, layout: str, kv: int, batch: int = 2) -> None:
        super().__init__(batch=batch, kv=kv)
        size = {"b": batch, "k": kv, "t": self.capacity, "d": self.dim}
        buffers(self, *[size[letter] for letter in layout])
        self.layout, self.body = layout, body

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return self.body(self, x, pos)

    def written(self, x: torch.Tensor, pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B, S, H, D], and the caches with the new tokens in them."""
        q, k, v = self.project(x)
        order = ["btkd".index(letter) for letter in "btkd" if letter in self.layout]
        turn = ["".join("btkd"[dim] for dim in order).index(letter) for letter in self.layout]
        gone = tuple("btkd".index(letter) for letter in "btkd" if letter not in self.layout)
        for cache, new in ((self.k_cache, k), (self.v_cache, v)):
            cache.index_copy_(self.layout.index("t"), pos, new.squeeze(gone).permute(turn))
        return q, self.k_cache, self.v_cache

    def masked(self, scores: torch.Tensor, pos: torch.Tensor, *around: int) -> torch.Tensor:
        """Scaled and causal scores; ``around``: where the mask [S, T] needs new dims."""
        mask = ~visible(pos, self.capacity)
        for dim in around:
            mask = mask.unsqueeze(dim)
        return (scores * self.dim**-0.5).masked_fill(mask, -INF)


def einsum(first: str, second: str, *around: int, split: bool = False, swap: bool = False) -> Body:
    """Both products as einsums; ``split``: queries as [B, S, K, G, D]; ``swap``: the cache is the left operand."""

    def body(m: Spelling, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = m.written(x, pos)
        q = q.unflatten(2, (m.kv, -1)) if split else q
        probs = m.masked(torch.einsum(first, *((k, q) if swap else (q, k))), pos, *around).softmax(-1)
        return m.o(torch.einsum(second, *((v, probs) if swap else (probs, v))).flatten(2))

    return body


def softmaxed(weights: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Body:
    """matmul, a softmax of some kind over (scores, bool mask), matmul."""

    def body(m: Spelling, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = m.written(x, pos)
        scores = q.transpose(1, 2) @ k.mT * m.dim**-0.5
        return m.close(weights(scores, visible(pos, m.capacity)) @ v)

    return body


def heads_folded_into_tokens(m: Spelling, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """One kv head: all queries of all heads as rows of one product."""
    q, k, v = m.written(x, pos)
    scores = torch.bmm(q.flatten(1, 2), k.mT).view(m.batch, -1, m.heads, m.capacity)
    probs = m.masked(scores, pos, 1).softmax(-1).view(m.batch, -1, m.capacity)
    return m.o(torch.bmm(probs, v).view(m.batch, -1, m.width))


def groups_folded_into_tokens(m: Spelling, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    q, k, v = m.written(x, pos)
    rows = q.transpose(1, 2).reshape(m.batch, m.kv, -1, m.dim)
    scores = m.masked((rows @ k.mT).view(m.batch, m.kv, m.heads // m.kv, -1, m.capacity), pos)
    return m.close((scores.softmax(-1).view(m.batch, m.kv, -1, m.capacity) @ v).view(m.batch, m.heads, -1, m.dim))


def groups_first(m: Spelling, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Query head h = g * K + k."""
    q, k, v = m.written(x, pos)
    scores = q.transpose(1, 2).unflatten(1, (-1, m.kv)) @ k[:, None].mT
    return m.close((m.masked(scores, pos).softmax(-1) @ v[:, None]).flatten(1, 2))


def tiled(m: Spelling, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Query head h reads kv head h % K."""
    q, k, v = m.written(x, pos)
    keys, values = k.repeat(1, m.heads // m.kv, 1, 1), v.repeat(1, m.heads // m.kv, 1, 1)
    return m.close(F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=visible(pos, m.capacity)))


def tiled_with_a_bias_a_head(m: Spelling, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    q, k, v = m.written(x, pos)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    bias = (slopes * torch.arange(m.capacity)).expand(m.batch, -1, -1, -1).masked_fill(~visible(pos, m.capacity), -INF)
    scores = q.transpose(1, 2) @ k.repeat(1, 2, 1, 1).mT + bias
    return m.close(scores.softmax(-1) @ v.repeat(1, 2, 1, 1))


def five_dims(m: Spelling, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    q, k, v = m.written(x, pos)
    q = q.transpose(1, 2).unflatten(1, (m.kv, -1))
    y = F.scaled_dot_product_attention(q, k[:, :, None].expand_as(k[:, :, None].repeat(1, 1, 2, 1, 1)), v[:, :, None].expand(
        -1, -1, m.heads // m.kv, -1, -1), attn_mask=visible(pos, m.capacity))
    return m.close(y.flatten(1, 2))


def without_a_batch(m: Spelling, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    q, k, v = m.written(x, pos)
    probs = m.masked(torch.einsum("shd,htd->hst", q[0], k), pos).softmax(-1)
    return m.o(torch.einsum("hst,htd->shd", probs, v).flatten(1))[None]


def head_by_head(m: Spelling, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Plain matrices, one head after the other."""
    q, k, v = m.written(x, pos)
    bias = torch.where(visible(pos, m.capacity), 0.0, -INF)
    one = [torch.addmm(bias, q[0, :, h], k[h].T, alpha=m.dim**-0.5).softmax(-1).mm(v[h]) for h in range(m.heads)]
    return m.o(torch.cat(one, -1))[None]


def tokens_by_queries(m: Spelling, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Scores as [B, H, T, S], the softmax over the dim before the last."""
    q, k, v = m.written(x, pos)
    scores = (k @ q.permute(0, 2, 3, 1) * m.dim**-0.5).masked_fill(~visible(pos, m.capacity).T, -INF)
    return m.close(scores.softmax(-2).mT @ v)


def bias_ignored(m: Spelling, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Megatron: an uninitialised bias with beta=0."""
    q, k, v = m.written(x, pos)
    rows = q.transpose(1, 2).flatten(0, 1)
    scores = torch.baddbmm(torch.empty(len(rows), rows.shape[1], m.capacity), rows, k.mT, beta=0.0, alpha=m.dim**-0.5)
    y = torch.bmm(scores.masked_fill(~visible(pos, m.capacity), -INF).softmax(-1), v)
    return m.close(y.unflatten(0, (m.batch, m.heads)))


def sinks_first(m: Spelling, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    q, k, v = m.written(x, pos)
    scores = m.masked(q.transpose(1, 2) @ k.mT, pos)
    sinks = torch.linspace(-1, 1, m.heads).view(1, -1, 1, 1).expand(m.batch, -1, scores.shape[2], 1)
    return m.close(torch.cat([sinks, scores], -1).softmax(-1)[..., 1:] @ v)


def mask_of_queries_alone(m: Spelling, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """A mask [S, 1] holds for all tokens, not for the first one."""
    q, k, v = m.written(x, pos)
    scores = m.masked(q.transpose(1, 2) @ k.mT, pos) + (pos % 2 * 0.5)[:, None]
    return m.close(scores.softmax(-1) @ v)


def combined_by_an_einsum(m: Spelling, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Two softmaxes of one product, and a factor a head and query whose dims the second product takes elsewhere."""
    q, k, v = m.written(x, pos)
    factor = torch.tanh(q.mean(-1)).mT[..., None]
    one, other = (m.masked(torch.einsum("bshd,bktd->bkst".replace("k", "h"), q * sign, k), pos).softmax(-1) for sign in (1.0, -0.5))
    return m.o(torch.einsum("bhst,bhtd->bshd", (one / 2 - factor * other).to(v.dtype), v).flatten(2))


def scaled_by_a_gate(m: Spelling, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Weights whose sum is not one: the gate of each query goes behind the product."""
    q, k, v = m.written(x, pos)
    scores = m.masked(q.transpose(1, 2) @ k.mT, pos)
    return m.close((scores.softmax(-1) * torch.sigmoid(q.transpose(1, 2).mean(-1, keepdim=True)) * 2.0) @ v)


def exp_and_max(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = torch.exp(scores.masked_fill(~mask, -INF) - scores.masked_fill(~mask, -INF).amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def exp_less_max(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = scores.masked_fill(~mask, -INF)
    weights = (scores - scores.max(-1, keepdim=True).values).exp()
    return weights / weights.sum(-1).unsqueeze(-1)


def masked_after_exp(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * mask
    return weights / weights.sum(-1, keepdim=True)


def renormalised(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = scores.softmax(-1).masked_fill(~mask, 0.0)
    return weights / weights.sum(-1, keepdim=True)


def logarithms(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(scores.masked_fill(~mask, -INF), -1).exp()


def less_logsumexp(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = scores.masked_fill(~mask, -INF)
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True))


def zeroed_twice(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    hidden = ~mask
    return torch.nan_to_num(scores.masked_fill(hidden, -INF).softmax(-1).masked_fill(hidden, 0.0))


def zeros_where_hidden(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~mask, -1e9).softmax(-1).masked_fill(~mask, 0.0)


def zeros_by_an_equal_mask(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The two masks are two values of the graph."""
    return scores.masked_fill(torch.logical_not(mask), -INF).softmax(-1) * mask.clone().to(scores.dtype)[None]


def zeros_where_nothing_is_seen(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.any(-1, keepdim=True), scores.masked_fill(~mask, -INF).softmax(-1), 0.0)


def zeros_where_all_is_hidden(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~mask, -INF).softmax(-1).masked_fill((~mask).all(-1)[:, None], 0.0)


def zeros_where_none_is_counted(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~mask, -INF).softmax(-1) * (mask.sum(-1, keepdim=True) > 0)


def zeros_where_scores_are_infinite(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As torch.export decomposes SDPA."""
    scores = scores + torch.where(mask, 0.0, -INF)
    weights = scores.softmax(-1)
    return torch.where(~(~(scores == -INF)).any(-1, True), torch.zeros_like(weights), weights).expand(weights.shape)


def zeros_where_the_largest_is_infinite(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = scores.masked_fill(~mask, -INF)
    return scores.softmax(-1).masked_fill(scores.amax(-1, keepdim=True) == -INF, 0.0)


def zeros_where_weights_are_nan(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = scores.masked_fill(~mask, -INF).softmax(-1)
    return weights.masked_fill(weights.isnan(), 0.0)


def zeros_for_some_queries(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Queries that see tokens, and give nothing all the same."""
    return scores.masked_fill(~mask, -INF).softmax(-1) * (torch.arange(scores.shape[-2]) != 1)[:, None]


def small_epsilon(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = scores.masked_fill(~mask, -1e9)
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * mask
    return weights / (weights.sum(-1, keepdim=True) + 1e-9)


def sum_with_a_floor(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = scores.masked_fill(~mask, -1e9).softmax(-1) * mask
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)


def epsilon_beside_any_sum(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = scores.exp() * mask
    return weights / (weights.sum(-1, keepdim=True) + 1e-9)


def large_epsilon(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = scores.masked_fill(~mask, -1e9)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / (weights.sum(-1, keepdim=True) + 1e-5)


def epsilon_and_a_maximum_of_all(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The largest score may be a hidden one: the sum of the others is then as small as it likes."""
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * mask
    return weights / (weights.sum(-1, keepdim=True) + 1e-9)


def zeros_by_another_mask(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~mask, -INF).softmax(-1) * (mask & (torch.arange(mask.shape[-1]) % 2 == 0))


def zeros_where_something_is_hidden(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Any for all."""
    scores = scores.masked_fill(~mask, -INF)
    return torch.where((scores == -INF).any(-1, True) & (torch.arange(scores.shape[-1]) < 3), 0.0, scores.softmax(-1))


def plus_one(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = scores.masked_fill(~mask, -INF).exp()
    return weights / (1 + weights.sum(-1, keepdim=True))


def sum_of_something_else(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~mask, -INF).exp() / scores.exp().sum(-1, keepdim=True)


def sigmoid(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(scores) * mask


def no_sum_at_all(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~mask, -INF).softmax(-1) * math.sqrt(2) * mask


REWRITTEN: dict[str, tuple[Body, str, int, int]] = {
    "scores-b-s-h-t": (einsum("bshd,bktd->bsht".replace("k", "h"), "bsht,bhtd->bshd", 1), "bktd", 4, 2),
    "one-head-b-s-h-t": (einsum("bshd,btd->bsht", "bsht,btd->bshd", 1), "btd", 1, 2),
    "one-head-b-h-s-t": (einsum("bshd,btd->bhst", "bhst,btd->bshd"), "btd", 1, 2),
    "letters": (einsum("bthc,bshc->bhts", "bhts,bshc->bthc"), "btkd", 4, 2),
    "heads-first": (einsum("bqnd,nbkd->bnqk", "bnqk,nbkd->bqnd"), "kbtd", 4, 2),
    "tokens-first": (einsum("bshd,tbhd->bhst", "bhst,tbhd->bshd"), "tbkd", 4, 2),
    "ellipsis": (einsum("...qhd,...khd->...hqk", "...hqk,...khd->...qhd"), "btkd", 4, 2),
    "groups-last": (einsum("bskgd,btkd->bskgt", "bskgt,btkd->bskgd", 1, 2, split=True), "btkd", 2, 2),
    "groups-outside": (einsum("bsgkd,btkd->bgkst", "bgkst,btkd->bsgkd", split=True), "btkd", 2, 2),
    "cache-on-the-left": (einsum("bthd,bshd->bhst", "bthd,bhst->bshd", swap=True), "btkd", 4, 2),
    "heads-folded-into-tokens": (heads_folded_into_tokens, "btd", 1, 2),
    "groups-folded-into-tokens": (groups_folded_into_tokens, "bktd", 2, 2),
    "groups-first": (groups_first, "bktd", 2, 2),
    "tiled": (tiled, "bktd", 2, 2),
    "tiled-bias": (tiled_with_a_bias_a_head, "bktd", 2, 2),
    "five-dims": (five_dims, "bktd", 2, 2),
    "no-batch": (without_a_batch, "ktd", 4, 1),
    "head-by-head": (head_by_head, "ktd", 4, 1),
    "tokens-by-queries": (tokens_by_queries, "bktd", 4, 2),
    "sinks-first": (sinks_first, "bktd", 4, 2),
    "mask-of-queries-alone": (mask_of_queries_alone, "bktd", 4, 2),
    "combined-by-an-einsum": (combined_by_an_einsum, "bktd", 4, 2),
    "scaled-by-a-gate": (scaled_by_a_gate, "bktd", 4, 2),
    **{item.__name__.replace("_", "-"): (softmaxed(item), "bktd", 4, 2) for item in (
        exp_less_max, masked_after_exp, renormalised, logarithms, less_logsumexp, zeroed_twice, zeros_where_hidden,
        zeros_by_an_equal_mask, zeros_where_nothing_is_seen, zeros_where_all_is_hidden, zeros_where_none_is_counted,
        zeros_where_scores_are_infinite, zeros_where_the_largest_is_infinite, zeros_where_weights_are_nan, zeros_for_some_queries,
        small_epsilon, sum_with_a_floor,
    )},
}
REFUSED: dict[str, tuple[Body, str]] = {
    "plus-one": (softmaxed(plus_one), "divided by something other than their sum"),
    "sum-of-something-else": (softmaxed(sum_of_something_else), "divided by the sum of something else"),
    "max-of-something-else": (softmaxed(exp_and_max), "something other than their maximum or a mask"),
    "sigmoid": (softmaxed(sigmoid), "no softmax or scaled_dot_product_attention"),
    "epsilon-beside-any-sum": (softmaxed(epsilon_beside_any_sum), "other than their sum, which 1e-09 may change"),
    "large-epsilon": (softmaxed(large_epsilon), "other than their sum, which 1e-05 may change"),
    "epsilon-and-a-maximum-of-all": (softmaxed(epsilon_and_a_maximum_of_all), "that the mask before it leaves visible"),
    "zeros-by-another-mask": (softmaxed(zeros_by_another_mask), "that the mask before it leaves visible"),
    "zeros-where-something-is-hidden": (softmaxed(zeros_where_something_is_hidden), "that the mask before it leaves visible"),
    "not-normalised": (softmaxed(no_sum_at_all), "the attention weights pass through mul"),
}


def run(body: Body, layout: str, kv: int, batch: int, scheme: str) -> tuple[float, kvcompile.Report]:
    torch.manual_seed(0)
    module = Spelling(body, layout, kv, batch).eval()
    plain, backend = copy.deepcopy(module), kvcompile.backend(scheme, inner="eager")
    given = inputs(module, CHUNKS)
    with torch.no_grad():
        expected = by_position(plain, plain, given)
        found = by_position(module, torch.compile(module, backend=backend, fullgraph=True), given)
    return max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)), backend.report()


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten(name: str) -> None:
    error, report = run(*REWRITTEN[name], scheme="dense")
    assert report.sites and not report.refusals, [str(item) for item in report.refusals]
    assert error <= 2e-6


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, reason = REFUSED[name]
    error, report = run(body, "bktd", 4, 2, "int8")
    assert error == 0.0 and report.sites == 0
    assert all(reason in item.reason and item.advice and item.line for item in report.refusals), [str(item) for item in report.refusals]
    assert report.refusals
