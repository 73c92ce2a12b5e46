"""``kvcompile::smartkv_attend`` and ``kvcompile::smartkv_observe``: attention that records how much attention each token received.

``smartkv_attend``   attends over buckets of keys and values (``smartkv.buckets``) as ``attend`` does over planes, with all of its masks,
                     then updates the averages in the planes ``importance`` and ``heads``, one step per query
``smartkv_observe``  only updates the averages, for a prompt that attends to its own tokens in full precision

The eager bodies are the definition; on CUDA kernels replace the first for few queries (``decode_step``). The bodies take queries in tiles,
so that no tensor has queries times tokens entries, and decode the tokens of one kv head at a time. Nothing waits for the device.

A query gives each token its softmax weight, as the mean over the query heads of one kv head and over all heads. Averages decay by
``decay`` per query: a query followed by ``n`` others counts decay ** n, so early queries of a long prompt are skipped as negligible. A
token that is visible to any query that counts keeps an importance above zero, however little attention it received.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from kvcompile.extensions.smartkv.buckets import Buckets, values
from kvcompile.extensions.smartkv.decode_step import DecodeStepOperands, scheme_of, step_by_kernels, step_gap
from kvcompile.extensions.smartkv.importance import LEAST_IMPORTANCE, head_measure
from kvcompile.extensions.smartkv.movement import BY_KERNELS
from kvcompile.extensions.smartkv.scheme import Smartkv
from kvcompile.lowering.host.launches import Direct
from kvcompile.lowering.ops.operands import AttendOperands, attend_operands, named
from kvcompile.lowering.ops.operations import LIBRARY, as_tokens, softmax_parts, weighted

OPERANDS = (
    "Tensor q, Tensor[] keys, Tensor[] values, Tensor hi, Tensor? lo, Tensor? keep, Tensor? bias, Tensor? sinks,"
    " str key_scheme, str value_scheme, float scale, float softcap, SymInt value_dim, Tensor(a!) importance, Tensor(b!) heads"
)
LIBRARY.define(f"smartkv_attend({OPERANDS}) -> Tensor")
LIBRARY.define(f"smartkv_observe({OPERANDS}, str scheme) -> ()")

TILE = 64
"""Queries that are processed at a time."""

COUNTS = 2.0**-30
"""The weight below which a query does not count in an average."""


def _tiles(operands: AttendOperands[torch.Tensor]) -> Iterator[tuple[int, AttendOperands[torch.Tensor]]]:
    """Yield the operands for up to ``TILE`` queries at a time, with the number of the first query."""
    count = operands.q.shape[2]
    for start in range(0, count, TILE):
        yield start, _queries(operands, start, min(start + TILE, count))


def _queries(operands: AttendOperands[torch.Tensor], start: int, stop: int) -> AttendOperands[torch.Tensor]:
    """Return the operands with only the queries from ``start`` to ``stop`` - 1, and their limits and masks."""
    some = slice(start, stop)

    def of(limit: torch.Tensor | None, dim: int) -> torch.Tensor | None:
        return limit if limit is None or limit.shape[dim] == 1 else limit.narrow(dim, start, stop - start)

    hi, lo, bias = of(operands.hi, 1), of(operands.lo, 1), of(operands.bias, 2)
    assert hi is not None
    return dataclasses.replace(operands, q=operands.q[:, :, some], hi=hi, lo=lo, bias=bias)


@dataclasses.dataclass
class _Averages:
    """Moving averages of attention received, updated tile by tile: per token, plain and head-weighted [B, T]; per kv head [B, K]."""

    scheme: Smartkv
    plain: torch.Tensor
    weighted: torch.Tensor
    heads: torch.Tensor
    seen: torch.Tensor
    count: int

    @staticmethod
    def of(scheme: Smartkv, importance: torch.Tensor, heads: torch.Tensor, count: int) -> _Averages:
        """Return averages that start from the planes ``importance`` and ``heads``, for ``count`` queries to come.

        The averages per token are multiplied by decay ** ``count`` here, so that ``add`` needs only to add.
        """
        rows = as_tokens(importance)[:, 0]
        measured = heads[0, :, :, 0, 0].clone()
        plain, by_heads = (rows * scheme.decay**count).unbind(-1)
        # A head without a measure yet has weight 1, as in the paper.
        measured = torch.where(measured == 0, torch.ones_like(measured), measured)
        return _Averages(scheme, plain.clone(), by_heads.clone(), measured, torch.zeros_like(plain, dtype=torch.bool), count)

    @property
    def skipped(self) -> int:
        """How many of the first queries are skipped because their weight in the averages, decay ** n, is negligible."""
        slowest = max(self.scheme.decay, self.scheme.head_decay)
        return max(0, self.count - math.ceil(math.log(COUNTS) / math.log(slowest))) if slowest > 0 else max(0, self.count - 1)

    def add(self, start: int, head: int, kv_heads: int, weights: torch.Tensor, total: torch.Tensor) -> None:
        """Add to the averages one kv head's attention for a tile of queries, of which number ``start`` is the first.

        ``weights``, ``total``: the results of ``softmax_parts``.
        """
        scheme, tokens = self.scheme, self.plain.shape[1]
        shares = torch.where(total == 0, 0, weights / total).to(torch.float32).nan_to_num(0.0, 0.0, 0.0)[..., :tokens]
        rows, _, count, held = shares.shape
        behind = self.count - 1 - start - torch.arange(count, device=shares.device)
        # One softmax row per batch row, query and head, [B * S, G, T]; the mean of its measures is one number per query.
        flat = shares.transpose(1, 2).flatten(0, 1)
        # An additive mask may hide tokens too: a token of zero weight was not visible.
        visible = (shares > 0).any(1)
        measure = head_measure(flat, scheme.measure, visible.flatten(0, 1)).mean(-1).view(rows, count)
        heads = self._heads(head, measure)
        mass = shares.mean(1)
        weight = (1 - scheme.decay) * scheme.decay**behind.to(torch.float32) / kv_heads
        self.plain[:, :held] += torch.einsum("s,bst->bt", weight, mass)
        self.weighted[:, :held] += torch.einsum("s,bs,bst->bt", weight, heads, mass)
        self.seen[:, :held] |= visible.any(1)

    def _heads(self, head: int, measure_BS: torch.Tensor) -> torch.Tensor:
        """Update the average of kv head ``head`` in place by the measures of S queries; return its value after each of them, [B, S]."""
        decay, count = self.scheme.head_decay, measure_BS.shape[1]
        number = torch.arange(count, device=measure_BS.device)
        apart = number[:, None] - number[None, :]
        share = torch.where(apart >= 0, (1 - decay) * decay ** apart.clamp(min=0).to(torch.float32), 0.0)
        after = decay ** (number + 1).to(torch.float32) * self.heads[:, head, None] + measure_BS @ share.T
        self.heads[:, head] = after[:, -1]
        return after

    def store(self, importance: torch.Tensor, heads: torch.Tensor) -> None:
        """Write the averages into the planes ``importance`` (of tokens) and ``heads``; a visible token gets at least a tiny value."""
        least = torch.where(self.seen, LEAST_IMPORTANCE, 0.0)
        averages = torch.stack([torch.maximum(self.plain, least), self.weighted], dim=-1)
        importance.copy_(averages.unflatten(1, (importance.shape[0], -1)).transpose(0, 1).unsqueeze(2))
        heads[0, :, :, 0, 0] = self.heads


def smartkv_attend_body(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return attention's result [B, H, S, Dv] in q's dtype, as ``attend`` does, and update the averages in their planes."""
    given = named(smartkv_attend, args, kwargs)
    operands, importance, heads = attend_operands(given), given["importance"], given["heads"]
    step = DecodeStepOperands(operands, importance, heads)
    return step_by_kernels(Direct(cuda=True), step) if operands.q.is_cuda and step_gap(step) is None else attend_by_definition(step)


