"""gauss: its levels are Lloyd's and Max's, its error is theirs, and keys and values may have different bits in every cache."""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist

import pytest
import torch
from constant_planes import stores_after_two_requests

from kvcompile.errors import BadOption, HeadDimNotDivisible
from kvcompile.schemes import parse
from kvcompile.schemes.gauss import ABOVE_ZERO, LEVELS, Gauss
from kvcompile.schemes.rotation import rotate, unrotate
from kvcompile.types import Role, SlotSpec

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

PUBLISHED = {
    2: (0.4528, 1.510), 3: (0.2451, 0.7560, 1.344, 2.152), 4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}
"""Table I of Max's paper, N = 4, 8 and 16."""

DISTORTION = {2: 0.1175, 3: 0.03454, 4: 0.009497}
"""Its mean square errors."""


def slot(head_dim: int = 64, dtype: torch.dtype = torch.float32, role: Role = Role.KEY) -> SlotSpec:
    return SlotSpec(2, head_dim, dtype, role)


def mean_between(low: float, high: float) -> float:
    """The mean of a standard normal variable between two positive numbers, by its density and the error function's complement."""
    density, above = NormalDist().pdf, (lambda x: math.erfc(x / math.sqrt(2)) / 2)
    return (density(low) - density(high)) / (above(low) - above(high))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_a_fixed_point_and_the_published_ones(bits: int) -> None:
    levels = ABOVE_ZERO[bits]
    edges = [0.0, *((low + high) / 2 for low, high in itertools.pairwise(levels)), math.inf]
    means = [mean_between(low, high) for low, high in itertools.pairwise(edges)]
    assert levels == pytest.approx(means, abs=1e-13)
    assert levels == pytest.approx(PUBLISHED[bits], abs=6e-4)
    assert LEVELS[bits] == tuple(sorted(LEVELS[bits])) and LEVELS[bits] == tuple(-level for level in reversed(LEVELS[bits]))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_error_is_that_of_a_normal_variable(bits: int) -> None:
    """Of tokens whose channels are nothing like it, behind the rotation too."""
    made, spec = Gauss(bits), slot(128)
    normal = torch.randn(1, 2, 2000, 128, generator=torch.Generator().manual_seed(bits))
    heavy = normal**3 * torch.logspace(-3, 3, 2000)[:, None]
    for x, tolerance in ((normal, 0.02), (rotate(heavy, 128, None), 0.1)):
        found = made.decode(made.encode(x), spec)
        shares = (found - x).square().sum(-1) / x.square().sum(-1)
        assert float(shares.mean()) == pytest.approx(DISTORTION[bits], rel=tolerance)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_channel_becomes_the_nearest_level(bits: int) -> None:
    x = torch.randn(1, 2, 300, 128, generator=torch.Generator().manual_seed(9)) * 7
    made, levels = Gauss(bits), torch.tensor(LEVELS[bits], dtype=torch.float64)
    codes, norm = made.encode(x)
    u = x.double() / norm.double()
    nearest = levels[(u.unsqueeze(-1) - levels).abs().argmin(-1)]
    assert set(nearest.flatten().tolist()) == set(levels.tolist())
    torch.testing.assert_close(made.decode((codes, norm), slot(128)).double(), nearest * norm.double(), rtol=1e-6, atol=0)


def test_bits_stored() -> None:
    assert [Gauss(bits).bits_per_value(slot(128, torch.bfloat16)) for bits in (2, 3, 4)] == [2.125, 3.125, 4.125]


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_zeros_and_what_is_not_finite(dtype: torch.dtype, scale_dtype: str) -> None:
    made, spec = parse(f"gauss(scale_dtype={scale_dtype})"), slot(64, dtype)
    x = torch.randn(1, 2, 6, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[:, :, 0], x[:, :, 1, 5], x[:, :, 2, 63], x[:, :, 3] = 0.0, math.nan, -math.inf, 2.0**-20
    x[:, :, 4] = 60000.0
    found = made.decode(made.encode(x), spec)
    assert torch.equal(found[:, :, 0], torch.zeros_like(found[:, :, 0]))
    assert found[:, :, 1:3].isnan().all() and found[:, :, 3:].isfinite().all()
    # Equal channels are one standard deviation from zero: at 4 bits the nearest level is at 0.94. 2^-20 is in float16's subnormal numbers.
    assert ((found[:, :, 3] * 2**20 - 1).abs() <= 0.15).all() and ((found[:, :, 4] / 60000 - 1).abs() <= 0.15).all()


@pytest.mark.parametrize(("head_dim", "order"), [(16, 16), (80, 16), (96, 32), (128, 128), (256, 128)])
def test_heads_that_are_no_power_of_two_are_rotated_in_blocks(head_dim: int, order: int) -> None:
    made, spec = Gauss(3), slot(head_dim)
    made.check(spec)
    rotation = made.rotation(spec)
    assert rotation is not None and rotation.order == order
    x = torch.randn(1, 2, 50, head_dim, generator=torch.Generator().manual_seed(1))
    found = unrotate(made.decode(made.encode(rotate(x, order, None)), spec), order, None)
    assert float((found - x).square().sum() / x.square().sum()) <= 0.05


@pytest.mark.parametrize("head_dim", [8, 12, 40, 67])
def test_heads_without_a_block_are_refused(head_dim: int) -> None:
    with pytest.raises(HeadDimNotDivisible, match=f"found head dim {head_dim}"):
        Gauss().check(slot(head_dim))


@pytest.mark.parametrize("options", [{"bits": 5}, {"bits": 8}, {"scale_dtype": torch.int8}])
def test_other_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(BadOption, match="gauss"):
        Gauss(**options)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize(("policy", "error"), [
    ("gauss", 0.15), ({"k": "gauss", "v": "gauss(bits=3)"}, 0.25), ({"k": "gauss(bits=3,sinks=4)", "v": "gauss(bits=2,sinks=4)"}, 0.5),
    ({"k": "kivi(bits=4)", "v": "gauss"}, 0.15),
], ids=str)
def test_two_requests_of_a_model(policy: object, error: float, kind: str) -> None:
    for store in stores_after_two_requests(policy, kind, error, "gauss"):
        at = next(index for index, plane in enumerate(store.spec.layout.planes) if plane.constant)
        assert torch.equal(store.planes[at], torch.tensor(LEVELS[store.spec.scheme.bits]).expand_as(store.planes[at]))
