"""Counters: what a state assumes about the position tensors that its graphs advance, and how it sees that somebody else moved them.

A module may count its tokens itself, in a buffer that the graph adds to (``cumulative_length`` of transformers' StaticCache). Then a call's
positions follow those of the call before, and nobody needs to read them. That holds as long as nobody else writes to the buffer: a caller
who takes back draft tokens moves it. So each state keeps, from the call that wrote it last, what its counters were behind that call.
Another value means that the next call has to look at its positions again.

* on a CPU a counter's numbers are compared: that is no wait, and sees every way to change it
* elsewhere its identity and its version, which are numbers on the host; numbers would have to be waited for. Three changes do not count a
  version and are not seen there: through ``.data``, in a tensor that was made in inference mode, and inside a CUDA graph of the caller's
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcompile.runtime.store import host_reads

MOST_LISTED = 64
"""A counter of at most this many numbers is compared as a list, which is faster than a call of a kernel."""


class CounterSnapshot:
    """The counters of a call as it left them; one object is shared by the states that the call wrote."""

    __slots__ = ("seen",)

    def __init__(self, counters: Sequence[torch.Tensor]) -> None:
        # The tensors are kept: no other can be made with the identity of one of them.
        self.seen: dict[int, tuple[torch.Tensor, Any]] = {id(counter): (counter, _mark(counter)) for counter in counters}

    def holds(self, counters: Sequence[torch.Tensor]) -> bool:
        """Whether these counters, those of a later call, are as that call left them."""
        for counter in counters:
            known = self.seen.get(id(counter))
            if known is None or not _same(counter, known[1]):
                return False
        return True


def _mark(counter: torch.Tensor) -> Any:
    """Return what tells a later value of a counter from this one."""
    if host_reads.free(counter.device):
        return counter.tolist() if counter.numel() <= MOST_LISTED else counter.clone()
    return None if counter.is_inference() else counter._version


def _same(counter: torch.Tensor, mark: Any) -> bool:
    """Whether a counter is as it was when ``mark`` was taken."""
    if isinstance(mark, torch.Tensor):
        return torch.equal(counter, mark)
    if host_reads.free(counter.device):
        return bool(counter.tolist() == mark)
    return mark is None or counter._version == mark
