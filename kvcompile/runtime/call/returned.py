"""Returned: the registry of tensors that compiled calls without caches returned; a later call may read such a tensor as a cache.

The keys and values of cross-attention are computed once, by a call that does not attend to them, and passed to every step. Such a tensor is
a cache: nothing writes it again. A tensor made by uncompiled code may be made again in every step, and would be encoded each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_RETURNED: Any = WeakIdKeyDictionary()
"""The returned tensors that are alive."""

LEAST_DIMS = 3
"""Smallest number of dims of a cache tensor: rows, tokens and channels."""


PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors with memory of their own; a compressed cache has none."""


def _memory(tensor: torch.Tensor) -> int:
    """Return the identity of a plain tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def is_returned(value: object) -> bool:
    """Return whether a compiled call returned this tensor to its caller."""
    return isinstance(value, torch.Tensor) and value in _RETURNED


def noting(code: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``code`` wrapped so that its result tensors are registered; views become separate tensors that keep no other one alive."""

    def run(*args: Any) -> Any:
        given = {_memory(arg) for arg in args if type(arg) in PLAIN}
        made: dict[int, Any] = {}
        return tuple(made.setdefault(id(item), _noted(item, given)) for item in code(*args))

    return run


def _noted(item: Any, given: set[int]) -> Any:
    """Return ``item``, a result of a call, detached if it is a view, and registered if a later call may use it as a cache.

    Registered are floating-point tensors with as many dims as a cache, unless they share memory with the call's arguments (``given``: the
    identities of their storages).
    """
    if type(item) is not torch.Tensor or item.dim() < LEAST_DIMS or not item.is_floating_point() or item.requires_grad:
        return item
    if _memory(item) in given:
        return item
    if item._base is not None:
        item = item.detach()
    _RETURNED[item] = True
    return item
