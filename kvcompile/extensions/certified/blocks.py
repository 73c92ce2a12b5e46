"""Blocks of 16 tokens in certified attention: logits, masses, deviations, norms.

Further axes: Q = G * S queries of one kv head, N blocks. Logits are float32, as in the kernels; numbers derived from them are float64 and
follow the printed bounds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcompile.extensions.certified.scheme import BLOCK
from kvcompile.lowering.certificate.bound_printer import aten
from kvcompile.lowering.certificate.logits import NEAR, LogitInputs
from kvcompile.schemes.certificate import bounds

# Printed once, at import: Dynamo then sees plain functions.
_coded = aten(bounds.CODED)
_radius = aten(bounds.RADIUS)
_rounding = aten(bounds.ROUNDING)

def blocks(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [..., T] cut into blocks of 16 tokens, [..., N, 16]; T is a multiple of 16."""
    return x.unflatten(-1, (-1, BLOCK))


class Masses(NamedTuple):
    """Softmax mass of each block, as its largest logit ``peak`` and the sum ``weight`` of exp(logit - peak); both [B, K, Q, N]."""

    peak: torch.Tensor
    weight: torch.Tensor

    @property
    def log(self) -> torch.Tensor:
        """The logarithm of each block's softmax mass, float64 [B, K, Q, N]; minus infinity if no token of the block is visible."""
        return self.peak.to(torch.float64) + torch.log(self.weight.to(torch.float64))


def masses(logits: torch.Tensor) -> Masses:
    """Return the masses of the blocks of ``logits`` [B, K, Q, T]; hidden tokens' logits are minus infinity."""
    by_block = blocks(logits)
    peak = by_block.amax(-1)
    at = torch.where(torch.isneginf(peak), 0, peak)
    return Masses(peak, torch.exp(by_block - at.unsqueeze(-1)).sum(-1))


class Notes(NamedTuple):
    """Each block's largest token norm, float64 [B, K, N], of four tensors.

    ``kappa``: residuals of keys (full precision minus decoded); ``mu``: full-precision keys; ``eta``: residuals of values; ``nu``:
    full-precision values.
    """

    kappa: torch.Tensor
    mu: torch.Tensor
    eta: torch.Tensor
    nu: torch.Tensor


def norms(x_BKTD: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Return the largest norm |x_t|_2 of each block's tokens, float64 [B, K, N], rounded up; only tokens in the mask ``of`` count.

    ``of``: bool [B or 1, 1 or K, T].
    """
    each = torch.linalg.vector_norm(x_BKTD.to(torch.float64), dim=-1) * (1 + 2.0**-40)
    return blocks(torch.where(of, each, 0)).amax(-1)


def notes_of(
    key_notes: torch.Tensor, value_notes: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, alone: torch.Tensor, seen: torch.Tensor
) -> Notes:
    """Return the norms of each block: the stored notes, or for blocks wholly in the window the norms of their tokens.

    ``alone`` [B or 1, 1, N]: the blocks wholly in the window, which are in full precision, so their residuals are zero. ``seen``: the mask
    of tokens that count.
    """
    kappa, mu = key_notes.to(torch.float64).unbind(-1)
    eta, nu = value_notes.to(torch.float64).unbind(-1)
    zero = torch.zeros((), dtype=torch.float64, device=kappa.device)
    return Notes(
        torch.where(alone, zero, kappa), torch.where(alone, norms(keys, seen), mu),
        torch.where(alone, zero, eta), torch.where(alone, norms(values, seen), nu),
    )


class Deviations(NamedTuple):
    """Bounds on how far computed logits of each block are from exact ones, float64 [B, K, Q, N]: from codes, from full-precision keys."""

    codes: torch.Tensor
    originals: torch.Tensor


def deviations(
    scores: LogitInputs, steps: torch.Tensor, zeros: torch.Tensor, notes: Notes, live: torch.Tensor, alone: torch.Tensor
) -> Deviations:
    """Return the deviations of each block's logits by theorems 1 and 6, [B, K, Q, N], zero for blocks that are not ``live``.

    ``steps`` and ``zeros``: [B, K, N, D] of the key codes. ``alone``: blocks wholly in the window, which have no codes.
    """
    radius = _radius(step=steps, zero=zeros.abs())
    radius = torch.where(live.any(2).unsqueeze(-1), radius, 0)
    channels = scores.query.abs() @ radius.transpose(-1, -2)
    return block_deviations(scores.query, channels, notes, live, alone, scores.scale, scores.softcap)


def block_deviations(
    query: torch.Tensor, channels: torch.Tensor, notes: Notes, live: torch.Tensor, alone: torch.Tensor, scale: float, softcap: float
) -> Deviations:
    """Return the deviations of each block's logits from ``channels`` [B, K, Q, N], which holds sum_c |q_c| radius_c.

    ``query``: float32 [B, K, Q, D]. ``live``: blocks with a visible token; ``alone``: blocks wholly in the window, which have no codes.
    """
    query_norm = torch.linalg.vector_norm(query.to(torch.float64), dim=-1).unsqueeze(-1) * (1 + 2.0**-40)
    kappa, mu = notes.kappa.unsqueeze(2), notes.mu.unsqueeze(2)
    common = dict(query_norm=query_norm, mu=mu, scale=abs(scale), cap=softcap, peak=0.0)
    originals = _rounding(kappa=torch.zeros_like(kappa), terms=query.shape[-1] + 4.0, **common)
    codes = _coded(kappa=kappa, channels=channels.to(torch.float64), terms=query.shape[-1] + 8.0, **common)
    codes = torch.where(alone.unsqueeze(2), originals, codes)
    return Deviations(torch.where(live, codes, 0), torch.where(live, originals, 0))


def biased(deviation: torch.Tensor, live: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Return a logit's deviation, plus the rounding of a bias added to logits up to |``top``| [B, K, Q]; zero for blocks not ``live``."""
    peak = top.abs().to(torch.float64) + NEAR
    more = _rounding(kappa=0.0, mu=0.0, query_norm=0.0, scale=0.0, terms=0.0, cap=0.0, peak=peak)
    return torch.where(live, deviation + more.unsqueeze(-1), 0)
