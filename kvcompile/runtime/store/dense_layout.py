"""Dense layout: read and write one part of a dense cache tensor, with its dims in any order, as [B, K, T, D]."""

from __future__ import annotations

import torch

from kvcompile.passes.match.sites import Axes


def tokens_of(dense: torch.Tensor, axes: Axes, heads: int, head_dim: int) -> torch.Tensor:
    """Return one part of a cache tensor as [B, K, T, D]; a view, except if a paged cache's slots are not contiguous."""
    view, roles = _selected(dense, axes)
    for dim in range(len(roles) - 1, -1, -1):
        if len(roles[dim]) == 2:
            inner = head_dim if roles[dim][1] == "D" else heads
            view = torch.unflatten(view, dim, (-1, inner))
    flat = [role for label in roles for role in label]
    view = view.permute(_order(flat))
    first = sum(role in flat for role in ("B", "K"))
    view = view.flatten(first, first + flat.count("T") - 1)
    for dim, role in enumerate(("B", "K", "T", "D")):
        if role not in flat:
            view = view.unsqueeze(dim)
    return view


def put_tokens(x_BKTD: torch.Tensor, dense: torch.Tensor, axes: Axes) -> None:
    """Write ``x_BKTD`` [B, K, T, D] into the first T tokens of its part of a dense cache tensor; a paged one is written whole."""
    view, roles = _selected(dense, axes)
    token_dims = [dim for dim, label in enumerate(roles) if label == ("T",)]
    x = x_BKTD
    if len(token_dims) == 1:
        view = view.narrow(token_dims[0], 0, x.shape[2])
    else:
        x = torch.unflatten(x, 2, [view.shape[dim] for dim in token_dims])
    flat = [role for label in roles for role in label]
    given = ["B", "K", *["T"] * len(token_dims), "D"]
    for dim in range(len(given) - 1, -1, -1):
        if given[dim] not in flat:
            x = x.squeeze(dim)
    # The inverse of the permutation in ``tokens_of``.
    x = x.permute(sorted(range(len(flat)), key=_order(flat).__getitem__))
    view.copy_(x.reshape(view.shape))


def _order(flat: list[str]) -> list[int]:
    """Return the indices in ``flat``, the letters of a cache tensor's dims, in the order B, K, T, D; a letter of several dims gives all."""
    return [dim for role in ("B", "K", "T", "D") for dim, found in enumerate(flat) if found == role]


def _selected(dense: torch.Tensor, axes: Axes) -> tuple[torch.Tensor, list[tuple[str, ...]]]:
    """Return a view of one part of a cache tensor, and the roles of each of its dims."""
    fixed, counts = dict(axes.select), dict(axes.counts)
    view = dense
    roles: list[tuple[str, ...]] = []
    for dim in range(len(axes.labels) - 1, -1, -1):
        if axes.labels[dim]:
            roles.insert(0, axes.labels[dim])
            view = view.narrow(dim, fixed[dim], counts[dim]) if dim in counts else view
        else:
            view = view.select(dim, fixed.get(dim, 0))
    return view, roles
