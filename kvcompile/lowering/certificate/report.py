"""Certificates of schemes that keep no full-precision tokens: report only, since there is nothing to fall back to.

Every token is a block of its own. The scheme's ``radius`` bounds each channel's distance from its full-precision value, by the stored
scales and zero points; so a logit deviates by at most sum_c |q_c| radius_c, and a value by the norm of its radius. If the error of a
channel's code was added to other channels before they were encoded, by a stored matrix M, then k' - k = e (I + M), and a logit deviates
by at most sum_c |((I + M) q)_c| radius_c: less than without M, if M moves the error away from the directions of q. The theorems are those
of ``schemes.certificate.bounds``, applied to attention over the decoded tokens, which is computed here in float64. The output's distance
from that result is measured, not bounded, and counts as arithmetic: so the certificate holds for any kernel, in any precision.

Keys and values that are stored with rotated channels are compared in rotated form, which keeps lengths. The rounding of tokens, queries
and results by that rotation is added (``Turning``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcompile import schemes
from kvcompile.errors import NotBounded
from kvcompile.lowering.certificate import head_bounds
from kvcompile.lowering.certificate.bound_printer import aten
from kvcompile.lowering.certificate.head_bounds import OUTPUT_TINY, OUTPUT_UNIT, Certificate, Sum, ValueBounds, norm
from kvcompile.lowering.certificate.logits import NEAR, LogitInputs, gaps, visible_to_queries
from kvcompile.lowering.ops.keep_first import origins
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import decodable, with_exact_rows
from kvcompile.schemes import Scheme
from kvcompile.schemes.base import _spread
from kvcompile.schemes.certificate import bounds
from kvcompile.schemes.certificate.bounds import Bound, BoundUnit, Outward
from kvcompile.schemes.rotation import Rotation, rounding
from kvcompile.types import Role, SlotSpec

_center_norm = aten(bounds.CENTER_NORM)
_deviation = aten(bounds.DEVIATION)
_rounding = aten(bounds.ROUNDING)

DOUBLE = 2.0**-28
"""A rounding step of float64 in units of float32 steps, doubled."""

CHAIN = 2.0
"""All float64 rounding steps between a product and the result, in units of float32 steps: enough for 2^28 tokens."""


def decoded_with_radius(scheme: Scheme, planes: Sequence[torch.Tensor], slot: SlotSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return decoded tokens, and a bound on each channel's distance from full precision; both float32 [B, K, T, D].

    Raises NotBounded for a scheme without a bound.
    """
    expression = scheme.radius(slot)
    if expression is None:
        raise NotBounded(scheme=scheme.spec())
    tokens, fmt = decodable(scheme, planes, slot, slice(None)), scheme.format(slot)
    values = scheme.decode(tokens, slot)
    if not fmt.scaled:
        return values, torch.zeros_like(values)
    bound = Bound(f"radius of {scheme.name}", expression, Outward.UP, BoundUnit.CHANNEL, "1")
    stored = {"step": _spread(tokens[1], fmt).abs()}
    if fmt.zeros:
        stored["zero"] = _spread(tokens[2], fmt).abs()
    if fmt.norms:
        stored = {name: plane * tokens[fmt.norms_at].to(torch.float32) for name, plane in stored.items()}
    return values, aten(bound)(**stored)


@dataclass(frozen=True)
class Errors:
    """Bounds on the distance of keys or values from their full-precision tokens, by channel; float32 [B, K, T, D].

    ``own``: error of the codes. ``rest``: rounding errors. ``error_feedback`` [1 or B, K, D, D]: channel i's own error times row i was
    added to other channels before they were encoded; None without.
    """

    own: torch.Tensor
    rest: torch.Tensor
    error_feedback: torch.Tensor | None = None

    @staticmethod
    def of(values: torch.Tensor, own: torch.Tensor, error_feedback: torch.Tensor | None) -> Errors:
        """Return the errors of decoded ``values`` whose codes are off by at most ``own``.

        An error that is fed back to another channel is a product in float32 or in torch's matmul precision, bfloat16 at worst: 2^-8 of it
        is lost, and the error itself was rounded by 2^-21 of the value. At most 255 additions round the channel by 2^-16 of itself.
        """
        if error_feedback is None:
            return Errors(own, torch.zeros_like(own))
        size = values.abs()
        added = (own / 32 + size * 2.0**-20) @ error_feedback.abs()
        return Errors(own, added + own / 64 + size * 2.0**-16, error_feedback)

    def where(self, condition: torch.Tensor, rest: torch.Tensor | float) -> Errors:
        """Return these errors, but with no code error, and ``rest`` as the other error, for tokens where ``condition`` is True."""
        return Errors(torch.where(condition, 0, self.own), torch.where(condition, rest, self.rest), self.error_feedback)

    def every(self) -> torch.Tensor:
        """Return a bound on each channel's total error, float64 [B, K, T, D]."""
        own, rest = self.own.to(torch.float64), self.rest.to(torch.float64)
        return own + rest if self.error_feedback is None else own + own @ self.error_feedback.abs().to(torch.float64) + rest

    def along(self, query: torch.Tensor) -> torch.Tensor:
        """Return bounds on the errors of products of tokens with ``query``, float64 [B, K, N, D] -> [B, K, N, T]."""
        own, rest = (x.to(torch.float64).transpose(-1, -2) for x in (self.own, self.rest))
        turned = query if self.error_feedback is None else query + query @ self.error_feedback.to(torch.float64).transpose(-1, -2)
        return turned.abs() @ own + query.abs() @ rest


