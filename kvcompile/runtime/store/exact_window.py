"""Exact window: a store's newest tokens in full precision, its rollback, and its detection of tokens out of order.

A scheme with blocks encodes a block once all of its tokens have arrived; until then, and for some tokens longer, the window holds them in
full precision. A store that keeps all tokens in full precision can go back to any length and refills its window from them. Token t of a
row, counted from its first token that is not padding, is in slot t % W.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvcompile.errors import TokensOutOfOrder, WindowPassed
from kvcompile.lowering.ops.append_window import is_broken, said_of
from kvcompile.runtime.store.store import Store
from kvcompile.schemes.certificate.telemetry import REFILLED
from kvcompile.types import LEAST_HELD, PAGE, pages_for


def disorder(store: Store, where: str, row: int = 0) -> Iterator[TokensOutOfOrder]:
    """Yield an error for each row with tokens out of order, read from the store's clock. Waits for the device.

    ``row``: the index in the cache of the store's first row.
    """
    if store.window is None:
        return
    held = store.lengths[0, :, 0, 0, 0]
    if not bool(is_broken(held).any()):
        return
    for index, count in enumerate(held.tolist()):
        if count >= LEAST_HELD:
            continue
        expected, found, shown = said_of(count)
        facts = {"expected": f"a token at position {expected}", "found": f"one at position {found}"}
        if shown:
            facts = {"expected": f"a mask that hides the padding before position {expected}", "found": f"one that shows {found}"}
        elif found < 0:
            facts["found"] = "one before position 0"
        elif expected == found:
            facts = {"expected": f"tokens at positions below {expected}, as far as there is room,", "found": "one behind them"}
        yield TokensOutOfOrder(**facts, row=row + index, where=where, scheme=store.spec.scheme.display_name())


def overlaid(store: Store, values: torch.Tensor) -> torch.Tensor:
    """Return decoded tokens ``values`` [B, K, T, D] at the caller's positions, those in the window replaced by exact ones.

    Padding and positions that are not filled are zero. Waits for the device. Raises TokensOutOfOrder if a row's contents are undefined.
    """
    window = store.window
    assert window is not None
    for error in disorder(store, f"a store of {store.spec.slot.role.value}s"):
        raise error
    held, padding = store.lengths[0, :, 0, 0].unbind(-1)
    t = torch.arange(values.shape[2], device=store.device) - padding[:, None]
    rows = (-1, values.shape[1], -1, values.shape[3])
    behind = values.gather(2, t.clamp(min=0)[:, None, :, None].expand(rows))
    newest = window.gather(2, (t % window.shape[2])[:, None, :, None].expand(rows))
    exact = (t >= held[:, None] - window.shape[2])[:, None, :, None]
    return torch.where(((t >= 0) & (t < held[:, None]))[:, None, :, None], torch.where(exact, newest, behind), 0)


def lost(store: Store, wanted: int | torch.Tensor) -> torch.Tensor:
    """Return the rows, bool [B], whose rollback to ``wanted`` tokens would end inside a block without full-precision tokens."""
    window = store.window
    assert window is not None
    size, block = window.shape[2], store.spec.scheme.block
    held, padding = store.lengths[0, :, 0, 0].unbind(-1)
    now = torch.minimum((wanted - padding).clamp(min=0), held)
    return (now % block != 0) & (held - now > size - now % block) & (not store.keeps_originals)


def rewind(store: Store, wanted: int | torch.Tensor) -> None:
    """Roll back to ``wanted`` tokens (an int, or [B]), and refill the window with older tokens, in full precision if kept, else decoded.

    Shorter rows stay unchanged. If the store has the plane ``refilled``, it records up to which position the window's tokens are decoded
    ones. Waits for the device; does nothing without a window. Raises WindowPassed if a row would end inside a block whose
    full-precision tokens are gone.
    """
    window = store.window
    if window is None:
        return
    lengths = store.lengths
    size, block = window.shape[2], store.spec.scheme.block
    held, padding = lengths[0, :, 0, 0].unbind(-1)
    now = torch.minimum((wanted - padding).clamp(min=0), held)
    if not (now < held).any():
        return
    if (gone := lost(store, wanted)).any():
        raise WindowPassed(
            scheme=store.spec.scheme.spec(), window=size, length=int((held + padding)[gone].max()),
            wanted=int((now + padding)[gone].max()), block=block, most=size - block + 1,
        )
    slot = torch.arange(size, device=store.device)
    newest = (held[:, None] - 1) - (held[:, None] - 1 - slot) % size
    older = (now[:, None] - 1) - (now[:, None] - 1 - slot) % size
    first, pages = max(0, int(older.min())) // PAGE, pages_for(int(now.max()))
    if pages > first:
        values = store.values(first, pages)
        at = (older - first * PAGE).clamp(min=0)[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3])
        refill = ((newest >= now[:, None]) & (older >= 0))[:, None, :, None]
        window.copy_(torch.where(refill, values.gather(2, at).to(window.dtype), window))
    if (refilled := store.plane(REFILLED)) is not None:
        first_exact = torch.minimum(torch.maximum(refilled[0, :, 0, 0, 0], held - size), now)
        refilled.copy_(first_exact[None, :, None, None, None].expand_as(refilled))
    lengths[0, :, :, 0, 0] = now[:, None]
