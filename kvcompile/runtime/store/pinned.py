"""Pinned planes: planes in pinned host memory that kernels on a CUDA device read and write in place.

A plane is a CUDA tensor with the address of the pinned buffer: code compiled for planes takes it unchanged, at the bandwidth of the bus.
PyTorch's allocator of pinned memory does not track kernels that still use a buffer when its last tensor is freed, and the host clears
new buffers; so each buffer is kept until the work queued by then is done.
"""

from __future__ import annotations

import collections

import torch

from kvcompile.errors import HostMemoryFull
from kvcompile.schemes.device_event import Event, new_event

_LEAVING: collections.deque[tuple[Event, torch.Tensor]] = collections.deque()
"""Freed buffers, each with the CUDA event after which no kernel uses it."""


class _Alias:
    """Owner of the pinned memory that a device tensor aliases; lives as long as the tensor's storage."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.pinned = pinned
        self.__cuda_array_interface__ = dict(
            shape=(pinned.numel(),), typestr="|u1", data=(pinned.data_ptr(), False), version=3, strides=None
        )

    def __del__(self) -> None:
        # None while the interpreter exits: then the driver frees all memory.
        if torch is not None and torch.cuda is not None:
            event = new_event()
            event.record()
            _LEAVING.append((event, self.pinned))


def host_plane(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros of ``shape`` in pinned host memory, as a tensor on the CUDA device ``device``.

    A tensor without elements is an ordinary one on ``device``. Raises HostMemoryFull if the memory cannot be had.
    """
    while _LEAVING and _LEAVING[0][0].query():
        _LEAVING.popleft()
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    if not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=True, device="cpu")
    except RuntimeError as error:
        raise HostMemoryFull(expected=size, found=str(error).partition("\n")[0]) from error
    with torch.cuda.device(device):
        return torch.as_tensor(_Alias(pinned), device=device).view(dtype).view(shape)
