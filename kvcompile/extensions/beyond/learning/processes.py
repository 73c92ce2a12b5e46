"""Several learning processes, as ``torchrun`` starts them: each has its own pieces of a batch, and their gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def count() -> int:
    """Return the number of processes that learn together; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if count() > 1 else 0


def add_up(tensors: Sequence[torch.Tensor]) -> None:
    """Replace each tensor by its sum over all processes, in place and in one message."""
    if count() == 1 or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor).to(tensor.dtype))
