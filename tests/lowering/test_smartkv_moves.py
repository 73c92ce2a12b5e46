"""smartkv's kernels over all stored tokens in Triton's interpreter: widths, values and moves bit for bit as the definition's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hopper import compiled_for_hopper
from interpreted import interpreted
from test_triton_attend import allow_ranges_over_scalars
from torch._subclasses import FakeTensorMode

from kvcompile.lowering.host.launches import Direct, KernelLaunch, Recorder
from kvcompile.lowering.smartkv import movement
from kvcompile.lowering.smartkv.movement import Kernels
from kvcompile.schemes.smartkv import buckets, codes, moves
from kvcompile.schemes.smartkv.buckets import Buckets, Room
from kvcompile.types import PAGE, Role, SlotSpec, pages_for

B, K = 3, 2


def entered(half: Buckets, x: torch.Tensor) -> Buckets:
    """Buckets with tokens [B, K, S, D] entering, and garbage behind them."""
    half = buckets.with_room(half, pages_for(x.shape[2]))
    half.entering[0].fill_(77)
    half.entering[1].fill_(float("nan"))
    at = torch.arange(x.shape[2])
    for plane, rows in zip(half.entering, codes.encode(x, 8, half.scales.dtype), strict=True):
        plane[at // PAGE, :, :, at % PAGE] = rows.permute(2, 0, 1, 3)
    return half


def case(widths: tuple[int, ...], dim: int, dtype: torch.dtype, tokens: int, more: int, rows: int = B) -> Buckets:
    """Buckets of ``tokens`` tokens at widths by chance, with ``more`` that entered since; some are NaN, infinite, or zero."""
    seed = torch.Generator().manual_seed(tokens + dim)
    x = torch.randn(rows, K, tokens + more, dim, generator=seed) * torch.exp(2 * torch.randn(rows, K, tokens + more, 1, generator=seed))
    x[0, 1, 3, 2], x[-1, 0, tokens + more - 1, 0] = float("nan"), float("inf")
    x[:, :, 5] = 0
    specs = buckets.plane_specs(SlotSpec(K, dim, torch.float32, Role.VALUE), widths, dtype)
    half = Buckets.of(tuple(torch.zeros(spec.shape(0, rows, K), dtype=spec.dtype) for spec in specs), widths)
    if tokens:
        half = moves.settled(entered(half, x[:, :, :tokens]), by_chance(widths, rows, tokens))
    return entered(half, x[:, :, tokens:]) if more else half


def by_chance(widths: tuple[int, ...], rows: int, tokens: int) -> torch.Tensor:
    return torch.tensor(widths, dtype=torch.int8)[torch.randint(0, len(widths), (rows, tokens), generator=torch.Generator().manual_seed(3))]


# The interpreter cuts bfloat16 instead of rounding, so bfloat16 scales are left to a GPU.
CASES = [
    ((2, 3, 4, 8), 16, torch.float16, 70, 70), ((3, 4, 8), 80, torch.float32, 40, 5), ((2, 8), 64, torch.float16, 0, 70),
    ((4,), 16, torch.float16, 20, 9), ((2, 3, 4, 8), 128, torch.float16, 33, 1),
]


def compare() -> None:
    """Widths, values and moves of all cases."""
    allow_ranges_over_scalars()
    movement.WIDE = 64
    kernels, definition = Kernels(Direct(cuda=False)), moves.Definition()
    for widths, dim, dtype, tokens, more in CASES:
        half = case(widths, dim, dtype, tokens, more)
        count, first = tokens + more - (more > 1), int(half.first)
        now = definition.widths(half, count)
        assert torch.equal(kernels.widths(half, count), now)
        for head in range(K):
            found, wanted = kernels.values(half, count, head), buckets.values(half, count, slice(head, head + 1))
            assert torch.equal(found.nan_to_num(nan=7e7), wanted.nan_to_num(nan=7e7)), (widths, dim)
        wanted = torch.minimum(by_chance(widths, B, count).flip(-1), now.clamp(max=widths[-1]))
        order = moves.order_of(wanted, widths)
        room = Room.of(order.counts, half)
        # Longer planes than are needed, as those that stay where they are.
        made = [buckets.made(half, order.ends, torch.full_like(half.first, count), Room(room.rows + 3, room.tokens + 2)) for _ in range(2)]
        definition.move(half, order, first, made[0])
        kernels.move(half, order, first, made[1])
        for name, ours, other in zip(("scales", "where", "pool"), made[1].planes[4:], made[0].planes[4:], strict=True):
            # The scale of a token without one is NaN, whichever.
            as_bits = [plane.nan_to_num(nan=-1.0) if plane.is_floating_point() else plane for plane in (ours, other)]
            assert torch.equal(*as_bits), (name, widths, dim, dtype)


def test_kernels_move_as_the_definition_does() -> None:
    interpreted(compare)


def recorded(widths: tuple[int, ...], dim: int, dtype: torch.dtype) -> Iterator[KernelLaunch]:
    """The launches over a half of 64,000 tokens."""
    with FakeTensorMode():
        specs = buckets.plane_specs(SlotSpec(8, dim, torch.bfloat16, Role.VALUE), widths, dtype)
        half = Buckets.of(tuple(torch.empty(
            spec.shape_of(1 if spec.name in {"first", "ends"} else 1000, 2, 8), dtype=spec.dtype, device="cuda",
        ) for spec in specs), widths)
        of, place = (torch.empty(2, 5000, dtype=dtype, device="cuda") for dtype in (torch.int8, torch.int32))
        recorder = Recorder()
        kernels = Kernels(recorder)
        kernels.widths(half, 5000)
        kernels.values(half, 5000, 0)
        kernels.move(half, moves.Order(of, place, half.ends, (1,)), 0, half)
    for launch in recorder.steps:
        assert isinstance(launch, KernelLaunch)
        yield launch


@pytest.mark.parametrize(("widths", "dim", "dtype"), [
    ((2, 3, 4, 8), 128, torch.float16), ((3, 4, 8), 80, torch.bfloat16), ((2, 8), 64, torch.float32),
], ids=str)
def test_kernels_compile_for_hopper(widths: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    for launch in recorded(widths, dim, dtype):
        made = compiled_for_hopper(launch)
        assert made.metadata.shared <= 113 * 1024, "two programs of a multiprocessor"


