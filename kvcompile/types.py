"""The words that every other module shares: roles, granularities, planes, layouts, kernel formats.

Axes, used as suffixes of tensor names and in every docstring: B batch, H query heads, K kv heads,
G = H/K, S new tokens, T cached tokens, C capacity, D head dim, N pages.

Nothing here computes: numerics live in ``schemes``, state in ``runtime``, kernels in ``lowering``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

PAGE = 64
"""Tokens a page holds. Stores grow by whole pages on their first axis, so strides never change."""


class Role(enum.Enum):
    """Which half of an attention a slot feeds."""

    KEY = "key"
    VALUE = "value"


class Granularity(enum.Enum):
    """What one scale covers: a token's head, a group of its channels, or everything written at once."""

    TOKEN = "token"
    GROUP = "group"
    TENSOR = "tensor"


@dataclass(frozen=True)
class SlotSpec:
    """What a scheme must know of one cache slot: kv heads K, head dim D, the model's dtype, the role."""

    heads: int
    head_dim: int
    dtype: torch.dtype
    role: Role


@dataclass(frozen=True)
class PlaneSpec:
    """One physical tensor of an encoded slot, [N, B, K, rows, width]; ``rows`` rows cover one page of tokens."""

    name: str
    dtype: torch.dtype
    width: int
    rows: int = PAGE

    def shape(self, pages: int, batch: int, heads: int) -> tuple[int, int, int, int, int]:
        """The allocated shape for ``pages`` pages, [N, B, K, rows, width]."""
        return (pages, batch, heads, self.rows, self.width)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page of one head of one batch row."""
        return self.rows * self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The planes of one encoded slot, in the order that ``encode`` returns them."""

    planes: tuple[PlaneSpec, ...]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page of tokens of one head of one batch row, all planes."""
        return sum(plane.bytes_per_page for plane in self.planes)

    def bytes_per_token(self, heads: int) -> float:
        """Bytes one token of one batch row costs over ``heads`` kv heads."""
        return heads * self.bytes_per_page / PAGE


@dataclass(frozen=True)
class KernelFormat:
    """How a kernel reads one encoded slot; the scheme's side of the one attend template.

    Channel ``c`` of a token lives in word ``c % (D // parts)`` as part ``c // (D // parts)``: parts are
    planar, so sub-dot ``i`` takes part ``i`` of every word and neither q nor v is ever shuffled.
    ``unpack(words, part)`` is the eager definition (words in ``word_dtype`` -> float32 values before
    scaling); templates print the very expression that it traces to. The value of a channel is
    ``unpack(word, part) * scale`` with one scale per token (``group`` = D) or per ``group`` consecutive
    channels; ``scaled`` is False where the codes are the values (dense).
    """

    word_dtype: torch.dtype
    parts: int
    group: int
    scaled: bool
    unpack: Callable[[torch.Tensor, int], torch.Tensor]


def pages_for(tokens: int) -> int:
    """Whole pages that hold ``tokens`` tokens."""
    return math.ceil(tokens / PAGE)
