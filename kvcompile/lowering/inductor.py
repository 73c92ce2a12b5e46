"""Registers Inductor's lowerings of our operations: one entry, dispatching by device.

The lowerings themselves are imported only when a graph on their device is compiled, so that a machine
without Triton never needs it.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._inductor.lowering import fallback_handler, register_lowering

from kvcompile.lowering import ops


def _lower_attend(q: Any, *operands: Any) -> Any:
    device = q.get_device().type
    if device == "cuda":
        from kvcompile.lowering.triton_attend import lower_attend_cuda

        return lower_attend_cuda(q, *operands)
    if device == "cpu":
        from kvcompile.lowering.cpp_attend import lower_attend_cpu

        return lower_attend_cpu(q, *operands)
    return fallback_handler(ops.attend)(q, *operands)


@functools.cache
def install() -> None:
    """Make Inductor lower ``kvcompile::attend`` with our templates; calling it again does nothing."""
    register_lowering(ops.attend, type_promotion_kind=None)(_lower_attend)
