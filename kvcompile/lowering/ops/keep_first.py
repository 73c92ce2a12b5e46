"""``keep_first``: keeps each row's first tokens in full precision, in addition to their codes.

A row's first token is the first that is not padding, by the mask of the call that writes position 0. A store with a
window records that position in its clock and passes it as ``origin``; another store has a plane for it.
"""

from __future__ import annotations

import torch


def keep_first_body(x: torch.Tensor, planes: list[torch.Tensor], pos: torch.Tensor, origin: torch.Tensor | None) -> None:
    """Write the tokens of x [B, K, S, D], at positions pos [1 or B, S], that are among the first N of their rows.

    ``planes``: the first tokens [1, B, K, N, D] and, for a store without a clock, the position of each row's first token, int64
    [1, B, 1, 1, 1]. ``origin``: int64 [1 or B], that position; with two planes, the first position that this call's mask shows, None
    without padding.
    """
    rows = stays = planes[0][0]
    if len(planes) > 1:
        held = planes[1][0, :, 0, 0, 0]
        used = torch.where((pos == 0).any(-1), torch.zeros_like(held) if origin is None else origin, held)
        # A row whose origin has changed holds other tokens: NaN until they are written.
        stays = torch.where((used == held)[:, None, None, None], rows, float("nan"))
        planes[1].copy_(used[None, :, None, None, None])
        origin = used
    assert origin is not None
    # goes [1 or B, N, S]: token s goes to row n. The last of several tokens wins, as for the codes.
    row = torch.arange(rows.shape[2], device=x.device)
    goes = (pos - origin[:, None]).unsqueeze(1) == row[:, None]
    at = torch.where(goes, torch.arange(1, x.shape[2] + 1, device=x.device), 0).amax(-1)
    new = x.gather(2, (at - 1).clamp(min=0)[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3]))
    rows.copy_(torch.where((at > 0)[:, None, :, None], new.to(rows.dtype), stays))


def keep_first_meta(x: torch.Tensor, planes: list[torch.Tensor], pos: torch.Tensor, origin: torch.Tensor | None) -> None:
    """Return None, as the operation does, which writes its planes in place."""


def origins(plane: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return the position of each row's first token, int64 [1 or B], from its plane [1, B, 1, 1, 1]; 0 if ``plane`` is None."""
    return torch.zeros(1, dtype=torch.int64, device=device) if plane is None else plane[0, :, 0, 0, 0]
