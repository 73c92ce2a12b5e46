"""The hard quantizer of one slot's new tokens with the paper's pseudo-gradients ("Beyond", section 3.2), as an autograd function.

Forward: exactly the tokens that a store of the scheme would return, with minimum and step rounded to 16 bits alike. Backward, with
u = dL / d(value) times the group's scale, the gradient by the value in units of scales, and window w:

    tokens      dL / d(value), unchanged                                            (straight through, Eq. 7)
    level k     sum of u over the values in bin k
    t_k left    -(level_k - level_(k-1)) * sum of u over t_k - w <= x < t_k         (G_L)
    t_k right   -(level_k - level_(k-1)) * sum of u over t_k <= x < t_k + w         (G_R)

G_L and G_R are returned separately, as gradients of two operands that the forward does not read: half-wave rectification (Eq. 8) applies
to sums over the whole minibatch, after pieces and processes are added.

Both directions are tensor code of a few hundred nodes, each in one operator. On CUDA an operator runs its code compiled by Inductor,
once for all layers of one kind: traced into the model's graph it would be most of that graph, and two layers took 46 s to compile where
the operators took 13 s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.extensions.beyond.scheme import codes_of
from kvcompile.lowering.host.inductor_entry import exact_division
from kvcompile.lowering.ops.operations import LIBRARY
from kvcompile.schemes.asymmetric import in_scales, stored_range


@dataclass(frozen=True)
class QuantizerConfig:
    """The constants of a quantizer: bits of a code, dtype of stored scales, and the window of thresholds' gradients in units of scales."""

    bits: int
    scale_dtype: torch.dtype
    window: float

    @property
    def steps(self) -> int:
        """The number of scales that a group spans, 2^bits - 1."""
        return 2**self.bits - 1


def _spread(table_KGn: torch.Tensor) -> torch.Tensor:
    """Return a table [K, D // group, n] as [K, 1, D // group, 1, n], to broadcast over groups [B, K, S, D // group, group]."""
    return table_KGn[:, None, :, None]


