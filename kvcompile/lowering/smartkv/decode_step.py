"""smartkv's attention over few queries by kernels: what they know, and their launches (``kernels``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import triton

from kvcompile import schemes
from kvcompile.lowering.host.launches import Launcher
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.smartkv.kernels import shape_of
from kvcompile.lowering.smartkv.kernels.mass import give
from kvcompile.lowering.smartkv.kernels.scores import score_keys
from kvcompile.lowering.smartkv.kernels.values import merge, weigh_values
from kvcompile.schemes import Smartkv
from kvcompile.schemes.smartkv.buckets import Buckets
from kvcompile.schemes.smartkv.importance import LEAST, Measure
from kvcompile.types import PAGE

QUERIES, ROWS = 8, 64
"""The most queries, and rows of a kv head, that kernels take: scores of all rows lie in memory."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

PROGRAMS = 528
"""Programs that a launch should have: four for each multiprocessor of an H100."""


def scheme_of(text: str) -> Smartkv:
    """The scheme that an operand spells."""
    scheme = schemes.parse(text)
    assert isinstance(scheme, Smartkv)
    return scheme


@dataclasses.dataclass(frozen=True)
class Step:
    """Operands of ``kvcompile::smartkv_attend``: those of ``attend``, and the planes that it moves on."""

    attend: AttendOperands[torch.Tensor]
    importance: torch.Tensor
    heads: torch.Tensor

    @property
    def schemes(self) -> tuple[Smartkv, Smartkv]:
        """The schemes of keys and values."""
        return scheme_of(self.attend.key_scheme), scheme_of(self.attend.value_scheme)


def step_gap(step: Step) -> str | None:
    """Why the kernels do not know a step, None where they do; for real tensors and fake ones."""
    q, planes = step.attend.q, step.attend.keys
    H, S, D, K = q.shape[1], q.shape[2], q.shape[3], planes[0].shape[2]
    if not all(isinstance(size, int) for size in (H, S, D, K)):
        return "a number of queries, heads or channels that changes from call to call"
    if S > QUERIES or S * (H // K) > ROWS:
        return f"{S} queries of {H // K} heads a kv head, where they take {QUERIES} and {ROWS} rows"
    if step.schemes[0].measure is not Measure.PEAK:
        return f"measure={step.schemes[0].measure.value}, where they know peak"
    if q.dtype not in DTYPES or D > 256:
        return f"queries of {q.dtype} and {D} channels"
    return None


def step_by_kernels(launcher: Launcher, step: Step) -> torch.Tensor:
    """The result [B, H, S, D] of a step without a gap; its kernels are started by ``launcher``."""
    operands = step.attend
    q, (key, value) = operands.q, step.schemes
    B, H, S, D = q.shape
    K = operands.keys[0].shape[2]
    G = H // K
    splits = _splits(B, K)
    tokens = step.importance.shape[0] * PAGE
    rows = triton.next_power_of_2(max(16, S * G))
    shape = {"G": G, "S": S, "R": rows, "CHANNELS": triton.next_power_of_2(max(16, D)), "SPLITS": splits}
    scores = q.new_empty((B, K, tokens, S * G), dtype=torch.float32)
    tops, sums = (q.new_empty((B, K, splits, rows), dtype=torch.float32) for _ in range(2))
    parts = q.new_empty((B, K, splits, rows, shape["CHANNELS"]), dtype=torch.float32)
    highest, whole = (q.new_empty((B, K, rows), dtype=torch.float32) for _ in range(2))
    out = q.new_empty((B, H, S, D))
    tile = {"TILE": 32 if q.dtype is torch.float32 else 64, "PACKED": launcher.cuda and _packs(q)}

    keys, values = Buckets.of(tuple(operands.keys), key.widths), Buckets.of(tuple(operands.values), value.widths)
    masks, constants = _masks(operands)
    grid = (splits, B * K)
    launcher.kernel(
        score_keys, grid, q, *keys.planes, *masks[:4], scores, tops, sums, keys.entering[0].shape[0], B, tokens,
        q.stride(0), q.stride(1), q.stride(2), *masks[4:], **shape, **shape_of(keys), **tile, SCALE=operands.scale,
        SOFTCAP=operands.softcap, **constants, warps=4,
    )
    launcher.kernel(
        weigh_values, grid, q, *values.planes, scores, tops, sums, q if operands.sinks is None else operands.sinks, parts, highest,
        whole, values.entering[0].shape[0], B, tokens, **shape, **shape_of(values), **tile,
        HAS_SINKS=operands.sinks is not None, warps=4,
    )
    launcher.kernel(
        give, (step.importance.shape[0], B), scores, highest, whole, step.heads, keys.first, step.importance, keys.entering[0].shape[0],
        B, tokens, K=K, G=G, S=S, R=rows, KV=triton.next_power_of_2(K), GROUP=triton.next_power_of_2(G), DECAY=key.decay,
        HEAD_DECAY=key.head_decay, LEAST=LEAST, warps=4,
    )
    launcher.kernel(merge, (S * G, B * K), parts, highest, whole, out, step.heads, K=K, D=D, **shape, DECAY=key.head_decay, warps=4)
    return out


def _packs(q: torch.Tensor) -> bool:
    """Whether machine code decodes four codes at a time to bfloat16 (``kernels.packed``)."""
    return q.dtype is torch.bfloat16 and q.shape[3] in {64, 128, 256}


def _splits(rows: Any, kv_heads: int) -> int:
    """Parts that a row's tokens are split into, a power of two; of a batch that changes, as for a small one."""
    pairs = rows * kv_heads if isinstance(rows, int) else 4 * kv_heads
    return int(triton.next_power_of_2(max(1, min(128, PROGRAMS // pairs))))


def _masks(operands: AttendOperands[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Limits and masks as ``score_keys`` takes them, four tensors and their strides, and its constants of them."""
    q, hi, lo, keep, bias = operands.q, operands.hi, operands.lo, operands.keep, operands.bias
    assert hi is not None
    kind = 0 if bias is None else 1 if bias.dtype is torch.bool else 2
    strides = (
        *_strides(hi), *((0, 0) if lo is None else _strides(lo)), *((0, 0, 0) if keep is None else (*_strides(keep), keep.shape[1])),
        *((0, 0, 0, 0, 0) if bias is None else (*_strides(bias), bias.shape[3])),
    )
    tensors = (hi, *(q if mask is None else mask for mask in (lo, keep, bias)))
    return (*tensors, *strides), {"HAS_LO": lo is not None, "HAS_KEEP": keep is not None, "BIAS_KIND": kind}


def _strides(mask: torch.Tensor) -> Sequence[Any]:
    """Strides, 0 where one entry serves all."""
    return [0 if isinstance(size, int) and size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
