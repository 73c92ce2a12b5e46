"""``gather``: copies the codes of tokens by slot number, for caches that are read through a block table.

The planes of such a cache hold a single batch row of slots. The result is a store of one page, in the layout that
attention takes; codes are copied unchanged.
"""

from __future__ import annotations

import torch

from kvcompile import schemes


def gather_body(planes: list[torch.Tensor], places: torch.Tensor, head_dim: int, scheme: str) -> list[torch.Tensor]:
    """Return [1, B, K, T, width] for each plane [N, 1, K, R, width]: the rows in slots ``places`` [B, T].

    A slot number outside of the planes gives NaN, and no error as the model's own index would: masked entries may be out of range.
    """
    heads, rows = planes[0].shape[2:4]
    inside = (places >= 0) & (places < planes[0].shape[0] * rows)
    at = torch.where(inside, places, 0)
    nothing = schemes.parse(scheme).spoiled(heads, head_dim, places.device)
    made = []
    # Attention may read fewer planes than the scheme encodes.
    for plane, missing in zip(planes, nothing, strict=False):
        # Advanced indices around slices come first in the result: [B, T, K, width].
        taken = plane[at // rows, 0, :, at % rows].permute(0, 2, 1, 3)
        kept = torch.where(inside[:, None, :, None], taken, missing.to(plane.dtype))
        made.append(kept.contiguous().unsqueeze(0))
    return made


def gather_meta(planes: list[torch.Tensor], places: torch.Tensor, head_dim: int, scheme: str) -> list[torch.Tensor]:
    """Return empty tensors [1, B, K, T, width], one for each plane, for fake tensors."""
    return [plane.new_empty(1, places.shape[0], plane.shape[2], places.shape[1], plane.shape[4]) for plane in planes]
