"""Small models for the end-to-end tests: transformers configs, and cached attentions written by hand.

The hand-written ones are what a stranger might bring: every way to hold a cache and to spell attention that
we could think of, each with a ``drive`` that feeds it chunks of a sequence and collects its results.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from e2e_layers import (  # noqa: F401 - tests take all models from here
    CAPACITY,
    CHUNKS,
    AllLayers,
    Attention,
    Attribute,
    BlockTable,
    Buffered,
    Call,
    CombinedMiddle,
    CombinedOneWrite,
    CombinedTwoWrites,
    Concatenated,
    ConcatenatedTimeFirst,
    CopiedBack,
    FirstRows,
    FirstRowsCombined,
    FirstRowsIndexCopy,
    FirstRowsPerRow,
    Flat,
    Functional,
    FunctionalScatter,
    GroupedEinsum,
    GroupedMatmul,
    IndexCopyAttribute,
    LatentKeys,
    Lists,
    MiddleRows,
    MultiQueryEinsum,
    Narrow,
    NotGivenBack,
    PerRow,
    Probed,
    Reassigned,
    Rolled,
    RowDecode,
    RowsAndOnePosition,
    RowScattered,
    RowSlice,
    ScalarPosition,
    Scattered,
    ScratchCopy,
    SelectScattered,
    SliceAssign,
    SliceScattered,
    Tiled,
    Transposed,
    TrilMask,
    Window,
    buffers,
    cache_of,
    llama,
    prompt,
    visible,
)
from softmax_models import Differential, DifferentialConcatenated, Safe, Scaled
from torch import nn

# --- how attention is spelled -------------------------------------------------------------------------


class Spelled(Attention):
    """An index_copy_ cache whose scores go through ``steps``."""

    def __init__(self, steps: Callable[..., torch.Tensor], **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.kv, self.capacity, self.dim)
        self.steps = steps
        self.sink_logits = nn.Parameter(torch.linspace(-1, 1, self.heads))
        slopes = torch.tensor([2.0 ** (-(i + 1)) for i in range(self.heads)])
        self.register_buffer("alibi", slopes[:, None, None] * torch.arange(self.capacity))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = (item.transpose(1, 2) for item in self.project(x))
        keys, values = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
        repeats = self.heads // self.kv
        if repeats > 1:
            keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
        probs = self.steps(self, q, keys, visible(pos, self.capacity))
        return self.close(probs.to(values.dtype) @ values)


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float mask: zero where attended, the smallest number elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def step_additive(m: Spelled, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.softmax((q @ k.mT) * m.dim**-0.5 + additive(mask, q.dtype), dim=-1, dtype=torch.float32)


def step_one_minus(m: Spelled, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.softmax((q @ k.mT) / math.sqrt(m.dim) + (1.0 - mask.to(q.dtype)) * -10000.0, dim=-1)


def step_softcap(m: Spelled, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = 5.0 * torch.tanh(q @ k.mT * m.dim**-0.5 / 5.0)
    return (scores + additive(mask, q.dtype)).softmax(-1)


def step_sinks(m: Spelled, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT * m.dim**-0.5 + additive(mask, q.dtype)
    sinks = m.sink_logits.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    combined = torch.cat([scores, sinks], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    return F.softmax(combined, dim=-1)[..., :-1]


def step_alibi(m: Spelled, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    batch, heads, count, dim = q.shape
    bias = m.alibi.expand(batch, -1, -1, -1).reshape(batch * heads, 1, -1).to(q.dtype)
    scores = torch.baddbmm(bias, q.reshape(-1, count, dim), k.reshape(-1, m.capacity, dim).mT, beta=1.0, alpha=dim**-0.5)
    scores = scores.view(batch, heads, count, -1) + additive(mask, q.dtype)
    return scores.softmax(-1)


def step_scaled_twice(m: Spelled, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    root = m.dim**-0.25
    return ((q * root) @ (k.mT * root)).masked_fill(~mask, -1e30).softmax(-1)


def step_scaled_twice_scores(m: Spelled, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (((q @ k.mT) * 0.5) / 2.0 * torch.tensor(2.0)).masked_fill(~mask, -1e30).softmax(-1)


def step_sdpa_scale(m: Spelled, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    eye = torch.eye(m.capacity, dtype=q.dtype).expand(q.shape[0], q.shape[1], -1, -1)
    return F.scaled_dot_product_attention(q, k, eye, attn_mask=mask, scale=1.0)


def step_learned_scale(m: Spelled, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT * m.sink_logits.view(1, -1, 1, 1)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1)


def step_max_floor(m: Spelled, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT * m.dim**-0.5 + additive(mask, q.dtype)
    scores = torch.max(scores, torch.tensor(torch.finfo(q.dtype).min))
    return scores.softmax(-1)


def step_keys_first(m: Spelled, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (k @ q.mT).mT.mul(m.dim**-0.5).masked_fill(~mask, float("-inf")).softmax(-1)


def step_negative_scale(m: Spelled, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (-q @ k.mT * -(m.dim**-0.5)).masked_fill(~mask, float("-inf")).softmax(-1)


def step_hand_softmax(m: Spelled, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.mT * m.dim**-0.5).masked_fill(~mask, float("-inf"))
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


# --- driving them ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A module, how it is fed, and what is expected of it: ``refused`` is part of the reason, '' means rewritten."""

    name: str
    build: Callable[..., nn.Module]
    drive: Callable[[nn.Module, Call, Sequence[torch.Tensor]], list[torch.Tensor]]
    refused: str = ""
    sizes: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def make(self, dtype: torch.dtype = torch.float32, **sizes: int) -> nn.Module:
        """The module in a dtype, in eval mode, weights from a fixed seed."""
        torch.manual_seed(0)
        return self.build(**{**self.sizes, **sizes}).to(dtype).eval()

    def error(
        self, backend: Callable[..., Any], dtype: torch.dtype = torch.float32, chunks: Sequence[int] = CHUNKS, **sizes: int
    ) -> float:
        """The largest difference between the compiled module and the module itself over all its results."""
        module = self.make(dtype, **sizes)
        plain = copy.deepcopy(module)
        given = inputs(module, chunks, dtype)
        with torch.no_grad():
            expected = self.drive(plain, plain, given)
            found = self.drive(module, torch.compile(module, backend=backend, fullgraph=True), given)
        return max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True))


