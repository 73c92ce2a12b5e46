"""Statements by which a program leaves out the padding in front of its tokens, and finds where nothing is hidden any more."""

from __future__ import annotations


def skip_runs(counts: str, width: int, size: int) -> str:
    """Statements for a program whose tokens are ``begin`` to ``end`` - 1, in tiles of BLOCK_T, of which whole ones end at ``clear``.

    ``counts``: a pointer to what is kept of the runs ``run`` of ``size`` tokens (``ops.kept_tokens``); ``width``: how many are read at a
    time. Afterwards ``begin`` is the tile of the first run that keeps one, or lies behind ``end`` where none does, and ``shown`` the
    token behind the last run that hides one. A run that ``clear`` cuts is masked anyway.
    """
    return f"""
    lowest, hidden = tl.full([{width}], 2147483646, tl.int32), tl.full([{width}], -1, tl.int32)
    for at in tl.range(begin // {size}, tl.cdiv(end, {size}), {width}, num_stages=1):
        run = at + tl.arange(0, {width})
        count = tl.load({counts}, mask=run < tl.cdiv(end, {size}), other=0)
        lowest = tl.minimum(lowest, tl.where(count > 0, run * {size}, 2147483646))
        hidden = tl.maximum(hidden, tl.where((count < {size}) & (run < clear // {size}), run * {size} + {size - 1}, -1))
    begin = tl.minimum(tl.maximum(begin, tl.min(lowest, 0) // BLOCK_T * BLOCK_T), tl.maximum(begin, tl.cdiv(end, BLOCK_T) * BLOCK_T))
    shown = tl.max(hidden, 0) + 1
"""


def skip_padding(kept: str, width: int) -> str:
    """Statements for a program whose tokens are ``begin`` to ``end`` - 1, in tiles of BLOCK_T.

    ``kept``: a pointer to the mask's byte of the tokens ``token``; ``width``: how many bytes are read at a time. Afterwards ``begin`` is
    the tile of the first token that is kept, or lies behind ``end`` where none is, and ``shown`` the token behind the last hidden one.
    """
    return f"""
    lowest, hidden = tl.full([{width}], 2147483646, tl.int32), tl.full([{width}], -1, tl.int32)
    for at in tl.range(begin, end, {width}, num_stages=1):
        token = at + tl.arange(0, {width})
        kept = tl.load({kept}, mask=token < end, other=0) != 0
        lowest = tl.minimum(lowest, tl.where(kept, token, 2147483646))
        hidden = tl.maximum(hidden, tl.where(kept | (token >= end), -1, token))
    begin = tl.minimum(tl.maximum(begin, tl.min(lowest, 0) // BLOCK_T * BLOCK_T), tl.maximum(begin, tl.cdiv(end, BLOCK_T) * BLOCK_T))
    shown = tl.max(hidden, 0) + 1
"""
