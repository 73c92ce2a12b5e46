"""Writes outside of compiled code: find the tokens that an operation writes, and encode them into the stores.

An overwriting operation (``index_copy_``, index assignment, ``copy_``...) runs on a dense tensor filled with a NaN whose payload no
arithmetic produces. Every element that no longer holds it was written, and holds the new value. So any spelling of a write is
understood, through views of the cache too, at the cost of one dense copy of this tensor until the written tokens are copied out of it.

A write can be encoded (``codec.unwritable``) under these conditions; else ``Rejected`` has the reason:

* it writes whole rows of channels, since the rest of a row would be encoded again from decoded values
* a scheme that encodes tokens independently takes any token; the codes of all others stay unchanged
* a scheme with a window takes tokens in order, and overwrites only tokens that it holds in full precision
* a token whose new value equals its decoded value keeps its codes: codes are written once

A wrapped sliding window, a paged cache, and an empty cache whose scheme needs the padding of the first tokens take no writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.passes.graph.dynamo import DisableTorchFunctionSubclass
from kvcompile.runtime.handle.views import Handle
from kvcompile.runtime.store.codec import ENCODED_AT_ONCE, decode, unwritable, write_tokens
from kvcompile.runtime.store.dense_layout import tokens_of
from kvcompile.runtime.store.state import CacheState, Part
from kvcompile.runtime.store.store import Store

OVERWRITES = {"zero_", "index_copy_", "copy_", "__setitem__", "index_put_", "scatter_", "fill_", "index_fill_", "masked_fill_",
              "masked_scatter_"}
"""Operations after which every element has its old value or a written one, independent of the old."""

UNTOUCHED = {torch.float32: (torch.int32, 0x7FE5A5A5), torch.float16: (torch.int16, 0x7FA5), torch.bfloat16: (torch.int16, 0x7FE5)}
"""By dtype: the integer dtype of its size, and the bits of the NaN that marks an unwritten element."""


def overwrites(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation, target first among its arguments, does not read the target."""
    if name == "index_put_" and (kwargs.get("accumulate") or (len(args) > 3 and args[3])):
        return False
    if name == "scatter_" and (kwargs.get("reduce") is not None or any(isinstance(arg, str) for arg in args[1:])):
        return False
    return name in OVERWRITES and kwargs.get("out") is None


@dataclass(frozen=True)
class _Tokens:
    """A write into one part: positions ``at`` [n], values [B, K, n, D], and the written heads and rows, bool [B, K, n]."""

    at: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor


class Rejected(Exception):
    """Raised with the reason why a write cannot be encoded; the cache then becomes dense."""


def encode(handle: Handle, write: Callable[[torch.Tensor], Any], shown: int) -> None:
    """Encode the tokens that ``write(dense)`` writes into the stores of a handle that owns its state, and shows ``shown`` tokens.

    Raises Rejected, with nothing changed.
    """
    state = handle._kv
    if handle.dtype not in UNTOUCHED:
        raise Rejected(f"{handle.dtype} has no value that marks an unwritten slot")
    if any(axes.paged for axes in state.axes.values()):
        raise Rejected("any slot of a paged cache may hold any token")
    if not state.in_order or handle._length > shown:
        raise Rejected("its sliding window has wrapped around")
    with DisableTorchFunctionSubclass(), torch.no_grad():
        found = {part: _changed(state, part, tokens) for part, tokens in _written(state, handle, write).items()}
        found = {part: tokens for part, tokens in found.items() if tokens.at.numel()}
        length = max([state.length, *[int(tokens.at.max()) + 1 for tokens in found.values()]])
        if state.slots is not None and length > state.slots:
            raise Rejected("its sliding window would wrap around")
        for part, tokens in found.items():
            reason = unwritable(state.stores[part], tokens.at, tokens.rows, state.length)
            if reason:
                raise Rejected(reason)
        state.make_room(length, next(iter(state.axes.values())).room(handle.shape))
        for part, tokens in found.items():
            write_tokens(state.stores[part], tokens.values, tokens.rows, tokens.at, state.length)
    if found:
        # The next call need not continue at the tokens written here.
        state.moment = None
        # A window's tokens are rewritten up to their end.
        state.overwrite(length if state.windowed else max(int(tokens.at[-1]) + 1 for tokens in found.values()))


def _written(state: CacheState, handle: Handle, write: Callable[[torch.Tensor], Any]) -> dict[Part, _Tokens]:
    """Return, by part of the cache tensor, the tokens that ``write`` writes into a dense tensor like the handle.

    Raises Rejected if it writes some channels of a token and not the others.
    """
    integers, mark = UNTOUCHED[handle.dtype]
    with torch.inference_mode(False):
        dense = torch.full(tuple(handle.shape), mark, dtype=integers, device=handle.device).view(handle.dtype)
    write(dense)
    found = {}
    for part, store in state.stores.items():
        view = tokens_of(dense, state.axes[part], store.spec.slot.heads, store.spec.slot.head_dim)
        at, values, rows = [], [], []
        for start in range(0, view.shape[2], ENCODED_AT_ONCE):
            piece = view[:, :, start : start + ENCODED_AT_ONCE]
            new = piece.view(integers) != mark
            whole = new.all(-1)
            if not torch.equal(whole, new.any(-1)):
                raise Rejected("it writes to some of a token's channels only")
            index = whole.any(1).any(0).nonzero().flatten()
            if len(index):
                at.append(index + start)
                values.append(piece[:, :, index])
                rows.append(whole[:, :, index])
        if at:
            found[part] = _Tokens(torch.cat(at), torch.cat(values, 2), torch.cat(rows, 2))
    return found


def _changed(state: CacheState, part: Part, tokens: _Tokens) -> _Tokens:
    """Return a write without tokens whose decoded values it does not change, and without zeros after all tokens ever written."""
    known = int((tokens.at < max(state.length, state.held)).sum())
    rows = tokens.rows.clone()
    if known:
        held = decode(state.stores[part], int(tokens.at[known - 1]) + 1)[:, :, tokens.at[:known]]
        rows[:, :, :known] &= (held != tokens.values[:, :, :known]).any(-1)
    kept = rows.any(1).any(0)
    empty = ((tokens.values == 0).all(-1) | ~rows).all(1).all(0) & (tokens.at >= max(state.top, state.held))
    # Zeros before a written token are tokens; zeros after the last one stay unwritten.
    end = int((kept & ~empty).nonzero().max()) + 1 if bool((kept & ~empty).any()) else 0
    kept[known:end] = True
    kept[end:] &= ~empty[end:]
    return _Tokens(tokens.at[kept], tokens.values[:, :, kept], rows[:, :, kept])


def appended(state: CacheState, new: dict[Part, torch.Tensor]) -> bool:
    """Encode tokens [B, K, n, D] by part after a state's last token; return False, with nothing changed, if they cannot be encoded."""
    count = next(iter(new.values())).shape[2]
    at = torch.arange(state.length, state.length + count, device=state.device)
    stores: list[tuple[Store, torch.Tensor]] = [(state.stores[part], values) for part, values in new.items()]
    if any(unwritable(store, at, values.new_ones(values.shape[:3], dtype=torch.bool), state.length) for store, values in stores):
        return False
    state.make_room(state.length + count)
    for store, values in stores:
        write_tokens(store, values, values.new_ones(values.shape[:3], dtype=torch.bool), at, state.length)
    state.advance(state.length, count)
    state.moment = None
    return True
