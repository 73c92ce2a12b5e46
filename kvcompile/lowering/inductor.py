"""Registers Inductor's lowerings of our operations: one entry for each, which dispatches by device.

The lowerings are imported only when a graph on their device is compiled, so that a machine without Triton works.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from kvcompile.lowering.append import operations as append_ops
from kvcompile.lowering.attend_kernels import AttendFacts, kernels_for
from kvcompile.lowering.attention_plugins import AttentionPlugin, plugins
from kvcompile.lowering.gluon.eligibility import single_token_facts
from kvcompile.lowering.host.buffers import equals, static
from kvcompile.lowering.host.inductor_api import register_lowering
from kvcompile.lowering.ops import operations as ops
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.types import Role, SlotSpec


def _facts(operands: AttendOperands[Any]) -> AttendFacts:
    """Return the facts of an ``attend`` that Inductor lowers, from its boxes."""
    q, keys, values = operands.q, operands.keys, operands.values
    heads = static(values[0].get_size()[2])
    slots = tuple(
        (text, SlotSpec(heads, static(dim), values[0].get_dtype(), role))
        for text, role, dim in (
            (operands.key_scheme, Role.KEY, q.get_size()[-1]), (operands.value_scheme, Role.VALUE, operands.value_dim),
        )
    )
    pages, page_rows = keys[0].get_size()[0], keys[0].get_size()[3]
    device = q.get_device().type
    alone = device == "cuda" and equals(q.get_size()[2], 1)
    return AttendFacts(
        device, slots, q.get_dtype(), 1 if equals(pages, 1) else static(page_rows), _many_rows(operands) if device == "cuda" else None,
        bool(operands.exact_newest), bool(operands.rope), bool(operands.extra_key_planes), operands.bias is not None,
        single_token_facts(static(q.get_size()[1]) // heads, operands.softcap) if alone else None, bool(operands.exact_first),
        operands.log_sums,
    )


def _many_rows(operands: AttendOperands[Any]) -> int | None:
    from kvcompile.lowering.prefill.lower import many_rows

    return many_rows(operands)


def _lower_attend(*args: Any, **kwargs: Any) -> Any:
    operands: AttendOperands[Any] = AttendOperands(*args, **kwargs)
    # A kernel's lowering may still refuse strides that it does not support.
    made = (kernel.lower(operands) for kernel, _ in kernels_for(_facts(operands)))
    return next(box for box in made if box is not None)


def _lower_append(*operands: Any) -> None:
    from kvcompile.lowering.append.lower import lower_append

    lower_append(*operands)


def _lower_append_own(*operands: Any) -> None:
    from kvcompile.lowering.append.lower import lower_append_own

    lower_append_own(*operands)


def _lower_append_window(*operands: Any) -> Any:
    from kvcompile.lowering.append.lower import lower_append_window

    return lower_append_window(*operands)


def install() -> None:
    """Register our lowerings with Inductor; calling it again adds new plugins."""
    _install_shared()
    for plugin in plugins():
        _install_plugin(plugin)


@functools.cache
def _install_plugin(plugin: AttentionPlugin) -> None:
    register_lowering(plugin.operation, type_promotion_kind=None)(plugin.lower)


@functools.cache
def _install_shared() -> None:
    # An output module from Inductor's cache on disk calls these operations without any lowering that would define them.
    importlib.import_module("kvcompile.lowering.gluon.launch")
    importlib.import_module("kvcompile.lowering.prefill.chunked")
    register_lowering(ops.attend, type_promotion_kind=None)(_lower_attend)
    for append in (append_ops.append_kernel, append_ops.append_kernel_pair):
        register_lowering(append, type_promotion_kind=None)(_lower_append)
    register_lowering(append_ops.append_own_kernel, type_promotion_kind=None)(_lower_append_own)
    for append in (append_ops.append_window_kernel, append_ops.append_window_kernel_pair):
        register_lowering(append, type_promotion_kind=None)(_lower_append_window)
