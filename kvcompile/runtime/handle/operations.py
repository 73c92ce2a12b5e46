"""Operations on the codes of a compressed cache outside of compiled code; see ``tensor`` for their semantics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvcompile.errors import OtherFormat, WindowPassed
from kvcompile.passes.graph.dynamo import DisableTorchFunctionSubclass, mark_dynamic, parse_to
from kvcompile.runtime.handle.callers import user_line
from kvcompile.runtime.handle.tensor import CompressedCache, make, resume, visible_length, warn_of_eager_use
from kvcompile.runtime.handle.views import join
from kvcompile.runtime.handle.writes import appended
from kvcompile.runtime.store.adaptive_store import store_class
from kvcompile.runtime.store.dense_layout import tokens_of
from kvcompile.runtime.store.live_caches import add_fork
from kvcompile.runtime.store.parked_rows import in_one
from kvcompile.runtime.store.shared_planes import joined
from kvcompile.runtime.store.state import CacheState


def _derived(
    handle: CompressedCache, state: CacheState, shape: tuple[int, ...], length: int, index: Any = None
) -> CompressedCache:
    """Return a new handle of ``state``, derived from ``handle`` by indexing or copying.

    ``index``: the index, if the dense tensor's result would be a view; the new handle is then registered as that part of the cache.
    """
    made = make(state, shape, handle.dtype, handle.device, length, state is not handle._kv)
    if state is handle._kv:
        handle._alone = False
    if index is not None:
        join(made, handle, index)
    return made


def _batch_dim(handle: CompressedCache) -> int | None:
    return next(iter(handle._kv.axes.values())).batch_dim


def _rows(handle: CompressedCache, rows: torch.Tensor, index: Any = None) -> Any:
    resume(handle)
    if not in_one(handle._kv, handle.shape):
        return NotImplemented
    dim = _batch_dim(handle)
    state = handle._kv.mapped(lambda store: store.select_rows(rows))
    state.length = handle._length
    shape = list(handle.shape)
    shape[dim] = int(rows.shape[0])  # type: ignore[index]
    return _derived(handle, state, tuple(shape), handle._length, index)


def _index_select(handle: CompressedCache, dim: int, index: torch.Tensor) -> Any:
    if dim % handle.dim() != _batch_dim(handle):
        return NotImplemented
    return _rows(handle, index.reshape(-1))


def _repeat_interleave(handle: CompressedCache, repeats: Any, dim: int | None = None, **rest: Any) -> Any:
    if dim is None or dim % handle.dim() != _batch_dim(handle) or rest:
        return NotImplemented
    size = handle.shape[dim]
    rows = torch.arange(size, device=handle.device).repeat_interleave(repeats)
    return _rows(handle, rows)


def _getitem(handle: CompressedCache, index: Any) -> Any:
    items = list(index) if isinstance(index, tuple) else [index]
    rank = handle.dim()
    if Ellipsis in [item for item in items if not isinstance(item, torch.Tensor)]:
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (rank - len(items) + 1)
    items += [slice(None)] * (rank - len(items))
    used = [(dim, item) for dim, item in enumerate(items) if not (isinstance(item, slice) and item == slice(None))]
    if not used:
        return handle
    if len(used) != 1 or len(items) != rank:
        return NotImplemented
    dim, item = used[0]
    if dim == _batch_dim(handle):
        if isinstance(item, torch.Tensor) and item.dim() == 1:
            size = handle.shape[dim]
            if item.dtype is torch.uint8 or (item.dtype is torch.bool and len(item) != size):
                # A mask of old, or one that does not fit: as torch has it.
                return NotImplemented
            rows = item.nonzero().flatten() if item.dtype is torch.bool else torch.where(item < 0, item + size, item)
            return _rows(handle, rows)
        if isinstance(item, slice):
            return _rows(handle, torch.arange(handle.shape[dim], device=handle.device)[item], index)
        return NotImplemented
    axes = next(iter(handle._kv.axes.values()))
    if dim == axes.token_dim and isinstance(item, slice) and not axes.paged:
        start, stop, step = item.indices(handle.shape[dim])
        if start == 0 and step == 1 and stop <= handle._length == handle.shape[dim] and handle._kv.grown:
            resume(handle)
            shape = list(handle.shape)
            shape[dim] = stop
            made = _derived(handle, handle._kv, tuple(shape), stop, index)
            made._epoch = handle._epoch
            return made
        if step == 1 and start < stop and visible_length(handle) == handle.shape[dim] and handle._kv.by_token:
            resume(handle)
            if not in_one(handle._kv, handle.shape):
                return NotImplemented
            shape = list(handle.shape)
            shape[dim] = stop - start
            moved = handle._kv.moved(handle._length - visible_length(handle) + start, stop - start, None)
            return _derived(handle, moved, tuple(shape), stop - start, index)
    return NotImplemented


def _copy(handle: CompressedCache, *args: Any, **kwargs: Any) -> CompressedCache:
    resume(handle)
    return _derived(handle, handle._kv.copied(handle._length), tuple(handle.shape), handle._length)


class ForkMemo(dict[int, Any]):
    """A memo for ``copy.deepcopy`` with which compressed caches are forked instead of copied."""


def _fork(handle: CompressedCache) -> CompressedCache:
    """Return a handle of a state that shares its planes with the handle's until one of the two is written."""
    resume(handle)
    state = handle._kv.forked(handle._length)
    add_fork(state, handle._kv)
    return _derived(handle, state, tuple(handle.shape), handle._length)


def _deepcopy(handle: CompressedCache, memo: dict[int, Any]) -> CompressedCache:
    if id(handle) not in memo:
        memo[id(handle)] = _fork(handle) if isinstance(memo, ForkMemo) else _copy(handle)
    made: CompressedCache = memo[id(handle)]
    return made


