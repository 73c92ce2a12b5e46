"""What must not be rewritten, each test named for the reason: the site stays as it was, is listed, and is still right."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_models import Attention, buffers, by_position, inputs, visible
from torch.fx.experimental.proxy_tensor import make_fx

import kvcompile
from kvcompile.errors import SiteRefused
from kvcompile.passes.graph.effects import analyse
from kvcompile.passes.match import unmatched

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

Forward = Callable[["Cached", torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Cached(Attention):
    """A buffer cache whose use is the test's own function of (self, q, k, v, pos), all [B, H, S, D]."""

    def __init__(self, use: Forward, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.kv, self.capacity, self.dim)
        self.use = use

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = (item.transpose(1, 2) for item in self.project(x))
        return self.use(self, q, k, v, pos)

    def write(self, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> None:
        """The plain write."""
        self.k_cache.index_copy_(2, pos, k)
        self.v_cache.index_copy_(2, pos, v)

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        """The plain attention."""
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, keys.shape[2])))


def steps(module: Cached, call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """A prefill and two decode steps."""
    with torch.no_grad():
        return by_position(module, call, inputs(module, (7, 1, 1)))


def refused(use: Forward, reason: str, caplog: pytest.LogCaptureFixture, **sizes: int) -> None:
    """``use`` is refused for ``reason``, each warned about once, right as it was, and raised under ``strict``."""
    torch.manual_seed(0)
    module = Cached(use, **sizes).eval()
    wanted = steps(module, module)
    module.k_cache.zero_(), module.v_cache.zero_()
    owner = kvcompile.backend("int8", inner="eager")
    with caplog.at_level(logging.WARNING, logger="kvcompile"):
        found = steps(module, torch.compile(module, backend=owner, fullgraph=True))
    report = owner.report()
    assert report.sites == 0 and report.refusals, "nothing was refused"
    for refusal in report.refusals:
        assert reason in refusal.reason, refusal.reason
        assert "test_refusals.py:" in refusal.line, refusal.line
        assert refusal.evidence
    assert sum(reason in record.getMessage() for record in caplog.records) == len(set(map(str, report.refusals)))
    assert type(module.k_cache) is torch.Tensor, "the cache was taken over"
    torch.testing.assert_close(found, wanted)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="strict=True") as caught:
        steps(module, torch.compile(module, backend=kvcompile.backend("int8", inner="eager", strict=True), fullgraph=True))
    assert isinstance(caught.value, SiteRefused) or SiteRefused.__name__ in repr(caught.value)


