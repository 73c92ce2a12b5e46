"""Laws of ``encode`` and ``decode``: error bounds, exact zeros, NaN and Inf, independent blocks, strides, and the format."""

from __future__ import annotations

import torch

from kvcompile.errors import SchemeError
from kvcompile.schemes import Scheme
from kvcompile.testing.bounds import bound_of, largest_of
from kvcompile.testing.laws import Over, law, unlike
from kvcompile.testing.samples import DTYPES, SHAPES, bits, fitting, holds, normal, round_trip, slot, whole_blocks, whole_write, widths
from kvcompile.types import PAGE, Role, SlotSpec

FLOAT32_STEPS, OUTLIER_STEPS = range(-149, 127, 12), range(-149, 127, 5)
"""Exponents of a token's values, and of one larger or smaller value in it, at which scales overflow or vanish."""

RESCALE = (
    "compute the scale in float32 and round it up when it is stored; give it a dtype that holds the largest one, or say by `largest` where "
    "it overflows; a scale below the least number of its dtype must not become 0 (kvcompile.schemes.symmetric.stored_scale does all three)"
)


@law(Over.BOUNDED, "announce in `bound` what `encode` and `decode` really do, rounding of the stored scale included")
def round_trip_is_within_the_bound(scheme: Scheme) -> None:
    """Check that |x - decode(encode(x))| is at most ``bound``, for every head dim that ``check`` accepts; raises Unlike.

    A head dim that ``check`` refuses must be named in its error.
    """
    for head_dim in widths(scheme):
        if not holds(scheme, slot(head_dim=head_dim)):
            _refuses(scheme, head_dim)
            continue
        for dtype in DTYPES:
            for batch, heads, tokens in SHAPES:
                spec = slot(heads, head_dim, dtype)
                x = normal(batch, heads, tokens, head_dim, dtype=dtype, seed=tokens)
                over = ((round_trip(scheme, x, spec) - x.to(torch.float64)).abs() - bound_of(scheme, x, spec)).max()
                if not over <= 0:
                    unlike("errors within the bound", f"{float(over):.3g} over it with B={batch} K={heads} T={tokens} D={head_dim} {dtype}")


def _refuses(scheme: Scheme, head_dim: int) -> None:
    """Check that a scheme accepts a head dim, or refuses it with an error that names the head dim; raises Unlike."""
    try:
        scheme.check(slot(head_dim=head_dim))
    except SchemeError as error:
        if f"found head dim {head_dim}" not in str(error):
            unlike(f"check to name the head dim {head_dim} that it refuses", str(error))


@law(Over.BOUNDED, "announce a smaller bound: errors of real values come nowhere near it, so it says nothing to a user")
def bound_is_not_vacuous(scheme: Scheme) -> None:
    """Check that the error of at least one of many values is half of its bound or more. Raises Unlike."""
    spec = fitting(scheme)
    x = normal(3, 2, 1000, spec.head_dim)
    bound = bound_of(scheme, x, spec)
    error = (round_trip(scheme, x, spec) - x.to(torch.float64)).abs()
    if not (error >= 0.5 * bound).any():
        unlike("an error of half the bound or more", f"at most {float((error / bound).max()):.3g} of it")


def within(scheme: Scheme, x: torch.Tensor, spec: SlotSpec) -> None:
    """Check the round trip of ``x`` [1, 1, S, D] against its bound, by channel; beyond ``largest`` NaN or Inf is allowed instead.

    Raises Unlike.
    """
    amax = largest_of(scheme, x, spec).expand(x.shape)
    found = round_trip(scheme, x, spec)
    fine = (found - x.to(torch.float64)).abs() <= bound_of(scheme, x, spec)
    fine |= (amax > scheme.largest) & ~torch.isfinite(found)
    if not fine.all():
        at = int((~fine).flatten().nonzero()[0])
        value, became, loudest = (float(y.flatten()[at]) for y in (x, found, amax))
        unlike("a value within its bound", f"{value!r} became {became!r}, beside a largest magnitude of {loudest!r} ({x.dtype})")


def _each_within(scheme: Scheme, x_SD: torch.Tensor, spec: SlotSpec) -> None:
    """Check the error of each token [S, D] against the bound, in a block of its own filled with zeros, so that no two share a scale.

    Tokens that are not finite are left out; of long blocks, and of writes with one scale, only some tokens are tried. Raises Unlike.
    """
    x_SD = x_SD[torch.isfinite(x_SD).all(-1)]
    blocks = torch.nn.functional.pad(x_SD.unsqueeze(1), (0, 0, 0, scheme.block - 1))
    # Where a write has one scale each has one token; some will do, and of long blocks some as well.
    for write in blocks[::29].split(1) if whole_write(scheme) else (blocks[:: 1 if scheme.block == 1 else 5],):
        within(scheme, write.flatten(0, 1)[None, None], spec)


