"""Read-only views: what indexing or reshaping a compressed cache from outside gives.

The dense cache would share memory with its views, so a write into one would change the cache. Here a view
is made of decoded values, and a write into it would be lost: it raises instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvcompile.errors import CacheMutated

VIEWS = {
    "__getitem__", "narrow", "select", "slice", "transpose", "swapaxes", "swapdims", "permute", "movedim", "view", "view_as", "reshape",
    "reshape_as", "unsqueeze", "squeeze", "expand", "expand_as", "flatten", "unflatten", "split", "split_with_sizes", "chunk",
    "tensor_split", "unbind", "detach", "diagonal", "as_strided", "unfold", "T", "mT", "H", "mH", "t", "data", "__iter__",
}
"""Operations whose result shares memory with their operand."""

ASSIGNMENTS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}


def writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation of this name writes to its first operand or to ``out``."""
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ASSIGNMENTS
    return in_place or kwargs.get("out") is not None


def name_of(func: Callable[..., Any]) -> str:
    """The bare name of what ``__torch_function__`` was called for; a property's is its attribute's."""
    name = getattr(func, "__name__", "")
    return func.__self__.__name__ if name in {"__get__", "__set__"} else name  # type: ignore[attr-defined]


class DecodedView(torch.Tensor):
    """Decoded values of part of a compressed cache: an ordinary tensor to read, and an error to write."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = name_of(func)
        target = kwargs.get("out", args[0] if args else None)
        if writes(name, kwargs) and isinstance(target, DecodedView):
            raise CacheMutated(found=f"{name}() on a view of it", length="some", shape=f"a view of {tuple(target.shape)}")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        shared = name in VIEWS and isinstance(args[0], DecodedView)
        return read_only(result) if shared else result


def read_only(result: Any) -> Any:
    """The tensors of a result as read-only views."""
    if isinstance(result, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return result.as_subclass(DecodedView)
    if isinstance(result, (tuple, list)):
        return type(result)([read_only(item) for item in result])
    return result
