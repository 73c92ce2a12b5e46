"""What published code does beside the plain idioms: casts of the cache, stacked and fused caches, flex attention, ``vmap`` next door."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_models import CHUNKS, Attention, Buffered, Case, buffers, by_offset, by_position, inputs, returned, visible
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import kvcompile
from kvcompile.passes.capture.retrace import Retrace
from kvcompile.passes.match.sites import Stage


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


class CastInPlace(Attention):
    """Meta's Llama: the cache is cast to the queries' dtype, which it has, and kept; the mask is built with triu and hstack."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"kv": 2, **sizes})
        buffers(self, self.batch, self.capacity, self.kv, self.dim)

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        q, k, v = self.project(x)
        rows, count = x.shape[:2]
        self.k_cache, self.v_cache = self.k_cache.to(q), self.v_cache.to(q)
        self.k_cache[:rows, start : start + count] = k
        self.v_cache[:rows, start : start + count] = v
        keys, values = (
            item[:rows, : start + count].repeat_interleave(self.heads // self.kv, 2).transpose(1, 2)
            for item in (self.k_cache, self.v_cache)
        )
        scores = q.transpose(1, 2) @ keys.transpose(2, 3) / math.sqrt(self.dim)
        if count > 1:
            mask = torch.triu(torch.full((count, count), float("-inf")), diagonal=1)
            scores = scores + torch.hstack([torch.zeros((count, start)), mask]).type_as(x)
        return self.close(F.softmax(scores.float(), dim=-1).type_as(x) @ values)


class Stacked(Attention):
    """Old GPT-2: keys and values grow one by one and are returned stacked."""

    def forward(self, x: torch.Tensor, past: torch.Tensor | None = None) -> Any:
        q, k, v = self.heads_first(x)
        if past is not None:
            past_k, past_v = past.unbind(0)
            k, v = torch.cat([past_k, k], -2), torch.cat([past_v, v], -2)
        total, count = k.shape[-2], x.shape[1]
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.dim)
        mask = torch.ones(count, total, dtype=torch.bool).tril(total - count)
        weights = torch.softmax(torch.where(mask, scores, torch.finfo(scores.dtype).min), -1)
        return self.close(weights @ v), torch.stack((k, v))


class SideBySide(Attention):
    """Keys and values in one concatenated tensor, side by side in the channels."""

    def forward(self, x: torch.Tensor, past: torch.Tensor | None = None) -> Any:
        q, k, v = self.heads_first(x)
        both = torch.cat([k, v], -1)
        if past is not None:
            both = torch.cat([past, both], 2)
        k, v = both.split(self.dim, -1)
        mask = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool).tril(k.shape[2] - x.shape[1])
        return self.close(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)), both


class FusedHeads(Attention):
    """One buffer [B, C, 2 K, D]: the heads of the keys, then those of the values."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"kv": 2, **sizes})
        buffers(self, self.batch, self.capacity, 2 * self.kv, self.dim, names=["cache"])

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        self.cache[:, pos] = torch.cat([k, v], 2)
        k, v = (item.transpose(1, 2) for item in (self.cache[:, :, : self.kv], self.cache[:, :, self.kv :]))
        return self.close(F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=visible(pos, self.capacity), enable_gqa=True))


class Uneven(Attention):
    """One buffer of keys of 16 and values of 8 channels; ``extra``: and 4 channels that no attention reads."""

    extra = 0

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.v, self.o = nn.Linear(self.width, self.kv * 8, bias=False), nn.Linear(self.heads * 8, self.width, bias=False)
        buffers(self, self.batch, self.kv, self.capacity, self.dim + 8 + self.extra, names=["cache"])

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        self.cache[:, :, pos] = torch.cat([k, v, k[..., : self.extra]], -1)
        k, v = self.cache[..., : self.dim], self.cache[..., self.dim : self.dim + 8]
        return self.close(F.scaled_dot_product_attention(q, k, v, attn_mask=visible(pos, self.capacity)))


class PartUnread(Uneven):
    """Some channels are read by no attention."""

    extra = 4


class Shaped(Buffered):
    """T5's old bias: a table of distances, and a mask made of zeros that are shaped like the scores."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.table = nn.Embedding(32, self.heads)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        self.k_cache[:, :, pos], self.v_cache[:, :, pos] = k, v
        far = (pos[:, None] - torch.arange(self.capacity)).clamp(0, 31)
        scores = q @ self.k_cache.mT + self.table(far).permute(2, 0, 1)[None]
        scores = scores + torch.zeros_like(scores).masked_fill(~visible(pos, self.capacity), -1e9)
        return self.close(scores.softmax(-1) @ self.v_cache)


