"""The handle: what the caller holds in place of a dense cache tensor.

It has the dense tensor's shape, dtype and device, one element of memory (a NaN), and a state. Compiled
code sees a plain tensor; everything else goes through ``__torch_function__``, so that touching it can
neither crash nor lie:

* shape, dtype, device, size()... answer as the dense tensor would
* zero_() (a cache's ``reset``), fill_(0), mul_(0) and [...] = 0 empty it; indexing rows, index_select,
  repeat_interleave (beam search, batch select), [..., :n, :] (crop), clone, deepcopy and pickling act on the
  codes, never on decoded values
* any other read gives the decoded values, as a view where the dense tensor's result would share its memory
* any other write, to it or to such a view, turns it back into the dense tensor of what its codes decode to
  (``thaw``), with one warning: right, at the dense tensor's size, until a compiled call adopts it again

A buffer that lives in a module or in a static cache keeps its identity: its class is changed in place
and its storage replaced, which costs one recompilation of each graph that saw it dense, and none after.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.types import FrameAction, FrameExecStrategy

from kvcompile.runtime.state import CacheState
from kvcompile.runtime.views import VIEWS, Origin, name_of, viewed, writes

log = logging.getLogger(__name__)

METADATA = {
    "shape", "dtype", "device", "is_cuda", "is_cpu", "layout", "requires_grad", "ndim", "is_leaf", "grad", "grad_fn", "names",
    "is_sparse", "is_quantized", "is_meta", "is_nested", "is_mps", "is_xpu", "is_xla", "_version", "itemsize", "output_nr",
    "size", "dim", "numel", "nelement", "ndimension", "__len__", "is_floating_point", "is_complex", "get_device", "element_size",
    "type", "is_inference", "is_pinned", "is_shared", "has_names", "__hash__", "is_contiguous", "stride", "storage_offset", "_is_view",
    "__class__", "_base", "_backward_hooks", "is_conj", "is_neg",
}


class CompressedCache(torch.Tensor):
    """A cache tensor whose values live compressed in a store; see the module docstring for what it can do."""

    _kv: CacheState
    _length: int
    _epoch: int
    _face: tuple[Any, ...]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            # Dynamo traces this branch into its graph; the next one runs while it looks at the real tensor.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*_exposed(args), **{name: _exposed(item) for name, item in kwargs.items()})
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = name_of(func)
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = HANDLERS.get(name)
        if handler is not None and isinstance(args[0], CompressedCache):
            found = handler(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return _outside(func, name, args, dict(kwargs))

    # Tensor's own are written in Python: Dynamo would ask ``__torch_function__`` for the bound method, and break the graph.

    def split(self, split_size: Any, dim: int = 0) -> Any:
        """As ``torch.Tensor.split``."""
        if torch.compiler.is_dynamo_compiling():
            return torch.ops.kvcompile.expose(self).split(split_size, dim)
        return torch.Tensor.split(self, split_size, dim)

    def unflatten(self, dim: Any, sizes: Any) -> Any:
        """As ``torch.Tensor.unflatten``."""
        if torch.compiler.is_dynamo_compiling():
            return torch.ops.kvcompile.expose(self).unflatten(dim, sizes)
        return torch.Tensor.unflatten(self, dim, sizes)


# Called from code that Dynamo gave up on, this is a frame that Dynamo would compile for itself, as if it were the model's.
_ENTRY = CompressedCache.__torch_function__.__func__.__code__  # type: ignore[attr-defined]
set_code_exec_strategy(_ENTRY, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))


def _exposed(item: Any) -> Any:
    """Arguments in which every compressed cache is the dense tensor that it stands for; Dynamo traces this."""
    if isinstance(item, CompressedCache):
        return torch.ops.kvcompile.expose(item)
    if isinstance(item, (list, tuple)):
        return type(item)([_exposed(part) for part in item])
    return item


def is_handle(value: object) -> bool:
    """Whether a value is a compressed cache tensor."""
    return isinstance(value, CompressedCache)


_STUBS: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _stub(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The one NaN that all handles of a dtype and device share: whoever reads it by force reads no number."""
    key = (dtype, device)
    if key not in _STUBS:
        with torch.inference_mode(False):
            _STUBS[key] = torch.full((1,), float("nan"), dtype=dtype, device=device)
    return _STUBS[key]