@dataclass(frozen=True)
class Turning:
    """Bounds on the rounding errors that a rotation of channels adds.

    Tokens are rotated and rounded to ``dtype`` before storage, and results are rotated back. ``rotation`` None: the store does not rotate,
    and all bounds are 0.
    """

    rotation: Rotation | None
    head_dim: int
    dtype: torch.dtype

    def rest(self, values: torch.Tensor, own: torch.Tensor) -> torch.Tensor | float:
        """Return a bound on the error that rotation adds to each channel of ``values`` [B, K, T, D]; 0.0 if the store does not rotate.

        It covers rounding of the stored token and, for keys, of the query. ``own``: the bound on the codes' error.
        """
        if self.rotation is None:
            return 0.0
        size = values.abs() + own
        length = torch.linalg.vector_norm(size, dim=-1, keepdim=True)
        return 2 * _stored_rounding(size, self.dtype) + rounding(self.rotation.order, self.head_dim) * length

    def result(self, size: torch.Tensor) -> torch.Tensor | float:
        """Return a bound on the error that rotating back adds to a result of norm ``size``; 0.0 if channels are not rotated."""
        if self.rotation is None:
            return 0.0
        tiny = OUTPUT_TINY[self.dtype] * math.sqrt(self.head_dim)
        return size * (OUTPUT_UNIT[self.dtype] + math.sqrt(self.head_dim) * rounding(self.rotation.order, self.head_dim)) + tiny


