"""Buffers and sizes of Inductor's graph, for the lowerings of all devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvcompile.lowering.host.inductor_api import V, ir


def realize(node: Any) -> Any:
    """Return a buffer, or a strided view of one, with fixed strides; copies only if no strides can describe the node."""
    node = ir.ExternKernel.realize_input(node)
    node.freeze_layout()
    return node


def shape(node: Any) -> Sequence[Any]:
    """Return the sizes of ``node``, integers or symbols."""
    return node.get_size()  # type: ignore[no-any-return]


def dtype(node: Any) -> torch.dtype:
    """Return the dtype of ``node``."""
    return node.get_dtype()  # type: ignore[no-any-return]


def is_box(item: Any) -> bool:
    """Return whether an operand of a lowering is a value of Inductor's graph."""
    return isinstance(item, ir.IRNode)


def channels_together(x: Any) -> Any:
    """Return ``x`` with channel stride 1, as kernels expect; copies it only if the stride differs."""
    return x if equals(realize(x).get_stride()[-1], 1) else ir.ExternKernel.require_contiguous(x)


def static(size: Any) -> int:
    """Return ``size`` as a constant; adds a guard if it is a symbol (dynamic=True)."""
    return int(V.graph.sizevars.guard_int(size))


def equals(size: Any, value: int) -> bool:
    """Return whether ``size`` is statically known to be ``value``; False if that is not known. Adds no guard."""
    return bool(V.graph.sizevars.statically_known_equals(size, value))


def hint(size: Any) -> int:
    """Return a plausible value of ``size``, 1 if unknown; adds no guard. Only for tuning."""
    return int(V.graph.sizevars.optimization_hint(size, fallback=1))


def multiple(node: Any, count: int) -> bool:
    """Return whether ``count`` neighbouring elements may be loaded as one word: dense rows at offsets that are multiples of ``count``.

    False if that is not known of symbolic sizes.
    """
    *outer, inner = node.get_stride()
    every = (node.get_size()[-1], node.get_layout().offset, *outer)
    return equals(inner, 1) and all(V.graph.sizevars.statically_known_multiple_of(x, count) for x in every)


def pairs_of_rows(node: Any) -> bool:
    """Return whether two neighbouring rows of one float16 each may be loaded as one word: contiguous, at even offsets.

    False if that is not known of symbolic sizes.
    """
    *outer, row, _ = node.get_stride()
    every = (node.get_size()[-2], node.get_layout().offset, *outer)
    alone = node.get_dtype() == torch.float16 and equals(node.get_size()[-1], 1) and equals(row, 1)
    return alone and all(V.graph.sizevars.statically_known_multiple_of(x, 2) for x in every)


def varies(node: Any, axis: int = 0) -> bool:
    """Return whether ``node`` is given (not None) and not broadcast along ``axis``."""
    return node is not None and not equals(node.get_size()[axis], 1)


def examples(operands: Sequence[str], values: Mapping[str, int]) -> dict[int, Callable[[Any], torch.Tensor]]:
    """Return makers of example operands for autotuning, by index: an operand named in ``values`` is filled with its value."""

    def filled(value: int) -> Callable[[Any], torch.Tensor]:
        def make(node: Any) -> torch.Tensor:
            size = [hint(extent) for extent in node.get_size()]
            return torch.full(size, value, dtype=node.get_dtype(), device=node.get_device())

        return make

    return {index: filled(values[name]) for index, name in enumerate(operands) if name in values}
