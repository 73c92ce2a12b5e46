"""Left padding that is longer than a prompt's first chunk, in the append kernels in Triton's interpreter, against the body."""

from __future__ import annotations

import importlib

import pytest
import torch
from interpreted import interpreted
from test_triton_append import assert_same, fuse

from kvcompile import schemes
from kvcompile.lowering.ops import append_window as windows
from kvcompile.lowering.ops.append_window import is_broken, said_of
from kvcompile.types import Role, SlotSpec

BATCH, KV, DIM, PAGES = 3, 1, 32, 2
HIDDEN = 128
"""What a mask says of a row that it hides whole."""
CHUNKS = ((5, (HIDDEN, 2, 0)), (4, (HIDDEN, 2, 0)), (1, (HIDDEN, 2, 0)), (4, (12, 2, 0)), (1, (12, 2, 0)), (1, (12, 3, 0)), (2, (12, 1, 0)))
"""Tokens of each call, and where rows begin by its mask: row 0 behind 12 tokens of padding, row 1 shows one of its own two at last."""
ENDS = ([-123, 3, 5], [-119, 7, 9], [-118, 8, 10], [2, 12, 14], [3, 13, 15], [4, 14, 16])
"""How many tokens the rows count behind each of these calls but the last."""


def empty(half: schemes.Scheme, role: Role) -> list[torch.Tensor]:
    """Make the planes of one half."""
    layout = half.layout(SlotSpec(KV, DIM, torch.float32, role))
    return [torch.zeros(plane.shape(PAGES, BATCH, KV), dtype=plane.dtype) for plane in layout.planes]


def clock_of(planes: list[torch.Tensor]) -> torch.Tensor:
    """Return what each row counts and where it begins, [B, 2]."""
    return next(plane for plane in planes if plane.dtype == torch.int64)[0, :, 0, 0]


def compare(text: str, module: str, name: str) -> None:
    """Every plane, every result and every origin in force after every call, bit for bit; and what the rows count.

    Single tokens go through the function ``name`` of ``module``.
    """
    from kvcompile.lowering.append import window_blocks
    from kvcompile.lowering.append.window_token import WindowSlot

    fuse()
    one = getattr(importlib.import_module(module), name)
    for role in Role:
        half = schemes.parse(text).for_role(role)
        wanted, found, at = empty(half, role), empty(half, role), 0
        x = torch.randn(BATCH, KV, sum(count for count, _ in CHUNKS), DIM, generator=torch.Generator().manual_seed(1))
        for index, (count, begins) in enumerate(CHUNKS):
            new, pos, origin = x[:, :, at : at + count], torch.arange(at, at + count)[None], torch.tensor(begins)
            slot = WindowSlot(new, found, pos, origin, half.spec())
            used = slot.used
            if count > 1 and text == "certified":
                mine = windows.append_window_body(new, found, pos, origin, half.spec())
            else:
                mine = ((one if count == 1 else window_blocks.append_window_blocks)([slot])[0], used)
            body = windows.append_window_body(new, wanted, pos, origin, half.spec())
            if text == "certified":
                # Notes are a unit in the last place apart.
                assert_same((clock_of(found), *mine), (clock_of(wanted), *body), (text, role, index))
            else:
                assert_same((*found, *mine), (*wanted, *body), (text, role, index))
            if index < len(ENDS):
                assert clock_of(found)[:, 0].tolist() == ENDS[index], index
            at += count
        assert is_broken(clock_of(found)[:, 0]).tolist() == [False, True, False]
        assert said_of(int(clock_of(found)[1, 0])) == (2, 1, True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("text", ["kivi(window=32)", "normed"])
def test_kernels_begin_a_row_where_its_padding_ends(text: str) -> None:
    pytest.importorskip("triton")
    interpreted(compare, text, "kvcompile.lowering.append.window_token", "append_window_slots")
