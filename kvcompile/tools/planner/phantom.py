"""Phantoms: CPU tensors with shapes and strides whose memory is never touched, so that a model of any size can be traced on a laptop.

All phantoms share one anonymous mapping without reserved pages: a page that is never written takes no memory. Their values mean nothing;
code that reads one outside of a graph (a branch on a value) gets zeros. Dynamo treats them as ordinary tensors, unlike fake tensors and
tensors on the meta device (on which tensors that a graph creates itself are not faked).
"""

from __future__ import annotations

import mmap
from typing import Any

import torch

from kvcompile.passes.graph.shapes import estimate

LEAST_ELEMENTS = 1 << 20
RESERVE_NOTHING = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's flag for a mapping that counts against no memory limit; Python has a name for it from 3.13 on."""

_mapped: list[mmap.mmap] = []
"""The mapping in use; empty before the first phantom. A larger one replaces it when needed."""


def _memory(count: int) -> mmap.mmap:
    """Return a mapping of at least ``count`` zero bytes, never to be written."""
    if not _mapped or len(_mapped[0]) < count:
        size = max(count, LEAST_ELEMENTS)
        private = getattr(mmap, "MAP_PRIVATE", None)
        if private is None:
            _mapped[:] = [mmap.mmap(-1, size)]
        else:
            _mapped[:] = [mmap.mmap(-1, size, flags=private | mmap.MAP_ANONYMOUS | RESERVE_NOTHING)]
    return _mapped[0]


def phantom(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor without meaningful values, with the shape, strides and dtype of ``like``, a meta or fake tensor.

    Symbolic sizes take their captured values. Phantoms share memory, which is never written.
    """
    shape, strides = [estimate(size) for size in like.shape], [estimate(step) for step in like.stride()]
    span = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) if all(shape) else 0
    if not span:
        return torch.empty(shape, dtype=like.dtype, device="cpu")
    return torch.frombuffer(_memory(span * like.dtype.itemsize), dtype=like.dtype, count=span).as_strided(shape, strides)


def phantom_result(value: Any) -> Any:
    """Return a phantom for a tensor, a number for a symbolic one, and any other value unchanged."""
    if isinstance(value, torch.Tensor):
        return phantom(value)
    return estimate(value) if isinstance(value, torch.SymInt) else value


def hollow(model: torch.nn.Module) -> torch.nn.Module:
    """Replace every parameter and buffer of a model on the meta device by a phantom; return the model."""
    known: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.device.type != "meta":
                    continue
                made = phantom(tensor)
                # Tied weights stay one parameter.
                held[name] = known.setdefault(id(tensor), torch.nn.Parameter(made, False) if held is module._parameters else made)
    return model
