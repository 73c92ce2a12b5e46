"""Statements by which a program leaves out the padding in front of its tokens, and finds where nothing is hidden any more."""

from __future__ import annotations


def skip_padding(counts: str, width: int, size: int = 1, whole: str = "end") -> str:
    """Statements for a program whose tokens are ``begin`` to ``end`` - 1, in tiles of BLOCK_T.

    ``counts``: a pointer to how many tokens are kept of the runs ``run`` of ``size`` tokens (``ops.kept_tokens``), or to a mask's bytes,
    which are runs of one; ``width``: how many are read at a time; ``whole``: where the last run that counts as hidden stops, as one that is
    cut there is masked anyway. Afterwards ``begin`` is the tile of the first run that keeps one, or lies behind ``end`` where none does,
    and ``shown`` the token behind the last run that hides one.
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
