"""Certificates of schemes that keep no originals: report only, there is nothing to fall back to.

Every token is a block of its own. How far a channel may be from its original is the scheme's ``radius``, by the scales and
zero points that are stored; so a logit deviates by sum_c |q_c| radius_c, and a value by the norm of its radius. The
theorems are those of ``schemes.bounds``, applied to attention over what the codes stand for, computed here in float64. How far the output
is from that is no bound but measured, and part of the arithmetic: so the certificate holds whatever multiplied, in whatever precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcompile import schemes
from kvcompile.errors import NotBounded
from kvcompile.lowering.certificate import head_bounds
from kvcompile.lowering.certificate.bound_printer import aten
from kvcompile.lowering.certificate.head_bounds import OUTPUT_TINY, OUTPUT_UNIT, Certificate, Sum, Values, norm
from kvcompile.lowering.certificate.logits import NEAR, Scores, gaps, visible_to_queries
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import decodable, with_recent
from kvcompile.schemes import Scheme
from kvcompile.schemes.base import _spread
from kvcompile.schemes.certificate import bounds
from kvcompile.schemes.certificate.bounds import Bound, Outward, Over
from kvcompile.types import Role, SlotSpec

_center_norm = aten(bounds.CENTER_NORM)
_deviation = aten(bounds.DEVIATION)
_rounding = aten(bounds.ROUNDING)

DOUBLE = 2.0**-28
"""A rounding step of float64 in those of float32, twice over."""

CHAIN = 2.0
"""All rounding steps of float64 between a product and the result, in those of float32: enough for 2^28 tokens."""


def decoded_with_radius(scheme: Scheme, planes: Sequence[torch.Tensor], slot: SlotSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode tokens, and bound how far every channel may be from its original; float32 [B, K, T, D]. Raises NotBounded."""
    expression = scheme.radius(slot)
    if expression is None:
        raise NotBounded(scheme=scheme.spell())
    tokens, fmt = decodable(scheme, planes, slot, slice(None)), scheme.format(slot)
    values = scheme.decode(tokens, slot)
    if not fmt.scaled:
        return values, torch.zeros_like(values)
    bound = Bound(f"radius of {scheme.name}", expression, Outward.UP, Over.CHANNEL, "1")
    stored = {"step": _spread(tokens[1], fmt).abs()}
    if fmt.zeros:
        stored["zero"] = _spread(tokens[2], fmt).abs()
    return values, aten(bound)(**stored)


def _stored_rounding(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far a number may be from one that was rounded to ``dtype`` and became ``x``."""
    return x.abs() * (2 * OUTPUT_UNIT[dtype]) + OUTPUT_TINY[dtype]


def _tokens(
    operands: AttendOperands[torch.Tensor], refilled: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values as attention sees them, and how far each channel of both may be from its original; float32 [B, K, T, D]."""
    q, recent, base, K = operands.q, operands.recent, operands.base, operands.keys[0].shape[2]
    key_slot, value_slot = SlotSpec(K, q.shape[3], q.dtype, Role.KEY), SlotSpec(K, operands.value_dim, q.dtype, Role.VALUE)
    k, key_radius = decoded_with_radius(schemes.parse(operands.key_scheme), operands.keys, key_slot)
    v, value_radius = decoded_with_radius(schemes.parse(operands.value_scheme), operands.values, value_slot)
    if not recent:
        return k, v, key_radius, value_radius
    assert base is not None
    place = torch.arange(k.shape[2], device=q.device)
    first = base if refilled is None else torch.maximum(base, refilled)
    new, exact = ((place >= at[:, None])[:, None, :, None] for at in (base, first))
    k, v = with_recent(k, recent[0], base), with_recent(v, recent[1], base)
    key_radius, value_radius = (
        torch.where(exact, 0, torch.where(new, radius + _stored_rounding(x, rows.dtype), radius))
        for radius, x, rows in zip((key_radius, value_radius), (k, v), recent, strict=True)
    )
    return k, v, key_radius, value_radius


def report_step(
    output: torch.Tensor, operands: AttendOperands[torch.Tensor], refilled: torch.Tensor | None = None
) -> tuple[Certificate, torch.Tensor]:
    """The certificate of what gave ``output`` for these operands of ``attend``, and the largest deviation of a logit; float64 [B, H, S].

    ``refilled``: int64 [B], the first of the ``recent`` tokens that is an original. Those before are what their codes stand for, as
    they were put back by a rollback, and are rounded to their dtype besides.
    """
    q, sinks, scale, softcap = operands.q, operands.sinks, operands.scale, operands.softcap
    B, H, S, D = q.shape
    K = operands.keys[0].shape[2]
    heads = (K, H // K)
    every = _tokens(operands, refilled)
    mask, extra = visible_to_queries(operands, heads, every[0].shape[2])
    seen = mask.any(2)[..., None]
    k, v, key_radius, value_radius = (torch.where(seen, x, 0) for x in every)

    k, v, query = (x.to(torch.float64) for x in (k, v, q.unflatten(1, heads).flatten(2, 3)))
    scores = Scores(query, mask, extra, scale, softcap)
    logits = scores.logits(scores.products(k))
    live = mask.expand(B, K, -1, -1)
    sink = None if sinks is None else sinks.to(torch.float64).view(K, heads[1], 1).expand(-1, -1, S).flatten(1).expand(B, -1, -1)
    top = logits.amax(-1) if sink is None else torch.maximum(logits.amax(-1), sink)
    top = torch.where(torch.isneginf(top), 0, top)
    own = 0.0 if sink is None else torch.exp(sink - top)
    softmax = Sum(gaps(logits, top, live), live.to(torch.float64), own)

    kappa = norm(key_radius).unsqueeze(2)
    common = dict(query_norm=norm(query).unsqueeze(-1), scale=abs(scale), terms=(D + 4) * DOUBLE, cap=softcap)
    channels = query.abs() @ key_radius.to(torch.float64).transpose(-1, -2)
    delta = _deviation(channels=channels, kappa=kappa, mu=norm(k).unsqueeze(2), peak=0.0, **common)
    if extra is not None:
        # As in ``blocks.biased``.
        peak = top.abs().unsqueeze(-1) + NEAR
        delta = delta + _rounding(kappa=0.0, mu=0.0, query_norm=0.0, scale=0.0, terms=0.0, cap=0.0, peak=peak)
    delta = torch.where(live, delta, 0)
    eta = torch.where(live, norm(value_radius).unsqueeze(2), 0)
    known = Values(torch.where(live, norm(v).unsqueeze(2), 0) + eta, eta)

    weights = softmax.weight * torch.exp(softmax.gap)
    mass = (weights.sum(-1) + own).unsqueeze(-1)
    exact = torch.where(mass == 0, 0, weights @ v / mass)
    apart = norm(output.unflatten(1, heads).flatten(2, 3).to(torch.float64) - exact)
    value = head_bounds.total(head_bounds.value_terms(softmax, eta))
    added = head_bounds.accumulation(softmax, known, CHAIN)
    center = _center_norm(norm=norm(exact), value_sum=value + added, vmax=known.vmax)
    found = Certificate(head_bounds.key_bound(softmax, delta, known, center), value, added + apart)
    by_head = [x.unflatten(2, (heads[1], S)).flatten(1, 2) for x in (*found, delta.amax(-1))]
    return Certificate(*by_head[:3]), by_head[3]
