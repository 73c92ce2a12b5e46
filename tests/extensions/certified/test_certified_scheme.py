"""The certified encoding alone: its radius, its notes, its bytes, its options; and that the compiler refuses it while it cannot take it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.errors import BadOption, HeadDimNotDivisible
from kvcompile.extensions.certified.scheme import BLOCK, ORIGINALS, Certified
from kvcompile.lowering.certificate.bound_printer import aten
from kvcompile.schemes import parse
from kvcompile.schemes.certificate import bounds
from kvcompile.schemes.certificate.policy import EXACT, NAIVE, Certify, Fallback, parse_policy
from kvcompile.testing.bounds import bound_of
from kvcompile.testing.samples import DTYPES, normal, round_trip, slot
from kvcompile.types import PAGE, KeyOrValue, Role, SlotSpec

NOTES = 3
"""Which plane."""

pytestmark = pytest.mark.usefixtures("one_thread")

each_role = pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def awkward(role: Role, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Channels far from zero, of no range, of many magnitudes."""
    draw = torch.Generator().manual_seed(seed)
    x = normal(2, 2, 64, 32, seed=seed)
    x[..., 0] += 1000
    x[..., 1] = -7.25
    x[:, :, 16:32] *= 10.0 ** (torch.rand(32, generator=draw) * 8 - 5)
    return x.clamp(-3e4, 3e4).to(dtype)


@each_dtype
@each_role
def test_round_trip_is_within_the_bound(role: Role, dtype: torch.dtype) -> None:
    scheme, spec = Certified().for_role(role), slot(2, 32, dtype, role)
    for seed in range(20):
        x = awkward(role, seed, dtype)
        assert ((round_trip(scheme, x, spec) - x.to(torch.float64)).abs() <= bound_of(scheme, x, spec)).all()


@given(st.integers(0, 10**6), st.integers(-44, 36), st.sampled_from([0.0, 1.0, 1e3, 1e6]))
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_a_key_channel_is_within_its_printed_radius(seed: int, power: int, offset: float) -> None:
    x = (normal(1, 2, 32, 16, seed=seed) + offset) * 10.0**power
    if not torch.isfinite(x * 4).all():
        return
    scheme = Certified().for_role(Role.KEY)
    codes, step, zero, _, _ = scheme.encode(x)
    error = (round_trip(scheme, x, slot(2, 16)) - x.to(torch.float64)).abs()
    radius = aten(bounds.RADIUS)(step=step, zero=zero.abs()).repeat_interleave(BLOCK, 2)
    assert (error <= radius).all()
    assert codes.min() >= -128 and codes.max() <= 127


def test_radius_is_not_vacuous() -> None:
    x = normal(4, 8, 256, 64)
    scheme = Certified().for_role(Role.KEY)
    _, step, zero, _, _ = scheme.encode(x)
    radius = aten(bounds.RADIUS)(step=step, zero=zero.abs()).repeat_interleave(BLOCK, 2)
    assert ((round_trip(scheme, x, slot(8, 64)) - x).abs() / radius).max() > 0.99


@each_dtype
@each_role
def test_notes_are_not_below_the_norms_and_hardly_above(role: Role, dtype: torch.dtype) -> None:
    scheme, spec = Certified().for_role(role), slot(2, 32, dtype, role)
    for seed in range(10):
        x = awkward(role, seed, dtype)
        notes = scheme.encode(x)[NOTES].to(torch.float64)
        residual = x.to(torch.float64) - round_trip(scheme, x, spec)
        for note, of in zip(notes.unbind(-1), (residual, x.to(torch.float64)), strict=True):
            norm = torch.linalg.vector_norm(of, dim=-1).unflatten(-1, (-1, BLOCK)).amax(-1)
            assert (note >= norm).all() and (note <= norm * (1 + 2.0**-20) + 2.0**-140).all()


@each_role
def test_what_is_not_finite_never_becomes_a_number(role: Role) -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = normal(1, 1, 32, 16)
        x[0, 0, 3, 5] = bad
        scheme = Certified().for_role(role)
        decoded, notes = round_trip(scheme, x, slot(1, 16, role=role)), scheme.encode(x)[NOTES]
        assert not torch.isfinite(decoded[0, 0, 3, 5])
        assert torch.isnan(notes[0, 0, 0]).all() and torch.isfinite(notes[0, 0, 1]).all()


