"""Views: decoded tensors that result from indexing or reshaping a compressed cache outside of compiled code.

A dense cache would share memory with its views, so a write into one changes the other. Views are detected by memory: an operation runs on
a decoded copy, and a result in that copy's memory is a view of the cache (``dispatch``). A view holds decoded values, which are
decoded again if the cache was written since (``tensor.refresh``). A write to a view goes through the gate of its cache (``gate``): into
the codes, or else the cache becomes dense, and all its views become views of its memory.

Parts of a cache that are handles themselves (rows, a crop) are views too, with codes in place of decoded values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch

from kvcompile.passes.graph.dynamo import DisableTorchFunctionSubclass, OpOverloadPacket
from kvcompile.runtime.store.state import CacheState


class Handle(Protocol):
    """The interface of a compressed cache tensor for modules below its class."""

    _kv: CacheState
    _length: int
    _epoch: int
    _origin: Origin | None

    @property
    def shape(self) -> torch.Size:
        """The shape of the dense tensor that the handle represents."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the dense tensor that the handle represents, not that of its codes."""

    @property
    def device(self) -> torch.device:
        """The device of the dense tensor that the handle represents, which holds the stores too."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the indexed part: a handle with codes for whole rows or a range of tokens, else a view with decoded values."""

    def remember(self, view: torch.Tensor) -> None:
        """Register a part or view of the cache, so that it becomes a view of the dense tensor when the cache turns dense."""


@dataclass
class Above:
    """Functions of modules above this one, which ``handle/__init__`` sets so that the tensor classes can call them."""

    answer: Callable[[Callable[..., Any], str, tuple[Any, ...], dict[str, Any]], Any]
    """``dispatch.answer``: the result of an operation by name, on arguments with a compressed cache or a view of one."""
    to_dense: Callable[[torch.Tensor, str], torch.Tensor]
    """``tensor.to_dense``: turns a view's cache dense, for a reason."""


def _not_yet(*args: Any) -> Any:
    raise AssertionError("kvcompile.runtime.handle was not imported as a package")


ABOVE = Above(_not_yet, _not_yet)

METADATA_OF_VIEWS = {"shape", "dtype", "device", "layout", "ndim", "size", "dim", "numel", "__len__", "__hash__", "__class__", "stride"}

ASSIGNMENTS = {f"__i{name}__" for name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "div", "and", "or", "xor", "lshift", "rshift", "matmul",
)} | {"__setitem__"}


def writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation of this name writes to its first operand or to ``out``."""
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ASSIGNMENTS
    return in_place or kwargs.get("out") is not None or kwargs.get("inplace") is True


def written(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation declares to write, with lists flattened; a torch operator declares them in its schema."""
    schema = getattr(func, "_schema", None)
    if schema is None and isinstance(func, OpOverloadPacket):
        overloads: Callable[[], list[str]] = func.overloads
        schema = getattr(func, overloads()[0])._schema
    found = []
    if schema is not None:
        given = {item.name: args[at] if at < len(args) else kwargs.get(item.name) for at, item in enumerate(schema.arguments)}
        found = [given[item.name] for item in schema.arguments if item.is_write]
    elif kwargs.get("out") is not None:
        found = [kwargs["out"]]
    elif writes(name, kwargs) or is_setter(func):
        # ``torch.nn.init`` passes its only operand by name.
        found = [args[0] if args else next(iter(kwargs.values()), None)]
    return [part for item in found for part in (item if isinstance(item, (list, tuple)) else [item])]


def is_setter(func: Callable[..., Any]) -> bool:
    """Return whether ``__torch_function__`` was called for an assignment to a property."""
    return getattr(func, "__name__", "") == "__set__"


def name_of(func: Callable[..., Any]) -> str:
    """Return the bare name of the function in ``__torch_function__``: the attribute's for a property, the operator's for an overload."""
    name = getattr(func, "__name__", "")
    name = func.__self__.__name__ if name in {"__get__", "__set__"} else name  # type: ignore[attr-defined]
    return name.partition(".")[0]