class Flex(Buffered):
    """flex_attention over a buffer: what decides is ``mod`` (module, scores..., indices) -> score."""

    def __init__(self, mod: Callable[..., torch.Tensor], **sizes: int) -> None:
        super().__init__(**sizes)
        self.mod = mod
        self.register_buffer("slopes", torch.linspace(0.1, 0.4, self.heads))
        self.register_buffer("start", torch.tensor([0, 2]))

    def fill(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        """Write the new tokens; the queries."""
        q, k, v = self.heads_first(x)
        self.k_cache.index_copy_(2, pos, k)
        self.v_cache.index_copy_(2, pos, v)
        return q

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q = self.fill(x, pos)

        def score(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return self.mod(self, score, b, h, pos[i], j)

        return self.close(flex_attention(q, self.k_cache, self.v_cache, score_mod=score))


def causal_score(m: Flex, score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, at: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return torch.where(j <= at, score, -float("inf"))


def biased_score(m: Flex, score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, at: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    seen = (j <= at) & ((j >= m.start[b]) | (j == at))
    return torch.where(seen, score + m.slopes[h] * (j - at), -float("inf"))


class FlexBlocks(Flex):
    """A block mask from outside, and grouped heads."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(causal_score, **{"kv": 2, **sizes})

    def forward(self, x: torch.Tensor, pos: torch.Tensor, blocks: Any) -> torch.Tensor:  # type: ignore[override]
        q = self.fill(x, pos)
        return self.close(flex_attention(q, self.k_cache, self.v_cache, block_mask=blocks, enable_gqa=True))


class FlexSum(Flex):
    """What is returned is scaled by the log of the sum, as attention sinks are spelled with flex attention."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(causal_score, **sizes)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q = self.fill(x, pos)
        y, total = flex_attention(
            q, self.k_cache, self.v_cache, score_mod=lambda s, b, h, i, j: torch.where(j <= pos[i], s, -float("inf")), return_lse=True,
        )
        return self.close(y * torch.sigmoid(total)[..., None])


class NextDoor(Flex):
    """A function under ``vmap`` in the same graph as a cache."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(causal_score, **sizes)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        gates = torch.vmap(lambda row: torch.vmap(lambda token: torch.outer(token, token).diagonal().cumsum(0))(row))(x)
        q = self.fill(x + gates.softmax(-1), pos)
        return self.close(F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=visible(pos, self.capacity)))


class ReadLater(Buffered):
    """A buffer is written after the attention, which sees the steps before this one."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        before = (torch.arange(self.capacity) < pos[0]) | (torch.arange(self.capacity) == 0)
        y = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=before.expand(len(pos), -1))
        self.k_cache.index_copy_(2, pos, k)
        self.v_cache.index_copy_(2, pos, v)
        return self.close(y)


class GrownLater(Attention):
    """The past is attended to as it came in, and returned with the new tokens behind it."""

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None = None) -> Any:
        q, k, v = self.heads_first(x)
        if past is None:
            return self.close(F.scaled_dot_product_attention(q, k, v, is_causal=True)), (k, v)
        grown = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return self.close(F.scaled_dot_product_attention(q, *past)), grown


class Prefix(Buffered):
    """The filled part of a buffer joined to the new tokens, which are written into it before or after the attention."""

    def __init__(self, late: bool, **sizes: int) -> None:
        super().__init__(**sizes)
        self.late = late

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        count = x.shape[1]
        keys, values = torch.cat([self.k_cache[:, :, :start], k], 2), torch.cat([self.v_cache[:, :, :start], v], 2)
        mask = torch.ones(count, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - count)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask) if self.late else None
        self.k_cache[:, :, start : start + count] = k
        self.v_cache[:, :, start : start + count] = v
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask) if y is None else y)