@law(Over.BOUNDED, RESCALE)
def any_magnitude_stays_within_the_bound(scheme: Scheme) -> None:
    """Check the bound on values of every magnitude of float32 with an outlier of another, so that scales are denormal or overflow.

    Raises Unlike.
    """
    spec = fitting(scheme, heads=1)
    base, outlier = torch.meshgrid(torch.tensor(FLOAT32_STEPS, device="cpu"), torch.tensor(OUTLIER_STEPS, device="cpu"), indexing="ij")
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(base.numel(), spec.head_dim, generator=generator, dtype=torch.float64, device="cpu") * 2 - 1
    x *= 2.0 ** base.flatten()[:, None]
    rows = torch.arange(base.numel(), device="cpu")
    loud = 1 + torch.rand(base.numel(), generator=generator, dtype=torch.float64, device="cpu") / 2
    x[rows, rows % spec.head_dim] = 2.0 ** outlier.flatten() * loud
    for dtype in DTYPES:
        _each_within(scheme, x.to(torch.float32).to(dtype), fitting(scheme, dtype, heads=1))


@law(Over.BOUNDED, "round to the nearest level; a value halfway between two may go to either")
def ties_stay_within_the_bound(scheme: Scheme) -> None:
    """Check the bound on values halfway between two neighboring levels, under scales that are powers of two; raises Unlike."""
    spec, rows = fitting(scheme, heads=1), []
    generator = torch.Generator().manual_seed(4)
    for qmax in (7, 127, 448):
        for power in range(-20, 21, 4):
            halves = torch.randint(-2 * qmax, 2 * qmax + 1, (spec.head_dim,), generator=generator, device="cpu") / 2
            halves[0] = qmax
            rows.append(halves * 2.0**power)
    _each_within(scheme, torch.stack(rows), spec)


@law(Over.SETTINGS, RESCALE)
def range_covers_float16(scheme: Scheme) -> None:
    """Check that the bound covers every float16: ``largest`` is at least the dtype's maximum; raises Unlike."""
    if scheme.largest < torch.finfo(torch.float16).max:
        unlike(f"`largest` of {torch.finfo(torch.float16).max} or more", scheme.largest)


