"""``append_window``: the write path of schemes whose newest tokens stay in full precision, as plain tensor code.

Every call writes the new tokens into the window, a ring buffer, and encodes the blocks that they touch from the
full-precision tokens in the window. An incomplete block is encoded with zeros behind its last token, and written
again with the next token; attention reads a block's codes only after the whole block has left the window. So every
step costs the same, complete block or not; there is no branch, and the host reads no position.

Token ``t`` of a row is stored in slot t % W of the window. Attention reads positions below ``start - W`` from the
codes, and positions [start - W, start + S) from ``exact_newest``, which this operation returns.

Left padding: a row's tokens are counted from its ``origin``, the first position that its mask shows, so that blocks
of a padded row hold the same tokens as without padding, and padding never sets a scale. The origin is fixed by the
call that writes position 0, and again by each call that finds only padding in the row so far: where padding is longer
than a prompt's first chunk, that chunk's mask does not show its end.

The clock plane [1, B, K, 1, 2] holds a row's number of tokens and its origin. Writes must come in order, since after
a gap the window holds other tokens than attention expects: tokens that neither follow the last one nor start again at
0 are written as NaN; so are new tokens of a row whose mask now shows positions before its origin, which were never
stored.

A row is *broken* once its tokens came out of order, or its mask showed positions that were never stored: outside of the window its planes
may then differ from the dense tensor. From then on its number of tokens is ``broken(expected, found)`` or ``unstored(origin, shown)``, a
number so far below 0 that no position follows it, until the row begins again at 0. Attention asks ``is_broken`` and returns NaN for such a
row (``rewrite.order``); the host, which does not synchronise at every step, reads the number when it reads the cache
(``runtime.store.exact_window``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcompile import schemes
from kvcompile.types import LEAST_HELD

BROKEN = -(1 << 62)
"""The token count of a broken row, before ``broken`` adds the expected and the found position to it."""

MOST_PLACE = (1 << 29) - 1
"""Largest position that the count of a broken row can record; larger ones are clamped to it."""

SHOWN = 1 << 30
"""Bit of a broken row's count: set if a mask showed unstored positions, clear if tokens came out of order."""