def _same(handle: CompressedCache, *args: Any, **kwargs: Any) -> CompressedCache:
    return handle


def _to(handle: CompressedCache, *args: Any, **kwargs: Any) -> Any:
    device, dtype, _, _ = parse_to(*args, **{k: v for k, v in kwargs.items() if k in {"dtype", "device", "non_blocking"}})
    same = (device is None or device == handle.device) and (dtype is None or dtype == handle.dtype)
    return handle if same and not kwargs.get("copy") else NotImplemented


FORMAT = 1
"""Version of the pickled records; increased when they change."""


def _reduce(handle: CompressedCache, protocol: int) -> Any:
    resume(handle)
    if not in_one(handle._kv, handle.shape):
        return NotImplemented
    parts = {part: (store.spec, store.planes) for part, store in handle._kv.stores.items()}
    rest = handle._kv.slots, handle._kv.top, handle._kv.grown
    facts = handle._kv.axes, parts, tuple(handle.shape), handle.dtype, str(handle.device), handle._length
    padding = {part: store.padding.planes for part, store in handle._kv.stores.items() if store.padding is not None}
    return rebuild, (*facts, *rest, FORMAT, handle._kv.held, *([padding] if padding else []))


def rebuild(
    axes: Any, parts: Any, shape: tuple[int, ...], dtype: torch.dtype, device: str, length: int, slots: int | None = None, top: int = 0,
    grown: bool = False, form: int = 0, held: int = 0, padding: Any = None,
) -> CompressedCache:
    """Return a handle from its pickled planes and layout, with codes unchanged. Raises OtherFormat for a file of another version."""
    if form != FORMAT:
        raise OtherFormat(expected=FORMAT, found=form)
    stores = {}
    for part, (spec, planes) in parts.items():
        stores[part] = joined(store_class(spec).holding(spec, list(planes)))
        stores[part].pin()
        if padding and part in padding:
            stores[part].padding = joined(store_class(spec).holding(spec, list(padding[part])))
    del device
    state = CacheState(axes, stores, length, slots=slots, grown=grown)
    # A cropped tensor of a state that advanced: its stores hold more tokens than it shows.
    state.top = state.behind = max(top, length)
    state.held = held
    made = make(state, shape, dtype, next(iter(stores.values())).device, length, True)
    if grown:
        # The next call brings a longer one, as of a handle that a call returned.
        mark_dynamic(made, next(iter(axes.values())).token_dim)
    return made


def _repr(handle: CompressedCache, **kwargs: Any) -> str:
    schemes = " + ".join(store.spec.scheme.spec() for store in handle._kv.stores.values())
    return f"CompressedCache(shape={tuple(handle.shape)}, tokens={handle._length}, {schemes}, {handle._kv.nbytes} bytes)"


def concatenated(parts: Sequence[Any], dim: int = 0, **rest: Any) -> Any:
    """Return a handle of the cache ``parts[0]`` with the tokens of the other parts encoded after its own; NotImplemented if they cannot be.

    Codes that other handles continue from are copied first.
    """
    handle, *new = parts
    axes = next(iter(handle._kv.axes.values()))
    grown = dim % handle.dim() == axes.token_dim and not axes.paged and handle._kv.slots is None and not rest
    if not grown or not new or handle._length != handle.shape[axes.token_dim]:
        return NotImplemented
    plain = all(
        type(item) is torch.Tensor and item.dtype == handle.dtype and item.device == handle.device and item.dim() == handle.dim()
        and not item.requires_grad for item in new
    )
    shape = list(handle.shape)
    fits = plain and all([*item.shape[: axes.token_dim], *item.shape[axes.token_dim + 1 :]]
                         == [*shape[: axes.token_dim], *shape[axes.token_dim + 1 :]] for item in new)
    if not fits:
        return NotImplemented
    resume(handle)
    with DisableTorchFunctionSubclass(), torch.no_grad():
        tokens = torch.cat(new, dim)
        state = handle._kv
        if handle._alone or not handle._length == state.length == state.behind:
            state = _gone_back(_copy(handle)._kv, handle._length)
        parts_of = {
            part: tokens_of(tokens, state.axes[part], store.spec.slot.heads, store.spec.slot.head_dim)
            for part, store in state.stores.items()
        } if state is not None else {}
        if state is None or not appended(state, parts_of):
            return NotImplemented
    warn_of_eager_use(user_line())
    shape[axes.token_dim] = state.length
    made = make(state, tuple(shape), handle.dtype, handle.device, state.length, state is not handle._kv)
    mark_dynamic(made, axes.token_dim)
    return made


def _gone_back(state: CacheState, length: int) -> CacheState | None:
    """Roll back ``state``, which no other handle uses, to its first ``length`` tokens and return it; None if its window has lost tokens."""
    try:
        state.rewind(length)
    except WindowPassed:
        return None
    state.length = state.behind = state.top = length
    return state


def _requires_grad(handle: CompressedCache, requires_grad: bool = True) -> Any:
    return NotImplemented if requires_grad else handle


HANDLERS: dict[str, Callable[..., Any]] = {
    "index_select": _index_select, "repeat_interleave": _repeat_interleave, "__getitem__": _getitem, "clone": _copy,
    "__deepcopy__": _deepcopy, "detach": _same, "contiguous": _same, "to": _to, "__reduce_ex__": _reduce, "__repr__": _repr,
    "__format__": lambda handle, spec: _repr(handle), "data": _same, "requires_grad_": _requires_grad,
}
"""Handlers of operations that read or copy codes, by name; one that returns NotImplemented leaves the operation to ``dispatch``."""
