"""Statements with which a program skips the padding before its tokens, and finds the end of the last hidden run."""

from __future__ import annotations


def skip_padding(counts: str, width: int, size: int = 1, whole: str = "end") -> str:
    """Return statements by which a program skips padding; the program has tokens ``begin`` to ``end`` - 1, in tiles of BLOCK_T.

    They move ``begin`` to the tile of the first run with a kept token, or past ``end`` if there is none, and set ``shown`` to the position
    after the last run with a hidden token.

    ``counts``: pointer to the number of kept tokens of each ``run`` of ``size`` tokens (``ops.kept_tokens``), or to a mask's bytes for
    ``size`` 1. ``width``: counts loaded at a time. ``whole``: end of the last whole run; a run that is cut at ``end`` does not set
    ``shown``, since its tile is masked anyway.
    """
    return f"""
    lowest, hidden = tl.full([{width}], 2147483646, tl.int32), tl.full([{width}], -1, tl.int32)
    for at in tl.range(begin // {size}, tl.cdiv(end, {size}), {width}, num_stages=1):
        run = at + tl.arange(0, {width})
        count = tl.load({counts}, mask=run < tl.cdiv(end, {size}), other=0).to(tl.int32)
        lowest = tl.minimum(lowest, tl.where(count > 0, run * {size}, 2147483646))
        hidden = tl.maximum(hidden, tl.where((count < {size}) & (run < {whole} // {size}), run * {size} + {size - 1}, -1))
    begin = tl.minimum(tl.maximum(begin, tl.min(lowest, 0) // BLOCK_T * BLOCK_T), tl.maximum(begin, tl.cdiv(end, BLOCK_T) * BLOCK_T))
    shown = tl.max(hidden, 0) + 1
"""
