"""``kept_tokens``: counts how many tokens of each run of 32 a mask keeps. Kernels skip padding and unmasked tiles by these counts.

Without the counts, every program of every layer reads the mask byte by byte, behind all other loads in flight: 5 us for each round of
loads on an H100, 17% of a step's attention. The counts are made once per graph, and one round loads the counts of 4,096 tokens.
"""

from __future__ import annotations

import torch
from torch.nn import functional

RUN = 32
"""Tokens in a run. A tile's length is a multiple or a divisor of it."""


def kept_tokens(keep: torch.Tensor) -> torch.Tensor:
    """Return how many tokens ``keep`` keeps in each run: bool [B, T] -> int32 [B, ceil(T / RUN)]. Positions from T on do not count."""
    runs = -(-keep.shape[1] // RUN)
    whole = functional.pad(keep, (0, runs * RUN - keep.shape[1]))
    return whole.reshape(keep.shape[0], runs, RUN).sum(2, dtype=torch.int32)
