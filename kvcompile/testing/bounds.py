"""The bound that a scheme announces, evaluated for given values: ``AMAX``, ``SPREAD`` and ``NORM`` of each channel's own group."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import sympy
import torch

from kvcompile.schemes import AMAX, SPREAD, Scheme
from kvcompile.schemes.base import NORM
from kvcompile.testing.samples import whole_blocks, whole_write
from kvcompile.types import SlotSpec


def _by_group(scheme: Scheme, x_BKSD: torch.Tensor, spec: SlotSpec, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return ``reduce`` of each group of values that share a scale, at every channel of the group, float64 [B, K, S, D].

    ``reduce``: (tensor, dims, keepdim) -> tensor, such as ``torch.amax``. Tokens are divided by their norms first if the scheme does so.
    """
    fmt = scheme.format(spec)
    x = whole_blocks(scheme, x_BKSD / norms_of(scheme, x_BKSD, spec)).to(torch.float64)
    grouped = x.unflatten(-1, (-1, fmt.group)).unflatten(2, (-1, fmt.block))
    grouped = reduce(reduce(grouped, -1, True), 3, True)
    if whole_write(scheme):
        grouped = reduce(grouped, (1, 2, 3, 4), True).expand(grouped.shape)
    grouped = grouped.expand(*grouped.shape[:3], fmt.block, grouped.shape[4], fmt.group)
    return grouped.flatten(4).flatten(2, 3)[:, :, : x_BKSD.shape[2]]


def norms_of(scheme: Scheme, x_BKSD: torch.Tensor, spec: SlotSpec) -> torch.Tensor:
    """Return the norm by which each token is divided before it is encoded, float64 [B, K, S, 1]; 1 without norms, and for zeros."""
    fmt = scheme.format(spec)
    if not fmt.norms:
        return torch.ones(*x_BKSD.shape[:3], 1, dtype=torch.float64, device="cpu")
    found = scheme.encode(whole_blocks(scheme, x_BKSD))[fmt.norms_at][:, :, : x_BKSD.shape[2]].to(torch.float64)
    return torch.where(found == 0, 1.0, found)


def amax_of(scheme: Scheme, x_BKSD: torch.Tensor, spec: SlotSpec) -> torch.Tensor:
    """Return the largest magnitude in the group of each channel, float64 [B, K, S, D]; a group shares one scale."""
    return _by_group(scheme, x_BKSD, spec, lambda x, *rest: torch.amax(x.abs(), *rest))


def largest_of(scheme: Scheme, x_BKSD: torch.Tensor, spec: SlotSpec) -> torch.Tensor:
    """Return the largest magnitude in each channel's group, or in its token under a scheme with norms, float64 [B, K, S, 1 or D]."""
    if scheme.format(spec).norms:
        return x_BKSD.abs().to(torch.float64).amax(-1, keepdim=True)
    return amax_of(scheme, x_BKSD, spec)


def spread_of(scheme: Scheme, x_BKSD: torch.Tensor, spec: SlotSpec) -> torch.Tensor:
    """Return the largest less the smallest value in each channel's group, float64 [B, K, S, D]."""
    return _by_group(scheme, x_BKSD, spec, torch.amax) - _by_group(scheme, x_BKSD, spec, torch.amin)


@functools.cache
def _function(bound: sympy.Expr) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    return sympy.lambdify((AMAX, SPREAD, NORM), bound, "numpy")


def bound_of(scheme: Scheme, x_BKSD: torch.Tensor, spec: SlotSpec) -> torch.Tensor:
    """Return the error bound of each channel of ``x_BKSD``, float64 [B, K, S, D], from the scheme's ``bound``.

    The scheme must announce one: an AssertionError otherwise.
    """
    amax, spread, norm = amax_of(scheme, x_BKSD, spec), spread_of(scheme, x_BKSD, spec), norms_of(scheme, x_BKSD, spec)
    bound = scheme.bound(spec)
    assert bound is not None, f"{scheme.name} announces no bound"
    value = np.broadcast_to(np.asarray(_function(bound)(amax.numpy(), spread.numpy(), norm.numpy()), dtype=np.float64), amax.shape)
    return torch.from_numpy(value.copy())
