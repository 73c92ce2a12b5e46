"""Views: what indexing or reshaping a compressed cache from outside gives.

The dense cache would share memory with its views, so a write into one would change the cache. Here a view is made of
decoded values. When it is written to, the cache becomes dense, and the view one of its memory.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

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


@dataclass(frozen=True)
class Origin:
    """How a view was made: the cache tensor ``root``, and the operations that were applied to it, in their order."""

    root: torch.Tensor
    steps: tuple[Callable[[Any], Any], ...] = ()

    def then(self, func: Callable[..., Any], *rest: Any, **named: Any) -> Origin:
        """Return the origin of ``func(view, *rest, **named)``."""
        return Origin(self.root, (*self.steps, lambda view: func(view, *rest, **named)))

    def again(self) -> Any:
        """Return the result of the same operations on the root as it is now."""
        return functools.reduce(lambda value, step: step(value), self.steps, self.root)


class DecodedView(torch.Tensor):
    """Decoded values of part of a compressed cache: an ordinary tensor to read; a write to it goes to the cache, made dense."""

    _origin: Origin

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
            _share(target, f"{name} writes to a view of it outside of compiled code")
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if name not in VIEWS or not isinstance(args[0], DecodedView):
            return result
        return viewed(result, args[0]._origin.then(func, *args[1:], **kwargs))


def _share(view: DecodedView, why: str) -> None:
    """Turn a view of decoded values into a view of the cache's own memory, in place; a cache that is compressed becomes dense for it."""
    from kvcompile.runtime.handle import CompressedCache, thaw

    origin = view._origin
    if isinstance(origin.root, CompressedCache):
        thaw(origin.root, why)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), torch.inference_mode(view.is_inference()):
        real = origin.again()
        view.__class__ = torch.Tensor  # type: ignore[assignment]
        view.set_(real.untyped_storage(), real.storage_offset(), real.shape, real.stride())


def viewed(result: Any, origin: Origin) -> Any:
    """The tensors of a result as decoded views of an origin."""
    if isinstance(result, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            view = result.as_subclass(DecodedView)
        view._origin = origin
        return view
    if isinstance(result, (tuple, list)):
        return type(result)([viewed(item, origin.then(operator.getitem, index)) for index, item in enumerate(result)])
    return result
