"""Inductor's lowering of ``kvcompile::attend`` of one new token to the Gluon kernel: a call of ``attend_gluon`` in the output module.

The kernel is compiled here as a trial, before any step; a failure is not an error: the next kernel of ``attend_kernels.KERNELS`` is used.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from kvcompile.lowering.gluon import launch
from kvcompile.lowering.host.buffers import equals, hint, realize
from kvcompile.lowering.host.inductor_api import fallback_handler, ir
from kvcompile.lowering.host.kept_tokens import kept_tokens
from kvcompile.lowering.ops.kept_tokens import RUN
from kvcompile.lowering.ops.operands import AttendOperands

log = logging.getLogger(__name__)


def lower_gluon(operands: AttendOperands[Any]) -> Any | None:
    """Return the result of ``attend`` as a TensorBox, None if the planes' layout is not supported or the kernel does not compile."""
    q, planes, exact_newest = operands.q, (*operands.keys, *operands.values), operands.exact_newest or ()
    numbers = (*operands.keys[1:], *operands.values[1:])
    batch, _, queries, _ = q.get_size()
    known = (
        equals(queries, 1) and all(_lies(plane, batch) for plane in planes)
        and all(plane.get_dtype() == torch.float16 for plane in numbers)
        and all(rows.get_dtype() == q.get_dtype() for rows in exact_newest)
    )
    if not known or not compiles(_forms(operands), str(q.get_device())):
        return None
    return fallback_handler(launch.operation)(
        q, list(operands.keys), list(operands.values), operands.hi, operands.lo, operands.keep, operands.sinks, operands.key_scheme,
        operands.value_scheme, float(operands.scale), int(operands.value_dim), list(exact_newest) if exact_newest else None, operands.base,
        None if operands.keep is None else kept_tokens(operands.keep, RUN),
    )


def _lies(plane: Any, batch: Any) -> bool:
    """Return whether a plane [pages, B, K, rows, width] is contiguous and has batch size ``batch``, as the kernel's offsets assume."""
    node = realize(plane)
    size, dense = node.get_size(), ir.FlexibleLayout.contiguous_strides(node.get_size())
    return equals(size[1], batch) and all(equals(*pair) for pair in zip(node.get_stride(), dense, strict=True))


@dataclasses.dataclass(frozen=True)
class OperandSpec:
    """Size, stride and dtype of an operand; symbolic sizes are replaced by hints."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        """Return a meta tensor, without memory, of this size, stride and dtype."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


def _forms(operands: AttendOperands[Any]) -> tuple[Any, ...]:
    """Return the operands of ``attend`` in schema order, hashable, with an ``OperandSpec`` in place of each of Inductor's boxes."""

    def form(item: Any) -> Any:
        if isinstance(item, Sequence) and not isinstance(item, str):
            return tuple(map(form, item))
        if not isinstance(item, ir.IRNode):
            return item
        node = realize(item)
        size, stride = (tuple(map(hint, each)) for each in (node.get_size(), node.get_stride()))
        return OperandSpec(size, stride, node.get_dtype())

    return tuple(map(form, operands.arguments()))


@functools.lru_cache(maxsize=256)
def compiles(forms: tuple[Any, ...], device: str) -> bool:
    """Return whether both kernels, attend and merge, compile for operands ``forms`` on a CUDA device; logs a warning if not. Cached."""

    def made(item: Any) -> Any:
        return item.tensor() if isinstance(item, OperandSpec) else tuple(map(made, item)) if isinstance(item, tuple) else item

    try:
        with torch.cuda.device(device):
            _, found = launch.launches(AttendOperands(*map(made, forms)), launch.device_of(torch.device(device)))
            for each in found:
                each.compile()
    except Exception:
        log.warning("the Gluon kernel does not compile here, and the Triton template takes its place", exc_info=True)
        return False
    return True