def test_other_reader(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        return m.attend(q, m.k_cache, m.v_cache, pos) + m.v_cache.mean()

    refused(use, "the cache is also read by mean", caplog)


def test_view_of_the_cache_is_returned(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[torch.Tensor] = []

    class Returning(Cached):
        def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
            y = super().forward(x, pos)
            return y, self.v_cache[:, :, -1]  # type: ignore[return-value]

    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        return m.attend(q, m.k_cache, m.v_cache, pos)

    module = Returning(use).eval()
    owner = kvcompile.backend("int8", inner="eager")
    compiled = torch.compile(module, backend=owner, fullgraph=True)
    with torch.no_grad():
        seen.append(compiled(inputs(module, (3,))[0], torch.arange(3))[1])
    assert owner.report().sites == 0
    assert ["a view of the cache is returned to the caller"] == [item.reason for item in owner.report().refusals]
    assert seen[0].shape == (2, 4, 16) and type(module.v_cache) is torch.Tensor


def test_write_between_two_reads(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        y = m.attend(q, m.k_cache, m.v_cache, pos)
        m.write(k, v, pos)
        return y + m.attend(q, m.k_cache, m.v_cache, pos)

    refused(use, "one attention reads the cache before its new tokens are written and another one after", caplog)


def test_copy_made_before_the_write(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        keys = m.k_cache.clone()
        m.write(k, v, pos)
        return m.attend(q, keys, m.v_cache, pos)

    refused(use, "a copy of the cache made before the write", caplog)


def test_two_writes(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        m.k_cache.index_copy_(2, pos, k * 2)
        return m.attend(q, m.k_cache, m.v_cache, pos)

    refused(use, "the cache is written 2 times before it is read", caplog)


def test_accumulating_write(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        torch.ops.aten.index_put_(m.k_cache, [None, None, pos], k, True)
        m.v_cache.index_copy_(2, pos, v)
        return m.attend(q, m.k_cache, m.v_cache, pos)

    refused(use, "the write accumulates into the cache", caplog)


def test_cache_scaled_in_place(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        m.v_cache.mul_(0.5)
        return m.attend(q, m.k_cache, m.v_cache, pos)

    refused(use, "the cache is written by mul_", caplog)


def test_cache_rolled_the_other_way(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        first = pos.new_zeros(1)
        m.k_cache.copy_(m.k_cache.roll(1, 2).index_copy_(2, first, k[:, :, -1:]))
        m.v_cache.copy_(m.v_cache.roll(1, 2).index_copy_(2, first, v[:, :, -1:]))
        return m.close(F.scaled_dot_product_attention(q, m.k_cache, m.v_cache))

    refused(use, "token ranges", caplog)


def test_wrong_fill_value(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        scores = (q @ m.k_cache.mT / math.sqrt(m.dim)).masked_fill(~visible(pos, m.capacity), -5.0)
        return m.close(scores.softmax(-1) @ m.v_cache)

    refused(use, "filled with a value that does not exclude them", caplog)


def test_partial_channels(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        return m.attend(q[..., : m.dim // 2], m.k_cache[..., : m.dim // 2], m.v_cache, pos)

    refused(use, "entries are read by attention", caplog)


def test_heads_out_of_order(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        # Query head 1 reads kv head 2, and the other way round.
        turned = [item.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2) for item in (m.k_cache, m.v_cache)]
        return m.attend(q, *turned, pos)

    refused(use, "no plain view of the whole cache", caplog)


def test_tokens_not_from_the_first(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        mask = visible(pos, m.capacity)[:, 2:] | (pos < 2)[:, None]
        return m.close(F.scaled_dot_product_attention(q, m.k_cache[:, :, 2:], m.v_cache[:, :, 2:], attn_mask=mask))

    refused(use, "no plain view of the whole cache", caplog)


def test_learned_tokens_behind_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        learned = m.o.weight[: m.dim, : m.dim].unsqueeze(0).expand(m.batch, m.kv, m.dim, m.dim)
        mask = torch.cat([visible(pos, m.capacity), torch.ones(len(pos), m.dim, dtype=torch.bool)], -1)
        keys, values = (torch.cat([cache, learned], 2) for cache in (m.k_cache, m.v_cache))
        return m.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))

    refused(use, "joined to tokens that are the same in all rows (learned memory keys", caplog)


def test_weights_are_read_by_more_than_the_values(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        scores = (q @ m.k_cache.mT / math.sqrt(m.dim)).masked_fill(~visible(pos, m.capacity), float("-inf"))
        weights = scores.softmax(-1)
        return m.close(weights @ m.v_cache) + weights.max()

    refused(use, "the attention weights are read by more than", caplog)


def test_weights_are_changed_before_the_values(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        scores = (q @ m.k_cache.mT / math.sqrt(m.dim)).masked_fill(~visible(pos, m.capacity), float("-inf"))
        return m.close(scores.softmax(-1).square() @ m.v_cache)

    refused(use, "the attention weights pass through square", caplog)


def test_read_only_cache(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.v_cache.index_copy_(2, pos, v)
        return m.attend(q, m.k_cache, m.v_cache, pos) + 0 * k.sum()

    refused(use, "read but not written in this graph", caplog)


def test_half_a_policy(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        return m.attend(q, m.k_cache, m.v_cache, pos)

    module = Cached(use).eval()
    owner = kvcompile.backend({"no.such.module": "int8"}, inner="eager")
    steps(module, torch.compile(module, backend=owner))
    assert owner.report().sites == 0
    assert all("no entry of the per-layer policy matches" in item.reason for item in owner.report().refusals)


def test_head_dim_that_the_scheme_cannot_hold(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        return m.attend(q, m.k_cache, m.v_cache, pos)

    module = Cached(use, dim=16).eval()
    owner = kvcompile.backend("int4(group=64)", inner="eager")
    steps(module, torch.compile(module, backend=owner))
    assert owner.report().sites == 0
    assert all("found head dim 16 and group 64" in item.reason for item in owner.report().refusals)


def test_a_graph_break_inside_the_attention(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Cached):
        def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
            q, k, v = (item.transpose(1, 2) for item in self.project(x))
            self.write(k, v, pos)
            scores = q @ self.k_cache.transpose(2, 3) * 0.25
            torch._dynamo.graph_break()
            return self.close(scores.masked_fill(~visible(pos, self.capacity), float("-inf")).softmax(-1) @ self.v_cache)

    torch.manual_seed(0)
    module = Broken(lambda *given: given[1]).eval()
    wanted = steps(module, module)
    module.k_cache.zero_(), module.v_cache.zero_()
    owner = kvcompile.backend("int8", inner="eager")
    found = steps(module, torch.compile(module, backend=owner))
    torch.testing.assert_close(found, wanted)
    assert owner.report().sites == 0
    assert any("a graph break splits the attention" in item.reason for item in owner.report().refusals)
    assert type(module.k_cache) is torch.Tensor, "the cache was taken over"


def masked_scores(m: Cached, q: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return (q @ m.k_cache.mT / math.sqrt(m.dim)).masked_fill(~visible(pos, m.capacity), float("-inf"))


def test_queries_change_while_they_attend(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        q = q * 1
        scores = masked_scores(m, q, pos)
        q.zero_()
        return m.close(scores.softmax(-1) @ m.v_cache + q)

    refused(use, "the attention reads queries, changed in place by zero_", caplog)


def test_mask_changes_while_it_masks(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        bias = torch.where(visible(pos, m.capacity), 0.0, float("-inf"))
        scores = q @ m.k_cache.mT + bias
        bias.fill_(0.25)
        return m.close(scores.softmax(-1) @ m.v_cache) + bias.mean()

    refused(use, "the attention reads a mask, changed in place by fill_", caplog)


def test_sinks_change_while_they_attend(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        sinks = torch.arange(4.0)[:, None, None].expand(2, -1, len(pos), -1).clone()
        joined = torch.cat([masked_scores(m, q, pos), sinks], -1)
        sinks.fill_(3.0)
        return m.close(joined.softmax(-1)[..., :-1] @ m.v_cache) + sinks.mean()

    refused(use, "the attention reads sinks, changed in place by fill_", caplog)


def test_fewer_tokens_are_read_than_are_new(caplog: pytest.LogCaptureFixture) -> None:
    """The newest four tokens of a window, of a prompt of seven."""
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        keys, values = (torch.cat([past[:, :, len(pos) :], new], 2) for past, new in ((m.k_cache, k), (m.v_cache, v)))
        m.k_cache.copy_(keys), m.v_cache.copy_(values)
        return m.close(F.scaled_dot_product_attention(q, keys[:, :, -4:], values[:, :, -4:]))

    module = Cached(use).eval()
    owner = kvcompile.backend("int8", inner="eager")
    with torch.no_grad():
        torch.compile(module, backend=owner, fullgraph=True)(inputs(module, (7,))[0], torch.arange(7))
    assert [item.reason for item in owner.report().refusals] == ["attention reads only part of the new tokens"]


def test_written_values_change_after_the_write(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        v = v * 1
        m.write(k, v, pos)
        v.mul_(2)
        return m.attend(q, m.k_cache, m.v_cache, pos) + v.mean()

    refused(use, "the written values are changed in place by mul_", caplog)


def test_positions_change_before_the_write(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        moved = pos.clone()
        moved[:1].copy_(moved[-1:])
        m.write(k, v, moved)
        return m.attend(q, m.k_cache, m.v_cache, pos)

    refused(use, "the write's positions are changed in place by copy_", caplog)


def test_scores_are_read_by_something_else(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        scores = masked_scores(m, q, pos)
        return m.close(scores.softmax(-1) @ m.v_cache) + scores.clamp(min=-5).mean()

    refused(use, "the scores or weights of the attention are also read by clamp", caplog)


def test_part_of_the_scores_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        scores = masked_scores(m, q, pos)
        scores[..., 0] = 0.0
        return m.close(scores.softmax(-1) @ m.v_cache)

    refused(use, "the scores or weights of the attention are also read by select", caplog)


def test_one_row_is_written(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.k_cache[:1, :, pos], m.v_cache[:1, :, pos] = k[:1], v[:1]
        return m.attend(q, m.k_cache, m.v_cache, pos)

    refused(use, "the write covers only part of the cache (dim 0: 1 of 2, from 0)", caplog)


def test_some_heads_are_written(caplog: pytest.LogCaptureFixture) -> None:
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.k_cache[:, 2:, pos], m.v_cache[:, 2:, pos] = k[:, 2:], v[:, 2:]
        return m.attend(q, m.k_cache, m.v_cache, pos)

    refused(use, "the write covers only part of the cache (dim 1: 2 of 4, from 2)", caplog)


def test_a_view_of_the_cache_is_held_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    """A view that the caller made before would keep the old memory alive and never see another token."""
    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        return m.attend(q, m.k_cache, m.v_cache, pos)

    module = Cached(use).eval()
    owner = kvcompile.backend("int8", inner="eager")
    held = module.k_cache.view(-1)
    steps(module, torch.compile(module, backend=owner))
    assert all("no tensor owns the cache's memory alone" in item.reason for item in owner.report().refusals)
    assert type(module.k_cache) is torch.Tensor and held.abs().sum() > 0


def test_rows_packed_one_behind_another(caplog: pytest.LogCaptureFixture) -> None:
    """Read by an operator that only CUDA has: a reference stands in for it."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, *_: Any, **__: Any) -> Any:
        rows = []
        for at in range(len(starts) - 1):
            some = q[starts[at] : starts[at + 1]], *(item[ends[at] : ends[at + 1]] for item in (k, v))
            queries, keys, values = (item.transpose(0, 1) for item in some)
            shift = keys.shape[1] - queries.shape[1]
            seen = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool).tril(shift)
            rows.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen).transpose(0, 1))
        return torch.cat(rows), q.new_empty(q.shape[1], q.shape[0]), torch.empty((2,), dtype=torch.uint64)

    def use(m: Cached, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        m.write(k, v, pos)
        rows, tokens = torch.arange(m.batch + 1, dtype=torch.int32), len(pos)
        packed = (item.transpose(1, 2).flatten(0, 1) for item in (q, m.k_cache, m.v_cache))
        y = varlen.varlen_attn(*packed, rows * tokens, rows * m.capacity, tokens, m.capacity)
        return m.close(y.unflatten(0, (m.batch, tokens)).transpose(1, 2))

    with torch.library._scoped_library("torch_attn", "FRAGMENT") as library:
        library.impl("_varlen_attn", reference, "CPU")
        refused(use, "the cache is read by varlen_attn (torch.nn.attention.varlen)", caplog)


def test_the_search_for_a_cache_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value computed from a cache in more steps than that is nobody's cache."""
    def steps_from(cache: torch.Tensor, pos: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return cache.index_copy_(2, pos, new).exp().neg().sin()

    graph = make_fx(steps_from, tracing_mode="fake")(torch.zeros(1, 2, 5, 4), torch.arange(3), torch.zeros(1, 2, 3, 4)).graph
    effects, made = analyse(graph), next(iter(graph.find_nodes(op="output"))).args[0]
    cache = next(node for node in graph.nodes if "index_copy" in node.name)
    for limit, found in ((3, None), (4, cache)):
        monkeypatch.setattr(unmatched, "LIMIT", limit)
        assert unmatched.cache_behind(made, effects) is found