def face_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What compiled code is compiled for: shape, dtype and device."""
    return tuple(tensor.shape), tensor.dtype, tensor.device


def make(state: CacheState, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, length: int | None = None) -> CompressedCache:
    """A new handle of ``shape`` on a state."""
    # No view of the stub: what is thawed must own its memory alone to be taken over again.
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), torch.inference_mode(False):
        handle = torch.Tensor._make_subclass(CompressedCache, torch.empty(0, dtype=dtype, device=device))
        handle.set_(_stub(dtype, device).untyped_storage(), 0, shape, (0,) * len(shape))
        handle._face = face_of(handle)
    _attach(handle, state, state.length if length is None else length)
    return handle


def take_over(tensor: torch.Tensor, state: CacheState) -> None:
    """Turn a dense tensor into a handle in place: its memory is gone, its identity stays."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        stub = _stub(tensor.dtype, tensor.device)
        shape = tensor.shape
        tensor.set_(stub.untyped_storage(), 0, shape, (0,) * len(shape))
        tensor.__class__ = CompressedCache
        tensor._face = face_of(tensor)  # type: ignore[attr-defined]
    _attach(tensor, state, state.length)  # type: ignore[arg-type]


def can_take_over(tensor: torch.Tensor) -> bool:
    """Whether a tensor owns its memory and nobody else holds a view of it, so that changing it in place frees it and surprises nobody."""
    return type(tensor) is torch.Tensor and tensor._base is None and not tensor.requires_grad and _holders(tensor) <= 1


def _holders(tensor: torch.Tensor) -> int:
    """How many tensors share the memory, as far as the storage knows: itself, views of it, detached ones."""
    storage = tensor.untyped_storage()
    # One of the uses is the storage object just made.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # type: ignore[attr-defined]


def rebind(handle: CompressedCache, state: CacheState, length: int) -> None:
    """Let a handle show the last of ``length`` tokens of another state."""
    _attach(handle, state, length)


def _attach(handle: CompressedCache, state: CacheState, length: int) -> None:
    handle._kv, handle._length, handle._epoch = state, length, state.epoch


def thaw(handle: CompressedCache, why: str) -> torch.Tensor:
    """Turn a handle back into the dense tensor that it stands for, in place: its identity stays, the bytes it saved are used again.

    ``why`` is said once for each reason, unless the cache is empty, which costs nothing but the memory.
    """
    if handle._length:
        _say(why, handle.numel() * handle.element_size())
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), torch.inference_mode(handle.is_inference()):
        dense = decoded(handle).contiguous()
        handle.__class__ = torch.Tensor  # type: ignore[assignment]
        handle.set_(dense.untyped_storage(), dense.storage_offset(), dense.shape, dense.stride())
    return handle


@functools.cache
def _say(why: str, size: int) -> None:
    """Warn, once for each reason and size."""
    log.warning("a compressed cache tensor becomes the dense tensor of %d bytes again: %s", size, why)


def decoded(value: torch.Tensor) -> torch.Tensor:
    """A dense copy of what a compressed cache tensor stands for; any other tensor as it is."""
    if not isinstance(value, CompressedCache):
        return value
    _resume(value)
    with torch._C.DisableTorchFunctionSubclass():
        return value._kv.dense(tuple(value.shape), value._length)


def in_full(args: Sequence[Any], given: Collection[int], written: Mapping[int, str]) -> list[Any]:
    """Arguments in which those of index ``given`` are dense: the tensors themselves where a graph writes them, else decoded copies."""
    return [
        thaw(arg, written[index]) if index in written and is_handle(arg) else decoded(arg) if index in given else arg
        for index, arg in enumerate(args)
    ]


def shown(handle: CompressedCache) -> int:
    """How many tokens a handle shows: the last ones before its length."""
    return min(handle._length, next(iter(handle._kv.axes.values())).room(handle.shape))


def _resume(handle: CompressedCache) -> None:
    handle._kv.resume(handle._length, handle._epoch, shown(handle))


def _derived(handle: CompressedCache, state: CacheState, shape: tuple[int, ...], length: int) -> CompressedCache:
    return make(state, shape, handle.dtype, handle.device, length)


def _batch_dim(handle: CompressedCache) -> int | None:
    axes = next(iter(handle._kv.axes.values()))
    return axes.labels.index(("B",)) if ("B",) in axes.labels else None


def _rows(handle: CompressedCache, rows: torch.Tensor) -> CompressedCache:
    _resume(handle)
    dim = _batch_dim(handle)
    state = handle._kv.mapped(lambda store: store.select_rows(rows))
    state.length = handle._length
    shape = list(handle.shape)
    shape[dim] = int(rows.shape[0])  # type: ignore[index]
    return _derived(handle, state, tuple(shape), handle._length)


def _zero(handle: CompressedCache) -> CompressedCache:
    handle._kv.clear()
    handle._length, handle._epoch = 0, handle._kv.epoch
    return handle


