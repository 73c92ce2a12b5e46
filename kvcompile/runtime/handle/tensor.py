"""Tensor: the handle class, a tensor that the caller holds in place of a dense cache tensor.

It has the dense tensor's shape, dtype and device, one element of memory (a NaN), and a state. Compiled
code sees a plain tensor; all other code goes through ``__torch_function__``, so that an operation on it can
neither crash nor return wrong values:

* shape, dtype, device, size()... answer as the dense tensor would
* zero_() (a cache's ``reset``), fill_(0), mul_(0) and [...] = 0 empty it; indexing rows, index_select,
  repeat_interleave (beam search, batch select), [..., :n, :] (crop), clone, deepcopy and pickling act on the
  codes, never on decoded values
* all writes go through one ``gate``: token writes (index_copy_, slice and index assignment, copy_, index_put_, scatter_), to it or to
  a view of it, are encoded into the codes, and ``cat`` with new tokens gives a handle of the longer cache, both with one warning
  (``writes`` lists the conditions); any other write turns it back into a dense tensor of its decoded values (``to_dense``), with one
  warning: correct, at the dense tensor's size, until a compiled call adopts it again
* an operation that reads its address (data_ptr, untyped_storage, dlpack) turns it dense and gets the dense tensor's address;
  numpy() gives decoded values that numpy refuses to write to
* any other read gives the decoded values, as a view where the dense tensor's result would share its memory

A buffer of a module or of a static cache keeps its identity: its class is changed in place
and its storage replaced, which costs one recompilation of each graph that saw it dense, and none later.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeGuard, cast

import torch

from kvcompile.passes.graph.dynamo import DisableTorchFunctionSubclass, no_dynamo, storage_uses
from kvcompile.runtime.handle.callers import user_line
from kvcompile.runtime.handle.views import ABOVE, REAL, DecodedView, Origin, ViewGeometry, is_view, name_of, show
from kvcompile.runtime.handle.writes import Rejected, encode
from kvcompile.runtime.store.parked_rows import in_one
from kvcompile.runtime.store.state import CacheState
from kvcompile.runtime.store.written_once import remember

log = logging.getLogger(__name__)

METADATA = {
    *(name for name in dir(torch.Tensor) if name.startswith("is_") and inspect.isdatadescriptor(getattr(torch.Tensor, name))),
    "shape", "dtype", "device", "layout", "requires_grad", "ndim", "grad", "grad_fn", "names", "_version", "itemsize", "output_nr",
    "size", "dim", "numel", "nelement", "ndimension", "__len__", "is_floating_point", "is_complex", "get_device", "element_size",
    "type", "is_inference", "is_pinned", "is_shared", "has_names", "__hash__", "is_contiguous", "stride", "storage_offset", "_is_view",
    "__class__", "_base", "_backward_hooks", "is_conj", "is_neg",
}

_split: Callable[..., Any] = torch.Tensor.split
_unflatten: Callable[..., Any] = torch.Tensor.unflatten
"""Two of Tensor's methods, which torch wrote in Python without annotations."""


