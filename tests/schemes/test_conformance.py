"""What every scheme must hold, whatever it is: bounds, bytes, independence, and that garbage never looks like numbers.

No scheme is named here. A scheme joins through ``schemes.SCHEMES`` and says by its own properties what does
not apply to it.
"""

from __future__ import annotations

import math

import pytest
import torch
from registry import (
    DTYPES,
    SHAPES,
    VARIANTS,
    bound_of,
    each_bounded,
    each_bounded_and_width,
    each_dtype,
    each_scheme,
    each_variant,
    each_variant_and_width,
    fitting,
    holds,
    normal,
    round_trip,
    slot,
    unwritten,
    whole_blocks,
    whole_write,
)

from kvcompile.errors import SchemeError
from kvcompile.lowering.ops.append_window import append_window_body
from kvcompile.lowering.ops.keep_first import keep_first_body
from kvcompile.lowering.ops.operations import append_body
from kvcompile.runtime.store.codec import decode, encode
from kvcompile.runtime.store.store import Store, StoreSpec
from kvcompile.schemes import Adaptive, Scheme, parse
from kvcompile.types import PAGE, Extent, SlotSpec, pages_for

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def poisoned(scheme: Scheme, spec: SlotSpec, batch: int, pages: int) -> list[torch.Tensor]:
    """Planes full of what no test wrote."""
    return [unwritten(scheme, spec, plane, pages, batch) for plane in scheme.layout(spec).planes]


def append(scheme: Scheme, x_BKSD: torch.Tensor, planes: list[torch.Tensor], pos: torch.Tensor) -> None:
    """The write path that a plan would choose."""
    layout = scheme.layout(slot(x_BKSD.shape[1], x_BKSD.shape[3], x_BKSD.dtype))
    written, early = planes[: layout.written], [plane for plane, spec in zip(planes, layout.planes, strict=True) if spec.early]
    used = None
    if scheme.window:
        newest, used = append_window_body(x_BKSD, written, pos, None, scheme.spec())
        x_BKSD = newest[:, :, scheme.window :]
    else:
        append_body(x_BKSD, written, pos, scheme.spec())
    if early:
        keep_first_body(x_BKSD, early, pos, used)


