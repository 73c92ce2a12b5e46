"""Laws of a scheme's store: its bytes, the slots that an append writes, and the tokens that decode from it."""

from __future__ import annotations

import math

import torch

from kvcompile.lowering.ops.append_window import append_window_body
from kvcompile.lowering.ops.keep_first import keep_first_body
from kvcompile.lowering.ops.operations import append_body
from kvcompile.runtime.store.codec import decode, encode
from kvcompile.runtime.store.store import Store, StoreSpec
from kvcompile.schemes import Adaptive, Scheme
from kvcompile.testing.bounds import bound_of
from kvcompile.testing.laws import Over, law, unlike
from kvcompile.testing.samples import DTYPES, SHAPES, bits, fitting, holds, normal, slot, unwritten, whole_write, widths
from kvcompile.types import PAGE, Extent, SlotSpec, pages_for

CPU = torch.device("cpu")
PIECES = (1, 62, 1, 1, 64, 70, 1)
"""Numbers of tokens of successive calls, across pages and blocks."""


def poisoned(scheme: Scheme, spec: SlotSpec, batch: int, pages: int) -> list[torch.Tensor]:
    """Return the planes of a store in which nothing was written: NaN or a byte pattern, the clock at no tokens, constants in place.

    See ``unwritten``; planes that are calibrated are filled too.
    """
    return [unwritten(scheme, spec, plane, pages, batch) for plane in scheme.layout(spec).planes]


def append(scheme: Scheme, x_BKSD: torch.Tensor, planes: list[torch.Tensor], pos: torch.Tensor) -> None:
    """Write tokens at positions ``pos`` into ``planes`` by the operations that a plan would choose for the scheme."""
    layout = scheme.layout(slot(x_BKSD.shape[1], x_BKSD.shape[3], x_BKSD.dtype))
    written, early = planes[: layout.written], [plane for plane, spec in zip(planes, layout.planes, strict=True) if spec.exact_first]
    used = None
    if scheme.window:
        newest, used = append_window_body(x_BKSD, written, pos, None, scheme.spec())
        x_BKSD = newest[:, :, scheme.window :]
    else:
        append_body(x_BKSD, written, pos, scheme.spec())
    if early:
        keep_first_body(x_BKSD, early, pos, used)


def of_row(plane: torch.Tensor, row: int) -> torch.Tensor:
    """Return batch row ``row`` of a plane [N, B, K, rows, width], with B = 1; the whole plane if all batch rows share it."""
    return plane[:, row : row + 1] if plane.shape[1] > 1 else plane


@law(Over.SETTINGS, "let `layout` announce every plane, with the rows that it has in a page of 64 tokens, and `bits_per_value` its bytes")
def bytes_announced_are_bytes_allocated(scheme: Scheme) -> None:
    """Check that a store's allocated bytes are those of its layout, also after growing and after clearing; raises Unlike."""
    for head_dim in widths(scheme):
        for (batch, heads, tokens), dtype in zip(SHAPES, (*DTYPES, *DTYPES), strict=True):
            spec = slot(heads, head_dim, dtype)
            if holds(scheme, spec):
                _bytes(scheme, spec, batch, tokens)


def _bytes(scheme: Scheme, spec: SlotSpec, batch: int, tokens: int) -> None:
    """Check that the bytes of one store are those of its layout; raises Unlike."""
    layout, heads, pages = scheme.layout(spec), spec.heads, pages_for(tokens)
    store = Store(StoreSpec(spec, scheme, layout), batch, CPU, pages)
    shared = sum(math.prod(plane.shape(0, batch, heads)) * plane.dtype.itemsize for plane in layout.planes if plane.shared)
    fixed = heads * (batch * layout.bytes_per_row + layout.bytes_per_head) + shared
    # A new token takes more bytes than the budget allows on average; full-precision planes do not count towards the budget.
    kept = sum(plane.width * plane.dtype.itemsize for plane in layout.planes[: layout.encoded] if plane.originals)
    budget = 16 * scheme.announced + 8 * kept / spec.head_dim if isinstance(scheme, Adaptive) else None
    pairs = [
        ("bytes of the store", layout.nbytes(pages, batch, heads), store.nbytes),
        ("bytes of its pages", layout.bytes_per_page * heads * batch * pages + fixed, store.nbytes),
        ("bytes of a page", layout.bytes_per_page * heads, layout.bytes_per_token(heads) * PAGE),
        ("bits per value", budget or 8 * layout.bytes_per_page / (PAGE * spec.head_dim), scheme.bits_per_value(spec)),
    ]
    store.reserve(pages + 3)
    pairs.append(("bytes after it grew", layout.bytes_per_page * heads * batch * (pages + 3) + fixed, store.nbytes))
    store.clear()
    pairs.append(("bytes of an empty store", fixed, store.nbytes))
    for what, expected, found in pairs:
        if expected != found:
            unlike(f"{what}: {expected} (D={spec.head_dim})", found)


@law(Over.SETTINGS, "let codes of zeros, with scales of zeros, decode to zero")
def untouched_store_reads_as_zero(scheme: Scheme) -> None:
    """Check that a new store decodes to zeros; raises Unlike."""
    spec = fitting(scheme)
    store = Store(StoreSpec(spec, scheme, scheme.layout(spec)), 2, CPU, 2)
    found = decode(store, 100)
    if found.any():
        unlike("zeros from an empty store", f"values up to {float(found.abs().max()):.3g}")


