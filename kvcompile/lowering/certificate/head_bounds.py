"""The certificate of one step: the three bounds of a head, from those of its blocks (theorems 2 to 6 of ``schemes.certificate.bounds``)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kvcompile.lowering.certificate.bound_printer import aten
from kvcompile.lowering.certificate.logits import total
from kvcompile.schemes.certificate import bounds
from kvcompile.schemes.certificate.policy import Cause, Certify

# Printed once, at import, so that Dynamo sees plain functions.
_accumulation = aten(bounds.ACCUMULATION)
_accumulation_term = aten(bounds.ACCUMULATION_TERM)
_center_norm = aten(bounds.CENTER_NORM)
_key = aten(bounds.KEY)
_key_term = aten(bounds.KEY_TERM)
_least_term = aten(bounds.LEAST_TERM)
_output_rounding = aten(bounds.OUTPUT_ROUNDING)
_shift_term = aten(bounds.SHIFT_TERM)
_total_term = aten(bounds.TOTAL_TERM)
_value = aten(bounds.VALUE)
_value_term = aten(bounds.VALUE_TERM)

CHAIN = 64.0
"""Rounding steps between a product and the output, exp's included: 16 products of a block are added in float32, blocks in float64."""

OUTWARD = 1 + 2.0**-50
"""Factor that covers the rounding of a float64 product and a sum."""

LEAST_NORMAL = 1e-300
"""Least divisor, below any nonzero sum: a head that sees no token divides zero by it."""

OUTPUT_UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
OUTPUT_TINY = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-25}


class Sum(NamedTuple):
    """The softmax of one step by blocks, relative to the largest logit: float64 [B, K, Q, N], and a sink's mass [B, K, Q].

    A block's mass is ``weight * exp(gap)``, ``gap`` its largest logit less the head's largest.
    """

    gap: torch.Tensor
    weight: torch.Tensor
    sink: torch.Tensor | float

    @property
    def total(self) -> torch.Tensor:
        """Total mass [B, K, Q], rounded down."""
        return (total(_total_term(weight=self.weight, gap=self.gap)) + self.sink * (1 - 2.0**-20)).clamp(min=LEAST_NORMAL)


class ValueBounds(NamedTuple):
    """Bounds on the values of each block, float64 [B, K, Q, N], zero for invisible blocks.

    ``nu``: on their norms; ``eta``: on the norms of their coding errors.
    """

    nu: torch.Tensor
    eta: torch.Tensor

    @property
    def vmax(self) -> torch.Tensor:
        """Bound on the norm of every visible full-precision value, [B, K, Q]."""
        return self.nu.amax(-1)


def value_terms(softmax: Sum, eta: torch.Tensor) -> torch.Tensor:
    """Return each block's term of the value bound, [B, K, Q, N]; the bound is their sum (theorem 5)."""
    mass_times_eta = _value_term(weight=softmax.weight, gap=softmax.gap, eta=eta)
    return _value(value_sum=mass_times_eta, total=softmax.total.unsqueeze(-1))


def key_bound(softmax: Sum, delta: torch.Tensor, values: ValueBounds, center: torch.Tensor) -> torch.Tensor:
    """Return a bound on the error of the output that comes from keys, [B, K, Q] (theorem 2).

    It covers all deviations ``delta`` of logits, rounding errors of exact keys included.
    """
    block = dict(weight=softmax.weight, gap=softmax.gap, delta=delta)
    least = total(_least_term(**block)) + softmax.sink * (1 - 2.0**-20)
    return _key(
        key_sum=total(_key_term(nu=values.nu, center=center.unsqueeze(-1), **block)), least=least.clamp(min=LEAST_NORMAL),
        shift=total(_shift_term(**block)), total=softmax.total, delta_max=delta.amax(-1), vmax=values.vmax, center=center,
    )


def accumulation(softmax: Sum, values: ValueBounds, chain: float) -> torch.Tensor:
    """Return a bound on the error of summing in float32, [B, K, Q] (theorem 6).

    ``chain``: rounding steps between a product and the output.
    """
    term = _accumulation_term(
        weight=softmax.weight, gap=softmax.gap, chain=chain, nu=values.nu, eta=values.eta,
        vmax=(values.nu + values.eta).amax(-1, keepdim=True),
    )
    return _accumulation(value_sum=total(term), total=softmax.total)


def norm(x: torch.Tensor) -> torch.Tensor:
    """Return |x|_2 over the last axis, [..., n] -> float64 [...], rounded up."""
    return torch.linalg.vector_norm(x.to(torch.float64), dim=-1) * (1 + 2.0**-40)


def output_rounding(size: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
    """Return a bound on the norm of the error of rounding a result to ``dtype``, in the shape of ``size``.

    ``size``: the result's norm; ``width``: its number of channels.
    """
    return _output_rounding(norm=size, out_unit=OUTPUT_UNIT[dtype], out_tiny=OUTPUT_TINY[dtype] * math.sqrt(width))


class Certificate(NamedTuple):
    """The three error bounds of each query, float64 [B, K, Q]; their sum bounds |output - exact output|_2."""

    key: torch.Tensor
    value: torch.Tensor
    arithmetic: torch.Tensor


def certificate(
    softmax: Sum, delta: torch.Tensor, values: ValueBounds, output: torch.Tensor, dtype: torch.dtype, chain: float = CHAIN
) -> Certificate:
    """Return the certificate of ``output`` [B, K, Q, Dv], which is given in its accumulator's precision and later rounded to ``dtype``.

    ``delta``: bounds on logits' deviations by block, float64 [B, K, Q, N]. ``chain``: rounding steps between a product and the output.
    """
    value, added = total(value_terms(softmax, values.eta)), accumulation(softmax, values, chain)
    size = norm(output)
    center = _center_norm(norm=size, value_sum=value + added, vmax=values.vmax)
    rounding = output_rounding(size, dtype, output.shape[-1])
    # A result beyond the dtype's range becomes infinite: its error has no bound.
    beyond = (torch.isinf(output.to(dtype)) & torch.isfinite(output)).any(-1)
    return Certificate(key_bound(softmax, delta, values, center), value, torch.where(beyond, math.inf, added + rounding))


def causes_of(certificate: Certificate, rules: Certify) -> torch.Tensor:
    """Return the reasons for which a head fails by its certificate alone, int64 [B, K, Q] of ``Cause`` bits."""
    finite = torch.isfinite(certificate.key + certificate.value + certificate.arithmetic)
    within = (certificate.key <= rules.key_budget) & (certificate.value <= rules.value_budget)
    return torch.where(finite, 0, int(Cause.NOT_FINITE)) | torch.where(within | ~finite, 0, int(Cause.BUDGET))