def attend_by_definition(step: DecodeStepOperands) -> torch.Tensor:
    """Return attention's result [B, H, S, Dv] by torch operators, and update the averages in their planes."""
    operands, importance, heads = step.attend, step.importance, step.heads
    keys, value_scheme = step.schemes
    q, tokens = operands.q, importance.shape[0] * importance.shape[3]
    compute = torch.promote_types(q.dtype, torch.float32)
    averages = _Averages.of(keys, importance, heads, q.shape[2])
    key_buckets, value_buckets = Buckets.of(tuple(operands.keys), keys.form), Buckets.of(tuple(operands.values), value_scheme.form)
    kv_heads = operands.keys[0].shape[2]
    group = q.shape[1] // kv_heads
    out = q.new_empty(*q.shape[:3], operands.value_dim)
    for head in range(kv_heads):
        k, v = (_values(slot_buckets, tokens, head).to(compute) for slot_buckets in (key_buckets, value_buckets))
        of_head = slice(head * group, (head + 1) * group)
        for start, some in _tiles(operands):
            parts = softmax_parts(some, of_head, k, compute)[:3]
            out[:, of_head, start : start + TILE] = weighted(*parts, v).to(q.dtype)
            if start + some.q.shape[2] > averages.skipped:
                averages.add(start, head, kv_heads, *parts[:2])
    averages.store(importance, heads)
    return out