def broken(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return the token counts, int64 in the shape of ``found``, that mark rows as broken: position ``expected`` was due, ``found`` came.

    Two equal positions mean that the store is full from there on.
    """
    return BROKEN + (expected.clamp(0, MOST_PLACE) << 32) + found.clamp(-1, MOST_PLACE) + 1


def unstored(origin: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
    """Return the token counts, int64, that mark rows as broken because their mask shows position ``shown``, which is before ``origin``."""
    return broken(origin, shown) + SHOWN


def is_broken(held: torch.Tensor) -> torch.Tensor:
    """Return where ``held``, token counts of a clock plane, marks a row as broken: bool in the shape of ``held``."""
    return held < LEAST_HELD


def said_of(held: int) -> tuple[int, int, bool]:
    """Return (expected position, found position, unstored) from ``held``, the token count that marks a row as broken.

    Position -1 means any position below 0. If ``unstored`` is true, the positions are the row's origin and the earlier position that a mask
    showed.
    """
    said = (held - BROKEN) & 0xFFFFFFFF
    return (held - BROKEN) >> 32, said % SHOWN - 1, said >= SHOWN


def begins(first: torch.Tensor, kept: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
    """Return, by row, whether a call from position ``first`` takes its mask's origin ``shown`` rather than the stored origin ``kept``.

    All are int64 [1 or B], the result is bool. True at position 0, and while the mask hides all tokens so far as padding. The result does
    not depend on whether ``kept`` is the origin before or after the call, since one program of a kernel may read the clock while another
    writes it.
    """
    return (first == 0) | ((kept >= first) & (shown >= first))


def one_token(x_BKSD: torch.Tensor) -> bool:
    """Return whether a call has exactly one new token; False if the number is symbolic."""
    return isinstance(x_BKSD.shape[2], int) and x_BKSD.shape[2] == 1


def _rows(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows [B, K, n, D] of ``source`` [B, K, T, D] at ``index`` [1 or B, n], all within range."""
    if index.shape[0] == 1:
        # Unchecked: the check that Inductor of torch 2.11 writes here is not valid C++.
        return torch.ops.aten._unsafe_index.Tensor(source, [None, None, index[0]])
    return source.gather(2, index[:, None, :, None].expand(-1, source.shape[1], -1, source.shape[3]))


def _write(plane: torch.Tensor, rows_BKnW: torch.Tensor, index: torch.Tensor) -> None:
    """Write rows in place at ``index`` [1 or B, n]: plane[index // R, b, :, index % R] = rows. Equal indices must come with equal rows."""
    page, row = index // plane.shape[3], index % plane.shape[3]
    if index.shape[0] == 1:
        plane[page[0], :, :, row[0]] = rows_BKnW.permute(2, 0, 1, 3).to(plane.dtype)
        return
    batch = torch.arange(plane.shape[1], device=plane.device).unsqueeze(-1)
    plane[page, batch, :, row] = rows_BKnW.permute(0, 2, 1, 3).to(plane.dtype)


def append_window_body(
    x: torch.Tensor, planes: list[torch.Tensor], pos: torch.Tensor, origin: torch.Tensor | None, scheme: str,
    tables: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write x [B, K, S, D] at consecutive positions pos [1 or B, S] of the caller's numbering, padding included.

    ``planes``: the scheme's encoded planes, then the window [1, B, K, W, D], the clock, and the scheme's fixed planes.
    ``origin``: int64 [B], the first position that this call's mask shows in each row; None without padding.
    Returns the newest tokens [B, K, W + S, D], starting W before the first new one, and the origins used, int64 [1 or B].
    """
    made = schemes.parse(scheme)
    window_at = _encoded(planes)
    ring, clock = planes[window_at][0], planes[window_at + 1]
    S, W, g = x.shape[2], ring.shape[2], made.block
    room = planes[0].shape[0] * planes[0].shape[3]
    held, kept = clock[0, :, 0, 0, :1], clock[0, :, 0, 0, 1:]

    first = pos[:, :1]
    if origin is None:
        # Stays [1, 1] where all rows share one position.
        shown = used = torch.zeros_like(first)
        fits = kept == 0
    else:
        shown = origin[:, None]
        used = torch.where(begins(first, kept, shown), shown, kept)
        fits = shown >= used
    fits = (first == 0) | fits
    start = first - used
    end = start + S
    follows = (first == 0) | (first == held + kept)
    apart = pos != first + torch.arange(S, device=x.device)
    inside = follows & ~apart & (pos - used < room)
    x = torch.where((inside & fits)[:, None, :, None], x, float("nan"))

    def tokens(t: torch.Tensor) -> torch.Tensor:
        """Return the full-precision tokens [B, K, n, D] at positions t [1 or B, n], each in start - W .. end - 1."""
        old = _rows(ring, t % W)
        new = _rows(x, (t - start).clamp(0, S - 1))
        return torch.where((t < start)[:, None, :, None], old, new)

    exact_newest = tokens(start - W + torch.arange(W + S, device=x.device))

    last = ((end - 1) // g).clamp(0, room // g - 1)
    blocks = ((start.clamp(min=0) // g).minimum(last) + torch.arange((S + g - 2) // g + 1 if g > 1 else S, device=x.device)).minimum(last)
    t = (blocks.unsqueeze(-1) * g + torch.arange(g, device=x.device)).flatten(1) if g > 1 else blocks
    content = torch.where((t < end)[:, None, :, None], tokens(t), torch.zeros((), dtype=x.dtype, device=x.device))
    for plane, rows in zip(planes, made.encode(content, *(tables or ()), *planes[window_at + 2 :]), strict=False):
        _write(plane, rows, t if plane.shape[3] == planes[0].shape[3] else blocks)

    _roll(ring, x, tokens, start, end)
    remembered = used if origin is not None else torch.where(first == 0, 0, kept)
    # Report the first token that is out of order, or the end of the store if all are in order but too many.
    at = apart.to(torch.int64).argmax(-1, keepdim=True) if not one_token(x) else torch.zeros_like(first)
    found, whole = pos.gather(1, at), ~apart.any(-1, keepdim=True)
    late = broken(torch.where(whole, room, first + at), torch.where(whole, room, found))
    lost = torch.where(follows, unstored(kept, shown), broken(held + kept, first.expand_as(held)))
    lost = torch.where(is_broken(held), held, lost)
    now = torch.where(follows & fits, torch.where(whole & (end <= room), end, late), lost)
    clock.copy_(torch.stack([now, remembered.expand_as(now)], dim=-1)[None, :, :, None].expand_as(clock))
    return exact_newest, used[:, 0]


def _encoded(planes: list[torch.Tensor]) -> int:
    """Return the number of planes before the window; the clock, just after the window, is the only int64 plane."""
    return next(index for index, plane in enumerate(planes) if plane.dtype == torch.int64) - 1


def _roll(ring: torch.Tensor, x: torch.Tensor, tokens: Any, start: torch.Tensor, end: torch.Tensor) -> None:
    """Write the newest W tokens into ``ring``, the window [B, K, W, D], in place: token t into slot t % W.

    ``x``: the call's S tokens, at positions ``start`` to ``end`` - 1 of each row; if S <= W only their slots are written, else the whole
    ring, from ``tokens``, which returns the tokens at given positions.
    """
    S, W = x.shape[2], ring.shape[2]
    if isinstance(S, int) and S <= W:
        slots = (start + torch.arange(S, device=x.device)) % W
        if slots.shape[0] == 1:
            ring[:, :, slots[0]] = x
        else:
            ring.scatter_(2, slots[:, None, :, None].expand(-1, ring.shape[1], -1, ring.shape[3]), x)
        return
    slot = torch.arange(W, device=x.device)
    newest = end - 1 - (end - 1 - slot) % W
    ring.copy_(tokens(newest))


def append_window_meta(
    x: torch.Tensor, planes: list[torch.Tensor], pos: torch.Tensor, origin: torch.Tensor | None, scheme: str,
    tables: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty tensors of the results' shapes, for fake tensors: [B, K, W + S, D] in x's dtype and int64 [1 or B]."""
    window = planes[_encoded(planes)]
    exact_newest = x.new_empty(x.shape[0], x.shape[1], window.shape[3] + x.shape[2], x.shape[3])
    rows = pos if origin is None else origin
    return exact_newest, rows.new_empty(rows.shape[0], dtype=torch.int64)