@law(Over.SETTINGS, "let `layout` announce the planes that `encode` returns: as many, in its order, of its widths, rows and dtypes")
def encode_returns_the_planes_of_the_layout(scheme: Scheme) -> None:
    """Check that ``encode`` returns one tensor [B, K, S or S / block, width] for each growing plane of the layout; raises Unlike."""
    for dtype in DTYPES:
        spec = fitting(scheme, dtype)
        announced = scheme.layout(spec).planes[: scheme.layout(spec).encoded]
        tokens = -(-7 // scheme.block) * scheme.block
        expected = [((3, spec.heads, tokens * plane.rows // PAGE, plane.width), plane.dtype) for plane in announced]
        planes = scheme.encode(whole_blocks(scheme, normal(3, spec.heads, 7, spec.head_dim, dtype=dtype)))
        found = [(tuple(plane.shape), plane.dtype) for plane in planes]
        if found != expected:
            unlike(f"planes {expected}", found)


@law(Over.SETTINGS, "give a group whose values are all the same a scale that is not divided by, and codes that decode to them")
def zeros_come_back_as_zeros(scheme: Scheme) -> None:
    """Check that encoded zeros of both signs decode to zero; raises Unlike."""
    for dtype in DTYPES:
        spec = fitting(scheme, dtype)
        zeros = torch.zeros(2, spec.heads, 5, spec.head_dim, dtype=dtype, device="cpu")
        for x in (zeros, -zeros):
            found = round_trip(scheme, x, spec)
            if not torch.equal(found, zeros.to(torch.float64)):
                unlike("zeros", f"values up to {float(found.abs().max()):.3g} ({dtype})")


@law(Over.SETTINGS, "make the scale of a group NaN where a value of it is NaN or Inf: a code has no room for either, and must not hide it")
def nan_and_inf_never_become_numbers(scheme: Scheme) -> None:
    """Check that NaN or Inf in one value never decodes to a number, and that only values that share its scale change; raises Unlike."""
    for dtype in DTYPES:
        spec = fitting(scheme, dtype)
        clean = normal(3, spec.heads, 9, spec.head_dim, dtype=dtype)
        before, fmt = round_trip(scheme, clean, spec), scheme.format(spec)
        for poison in (float("nan"), float("inf"), float("-inf")):
            x = clean.clone()
            x[1, 0, 4, 3] = poison
            after = round_trip(scheme, x, spec)
            changed = bits(before.unsqueeze(-1)).ne(bits(after.unsqueeze(-1))).any(-1)
            if torch.isfinite(after[1, 0, 4, 3]) or torch.isfinite(after[changed]).any():
                numbers = int(torch.isfinite(after[changed]).sum())
                unlike(f"no number where {poison} was", f"{float(after[1, 0, 4, 3])}, and {numbers} numbers of its group that changed")
            shared = torch.zeros_like(changed)
            block = slice(4 // fmt.block * fmt.block, (4 // fmt.block + 1) * fmt.block)
            # A norm covers all channels of its token, and so through their scales all of the block.
            channels = slice(None) if fmt.norms else slice(3 // fmt.group * fmt.group, (3 // fmt.group + 1) * fmt.group)
            shared[1, 0, block, channels] = True
            if whole_write(scheme):
                shared[1] = True
            if changed[~shared].any():
                unlike("no change outside of the group that `format` names", f"{int(changed[~shared].sum())} values that changed")


@law(Over.SETTINGS, "let codes depend on values of their own block and head alone, or say otherwise by `block` and `by_token`")
def a_block_is_encoded_alone(scheme: Scheme) -> None:
    """Check that large values in other rows, heads and blocks change no code of a block; raises Unlike.

    If a write has one scale for all of its tokens (``whole_write``), only other batch rows are checked.
    """
    spec, block = fitting(scheme), scheme.block
    x = normal(3, spec.heads, 9 * block, spec.head_dim)
    loud = x.clone()
    loud[0] *= 1e4
    if not whole_write(scheme):
        loud[2, 1] *= -1e4
        loud[2, 0, : 4 * block] = float("nan")
        loud[2, 0, 5 * block :] = 0.0
    layout = scheme.layout(spec)
    for a, b, plane in zip(scheme.encode(x), scheme.encode(loud), layout.planes[: layout.encoded], strict=True):
        if not torch.equal(bits(a[1]), bits(b[1])):
            unlike("the same codes whatever other batch rows hold", f"others in the plane {plane.name!r}")
        rows = slice(4 * block * plane.rows // PAGE, 5 * block * plane.rows // PAGE)
        if not whole_write(scheme) and not torch.equal(bits(a[2, 0, rows]), bits(b[2, 0, rows])):
            unlike("the same codes whatever other blocks and heads hold", f"others in the plane {plane.name!r}")


@law(Over.SETTINGS, "use operations that go by shape, not by memory: projections hand over [B, S, K, D] with two dims exchanged")
def strides_do_not_matter(scheme: Scheme) -> None:
    """Check that a transposed view and its contiguous copy have equal codes and scales; raises Unlike."""
    spec = fitting(scheme)
    x_BKSD = normal(2, 3 * scheme.block, spec.heads, spec.head_dim).transpose(1, 2)
    for index, (a, b) in enumerate(zip(scheme.encode(x_BKSD), scheme.encode(x_BKSD.contiguous()), strict=True)):
        if not torch.equal(bits(a), bits(b)):
            unlike("the same codes of a view and of its copy", f"others in plane {index}")


@law(Over.DEFAULT, "leave `decode` as it is and change `format`: kernels decode by the format alone")
def decode_is_what_the_format_says(scheme: Scheme) -> None:
    """Check that ``decode`` equals ``Scheme.decode``, which follows ``format``, as printed kernels do; raises Unlike.

    A scheme with an attention of its own is not checked: no printed kernel reads its format.
    """
    spec = fitting(scheme)
    if scheme.attention != Scheme.attention:
        return
    for made in halves(scheme):
        planes = made.encode(whole_blocks(made, normal(2, spec.heads, 9, spec.head_dim)))
        if not torch.equal(bits(made.decode(planes, spec)), bits(Scheme.decode(made, planes, spec))):
            unlike("the values that `format` decodes to", "others")


def halves(scheme: Scheme) -> tuple[Scheme, ...]:
    """Return the scheme of keys and, if it differs, the scheme of values."""
    return tuple(dict.fromkeys(scheme.for_role(role) for role in Role))
