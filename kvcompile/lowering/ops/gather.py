"""``gather``: the codes of tokens by the numbers of their places, for caches that are read through a table.

The planes of such a cache hold one row of tokens, its places. What is gathered is a store of one page, laid out as
attention takes it; codes are copied as they are.
"""

from __future__ import annotations

import torch

from kvcompile import schemes


def gather_body(planes: list[torch.Tensor], places: torch.Tensor, head_dim: int, scheme: str) -> list[torch.Tensor]:
    """[1, B, K, T, width] of each plane [N, 1, K, R, width], from places [B, T].

    A place outside of the planes gives NaN, as the model would have stopped there: what is masked may hold one.
    """
    heads, rows = planes[0].shape[2:4]
    inside = (places >= 0) & (places < planes[0].shape[0] * rows)
    at = torch.where(inside, places, 0)
    nothing = schemes.parse(scheme).spoiled(heads, head_dim, places.device)
    made = []
    # Attention may read fewer planes than are encoded.
    for plane, missing in zip(planes, nothing, strict=False):
        # Advanced indices around slices come first in the result: [B, T, K, width].
        taken = plane[at // rows, 0, :, at % rows].permute(0, 2, 1, 3)
        kept = torch.where(inside[:, None, :, None], taken, missing.to(plane.dtype))
        made.append(kept.contiguous().unsqueeze(0))
    return made


def gather_meta(planes: list[torch.Tensor], places: torch.Tensor, head_dim: int, scheme: str) -> list[torch.Tensor]:
    """Shapes of the results."""
    return [plane.new_empty(1, places.shape[0], plane.shape[2], places.shape[1], plane.shape[4]) for plane in planes]
