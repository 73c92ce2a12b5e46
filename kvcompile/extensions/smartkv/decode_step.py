"""smartkv's attention over few queries by kernels: the calls they support, and their launches (``kernels``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import triton

from kvcompile import schemes
from kvcompile.extensions.smartkv.buckets import Buckets
from kvcompile.extensions.smartkv.importance import LEAST_IMPORTANCE, Measure
from kvcompile.extensions.smartkv.kernels import bits_of_levels
from kvcompile.extensions.smartkv.kernels.attend import attend_tokens
from kvcompile.extensions.smartkv.kernels.finish import CHUNK, ELEMENTS, finish
from kvcompile.extensions.smartkv.scheme import Smartkv
from kvcompile.lowering.host.launches import Launcher
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.types import PAGE

QUERIES, ROWS = 8, 64
"""The largest numbers of queries, and of rows of a kv head, that the kernels support: scores of all rows are kept in memory."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

PROGRAMS, SPLITS = 1024, 128
"""Programs that a launch should have, eight of one warp per multiprocessor; the largest number of splits of a row."""


def scheme_of(text: str) -> Smartkv:
    """Return the scheme parsed from an operand's text."""
    scheme = schemes.parse(text)
    assert isinstance(scheme, Smartkv)
    return scheme


@dataclasses.dataclass(frozen=True)
class DecodeStepOperands:
    """Operands of ``kvcompile::smartkv_attend``: those of ``attend``, and the planes ``importance`` and ``heads`` that it updates."""

    attend: AttendOperands[torch.Tensor]
    importance: torch.Tensor
    heads: torch.Tensor

    @property
    def schemes(self) -> tuple[Smartkv, Smartkv]:
        """The schemes of keys and values."""
        return scheme_of(self.attend.key_scheme), scheme_of(self.attend.value_scheme)


def step_gap(step: DecodeStepOperands) -> str | None:
    """Return the reason why the kernels do not support a step, None if the kernels support it; takes real tensors and fake ones."""
    q, planes = step.attend.q, step.attend.keys
    H, S, D, K = q.shape[1], q.shape[2], q.shape[3], planes[0].shape[2]
    if not all(isinstance(size, int) for size in (H, S, D, K)):
        return "a number of queries, heads or channels that changes from call to call"
    if S > QUERIES or S * (H // K) > ROWS:
        return f"{S} queries of {H // K} heads a kv head, where they take {QUERIES} and {ROWS} rows"
    if step.schemes[0].measure is not Measure.PEAK:
        return f"measure={step.schemes[0].measure.value}, where the kernels support peak only"
    if q.dtype not in DTYPES or D > 256:
        return f"queries of {q.dtype} and {D} channels"
    return None


def step_by_kernels(launcher: Launcher, step: DecodeStepOperands, tells: bool = True) -> torch.Tensor:
    """Return the result [B, H, S, D] of a step for which ``step_gap`` is None; ``launcher`` starts its kernels.

    ``tells``: whether to update importance; a benchmark passes False to measure what the update costs.
    """
    operands = step.attend
    q, (key, value) = operands.q, step.schemes
    B, H, S, D = q.shape
    K = operands.keys[0].shape[2]
    G = H // K
    splits = _splits(B, K)
    slots = step.importance.shape[0] * PAGE
    R = triton.next_power_of_2(max(8, S * G))
    wide = q.dtype is torch.float32
    keys, values = Buckets.of(tuple(operands.keys), key.form), Buckets.of(tuple(operands.values), value.form)
    pages = keys.entering[0].shape[0]
    scores = q.new_empty((B, K, slots, S * G), dtype=torch.float32 if wide else torch.float16)
    parts = q.new_empty((B, K, splits, D, S * G), dtype=torch.float32)
    stats = q.new_empty((B, K, 4, R, splits), dtype=torch.float32)
    weights, out = q.new_empty((B, K), dtype=torch.float32), q.new_empty((B, H, S, D))
    shape = {"K": K, "G": G, "S": S, "R": R, "SPLITS": splits}
    masks, constants = _masks(operands)
    columns = triton.next_power_of_2(max(16, D // 8))
    firsts = {f"FROM_{bits}": sum(each < bits for each in keys.widths) for bits in (3, 4, 8)}
    launcher.kernel(
        attend_tokens, (splits, B * K), q, *keys.entering, keys.ends, keys.scales, keys.pool, q if keys.mean is None else keys.mean,
        *values.entering, values.ends, values.scales, values.pool, keys.first, keys.where, *masks[:4], step.heads, scores, parts, stats,
        weights, pages, B, slots, q.stride(0), q.stride(1), q.stride(2), *masks[4:], **shape, C=D // 8, COLUMNS=columns,
        LEVELS=len(key.levels), **firsts, VALUE_BITS=bits_of_levels(values.widths), TURNED=keys.mean is not None,
        PACKED=launcher.cuda and not wide, SCALE=operands.scale, SOFTCAP=operands.softcap, **constants, TELLS=tells,
        # One warp has the registers for the sums of eight rows of 16 channels in each run, two for those of 64. Four warps would compile to
        # warp-group MMA instructions, which are untested here.
        warps=4 if wide else 1 if columns * R <= 128 else 2,
    )
    telling = (slots + CHUNK.value - 1) // CHUNK.value + 1 if tells else 0
    programs = K * triton.cdiv(D * G * S, ELEMENTS.value) + telling
    launcher.kernel(
        finish, (programs, B), parts, stats, scores, weights, q if operands.sinks is None else operands.sinks, keys.first, keys.where,
        masks[0], out, step.heads, step.importance, pages, B, slots, *masks[4:6], **shape, D=D, KV=triton.next_power_of_2(K),
        GROUP=triton.next_power_of_2(G), DECAY=key.decay, HEAD_DECAY=key.head_decay, LEAST=LEAST_IMPORTANCE,
        HAS_SINKS=operands.sinks is not None,
        warps=4,
    )
    return out


def _splits(rows: Any, kv_heads: int) -> int:
    """Return the number of splits into which a row's tokens are divided, a power of two; for a symbolic batch, that of a batch of four."""
    pairs = rows * kv_heads if isinstance(rows, int) else 4 * kv_heads
    return int(triton.next_power_of_2(max(1, min(SPLITS, PROGRAMS // pairs))))


def _masks(operands: AttendOperands[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the limits and masks for ``attend_tokens``, four tensors and then their strides, and the kernel constants that they imply."""
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
    """Return the strides of a mask, 0 along dims of size 1."""
    return [0 if isinstance(size, int) and size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