def test_bytes_are_the_sources_and_one_more_for_all_notes() -> None:
    """The source counts 288 bytes a token and head at D = 128, without its annotation; notes are 16 bytes a block. And the originals."""
    layouts = [Certified().layout(slot(8, 128, torch.bfloat16, role)) for role in Role]
    assert sum(layout.bytes_per_page for layout in layouts) == (289 + 512) * PAGE
    for layout, role in zip(layouts, Role, strict=True):
        encoded = Certified().for_role(role).encode(normal(1, 8, PAGE, 128, dtype=torch.bfloat16))
        assert sum(plane.nbytes for plane in encoded) == 8 * layout.bytes_per_page
        for plane, announced in zip(encoded, layout.planes, strict=False):
            assert (plane.dtype, plane.shape[2:]) == (announced.dtype, (announced.rows, announced.width))
        assert layout.planes[layout.encoded - 1].name == ORIGINALS
        names = [plane.name for plane in layout.planes[layout.encoded :]]
        assert names == ["window", "clock", "telemetry"][: 3 if role is Role.KEY else 2]
        assert next(plane.rows for plane in layout.planes if plane.name == "window") == BLOCK


def test_values_need_whole_groups() -> None:
    with pytest.raises(HeadDimNotDivisible):
        Certified().check(slot(1, 40, role=Role.VALUE))
    Certified().check(slot(1, 40, role=Role.KEY))


def test_bad_options_are_refused() -> None:
    for options in (
        {"group": 7}, {"group": 0}, {"group": 128}, {"key_or_value": 3}, {"certify": ""},
        {"certify": "v_tol"}, {"certify": "v_tol:-1"}, {"certify": "hope:1"}, {"certify": "k_min:x"},
    ):
        with pytest.raises(BadOption):
            Certified(**options)  # type: ignore[arg-type]
    assert Certified().for_role(Role.VALUE).key_or_value is KeyOrValue.VALUE
    assert Certified(key_or_value=KeyOrValue.VALUE).for_role(Role.KEY).key_or_value is KeyOrValue.VALUE


def test_originals_alone_go_to_the_host() -> None:
    for role in Role:
        planes = parse("certified(tier2=host)").for_role(role).layout(SlotSpec(2, 64, torch.bfloat16, role)).planes
        assert [plane.name for plane in planes if plane.host] == [ORIGINALS]
        assert not any(plane.host for plane in parse("certified").for_role(role).layout(SlotSpec(2, 64, torch.bfloat16, role)).planes)


def test_a_policy_is_an_option_of_the_scheme() -> None:
    made = parse("certified(certify=v_tol:0.02/rank:0)")
    assert isinstance(made, Certified) and parse_policy(made.certify) == Certify(v_tol=0.02, rank=0)
    assert parse(made.spec()) == made


@pytest.mark.parametrize("policy", [
    Certify(), EXACT, NAIVE, Certify(key_budget=1e-3, value_budget=0.0, fallback=Fallback.REPORT, explore=0.05, k_min=0, k_max=0),
], ids=lambda policy: policy.spec())
def test_a_policy_survives_its_spelling(policy: Certify) -> None:
    assert parse_policy(policy.spec()) == policy


def test_bad_policies_are_refused() -> None:
    assert Certify(fallback="report").fallback is Fallback.REPORT  # type: ignore[arg-type]
    for option in ("tau_cov", "explore", "guard", "key_budget", "v_tol", "value_budget"):
        for value in (-1e-9, math.nan, "1", None, True):
            with pytest.raises(BadOption) as caught:
                Certify(**{option: value})
            assert option in str(caught.value) and caught.value.facts["todo"]
    for options in (
        {"k_min": -1}, {"k_min": 3, "k_max": 2}, {"k_max": 2.5}, {"k_min": None}, {"widen": 17}, {"rank": True}, {"tau_cov": 1.01},
        {"explore": 2}, {"fallback": "hope"}, {"fallback": None},
    ):
        with pytest.raises(BadOption):
            Certify(**options)  # type: ignore[arg-type]
