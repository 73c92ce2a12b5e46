"""Dispatch: run an operation on a compressed cache, or on a view of one, outside of compiled code.

An operation that needs no decoding has a handler in ``operations``, a write goes through ``gate``, and all others run on decoded copies.
Those copies are checked afterwards: a result in a copy's memory becomes a view of the cache, and a copy with a newer version was written
by an operation that does not declare it by name or schema.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.errors import CacheStale
from kvcompile.passes.graph.dynamo import DisableTorchFunctionSubclass, TracingContext, shares_memory, tree_leaves, tree_map
from kvcompile.runtime.handle import gate
from kvcompile.runtime.handle.callers import user_line
from kvcompile.runtime.handle.operations import HANDLERS, concatenated
from kvcompile.runtime.handle.tensor import decoded, home, is_handle, refresh, to_dense
from kvcompile.runtime.handle.views import ViewGeometry, is_setter, is_view, view_of, written

log = logging.getLogger(__name__)

JOINS = {"cat", "concat", "concatenate"}

ADDRESSES = {
    "data_ptr", "const_data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__", "__cuda_array_interface__", "share_memory_",
    "set_", "resize_", "resize_as_",
}
"""Operations that expose or replace the tensor's memory."""

PLAIN = (torch.Tensor, torch.nn.Parameter)


def answer(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of operation ``name`` on arguments that contain a compressed cache or a view of one."""
    tree_map(refresh, (args, kwargs))
    target: Any = args[0] if args else None
    if is_setter(func):
        return _assigned(func, name, args)
    if is_handle(target) and (handler := HANDLERS.get(name)) is not None:
        found = handler(*args, **kwargs)
        if found is not NotImplemented:
            return found
    if name in JOINS and isinstance(target, (tuple, list)) and target and is_handle(target[0]):
        made = concatenated(*args, **kwargs)
        if made is not NotImplemented:
            return made
    if name == "__iter__":
        return iter(target.unbind(0))
    if name in ADDRESSES and _stands(target):
        return _given_away(func, name, args, kwargs)
    touched = [item for item in written(func, name, args, kwargs) if _stands(item)]
    if len(touched) == 1 and touched[0] is target and not any(item is target for item in tree_leaves((args[1:], kwargs))):
        return gate.write(touched[0], func, name, args[1:], kwargs)
    for item in touched:
        to_dense(item, f"{name} writes to it outside of compiled code, at {user_line()}")
    return _on_values(func, name, args, kwargs)


def _stands(value: Any) -> bool:
    """Return whether a value represents a dense tensor: a compressed cache, a part of one, or a decoded view."""
    return is_handle(value) or is_view(value)


def _assigned(func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> None:
    """Assign to a property: ``data`` takes the memory of the assigned tensor, others write to the tensor."""
    target, value = args
    if _stands(value) and name == "data":
        to_dense(value, f"its memory becomes another tensor's, at {user_line()}")
    if is_view(target) and name == "data":
        target.__class__ = torch.Tensor  # type: ignore[assignment]
    elif _stands(target):
        to_dense(target, f"{name} is assigned, at {user_line()}")
    func(target, decoded(value))


def _given_away(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a cache dense and return the result of an operation that exposes its memory.

    While torch traces, the cache stays compressed.
    """
    # Torch before 2.12 asks traced tensors for their storage to describe them, without reading values.
    if TracingContext.try_get() is not None:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    to_dense(args[0], f"{name} accesses its memory, at {user_line()}")
    return func(*args, **kwargs)


def _on_values(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation on decoded copies, with views of the copies turned into views of the caches.

    Caches that it writes to become dense. If its result is a view that cannot be followed, all become dense and it runs on them instead.
    """
    log.debug("%s outside compiled code reads a compressed cache: decoding it", name)
    operands = _Operands([])
    plain_args, plain_kwargs = tree_map(operands.plain, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    operands.keep_writes(name)
    if operands.strange(result):
        for item in operands.taken:
            to_dense(item.value, f"{name} makes a view of it that cannot be followed, at {user_line()}")
        return func(*args, **kwargs)
    if name in {"numpy", "__array__"} and operands.taken:
        result.flags.writeable = False
    return tree_map(operands.given, result)


@dataclass
class _Operand:
    """A compressed argument, its decoded copy for an operation, and the copy's version before."""

    value: Any
    plain: torch.Tensor
    version: int


@dataclass
class _Operands:
    """The compressed operands of one operation."""

    taken: list[_Operand]

    def plain(self, value: Any) -> Any:
        """Return the decoded copy of a compressed value, which is noted as taken; any other value unchanged."""
        if not _stands(value):
            return value
        for item in self.taken:
            if item.value is value:
                return item.plain
        with DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
            plain = _copy_of(value)
        self.taken.append(_Operand(value, plain, plain._version))
        return plain

    def keep_writes(self, name: str) -> None:
        """Copy writes to decoded copies into the caches, which become dense."""
        for item in self.taken:
            if item.plain._version != item.version:
                to_dense(item.value, f"{name} writes to it outside of compiled code, at {user_line()}")
                with torch.no_grad():
                    item.value.copy_(item.plain)

    def strange(self, result: Any) -> bool:
        """Return whether a result shares a copy's memory but is not a plain view: of another class, or lazily negated or conjugated."""
        found: list[bool] = []

        def look(value: Any) -> None:
            if isinstance(value, torch.Tensor) and not any(value is item.plain for item in self.taken):
                found.append(self.operand(value) is not None and (type(value) not in PLAIN or value.is_neg() or value.is_conj()))

        tree_map(look, result)
        return any(found)

    def operand(self, result: torch.Tensor) -> _Operand | None:
        """Return the operand whose copy shares memory with a result; None without one."""
        strided = result.layout is torch.strided
        return next((item for item in self.taken if strided and shares_memory(item.plain, result)), None)

    def given(self, result: Any) -> Any:
        """Return an operation's result for the caller.

        A decoded copy becomes the cache that it was made from, a tensor in a copy's memory becomes a view of that cache, and any other
        result is returned unchanged.
        """
        if not isinstance(result, torch.Tensor):
            return result
        for item in self.taken:
            if item.plain is result:
                return item.value
        found = self.operand(result)
        if found is None:
            return result
        root, _ = home(found.value)
        return view_of(root, result) if is_handle(root) else ViewGeometry.of(result).within(root)


def _copy_of(value: Any) -> torch.Tensor:
    """Return a decoded copy of a cache; of a part, a view of a decoded copy of the whole, at the same place in memory.

    A decoded view is returned as a plain tensor. If other tensors have overwritten tokens of the whole, only the part is decoded.
    """
    if is_view(value):
        return torch.Tensor.as_subclass(value, torch.Tensor)
    root, place = home(value)
    if place is None:
        return decoded(value).contiguous()
    try:
        return place.within(decoded(root))
    except CacheStale:
        # Other tensors continued from the part's codes and overwrote tokens of the whole: only the part can be read, and not written.
        return decoded(value)
