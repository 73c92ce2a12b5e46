"""The algebra of subspace-orthogonal quantization: the direction of quantization errors that disturbs the prompt's queries least.

P = I + lam Qhat^T Qhat weighs an error of a key by its effect on the queries. Channels are quantized g at a time;
once a block F of them has its error d, the channels R after it move by the minimizer of delta^T P delta with
delta = d on F and 0 before F ("SQuat", Lemma 2):

    delta_R = B_t H_t d = -inv(P_RR) P_RF d

The second form (equal to the first by the inverse of a block matrix) needs no inverse of P, and one factorization
serves every t: with P = W W^T, W upper triangular, every trailing block factors as P_RR = W_RR W_RR^T and
P_RF = W_RR W_FR^T, so that -P_FR inv(P_RR) = -W_FR inv(W_RR) = W_FF inv(W)_FR. The source's Proposition 2 and
Lemma 3 give the same matrices block by block; the tests compare them.

The factorization is ``cholesky_ex`` with triangular solves in float64, and the projection onto the leading directions is
a fixed number of matrix products: no result is read on the host, unlike in ``torch.linalg.eigh``, which waits for
a CUDA device to report convergence.
"""

from __future__ import annotations

import torch

LIFT = 24
"""First steps of purification, which raise small eigenvalues: enough for 2^-24 of the largest, the resolution of float32 queries."""

EVEN, TURNS = 1e-6, 32
"""Part of the sum of eigenvalues that is added to each; steps of orthogonal iteration."""

ROUNDS, ITERATIONS = 5, 8
"""Rounds of purification, and steps of each after the first. A tightening step ends each round, which keeps rounding errors from growing.
"""


def gram(q_BKnD: torch.Tensor) -> torch.Tensor:
    """Return Q^T Q of queries in float32, [B, K, D, D]; rows of zeros contribute nothing."""
    q = q_BKnD.to(torch.float32)
    return q.transpose(-1, -2) @ q


