"""Dispatch: answer an operation on a compressed cache outside of compiled code, by its codes where they can be used, else by values.

An operation that need not decode has a handler in ``operations``; the rest is told apart by the tensors that it writes to
(``views.written``) and by whether it overwrites (``writes``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvcompile.passes.graph.dynamo import DisableTorchFunctionSubclass, TracingContext, tree_map
from kvcompile.runtime.callers import user_line
from kvcompile.runtime.handle import decoded, is_handle, put, thaw
from kvcompile.runtime.operations import HANDLERS, concatenated
from kvcompile.runtime.views import VIEWS, Origin, viewed, written
from kvcompile.runtime.writes import overwrites

log = logging.getLogger(__name__)

JOINS = {"cat", "concat", "concatenate"}

ADDRESSES = {"data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__", "share_memory_", "set_", "resize_"}
"""What gives the tensor's memory away, or changes which it is."""


def answer(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation, called ``name``, on arguments with a compressed cache among them, outside of compiled code."""
    handler = HANDLERS.get(name)
    if handler is not None and args and is_handle(args[0]):
        found = handler(*args, **kwargs)
        if found is not NotImplemented:
            return found
    return _on_values(func, name, args, kwargs)


def _on_values(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation on values: it writes to a cache, or it reads decoded values."""
    target = args[0] if args else None
    if name in JOINS and isinstance(target, (tuple, list)) and target and is_handle(target[0]):
        made = concatenated(*args, **kwargs)
        if made is not NotImplemented:
            return made
    if name in ADDRESSES and is_handle(target):
        # Torch before 2.12 asks the tensors that it traces for their storage, to describe them: it means no access to values.
        if TracingContext.try_get() is not None:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        thaw(target, f"{name} asks for its memory, at {user_line()}")
        return func(*args, **kwargs)
    touched = [item for item in written(func, name, args, kwargs) if is_handle(item)]
    if touched:
        plain_args, plain_kwargs = tree_map(decoded, (args[1:], kwargs))
        alone = len(touched) == 1 and touched[0] is target and overwrites(name, kwargs)
        if alone and put(touched[0], name, lambda dense: func(dense, *plain_args, **plain_kwargs)):
            return None if name == "__setitem__" else target
        for item in touched:
            if is_handle(item):
                thaw(item, f"{name} writes to it outside of compiled code, at {user_line()}")
        return func(*args, **kwargs)
    log.debug("%s outside compiled code reads a compressed cache: decoding it", name)
    plain_args, plain_kwargs = tree_map(decoded, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if name not in VIEWS or not is_handle(target):
        return result
    return viewed(result, Origin(target).then(func, *plain_args[1:], **plain_kwargs))
