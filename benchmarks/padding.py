"""Padding in front of the rows of a batch, as ``--padding N`` asks for it."""

from __future__ import annotations

import torch


def shown(batch: int, tokens: int, padding: int) -> torch.Tensor | None:
    """A mask [batch, tokens] bool that hides the first ``padding`` tokens of the last row and fewer of each one before; None hides none."""
    hidden = torch.arange(1, batch + 1, device="cuda") * padding // batch
    return torch.arange(tokens, device="cuda") >= hidden[:, None] if padding else None