def _stored_rounding(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a bound, by element, on the distance of ``x`` from the number that became ``x`` by rounding to ``dtype``."""
    return x.abs() * (2 * OUTPUT_UNIT[dtype]) + OUTPUT_TINY[dtype]


def _tokens(
    operands: AttendOperands[torch.Tensor], refilled: torch.Tensor | None, error_feedback: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, Errors, Errors]:
    """Return keys and values as attention sees them, float32 [B, K, T, D], and the bounds on the errors of both."""
    q, exact_newest, base, K = operands.q, operands.exact_newest, operands.base, operands.keys[0].shape[2]
    key_slot, value_slot = SlotSpec(K, q.shape[3], q.dtype, Role.KEY), SlotSpec(K, operands.value_dim, q.dtype, Role.VALUE)
    k, key_radius = decoded_with_radius(schemes.parse(operands.key_scheme), operands.keys, key_slot)
    v, value_radius = decoded_with_radius(schemes.parse(operands.value_scheme), operands.values, value_slot)
    key, value = Errors.of(k, key_radius, error_feedback), Errors.of(v, value_radius, None)
    place = torch.arange(k.shape[2], device=q.device)
    if exact_newest:
        assert base is not None
        first = base if refilled is None else torch.maximum(base, refilled)
        new, exact = ((place >= at[:, None])[:, None, :, None] for at in (base, first))
        k, v = with_exact_rows(k, exact_newest[0], base), with_exact_rows(v, exact_newest[1], base)
        key, value = (
            Errors(errors.own, errors.rest + torch.where(new, _stored_rounding(x, rows.dtype), 0), errors.error_feedback).where(exact, 0)
            for errors, x, rows in zip((key, value), (k, v), exact_newest, strict=True)
        )
    if operands.exact_first:
        at = origins(operands.exact_first_at, q.device)[:, None]
        exact_first = ((place >= at) & (place < at + operands.exact_first[0].shape[3]))[:, None, :, None]
        k, v = (with_exact_rows(x, rows[0], at[:, 0]) for x, rows in zip((k, v), operands.exact_first, strict=True))
        key, value = (errors.where(exact_first, 0) for errors in (key, value))
    turned = zip((key, value), (k, v), turnings(operands), strict=True)
    key, value = (Errors(errors.own, errors.rest + turning.rest(x, errors.own), errors.error_feedback) for errors, x, turning in turned)
    return k, v, key, value


def turnings(operands: AttendOperands[torch.Tensor]) -> tuple[Turning, Turning]:
    """Return the ``Turning`` of keys and of values, from the rotations of their schemes."""
    q, K = operands.q, operands.keys[0].shape[2]
    slots = SlotSpec(K, q.shape[3], q.dtype, Role.KEY), SlotSpec(K, operands.value_dim, q.dtype, Role.VALUE)
    spelled = operands.key_scheme, operands.value_scheme
    return tuple(  # type: ignore[return-value]
        Turning(schemes.parse(text).rotation(slot), slot.head_dim, q.dtype) for text, slot in zip(spelled, slots, strict=True)
    )


def report_step(
    output: torch.Tensor, operands: AttendOperands[torch.Tensor], refilled: torch.Tensor | None = None,
    error_feedback: torch.Tensor | None = None,
) -> tuple[Certificate, torch.Tensor]:
    """Return the certificate of ``output`` for its operands of ``attend``, and the largest deviation of a logit; all float64 [B, H, S].

    ``refilled``: int64 [B], position of the first ``exact_newest`` token in full precision; earlier ones were decoded from their codes by a
    rollback, and rounded to their dtype; None: all are in full precision. ``error_feedback``: the keys' plane
    ``Scheme.error_feedback_plane``, float32 [1 or B, K, D, D]; None without.
    """
    q, sinks, scale, softcap = operands.q, operands.sinks, operands.scale, operands.softcap
    B, H, S, D = q.shape
    K = operands.keys[0].shape[2]
    heads = (K, H // K)
    k, v, key_errors, value_errors = _tokens(operands, refilled, error_feedback)
    mask, extra = visible_to_queries(operands, heads, k.shape[2])
    seen = mask.any(2)[..., None]
    k, v = (torch.where(seen, x, 0) for x in (k, v))
    key_errors, value_errors = (errors.where(~seen, 0) for errors in (key_errors, value_errors))

    k, v, query = (x.to(torch.float64) for x in (k, v, q.unflatten(1, heads).flatten(2, 3)))
    scores = LogitInputs(query, mask, extra, scale, softcap)
    logits = scores.logits(scores.products(k))
    live = mask.expand(B, K, -1, -1)
    sink = None if sinks is None else sinks.to(torch.float64).view(K, heads[1], 1).expand(-1, -1, S).flatten(1).expand(B, -1, -1)
    top = logits.amax(-1) if sink is None else torch.maximum(logits.amax(-1), sink)
    top = torch.where(torch.isneginf(top), 0, top)
    own = 0.0 if sink is None else torch.exp(sink - top)
    softmax = Sum(gaps(logits, top, live), live.to(torch.float64), own)

    kappa = norm(key_errors.every()).unsqueeze(2)
    common = dict(query_norm=norm(query).unsqueeze(-1), scale=abs(scale), terms=(D + 4) * DOUBLE, cap=softcap)
    delta = _deviation(channels=key_errors.along(query), kappa=kappa, mu=norm(k).unsqueeze(2), peak=0.0, **common)
    if extra is not None:
        # As in ``blocks.biased``.
        peak = top.abs().unsqueeze(-1) + NEAR
        delta = delta + _rounding(kappa=0.0, mu=0.0, query_norm=0.0, scale=0.0, terms=0.0, cap=0.0, peak=peak)
    delta = torch.where(live, delta, 0)
    eta = torch.where(live, norm(value_errors.every()).unsqueeze(2), 0)
    known = ValueBounds(torch.where(live, norm(v).unsqueeze(2), 0) + eta, eta)

    weights = softmax.weight * torch.exp(softmax.gap)
    mass = (weights.sum(-1) + own).unsqueeze(-1)
    exact = torch.where(mass == 0, 0, weights @ v / mass)
    apart = norm(output.unflatten(1, heads).flatten(2, 3).to(torch.float64) - exact)
    value = head_bounds.total(head_bounds.value_terms(softmax, eta))
    added = head_bounds.accumulation(softmax, known, CHAIN)
    center = _center_norm(norm=norm(exact), value_sum=value + added, vmax=known.vmax)
    turned = turnings(operands)[1].result(norm(exact) + apart)
    found = Certificate(head_bounds.key_bound(softmax, delta, known, center), value, added + apart + turned)
    by_head = [x.unflatten(2, (heads[1], S)).flatten(1, 2) for x in (*found, delta.amax(-1))]
    return Certificate(*by_head[:3]), by_head[3]
