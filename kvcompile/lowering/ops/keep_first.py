"""``keep_first``: the first tokens of each row in full precision, beside the codes that a store has of them too.

A row's first token is the first that is no padding. Where that is, is fixed by the call that writes position 0, as that call's mask shows
it: a store with a window remembers it in its clock and says so; another has a plane of its own for it.
"""

from __future__ import annotations

import torch


def keep_first_body(x: torch.Tensor, planes: list[torch.Tensor], pos: torch.Tensor, origin: torch.Tensor | None) -> None:
    """Write those of the tokens x [B, K, S, D] at positions pos [1 or B, S] that are among the first of their rows.

    ``planes``: the first tokens [1, B, K, N, D] and, where nothing else remembers where they begin, that: int64 [1, B, 1, 1, 1].
    ``origin``: int64 [1 or B], where they begin; with two planes, what this call's mask says of it, None for no padding.
    """
    rows = stays = planes[0][0]
    if len(planes) > 1:
        held = planes[1][0, :, 0, 0, 0]
        used = torch.where((pos == 0).any(-1), torch.zeros_like(held) if origin is None else origin, held)
        # Rows that are counted from elsewhere now hold no token of their place until it is written.
        stays = torch.where((used == held)[:, None, None, None], rows, float("nan"))
        planes[1].copy_(used[None, :, None, None, None])
        origin = used
    assert origin is not None
    # [1 or B, N, S]: which token goes to which row; of several the last, as for the codes.
    row = torch.arange(rows.shape[2], device=x.device)
    goes = (pos - origin[:, None]).unsqueeze(1) == row[:, None]
    at = torch.where(goes, torch.arange(1, x.shape[2] + 1, device=x.device), 0).amax(-1)
    new = x.gather(2, (at - 1).clamp(min=0)[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3]))
    rows.copy_(torch.where((at > 0)[:, None, :, None], new.to(rows.dtype), stays))


def keep_first_meta(x: torch.Tensor, planes: list[torch.Tensor], pos: torch.Tensor, origin: torch.Tensor | None) -> None:
    """Return nothing."""


def origins(plane: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Where each row's first tokens begin, int64 [1 or B], from the plane that says so; 0 where there is none."""
    return torch.zeros(1, dtype=torch.int64, device=device) if plane is None else plane[0, :, 0, 0, 0]
