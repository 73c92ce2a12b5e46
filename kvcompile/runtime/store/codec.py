"""Codec: encode dense tokens into a store outside of compiled code, and decode a store's tokens to a dense tensor."""

from __future__ import annotations

import torch

from kvcompile.errors import AnglesUnknown
from kvcompile.lowering.ops.append_window import append_window_body
from kvcompile.lowering.ops.keep_first import keep_first_body
from kvcompile.lowering.ops.operations import append_body, with_exact_rows, write_rows
from kvcompile.lowering.ops.sliding import taken
from kvcompile.runtime.store.exact_window import lost, overlaid, rewind
from kvcompile.runtime.store.store import Store
from kvcompile.types import pages_for

ENCODED_AT_ONCE = 4096
"""Tokens encoded at a time when a filled cache is adopted; bounds the float32 scratch of ``encode``."""


def encode(store: Store, x_BKTD: torch.Tensor, left_padding: torch.Tensor | None = None, first: int = 0) -> None:
    """Encode dense tokens [B, K, T, D] at positions from ``first`` on, in bounded steps.

    ``left_padding``: each row's first position that is not padding, int64 [B]; None for 0 in all rows.
    """
    for start in range(0, x_BKTD.shape[2], ENCODED_AT_ONCE):
        part = x_BKTD[:, :, start : start + ENCODED_AT_ONCE]
        if store.rope is not None:
            pos = _places(store, part, first + start)
            part = store.rope.unrotated(part, pos if left_padding is None else pos - left_padding[:, None])
        _put(store, store.rotated(part), left_padding, first + start)


def keep_padding(store: Store, x_BKTD: torch.Tensor) -> None:
    """Store dense tokens before each row's origin, which a window does not hold, in ``store.padding``. Waits for the device."""
    count = 0 if store.left_padding is None else min(int(store.left_padding.max()), x_BKTD.shape[2])
    if not count or not bool(x_BKTD[:, :, :count].any()):
        return
    store.padding = Store(store.spec, store.batch, store.device, pages_for(count), store.rope)
    for (plane, spec), ours in zip(store.padding.described(), store.planes, strict=True):
        if spec.name in store.spec.scheme.calibrated:
            plane.copy_(ours)
    encode(store.padding, x_BKTD[:, :, :count])


def _put(store: Store, x_BKnD: torch.Tensor, left_padding: torch.Tensor | None, first: int) -> None:
    """Append tokens [B, K, n, D], given as the store keeps them, at positions from ``first`` on.

    Keys must have RoPE undone and channels must be rotated if the store keeps them so.
    """
    scheme, planes, pos = store.spec.scheme, store.planes[: store.spec.layout.written], _places(store, x_BKnD, first)
    if store.window is None:
        origin = left_padding if scheme.keeps_padding_out else None
        append_body(x_BKnD, planes, pos - store.first, scheme.spec(), origin, store.tables)
        kept, used = x_BKnD, left_padding
    else:
        newest, used = append_window_body(x_BKnD, planes, pos, left_padding, scheme.spec(), store.tables)
        kept = newest[:, :, store.window.shape[2] :]
    if store.exact_first:
        keep_first_body(kept, store.exact_first, pos, used)


def _places(store: Store, x_BKnD: torch.Tensor, first: int) -> torch.Tensor:
    """Return the positions of tokens [B, K, n, D] that begin at position ``first``, int64 [1, n]."""
    return torch.arange(first, first + x_BKnD.shape[2], device=store.device).unsqueeze(0)


def decode(store: Store, tokens: int) -> torch.Tensor:
    """Return the first ``tokens`` tokens, decoded to [B, K, T, D] in the model's dtype; with a window, zero after the newest token.

    Fewer tokens are returned if the store has pages for fewer. Raises TokensOutOfOrder if a window's row is broken, and AnglesUnknown for
    keys before RoPE whose angles no compiled call has given.
    """
    values = store.unrotated(_held(store, tokens))
    values = _rotated(store, values) if store.spec.scheme.pre_rope else values
    if store.padding is None or store.left_padding is None:
        return values
    # A loaded store gets its angles only later.
    store.padding.rope = store.rope
    padding = decode(store.padding, tokens)
    count = padding.shape[2]
    hidden = (torch.arange(count, device=store.device) < store.left_padding[:, None])[:, None, :, None]
    return torch.cat([torch.where(hidden, padding, values[:, :, :count]), values[:, :, count:]], 2)


def _held(store: Store, tokens: int) -> torch.Tensor:
    """Return the first ``tokens`` tokens decoded to [B, K, T, D], as the store keeps them; exact tokens are not decoded.

    Keys have RoPE undone if the scheme stores them so, and channels are rotated if it rotates them. Fewer tokens are returned if the store
    has pages for fewer. Raises TokensOutOfOrder if a window's row is broken.
    """
    pages = min(pages_for(tokens), store.pages)
    values = store.values(0, pages)[:, :, :tokens].to(store.spec.slot.dtype)
    values = values if store.window is None else overlaid(store, values)
    if not store.exact_first:
        return values
    # Unwritten slots are zero in the exact tokens too.
    origins = store.origins
    assert origins is not None
    return with_exact_rows(values, store.exact_first[0][0], origins)