def _index_select(handle: CompressedCache, dim: int, index: torch.Tensor) -> Any:
    if dim % handle.dim() != _batch_dim(handle):
        return NotImplemented
    return _rows(handle, index)


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
            rows = item.nonzero().flatten() if item.dtype == torch.bool else item
            return _rows(handle, rows)
        if isinstance(item, slice):
            return _rows(handle, torch.arange(handle.shape[dim], device=handle.device)[item])
        return NotImplemented
    axes = next(iter(handle._kv.axes.values()))
    if dim == axes.token_dim and isinstance(item, slice) and not axes.pool:
        start, stop, step = item.indices(handle.shape[dim])
        if start == 0 and step == 1 and stop <= handle._length == handle.shape[dim]:
            _resume(handle)
            shape = list(handle.shape)
            shape[dim] = stop
            made = _derived(handle, handle._kv, tuple(shape), stop)
            made._epoch = handle._epoch
            return made
        if step == 1 and start < stop and shown(handle) == handle.shape[dim] and handle._kv.by_token:
            _resume(handle)
            shape = list(handle.shape)
            shape[dim] = stop - start
            moved = handle._kv.moved(handle._length - shown(handle) + start, stop - start, None)
            return _derived(handle, moved, tuple(shape), stop - start)
    return NotImplemented


def _copy(handle: CompressedCache, *args: Any, **kwargs: Any) -> CompressedCache:
    _resume(handle)
    state = handle._kv.mapped(lambda store: store.clone())
    state.length = handle._length
    return _derived(handle, state, tuple(handle.shape), handle._length)


def _deepcopy(handle: CompressedCache, memo: dict[int, Any]) -> CompressedCache:
    if id(handle) not in memo:
        memo[id(handle)] = _copy(handle)
    return memo[id(handle)]


def _same(handle: CompressedCache, *args: Any, **kwargs: Any) -> CompressedCache:
    return handle


def _to(handle: CompressedCache, *args: Any, **kwargs: Any) -> Any:
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k in {"dtype", "device", "non_blocking"}})
    same = (device is None or device == handle.device) and (dtype is None or dtype == handle.dtype)
    return handle if same and not kwargs.get("copy") else NotImplemented


def _reduce(handle: CompressedCache, protocol: int) -> Any:
    _resume(handle)
    parts = {part: (store.spec, store.planes) for part, store in handle._kv.stores.items()}
    ring = handle._kv.ring, handle._kv.top
    return rebuild, (handle._kv.axes, parts, tuple(handle.shape), handle.dtype, str(handle.device), handle._length, *ring)


def rebuild(
    axes: Any, parts: Any, shape: tuple[int, ...], dtype: torch.dtype, device: str, length: int, ring: int | None = None, top: int = 0
) -> CompressedCache:
    """A handle from what pickling kept: planes and layout, codes as they were."""
    from kvcompile.runtime.store import Store

    stores = {}
    for part, (spec, planes) in parts.items():
        stores[part] = Store.holding(spec, list(planes))
    del device
    state = CacheState(axes, stores, length, ring=ring)
    state.top = max(top, length)
    return make(state, shape, dtype, next(iter(stores.values())).device, length)


def _repr(handle: CompressedCache, **kwargs: Any) -> str:
    schemes = " + ".join(store.spec.scheme.spell() for store in handle._kv.stores.values())
    return f"CompressedCache(shape={tuple(handle.shape)}, tokens={handle._length}, {schemes}, {handle._kv.nbytes} bytes)"


def _nought(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and value == 0


def _clear_if_nought(handle: CompressedCache, value: Any) -> Any:
    return _zero(handle) if _nought(value) else NotImplemented


def _setitem(handle: CompressedCache, index: Any, value: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if not _nought(value) or not all(item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in items):
        return NotImplemented
    _zero(handle)
    return None


HANDLERS: dict[str, Callable[..., Any]] = {
    "zero_": _zero, "fill_": _clear_if_nought, "mul_": _clear_if_nought, "__imul__": _clear_if_nought, "__setitem__": _setitem,
    "index_select": _index_select, "repeat_interleave": _repeat_interleave, "__getitem__": _getitem, "clone": _copy,
    "__deepcopy__": _deepcopy, "detach": _same, "contiguous": _same, "to": _to, "__reduce_ex__": _reduce, "__repr__": _repr,
    "__format__": lambda handle, spec: _repr(handle),
}


def _outside(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation from outside compiled code that acts on values."""
    target = args[0] if args else None
    target = kwargs.get("out", target)
    if writes(name, kwargs) and isinstance(target, CompressedCache):
        thaw(target, f"{name} writes to it outside of compiled code")
        return func(*args, **kwargs)
    log.debug("%s outside compiled code reads a compressed cache: decoding it", name)
    plain_args, plain_kwargs = torch.utils._pytree.tree_map(decoded, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if name not in VIEWS or not args or args[0] is not target or not isinstance(target, CompressedCache):
        return result
    return viewed(result, Origin(target).then(func, *plain_args[1:], **plain_kwargs))
