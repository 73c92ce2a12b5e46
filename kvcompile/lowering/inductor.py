"""Registers Inductor's lowerings of our operations: one entry, dispatching by device.

The lowerings themselves are imported only when a graph on their device is compiled, so that a machine
without Triton never needs it.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._inductor.lowering import fallback_handler, register_lowering

from kvcompile.lowering.append import operations as append_ops
from kvcompile.lowering.attend_kernels import CPP, TRITON, AttendOperands, choose
from kvcompile.lowering.host.buffers import equals, static
from kvcompile.lowering.ops import operations as ops
from kvcompile.lowering.rooms import Room, rooms
from kvcompile.types import Role, SlotSpec

PLAIN = 13
"""Operands of ``attend`` without the optional ones: recent tokens, their base, rotation, more keys."""

MORE = 16
"""Where the planes of more keys stand among the operands behind q."""


def _facts(q: Any, operands: tuple[Any, ...]) -> AttendOperands:
    """The facts of an ``attend`` that Inductor lowers; ``operands``: those behind q."""
    values, spelled = operands[1], operands[7:9]
    heads, dims = static(values[0].get_size()[2]), (static(q.get_size()[-1]), static(operands[11]))
    slots = tuple(
        (text, SlotSpec(heads, dim, values[0].get_dtype(), role)) for text, role, dim in zip(spelled, Role, dims, strict=True)
    )
    rows = 1 if equals(operands[0][0].get_size()[0], 1) else static(operands[0][0].get_size()[3])
    recent, _, rotation, _, more = (*operands[PLAIN - 1 :], *[None] * 5)[:5]
    return AttendOperands(q.get_device().type, slots, q.get_dtype(), rows, bool(recent), bool(rotation), bool(more))


def _lower_attend(q: Any, *operands: Any) -> Any:
    kernel, _ = choose(_facts(q, operands))
    if kernel is TRITON:
        from kvcompile.lowering.decode.lower import lower_attend_cuda
        from kvcompile.lowering.prefill.lower import lower_prefill

        operands = operands[:MORE]
        many = lower_prefill(q, *operands)
        return lower_attend_cuda(q, *operands) if many is None else many
    if kernel is CPP:
        from kvcompile.lowering.cpu.lower import lower_attend_cpu

        return lower_attend_cpu(q, *operands[: PLAIN - 1])
    return fallback_handler(ops.attend)(q, *operands)


def _lower_append(*operands: Any) -> None:
    from kvcompile.lowering.append.lower import lower_append

    lower_append(*operands)


def _lower_append_window(*operands: Any) -> Any:
    from kvcompile.lowering.append.lower import lower_append_window

    return lower_append_window(*operands)


def install() -> None:
    """Make Inductor lower our operations with templates and kernels of ours; calling it again adds rooms that are new."""
    _install_shared()
    for room in rooms():
        _install_room(room)


@functools.cache
def _install_room(room: Room) -> None:
    register_lowering(room.operation, type_promotion_kind=None)(room.lower)


@functools.cache
def _install_shared() -> None:
    register_lowering(ops.attend, type_promotion_kind=None)(_lower_attend)
    for append in (append_ops.append_kernel, append_ops.append_kernel_pair):
        register_lowering(append, type_promotion_kind=None)(_lower_append)
    for append in (append_ops.append_window_kernel, append_ops.append_window_kernel_pair):
        register_lowering(append, type_promotion_kind=None)(_lower_append_window)