def over_distances(
    gram_BKDD: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor, bool], real_BS: torch.Tensor, window: int
) -> torch.Tensor:
    """Return the mean over distances d of R_d (q q^T) R_d^T, float32 [B, K, D, D], R_d the rotation of RoPE by d positions.

    A key that is stored before RoPE meets a query that is rotated by their distance. ``angles``: cos and sin [1 or B, S, Dr] of the
    prompt's positions, and whether RoPE pairs neighbouring channels. The distances are those from ``window`` on, within which keys are
    exact, to the prompt's length, or its second half where it is short. With x R_d = x * cos + x J * sin the mean is a closed form in three
    products of the tables.
    """
    cos, sin, interleaved = angles
    width, fill = gram_BKDD.shape[-1], gram_BKDD.shape[-1] - cos.shape[-1]
    cos = torch.nn.functional.pad(cos.to(torch.float32), (0, fill), value=1.0)
    sin = torch.nn.functional.pad(sin.to(torch.float32), (0, fill))
    order, count = real_BS.cumsum(-1) - 1, real_BS.sum(-1, keepdim=True)
    far = (real_BS & (order >= torch.minimum(count // 2, torch.full_like(count, window))))[:, :, None].to(torch.float32)
    seen = far.sum(1, keepdim=True).clamp(min=1)
    far_cos, far_sin = cos * far / seen, sin * far / seen
    turn = turning(width, cos.shape[-1] - fill, interleaved, gram_BKDD)

    def over(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one.transpose(-1, -2) @ other).unsqueeze(1)

    crossed = over(far_cos, sin) * (gram_BKDD @ turn)
    whole = over(far_sin, sin) * (turn.T @ gram_BKDD @ turn)
    return over(far_cos, cos) * gram_BKDD + crossed + crossed.transpose(-1, -2) + whole


def turning(width: int, rotary: int, interleaved: bool, like: torch.Tensor) -> torch.Tensor:
    """Return J [D, D], where x J is the part of RoPE that its sines multiply: (-b, a) for each pair (a, b); 0 for channels beyond it."""
    channel = torch.arange(rotary, device=like.device)
    first, second = (channel[::2], channel[1::2]) if interleaved else (channel[: rotary // 2], channel[rotary // 2 :])
    turn = torch.zeros(width, width, dtype=like.dtype, device=like.device)
    turn[second, first], turn[first, second] = -1.0, 1.0
    return turn


def leading(gram: torch.Tensor, rank: int) -> torch.Tensor:
    """Return Qhat^T Qhat, a Gram matrix projected onto its ``rank`` leading directions, float64 [..., D, D].

    If directions of equal weight straddle the rank, each is kept in part, so that none of them is preferred.
    """
    exact = gram.to(torch.float64)
    if rank >= gram.shape[-1]:
        return exact
    projector = leading_projector(exact, rank)
    return projector @ exact @ projector


def leading_projector(gram: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the orthogonal projector onto the ``rank`` leading eigenvectors of a positive semidefinite matrix, float64 [..., D, D].

    Trace-correcting purification (Niklasson, Phys. Rev. B 66, 155115, 2002): x^2 and 2x - x^2 keep the order of eigenvalues
    in [0, 1] and separate them; the first lowers the trace and the second raises it, until it is ``rank`` and all are 0 or
    1. Eigenvalues that differ by a part in a thousand are separated to 1e-9; block power iteration would mix them, and with them a
    percent or more of the plane. 3x^2 - 2x^3 moves every eigenvalue to the nearer of 0 and 1.
    """
    # No eigenvalue exceeds the largest row sum.
    size = gram.abs().sum(-1).amax(-1)[..., None, None]
    found = gram / torch.where(size == 0, 1, size)
    for first in (LIFT, *[ITERATIONS] * (ROUNDS - 1)):
        for _ in range(first):
            low = found.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] < rank
            # x^2 + 2 (x - x^2) if the trace must grow.
            found = torch.lerp(found @ found, found, torch.where(low, 2.0, 0.0).to(gram.dtype))
        square = found @ found
        found = 3 * square - 2 * (found @ square)
    return found


def eigenvectors(gram: torch.Tensor) -> torch.Tensor:
    """Return the eigenvectors of a positive semidefinite matrix as columns, largest eigenvalue first, float64 [..., D, D].

    Orthogonal iteration: columns are multiplied by the matrix and made orthonormal by the Cholesky factor of their products. Eigenvectors
    of nearly equal eigenvalues may stay mixed; the columns are always orthonormal to float64.
    """
    exact = gram.to(torch.float64)
    identity = torch.eye(exact.shape[-1], dtype=exact.dtype, device=exact.device)
    size = exact.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    # A part in a million on the diagonal keeps directions without queries apart despite rounding.
    matrix = exact / torch.where(size == 0, 1, size) + EVEN * identity
    found = identity.expand_as(exact)
    for _ in range(TURNS):
        found = matrix @ found
        found = found / torch.linalg.vector_norm(found, dim=-2, keepdim=True)
        found = _orthogonal(found)
    # Repeated, since columns far from orthogonal were made so with a large rounding error.
    return _orthogonal(_orthogonal(found))


def _orthogonal(columns: torch.Tensor) -> torch.Tensor:
    """Return the columns [..., D, n] made orthonormal, in order: each without its components along the ones before.

    Computed by a Cholesky factor of the columns' products. The columns must be linearly independent in float64: otherwise the result has
    NaN or meaningless columns, and nothing is raised.
    """
    factor, _ = torch.linalg.cholesky_ex(columns.transpose(-1, -2) @ columns)
    return torch.linalg.solve_triangular(factor.transpose(-1, -2), columns, upper=True, left=False)


def moves(weight: torch.Tensor, block: int) -> torch.Tensor:
    """Return by how much an error of each channel moves the channels of later blocks, [..., D, D].

    Row i, for channel i in block t, is a row of (B_t H_t)^T. ``weight``: lam Qhat^T Qhat, float64. ``block``: channels per block. Entries
    are zero unless the column's block comes after the row's.
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