@law(Over.SETTINGS, "let a token's codes depend on its block alone: a decode step must write what a prompt would have written")
def append_in_pieces_equals_append_at_once(scheme: Scheme) -> None:
    """Check that tokens written in pieces, across blocks and pages, give the bytes of one write, and that later slots stay untouched.

    If a write has one scale for all of its tokens (``whole_write``), only later slots are checked. Raises Unlike.
    """
    tokens, pages = sum(PIECES), 4
    for dtype in DTYPES:
        spec = fitting(scheme, dtype)
        x = normal(3, spec.heads, tokens, spec.head_dim, dtype=dtype)
        once, pieces = poisoned(scheme, spec, 3, pages), poisoned(scheme, spec, 3, pages)
        append(scheme, x, once, torch.arange(tokens, device=CPU).unsqueeze(0))
        start = 0
        for count in PIECES:
            append(scheme, x[:, :, start : start + count], pieces, torch.arange(start, start + count, device=CPU).unsqueeze(0))
            start += count
        for a, b, clean, plane in zip(once, pieces, poisoned(scheme, spec, 3, pages), scheme.layout(spec).planes, strict=True):
            if not whole_write(scheme) and not torch.equal(bits(a), bits(b)):
                unlike("the bytes of one write", f"others in the plane {plane.name!r} ({dtype})")
            row = -(-(tokens % PAGE) // scheme.block) * scheme.block * plane.rows // PAGE
            behind = (tokens // PAGE, slice(None), slice(None), slice(row, None))
            if plane.extent is Extent.TOKENS and not torch.equal(bits(a[behind]), bits(clean[behind])):
                unlike("nothing written behind the last block", f"bytes in the plane {plane.name!r}")


@law(Over.SETTINGS, "let a token's codes depend on its own batch row alone")
def rows_are_written_at_their_own_positions(scheme: Scheme) -> None:
    """Check that rows of a batch at different positions are written as each row is alone; raises Unlike."""
    spec = fitting(scheme)
    x = normal(3, spec.heads, 2, spec.head_dim)
    pos = torch.tensor([[0, 1], [63, 64], [127, 5]], device=CPU)
    if scheme.window:
        # Writes must be in order: the last row's are not, alone or not.
        pos = torch.tensor([[0, 1], [0, 1], [1, 2]], device=CPU)
    planes = poisoned(scheme, spec, 3, 2)
    append(scheme, x, planes, pos)
    for row in range(3):
        alone = [of_row(plane, row).clone() for plane in poisoned(scheme, spec, 3, 2)]
        append(scheme, x[row : row + 1], alone, pos[row : row + 1])
        for a, b, plane in zip(planes, alone, scheme.layout(spec).planes, strict=True):
            if not torch.equal(bits(of_row(a, row)), bits(b)):
                unlike(f"row {row} as it is alone", f"other bytes in the plane {plane.name!r}")


def store_error(scheme: Scheme, store: Store, x: torch.Tensor) -> torch.Tensor:
    """Return a bound on the error of tokens [B, K, T, D] that a store returns: per channel, or per token if it rotates channels."""
    stored = store.rotated(x)
    bound = bound_of(scheme, stored, store.spec.slot)
    return bound if scheme.rotation(store.spec.slot) is None else torch.linalg.vector_norm(bound, dim=-1, keepdim=True) + 1e-4


@law(Over.SETTINGS, "let `rotation` and `encode` agree: `encode` takes rotated channels, and a store returns them as the model has them")
def a_store_returns_tokens_as_the_model_has_them(scheme: Scheme) -> None:
    """Check that a store returns sinks and window tokens unchanged up to the rounding of a rotation, and others within the error bound.

    A scheme without a bound is checked for sinks and window tokens alone. Raises Unlike.
    """
    spec, tokens = fitting(scheme), 3 * PAGE + 7
    layout = scheme.layout(spec)
    store = Store(StoreSpec(spec, scheme, layout), 2, CPU, pages_for(tokens))
    x, padding = normal(2, spec.heads, tokens, spec.head_dim), torch.tensor([0, 9], device=CPU)
    encode(store, x[:, :, :100], padding)
    encode(store, x[:, :, 100:], padding, first=100)
    found = decode(store, tokens)
    turned = 1e-5 if scheme.rotation(spec) else 0.0
    for row, first in enumerate(padding.tolist() if layout.is_windowed or scheme.sinks else [0, 0]):
        for part in (slice(first, first + scheme.sinks), slice(tokens - scheme.window, tokens)):
            if not torch.allclose(found[row, :, part], x[row, :, part], rtol=turned, atol=turned):
                unlike(f"tokens {part.start} to {part.stop} of row {row} as they were", "others")
    if scheme.bound(spec) is None:
        return
    if bool((store.rotated(x) == x).all()) != (scheme.rotation(spec) is None):
        unlike("tokens that a rotation changes, and nothing else", f"the rotation {scheme.rotation(spec)}")
    bound = store_error(scheme, store, x)
    error = torch.linalg.vector_norm(found.double() - x, dim=-1, keepdim=True) if scheme.rotation(spec) else (found.double() - x).abs()
    skipped = -(-9 // scheme.block) * scheme.block + scheme.block
    held = (error <= bound)[0].all() and (scheme.window or scheme.keeps_padding_out or (error <= bound)[1, :, skipped:].all())
    if not held:
        unlike("tokens of a store within the bound", f"{float((error - bound).max()):.3g} over it")