def _places(x_BKSD: torch.Tensor, groups: int, rule: QuantizerConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values in units of scales [B, K, S, D // group, group], and the stored scales and zero points [B, K, S, D // group, 1]."""
    grouped = x_BKSD.to(torch.float32).unflatten(-1, (groups, x_BKSD.shape[-1] // groups))
    scale, zero = stored_range(grouped, -1, rule.steps, rule.scale_dtype)
    return in_scales(grouped, scale, zero), scale, zero


def level_mapped(x_BKSD: torch.Tensor, levels: torch.Tensor, thresholds: torch.Tensor, rule: QuantizerConfig) -> torch.Tensor:
    """Return tokens [B, K, S, D] quantized and decoded, in their dtype.

    ``levels`` and ``thresholds``: float32 [K, D // group, 2^bits] and [K, D // group, 2^bits - 1].
    """
    place, scale, zero = _places(x_BKSD, levels.shape[1], rule)
    codes = codes_of(place, _spread(thresholds)).to(torch.int64)
    chosen = _spread(levels).expand(*codes.shape, -1).gather(-1, codes.unsqueeze(-1)).squeeze(-1)
    return (chosen * scale.to(torch.float32) + zero.to(torch.float32)).flatten(-2).to(x_BKSD.dtype).contiguous()


class HardQuantizer(torch.autograd.Function):
    """``level_mapped`` with pseudo-gradients, for the operands tokens, levels, thresholds, left, right, rule. See the module."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, levels: torch.Tensor, thresholds: torch.Tensor, left: torch.Tensor, right: torch.Tensor,
                rule: QuantizerConfig) -> torch.Tensor:
        """Return tokens ``x`` [B, K, S, D] encoded with ``levels`` and ``thresholds`` and decoded again, in the same shape.

        ``left`` and ``right`` are not read: they only receive gradients.
        """
        del left, right
        ctx.save_for_backward(x, levels, thresholds)
        ctx.rule = rule
        return torch.ops.kvcompile.level_mapped(x, levels, thresholds, rule.bits, rule.scale_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the operands' gradients: straight through to the tokens, none for thresholds, whose G_L and G_R go to left and right."""
        (grad,), (x, levels, thresholds) = grads, ctx.saved_tensors
        rule = ctx.rule
        by_level, left, right = torch.ops.kvcompile.table_gradients(
            grad, x, levels, thresholds, rule.bits, rule.scale_dtype, rule.window
        )
        return grad, by_level, None, left, right, None


def table_gradients(
    grad: torch.Tensor, x: torch.Tensor, levels: torch.Tensor, thresholds: torch.Tensor, rule: QuantizerConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (by levels [K, G, n], G_L, G_R [K, G, n - 1]) from dL / d(value) [B, K, S, D]; float32, in units of scales."""
    place, scale, _ = _places(x, levels.shape[1], rule)
    weight = grad.to(torch.float32).unflatten(-1, place.shape[-2:]) * scale.to(torch.float32)
    codes = codes_of(place, _spread(thresholds))

    def total(chosen: torch.Tensor) -> torch.Tensor:
        return torch.where(chosen, weight, 0.0).sum((0, 2, 4))

    by_level = torch.stack([total(codes == at) for at in range(levels.shape[-1])], -1)
    jumps = levels.diff(dim=-1)
    left, right = [], []
    for at in range(thresholds.shape[-1]):
        distance = place - _spread(thresholds)[..., at]
        left.append(total((distance >= -rule.window) & (distance < 0)))
        right.append(total((distance >= 0) & (distance < rule.window)))
    return by_level, -jumps * torch.stack(left, -1), -jumps * torch.stack(right, -1)


def rectified(left: torch.Tensor, right: torch.Tensor, half_wave: bool = True) -> torch.Tensor:
    """Return the gradient of the thresholds from ``left`` and ``right``, the sums G_L and G_R of a whole minibatch, in their shape (Eq. 8).

    ``half_wave``: keep only the positive part of G_L and the negative part of G_R; False: return their plain sum (Table 3).
    """
    return left.clamp(min=0) + right.clamp(max=0) if half_wave else left + right


def hard_quantize(
    x: torch.Tensor, levels: torch.Tensor, thresholds: torch.Tensor, left: torch.Tensor, right: torch.Tensor, bits: int,
    scale_dtype: torch.dtype, window: float,
) -> torch.Tensor:
    """Return the tokens ``x`` [B, K, S, D] quantized and decoded, in their dtype; gradients reach x, levels, left and right.

    ``levels`` [K, D // group, n] and ``thresholds`` [K, D // group, n - 1] are in units of scales. ``left`` and ``right``, of the shape of
    ``thresholds``, are not read: their gradients are G_L and G_R (see the module), sums over values within ``window`` below and above a
    threshold. Training graphs call this.
    """
    return HardQuantizer.apply(x, levels, thresholds, left, right, QuantizerConfig(bits, scale_dtype, window))


@functools.cache
def _code(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Return ``function`` compiled by Inductor for the device type "cuda", unchanged for others."""
    return compiled(function) if device == "cuda" else function


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled by Inductor with eager's division; batches of many lengths share a few compilations."""
    return torch.compile(function, fullgraph=True, options=exact_division())


def _level_mapped(
    x: torch.Tensor, levels: torch.Tensor, thresholds: torch.Tensor, bits: int, scale_dtype: torch.dtype
) -> torch.Tensor:
    # Compiled graphs rely on the strides of the meta function.
    return _code(level_mapped, x.device.type)(x, levels, thresholds, QuantizerConfig(bits, scale_dtype, 0.0)).contiguous()


def _table_gradients(
    grad: torch.Tensor, x: torch.Tensor, levels: torch.Tensor, thresholds: torch.Tensor, bits: int, scale_dtype: torch.dtype, window: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if x.device.type == "cuda":
        from kvcompile.extensions.beyond import table_sums

        if table_sums.known(x, levels.shape[1]):
            with torch.cuda.device_of(x):
                by_level, left, right = table_sums.sums(grad, x, thresholds, bits, scale_dtype, window)
            jumps = levels.diff(dim=-1)
            return by_level, -jumps * left, -jumps * right
    return _code(table_gradients, x.device.type)(grad, x, levels, thresholds, QuantizerConfig(bits, scale_dtype, window))


def _level_mapped_meta(x: torch.Tensor, *rest: object) -> torch.Tensor:
    del rest
    return x.new_empty(x.shape)


def _table_gradients_meta(
    grad: torch.Tensor, x: torch.Tensor, levels: torch.Tensor, thresholds: torch.Tensor, *rest: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    del grad, x, rest
    return levels.new_empty(levels.shape), thresholds.new_empty(thresholds.shape), thresholds.new_empty(thresholds.shape)


LIBRARY.define("level_mapped(Tensor x, Tensor levels, Tensor thresholds, int bits, ScalarType scale_dtype) -> Tensor")
LIBRARY.define(
    "table_gradients(Tensor grad, Tensor x, Tensor levels, Tensor thresholds, int bits, ScalarType scale_dtype, float window)"
    " -> (Tensor, Tensor, Tensor)"
)
LIBRARY.impl("level_mapped", _level_mapped, "CompositeExplicitAutograd")
LIBRARY.impl("level_mapped", _level_mapped_meta, "Meta")
LIBRARY.impl("table_gradients", _table_gradients, "CompositeExplicitAutograd")
LIBRARY.impl("table_gradients", _table_gradients_meta, "Meta")