class CompressedCache(torch.Tensor):
    """A cache tensor with its values compressed in a store; see the module docstring for its operations."""

    _kv: CacheState
    _length: int
    _epoch: int
    _face: tuple[Any, ...]
    _alone: bool
    """Whether no other handle shares its state, so that a write into its codes affects nothing else."""
    _views: list[weakref.ref[Any]]
    """Its parts and decoded views: with a dense tensor they would share its memory."""
    _origin: Origin | None
    """The cache that it is a part of, and its geometry there; None for a whole cache."""
    _seen: tuple[Any, ...]
    """The cache's ``Origin.seen`` when this part was last updated."""
    real = REAL

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            # Dynamo traces this branch into its graph; the next one runs when it inspects the real tensor.
            with DisableTorchFunctionSubclass():
                return func(*_exposed(args), **{name: _exposed(item) for name, item in kwargs.items()})
        if torch.compiler.is_compiling():
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = name_of(func)
        if name in METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return ABOVE.answer(func, name, args, dict(kwargs))

    def remember(self, view: torch.Tensor) -> None:
        """Register a part or view of this cache, so that it becomes a view of the dense tensor when the cache turns dense."""
        self._views = [ref for ref in self._views if ref() is not None] + [weakref.ref(view)]

    def __copy__(self) -> Any:
        """Return a view of the whole tensor: a shallow copy of a tensor shares its memory."""
        return torch.ops.aten.alias(self)

    # torch.Tensor's versions are Python code: Dynamo would ask ``__torch_function__`` for the bound method, and break the graph.

    def split(self, split_size: Any, dim: int = 0) -> Any:
        """Return ``torch.Tensor.split`` of the cache; while Dynamo traces, of the dense tensor that the cache represents."""
        if torch.compiler.is_dynamo_compiling():
            return torch.ops.kvcompile.expose(self).split(split_size, dim)
        return _split(self, split_size, dim)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Turn the cache dense in place, then call ``torch.Tensor.set_``, which bypasses ``__torch_function__``, and return its result.

        While Dynamo traces, the cache stays compressed.
        """
        if not torch.compiler.is_dynamo_compiling():
            to_dense(self, f"set_ gives it other memory, at {user_line()}")
        return torch.Tensor.set_(self, *args, **kwargs)

    def as_subclass(self, cls: Any) -> Any:
        """Return the tensor as an instance of ``cls``, as ``torch.Tensor.as_subclass``, which bypasses ``__torch_function__``.

        For ``torch.Tensor`` it is an alias that stays compressed; any other class turns the cache dense.
        """
        if torch.compiler.is_dynamo_compiling():
            return torch.ops.kvcompile.expose(self).as_subclass(cls)
        if cls is torch.Tensor:
            return torch.ops.aten.alias(self)
        return torch.Tensor.as_subclass(to_dense(self, f"{cls} shows its memory, at {user_line()}"), cls)

    def unflatten(self, dim: Any, sizes: Any) -> Any:
        """Return ``torch.Tensor.unflatten`` of the cache; while Dynamo traces, of the dense tensor that the cache represents."""
        if torch.compiler.is_dynamo_compiling():
            return torch.ops.kvcompile.expose(self).unflatten(dim, sizes)
        return _unflatten(self, dim, sizes)


# When uncompiled code calls it, Dynamo would try to compile this frame as if it were the model's.
_ENTRY = CompressedCache.__torch_function__.__func__.__code__  # type: ignore[attr-defined]
no_dynamo(_ENTRY)


def _exposed(item: Any) -> Any:
    """Return an argument with every compressed cache replaced by the dense tensor that it represents; Dynamo traces this."""
    if isinstance(item, CompressedCache):
        return torch.ops.kvcompile.expose(item)
    if isinstance(item, (list, tuple)):
        return type(item)([_exposed(part) for part in item])
    return item


def is_handle(value: object) -> TypeGuard[CompressedCache]:
    """Return whether a value is a compressed cache tensor."""
    return isinstance(value, CompressedCache)


def _stub(state: CacheState, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the tensor [1] of one NaN that is the memory of all handles of a state, so that a raw read returns no number.

    Handles of different caches share no memory: Dynamo refuses to trace a nested region with two inputs that do.
    """
    if state.stub is None or (state.stub.dtype, state.stub.device) != (dtype, device):
        with torch.inference_mode(False):
            state.stub = torch.full((1,), float("nan"), dtype=dtype, device=device)
    return state.stub


def face_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's shape, dtype and device, which compiled code is specialised on."""
    return tuple(tensor.shape), tensor.dtype, tensor.device


def make(
    state: CacheState, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, length: int | None = None, alone: bool = False
) -> CompressedCache:
    """Return a new handle of ``shape`` for a state; ``length``: None for the state's; ``alone``: no other handle shares the state."""
    # Not a view of the stub: a tensor that becomes dense must own its memory to be adopted again.
    with DisableTorchFunctionSubclass(), torch.no_grad(), torch.inference_mode(False):
        handle = torch.Tensor._make_subclass(CompressedCache, torch.empty(0, dtype=dtype, device=device))
        torch.Tensor.set_(handle, _stub(state, dtype, device).untyped_storage(), 0, shape, (0,) * len(shape))
        handle._face = face_of(handle)
    _start(handle, state, state.length if length is None else length, alone)
    return handle


