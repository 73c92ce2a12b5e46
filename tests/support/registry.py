"""The registry as test parameters: every scheme joins every test of all schemes by being registered, the example's too."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import sympy
import torch
from add_a_scheme import Fp4

from kvcompile import schemes
from kvcompile.errors import SchemeError
from kvcompile.schemes import AMAX, SPREAD, Scheme
from kvcompile.schemes.base import NORM
from kvcompile.types import Extent, PlaneSpec, Role, SlotSpec

SCHEMES = (*schemes.SCHEMES, Fp4)
"""Those of the package, and one that is registered from outside; not what a test registers for itself."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 80, 96, 128, 256)
SHAPES = ((1, 1, 1), (3, 2, 63), (1, 8, 64), (3, 1, 65), (1, 1, 1000), (3, 8, 2))
"""(B, K, T): every batch size, head count and length at least once, the large ones not all at once."""

VARIANTS = tuple(dict.fromkeys(variant.for_role(role) for scheme in SCHEMES for variant in scheme.variants() for role in Role))
"""Every setting of every scheme, as keys and as values where those differ."""

each_scheme = pytest.mark.parametrize("cls", SCHEMES, ids=lambda cls: cls.name)
each_variant = pytest.mark.parametrize("scheme", VARIANTS, ids=lambda scheme: scheme.spec())
BOUNDED = tuple(scheme for scheme in VARIANTS if scheme.bound(SlotSpec(1, 128, torch.float32, Role.KEY)) is not None)
"""Those that announce a bound on their error; what holds of the others is their own tests' business."""

each_bounded = pytest.mark.parametrize("scheme", BOUNDED, ids=lambda scheme: scheme.spec())
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_variant_and_width, each_bounded_and_width = (
    pytest.mark.parametrize(
        ("scheme", "head_dim"),
        [pytest.param(scheme, head_dim, id=f"{scheme.spec()}-{head_dim}") for scheme in schemes for head_dim in HEAD_DIMS
         if scheme in {type(scheme)().for_role(role) for role in Role} or head_dim < 96],
    )
    for schemes in (VARIANTS, BOUNDED)
)
"""The defaults with every head dim, the other settings with an even and an odd one."""


def slot(heads: int = 2, head_dim: int = 64, dtype: torch.dtype = torch.float32, role: Role = Role.KEY) -> SlotSpec:
    """A slot to encode."""
    return SlotSpec(heads, head_dim, dtype, role)


def holds(scheme: Scheme, spec: SlotSpec) -> bool:
    """Whether a scheme can hold a slot at all."""
    try:
        scheme.check(spec)
    except SchemeError:
        return False
    return True


def fitting(scheme: Scheme, dtype: torch.dtype = torch.float32, heads: int = 2) -> SlotSpec:
    """The smallest of the tested slots that a scheme can hold."""
    return next(spec for spec in (slot(heads, head_dim, dtype) for head_dim in HEAD_DIMS) if holds(scheme, spec))


def whole_write(scheme: Scheme) -> bool:
    """Whether everything that is written together shares a scale."""
    return not scheme.by_token and scheme.block == 1


def whole_blocks(scheme: Scheme, x_BKSD: torch.Tensor) -> torch.Tensor:
    """The tokens with zeros behind them up to a whole block, as the write path fills one."""
    return torch.nn.functional.pad(x_BKSD, (0, 0, 0, -x_BKSD.shape[2] % scheme.block))