def _values(slot_buckets: Buckets, tokens: int, head: int) -> torch.Tensor:
    """Return the values of the first ``tokens`` tokens of one kv head, [B, 1, T, D], without waiting for a CUDA device."""
    return BY_KERNELS.values(slot_buckets, tokens, head) if slot_buckets.ends.is_cuda else values(
        slot_buckets, tokens, slice(head, head + 1)
    )


def smartkv_observe_body(*args: Any, **kwargs: Any) -> None:
    """Update the planes of averages by the attention of queries [B, H, S, D] to keys in one dense plane; returns nothing."""
    given = named(smartkv_observe, args, kwargs)
    operands, importance, heads = attend_operands(given), given["importance"], given["heads"]
    compute = torch.promote_types(operands.q.dtype, torch.float32)
    averages = _Averages.of(scheme_of(given["scheme"]), importance, heads, operands.q.shape[2])
    keys = as_tokens(operands.keys[0])
    kv_heads = keys.shape[1]
    group = operands.q.shape[1] // kv_heads
    for head in range(kv_heads):
        k = keys[:, head : head + 1].to(compute)
        for start, some in _tiles(operands):
            if start + some.q.shape[2] > averages.skipped:
                parts = softmax_parts(some, slice(head * group, (head + 1) * group), k, compute)[:3]
                averages.add(start, head, kv_heads, *parts[:2])
    averages.store(importance, heads)


def _attend_meta(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return an empty tensor [B, H, S, Dv] of the queries' dtype and device, for fake tensors."""
    operands: AttendOperands[torch.Tensor] = attend_operands(named(smartkv_attend, args, kwargs))
    return operands.q.new_empty(*operands.q.shape[:3], operands.value_dim)


def _observe_meta(*args: Sequence[Any], **kwargs: Mapping[str, Any]) -> None:
    return None


LIBRARY.impl("smartkv_attend", smartkv_attend_body, "CompositeExplicitAutograd")
LIBRARY.impl("smartkv_attend", _attend_meta, "Meta")
LIBRARY.impl("smartkv_observe", smartkv_observe_body, "CompositeExplicitAutograd")
LIBRARY.impl("smartkv_observe", _observe_meta, "Meta")

smartkv_attend = torch.ops.kvcompile.smartkv_attend.default
smartkv_observe = torch.ops.kvcompile.smartkv_observe.default
