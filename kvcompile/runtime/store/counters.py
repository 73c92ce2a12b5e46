"""Counters: detect whether anything but the graphs moved the position counters that they advance.

A module may count its tokens in a buffer that the graph adds to (``cumulative_length`` of transformers' StaticCache). Then a call's
positions follow those of the previous call, and need not be read, unless other code writes to the buffer: for example, a
caller that takes back draft tokens moves it. So each state keeps a mark of its counters after the call that last wrote it. If a counter
no longer matches its mark, the next call reads its positions again.

* On a CPU the mark is the counter's values: reading them does not wait, and every change is seen.
* Elsewhere it is the tensor's identity and version, both on the host; reading values would wait. Three kinds of change do not count a
  version and are missed: through ``.data``, in a tensor made in inference mode, and inside a CUDA graph of the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcompile.runtime.store import host_reads

MOST_LISTED = 64
"""Counters of at most this many elements are compared as lists, which is faster than a kernel call."""


class CounterSnapshot:
    """The state of a call's position counters after the call; one snapshot is shared by all states that the call wrote."""

    __slots__ = ("seen",)

    def __init__(self, counters: Sequence[torch.Tensor]) -> None:
        # Holding the tensors keeps their identities from being reused.
        self.seen: dict[int, tuple[torch.Tensor, Any]] = {id(counter): (counter, _mark(counter)) for counter in counters}

    def holds(self, counters: Sequence[torch.Tensor]) -> bool:
        """Return whether a later call's position counters are the same and unchanged since this snapshot."""
        for counter in counters:
            known = self.seen.get(id(counter))
            if known is None or not _same(counter, known[1]):
                return False
        return True


def _mark(counter: torch.Tensor) -> Any:
    """Return a mark that differs once the counter changes: its values on a CPU, else its version (None if it counts none)."""
    if host_reads.free(counter.device):
        return counter.tolist() if counter.numel() <= MOST_LISTED else counter.clone()
    return None if counter.is_inference() else counter._version


def _same(counter: torch.Tensor, mark: Any) -> bool:
    """Return whether a counter still matches ``mark``."""
    if isinstance(mark, torch.Tensor):
        return torch.equal(counter, mark)
    if host_reads.free(counter.device):
        return bool(counter.tolist() == mark)
    return mark is None or counter._version == mark
