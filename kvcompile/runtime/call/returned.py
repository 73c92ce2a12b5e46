"""Returned: tensors that a compiled call without caches gave to its caller, which later calls may only read.

The keys and values of cross-attention are computed once, by a call that does not attend to them, and passed to every step. Such a tensor
is a cache: nobody fills it anew. One that uncompiled code made may be made again in every step, and encoded each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_RETURNED: Any = WeakIdKeyDictionary()
"""The tensors, as long as they live."""

LEAST_DIMS = 3
"""Dims of a cache tensor: rows, tokens and channels."""


PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors with memory of their own; a compressed cache has none."""


def _memory(tensor: torch.Tensor) -> int:
    """The identity of a plain tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


def is_returned(value: object) -> bool:
    """Whether a compiled call gave a tensor to its caller."""
    return isinstance(value, torch.Tensor) and value in _RETURNED


def noting(code: Callable[..., Any]) -> Callable[..., Any]:
    """Return code that notes which tensors it gives. Each of them is a tensor of its own, no view that keeps another one alive."""

    def run(*args: Any) -> Any:
        given = {_memory(arg) for arg in args if type(arg) in PLAIN}
        made: dict[int, Any] = {}
        return tuple(made.setdefault(id(item), _noted(item, given)) for item in code(*args))

    return run


def _noted(item: Any, given: set[int]) -> Any:
    """The tensor that a caller gets in place of a result; ``given``: the memory of the call's arguments, which no call made."""
    if type(item) is not torch.Tensor or item.dim() < LEAST_DIMS or not item.is_floating_point() or item.requires_grad:
        return item
    if _memory(item) in given:
        return item
    if item._base is not None:
        item = item.detach()
    _RETURNED[item] = True
    return item