def take_over(tensor: torch.Tensor, state: CacheState) -> None:
    """Turn a dense tensor into a handle in place: its memory is freed, its identity stays."""
    with DisableTorchFunctionSubclass(), torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        stub = _stub(state, tensor.dtype, tensor.device)
        shape = tensor.shape
        tensor.set_(stub.untyped_storage(), 0, shape, (0,) * len(shape))
        tensor.__class__ = CompressedCache
        tensor._face = face_of(tensor)  # type: ignore[attr-defined]
    _start(tensor, state, state.length, True)  # type: ignore[arg-type]


def can_take_over(tensor: torch.Tensor) -> bool:
    """Return whether a tensor owns its memory and no view of it is alive, so that changing it in place frees memory and does no harm."""
    return type(tensor) is torch.Tensor and tensor._base is None and not tensor.requires_grad and _holders(tensor) <= 1


def _holders(tensor: torch.Tensor) -> int:
    """Return the number of tensors that share a tensor's storage, itself included; one more for memory that torch does not own."""
    storage = tensor.untyped_storage()
    # The storage object just created is one use. External memory (an array's, another process's) cannot be resized.
    return int(storage_uses(storage._cdata)) - 1 + (not storage.resizable())


def attach(handle: CompressedCache, state: CacheState, length: int) -> None:
    """Give a handle the state ``state`` with ``length`` tokens, shared with no other handle. Its parts and views stay."""
    handle._kv, handle._length, handle._epoch, handle._alone = state, length, state.epoch, True


def _start(handle: CompressedCache, state: CacheState, length: int, alone: bool) -> None:
    handle._kv, handle._length, handle._epoch, handle._alone = state, length, state.epoch, alone
    handle._views, handle._origin = [], None


def home(value: Any) -> tuple[Any, ViewGeometry | None]:
    """Return the cache tensor of a handle, part or decoded view, and the value's geometry in it (None for the cache itself)."""
    origin = value._origin if is_handle(value) or is_view(value) else None
    return (value, None) if origin is None else (origin.root, origin.place)


def retake(part: CompressedCache, made: Any) -> bool:
    """Give a part the state of ``made``, the result of indexing the whole cache again; return False if ``made`` is not a handle."""
    if not is_handle(made):
        return False
    part._kv, part._length, part._epoch, part._alone = made._kv, made._length, made._epoch, made._alone
    return True


def to_dense(value: torch.Tensor, why: str) -> torch.Tensor:
    """Turn a handle into the dense tensor that it represents, in place, and return it: it stays the same object.

    The handle's parts and views become views of its memory; a part or view given as ``value`` is turned dense with its whole cache. A
    tensor without a compressed cache is returned unchanged. ``why`` is logged once for each reason, unless it is "" or the cache is empty.
    """
    root, _ = home(value)
    if not is_handle(root):
        return value
    if root._length and why:
        warn_of_densifying(why, root.numel() * root.element_size())
    views = [ref() for ref in root._views]
    state, length = root._kv, root._length
    take_storage(root, decoded(root).contiguous())
    remember(root, state, length)
    for view in views:
        if (is_handle(view) or is_view(view)) and view._origin is not None and view._origin.root is root:
            take_storage(view, view._origin.place.within(root))
    return value


def take_storage(value: torch.Tensor, dense: torch.Tensor) -> None:
    """Give a handle or a decoded view the memory of a dense tensor, and drop its state."""
    value.__class__ = torch.Tensor
    for name in ("_kv", "_views", "_origin", "_seen"):
        value.__dict__.pop(name, None)
    show(value, dense)


def refresh(value: Any) -> None:
    """Update a view or part in place to its cache's current contents; a part that is no longer a handle becomes a decoded view."""
    origin: Origin | None = value._origin if is_view(value) or is_handle(value) else None
    if origin is None or value._seen == origin.seen:
        return
    if is_handle(value):
        if origin.index is not None and retake(value, origin.root[origin.index]):
            value._seen = origin.seen
            return
        del value._kv
        value.__class__ = DecodedView  # type: ignore[assignment]
    show(value, origin.place.within(decoded(cast(torch.Tensor, origin.root))))
    value._seen = origin.seen


