"""Registers Inductor's lowerings of our operations: one entry for each, which dispatches by device.

The lowerings are imported only when a graph on their device is compiled, so that a machine without Triton works.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from kvcompile.lowering.append import operations as append_ops
from kvcompile.lowering.attend_kernels import facts_for, kernels_for
from kvcompile.lowering.attention_plugins import AttentionPlugin, plugins
from kvcompile.lowering.host import buffers
from kvcompile.lowering.host.inductor_api import register_lowering
from kvcompile.lowering.ops import operations as ops
from kvcompile.lowering.ops.operands import AttendOperands


def _lower_attend(*args: Any, **kwargs: Any) -> Any:
    operands: AttendOperands[Any] = AttendOperands(*args, **kwargs)
    # A kernel's lowering may still refuse strides that it does not support.
    made = (kernel.lower(operands) for kernel, _ in kernels_for(facts_for(operands, buffers, operands.q.get_device().type)))
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
    importlib.import_module("kvcompile.lowering.paged.store")
    register_lowering(ops.attend, type_promotion_kind=None)(_lower_attend)
    for append in (append_ops.append_kernel, append_ops.append_kernel_pair):
        register_lowering(append, type_promotion_kind=None)(_lower_append)
    register_lowering(append_ops.append_own_kernel, type_promotion_kind=None)(_lower_append_own)
    for append in (append_ops.append_window_kernel, append_ops.append_window_kernel_pair):
        register_lowering(append, type_promotion_kind=None)(_lower_append_window)