def of_row(plane: torch.Tensor, row: int) -> torch.Tensor:
    """One batch row of a plane, or the plane that serves them all."""
    return plane[:, row : row + 1] if plane.shape[1] > 1 else plane


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as bytes, so that NaN compares too."""
    return tensor.contiguous().view(torch.uint8)


@each_dtype
@each_bounded_and_width
def test_round_trip_is_within_the_bound(scheme: Scheme, dtype: torch.dtype, head_dim: int) -> None:
    for batch, heads, tokens in SHAPES:
        spec = slot(heads, head_dim, dtype)
        if not holds(scheme, spec):
            with pytest.raises(SchemeError, match=rf"found head dim {head_dim}\b"):
                scheme.check(spec)
            return
        x = normal(batch, heads, tokens, head_dim, dtype=dtype, seed=tokens)
        error = (round_trip(scheme, x, spec) - x.to(torch.float64)).abs()
        bound = bound_of(scheme, x, spec)
        assert (error <= bound).all(), f"{(error - bound).max():.3g} over the bound at B={batch} K={heads} T={tokens}"


@each_bounded
def test_bound_is_not_vacuous(scheme: Scheme) -> None:
    spec = fitting(scheme)
    x = normal(3, 2, 1000, spec.head_dim)
    bound = bound_of(scheme, x, spec)
    error = (round_trip(scheme, x, spec) - x.to(torch.float64)).abs()
    assert (error >= 0.5 * bound).any(), f"the largest error is {(error / bound).max():.3g} of the bound"


@each_variant_and_width
def test_bytes_announced_are_bytes_allocated(scheme: Scheme, head_dim: int) -> None:
    for (batch, heads, tokens), dtype in zip(SHAPES, (*DTYPES, *DTYPES), strict=True):
        spec = slot(heads, head_dim, dtype)
        if not holds(scheme, spec):
            return
        layout = scheme.layout(spec)
        store = Store(StoreSpec(spec, scheme, layout), batch, CPU, pages_for(tokens))
        shared = sum(math.prod(plane.shape(0, batch, heads)) * plane.dtype.itemsize for plane in layout.planes if plane.shared)
        fixed = heads * (batch * layout.bytes_per_row + layout.bytes_per_head) + shared
        assert store.nbytes == layout.bytes_per_page * heads * batch * pages_for(tokens) + fixed == layout.nbytes(
            pages_for(tokens), batch, heads
        )
        assert layout.bytes_per_token(heads) * PAGE == layout.bytes_per_page * heads
        # What a budget allows is less than what a token takes when it enters; originals are beside it.
        kept = sum(plane.width * plane.dtype.itemsize for plane in layout.planes[: layout.encoded] if plane.originals)
        budget = 16 * scheme.announced + 8 * kept / head_dim if isinstance(scheme, Adaptive) else None
        assert scheme.bits_per_value(spec) == (budget or 8 * layout.bytes_per_page / (PAGE * head_dim))
        store.reserve(pages_for(tokens) + 3)
        assert store.nbytes == layout.bytes_per_page * heads * batch * (pages_for(tokens) + 3) + fixed
        store.clear()
        assert store.nbytes == fixed


@each_dtype
@each_variant
def test_encode_returns_the_planes_of_the_layout(scheme: Scheme, dtype: torch.dtype) -> None:
    spec = fitting(scheme, dtype)
    layout = scheme.layout(spec)
    planes = scheme.encode(whole_blocks(scheme, normal(3, spec.heads, 7, spec.head_dim, dtype=dtype)))
    tokens = -(-7 // scheme.block) * scheme.block
    for plane, announced in zip(planes, layout.planes[: layout.encoded], strict=True):
        assert plane.shape == (3, spec.heads, tokens * announced.rows // PAGE, announced.width)
        assert plane.dtype == announced.dtype


@each_dtype
@each_variant
def test_append_in_pieces_equals_append_at_once(scheme: Scheme, dtype: torch.dtype) -> None:
    spec = fitting(scheme, dtype)
    tokens, pages = 200, 4
    x = normal(3, spec.heads, tokens, spec.head_dim, dtype=dtype)
    once, pieces = poisoned(scheme, spec, 3, pages), poisoned(scheme, spec, 3, pages)
    append(scheme, x, once, torch.arange(tokens).unsqueeze(0))
    start = 0
    for count in (1, 62, 1, 1, 64, 70, 1):
        pos = torch.arange(start, start + count).unsqueeze(0)
        append(scheme, x[:, :, start : start + count], pieces, pos)
        start += count
    assert start == tokens
    untouched = poisoned(scheme, spec, 3, pages)
    for a, b, clean, plane in zip(once, pieces, untouched, scheme.layout(spec).planes, strict=True):
        if not whole_write(scheme):
            assert torch.equal(bits(a), bits(b))
        if plane.extent is Extent.TOKENS:
            # Nothing behind the last block is touched.
            row = -(-(tokens % PAGE) // scheme.block) * scheme.block * plane.rows // PAGE
            assert torch.equal(bits(a[tokens // PAGE, :, :, row:]), bits(clean[tokens // PAGE, :, :, row:]))


@each_variant
def test_append_by_row_writes_every_row_at_its_own_position(scheme: Scheme) -> None:
    spec = fitting(scheme)
    x = normal(3, spec.heads, 2, spec.head_dim)
    pos = torch.tensor([[0, 1], [63, 64], [127, 5]])
    if scheme.window:
        pos = torch.tensor([[0, 1], [0, 1], [1, 2]])  # Writes must be in order: the last row's are not, alone or not.
    planes = poisoned(scheme, spec, 3, 2)
    append(scheme, x, planes, pos)
    for row in range(3):
        alone = [of_row(plane, row).clone() for plane in poisoned(scheme, spec, 3, 2)]
        append(scheme, x[row : row + 1], alone, pos[row : row + 1])
        for a, b in zip(planes, alone, strict=True):
            assert torch.equal(bits(of_row(a, row)), bits(b))


@each_dtype
@each_variant
def test_zero_range_group_decodes_exactly(scheme: Scheme, dtype: torch.dtype) -> None:
    spec = fitting(scheme, dtype)
    zeros = torch.zeros(2, spec.heads, 5, spec.head_dim, dtype=dtype)
    assert torch.equal(round_trip(scheme, zeros, spec), zeros.to(torch.float64))
    assert torch.equal(round_trip(scheme, -zeros, spec), zeros.to(torch.float64))


@each_variant
def test_untouched_store_reads_as_zero(scheme: Scheme) -> None:
    spec = fitting(scheme)
    store = Store(StoreSpec(spec, scheme, scheme.layout(spec)), 2, CPU, 2)
    assert not decode(store, 100).any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@each_dtype
@each_variant
def test_nan_and_inf_never_become_numbers(scheme: Scheme, dtype: torch.dtype, poison: float) -> None:
    spec = fitting(scheme, dtype)
    clean = normal(3, spec.heads, 9, spec.head_dim, dtype=dtype)
    x = clean.clone()
    x[1, 0, 4, 3] = poison
    before, after = round_trip(scheme, clean, spec), round_trip(scheme, x, spec)
    assert not torch.isfinite(after[1, 0, 4, 3])
    # What shares its scale is not finite either, or not touched at all; nothing else notices.
    changed = bits(before.unsqueeze(-1)).ne(bits(after.unsqueeze(-1))).any(-1)
    assert not torch.isfinite(after[changed]).any()
    fmt = scheme.format(spec)
    shared = torch.zeros_like(changed)
    block = slice(4 // fmt.block * fmt.block, (4 // fmt.block + 1) * fmt.block)
    # A norm covers all channels of its token, and so through their scales all of the block.
    channels = slice(None) if fmt.norms else slice(3 // fmt.group * fmt.group, (3 // fmt.group + 1) * fmt.group)
    shared[1, 0, block, channels] = True
    if whole_write(scheme):
        shared[1] = True
    assert not changed[~shared].any()


@each_variant
def test_a_block_is_encoded_alone(scheme: Scheme) -> None:
    spec = fitting(scheme)
    block = scheme.block
    x = normal(3, spec.heads, 9 * block, spec.head_dim)
    loud = x.clone()
    loud[0] *= 1e4
    if not whole_write(scheme):
        loud[2, 1] *= -1e4
        loud[2, 0, : 4 * block] = float("nan")
        loud[2, 0, 5 * block :] = 0.0
    layout = scheme.layout(spec)
    for a, b, plane in zip(scheme.encode(x), scheme.encode(loud), layout.planes[: layout.encoded], strict=True):
        assert torch.equal(bits(a[1]), bits(b[1])), "another batch row was seen"
        if not whole_write(scheme):
            rows = slice(4 * block * plane.rows // PAGE, 5 * block * plane.rows // PAGE)
            assert torch.equal(bits(a[2, 0, rows]), bits(b[2, 0, rows])), "another block or another head was seen"


@each_variant
def test_a_store_returns_tokens_as_the_model_has_them(scheme: Scheme) -> None:
    """The first tokens and the newest ones as they were, others within what a rotation makes of the bounds of its channels."""
    spec, tokens = fitting(scheme), 3 * PAGE + 7
    layout = scheme.layout(spec)
    store = Store(StoreSpec(spec, scheme, layout), 2, CPU, pages_for(tokens))
    x = normal(2, spec.heads, tokens, spec.head_dim)
    padding = torch.tensor([0, 9])
    encode(store, x[:, :, :100], padding)
    encode(store, x[:, :, 100:], padding, first=100)
    found = decode(store, tokens)
    turned = 1e-5 if scheme.rotation(spec) else 0.0
    for row, first in enumerate(padding.tolist() if layout.is_windowed or scheme.sinks else [0, 0]):
        for part in (slice(first, first + scheme.sinks), slice(tokens - scheme.window, tokens)):
            assert torch.allclose(found[row, :, part], x[row, :, part], rtol=turned, atol=turned)
    if scheme.bound(spec) is None:
        return
    # Of rotated channels the bound is that of each channel; behind the rotation it is that of their sum.
    stored = store.rotated(x)
    assert bool((stored == x).all()) == (scheme.rotation(spec) is None)
    bound = bound_of(scheme, stored, spec)
    if scheme.rotation(spec) is not None:
        bound = torch.linalg.vector_norm(bound, dim=-1, keepdim=True) + 1e-4
    skipped = -(-9 // scheme.block) * scheme.block + scheme.block
    error = torch.linalg.vector_norm(found.double() - x, dim=-1, keepdim=True) if scheme.rotation(spec) else (found.double() - x).abs()
    assert (error <= bound)[0].all() and (scheme.window or scheme.keeps_padding_out or (error <= bound)[1, :, skipped:].all())


@each_variant
def test_strides_of_the_input_do_not_matter(scheme: Scheme) -> None:
    spec = fitting(scheme)
    x_BSKD = normal(2, 3 * scheme.block, spec.heads, spec.head_dim)
    for a, b in zip(scheme.encode(x_BSKD.transpose(1, 2)), scheme.encode(x_BSKD.transpose(1, 2).contiguous()), strict=True):
        assert torch.equal(bits(a), bits(b))


@each_variant
def test_spelling_reads_back(scheme: Scheme) -> None:
    assert parse(scheme.spec()) == scheme
    assert parse(f"  {scheme.spec()} ") == scheme
    assert hash(parse(scheme.spec())) == hash(scheme)


@each_scheme
def test_plain_name_is_the_default(cls: type[Scheme]) -> None:
    assert parse(cls.name) == cls() == cls.variants()[0]
    assert len({variant.spec() for variant in cls.variants()}) == len(cls.variants())


def test_spellings_are_unique() -> None:
    assert len({scheme.spec() for scheme in VARIANTS}) == len(VARIANTS)
