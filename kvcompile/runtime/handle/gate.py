"""Gate: the only way in which uncompiled code writes to a compressed cache, whole or through a view.

It gets the written tensor (the cache itself, a part of it, or a view) and the operation, and tries in this order:

* a shortcut, if the target is the whole cache: clearing it or copying codes decodes nothing
* the codes: an operation that overwrites its target is encoded (``writes``), through the target's geometry in the cache
* the dense tensor: the cache becomes dense, its parts and views become views of its memory, and the operation runs on those

Views and parts are not notified: each records the state of its cache and updates when that has changed (``tensor.refresh``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvcompile.passes.graph.dynamo import DisableTorchFunctionSubclass, tree_map
from kvcompile.runtime.handle.callers import user_line
from kvcompile.runtime.handle.tensor import CompressedCache, attach, decoded, home, refresh, same_codes, to_dense, write_tokens
from kvcompile.runtime.handle.writes import overwrites


def write(target: torch.Tensor, func: Callable[..., Any], name: str, rest: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Return the result of ``func(target, *rest, **named)``, which writes to ``target``: a compressed cache, a part, or a view of one.

    The result is ``target``, or None for ``__setitem__``. If the write cannot be encoded, the whole cache becomes dense.
    """
    root, place = home(target)
    if place is None and _shortcut(root, name, rest, named):
        return None if name == "__setitem__" else target
    plain, plain_named = tree_map(_values, (rest, dict(named)))
    if overwrites(name, (target, *rest), named):
        def change(dense: torch.Tensor) -> Any:
            return func(dense if place is None else place.within(dense), *plain, **plain_named)

        if write_tokens(root, name, change):
            refresh(target)
            return None if name == "__setitem__" else target
    to_dense(root, f"{name} writes to it outside of compiled code, at {user_line()}")
    return func(target, *plain, **plain_named)


def _values(value: Any) -> Any:
    """Return the current values of a compressed cache or of a view of one; any other value unchanged."""
    return decoded(value)


def _shortcut(root: CompressedCache, name: str, rest: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Write to a whole cache without decoding; return whether that was possible (if not, nothing has changed)."""
    made = SHORTCUTS.get(name)
    return made is not None and not named and made(root, *rest)


def clear(root: CompressedCache) -> bool:
    """Empty a cache whose tensor is overwritten with zeros, as older transformers reset caches, and return True.

    Returns False, without a change, if every slot counts as a token.
    """
    if root._kv.grown:
        return False
    if not root._alone:
        # Other handles continue from its codes.
        attach(root, root._kv.mapped(lambda store: type(store)(store.spec, store.batch, store.device, 0, store.rope)), 0)
    root._kv.clear()
    root._length, root._epoch = 0, root._kv.epoch
    return True


def _fill(root: CompressedCache, value: Any) -> bool:
    return _nought(value) and clear(root)


def _multiply(root: CompressedCache, value: Any) -> bool:
    """Clear a cache that is multiplied with zero, if all its values are finite (zero times NaN is NaN); return whether it was cleared."""
    return _nought(value) and not root._kv.grown and bool(torch.isfinite(decoded(root)).all()) and clear(root)


def _assign(root: CompressedCache, index: Any, value: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in items):
        return False
    return clear(root) if _nought(value) else _copy_codes(root, value)


def _copy_codes(root: CompressedCache, source: Any, non_blocking: bool = False) -> bool:
    """Give ``root`` a copy of the codes and scales of ``source``, if that is compressed in the same way; return whether it is."""
    del non_blocking
    if not isinstance(source, CompressedCache) or source is root or not same_codes(root, source):
        return False
    with DisableTorchFunctionSubclass():
        state = source._kv.copied(source._length)
    state.moment = None
    attach(root, state, source._length)
    return True


def _nought(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and value == 0


SHORTCUTS: dict[str, Callable[..., bool]] = {
    "zero_": clear, "fill_": _fill, "mul_": _multiply, "__imul__": _multiply, "__setitem__": _assign, "copy_": _copy_codes,
}
