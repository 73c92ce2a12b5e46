"""Views: the decoded tensors that indexing or reshaping a compressed cache gives outside of compiled code.

The dense cache would share memory with its views, so a write into one changes the other. Here a view is made of decoded
values, which are decoded again when the cache has been written since. A write to a view goes into the codes (``writes``); where it
cannot, the cache becomes dense, and the view one of its memory.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.passes.graph.dynamo import DisableTorchFunctionSubclass, OpOverloadPacket, tree_map, tree_map_only
from kvcompile.runtime.callers import user_line

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
    return in_place or kwargs.get("out") is not None or kwargs.get("inplace") is True


def written(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to, lists of tensors taken apart; those of a torch operator by its schema."""
    schema = getattr(func, "_schema", None)
    if schema is None and isinstance(func, OpOverloadPacket):
        schema = getattr(func, func.overloads()[0])._schema
    found = []
    if schema is not None:
        given = {item.name: args[at] if at < len(args) else kwargs.get(item.name) for at, item in enumerate(schema.arguments)}
        found = [given[item.name] for item in schema.arguments if item.is_write]
    elif writes(name, kwargs):
        found = [kwargs["out"] if kwargs.get("out") is not None else args[0] if args else None]
    return [part for item in found for part in (item if isinstance(item, (list, tuple)) else [item])]


def name_of(func: Callable[..., Any]) -> str:
    """Return the bare name of what ``__torch_function__`` was called for: of a property its attribute's, of an overload its operator's."""
    name = getattr(func, "__name__", "")
    name = func.__self__.__name__ if name in {"__get__", "__set__"} else name  # type: ignore[attr-defined]
    return name.partition(".")[0]


@dataclass(frozen=True)
class Origin:
    """The origin of a view: the cache tensor ``root``, and the operations that were applied to it, in their order."""

    root: torch.Tensor
    steps: tuple[Callable[[Any], Any], ...] = ()

    def then(self, func: Callable[..., Any], *rest: Any, **named: Any) -> Origin:
        """Return the origin of ``func(view, *rest, **named)``."""
        return Origin(self.root, (*self.steps, lambda view: func(view, *rest, **named)))

    def of(self, tensor: torch.Tensor) -> Any:
        """Return the result of the same operations on another tensor."""
        return functools.reduce(lambda value, step: step(value), self.steps, tensor)

    @property
    def seen(self) -> tuple[Any, ...]:
        """Return facts of the root that change when it is written to."""
        root: Any = self.root
        return (root._kv, root._length, root._epoch) if hasattr(root, "_kv") else ()


class DecodedView(torch.Tensor):
    """Decoded values of part of a compressed cache: an ordinary tensor to read; see the module docstring for writes."""

    _origin: Origin
    _seen: tuple[Any, ...]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        from kvcompile.runtime.handle import CompressedCache

        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if any(issubclass(kind, CompressedCache) for kind in types):
            # A cache beside its view, or another: the cache's own dispatch knows what to do with it.
            return NotImplemented
        name = name_of(func)
        for target in written(func, name, args, kwargs):
            if isinstance(target, DecodedView):
                rest = (args[1:], kwargs) if target is args[0] else None
                if rest is not None and _encoded(target, func, name, *rest):
                    return None if name == "__setitem__" else target
                share(target, f"{name} writes to a view of it outside of compiled code, at {user_line()}")
        tree_map_only(DecodedView, refresh, (args, kwargs))
        view = args[0] if name in VIEWS and args else None
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return viewed(result, view._origin.then(func, *args[1:], **kwargs)) if isinstance(view, DecodedView) else result


def _encoded(view: DecodedView, func: Callable[..., Any], name: str, rest: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Encode a write to a view into the codes of its cache; return whether that was possible."""
    from kvcompile.runtime.handle import CompressedCache, put
    from kvcompile.runtime.writes import overwrites

    if not isinstance(view._origin.root, CompressedCache) or not overwrites(name, named):
        return False
    plain, plain_named = tree_map(plainly, (rest, dict(named)))
    return put(view._origin.root, name, lambda dense: func(view._origin.of(dense), *plain, **plain_named))


def plainly(value: Any) -> Any:
    """Return a decoded view as the tensor of the values that it has now; anything else as it is."""
    if not isinstance(value, DecodedView):
        return value
    refresh(value)
    return value.as_subclass(torch.Tensor)


def refresh(view: DecodedView) -> None:
    """Let a view show what its cache holds now."""
    from kvcompile.runtime.handle import CompressedCache, decoded

    if type(view) is not DecodedView:
        return
    root = view._origin.root
    if not isinstance(root, CompressedCache):
        share(view, "")
    elif view._origin.seen != view._seen:
        real = view._origin.of(decoded(root))
        view._seen = view._origin.seen
        _show(view, real)


def share(view: DecodedView, why: str) -> None:
    """Turn a view of decoded values into a view of the cache's own memory, in place; a cache that is compressed becomes dense for it."""
    from kvcompile.runtime.handle import CompressedCache, thaw

    origin = view._origin
    if isinstance(origin.root, CompressedCache):
        thaw(origin.root, why)
    real = origin.of(origin.root)
    view.__class__ = torch.Tensor  # type: ignore[assignment]
    _show(view, real)


def over_tensors(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiled graph that may write to decoded views among its arguments: they become views of dense caches first."""

    def run(*args: Any) -> Any:
        for arg in args:
            if type(arg) is DecodedView:
                share(arg, "a view of it is an argument of a compiled graph")
        return compiled(*args)

    return run


def _show(view: torch.Tensor, real: torch.Tensor) -> None:
    """Let a tensor have the memory of another."""
    with DisableTorchFunctionSubclass(), torch.no_grad(), torch.inference_mode(view.is_inference()):
        view.set_(real.untyped_storage(), real.storage_offset(), real.shape, real.stride())


def viewed(result: Any, origin: Origin) -> Any:
    """Return the tensors of a result as decoded views of an origin."""
    if isinstance(result, torch.Tensor):
        with DisableTorchFunctionSubclass():
            view = result.as_subclass(DecodedView)
        view._origin, view._seen = origin, origin.seen
        return view
    if isinstance(result, (tuple, list)):
        return type(result)([viewed(item, origin.then(operator.getitem, index)) for index, item in enumerate(result)])
    return result
