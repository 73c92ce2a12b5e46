"""``unroll``: the codes of a sliding cache in token order, for attention of several new tokens.

The token at position p of a sliding cache of n slots is in slot p % n. Codes are copied unchanged, and the new tokens'
codes are appended, so that attention sees one sequence: the past that it reads, then the new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcompile import schemes


def taken(plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the rows of a plane [N, B, K, R, width] in ``slots`` [n], as [B, K, n, width]."""
    # Advanced indices around slices come first in the result.
    return plane[slots // plane.shape[3], :, :, slots % plane.shape[3]].permute(1, 2, 0, 3)


def unroll_body(
    x: torch.Tensor, planes: list[torch.Tensor], cursor: torch.Tensor, past: int, slots: int, scheme: str,
    tables: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Return [1, B, K, past + S, width] for each plane: the ``past`` tokens before ``cursor``, then x [B, K, S, D] encoded.

    ``slots``: number of slots of the cache; ``tables``: the planes that ``encode`` takes, None for none.
    """
    held = (cursor - past + torch.arange(past, device=cursor.device)) % slots
    made = []
    for plane, rows in zip(planes, schemes.parse(scheme).encode(x, *(tables or ())), strict=True):
        made.append(torch.cat([taken(plane, held), rows.to(plane.dtype)], 2).unsqueeze(0))
    return made


def unroll_meta(
    x: torch.Tensor, planes: list[torch.Tensor], cursor: torch.Tensor, past: int, slots: int, scheme: str,
    tables: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Return empty tensors [1, B, K, past + S, width], one for each plane, for fake tensors."""
    return [plane.new_empty(1, plane.shape[1], plane.shape[2], past + x.shape[2], plane.shape[4]) for plane in planes]