@dataclass(frozen=True)
class ViewGeometry:
    """The geometry of a view in a contiguous tensor's memory: dtype, sizes, and strides and offset in elements of that dtype."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(view: torch.Tensor) -> ViewGeometry:
        """Return the geometry of a view."""
        return ViewGeometry(view.dtype, tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the memory of ``whole``, with this dtype, offset, size and strides. Gradients are not recorded."""
        with DisableTorchFunctionSubclass(), torch.no_grad(), torch.inference_mode(whole.is_inference()):
            made = torch.empty(0, dtype=self.dtype, device=whole.device)
            return made.set_(whole.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(frozen=True, eq=False)
class Origin:
    """The cache tensor ``root`` of a view, and the view's geometry in it.

    ``index``: the index of a part whose codes can be taken again; else None. The root is kept alive: once dense, its views use its memory.
    """

    root: Handle
    place: ViewGeometry
    index: Any = None

    @property
    def seen(self) -> tuple[Any, ...]:
        """Facts of the root that change when it is written."""
        return self.root._kv, self.root._length, self.root._epoch


def _real(value: torch.Tensor) -> torch.Tensor:
    return torch.real(value)


def _set_real(value: torch.Tensor, new: torch.Tensor) -> None:
    value.copy_(new)


REAL = property(_real, _set_real)
"""The property ``real``: its assignment would bypass ``__torch_function__``."""


class DecodedView(torch.Tensor):
    """Decoded values of part of a compressed cache: reads like an ordinary tensor; see the module docstring for writes."""

    _origin: Origin
    _seen: tuple[Any, ...]
    real = REAL

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if torch.compiler.is_compiling() or (name in METADATA_OF_VIEWS and not is_setter(func)):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return ABOVE.answer(func, name, args, dict(kwargs))

    def as_subclass(self, cls: Any) -> Any:
        """Return the view as an instance of ``cls``, as ``torch.Tensor.as_subclass``, which bypasses ``__torch_function__``.

        A class other than ``torch.Tensor`` turns the cache dense.
        """
        if cls is torch.Tensor:
            return torch.ops.aten.alias(self)
        return torch.Tensor.as_subclass(ABOVE.to_dense(self, f"{cls} shows its memory"), cls)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Become a plain tensor, then call ``torch.Tensor.set_``, which bypasses ``__torch_function__``."""
        self.__class__ = torch.Tensor  # type: ignore[assignment]
        return torch.Tensor.set_(self, *args, **kwargs)


def is_view(value: object) -> TypeGuard[DecodedView]:
    """Return whether a value is a decoded view that was not turned into a view of dense memory."""
    return type(value) is DecodedView


def view_of(root: Handle, result: torch.Tensor) -> DecodedView:
    """Return a result in the memory of a decoded copy of ``root``, or of a view of it, as a view of ``root``."""
    with DisableTorchFunctionSubclass():
        view = result.as_subclass(DecodedView)
        _join(view, Origin(root, ViewGeometry.of(result)))
    return view


def join(part: Handle, root: Handle, index: Any) -> None:
    """Register a handle as the part ``[index]`` of another one, or of the cache that the other is a part of."""
    with DisableTorchFunctionSubclass():
        whole = torch.empty(root.shape, dtype=root.dtype, device="meta")
        above = root._origin
        if above is not None:
            whole = torch.empty(above.root.shape, dtype=root.dtype, device="meta").as_strided(
                above.place.size, above.place.stride, above.place.offset
            )
        place = ViewGeometry.of(whole[index])
    # A part of a part is decoded if the codes of the whole cannot be indexed again.
    _join(part, Origin(root, place, index) if above is None else Origin(above.root, place))


def _join(view: Any, origin: Origin) -> None:
    view._origin, view._seen = origin, origin.seen
    origin.root.remember(view)


def show(view: torch.Tensor, real: torch.Tensor) -> None:
    """Make ``view`` show the memory of ``real``: set its storage, offset, shape and strides in place."""
    with DisableTorchFunctionSubclass(), torch.no_grad(), torch.inference_mode(view.is_inference()):
        torch.Tensor.set_(view, real.untyped_storage(), real.storage_offset(), real.shape, real.stride())