def _by_group(scheme: Scheme, x_BKSD: torch.Tensor, spec: SlotSpec, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """``reduce`` over every group that shares a scale, float64, at each of its channels."""
    fmt = scheme.format(spec)
    x = whole_blocks(scheme, x_BKSD / norms_of(scheme, x_BKSD, spec)).to(torch.float64)
    grouped = x.unflatten(-1, (-1, fmt.group)).unflatten(2, (-1, fmt.block))
    grouped = reduce(reduce(grouped, -1, True), 3, True)
    if whole_write(scheme):
        grouped = reduce(grouped, (1, 2, 3, 4), True).expand(grouped.shape)
    grouped = grouped.expand(*grouped.shape[:3], fmt.block, grouped.shape[4], fmt.group)
    return grouped.flatten(4).flatten(2, 3)[:, :, : x_BKSD.shape[2]]


def norms_of(scheme: Scheme, x_BKSD: torch.Tensor, spec: SlotSpec) -> torch.Tensor:
    """What each token is divided by before its groups are looked at, float64 [B, K, S, 1]; 1 where nothing is, or the token is zero."""
    fmt = scheme.format(spec)
    if not fmt.norms:
        return torch.ones(*x_BKSD.shape[:3], 1, dtype=torch.float64)
    found = scheme.encode(whole_blocks(scheme, x_BKSD))[fmt.norms_at][:, :, : x_BKSD.shape[2]].to(torch.float64)
    return torch.where(found == 0, 1.0, found)


def amax_of(scheme: Scheme, x_BKSD: torch.Tensor, spec: SlotSpec) -> torch.Tensor:
    """The largest magnitude that stands behind each channel's scale, float64 [B, K, S, D]."""
    return _by_group(scheme, x_BKSD, spec, lambda x, *rest: torch.amax(x.abs(), *rest))


def largest_of(scheme: Scheme, x_BKSD: torch.Tensor, spec: SlotSpec) -> torch.Tensor:
    """The largest magnitude behind each channel's scale, or in its token where that has a norm, float64 [B, K, S, 1 or D]."""
    if scheme.format(spec).norms:
        return x_BKSD.abs().to(torch.float64).amax(-1, keepdim=True)
    return amax_of(scheme, x_BKSD, spec)


def spread_of(scheme: Scheme, x_BKSD: torch.Tensor, spec: SlotSpec) -> torch.Tensor:
    """The largest less the smallest value behind each channel's scale, float64 [B, K, S, D]."""
    return _by_group(scheme, x_BKSD, spec, torch.amax) - _by_group(scheme, x_BKSD, spec, torch.amin)


@functools.cache
def _function(bound: sympy.Expr) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    return sympy.lambdify((AMAX, SPREAD, NORM), bound, "numpy")


def bound_of(scheme: Scheme, x_BKSD: torch.Tensor, spec: SlotSpec) -> torch.Tensor:
    """The scheme's symbolic bound for every channel of x, evaluated in float64; of a scheme that has one."""
    amax, spread, norm = amax_of(scheme, x_BKSD, spec), spread_of(scheme, x_BKSD, spec), norms_of(scheme, x_BKSD, spec)
    bound = scheme.bound(spec)
    assert bound is not None, f"{scheme.name} announces no bound"
    value = np.broadcast_to(np.asarray(_function(bound)(amax.numpy(), spread.numpy(), norm.numpy()), dtype=np.float64), amax.shape)
    return torch.from_numpy(value.copy())


def unwritten(scheme: Scheme, spec: SlotSpec, plane: PlaneSpec, pages: int, batch: int) -> torch.Tensor:
    """A plane full of what no test wrote: NaN where the dtype has it, else a byte pattern; what is learned is learned."""
    shape = plane.shape(pages, batch, spec.heads)
    if plane.constant:
        return scheme.empty(plane, spec, pages, batch)
    if plane.name in scheme.calibrated:
        queries = normal(batch, spec.heads, 2, 50, spec.head_dim, seed=7)
        return dict(zip(sorted(scheme.calibrated), scheme.calibrate(queries, None), strict=True))[plane.name].reshape(shape).clone()
    # The clock is the one plane that must start somewhere: at no tokens.
    fill = float("nan") if plane.dtype.is_floating_point else 0x5A if plane.extent is Extent.TOKENS else 0
    return torch.full(shape, fill, dtype=plane.dtype)


def round_trip(scheme: Scheme, x_BKSD: torch.Tensor, spec: SlotSpec) -> torch.Tensor:
    """What the codes of ``x`` stand for, float64."""
    return scheme.decode(scheme.encode(whole_blocks(scheme, x_BKSD)), spec).to(torch.float64)[:, :, : x_BKSD.shape[2]]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Gaussian values with one loud channel, as keys have."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., shape[-1] // 3] *= 20
    return x.to(dtype)
