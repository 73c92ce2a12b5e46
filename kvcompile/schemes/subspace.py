"""The algebra of subspace-orthogonal quantization: which way errors may go, from the queries that will meet them.

P = I + lam Qhat^T Qhat weighs an error of a key by what it does to the queries. Channels are quantized g at a time;
once a block F of them has its error d, the channels R behind it move by the minimizer of delta^T P delta with
delta = d on F and 0 before F ("SQuat", Lemma 2):

    delta_R = B_t H_t d = -inv(P_RR) P_RF d

The second form (the two are one by the inverse of a block matrix) needs no inverse of P, and one factorization
serves every t: with P = W W^T, W upper triangular, every trailing block factors as P_RR = W_RR W_RR^T and
P_RF = W_RR W_FR^T, so that -P_FR inv(P_RR) = -W_FR inv(W_RR) = W_FF inv(W)_FR. The source's Proposition 2 and
Lemma 3 reach the same matrices block by block; the tests hold them against each other.

The factorizations are ``cholesky_ex`` and triangular solves in float64: they neither look at a result on the host nor
iterate until something converges, as an eigendecomposition does, so nothing here waits for a device.
"""

from __future__ import annotations

import math

import torch

STEPS = 12
"""Steps of block power iteration: each costs two products of D x r and a factorization of r x r."""

SHIFT = 1e-5
"""Of the mean eigenvalue, added to all while iterating: keeps what spans fewer than r dimensions apart from noise."""


def gram(q_BKnD: torch.Tensor) -> torch.Tensor:
    """Q^T Q of queries in float32, [B, K, D, D]; a row of zeros is no query."""
    q = q_BKnD.to(torch.float32)
    return q.transpose(-1, -2) @ q


def leading(gram: torch.Tensor, rank: int) -> torch.Tensor:
    """Qhat^T Qhat: what the ``rank`` leading directions hold of a Gram matrix, float64 [..., D, D].

    Block power iteration rather than an eigendecomposition. Directions of nearly equal weight may be mixed; what they
    hold together is what counts, and that converges twice as fast as they do.
    """
    width = gram.shape[-1]
    exact = gram.to(torch.float64)
    if rank >= width:
        return exact
    mean = exact.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    identity = torch.eye(width, dtype=torch.float64, device=gram.device)
    shifted = exact + (SHIFT * mean + torch.finfo(torch.float32).tiny) * identity
    basis = _cosines(width, rank, gram.device).expand(*gram.shape[:-2], -1, -1)
    for _ in range(STEPS):
        basis = _orthonormal(shifted @ basis)
    return basis @ (basis.mT @ exact @ basis) @ basis.mT


def _cosines(width: int, rank: int, device: torch.device) -> torch.Tensor:
    """Orthonormal columns [D, r] that no channel is missing from: where the iteration starts."""
    channel = torch.arange(width, dtype=torch.float64, device=device)[:, None] + 0.5
    columns = torch.cos(channel * torch.arange(rank, dtype=torch.float64, device=device) * (math.pi / width))
    return columns / torch.linalg.vector_norm(columns, dim=-2, keepdim=True)


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the span of independent columns."""
    columns = columns / torch.linalg.vector_norm(columns, dim=-2, keepdim=True)
    factor, _ = torch.linalg.cholesky_ex(columns.mT @ columns)
    return torch.linalg.solve_triangular(factor, columns.mT, upper=False).mT


def moves(weight: torch.Tensor, block: int) -> torch.Tensor:
    """How far an error of each channel moves the channels of later blocks, [..., D, D]: row i is (B_t H_t)^T, block t holding i.

    ``weight``: lam Qhat^T Qhat, float64. Zero where a column's block does not come after the row's.
    """
    width = weight.shape[-1]
    identity = torch.eye(width, dtype=weight.dtype, device=weight.device)
    factor, _ = torch.linalg.cholesky_ex((weight + identity).flip((-2, -1)))
    upper = factor.flip((-2, -1))
    inverse = torch.linalg.solve_triangular(upper, identity.expand_as(upper), upper=True)
    count = width // block
    # [..., t, g, t, g] -> [..., g, g, t] -> [..., t, g, g]
    own = upper.unflatten(-1, (count, block)).unflatten(-3, (count, block)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    moved = (own @ inverse.unflatten(-2, (count, block))).flatten(-3, -2)
    at = torch.arange(width, device=weight.device) // block
    return torch.where(at[:, None] < at, moved, torch.zeros_like(moved))
