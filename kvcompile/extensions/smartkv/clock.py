"""Clock: the steps at which a layer decides widths anew (section 5.2): after an interval, or earlier if importance has drifted."""

from __future__ import annotations

import torch

from kvcompile.extensions.smartkv.importance import EPSILON


def interval(layer: int, tokens: int, base: int = 16) -> int:
    """Return the steps between two allocations: max(base * (1 + layer // 4), 32, tokens // 8); more for deep layers and long contexts."""
    return max(base * (1 + layer // 4), 32, tokens // 8)


def percentiles(importance_RT: torch.Tensor, keep_RT: torch.Tensor | None = None) -> torch.Tensor:
    """Return each token's rank: the share of tokens that are less important, in [0, 1), float32 [R, T]. Equal tokens have equal ranks.

    ``keep`` bool [R, T]: tokens where it is False get rank 0 and do not count in the ranks of others; None keeps all tokens.
    """
    keep = torch.ones_like(importance_RT, dtype=torch.bool) if keep_RT is None else keep_RT
    held = torch.where(keep, importance_RT, float("-inf")).contiguous()
    below = torch.searchsorted(held.sort(-1).values, held)
    missing = (~keep).sum(-1, keepdim=True)
    share = (below - missing) / keep.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(keep, share, 0.0).to(torch.float32)


def divergence(now_RT: torch.Tensor, before_RT: torch.Tensor, common_RT: torch.Tensor) -> torch.Tensor:
    """Return KL(now | before) in nats between two importances, each normalised to a distribution over the ``common`` tokens, float32 [R].

    ``common`` bool [R, T]: tokens present both times. Over all tokens the divergence would be infinite as soon as one of them is new.
    """
    p, q = (torch.where(common_RT, item, 0.0).to(torch.float32) + EPSILON * common_RT for item in (now_RT, before_RT))
    p, q = (item / item.sum(-1, keepdim=True).clamp(min=EPSILON) for item in (p, q))
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1).clamp(min=0)


def drifted(
    now_RT: torch.Tensor, before_RT: torch.Tensor, common_RT: torch.Tensor, *, tau: float = 0.02, moved: float = 0.05, share: float = 0.10
) -> torch.Tensor:
    """Return whether each row's importance has drifted since the last allocation, bool [R].

    A row has drifted if the divergence exceeds ``tau`` nats, or if the ranks of more than ``share`` of the ``common`` tokens changed by
    ``moved`` or more.
    """
    apart = (percentiles(now_RT, common_RT) - percentiles(before_RT, common_RT)).abs() >= moved
    count = common_RT.sum(-1).clamp(min=1)
    return (divergence(now_RT, before_RT, common_RT) > tau) | ((apart & common_RT).sum(-1) / count > share)
