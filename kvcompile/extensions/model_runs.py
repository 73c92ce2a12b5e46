"""Helpers to run a whole model for learning or measuring: its parameters frozen, its batches moved to its device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors moved to a device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: moved(value, device) for name, value in batch.items()}
    return batch


@contextlib.contextmanager
def frozen(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into eval mode with ``requires_grad`` off for a ``with`` block; restore both per module and parameter."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    modules = [module for module in model.modules() if module.training]
    model.eval()
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module in modules:
            module.training = True