def inputs(module: nn.Module, chunks: Sequence[int] = CHUNKS, dtype: torch.dtype = torch.float32, seed: int = 1) -> list[torch.Tensor]:
    """Chunks of one random sequence."""
    one = module if isinstance(module, Attention) else next(m for m in module.modules() if isinstance(m, Attention))
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(one.batch, count, one.width, generator=generator).to(dtype) for count in chunks]


def by_position(module: nn.Module, call: Call, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """forward(x, pos) with pos = the positions of the chunk."""
    start, results = 0, []
    for x in chunks:
        results.append(call(x, torch.arange(start, start + x.shape[1])))
        start += x.shape[1]
    return results


def by_row(module: nn.Module, call: Call, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """forward(x, pos) with row ``b`` two positions ahead of row ``b - 1`` after the first chunk."""
    start, results = 0, []
    for number, x in enumerate(chunks):
        pos = torch.arange(start, start + x.shape[1]).repeat(x.shape[0], 1)
        results.append(call(x, pos - (torch.arange(x.shape[0]) % 2)[:, None] * 2 * (number > 0)))
        start += x.shape[1]
    return results


def by_offset(module: nn.Module, call: Call, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """forward(x, start) with a Python int."""
    start, results = 0, []
    for x in chunks:
        results.append(call(x, start))
        start += x.shape[1]
    return results


def returned(first: Any) -> Callable[[nn.Module, Call, Sequence[torch.Tensor]], list[torch.Tensor]]:
    """forward(x, past) -> (y, past), from ``first``."""

    def drive(module: nn.Module, call: Call, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        past, results = first, []
        for x in chunks:
            y, past = call(x, past)
            results.append(y)
        return results

    return drive


def passed(module: nn.Module, call: Call, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """forward(x, caches, pos) with caches made by the module."""
    caches = module.fresh()  # type: ignore[operator]
    return by_position(module, lambda x, pos: call(x, caches, pos), chunks)


def one_by_one(scalar: bool) -> Callable[[nn.Module, Call, Sequence[torch.Tensor]], list[torch.Tensor]]:
    """forward(x, pos) a token at a time: ``pos`` of no dims, or one for each row, row 1 three tokens late."""

    def drive(module: nn.Module, call: Call, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        tokens = torch.cat(list(chunks), 1).split(1, 1)
        rows = torch.arange(tokens[0].shape[0]) % 2 * 3
        return [call(x, torch.tensor(t) if scalar else (t - rows).clamp(min=0)) for t, x in enumerate(tokens)]

    return drive


def alone(module: nn.Module, call: Call, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """forward(x), a token at a time."""
    return [call(x) for x in torch.cat(list(chunks), 1).split(1, 1)]


def functional(module: nn.Module, call: Call, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """forward(x, caches, pos) -> (y, caches)."""
    one = module
    caches = tuple(torch.zeros(one.batch, one.kv, one.capacity, one.dim, dtype=chunks[0].dtype) for _ in range(2))  # type: ignore[attr-defined]
    start, results = 0, []
    for x in chunks:
        y, caches = call(x, caches, torch.arange(start, start + x.shape[1]))
        results.append(y)
        start += x.shape[1]
    return results


def functional_from(module: nn.Module, call: Call, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """forward(x, caches, start) -> (y, caches) with a Python int."""
    return functional(module, lambda x, caches, pos: call(x, caches, int(pos[0])), chunks)


def functional_alone(module: nn.Module, call: Call, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As ``functional_from``, one token a call."""
    return functional_from(module, call, torch.cat(list(chunks), 1).split(1, 1))


def spelled(name: str, steps: Callable[..., torch.Tensor], refused: str = "", **sizes: int) -> Case:
    """A case that differs in the steps between the products only."""
    return Case(name, lambda **given: Spelled(steps, **given), by_position, refused, sizes)


CASES = (
    Case("tril-mask", TrilMask, by_position),
    Case("index-copy-attribute", IndexCopyAttribute, by_position),
    Case("transposed-keys", Transposed, by_position),
    Case("narrow", Narrow, by_offset),
    Case("slice-assign", SliceAssign, by_offset),
    Case("combined-one-write", CombinedOneWrite, by_position),
    Case("combined-two-writes", CombinedTwoWrites, by_position),
    Case("combined-middle", CombinedMiddle, by_position),
    Case("per-row", PerRow, by_row),
    Case("flat-bmm", Flat, by_position),
    Case("multi-query-einsum", MultiQueryEinsum, by_position),
    Case("grouped-einsum", GroupedEinsum, by_position),
    Case("grouped-matmul", GroupedMatmul, by_position),
    Case("concatenated", Concatenated, returned(None)),
    Case("concatenated-time-first", ConcatenatedTimeFirst, returned({})),
    Case("lists", Lists, passed),
    Case("all-layers", AllLayers, by_position),
    Case("row-slice", RowSlice, by_offset),
    Case("first-rows", FirstRows, by_offset),
    Case("first-rows-index-copy", FirstRowsIndexCopy, by_position),
    Case("first-rows-combined", FirstRowsCombined, by_offset),
    Case("first-rows-per-row", FirstRowsPerRow, by_row),
    Case("middle-rows", MiddleRows, by_offset, refused="the write covers only part of the cache (dim 0: 2 of 4, from 1)"),
    Case("scalar-position", ScalarPosition, one_by_one(True)),
    Case("row-decode", RowDecode, one_by_one(False)),
    Case("window", Window, by_position),
    Case("attribute", Attribute, alone),
    Case("scatter", Scattered, by_position),
    Case("functional", Functional, functional),
    Case("tiled", Tiled, by_position),
    Case("functional-scatter", FunctionalScatter, functional),
    Case("slice-scatter", SliceScattered, functional_from),
    Case("select-scatter", SelectScattered, functional_alone),
    Case("copied-back", CopiedBack, by_position),
    Case("reassigned", Reassigned, by_position),
    Case("rows-and-one-position", RowsAndOnePosition, by_position),
    Case("row-scatter", RowScattered, by_row),
    Case("not-given-back", NotGivenBack, by_position, refused="not returned as it is"),
    Case("block-table", BlockTable, by_position),
    Case("rolled", Rolled, alone),
    Case("latent", LatentKeys, by_position),
    Case("scratch-copy", ScratchCopy, by_position, refused="a copy of the cache"),
    Case("probed", Probed, by_position, refused="also read by"),
    spelled("additive", step_additive),
    spelled("one-minus-mask", step_one_minus),
    spelled("softcap", step_softcap, kv=2),
    spelled("sinks", step_sinks),
    spelled("alibi-baddbmm", step_alibi),
    spelled("scaled-twice", step_scaled_twice),
    spelled("scaled-scores-twice", step_scaled_twice_scores),
    spelled("max-floor", step_max_floor),
    spelled("learned-scale", step_learned_scale, refused="multiplied by a tensor"),
    spelled("keys-first", step_keys_first),
    spelled("hand-softmax", step_hand_softmax),
    Case("zeros-by-the-mask", lambda **given: Safe("by the mask", **given), by_position),
    Case("zeros-by-the-row", lambda **given: Safe("by the row", **given), by_position),
    Case("zeros-by-an-epsilon", lambda **given: Safe("by an epsilon", **given), by_position),
    Case("sinks-behind", Scaled, by_position, sizes={"kv": 2}),
    Case("differential-channels", lambda **given: Differential("channels", **given), by_position, sizes={"kv": 2}),
    Case("differential-heads", lambda **given: Differential("heads", **given), by_position),
    Case("differential-concatenated", DifferentialConcatenated, returned(None)),
    Case("differential-by-token", lambda **given: DifferentialConcatenated(True, **given), returned(None), refused="pass through"),
    spelled("d80", step_additive, dim=80, kv=2),
    spelled("mqa-repeat", step_additive, kv=1),
    spelled("negative-scale", step_negative_scale),
)
