"""Phantoms: CPU tensors with shapes and strides whose memory is never touched, so that a model of any size can be traced on a laptop.

All phantoms lie in one anonymous mapping without reserved pages: a page that nobody writes takes no memory. They share that memory, so
their values mean nothing; what reads one (a branch on a value, outside of a graph) sees zeros. Dynamo takes them as it takes any tensor,
which it does not do with tensors on the meta device (those that a graph makes itself are not faked) or with fake ones.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch

from kvcompile.passes.graph.shapes import estimate

LEAST = 1 << 20
RESERVE_NOTHING = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux' flag for a mapping that counts against no limit; Python names it from 3.13 on."""

_mapped: list[mmap.mmap] = []
"""The mapping in use, and none before the first phantom is made; a larger one takes its place when one is needed."""


def _memory(count: int) -> mmap.mmap:
    """A mapping of at least ``count`` bytes of zeros that nobody writes."""
    if not _mapped or len(_mapped[0]) < count:
        size = max(count, LEAST)
        private = getattr(mmap, "MAP_PRIVATE", None)
        if private is None:
            _mapped[:] = [mmap.mmap(-1, size)]
        else:
            _mapped[:] = [mmap.mmap(-1, size, flags=private | mmap.MAP_ANONYMOUS | RESERVE_NOTHING)]
    return _mapped[0]


def phantom(like: torch.Tensor) -> torch.Tensor:
    """A phantom with the shape, strides and dtype of ``like``, a meta or fake tensor; symbolic sizes as they were captured."""
    shape, strides = [estimate(size) for size in like.shape], [estimate(step) for step in like.stride()]
    span = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) if all(shape) else 0
    if not span:
        return torch.empty(shape, dtype=like.dtype, device="cpu")
    return torch.frombuffer(_memory(span * like.dtype.itemsize), dtype=like.dtype, count=span).as_strided(shape, strides)


def phantom_result(value: Any) -> Any:
    """A phantom for a tensor, a number for a symbolic one, anything else as it is."""
    if isinstance(value, torch.Tensor):
        return phantom(value)
    return estimate(value) if isinstance(value, torch.SymInt) else value


def hollow(model: torch.nn.Module) -> torch.nn.Module:
    """The model with a phantom in place of every parameter and buffer on the meta device; returns ``model`` itself."""
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
