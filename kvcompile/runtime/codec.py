"""Encode dense tokens into a store outside of compiled code, and decode a store's tokens to a dense tensor."""

from __future__ import annotations

import torch

from kvcompile.errors import AnglesUnknown
from kvcompile.lowering.ops.operations import append_body, append_window_body, write_rows
from kvcompile.lowering.ops.sliding import taken
from kvcompile.runtime.exact_window import lost, overlaid, rewind
from kvcompile.runtime.store import Store
from kvcompile.types import pages_for

ENCODED_AT_ONCE = 4096
"""Tokens encoded at a time when a filled cache is adopted; bounds the float32 scratch of ``encode``."""


def encode(store: Store, x_BKTD: torch.Tensor, left_padding: torch.Tensor | None = None, first: int = 0) -> None:
    """Encode dense tokens from token ``first`` on, in bounded steps; ``left_padding`` [B]: first tokens that are no padding."""
    tokens = x_BKTD.shape[2]
    scheme, planes = store.spec.scheme, store.planes[: store.spec.layout.written]
    for start in range(0, tokens, ENCODED_AT_ONCE):
        part = x_BKTD[:, :, start : start + ENCODED_AT_ONCE]
        pos = torch.arange(first + start, first + start + part.shape[2], device=store.device).unsqueeze(0)
        if store.rope is not None:
            part = store.rope.unrotated(part, pos if left_padding is None else pos - left_padding[:, None])
        if store.window is None:
            origin = left_padding if scheme.keeps_padding_out else None
            append_body(part, planes, pos - store.first, scheme.spell(), origin, store.tables)
        else:
            append_window_body(part, planes, pos, left_padding, scheme.spell(), store.tables)


def decode(store: Store, tokens: int) -> torch.Tensor:
    """Decode the first ``tokens`` tokens to [B, K, T, D] in the model's dtype; what is behind the newest one of a window is zero."""
    pages = min(pages_for(tokens), store.pages)
    values = store.values(0, pages)[:, :, :tokens].to(store.spec.slot.dtype)
    values = values if store.window is None else overlaid(store, values)
    return _rotated(store, values) if store.spec.scheme.pre_rope else values


def _rotated(store: Store, keys: torch.Tensor) -> torch.Tensor:
    """Return the model's keys from keys that are stored before RoPE."""
    if store.rope is None:
        raise AnglesUnknown(length=keys.shape[2])
    place, padding = torch.arange(keys.shape[2], device=store.device).unsqueeze(0), store.left_padding
    return store.rope.rotated(keys, place if padding is None else place - padding[:, None])


def unwritable(store: Store, at: torch.Tensor, rows_BKn: torch.Tensor, length: int) -> str:
    """Say why ``rows`` of the tokens ``at`` [n], ascending, cannot be encoded into a store of ``length`` tokens; "" where they can.

    Waits for the device.
    """
    scheme = store.spec.scheme
    if scheme.pre_rope and store.rope is None:
        return "no compiled call has said by which angles its keys are turned"
    if not length and (store.window is not None or scheme.keeps_padding_out):
        return "its scheme must know the padding of the first tokens"
    if (store.window is None and not scheme.in_order) or not len(at):
        return ""
    if store.window is None:
        whole = at.equal(torch.arange(length, length + len(at), device=at.device)) and bool(rows_BKn.all())
        return "" if whole else f"{scheme.name} takes tokens in their order, all heads of all rows, and none in place of another"
    first, last, size = int(at[0]), int(at[-1]), store.window.shape[2]
    if length - first > size or bool(lost(store, first).any()):
        return f"it writes over tokens that are only codes by now: {scheme.spell()} keeps {size} of {length} tokens"
    behind = at >= length
    if int(behind.sum()) != max(last + 1 - length, 0) or not rows_BKn[:, :, behind].all():
        return f"{scheme.spell()} takes tokens in their order, all heads of all rows"
    return ""


def write_tokens(store: Store, x_BKnD: torch.Tensor, rows_BKn: torch.Tensor, at: torch.Tensor, length: int) -> None:
    """Encode ``rows`` of the tokens ``at`` [n], ascending, into a store of ``length`` tokens with room for them; see ``unwritable``."""
    if not len(at):
        return
    if store.window is None and store.in_order:
        encode(store, x_BKnD, first=int(at[0]))
        return
    if store.window is None:
        _write_codes(store, x_BKnD, rows_BKn, at)
        return
    first, last = int(at[0]), int(at[-1])
    held = x_BKnD.new_zeros(*x_BKnD.shape[:2], max(length, last + 1) - first, x_BKnD.shape[3])
    if first < length:
        # All of these are in the window, so nothing is encoded from what codes decode to.
        held[:, :, : length - first] = decode(store, length)[:, :, first:]
        rewind(store, first)
    held[:, :, at - first] = torch.where(rows_BKn[..., None], x_BKnD, held[:, :, at - first])
    encode(store, held, store.left_padding, first)


def _write_codes(store: Store, x_BKnD: torch.Tensor, rows_BKn: torch.Tensor, at: torch.Tensor) -> None:
    """Write the codes of some rows of tokens of a scheme without a window; those of the others stay as they are."""
    for start in range(0, len(at), ENCODED_AT_ONCE):
        some, rows = at[start : start + ENCODED_AT_ONCE], rows_BKn[:, :, start : start + ENCODED_AT_ONCE, None]
        x = torch.where(rows, x_BKnD[:, :, start : start + ENCODED_AT_ONCE], 0)
        x = x if store.rope is None else store.rope.unrotated(x, some.unsqueeze(0))
        for plane, codes in zip(store.planes, store.spec.scheme.encode(x, *store.tables), strict=False):
            write_rows(plane, torch.where(rows, codes.to(plane.dtype), taken(plane, some)), some.unsqueeze(0))
