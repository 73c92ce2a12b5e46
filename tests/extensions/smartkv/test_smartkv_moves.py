"""smartkv's kernels over all stored tokens in Triton's interpreter: levels, values and moves as the definition's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hopper import compiled_for_hopper
from interpreted import interpreted
from test_triton_attend import allow_ranges_over_scalars
from torch._subclasses import FakeTensorMode

from kvcompile.extensions.smartkv import buckets, codes, movement, moves, originals
from kvcompile.extensions.smartkv.buckets import BucketFormat, Buckets, PlaneLengths
from kvcompile.extensions.smartkv.codes import Frame
from kvcompile.extensions.smartkv.kernels.reencode import move_tokens
from kvcompile.extensions.smartkv.movement import Kernels
from kvcompile.lowering.host.launches import Direct, KernelLaunch, Recorder
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


def case(form: BucketFormat, dim: int, dtype: torch.dtype, tokens: int, more: int, rows: int = B) -> Buckets:
    """Buckets of ``tokens`` tokens at levels by chance, with ``more`` that entered since; some are NaN, infinite, or zero."""
    seed = torch.Generator().manual_seed(tokens + dim)
    x = torch.randn(rows, K, tokens + more, dim, generator=seed) * torch.exp(2 * torch.randn(rows, K, tokens + more, 1, generator=seed))
    x[0, 1, 3, 2], x[-1, 0, tokens + more - 1, 0] = float("nan"), float("inf")
    x[:, :, 5] = 0
    specs = buckets.plane_specs(SlotSpec(K, dim, torch.float32, Role.VALUE), form, dtype)
    half = Buckets.of(tuple(torch.zeros(spec.shape(0, rows, K), dtype=spec.dtype) for spec in specs), form)
    if half.mean is not None:
        half.mean.normal_(generator=seed)
    if tokens:
        half = moves.settled(entered(half, x[:, :, :tokens]), by_chance(form, rows, tokens))
    return entered(half, x[:, :, tokens:]) if more else half


def by_chance(form: BucketFormat, rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(0, len(form.widths), (rows, tokens), generator=torch.Generator().manual_seed(3)).to(torch.int8)


# The interpreter cuts bfloat16 instead of rounding, so bfloat16 scales are left to a GPU.
CASES = [
    (BucketFormat((2, 3, 3, 4, 8)), 16, torch.float16, 70, 70), (BucketFormat((3, 4, 8), Frame.SOURCE), 80, torch.float32, 40, 5),
    (BucketFormat((2, 8)), 64, torch.float16, 0, 70), (BucketFormat((4,)), 16, torch.float16, 20, 9),
    (BucketFormat((2, 3, 4, 4, 8)), 128, torch.float16, 33, 1),
    (BucketFormat((3, 4, 8), keys=True), 48, torch.float16, 40, 30), (BucketFormat((2, 3), keys=True), 16, torch.float32, 0, 50),
]


def compare() -> None:
    """Levels, values and moves of all cases; what is turned is rounded elsewhere, so that a code in a thousand may be a neighbour."""
    allow_ranges_over_scalars()
    movement.WIDE = 64
    kernels, definition = Kernels(Direct(cuda=False)), moves.EagerMoves()
    for form, dim, dtype, tokens, more in CASES:
        half = case(form, dim, dtype, tokens, more)
        count, first = tokens + more - (more > 1), int(half.first)
        now = definition.levels(half, count)
        assert torch.equal(kernels.levels(half, count), now)
        for head in range(K):
            found, wanted = kernels.values(half, count, head), buckets.values(half, count, slice(head, head + 1))
            assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isinf(), wanted.isinf())
            apart = (found - wanted).nan_to_num(0.0, 0.0, 0.0).abs().amax(-1)
            assert (apart <= 1e-6 * form.turned * (2 + wanted.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1))).all(), form
        wanted = torch.minimum(by_chance(form, B, count).flip(-1), now.clamp(max=len(form.widths) - 1))
        order = moves.order_of(wanted, half)
        room = PlaneLengths.of(order.counts, half)
        # Longer planes than are needed, as those that stay where they are.
        made = [
            buckets.made(half, order.ends, torch.full_like(half.first, count), PlaneLengths(room.rows + 3, room.tokens + 2))
            for _ in range(2)
        ]
        definition.move(half, order, first, made[0])
        kernels.move(half, order, first, made[1])
        assert_moved_alike(made[1], made[0])


def assert_moved_alike(ours: Buckets, other: Buckets) -> None:
    """Places and positions are equal, and so are scales and codes, but for roundings of what is turned."""
    assert torch.equal(ours.where, other.where) and torch.equal(ours.ends, other.ends)
    for mine, wanted in zip(ours.parts, other.parts, strict=True):
        (codes_, scales), (words, held) = mine.coded(), wanted.coded()
        # The scale of a token without one is NaN, whichever.
        if not ours.form.turned:
            assert torch.equal(codes_, words) and torch.equal(scales.nan_to_num(nan=-1.0), held.nan_to_num(nan=-1.0)), mine.bits
            continue
        assert torch.allclose(scales.nan_to_num(nan=-1.0).float(), held.nan_to_num(nan=-1.0).float(), rtol=1e-3)
        found, expected = (codes.decode(each, mine.bits).nan_to_num(nan=-1.0) for each in ((codes_, scales), (words, held)))
        apart = (found - expected).abs() > 1e-3 * held.nan_to_num(nan=1.0).float().abs()
        assert float(apart.float().mean()) <= 1e-3 if apart.numel() else True, (mine.bits, float(apart.float().mean()))


def test_kernels_move_as_the_definition_does() -> None:
    interpreted(compare)


def with_originals(form: BucketFormat, dim: int, dtype: torch.dtype, tokens: int, more: int) -> tuple[Buckets, torch.Tensor]:
    """Buckets as ``case`` makes them, with tier 2 of the same tokens, and these [B, K, T, D]; none of them is NaN."""
    seed = torch.Generator().manual_seed(tokens + dim)
    x = torch.randn(B, K, tokens + more, dim, generator=seed)
    specs = buckets.plane_specs(SlotSpec(K, dim, torch.float32, Role.VALUE), form, dtype)
    half = Buckets.of(tuple(torch.zeros(spec.shape(0, B, K), dtype=spec.dtype) for spec in specs), form)
    if half.mean is not None:
        half.mean.normal_(generator=seed)
    assert half.originals is not None
    half = replace(half, originals=half.originals.new_full((pages_for(tokens + more), B, K, PAGE, dim), float("nan")))
    at = torch.arange(tokens)
    assert half.originals is not None
    half.originals[at // PAGE, :, :, at % PAGE] = x[:, :, :tokens].permute(2, 0, 1, 3)
    half = moves.settled(entered(half, x[:, :, :tokens]), by_chance(form, B, tokens))
    half = entered(half, x[:, :, tokens:])
    at = torch.arange(more)
    assert half.entered is not None
    half.entered.fill_(float("nan"))
    half.entered[at // PAGE, :, :, at % PAGE] = x[:, :, tokens:].permute(2, 0, 1, 3)
    return half, x


def compare_promotions() -> None:
    """Moves with tier 2 over levels by chance, up and down: kernels and operators together, in planes that stay and in new ones."""
    allow_ranges_over_scalars()
    movement.WIDE = 64
    for plain, dim, dtype, tokens, more in CASES:
        form = replace(plain, kept=True)
        for stays in (False, True):
            found = []
            for way in (moves.EagerMoves(), Kernels(Direct(cuda=False))):
                moves.MOVEMENTS["cpu"] = way
                half, x = with_originals(form, dim, dtype, max(tokens, 20), more)
                count, first = x.shape[2] - (more > 1), int(half.first)
                wanted = by_chance(form, B, count).flip(-1)
                before = buckets.levels(half, count)
                assert len(form.widths) == 1 or (wanted > before).any()
                counts = originals.counted(originals.changed(form.widths, before, wanted), wanted, len(form.widths))
                again = originals.again(form.widths, before, wanted, tuple(map(tuple, counts.tolist())))
                order = replace(moves.order_of(wanted, half), again=again)
                room = PlaneLengths.of(order.counts, half)
                if stays:
                    half = replace(half, **{
                        name: torch.nn.functional.pad(getattr(half, name), (0,) * 9 + (size,)) for name, size in (
                            ("pool", room.rows), ("scales", room.tokens), ("where", room.tokens),
                        )
                    })
                found.append(moves.moved(half, order, first, x.shape[2], None if stays else room))
            # Planes that stay have room behind their tokens, which nobody writes.
            assert_moved_alike(*(replace(each, where=each.where[: B * count]) for each in reversed(found)))
            # Of what changed its width codes and scales are equal: operators made both.
            for part in found[1].parts:
                changed = (part.position < first) & (torch.tensor([*form.widths, 8])[before[part.row, part.position].long()] != part.bits)
                values = x[part.row][:, part.position[changed]]
                words, scales = found[1].coded(values, part.bits, part.row)
                mine = part.coded(index=changed.nonzero().flatten())
                assert torch.equal(mine[0], words) and torch.equal(mine[1], scales), (form, part.bits)


def test_promotions_beside_kernels() -> None:
    interpreted(compare_promotions)


def recorded(form: BucketFormat, dim: int, dtype: torch.dtype) -> Iterator[KernelLaunch]:
    """The launches over a half of 64,000 tokens."""
    with FakeTensorMode():
        specs = buckets.plane_specs(SlotSpec(8, dim, torch.bfloat16, Role.VALUE), form, dtype)
        half = Buckets.of(tuple(torch.empty(
            spec.shape_of(1 if spec.name in {"first", "ends", "mean"} else 1000, 2, 8), dtype=spec.dtype, device="cuda",
        ) for spec in specs), form)
        of, place = (torch.empty(2, 5000, dtype=dtype, device="cuda") for dtype in (torch.int8, torch.int32))
        recorder = Recorder()
        kernels = Kernels(recorder)
        kernels.levels(half, 5000)
        kernels.values(half, 5000, 0)
        kernels.move(half, moves.TokenMove(of, place, half.ends, ((1,),)), 0, half)
    for launch in recorder.steps:
        assert isinstance(launch, KernelLaunch)
        yield launch


@pytest.mark.parametrize(("form", "dim", "dtype"), [
    (BucketFormat((2, 3, 3, 4, 8)), 128, torch.float16), (BucketFormat((3, 4, 8), keys=True), 80, torch.bfloat16),
], ids=str)
def test_kernels_compile_for_hopper(form: BucketFormat, dim: int, dtype: torch.dtype) -> None:
    for launch in recorded(form, dim, dtype):
        made = compiled_for_hopper(launch)
        assert made.metadata.shared <= 113 * 1024, "two programs of a multiprocessor"


def test_nothing_is_fused_where_scales_are_float32() -> None:
    """Such products are rounded: fused with what is subtracted from them they are other numbers than the definition's."""
    launches = recorded(BucketFormat((2, 4)), 16, torch.float32)
    text = [compiled_for_hopper(launch).asm["ptx"] for launch in launches if launch.kernel is move_tokens]
    assert len(text) == 1
    assert "mul.f32" in text[0]
    assert "fma." not in text[0]