class Changed(Prefix):
    """The new keys change between the join and the write: the cache then holds others than this call attends to."""

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        count = x.shape[1]
        keys, values = torch.cat([self.k_cache[:, :, :start], k], 2), torch.cat([self.v_cache[:, :, :start], v], 2)
        mask = torch.ones(count, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - count)
        k.mul_(0.5)
        self.k_cache[:, :, start : start + count] = k
        self.v_cache[:, :, start : start + count] = v
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))


class StackedAndChanged(Attention):
    """What is returned is changed once it was stacked; what is attended to is not."""

    def forward(self, x: torch.Tensor, past: torch.Tensor | None = None) -> Any:
        q, k, v = self.heads_first(x)
        if past is not None:
            k, v = torch.cat([past[0], k], -2), torch.cat([past[1], v], -2)
        present = torch.stack((k, v))
        k.mul_(2.0)
        mask = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool).tril(k.shape[2] - x.shape[1])
        return self.close(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)), present


class SplitLater(Attention):
    """Heads are split from the channels after the cache is read, by methods that are written in Python."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.capacity, 2 * self.width, names=["cache"])

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        self.cache[:, pos] = torch.cat([self.k(x), self.v(x)], -1)
        q, k, v = (item.unflatten(-1, (self.heads, -1)).transpose(1, 2) for item in (self.q(x), *self.cache.split(self.width, -1)))
        return self.close(F.scaled_dot_product_attention(q, k, v, attn_mask=visible(pos, self.capacity)))


class Unflattened(Attention):
    """A buffer [B, C, K * D] that is unflattened as it is read."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.capacity, self.width)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        self.k_cache[:, pos], self.v_cache[:, pos] = self.k(x), self.v(x)
        q, k, v = (item.unflatten(-1, (self.heads, -1)).transpose(1, 2) for item in (self.q(x), self.k_cache, self.v_cache))
        return self.close(F.scaled_dot_product_attention(q, k, v, attn_mask=visible(pos, self.capacity)))


