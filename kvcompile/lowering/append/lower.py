"""Inductor's lowerings of the operators of ``operations``: each becomes one node with all its kernels."""

from __future__ import annotations

from typing import Any

from kvcompile.lowering.append.operations import (
    ROW_OPERANDS,
    WINDOW_OPERANDS,
    own_by_kernel,
    rows_by_kernels,
    windows_by_kernels,
)
from kvcompile.lowering.host.launch_node import lower_launches


def lower_append(*operands: Any) -> None:
    """Add the kernels of ``append_kernel`` or ``append_kernel_pair`` to Inductor's graph.

    ``operands``: boxes, lists of boxes and constants.
    """
    lower_launches(rows_by_kernels, operands, [plane for planes in operands[1::ROW_OPERANDS] for plane in planes])


def lower_append_own(*operands: Any) -> None:
    """Add the kernel of ``append_own_kernel`` to Inductor's graph; the operands are boxes, lists of boxes and constants."""
    lower_launches(own_by_kernel, operands, operands[1])


def lower_append_window(*operands: Any) -> Any:
    """Add the kernels of ``append_window_kernel`` or its pair to Inductor's graph; return the newest tokens, one box or a tuple of two."""
    newest = lower_launches(windows_by_kernels, operands, [plane for planes in operands[1::WINDOW_OPERANDS] for plane in planes])
    return newest[0] if len(newest) == 1 else tuple(newest)
