"""Buffers and sizes of Inductor's graph, as the lowerings of all devices ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvcompile.lowering.host.inductor_api import V, ir


def realize(node: Any) -> Any:
    """A buffer or a strided view of one with its strides settled; copies only what no strides can describe."""
    node = ir.ExternKernel.realize_input(node)
    node.freeze_layout()
    return node


def is_box(item: Any) -> bool:
    """Whether an operand of a lowering is a value of Inductor's graph."""
    return isinstance(item, ir.IRNode)


def channels_together(x: Any) -> Any:
    """An operand whose channels lie one after the other, as kernels with strides take it; mostly it does already."""
    return x if equals(realize(x).get_stride()[-1], 1) else ir.ExternKernel.require_contiguous(x)


def static(size: Any) -> int:
    """A size that must be a constant; guards where it arrives as a symbol under dynamic=True."""
    return int(V.graph.sizevars.guard_int(size))


def equals(size: Any, value: int) -> bool:
    """Whether a size is known to be ``value``, without a guard."""
    return bool(V.graph.sizevars.statically_known_equals(size, value))


def hint(size: Any) -> int:
    """A plausible value, without a guard; only tuning depends on it."""
    return int(V.graph.sizevars.optimization_hint(size, fallback=1))


def multiple(node: Any, count: int) -> bool:
    """Whether ``count`` neighbors may be loaded as one word: dense rows at offsets that ``count`` divides."""
    *outer, inner = node.get_stride()
    every = (node.get_size()[-1], node.get_layout().offset, *outer)
    return equals(inner, 1) and all(V.graph.sizevars.statically_known_multiple_of(x, count) for x in every)


def pairs_of_rows(node: Any) -> bool:
    """Whether two neighboring rows, of one float16 each, may be loaded as one word: side by side, at even offsets."""
    *outer, row, _ = node.get_stride()
    every = (node.get_size()[-2], node.get_layout().offset, *outer)
    alone = node.get_dtype() == torch.float16 and equals(node.get_size()[-1], 1) and equals(row, 1)
    return alone and all(V.graph.sizevars.statically_known_multiple_of(x, 2) for x in every)


def varies(node: Any, axis: int = 0) -> bool:
    """Whether an operand is there and not broadcast along an axis."""
    return node is not None and not equals(node.get_size()[axis], 1)


def examples(operands: Sequence[str], values: Mapping[str, int]) -> dict[int, Callable[[Any], torch.Tensor]]:
    """Makers of operands to tune with, by their place: those named in ``values`` are filled with their value."""

    def filled(value: int) -> Callable[[Any], torch.Tensor]:
        def make(node: Any) -> torch.Tensor:
            size = [hint(extent) for extent in node.get_size()]
            return torch.full(size, value, dtype=node.get_dtype(), device=node.get_device())

        return make

    return {index: filled(values[name]) for index, name in enumerate(operands) if name in values}
