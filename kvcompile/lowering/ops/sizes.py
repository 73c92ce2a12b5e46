"""Sizes and strides of operands, by one interface for Inductor's buffers (the module ``host.buffers``) and tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Sizes(Protocol):
    """The interface to shapes, dtypes and alignment of a kernel's operands; only ``static`` may add a guard on a symbolic size."""

    def shape(self, node: Any) -> Sequence[Any]:
        """Return the sizes of ``node``, integers or symbols."""

    def dtype(self, node: Any) -> torch.dtype:
        """Return the dtype of ``node``."""

    def static(self, size: Any) -> int:
        """Return ``size`` as a constant, for which the kernel is specialised."""

    def hint(self, size: Any) -> int:
        """Return a plausible value of ``size``, for choosing tiles and splits."""

    def equals(self, size: Any, value: int) -> bool:
        """Return whether ``size`` is ``value`` in every call; False if that is not known."""

    def multiple(self, node: Any, count: int) -> bool:
        """Return whether ``count`` neighbouring elements may be loaded as one word.

        They may if they are contiguous and every row begins at a multiple of ``count``. False if that is not known.
        """

    def pairs_of_rows(self, node: Any) -> bool:
        """Return whether two neighbouring rows of one float16 each may be loaded as one word; False for other dtypes and widths."""

    def varies(self, node: Any, axis: int = 0) -> bool:
        """Return whether ``node`` is given (not None) and has more than one entry along ``axis``, so is not broadcast."""


@dataclass(frozen=True)
class TensorSizes:
    """``Sizes`` of tensors, real or fake; ``number`` turns a symbol into an integer."""

    number: Callable[[Any], int] = int

    def shape(self, node: torch.Tensor) -> Sequence[Any]:
        return node.shape

    def dtype(self, node: torch.Tensor) -> torch.dtype:
        return node.dtype

    def static(self, size: Any) -> int:
        return self.number(size)

    def hint(self, size: Any) -> int:
        return self.number(size)

    def equals(self, size: Any, value: int) -> bool:
        return isinstance(size, int) and size == value

    def multiple(self, node: torch.Tensor, count: int) -> bool:
        *outer, inner = node.stride()
        return self.equals(inner, 1) and self._divisible((node.shape[-1], node.storage_offset(), *outer), count)

    def pairs_of_rows(self, node: torch.Tensor) -> bool:
        *outer, row, _ = node.stride()
        alone = node.dtype == torch.float16 and self.equals(node.shape[-1], 1) and self.equals(row, 1)
        return alone and self._divisible((node.shape[-2], node.storage_offset(), *outer), 2)

    def varies(self, node: torch.Tensor | None, axis: int = 0) -> bool:
        return node is not None and not self.equals(node.shape[axis], 1)

    def _divisible(self, found: Sequence[Any], count: int) -> bool:
        return all(self.number(each) % count == 0 for each in found)
