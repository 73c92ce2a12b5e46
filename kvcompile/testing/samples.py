"""Slots that a scheme may be asked to hold, and values to hold in them."""

from __future__ import annotations

import torch

from kvcompile.errors import SchemeError
from kvcompile.schemes import Scheme
from kvcompile.types import Extent, PlaneSpec, Role, SlotSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 80, 96, 128, 256)
SHAPES = ((1, 1, 1), (3, 2, 63), (1, 8, 64), (3, 1, 65), (1, 1, 1000), (3, 8, 2))
"""(B, K, T): every batch size, head count and length at least once, the large ones not all at once."""


def slot(heads: int = 2, head_dim: int = 64, dtype: torch.dtype = torch.float32, role: Role = Role.KEY) -> SlotSpec:
    """Return the ``SlotSpec`` with these heads, head dim, dtype and role."""
    return SlotSpec(heads, head_dim, dtype, role)


def holds(scheme: Scheme, spec: SlotSpec) -> bool:
    """Return whether a scheme can hold a slot at all."""
    try:
        scheme.check(spec)
    except SchemeError:
        return False
    return True


def fitting(scheme: Scheme, dtype: torch.dtype = torch.float32, heads: int = 2) -> SlotSpec:
    """Return the smallest of the tried slots with ``heads`` kv heads and the model's dtype ``dtype`` that a scheme can hold."""
    return next(spec for spec in (slot(heads, head_dim, dtype) for head_dim in HEAD_DIMS) if holds(scheme, spec))


def widths(scheme: Scheme) -> tuple[int, ...]:
    """Return the head dims to try: all for the default setting; 64, a power of two, and 80 for other settings."""
    default = scheme in {type(scheme)().for_role(role) for role in Role}
    return tuple(head_dim for head_dim in HEAD_DIMS if default or head_dim < 96)


def whole_write(scheme: Scheme) -> bool:
    """Return whether all tokens of one write share a scale."""
    return not scheme.by_token and scheme.block == 1


def whole_blocks(scheme: Scheme, x_BKSD: torch.Tensor) -> torch.Tensor:
    """Return tokens [B, K, S, D] followed by as many tokens of zeros as complete the last block, as a write to a store does."""
    return torch.nn.functional.pad(x_BKSD, (0, 0, 0, -x_BKSD.shape[2] % scheme.block))


def round_trip(scheme: Scheme, x_BKSD: torch.Tensor, spec: SlotSpec) -> torch.Tensor:
    """Return tokens [B, K, S, D] encoded and decoded, float64."""
    return scheme.decode(scheme.encode(whole_blocks(scheme, x_BKSD)), spec).to(torch.float64)[:, :, : x_BKSD.shape[2]]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return normal random values of shape ``shape`` and ``dtype``, drawn by ``seed``, with one channel 20 times larger, as keys have."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    x[..., shape[-1] // 3] *= 20
    return x.to(dtype)


def unwritten(scheme: Scheme, spec: SlotSpec, plane: PlaneSpec, pages: int, batch: int) -> torch.Tensor:
    """Return a plane in which nothing was ever written, with values that no test may read.

    These are NaN if the dtype has it, else 0x5A for a plane of tokens and 0 for others, such as the clock. Constant planes have their
    constants, and planes that are calibrated are calibrated on random queries.
    """
    shape = plane.shape(pages, batch, spec.heads)
    if plane.constant:
        return scheme.empty(plane, spec, pages, batch)
    if plane.name in scheme.calibrated:
        queries = normal(batch, spec.heads, 2, 50, spec.head_dim, seed=7)
        return dict(zip(sorted(scheme.calibrated), scheme.calibrate(queries, None), strict=True))[plane.name].reshape(shape).clone()
    # The clock is the one plane that must start somewhere: at no tokens.
    fill = float("nan") if plane.dtype.is_floating_point else 0x5A if plane.extent is Extent.TOKENS else 0
    return torch.full(shape, fill, dtype=plane.dtype, device="cpu")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a tensor's bytes, uint8, with which ``torch.equal`` compares NaN too."""
    return tensor.contiguous().view(torch.uint8)
