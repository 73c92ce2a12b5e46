"""``append_window``: the write path of schemes whose newest tokens stay in full precision, as plain tensor code.

Every call rolls the new tokens into the window and encodes the blocks that they touch, from the originals that
the window still holds. A block that is not whole yet is encoded with zeros behind its last token, and written
again with the next token: nobody reads it before it has left the window whole. So a step that completes a block
costs what every step costs, there is no branch, and no position ever comes to the host.

Token ``t`` of a row lies in slot t % W of its window. Which tokens are where: positions below ``start - W`` are
read from the codes; [start - W, start + S) are ``exact_newest``, which is what this operation returns.

Left padding: a row's tokens are counted from its ``origin``, the first position that its mask lets anybody see, so
that blocks of a padded row hold what they would hold without padding, and padding never sets a scale. It is fixed
by the call that writes position 0, and again by each call that finds nothing but padding in the row: the mask of a prompt's
first chunk does not say where padding ends that is longer than the chunk.

The clock plane [1, B, 1, 1, 2] holds a row's number of tokens and its origin. Writes must come in order, since a
window that skipped tokens holds others than attention would look for: tokens that neither follow the last one nor
start again at 0 are written as NaN; so are new tokens of a row whose mask now shows positions before its origin,
which were never stored.

A row whose tokens came out of order, or whose mask shows what was never stored, is *broken*: places that the window does not know
of may hold anything else than the dense tensor would. From then on its number of tokens is ``broken(expected, found)``, or
``unstored(origin, shown)``, a number so far below 0 that no position follows it, until the row begins again at 0. Attention asks
``is_broken`` and gives such a row NaN (``rewrite.order``), whatever it sees; the host, which waits for no step, reads the number when
it reads the cache (``runtime.exact_window``).
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
"""The furthest place that a broken row remembers."""

SHOWN = 1 << 30
"""The bit of a broken row's count that is set where a mask showed unstored padding, and clear where tokens came out of order."""


def broken(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens of a row that is broken where a token was ``expected`` at one place and ``found`` at another, int64.

    Two equal places say that the store has no room from there on.
    """
    return BROKEN + (expected.clamp(0, MOST_PLACE) << 32) + found.clamp(-1, MOST_PLACE) + 1


def unstored(origin: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens of a row that is broken as its mask shows position ``shown``, before its ``origin``, int64."""
    return broken(origin, shown) + SHOWN


def is_broken(held: torch.Tensor) -> torch.Tensor:
    """Return for each token count in a clock plane whether it marks its row as broken."""
    return held < LEAST_HELD


def said_of(held: int) -> tuple[int, int, bool]:
    """Return where a broken row's token was expected, and where it was found; -1 stands for every place before 0.

    The last says whether these are its origin, and a position before it that a mask showed.
    """
    said = (held - BROKEN) & 0xFFFFFFFF
    return (held - BROKEN) >> 32, said % SHOWN - 1, said >= SHOWN


def begins(first: torch.Tensor, kept: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
    """Whether rows begin where a call's mask says, ``shown``, and not where they did, ``kept``, for a call that begins at ``first``.

    So at position 0, and where all tokens so far are padding, of which the mask shows none. Either origin gives the same answer, since
    programs of a kernel may read the clock as another writes it.
    """
    return (first == 0) | ((kept >= first) & (shown >= first))


def one_token(x_BKSD: torch.Tensor) -> bool:
    """Whether a call has one new token, and not a symbol of them."""
    return isinstance(x_BKSD.shape[2], int) and x_BKSD.shape[2] == 1


def _rows(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """source[b, :, index[b or 0]]: rows [1 or B, n] of a [B, K, T, D] tensor, [B, K, n, D]; all of them exist."""
    if index.shape[0] == 1:
        # Unchecked: the check that Inductor of torch 2.11 writes here is not valid C++.
        return torch.ops.aten._unsafe_index.Tensor(source, [None, None, index[0]])
    return source.gather(2, index[:, None, :, None].expand(-1, source.shape[1], -1, source.shape[3]))


def _write(plane: torch.Tensor, rows_BKnW: torch.Tensor, index: torch.Tensor) -> None:
    """plane[index // R, b, :, index % R] = rows for index [1 or B, n]; where an index repeats, so does what is written."""
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
    """Write x [B, K, S, D] at consecutive positions pos [1 or B, S] of the caller's numbering.

    ``planes``: what the scheme encodes, then the window [1, B, K, W, D], the clock, and the scheme's own fixed planes.
    ``origin``: int64 [B], the first position that this call's mask shows in each row; None where nothing is padded.
    Returns the newest tokens [B, K, W + S, D], the first of which stands W before the first new one, and the
    origins in force, int64 [1 or B].
    """
    made = schemes.parse(scheme)
    window_at = _encoded(planes)
    ring, clock = planes[window_at][0], planes[window_at + 1]
    S, W, g = x.shape[2], ring.shape[2], made.block
    room = planes[0].shape[0] * planes[0].shape[3]
    held, kept = clock[0, :, 0, 0, :1], clock[0, :, 0, 0, 1:]

    first = pos[:, :1]
    if origin is None:
        # One position for all rows, as long as the call has one for them.
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
        """The originals at positions t [1 or B, n] from start - W to end - 1, [B, K, n, D]."""
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
    # The first token that is out of order; the end of the room where all follow one another but are too many.
    at = apart.to(torch.int64).argmax(-1, keepdim=True) if not one_token(x) else torch.zeros_like(first)
    found, whole = pos.gather(1, at), ~apart.any(-1, keepdim=True)
    late = broken(torch.where(whole, room, first + at), torch.where(whole, room, found))
    lost = torch.where(follows, unstored(kept, shown), broken(held + kept, first.expand_as(held)))
    lost = torch.where(is_broken(held), held, lost)
    now = torch.where(follows & fits, torch.where(whole & (end <= room), end, late), lost)
    clock.copy_(torch.stack([now, remembered.expand_as(now)], dim=-1)[None, :, :, None].expand_as(clock))
    return exact_newest, used[:, 0]


def _encoded(planes: list[torch.Tensor]) -> int:
    """How many planes come before the window, which is followed by the clock, the only plane of integers of 64 bits."""
    return next(index for index, plane in enumerate(planes) if plane.dtype == torch.int64) - 1


def _roll(ring: torch.Tensor, x: torch.Tensor, tokens: Any, start: torch.Tensor, end: torch.Tensor) -> None:
    """Put the newest W tokens into the ring; those that stay are written as they are where many come at once."""
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
    """Shapes of the results, [B, K, W + S, D] in x's dtype and int64 [1 or B]."""
    window = planes[_encoded(planes)]
    exact_newest = x.new_empty(x.shape[0], x.shape[1], window.shape[3] + x.shape[2], x.shape[3])
    rows = pos if origin is None else origin
    return exact_newest, rows.new_empty(rows.shape[0], dtype=torch.int64)