class LookedAt(Buffered):
    """Scores and weights are looked at for what the caller does not ask for."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, outputs: bool = False) -> Any:
        q, k, v = self.heads_first(x)
        keys, values = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
        scores = (q @ keys.mT * self.dim**-0.5).masked_fill(~visible(pos, self.capacity), -torch.inf)
        flat, weights = scores.view(-1, self.capacity), scores.softmax(-1)
        mean = weights.mean(1)
        y = self.close(weights @ values)
        return (y, flat, mean) if outputs else y


class BornWhole(Attention):
    """The first call makes its buffers; ``masked``: without a mask, attention would read places that nothing was written into."""

    def __init__(self, masked: bool, **sizes: int) -> None:
        super().__init__(**sizes)
        self.masked = masked

    def forward(self, x: torch.Tensor, past: Any = None) -> Any:
        q, k, v = self.heads_first(x)
        if past is None:
            past = (*(torch.zeros(self.batch, self.kv, self.capacity, self.dim) for _ in range(2)), torch.zeros(1, dtype=torch.int64))
        keys, values, length = past
        pos = length + torch.arange(x.shape[1])
        keys, values = keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
        mask = visible(pos, self.capacity) if self.masked else None
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)), (keys, values, length + x.shape[1])


def with_blocks(module: nn.Module, call: Callable[..., Any], chunks: Any) -> list[torch.Tensor]:
    """forward(x, pos, block mask)."""

    def step(x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        capacity = module.capacity
        return call(x, pos, create_block_mask(
            lambda b, h, i, j: j <= pos[i], None, None, len(pos), capacity, device="cpu", BLOCK_SIZE=32,  # type: ignore[arg-type]
        ))

    return by_position(module, step, chunks)


CASES = (
    Case("cast-in-place", CastInPlace, by_offset),
    Case("stacked", Stacked, returned(None)),
    Case("side-by-side", SideBySide, returned(None)),
    Case("fused-heads", FusedHeads, by_position),
    Case("uneven", Uneven, by_position),
    Case("shaped-like-scores", Shaped, by_position),
    Case("flex-causal", lambda **given: Flex(causal_score, **given), by_position),
    Case("flex-biased", lambda **given: Flex(biased_score, **given), by_position),
    Case("flex-blocks", FlexBlocks, with_blocks),
    Case("next-door", NextDoor, by_position),
    Case("read-later", ReadLater, by_position),
    Case("prefix-early", lambda **given: Prefix(False, **given), by_offset),
    Case("prefix-late", lambda **given: Prefix(True, **given), by_offset),
    Case("split-later", SplitLater, by_position),
    Case("unflattened", Unflattened, by_position),
    Case("grown-later", GrownLater, returned(None)),
    Case("born-masked", lambda **given: BornWhole(True, **given), returned(None)),
    Case("looked-at", LookedAt, by_position),
    Case("prefix-changed", lambda **given: Changed(False, **given), by_offset, refused="assembled, here by cat"),
    Case("stacked-and-changed", StackedAndChanged, returned(None), refused="passes through other operations"),
    Case("part-unread", PartUnread, by_position, refused="entries are read by attention"),
    Case("flex-sum", FlexSum, by_position),
)
REWRITTEN = [case for case in CASES if not case.refused]
COMPRESSED = {"stacked", "uneven", "fused-heads", "flex-biased", "read-later", "grown-later", "prefix-late"}


@pytest.mark.parametrize("case", REWRITTEN, ids=str)
def test_dense_equals_the_module(case: Case) -> None:
    backend = kvcompile.backend("dense", inner="eager", strict=True)
    assert case.error(backend) <= 2e-6
    report = backend.report()
    assert report.sites >= len(backend.graphs) - 1 and report.sites and not report.refusals


@pytest.mark.parametrize("late", [False, True])
def test_a_prefix_of_a_fixed_number_of_tokens(late: bool) -> None:
    """With dynamic=False the past's end and the new tokens' start are ints, equal ones."""
    case = Case("prefix", lambda **given: Prefix(late, **given), by_offset)
    backend = kvcompile.backend("dense", inner="eager", strict=True)
    module = case.make()
    plain, given = copy.deepcopy(module), inputs(module, (5, 1, 1))
    with torch.no_grad():
        expected = case.drive(plain, plain, given)
        found = case.drive(module, torch.compile(module, backend=backend, fullgraph=True, dynamic=False), given)
    assert max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)) <= 2e-6
    assert [len(graph.sites) for graph in backend.graphs] == [1, 1, 1]


class BehindAGap(Prefix):
    """The new tokens are written one place after those that attention joins them to."""

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        count = x.shape[1]
        keys, values = torch.cat([self.k_cache[:, :, :start], k], 2), torch.cat([self.v_cache[:, :, :start], v], 2)
        self.k_cache[:, :, start + 1 : start + 1 + count] = k
        self.v_cache[:, :, start + 1 : start + 1 + count] = v
        mask = torch.ones(count, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - count)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))


def test_a_prefix_with_a_gap_is_none() -> None:
    case = Case("gap", lambda **given: BehindAGap(False, **given), by_offset)
    backend = kvcompile.backend("dense", inner="eager")
    module = case.make()
    plain, given = copy.deepcopy(module), inputs(module, (5, 1, 1))
    with torch.no_grad():
        expected = case.drive(plain, plain, given)
        found = case.drive(module, torch.compile(module, backend=backend, fullgraph=True, dynamic=False), given)
    assert max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)) == 0
    report = backend.report()
    assert not report.sites and all(item.stage is Stage.MATCH for item in report.refusals)


@pytest.mark.parametrize("case", [case for case in REWRITTEN if case.name in COMPRESSED], ids=str)
def test_int8_is_near_the_module(case: Case) -> None:
    # Eight channels to a scale where the values have eight.
    assert 0 < case.error(kvcompile.backend("int8", inner="eager", strict=True)) <= 0.01


@pytest.mark.parametrize("case", [case for case in CASES if case.refused], ids=str)
def test_refused_for_its_reason_and_right(case: Case) -> None:
    backend = kvcompile.backend("int8", inner="eager")
    assert case.error(backend) <= 2e-6
    report = backend.report()
    assert report.sites == 0 and report.allocated == 0
    assert any(case.refused in item.reason for item in report.refusals), [str(item) for item in report.refusals]


def test_flex_attention_that_does_not_work_on_grids_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its functions cannot be run over whole index grids it stays one operation, and the report says that it reads a cache."""

    def fails(*args: Any) -> Any:
        raise RuntimeError("no grids")

    monkeypatch.setattr("kvcompile.passes.capture.flex.explicit", fails)
    case = next(case for case in CASES if case.name == "flex-causal")
    backend = kvcompile.backend("int8", inner="eager")
    assert case.error(backend) == 0.0
    assert backend.report().sites == 0
    assert any("flex_attention" in item.reason for item in backend.report().refusals)


