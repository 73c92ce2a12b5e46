"""Registers Inductor's lowerings of our operations: one entry, dispatching by device.

The lowerings themselves are imported only when a graph on their device is compiled, so that a machine
without Triton never needs it.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._inductor.lowering import fallback_handler, register_lowering

from kvcompile import schemes
from kvcompile.lowering import append_ops, ops
from kvcompile.lowering.buffers import static
from kvcompile.lowering.certified_site import certified_site
from kvcompile.types import Role, SlotSpec

PLAIN = 13
"""Operands of ``attend`` without the optional ones: recent tokens, their base, rotation, more keys."""

MORE = 16
"""Where the planes of more keys stand among the operands behind q."""


def _plain(q: Any, operands: tuple[Any, ...]) -> bool:
    """Whether the C++ template knows all of this attention: token-wise symmetric codes, nothing beside the planes."""
    spelled, values = operands[7:9], operands[1]
    heads, dims = static(values[0].get_size()[2]), (q.get_size()[-1], operands[11])
    for text, role, dim in zip(spelled, Role, dims, strict=True):
        slot = SlotSpec(heads, static(dim), values[0].get_dtype(), role)
        if not schemes.parse(text).format(slot).symmetric:
            return False
    return not any(operands[PLAIN - 1 :])


def _lower_attend(q: Any, *operands: Any) -> Any:
    device = q.get_device().type
    if device == "cuda" and not any(operands[MORE:]):
        from kvcompile.lowering.triton_attend import lower_attend_cuda
        from kvcompile.lowering.triton_prefill import lower_prefill

        operands = operands[:MORE]
        many = lower_prefill(q, *operands)
        return lower_attend_cuda(q, *operands) if many is None else many
    if device == "cpu" and _plain(q, operands):
        from kvcompile.lowering.cpp_attend import lower_attend_cpu

        return lower_attend_cpu(q, *operands[: PLAIN - 1])
    return fallback_handler(ops.attend)(q, *operands)


def _lower_append(*operands: Any) -> None:
    from kvcompile.lowering.append_lower import lower_append

    lower_append(*operands)


def _lower_append_window(*operands: Any) -> Any:
    from kvcompile.lowering.append_lower import lower_append_window

    return lower_append_window(*operands)


def _lower_certified_site(*operands: Any, **named: Any) -> Any:
    from kvcompile.lowering.certified_lower import lower_certified_site

    return lower_certified_site(*operands, **named)


@functools.cache
def install() -> None:
    """Make Inductor lower our operations with templates and kernels of ours; calling it again does nothing."""
    register_lowering(ops.attend, type_promotion_kind=None)(_lower_attend)
    register_lowering(certified_site, type_promotion_kind=None)(_lower_certified_site)
    for append in (append_ops.append_kernel, append_ops.append_kernel_pair):
        register_lowering(append, type_promotion_kind=None)(_lower_append)
    for append in (append_ops.append_window_kernel, append_ops.append_window_kernel_pair):
        register_lowering(append, type_promotion_kind=None)(_lower_append_window)
