"""The guard of squat: a head keeps error feedback only if it lowers the error of its scores; else its keys are encoded as by ``kivi``.

    error(M) = sum over keys of e G e^T,    e = decode(encode(key, M)) - key,    G = the sum of q q^T over a quarter of the queries

Feedback M is learned from the first three quarters of a prompt's queries. On the last quarter, which it was not learned from, the error
with it is compared with the error without. A head for which it is lower gets feedback learned from all queries; any other head gets none.
Nothing is read on the host. At most ``MOST`` keys are tried, in whole groups spread over the prompt, so the cost does not grow with it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MOST = 1024
HELD_OUT = 4
"""Largest number of keys that are tried; the part of the queries that decides, as a divisor."""

DECLINED = -0.0
"""The value that fills a head's plane of error feedback after the guard refused feedback. It encodes as zero does; its sign tells such a
plane from one that was never calibrated."""


def split(real_RS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (learned, held out), masks [R, S] that split each row's real queries; held out is the last quarter, rounded up.

    Feedback is learned from the first, and the guard judges it by the second.
    """
    order, count = real_RS.cumsum(-1) - 1, real_RS.sum(-1, keepdim=True)
    learned = order < count - (count + HELD_OUT - 1) // HELD_OUT
    return real_RS & learned, real_RS & ~learned


def sampled(keys_RKSD: torch.Tensor, real_RS: torch.Tensor, group: int) -> torch.Tensor:
    """Return at most ``MOST`` keys of a prompt [R, K, S, D], in blocks of ``group`` consecutive tokens, no padding: float32 [R, K, n, D].

    Blocks begin at multiples of ``group`` from a row's first token, as in an append. A row of fewer than ``group`` tokens repeats them,
    which does not change a block's minimum and maximum.
    """
    tokens = keys_RKSD.shape[2]
    blocks = max(1, min(tokens, MOST) // group)
    count = real_RS.sum(-1, keepdim=True).clamp(min=1)
    origin = real_RS.to(torch.int8).argmax(-1, keepdim=True)
    first = torch.arange(blocks, device=keys_RKSD.device) * (count // group).clamp(min=1) // blocks * group
    at = origin + (first[:, :, None] + torch.arange(group, device=keys_RKSD.device)).flatten(1) % count
    index = at.clamp(max=tokens - 1)[:, None, :, None].expand(-1, keys_RKSD.shape[1], -1, keys_RKSD.shape[3])
    return keys_RKSD.gather(2, index).to(torch.float32)


def wins(
    coded: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor], keys_RKnD: torch.Tensor, moves_RKDD: torch.Tensor,
    gram_RKDD: torch.Tensor,
) -> torch.Tensor:
    """Return, by head, whether error feedback lowers the sum of squared score errors of keys, bool [R, K, 1, 1]; False on a tie or NaN.

    ``coded``: (keys, plane of feedback or None) -> the keys after encoding and decoding. ``moves_RKDD``: the plane of feedback.
    ``gram_RKDD``: the sum of q q^T over the queries whose scores count. Errors that are not finite count as zero.
    """
    gram = gram_RKDD.to(torch.float32)

    def error(moves: torch.Tensor | None) -> torch.Tensor:
        e = coded(keys_RKnD, moves) - keys_RKnD
        e = torch.where(torch.isfinite(e), e, torch.zeros_like(e))
        return ((e @ gram) * e).sum((-2, -1))

    return (error(moves_RKDD.to(torch.float32)) < error(None))[..., None, None]