def test_a_cast_buffer_is_given_back_itself() -> None:
    """What a call returns for a buffer that it wrote is that buffer, step after step, compressed or not."""
    case = next(case for case in CASES if case.name == "cast-in-place")
    module = case.make()
    call = torch.compile(module, backend=kvcompile.backend("int8", inner="eager", strict=True), fullgraph=True)
    with torch.no_grad():
        seen = []
        for start, x in zip((0, 7, 8, 9), inputs(module, CHUNKS[:4]), strict=True):
            call(x, start)
            seen.append(module.k_cache)
    assert all(item is seen[0] for item in seen)
    assert type(seen[0]).__name__ != "Tensor"


@pytest.mark.parametrize("name", ["read-later", "grown-later"])
def test_a_window_of_the_newest_tokens_cannot_be_read_late(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    backend = kvcompile.backend("kivi", inner="eager")
    assert case.error(backend) == 0.0
    assert any("written after its attention" in item.reason for item in backend.report().refusals)


def test_a_new_cache_that_is_read_whole_stays_dense_in_its_first_call() -> None:
    """Zeros that nobody wrote take part in the softmax; a store does not hold them, so that call is left as it is."""
    backend = kvcompile.backend("dense", inner="eager")
    assert Case("born-whole", lambda **given: BornWhole(False, **given), returned(None)).error(backend) <= 2e-6
    first, *later = backend.graphs
    assert not first.sites and any("no token was written into" in item.reason for item in first.refusals)
    assert all(graph.sites and not graph.refusals for graph in later)


def test_what_makes_a_block_mask_is_left_out() -> None:
    """Dynamo's graph makes the empty block mask under ``vmap``; once flex attention is spelled out nothing reads it."""
    case = next(case for case in CASES if case.name == "flex-causal")
    left: list[int] = []

    def look(graph: torch.fx.GraphModule, args: Any) -> Any:
        left.append(len(Retrace(graph).left_out))
        return graph.forward

    module = case.make()
    with torch.no_grad():
        torch.compile(copy.deepcopy(module), backend=look)(inputs(module)[0], torch.arange(CHUNKS[0]))
    assert left == [left[0]] and left[0] > 10
