"""Attention spelled around a softmax: what is read of it, and which spellings are no attention that has a normal form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.match.attention.softmax import recognise
from kvcompile.passes.match.sites import Attention, Miss

ROWS, HEADS, QUERIES, TOKENS, CHANNELS = 2, 3, 4, 6, 8

Spelling = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of q [B, H, S, D], k and v [B, H, T, D], and a bias [S, T]."""


def read(spelling: Spelling) -> Attention:
    """The attention that a spelling is read as."""
    given = [torch.randn(ROWS, HEADS, count, CHANNELS) for count in (QUERIES, TOKENS, TOKENS)]
    graph = make_fx(spelling, tracing_mode="fake", pre_dispatch=True)(*given, torch.randn(QUERIES, TOKENS)).graph
    found = [attention for node in graph.nodes if (attention := recognise(node)) is not None]
    assert len(found) == 1
    return found[0]


def upright(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A softmax over the last dim of the scores."""
    return (q @ k.mT * 0.5 + bias).softmax(-1) @ v


def upside_down(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Scores [.., T, S], whose tokens are not the last dim."""
    return (k @ q.mT * 0.5 + bias.mT).softmax(-2).mT @ v


@pytest.mark.parametrize("spelling", [upright, upside_down], ids=lambda item: item.__name__)
def test_the_softmax_may_be_over_any_dim_of_the_scores(spelling: Spelling) -> None:
    attention = read(spelling)
    assert attention.scale == 0.5 and len(attention.masks) == 1 and not attention.softcap
    for node, roles, last in (
        (attention.q, attention.q_roles, {"S": QUERIES, "D": CHANNELS}), (attention.k, attention.k_roles, {"T": TOKENS, "D": CHANNELS}),
        (attention.v, attention.v_roles, {"T": TOKENS, "D": CHANNELS}),
        (attention.output, attention.out_roles, {"S": QUERIES, "D": CHANNELS}),
        (attention.masks[0].node, attention.masks[0].roles, {"S": QUERIES, "T": TOKENS}),
    ):
        sizes = dict(zip(roles, value_of(node).shape, strict=True))
        assert {role: sizes[role] for role in last} == last


def sinks_beside_the_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A column that is joined to the queries, not to the tokens that the softmax is over."""
    scores = k @ q.mT
    return torch.cat([scores, scores[..., :1] * 0], -1).softmax(-2)[..., :-1].mT @ v


def capped_behind_the_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (5 * torch.tanh((q @ k.mT + bias) / 5)).softmax(-1) @ v


def capped_twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (5 * torch.tanh(4 * torch.tanh(q @ k.mT / 4)) + bias).softmax(-1) @ v


def tanh_of_tanh(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (5 * torch.tanh(torch.tanh(q @ k.mT / 5)) + bias).softmax(-1) @ v


def masked_within_the_cap(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (5 * (torch.tanh(q @ k.mT / 5) + bias)).softmax(-1) @ v


def capped_and_left(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(q @ k.mT / 5) + bias).softmax(-1) @ v


@pytest.mark.parametrize(("spelling", "reason"), [
    (sinks_beside_the_queries, "over no single dim of cached tokens"), (capped_behind_the_mask, "over masked or capped scores"),
    (capped_twice, "over masked or capped scores"), (tanh_of_tanh, "over masked or capped scores"),
    (masked_within_the_cap, "masked between a tanh and its factor"), (capped_and_left, "a tanh that is not scaled back"),
], ids=lambda item: getattr(item, "__name__", ""))
def test_what_has_no_normal_form_is_refused_for_its_reason(spelling: Spelling, reason: str) -> None:
    with pytest.raises(Miss, match=reason):
        read(spelling)