def refresh_argument(value: Any) -> None:
    """Prepare a part or view of a cache, in place, as an argument of a compiled graph.

    A part gets current codes and scales; a decoded view turns its cache dense.
    """
    if is_handle(value) and value._origin is not None:
        refresh(value)
    if is_view(value):
        to_dense(value, "a view of it is an argument of a compiled graph")


def over_tensors(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``compiled``, a graph that may write to decoded views among its arguments, wrapped to make their caches dense first."""
    def run(*args: Any) -> Any:
        for arg in args:
            refresh_argument(arg)
        return compiled(*args)

    return run


def same_codes(one: CompressedCache, other: CompressedCache) -> bool:
    """Return whether two handles are compressed in the same way, so that codes and scales can be copied between them."""
    ours, theirs = one._kv, other._kv
    return one.shape == other.shape and ours.axes == theirs.axes and ours.device == theirs.device and all(
        store.spec == theirs.stores[part].spec for part, store in ours.stores.items()
    )


def write_tokens(handle: CompressedCache, name: str, write: Callable[[torch.Tensor], Any]) -> bool:
    """Encode the tokens that ``write`` overwrites in a dense tensor into a handle; return False if the handle became dense instead.

    Raises CacheStale if tokens that the handle shows were overwritten.
    """
    line = user_line()
    resume(handle)
    if not in_one(handle._kv, handle.shape):
        to_dense(handle, f"{name} writes to it outside of compiled code, at {line}, and its rows hold different numbers of tokens")
        return False
    if not handle._alone:
        attach(handle, handle._kv.copied(handle._length), handle._length)
    try:
        encode(handle, write, visible_length(handle))
    except Rejected as reason:
        to_dense(handle, f"{name} writes to it outside of compiled code, at {line}, and {reason}")
        return False
    handle._length, handle._epoch = handle._kv.length, handle._kv.epoch
    warn_of_eager_use(line)
    return True


@functools.cache
def warn_of_eager_use(line: str) -> None:
    """Warn that a cache is used outside of compiled code, once for each line of the program."""
    log.warning(
        "a compressed cache tensor is used outside of compiled code, at %s: tokens written there are encoded, and all that is read is "
        "decoded, which is slow", line,
    )


@functools.cache
def warn_of_densifying(why: str, size: int) -> None:
    """Warn that a cache becomes dense, once for each reason and size."""
    log.warning("a compressed cache tensor becomes the dense tensor of %d bytes again: %s", size, why)


def decoded(value: torch.Tensor) -> torch.Tensor:
    """Return a dense copy of a compressed cache tensor or decoded view; any other value unchanged. Raises CacheStale as ``resume`` does."""
    refresh(value)
    if is_view(value):
        with DisableTorchFunctionSubclass():
            return torch.Tensor.as_subclass(value, torch.Tensor).clone()
    if not isinstance(value, CompressedCache):
        return value
    resume(value)
    with DisableTorchFunctionSubclass():
        return value._kv.dense(tuple(value.shape), value._length)


def densify(args: Sequence[Any], given: Collection[int], written: Mapping[int, str]) -> list[Any]:
    """Return the arguments with those of indices ``given`` dense: turned dense in place if in ``written``, else decoded copies.

    ``written``: from the indices of arguments that the graph writes to the reason to log.
    """
    return [
        to_dense(arg, written[index]) if index in written and is_handle(arg) else decoded(arg) if index in given else arg
        for index, arg in enumerate(args)
    ]


def visible_length(handle: CompressedCache) -> int:
    """Return the number of tokens that a handle shows: the last tokens of its length that its shape has room for."""
    room: int = next(iter(handle._kv.axes.values())).room(handle.shape)
    return min(handle._length, room)


def resume(handle: CompressedCache) -> None:
    """Raise CacheStale if tokens that a handle shows were overwritten."""
    handle._kv.resume(handle._length, handle._epoch, visible_length(handle))