def _rotated(store: Store, keys: torch.Tensor) -> torch.Tensor:
    """Return keys [B, K, T, D] as the model has them, from ``keys`` stored before RoPE.

    Raises AnglesUnknown if no compiled call has given the store the angles.
    """
    if store.rope is None:
        raise AnglesUnknown(length=keys.shape[2])
    place, padding = torch.arange(keys.shape[2], device=store.device).unsqueeze(0), store.left_padding
    return store.rope.rotated(keys, place if padding is None else place - padding[:, None])


def unwritable(store: Store, at: torch.Tensor, rows_BKn: torch.Tensor, length: int) -> str:
    """Return why tokens at ascending positions ``at`` [n] cannot be encoded into a store of ``length`` tokens; "" if they can.

    ``rows_BKn``: bool, the tokens of each row and head to write. Waits for the device.
    """
    scheme = store.spec.scheme
    if scheme.pre_rope and store.rope is None:
        return "the rotary angles of its keys are not known, as no compiled call has used it"
    if not length and (store.window is not None or store.exact_first or scheme.keeps_padding_out):
        return "its scheme must know the padding of the first tokens"
    if (store.window is None and not scheme.in_order) or not len(at):
        return ""
    if store.window is None:
        whole = at.equal(torch.arange(length, length + len(at), device=at.device)) and bool(rows_BKn.all())
        return "" if whole else f"{scheme.name} needs tokens in order, all heads of all rows at once, and overwrites none"
    first, last, size = int(at[0]), int(at[-1]), store.window.shape[2]
    if store.padding is not None and first < int(store.left_padding.max()):  # type: ignore[union-attr]
        return "it writes over tokens that the call which compressed the cache took for padding"
    if not store.keeps_originals and (length - first > size or bool(lost(store, first).any())):
        return f"it overwrites tokens that are stored as codes only: {scheme.spec()} keeps {size} of {length} tokens"
    behind = at >= length
    if int(behind.sum()) != max(last + 1 - length, 0) or not rows_BKn[:, :, behind].all():
        return f"{scheme.spec()} needs tokens in order, all heads of all rows at once"
    return ""


def write_tokens(store: Store, x_BKnD: torch.Tensor, rows_BKn: torch.Tensor, at: torch.Tensor, length: int) -> None:
    """Encode tokens [B, K, n, D] at ascending positions ``at`` [n] into a store of ``length`` tokens, in place, where ``rows_BKn`` is True.

    ``x_BKnD`` holds tokens as the caller's dense tensor does. The store must have room for them, and ``unwritable`` must have returned "".
    """
    if not len(at):
        return
    if store.window is None and store.in_order:
        encode(store, x_BKnD, first=int(at[0]))
        return
    if store.window is None:
        _write_codes(store, x_BKnD, rows_BKn, at)
        return
    first, last = int(at[0]), int(at[-1])
    stored = _as_stored(store, x_BKnD, at)
    held = stored.new_zeros(*stored.shape[:2], max(length, last + 1) - first, stored.shape[3])
    if first < length:
        # All of these are in the window or kept in full precision, so no decoded value is encoded again.
        held[:, :, : length - first] = _held(store, length)[:, :, first:]
        rewind(store, first)
    held[:, :, at - first] = torch.where(rows_BKn[..., None], stored, held[:, :, at - first])
    for start in range(0, held.shape[2], ENCODED_AT_ONCE):
        _put(store, held[:, :, start : start + ENCODED_AT_ONCE], store.left_padding, first + start)


def _as_stored(store: Store, x_BKnD: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return tokens at the caller's positions ``at`` [n] as the store keeps them.

    RoPE is undone and channels are rotated if the scheme stores them so.
    """
    if store.rope is not None:
        padding, place = store.left_padding, at.unsqueeze(0)
        x_BKnD = store.rope.unrotated(x_BKnD, place if padding is None else place - padding[:, None])
    return store.rotated(x_BKnD)


def _write_codes(store: Store, x_BKnD: torch.Tensor, rows_BKn: torch.Tensor, at: torch.Tensor) -> None:
    """Encode tokens at positions ``at`` [n] where ``rows_BKn`` is True, for a scheme without a window, in place; others stay."""
    for start in range(0, len(at), ENCODED_AT_ONCE):
        some, rows = at[start : start + ENCODED_AT_ONCE], rows_BKn[:, :, start : start + ENCODED_AT_ONCE, None]
        x = _as_stored(store, torch.where(rows, x_BKnD[:, :, start : start + ENCODED_AT_ONCE], 0), some)
        if store.exact_first:
            # Unchanged rows are written with their stored values.
            kept = with_exact_rows(
                x.new_zeros(*x.shape[:2], int(some[-1]) + 1, x.shape[3]), store.exact_first[0][0], store.exact_first[1][0, :, 0, 0, 0]
            )
            keep_first_body(torch.where(rows, x, kept[:, :, some]), store.exact_first, some.unsqueeze(0), store.origins)
        for plane, codes in zip(store.planes, store.spec.scheme.encode(x, *store.tables), strict=False):
            write_rows(plane, torch.where(rows, codes.to(plane.dtype), taken(plane, some)), some.unsqueeze(0))
