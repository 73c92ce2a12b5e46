"""Operators for appends by kernels of this package: one slot, or keys and values, in one call.

``append_kernel``         ``append`` of one token or many (``rows``)
``append_window_kernel``  ``append_window`` of one token (``window_token``, or the kernel of a scheme's own plugin) or many
                          (``window_blocks``), without the origins: tensor code reads these from the clock before
``append_own_kernel``     ``append`` of tokens that are encoded by a constant plane of their scheme, a table or scales
                          (``Scheme.append_kernel``)

The first two have a form for two slots. They take only operands that the kernels support (``appends`` checks), run the kernels when called,
and declare exactly the planes that a kernel writes as mutated: a compiled graph functionalises them and makes them in-place again.
"""

from __future__ import annotations

from typing import Any

import torch

from kvcompile.lowering.attention_plugins import append_of, own_append
from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.lowering.ops.append_window import _encoded
from kvcompile.lowering.ops.operations import LIBRARY

ROWS = "Tensor x{0}, Tensor({1}!)[] planes{0}, Tensor pos{0}, str scheme{0}"
WINDOW = "Tensor x{0}, Tensor({1}!)[] planes{0}, Tensor? moves{0}, Tensor pos{0}, Tensor? origin{0}, str scheme{0}"

ROW_OPERANDS, WINDOW_OPERANDS = 4, 6
"""Number of operands of one slot."""

LIBRARY.define(f"append_kernel({ROWS.format('', 'a')}) -> ()")
LIBRARY.define(f"append_kernel_pair({ROWS.format('', 'a')}, {ROWS.format('_2', 'b')}) -> ()")
LIBRARY.define("append_own_kernel(Tensor x, Tensor(a!)[] planes, Tensor pos, Tensor constant, str scheme) -> ()")
LIBRARY.define(f"append_window_kernel({WINDOW.format('', 'a')}) -> Tensor")
LIBRARY.define(f"append_window_kernel_pair({WINDOW.format('', 'a')}, {WINDOW.format('_2', 'b')}) -> (Tensor, Tensor)")


def _slots(operands: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    """Return ``operands``, those of several slots in sequence, as one tuple of ``count`` operands for each slot."""
    return [operands[at : at + count] for at in range(0, len(operands), count)]


def rows_by_kernels(launcher: Launcher, *operands: Any) -> list[torch.Tensor]:
    """Encode new tokens and write them into the planes of one or two slots, by kernels that ``launcher`` starts; return [].

    ``operands``: x, planes, positions and scheme of each slot, one slot after another, as of ``append_kernel`` and ``append_kernel_pair``.
    """
    from kvcompile.lowering.append.rows import Rows, append_rows

    append_rows([Rows(*slot) for slot in _slots(operands, ROW_OPERANDS)], launcher)
    return []


def own_by_kernel(launcher: Launcher, *operands: Any) -> list[torch.Tensor]:
    """Encode and write the new tokens of one slot by the kernel that its scheme provides, started by ``launcher``; return [].

    ``operands``: the operands of ``append_own_kernel``.
    """
    own = append_of(operands[-1])
    assert own is not None
    return own.run([operands], launcher)


def windows_by_kernels(launcher: Launcher, *operands: Any) -> list[torch.Tensor]:
    """Append new tokens to the windows of one or two slots by kernels that ``launcher`` starts; return each slot's newest tokens.

    ``operands``: the operands of ``append_window_kernel`` for each slot, one slot after another.
    """
    from kvcompile.lowering.append import window_blocks as triton_append_blocks
    from kvcompile.lowering.append import window_token as triton_append

    slots = [
        triton_append.WindowSlot(x, [*planes, *([] if moves is None else [moves])], pos, origin, scheme)
        for x, planes, moves, pos, origin, scheme in _slots(operands, WINDOW_OPERANDS)
    ]
    if (own := own_append(slots)) is not None:
        return own.run(slots, launcher)
    if all(triton_append.one_token(slot.x) for slot in slots):
        return triton_append.append_window_slots(slots, launcher)
    return triton_append_blocks.append_window_blocks(slots, launcher)


def _rows_body(*operands: Any) -> None:
    rows_by_kernels(Direct(operands[0].device.type == "cuda"), *operands)


def _own_body(*operands: Any) -> None:
    own_by_kernel(Direct(operands[0].device.type == "cuda"), *operands)


def _window_body(*operands: Any) -> torch.Tensor:
    return windows_by_kernels(Direct(operands[0].device.type == "cuda"), *operands)[0]


def _windows_body(*operands: Any) -> tuple[torch.Tensor, ...]:
    return tuple(windows_by_kernels(Direct(operands[0].device.type == "cuda"), *operands))


def _rows_meta(*operands: Any) -> None:
    return None


def written(planes: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the planes of a slot with a window that the kernels write: the encoded planes, the window and the clock."""
    return planes[: _encoded(planes) + 2]


def _newest(x: torch.Tensor, planes: list[torch.Tensor], *more: Any) -> torch.Tensor:
    return x.new_empty(*x.shape[:2], planes[-2].shape[3] + x.shape[2], x.shape[3])


def _newest_of_both(*operands: Any) -> tuple[torch.Tensor, ...]:
    return tuple(_newest(*slot) for slot in _slots(operands, WINDOW_OPERANDS))


for name, body, meta in (
    ("append_kernel", _rows_body, _rows_meta), ("append_kernel_pair", _rows_body, _rows_meta),
    ("append_own_kernel", _own_body, _rows_meta),
    ("append_window_kernel", _window_body, _newest), ("append_window_kernel_pair", _windows_body, _newest_of_both),
):
    LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    LIBRARY.impl(name, meta, "Meta")

append_kernel = torch.ops.kvcompile.append_kernel.default
append_kernel_pair = torch.ops.kvcompile.append_kernel_pair.default
append_own_kernel = torch.ops.kvcompile.append_own_kernel.default
append_window_kernel = torch.ops.kvcompile.append_window_kernel.default
append_window_kernel_pair = torch.ops.kvcompile.append_window_kernel_pair.default
