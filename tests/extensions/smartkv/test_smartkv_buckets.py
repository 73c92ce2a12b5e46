"""Buckets of tokens by width: what they decode to, what moving tokens does to codes, and bytes."""

from __future__ import annotations

import pytest
import torch

from kvcompile.extensions.smartkv import buckets, codes, moves
from kvcompile.extensions.smartkv.buckets import BucketFormat, Buckets
from kvcompile.extensions.smartkv.codes import Frame
from kvcompile.types import PAGE, Extent, Role, SlotSpec, pages_for

B, K, D = 3, 2, 16
SPEC = SlotSpec(K, D, torch.float32, Role.VALUE)
WIDTHS = (2, 3, 4, 8)
FORMS = (BucketFormat(WIDTHS), BucketFormat(WIDTHS, keys=True), BucketFormat(WIDTHS, Frame.SOURCE, keys=True))


def originals(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(B, K, tokens, D, generator=torch.Generator().manual_seed(seed))


def entered(x: torch.Tensor, first: int = 0, half: Buckets | None = None, form: BucketFormat = FORMS[0]) -> Buckets:
    """Buckets with the tokens of ``x`` from position ``first`` on entering, garbage behind them."""
    if half is None:
        specs = buckets.plane_specs(SPEC, form, torch.float16)
        half = Buckets.of(tuple(torch.zeros(spec.shape(0, x.shape[0], K), dtype=spec.dtype) for spec in specs), form)
        if half.mean is not None:
            half.mean.normal_(generator=torch.Generator().manual_seed(5))
    count = x.shape[2] - first
    half = buckets.with_room(half, pages_for(count) + 1)
    half.entering[0].fill_(77)
    half.entering[1].fill_(float("nan"))
    at = torch.arange(count)
    for plane, rows in zip(half.entering, codes.encode(x[:, :, first:], 8), strict=True):
        plane[at // PAGE, :, :, at % PAGE] = rows.permute(2, 0, 1, 3)
    return half


def narrowed(half: Buckets, x: torch.Tensor, *chain: torch.Tensor) -> torch.Tensor:
    """Return the values of tokens coded to the levels [B, T] of each allocation in turn, one token at a time."""
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        mean = None if half.mean is None else half.mean[0, row, :, 0].float()
        for token in range(x.shape[2]):
            held, bits = codes.encode(x[row, :, token], 8), 8
            for levels in chain:
                wanted = WIDTHS[min(int(levels[row, token]), 3)]
                if wanted < bits:
                    value = codes.decode(held, bits)
                    if bits == 8 and mean is not None:
                        value = codes.turned(value - mean)
                    held, bits = codes.encode(value, wanted, frame=half.form.frame), wanted
            value = codes.decode(held, bits)
            out[row, :, token] = value if bits == 8 or mean is None else codes.turned(value) + mean
    return out


def some_levels(tokens: int, seed: int, most: torch.Tensor | None = None) -> torch.Tensor:
    found = torch.randint(0, 4, (B, tokens), generator=torch.Generator().manual_seed(seed))
    return (found if most is None else torch.minimum(found, most)).to(torch.int8)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal, but for the roundings of sums in another order."""
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_tokens_have_the_codes_of_their_levels_and_keep_them(form: BucketFormat) -> None:
    x = originals(150)
    first = some_levels(100, 1)
    half = moves.settled(entered(x[:, :, :100], form=form), first)
    close(buckets.values(half, 100), narrowed(half, x[:, :, :100], first))
    assert torch.equal(buckets.levels(half, 100), first)
    more = entered(x, 100, half)
    eight = torch.full((B, 50), 3, dtype=torch.int8)
    close(buckets.values(more, 150), narrowed(half, x, torch.cat([first, eight], 1)))
    second = some_levels(150, 2, torch.cat([first, eight], 1))
    again = moves.settled(more, second)
    close(buckets.values(again, 150), narrowed(half, x, torch.cat([first, eight], 1), second))
    # A head alone is what it is among the others, and nothing behind the tokens asked for is seen.
    assert torch.equal(buckets.values(again, 120, slice(1, 2)), buckets.values(again, 150)[:, 1:, :120])


def test_a_token_cannot_become_wider() -> None:
    narrow = torch.full((B, 9), 1, dtype=torch.int8)
    half = moves.settled(entered(originals(9)), narrow)
    with pytest.raises(ValueError, match="cannot become codes of 4"):
        moves.settled(half, narrow + 1)


def test_every_plane_is_as_long_as_it_has_tokens() -> None:
    levels = some_levels(130, 3)
    half = moves.settled(entered(originals(130), form=FORMS[1]), levels)
    specs = buckets.plane_specs(SPEC, FORMS[1], torch.float16)
    for plane, spec in zip(half.planes, specs, strict=True):
        assert plane.dtype == spec.dtype and plane.shape[1:] == spec.shape_of(1, B, K)[1:]
        assert plane.untyped_storage().nbytes() == plane.numel() * plane.itemsize
    held = {bits: int((levels == level).sum()) for level, bits in enumerate(WIDTHS)}
    sizes = {name: plane.numel() * plane.itemsize for plane, name in zip(half.planes, [spec.name for spec in specs], strict=True)}
    assert sizes["codes"] == B * K * PAGE * D and sizes["scales"] == B * K * PAGE * 2, "one page to enter"
    of_rows = [int((levels[row] == level).sum()) * K * D * bits // 8 for row in range(B) for level, bits in enumerate(WIDTHS)]
    assert sizes["pool"] == sum(-(-size // 16) * 16 for size in of_rows)
    assert sizes["settled_scales"] == B * 130 * K * 2 and sizes["where"] == B * 130 * 4
    assert half.histogram(130, 130) == held
    assert {spec.extent for spec in specs} == set(Extent)


@pytest.mark.parametrize("count", [0, 1, 64, 99, 100, 130])
def test_a_cut_forgets_what_is_behind_it_and_takes_other_tokens(count: int) -> None:
    x, other = originals(130), originals(130, seed=9)
    levels = some_levels(100, 4)
    half = entered(x, 100, moves.settled(entered(x[:, :, :100], form=FORMS[1]), levels))
    before = buckets.values(half, count).clone()
    cut = buckets.cut(half, count)
    assert torch.equal(buckets.values(cut, count), before)
    assert int(cut.first) == min(count, 100)
    assert sum(map(sum, cut.counts)) == cut.where.shape[0] == B * min(count, 100)
    other[:, :, :count] = x[:, :, :count]
    again = entered(other, int(cut.first), cut)
    eight = torch.full((B, 30), 3, dtype=torch.int8)
    kept = narrowed(half, x, torch.cat([levels, eight], 1))[:, :, : min(count, 100)]
    close(buckets.values(again, 130)[:, :, : min(count, 100)], kept)
    close(buckets.values(again, 130)[:, :, min(count, 100) :], narrowed(
        half, other[:, :, min(count, 100) :], torch.full((B, 130 - min(count, 100)), 3),
    ))


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1, 1, 1, 0], [2]])
def test_rows_are_taken_with_their_codes(rows: list[int]) -> None:
    x = originals(130)
    half = entered(x, 100, moves.settled(entered(x[:, :, :100], form=FORMS[1]), some_levels(100, 5)))
    taken = buckets.of_rows(half, torch.tensor(rows))
    assert torch.equal(buckets.values(taken, 130), buckets.values(half, 130)[rows])
    assert torch.equal(buckets.levels(taken, 100), buckets.levels(half, 100)[rows])
    narrow = torch.zeros(len(rows), 130, dtype=torch.int8)
    assert torch.equal(
        buckets.values(moves.settled(taken, narrow), 130), buckets.values(moves.settled(half, narrow[:1].expand(B, -1)), 130)[rows],
    )


def test_nan_stays_nan() -> None:
    x = originals(20)
    x[1, 0, 7, 3] = float("nan")
    x[0, 1, 3, 2] = float("inf")
    for level in range(4):
        found = buckets.values(moves.settled(entered(x, form=FORMS[1]), torch.full((B, 20), level, dtype=torch.int8)), 20)
        assert found[1, 0, 7].isnan().all() and found[0, 1, 3].isnan().all()
        assert int(found.isnan().sum()) == 2 * D
