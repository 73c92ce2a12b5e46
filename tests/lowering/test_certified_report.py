"""Certificates of schemes without originals: no head-step of any bounded scheme is further from float64 than what is reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from registry import VARIANTS

from benchmarks.extensions.certified.certified_soundness import CASES, Draw, Inputs, Shape, distance, paged
from kvcompile.errors import NotBounded
from kvcompile.lowering.certificate.bound_printer import aten
from kvcompile.lowering.certificate.report import Errors, decoded_with_radius, report_step
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import attend_body
from kvcompile.schemes import Scheme, parse
from kvcompile.schemes.certificate.bounds import Bound, BoundUnit, Outward
from kvcompile.schemes.certificate.policy import Certify
from kvcompile.schemes.gauss import Gauss
from kvcompile.testing.bounds import bound_of
from kvcompile.testing.samples import fitting, round_trip, slot, whole_blocks
from kvcompile.types import PAGE, Role

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = ("dense", "int8", "fp8", "int4", "int8(scale_dtype=bfloat16)", "int4(group=16)", "kivi", "kivi(bits=4)", "kivi(bits=3)")
PAIRS = (*((name, name) for name in SCHEMES), ("fp8", "int4"), ("int8", "kivi"))


def planes_of(scheme: Scheme, x_BKTD: torch.Tensor) -> list[torch.Tensor]:
    """Encoded whole pages."""
    pages = x_BKTD.shape[2] // PAGE
    return [paged(plane, pages) for plane in scheme.encode(x_BKTD)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_no_head_step_is_beyond_what_is_reported(case: Callable[[Draw, Shape], Inputs]) -> None:
    shape, nearest, head_steps = Shape(B=2, H=4, K=2, S=16, D=64, T=192), 0.0, 0
    for number, (dtype, exact) in enumerate((d, e) for d in (torch.float32, torch.bfloat16) for e in (0, 40)):
        inputs = case(Draw(number), shape)
        for keys_by, values_by in PAIRS:
            step, k, v = inputs.step(Certify(), dtype)
            ks, vs = parse(keys_by).for_role(Role.KEY), parse(values_by).for_role(Role.VALUE)
            keys, values = planes_of(ks, k), planes_of(vs, v)
            exact_newest, base = None, None
            if exact:
                base = torch.tensor([shape.T - exact])
                exact_newest = [k[:, :, -exact:], v[:, :, -exact:]]
                for plane in (keys[0], values[0]):
                    # Whole blocks behind the last one that any token is read from.
                    plane[-1, :, :, 32:] = 0 if not plane.is_floating_point() else float("nan")
            fixed = step.bias, step.sinks
            common = (step.hi, step.lo, step.keep, *fixed)
            operands = AttendOperands(
                step.q, keys, values, *common, ks.spec(), vs.spec(), step.scale, step.softcap, shape.D, exact_newest, base
            )
            output = attend_body(operands)
            found, _ = report_step(output, operands)
            bound, error = sum(found), distance(output, step.exact(k, v))
            fine = (error <= bound) | ~torch.isfinite(output).all(-1)
            assert fine.all(), f"{keys_by}, {values_by}, {dtype}: {int((~fine).sum())} head-steps"
            assert torch.isfinite(bound[torch.isfinite(output).all(-1)]).all()
            nearest = max(nearest, float(torch.where(torch.isfinite(error), error / bound, 0).max()))
            head_steps += error.numel()
    assert head_steps == 4 * len(PAIRS) * 2 * 4 * 16
    assert nearest > 0.02, "certificates that nothing comes near prove little"


@pytest.mark.parametrize("scheme", [item for item in VARIANTS if item.certifying("rank:1") is None], ids=Scheme.spec)
def test_a_radius_by_what_is_stored_bounds_and_is_not_above_the_announced_bound(scheme: Scheme) -> None:
    """The announced bound allows for any rounding of the scale; the radius knows the scale."""
    spec = fitting(scheme)
    if scheme.radius(spec) is None:
        # What is stored does not tell a value that was clipped from one at the edge of a range that was given, and a norm does not tell
        # whether one channel has all of it.
        assert scheme.bound(spec) is None or scheme.format(spec).static or isinstance(scheme, Gauss)
        with pytest.raises(NotBounded, match="another scheme"):
            decoded_with_radius(scheme, [], spec)
        return
    x = whole_blocks(scheme, Draw(3).normal(2, spec.heads, 4 * PAGE, spec.head_dim) * 10 ** (4 * Draw(4).uniform(2, spec.heads, 1, 1) - 2))
    if not scheme.format(spec).scaled:
        return
    planes = planes_of(scheme, x)
    decoded, radius = decoded_with_radius(scheme, planes, spec)
    error = (decoded.to(torch.float64) - x.to(torch.float64)).abs()
    assert (error <= radius).all() and torch.equal(decoded.to(torch.float64), round_trip(scheme, x, spec))
    # Without queries nothing is moved: squat's codes are kivi's, and only its announced bound has to allow for more.
    assert scheme.bound(spec) is None or (radius <= bound_of(scheme, x, spec) * (1 + 1e-4) + 1e-30).all()
    assert (error / radius).max() > 0.9


@pytest.mark.parametrize(
    "spelled", ["squat", "squat(subblock=16,rank=8)", "squat(bits=4,lam=100)", "squat(lam=0.001,rank=5,normalise=False)"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_certificate_follows_errors_that_moved_other_channels(spelled: str, dtype: torch.dtype) -> None:
    """Products with queries stay within ``along``, keys within ``every``; where they turn away from queries, far below kivi's bound."""
    scheme, spec, draw = parse(spelled).for_role(Role.KEY), slot(2, 64), Draw(7)
    # Queries of few directions, as a trained model's are, and keys that lie along them.
    basis = draw.normal(2, 6, 64)
    q = (draw.normal(2, 2, 3, 128, 6) @ basis[:, None] + 0.05 * draw.normal(2, 2, 3, 128, 64)).to(dtype)
    k = (draw.normal(2, 2, 128, 6) @ basis + draw.normal(2, 2, 128, 64)).to(dtype)
    moves = scheme.calibrate(q, None)[0]
    codes, scales, zeros = scheme.encode(k, moves)
    decoded, radius = decoded_with_radius(scheme, [paged(plane, 2) for plane in (codes, scales, zeros)], spec)
    errors = Errors.of(decoded, radius, moves[0])
    error = decoded.to(torch.float64) - k.to(torch.float64)
    assert (error.abs() <= errors.every()).all() and (error.abs() > radius).any()
    flat = q.flatten(2, 3).to(torch.float64)
    score, bound = (flat @ error.transpose(-1, -2)).abs(), errors.along(flat)
    assert (score <= bound).all()
    assert (score / bound).max() > 0.2, "bounds that nothing comes near prove little"
    if "lam=0.001" not in spelled:
        plain = parse(f"kivi(bits={scheme.bits})").for_role(Role.KEY)
        encoded = plain.encode(k)
        _, kivi = decoded_with_radius(plain, [paged(plane, 2) for plane in encoded], spec)
        assert bound.mean() < 0.7 * Errors.of(decoded, kivi, None).along(flat).mean()
    # Queries that look elsewhere, at single channels say, get the whole movement.
    assert (error.abs().transpose(-1, -2) <= errors.along(torch.eye(64, dtype=torch.float64).expand(2, 2, -1, -1))).all()


def test_a_radius_that_is_too_small_would_be_noticed() -> None:
    scheme, spec = parse("int4"), slot(2, 64)
    x = Draw(5).normal(1, 2, PAGE, 64)
    decoded, radius = decoded_with_radius(scheme, planes_of(scheme, x), spec)
    assert ((decoded - x).abs() > 0.9 * radius).any()
    assert aten(Bound("any", scheme.radius(spec), Outward.UP, BoundUnit.CHANNEL, "1"))(step=torch.ones(())) >= 0.5
